"""``kvfabric demo`` as a newcomer runs it: two nodes, NIXL, five models, faults, a clean terminal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import IO, Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from kvfabric.actors import sweeper
from kvfabric.engines.commands import Family, register
from kvfabric.engines.transformers.demo import command
from kvfabric.engines.transformers.demo.records import FaultRun, Outcome, Run
from kvfabric.engines.transformers.demo.report import WIDTH, plain, show
from kvfabric.engines.transformers.demo.story import ALIGNED, FAULT_RAGGED, RAGGED, SUFFIX_TOKENS
from kvfabric.engines.transformers.demo.words import in_words
from kvfabric.engines.transformers.geometry import geometry_of
from kvfabric.engines.transformers.tiny_models import FAMILIES, build
from kvfabric.fabric.kinds import LAYER_OF, Cause, ObjectKind, Reason, Status

KVFABRIC = Path(sys.executable).parent / "kvfabric"
TIMEOUT_S = 240

KEYS = {
    "model",
    "nodes",
    "runs",
    "resume_tokens",
    "logits_equal",
    "ttft_s",
    "bytes_moved",
    "transport",
    "faults",
}
FAULT_KEYS = {
    "kind",
    "fault",
    "hash_tokens",
    "granted_tokens",
    "status",
    "cause",
    "logits_equal",
    "tokens_wrong_if_reused_blindly",
}
OF_OTHERS = {"history_of_other_weights", "history_rope_layout"}
INDEXER = {"indexer_one_block_short", "indexer_of_other_weights", "indexer_other_rotation"}
WINDOW = {"window_one_row_short", "window_one_token_off"}
FAULTS = {
    "deepseek_v4": OF_OTHERS | INDEXER | WINDOW | {"tail_missing", "tail_one_token_short", "overlap_missing_aligned"},
    "gemma3": OF_OTHERS | WINDOW,
    "gpt_oss": OF_OTHERS | WINDOW,
    "deepseek_v3_2": OF_OTHERS | INDEXER,
    "qwen3_next": OF_OTHERS | {"state_missing", "state_of_previous_position", "state_transposed"},
}


ON_DISK = {
    "disk_not_restored": (("PENDING",), "restore_pending"),
    "disk_torn": (("PARTIAL_HIT", "INVALID"), "checksum_mismatch"),  # nothing is left where the group is all blocks
    "disk_page_table_stale": (("FULL_HIT",), "restored to other slots"),
}


def assert_on_disk(fault: dict[str, Any]) -> None:
    statuses, because = ON_DISK[fault["fault"]]
    assert set(fault) == FAULT_KEYS
    assert fault["status"] in statuses, fault
    assert because in fault["cause"], fault
    assert (fault["granted_tokens"] == fault["hash_tokens"]) is (fault["status"] == "FULL_HIT"), fault
    assert fault["logits_equal"] is True, fault
    assert 0 < fault["tokens_wrong_if_reused_blindly"] <= 32, fault


EVERY_RUN = {"deepseek_v4", "gpt_oss"}
"""Compressed layers with tails and an index; windows with sinks. The others take half a minute each and are long."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in EVERY_RUN else pytest.mark.long) for name in FAMILIES]
)
def test_a_model_resumes_on_the_other_node_and_no_fault_reaches_its_output(family: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [KVFABRIC, "demo", "--json", "--model", family], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    told: dict[str, Any] = json.loads(ran.stdout)
    assert set(told) == KEYS
    assert (told["model"], told["nodes"], told["transport"]) == (family, 2, "nixl")
    assert told["runs"] == [
        {"prefix_tokens": p, "resume_tokens": p, "computed_tokens": SUFFIX_TOKENS, "logits_equal": True}
        for p in (ALIGNED, RAGGED)
    ]
    assert told["resume_tokens"] == RAGGED
    assert told["logits_equal"] is True
    assert set(told["ttft_s"]) == {"recompute", "reuse"}
    assert all(seconds > 0 for seconds in told["ttft_s"].values())
    assert_bytes_moved(family, told["bytes_moved"])
    assert_faults(family, told["faults"])


def assert_bytes_moved(family: str, moved: dict[str, int]) -> None:
    """All that both positions need was moved, the history that they share once."""
    geometry = geometry_of(build(family)[0])
    first, second = geometry.required(ALIGNED), geometry.required(RAGGED)
    assert moved == {
        group.spec.name: len({*first[group.spec.name], *second[group.spec.name]}) * group.spec.block_bytes
        for group in geometry.groups
    }


def assert_faults(family: str, told: list[dict[str, Any]]) -> None:
    kinds = {str(group.spec.kind) for group in geometry_of(build(family)[0]).groups}
    assert {fault["fault"] for fault in told} == FAULTS[family] | set(ON_DISK)
    assert {fault["kind"] for fault in told} == kinds | {"disk_prefix"}
    for fault in told:
        if fault["fault"] in ON_DISK:
            assert_on_disk(fault)
            continue
        assert set(fault) == FAULT_KEYS
        assert fault["granted_tokens"] < fault["hash_tokens"], fault
        assert fault["granted_tokens"] > 0, fault
        assert fault["status"] == "PARTIAL_HIT", fault
        assert fault["cause"], fault
        assert fault["logits_equal"] is True, fault
        assert 0 < fault["tokens_wrong_if_reused_blindly"] <= 32, fault


def test_ctrl_c_ends_it_without_a_word_and_leaves_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(
        [KVFABRIC, "demo"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as demo:
        assert demo.stdout is not None
        until(demo.stdout, "loading")
        folder = folder_of_cluster(demo.pid)
        assert len(sweeper.marked(folder)) > 5
        os.killpg(demo.pid, signal.SIGINT)
        until(demo.stdout, "shutting down")
        os.killpg(demo.pid, signal.SIGINT)  # an impatient user breaks nothing off
        _, complaints = demo.communicate(timeout=TIMEOUT_S)
    assert (demo.returncode, complaints) == (130, "")
    assert sweeper.marked(folder) == []
    assert not Path(folder).exists()


def until(told: IO[str], words: str) -> None:
    """Read lines up to one with these words."""
    assert any(words in line for line in told)


def folder_of_cluster(driver: int) -> str:
    """The folder of the embedded cluster that this process started: its sweeper is told by argument."""
    for child in Path(f"/proc/{driver}/task/{driver}/children").read_text().split():
        with contextlib.suppress(OSError):
            arguments = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if any(argument.endswith(b"sweeper.py") for argument in arguments):
                return arguments[-2].decode()
    raise AssertionError("no sweeper among the driver's children")


def test_without_transformers_one_line_names_the_command_that_installs_it(tmp_path: Path) -> None:
    code = "import sys\nsys.modules['transformers'] = None\nfrom kvfabric.ops.cli import main\nmain(['demo'])\n"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode != 0
    assert ran.stdout == ""
    assert ran.stderr == (
        "error: the demo needs transformers, which is not installed: pip install 'kvfabric[engines]'\n"
    )


def test_registering_the_command_loads_no_engine_and_it_knows_the_families() -> None:
    code = (
        "import sys, typer\n"
        "from kvfabric.engines.commands import register\n"
        "register(typer.Typer())\n"
        "heavy = {'ray', 'torch', 'transformers', 'nixl'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    child = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (child.returncode, child.stderr) == (0, "")
    assert {str(family) for family in Family} == set(FAMILIES)


# --- what it prints ------------------------------------------------------------------------------

RUN = Run(
    prefix_tokens=960,
    resume_tokens=960,
    computed_tokens=8,
    logits_equal=True,
    status="FULL_HIT",
    cause="",
    recompute_s=0.1234,
    reuse_s=0.0123,
    moved_bytes={"csa": 30720},
    sources=("holder:a:0",),
    fence=4294967297,
    lease_left_s=29.9,
)
FAULT = FaultRun(
    fault="state_transposed",
    kind="compressed_history",
    group="csa",
    words="states stored [value, key] and read [key, value]",
    position=FAULT_RAGGED,
    hash_tokens=70,
    granted_tokens=32,
    status="PARTIAL_HIT",
    cause="csa: abi_mismatch, it was written in another layout than this reader's kernel reads",
    logits_equal=True,
    tokens_wrong=31,
)
OUTCOME = Outcome("deepseek_v4", 2, {"csa": "compressed_history"}, (RUN, RUN), (FAULT,), "nixl", 32)


def shown(outcome: Outcome) -> str:
    console = Console(file=StringIO(), width=WIDTH, highlight=False)
    show(outcome, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_the_tables_fit_into_a_hundred_columns_and_tell_everything() -> None:
    text = shown(OUTCOME)
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    flat = " ".join(text.split())
    for part in ("960", "8", "123.4 ms", "12.3 ms", "nixl", "4294967297", "in 30 s", "30,720", "70", "32", "31"):
        assert part in flat, part
    assert "[value," in flat
    assert "abi_mismatch" in flat
    assert "equal" in flat


@pytest.mark.parametrize("where", ["run", "fault"])
def test_one_differing_logit_anywhere_is_told_and_is_exit_status_1(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    register(app)
    differing = (
        replace(OUTCOME, runs=(RUN, replace(RUN, logits_equal=False)))
        if where == "run"
        else replace(OUTCOME, faults=(replace(FAULT, logits_equal=False),))
    )
    for outcome, status in ((OUTCOME, 0), (differing, 1)):
        monkeypatch.setattr(command, "run", lambda family, say, outcome=outcome: outcome)
        result = CliRunner().invoke(app, ["--json"])
        assert result.exit_code == status, result.output
        assert json.loads(result.output)["logits_equal"] is (status == 0)
        assert CliRunner().invoke(app, []).exit_code == status
    assert ("DIFFER" if where == "run" else "WRONG") in shown(differing)
    assert "must not happen" in shown(differing)


def test_the_json_object_sums_the_bytes_of_the_runs_and_times_the_longest() -> None:
    longer = replace(RUN, resume_tokens=1002, reuse_s=0.5, moved_bytes={"csa": 1000, "swa": 7})
    told = plain(replace(OUTCOME, runs=(longer, RUN)))
    assert told["resume_tokens"] == 1002
    assert told["ttft_s"] == {"recompute": RUN.recompute_s, "reuse": 0.5}
    assert told["bytes_moved"] == {"csa": 31720, "swa": 7}


def test_every_reason_has_words() -> None:
    model = geometry_of(build("gemma3")[0]).model_spec(weights="w")
    told = set()
    for reason in Reason:
        cause = Cause("kv", ObjectKind.COMPRESSED_HISTORY, LAYER_OF[reason], reason)
        words = in_words(model, Status.PARTIAL_HIT, cause)
        assert words.startswith(f"kv: {reason}, ")
        told.add(words.partition(", ")[2])
    assert len(told) == len(Reason)
    assert in_words(model, Status.FULL_HIT, None) == ""
    assert in_words(model, Status.MISS, None)

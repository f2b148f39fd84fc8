"""The policies bench: every figure that it promises, from one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvfabric.ops.bench import policies
from kvfabric.ops.cli import main
from kvfabric.ops.replay.trace import Trace, generate


def written(trace: Trace, file: Path) -> Path:
    """The trace as a file."""
    lines = [
        {"timestamp": r.at_s * 1000, "input_length": r.input_tokens, "output_length": r.output_tokens}
        | {"hash_ids": list(r.blocks)}
        for r in trace.requests
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_two_traces_give_every_named_figure_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(written(generate(60, seed), tmp_path / f"{seed}.jsonl")) for seed in (1, 2)]
    with pytest.raises(SystemExit):
        main(["bench", "policies", "--trace", *files, "--preset", "full_attention", "--json"])
    result = json.loads(capsys.readouterr().out)
    figures = {figure["name"]: figure for figure in result["figures"]}
    for seed in (1, 2):
        for share in policies.SHARES:
            where = f"{seed}.jsonl, full_attention, {share} %"
            hits = {name: figures[f"{where}: {name}"]["value"] for name in ("lru", "s3fifo", "default", "bound")}
            assert 0 < max(hits.values()) == hits["bound"]
            ratio = figures[f"{where}: default to the better"]
            assert ratio["value"] == pytest.approx(hits["default"] / max(1, hits["lru"], hits["s3fifo"]), abs=1e-4)
            assert (ratio["target"], ratio["holds"]) == (0.99, ratio["value"] >= 0.99)
        assert figures[f"{seed}.jsonl, full_attention, 25 %: gap to the bound closed"]["target"] == 0.25
        assert figures[f"{seed}.jsonl, full_attention, 50 %: share of the bound"]["target"] == 0.93
    assert figures["geometric mean: default to lru"]["target"] == 1.0
    assert figures["full_attention: replay speed"]["target"] == 100_000.0
    assert figures["full_attention: replay speed, on the clock"]["target"] is None

"""The commands of whoever operates a fabric, against a real one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvfabric import Fabric, Session
from kvfabric.fabric.kinds import FabricError, Reason
from kvfabric.ops.cli import main
from kvfabric.ops.doctor.checks import CHECKS, Level
from kvfabric.ops.doctor.command import examine

from . import stories


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """One command in this process: status, what it printed, what it complained of."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(words)
    told = capsys.readouterr()
    return int(ended.value.code or 0), told.out, told.err


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    status, out, err = run(capsys, *words, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def stored(session: Session, name: str) -> list[int]:
    mine = stories.prompt(name)
    assert session.publish(mine, stories.objects(session.model, mine)).ok
    return mine


def test_status_names_the_stages_and_both_rates(
    fabric: Fabric, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    lease = session.acquire(stored(session, "status")).lease
    assert lease is not None
    lease.release(reused_tokens=lease.tokens)
    assert lease.renew() is Reason.LEASE_EXPIRED  # the release has arrived
    found = asked(capsys, "status")
    assert found["fabric"] == "default"
    assert len(found["holders"]) == 2
    assert found["tokens"]["asked"] >= found["tokens"]["granted"] >= found["tokens"]["reused"] >= 64
    assert 0 < found["reused_hit_rate"] <= found["effective_hit_rate"] <= 1
    status, out, _ = run(capsys, "status")
    assert status == 0
    for word in ("pools by kind", "sliding_window", "effective_hit_rate", "grants"):
        assert word in out


def test_status_says_why_tokens_that_hashes_promise_were_not_granted(
    fabric: Fabric, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = stories.prompt("short of windows")
    objects = stories.objects(session.model, mine)
    assert session.publish(mine, {**objects, "swa": {}}).ok
    answer = session.acquire(mine)
    assert answer.cause is not None
    holders = asked(capsys, "status")["holders"]
    lost = {(one["kind"], one["reason"]): one for holder in holders for one in holder["lost_tokens"]}
    mine_lost = lost[answer.cause.kind, answer.cause.reason]
    assert mine_lost["tokens"] >= answer.hash_tokens - answer.tokens > 0
    assert mine_lost["requests"] >= 1
    _, out, _ = run(capsys, "status")
    assert "why tokens that hashes promise were not granted" in out
    assert re.search(rf"{answer.cause.reason} +{answer.cause.kind} +[\d,]+ +[\d.]+%", out)


def test_top_looks_as_often_as_it_is_told(fabric: Fabric, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "top", "--times", "2", "--every", "0.1")
    assert (status, err) == (0, "")
    assert "acquires/s" in out
    assert "pools by kind" in out


def test_top_tells_each_look_as_one_json_object_with_rates_from_the_second_on(
    fabric: Fabric, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = stored(session, "watched")
    status, out, err = run(capsys, "top", "--times", "2", "--every", "0.1", "--json")
    first, second = map(json.loads, out.splitlines())
    assert (status, err) == (0, "")
    assert first["rates"] == {}
    assert second["rates"]["acquires_per_s"] >= 0
    assert {h["address"] for h in second["holders"]} == {h["address"] for h in fabric.status()["holders"]}
    assert second["pools"]["sliding_window"]["slots"] > 0
    session.acquire(mine).cancel()


def test_a_live_lease_is_listed_until_it_is_released(
    fabric: Fabric, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    lease = session.acquire(stored(session, "listed"), lease_s=20).lease
    assert lease is not None
    mine = [one for one in asked(capsys, "leases")["leases"] if one["lease"] == lease.grant.lease]
    assert [(one["tokens"], one["ranks"]) for one in mine] == [(64, 1)]
    assert 0 < mine[0]["left_s"] <= 20
    lease.release()
    stories.eventually(
        lambda: asked(capsys, "leases")["leases"],
        lambda found: lease.grant.lease not in {one["lease"] for one in found},
    )


def test_a_bypass_answers_recompute_within_a_second_names_the_suspect_and_renews_nothing(
    fabric: Fabric, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = stored(session, "bypassed")
    lease = session.acquire(mine).lease
    assert lease is not None
    try:
        began = time.monotonic()
        assert asked(capsys, "bypass", "on", "--group", "swa")["bypassed"] is True
        answer = session.acquire(mine)
        assert time.monotonic() - began < 1.0
        assert answer.lease is None
        assert answer.cause is not None
        assert (answer.cause.group, answer.cause.reason) == ("swa", Reason.BYPASSED)
        assert lease.renew() is Reason.BYPASSED
        assert lease.check() is None  # it drains: what was granted stands until its deadline
        assert asked(capsys, "status")["bypassed"] is True
        findings = {f.check: f.level for f in examine(fabric)}
        assert findings["grants"] is Level.WARN
    finally:
        assert asked(capsys, "bypass", "off")["bypassed"] is False
    again = session.acquire(mine)
    assert again.lease is not None
    assert lease.renew() is None
    again.lease.release()
    lease.release()


def test_bypass_by_model_means_every_fabric_of_it_and_no_other(
    fabric: Fabric, side: Fabric, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        done = asked(capsys, "bypass", "on", "--model", "hybrid")
        assert {"default", "side"} <= set(done["fabrics"])
        assert side.status()["bypassed"] is True
    finally:
        run(capsys, "bypass", "off", "--model", "hybrid")
    assert side.status()["bypassed"] is False
    status, _, err = run(capsys, "bypass", "on", "--model", "nobody's")
    assert status == 2
    assert err.startswith("error: --model nobody's: no fabric of this model runs")


def test_a_group_that_the_model_lacks_is_refused(fabric: Fabric) -> None:
    with pytest.raises(FabricError, match="has no group 'nothing'"):
        fabric.bypass(True, group="nothing")
    assert fabric.status()["bypassed"] is False


def test_doctor_finds_a_healthy_fabric_well(fabric: Fabric, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "doctor", "--json")
    told = json.loads(out)
    assert {f["check"] for f in told["findings"]} == set(CHECKS)
    assert [f for f in told["findings"] if f["level"] == "fail"] == []
    assert (status, told["healthy"]) == (0, True)


def test_doctor_names_a_link_that_could_not_start_and_what_to_do(side: Fabric) -> None:
    found = [f for f in examine(side) if f.check == "links"]
    assert found
    assert all(f.level is Level.WARN and "nixl is not used" in f.detail and "pip show" in f.remedy for f in found)


def test_without_such_a_fabric_the_status_is_3_and_one_line_says_what_to_do(
    fabric: Fabric, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["status"], ["down"], ["leases"], ["doctor"], ["weights", "advance", "v2"]):
        status, out, err = run(capsys, *words, "--fabric", "nobody")
        assert (status, out) == (3, "")
        assert err.startswith("error: no fabric 'nobody' runs on this cluster")
        assert err.count("\n") == 1


def test_a_purged_chain_is_proven_gone_from_both_nodes(
    fabric: Fabric, session: Session, away: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mine = stored(session, "purged")
    other = stored(session, "kept")
    granted = away.do(acquired_there, mine)  # a copy on the other node, under a live lease
    assert granted == 64
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(mine))
    told = asked(capsys, "purge", "--chain", str(file))
    assert (told["left"], told["unanswered"], told["holders"]) == (0, [], 2)
    assert told["objects"] > 20
    assert told["leases"] >= 1
    assert session.acquire(mine).tokens == 0
    assert away.do(reads_there) is Reason.VERSION_CHANGED
    kept = session.acquire(other)
    assert kept.lease is not None
    kept.lease.release()
    assert asked(capsys, "purge", "--chain", str(file))["objects"] == 0


def acquired_there(kept: dict[str, Any], tokens: list[int]) -> int:
    import kvfabric

    kept["purging"] = kvfabric.connect("default")
    kept["purged"] = kept["purging"].acquire(tokens).lease
    return int(kept["purged"].tokens)


def reads_there(kept: dict[str, Any]) -> Any:
    return kept["purged"].check()


@pytest.mark.parametrize(
    "words",
    [(), ("--tenant", "a", "--namespace", "00" * 32), ("--namespace", "xyz")],
    ids=["nothing", "two", "no digest"],
)
def test_a_purge_of_nothing_or_of_two_things_is_refused(
    fabric: Fabric, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    status, out, err = run(capsys, "purge", *words)
    assert (status, out, err.count("\n")) == (2, "", 1)


def test_an_audits_mismatch_bars_the_chain_everywhere_until_it_is_stored_anew(
    fabric: Fabric, session: Session, away: Any
) -> None:
    mine = stored(session, "audited")
    assert away.do(acquired_there, mine) == 64
    lease = session.acquire(mine).lease
    assert lease is not None
    assert not session.audit_due(lease)  # audit_fraction is 0
    assert session.audited(mine, lease, "mismatch") is None
    assert lease.check() is Reason.VERSION_CHANGED
    assert away.do(reads_there) is Reason.VERSION_CHANGED
    answer = session.acquire(mine)
    assert answer.cause is not None
    assert (answer.tokens, answer.cause.reason) == (0, Reason.QUARANTINED)
    stored(session, "audited")
    again = session.acquire(mine)
    assert again.lease is not None
    again.lease.release()


def test_a_drain_of_a_node_that_is_none_is_refused_in_one_line(
    fabric: Fabric, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "drain", "no-such-node")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "0 nodes of the cluster" in err


def test_each_holder_and_the_supervisor_write_lines_of_json_beside_rays_logs(
    fabric: Fabric, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray._private.worker import global_worker

    assert global_worker.node is not None
    folder = Path(global_worker.node.get_logs_dir_path())
    mine = stories.prompt("logged, and never stored")
    session.acquire(mine)

    def lines(pattern: str) -> list[dict[str, Any]]:
        return [json.loads(line) for file in folder.glob(pattern) for line in file.read_text().splitlines()]

    def mine_among(found: list[dict[str, Any]]) -> bool:
        return any(told["event"] == "acquire" and told["asked_tokens"] == len(mine) for told in found)

    found = stories.eventually(lambda: lines("kvfabric-default-holder-*.jsonl"), mine_among)
    for told in found:
        assert told["fabric"] == "default"
        assert told["holder"].startswith("holder:")
        assert told["incarnation"] >= 1
        assert {"hash_tokens", "usable_tokens", "granted_tokens", "cause", "lease"} <= set(told) or told[
            "event"
        ] != "acquire"
    events = {told["event"] for told in lines("kvfabric-default-supervisor.jsonl")}
    assert {"process_start", "bypass"} <= events


def test_what_is_recorded_of_a_lease_replays_with_the_answers_that_were_given(
    fabric: Fabric, session: Session, away: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mine = stored(session, "recorded")
    lease = session.acquire(mine).lease
    assert lease is not None
    lease.release(reused_tokens=64)
    assert lease.renew() is Reason.LEASE_EXPIRED  # the release has arrived
    assert away.do(acquired_there, mine) == 64
    file = tmp_path / "recorded.yaml"
    told = asked(capsys, "record", str(lease.grant.lease), "--out", str(file))
    assert told["replay_agrees"] is True
    text = file.read_text()
    assert {"store", "acquire", "release"} <= set(re.findall(r"- \{(\w+):", text))
    assert str(mine[5]) not in text
    status, _, err = run(capsys, "record", "12345", "--out", str(file))
    assert (status, err.count("\n")) == (2, 1)
    assert "no holder remembers it" in err


def test_up_status_weights_and_down_from_processes_of_their_own(fabric: Fabric, ray: Any, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        "model: {groups: [{name: kv, kind: compressed_history, block_tokens: 16, block_bytes: 4096}]}\n"
        "memory_bytes: 1048576\nnode_resource: kvfabric_node_0\ntransport: {links: [tcp]}\n"
    )
    address = ray.get_runtime_context().gcs_address

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        kvfabric_command = str(Path(sys.executable).with_name("kvfabric"))
        program = [kvfabric_command, *words, "--fabric", "by-hand", "--address", address]
        return subprocess.run(program, capture_output=True, text=True, timeout=120, env=dict(os.environ))

    started = command("up", str(spec), "--set", "directory_shards=1")
    assert (started.returncode, started.stderr) == (0, "")
    assert started.stdout == "fabric by-hand is up: 1 holders, 1 directory shards\n"
    try:
        advanced = command("weights", "advance", "v2", "--json")
        assert json.loads(advanced.stdout) == {"fabric": "by-hand", "weights": "v2"}
    finally:
        ended = command("down")
    assert (ended.returncode, ended.stdout) == (0, "fabric by-hand is down\n")
    assert command("status").returncode == 3

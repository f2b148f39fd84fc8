"""The protocol on a simulated cluster: forty seeds are clean, and equal seeds run alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvfabric.ops.cli import main
from kvfabric.ops.simulate.faults import FAULTS
from kvfabric.ops.simulate.mutants import BY_NAME, SEEDS, STEPS_A_SEED
from kvfabric.ops.simulate.patches import Patches
from kvfabric.ops.simulate.run import GRANTS_PER_1000_MIN, RESTORES_PER_1000_MIN, Report, simulate


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    return [simulate(seed, STEPS_A_SEED) for seed in SEEDS]


def test_no_seed_breaks_a_law(reports: list[Report]) -> None:
    broken = [
        f"seed {r.seed}, step {r.failure.step}: {r.failure.law}: {r.failure.detail}" for r in reports if r.failure
    ]
    assert not broken, "\n".join(broken)
    assert len(reports) == 40
    assert all(r.steps >= STEPS_A_SEED and not r.wrong_reads and not r.slots_lost and not r.hangs for r in reports)


def test_what_is_simulated_is_worth_simulating(reports: list[Report]) -> None:
    steps = sum(r.steps for r in reports) / 1000
    assert sum(r.granted for r in reports) / steps >= GRANTS_PER_1000_MIN
    assert sum(r.restores for r in reports) / steps >= RESTORES_PER_1000_MIN
    counts = {name for r in reports for name, count in r.counts.items() if count}
    faults = {name for name in counts if name.startswith("fault ")}
    assert faults == {f"fault {fault.__name__}" for fault, _ in FAULTS}
    assert {"answers FULL_HIT", "answers PARTIAL_HIT", "answers PENDING", "answers INVALID", "answers MISS"} <= counts
    assert {"refused lease_expired", "refused holder_lost", "refused weights_mismatch"} <= counts


def plain(report: Report) -> dict[str, object]:
    return {k: v for k, v in report.plain().items() if k != "steps_per_s"}


def test_a_seed_runs_alike_in_every_process() -> None:
    source = (
        "import json, sys; from kvfabric.ops.simulate.run import simulate;"
        "print(json.dumps({k: v for k, v in simulate(7, 1200).plain().items() if k != 'steps_per_s'}))"
    )
    runs = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout))
    assert runs[0] == runs[1]
    assert runs[0]["counts"] != plain(simulate(8, 1200))["counts"]


def test_a_failing_seed_is_reproducible_and_tells_the_last_events_about_it() -> None:
    with Patches() as patches:
        BY_NAME["any_group"].apply(patches)
        first, again = simulate(1, STEPS_A_SEED), simulate(1, STEPS_A_SEED)
    assert first.failure is not None
    assert first.failure == again.failure
    assert first.failure.law == "wrong_read"
    assert 1 < len(first.failure.trace) <= 40
    assert first.wrong_reads == 1


def test_the_command_exits_by_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as clean:
        main(["simulate", "--seed", "1", "--steps", "300", "--json"])
    assert clean.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert told["clean"] is True
    assert {"granted_per_1000_steps", "restores_per_1000_steps", "wrong_reads", "slots_lost", "hangs"} <= told.keys()
    with Patches() as patches:
        BY_NAME["one_free_list"].apply(patches)
        with pytest.raises(SystemExit) as broken:
            main(["simulate", "--seed", "1", "--steps", "300"])
    assert broken.value.code == 1
    assert "kinds_stay_separate" in capsys.readouterr().out

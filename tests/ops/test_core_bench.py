"""``kvfabric bench core``: every figure is there, with its target, or the bench fails."""

from __future__ import annotations

import json

import pytest

from kvfabric.ops.bench import core, core_rules
from kvfabric.ops.cli import main

RULES = [{"name": n, "value": 1.0, "unit": "us", "target": 2.0, "holds": True} for n in core.EXPECTED[:5]]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules have a test of their own; the rest runs for real, in small."""
    monkeypatch.setattr(core_rules, "figures", lambda: RULES)
    monkeypatch.setattr(core, "ROUNDS", 1)
    monkeypatch.setattr(core, "DIGEST_TOKENS", 1 << 14)
    monkeypatch.setattr(core, "SIMULATION_STEPS", 300)


@pytest.mark.usefixtures("quick")
def test_one_run_gives_every_figure_in_the_form_of_all_benches() -> None:
    result = core.run()
    assert set(result) == {"bench", "machine", "figures"}
    assert {figure["name"] for figure in result["figures"]} == set(core.EXPECTED)
    for figure in result["figures"]:
        assert set(figure) == {"name", "value", "unit", "target", "holds"}
        assert figure["value"] > 0
    targets = {figure["name"]: figure["target"] for figure in result["figures"]}
    assert targets["tokens_to_keys_128_token_cuts"] == 25.0
    assert targets["tokens_to_keys_4_token_cuts"] == 3.0
    assert targets["simulation_steps"] == 3000.0


@pytest.mark.usefixtures("quick")
def test_a_missing_figure_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(core, "digest_figures", list)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "core", "--json"])
    assert ended.value.code == 1
    figures = {f["name"]: f for f in json.loads(capsys.readouterr().out)["figures"]}
    assert figures["tokens_to_keys_4_token_cuts"] == {
        "name": "tokens_to_keys_4_token_cuts",
        "value": None,
        "unit": "",
        "target": None,
        "holds": False,
    }


@pytest.mark.parametrize("holds", [True, False])
def test_the_exit_status_says_whether_all_hold(
    holds: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    every = [{"name": n, "value": 1.0, "unit": "us", "target": 2.0, "holds": holds or n != "x"} for n in ("x", "y")]
    monkeypatch.setattr(core, "run", lambda: {"bench": "core", "machine": {}, "figures": every})
    with pytest.raises(SystemExit) as ended:
        main(["bench", "core"])
    assert ended.value.code == (0 if holds else 1)
    assert ("MISSED" in capsys.readouterr().out) is not holds


def test_a_simulation_that_breaks_a_law_holds_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvfabric.ops.simulate.mutants import BY_NAME
    from kvfabric.ops.simulate.patches import Patches

    monkeypatch.setattr(core, "ROUNDS", 1)
    monkeypatch.setattr(core, "SIMULATION_STEPS", 300)
    with Patches() as patches:
        BY_NAME["one_free_list"].apply(patches)
        assert core.simulation_figure()["holds"] is False


def test_a_bench_reports_its_machine_and_a_figure_that_is_missing_as_one_that_does_not_hold() -> None:
    there = {"name": "there", "value": 1.0, "unit": "s", "target": 2.0, "holds": True}
    told = core.report("any", [there], ("there", "away"))
    assert set(told) == {"bench", "machine", "figures"}
    assert set(told["machine"]) == {"cores", "load", "python", "system"}
    assert told["figures"][0] == there
    assert [(f["name"], f["value"], f["holds"]) for f in told["figures"][1:]] == [("away", None, False)]
    assert core.report("any", [there], ("there",))["figures"] == [there]

"""The simulation notices every known mistake, within a bounded number of steps."""

from __future__ import annotations

import json

import pytest

from kvfabric.fabric import passport
from kvfabric.fabric.fetching import FetchDesk
from kvfabric.fabric.kinds import Reason
from kvfabric.fabric.passport import AbiPassport
from kvfabric.ops.cli import main
from kvfabric.ops.simulate.mutants import MUTANTS, SEEDS, STEPS_A_SEED, UNMUTATED, Mutant, hunt, hunt_none
from kvfabric.ops.simulate.patches import Patches


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_simulation_finds(mutant: Mutant) -> None:
    found = hunt(mutant)
    assert found.found, f"{mutant.name} ({mutant.mistake}) survived {found.steps} steps"
    assert found.steps <= len(SEEDS) * (STEPS_A_SEED + 5)


def test_every_mistake_is_undone() -> None:
    one, two = AbiPassport().abi(), AbiPassport(kernel_abi=2).abi()
    honest = vars(FetchDesk)["landed_whole"]
    for mutant in MUTANTS:
        with Patches() as patches:
            mutant.apply(patches)
    assert passport.abi_refusal(one, two) is Reason.ABI_MISMATCH
    assert vars(FetchDesk)["landed_whole"] is honest
    assert not hunt_none(seeds=(1,)).found


def test_a_name_that_the_core_does_not_have_cannot_be_replaced() -> None:
    with Patches() as patches, pytest.raises(AttributeError):
        patches.put(FetchDesk, "no_such_step", None)


def test_one_mistake_is_hunted_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as found:
        main(["simulate", "--mutant", "any_group", "--json"])
    assert found.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["mutant"], told["found"], told["law"]) == ("any_group", True, "wrong_read")
    with pytest.raises(SystemExit) as unknown:
        main(["simulate", "--mutant", "any_grope"])
    assert unknown.value.code == 2
    assert "any_group" in capsys.readouterr().err


def test_all_mistakes_exit_0_only_if_each_is_found_and_the_core_is_clean(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvfabric.ops.simulate import mutants

    harmless = Mutant("harmless", "nothing", lambda _: None)
    quick = [m for m in MUTANTS if m.name in {"any_group", "one_free_list"}]
    monkeypatch.setattr(mutants, "hunt", lambda mutant, _=(): hunt(mutant, (1,)))
    monkeypatch.setattr(mutants, "hunt_none", lambda: hunt_none((1,)))
    for listed, status in ((quick, 0), ([*quick, harmless], 1)):
        monkeypatch.setattr(mutants, "MUTANTS", tuple(listed))
        with pytest.raises(SystemExit) as ended:
            main(["simulate", "--mutants", "--json"])
        assert ended.value.code == status
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["mutant"] for line in lines] == [*(m.name for m in listed), UNMUTATED]

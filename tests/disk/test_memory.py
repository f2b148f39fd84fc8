"""The memory of a real holder: shared between groups, kept by worth, limited by kind and tenant, written where worth it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfabric.fabric.kinds import Reason

from .lives import Life, content, prompt

WHOLE = 64
"""What a prompt of 70 tokens can give."""
OF_A_PROMPT = {"csa": 4, "tail": 17, "idx": 4, "swa": 17}

Start = Callable[..., Life]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Life] = []

    def begin(disk: dict[str, Any] | None = None, **spec: Any) -> Life:
        where = {"path": str(tmp_path / f"disk{len(running)}"), "bytes_max": 1 << 24, "free_floor_bytes": 0}
        running.append(Life(where | (disk or {}), 1, **spec))
        return running[-1]

    yield begin
    for life in running:
        life.close()


def room_for(prompts: int) -> dict[str, int]:
    return {group: prompts * count for group, count in OF_A_PROMPT.items()}


def hit(life: Life, number: int) -> int:
    """Tokens of a prompt that are here, every leased byte compared."""
    answer = life.session.acquire(prompt(number))
    if answer.lease is None:
        return 0
    with answer.lease:
        assert life.wrong(answer, prompt(number)) == []
    return answer.tokens


def slabs_of(life: Life) -> dict[str, int]:
    return {pool["group"]: pool["slabs"] for pool in life.status()["pools"]}


@pytest.mark.parametrize("shared", [True, False])
def test_a_group_that_lacks_room_gets_it_from_one_that_has_it_only_where_they_share(start: Start, shared: bool) -> None:
    slots = {"csa": 240, "tail": 340, "idx": 240, "swa": 60}  # windows of a dozen prompts, histories of sixty
    life = start(slots=slots, slabs={"look_s": 0.1, "gather_s": 0.2} if shared else None)
    before = slabs_of(life)
    life.store(prompt(99))
    held = life.session.acquire(prompt(99), lease_s=60.0)
    assert held.tokens == WHOLE
    until_s = time.monotonic() + (20.0 if shared else 1.5)
    while time.monotonic() < until_s:
        short = [number for number in range(24) if hit(life, number) < WHOLE]
        if not short:
            break
        for number in short:
            life.store(prompt(number))
    after = slabs_of(life)
    assert (min(hit(life, number) for number in range(24)) == WHOLE) is shared
    assert (after["swa"] > before["swa"]) is shared
    assert held.lease is not None
    assert held.lease.check() is None
    assert life.wrong(held, prompt(99)) == []
    held.lease.release()
    assert life.status()["slots_lost"] == 0


def test_what_is_retained_makes_room_later_for_a_while_and_never_keeps_others_out(start: Start) -> None:
    life = start(slots=room_for(3), eviction="lru")

    def after_two_more(first: int, **retained: float) -> int:
        """What is left of a prompt once two others came for whom one older one had to leave."""
        for number in (first, first + 1):
            life.store(prompt(number))
        if retained:
            life.session.retain(prompt(first), **retained)
            time.sleep(retained["ttl_s"] if retained["ttl_s"] < 1 else 0)
        for number in (first + 2, first + 3):
            life.store(prompt(number))
        return hit(life, first)

    assert after_two_more(0) == 0
    assert after_two_more(10, ttl_s=60.0, weight=1.0) == WHOLE
    assert after_two_more(20, ttl_s=0.2, weight=1.0) == 0
    for number in (30, 31, 32):
        life.store(prompt(number))
        life.session.retain(prompt(number), ttl_s=3600.0, weight=4.0)
    life.store(prompt(33))
    assert hit(life, 33) == WHOLE


def test_a_floor_keeps_a_limit_on_all_kinds_from_being_taken_by_one(start: Start) -> None:
    def held_bytes(floor: float) -> int:
        """What histories take of a limit, once more of them came than fit, and what windows get after that."""
        limits = {"bytes_max": 200_000, "kinds": {"sliding_window": {"floor": floor}}}
        kinds = limits["kinds"]
        assert isinstance(kinds, dict)
        kinds |= {kind: {"floor": 0.0} for kind in ("compressed_history", "uncompressed_tail", "indexer")}
        life = start(slots=room_for(40), limits=limits)
        for number in range(15):
            tokens = prompt(number)
            published = life.session.publish(tokens, {"csa": {i: content(tokens, 0, i, 5000) for i in range(4)}})
            assert published.ok
        pools = {pool["group"]: pool for pool in life.status()["pools"]}
        life.close()
        return int((pools["csa"]["slots"] - pools["csa"]["free"]) * 5000)

    assert held_bytes(0.0) == 200_000
    assert held_bytes(0.4) == 120_000


@pytest.mark.parametrize(("admission", "written"), [("second_touch", [False, True]), ("all", [True, True])])
def test_only_what_was_used_twice_is_written_where_second_touch_is_asked(
    start: Start, admission: str, written: list[bool]
) -> None:
    life = start({"admission": admission}, slots=room_for(4))
    found = []
    for number, uses in ((1, 1), (2, 2)):
        life.store(prompt(number))
        for _ in range(uses - 1):
            assert hit(life, number) == WHOLE
        assert life.swap_out(prompt(number)).refused is None
        answer = life.session.probe(prompt(number))
        found.append(answer.cause is not None and answer.cause.reason is Reason.RESTORE_PENDING)
    assert found == written

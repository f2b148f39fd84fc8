"""Eviction policies over the core's books: who leaves, and what never does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvfabric.fabric.arena import ArenaLayout, PoolLayout, header_arena
from kvfabric.fabric.books import Books
from kvfabric.fabric.eviction import Arrivals, Eviction, EvictionFactory, LeastRecentlyUsed, PoolShape, Slots, Values
from kvfabric.fabric.kinds import ObjectKind, SpecError
from kvfabric.fabric.messages import Prompt
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.objects import Obj
from kvfabric.fabric.passport import AbiPassport
from kvfabric.fabric.room import Structure
from kvfabric.policies.eviction import NAMES, eviction_policy

ABI = AbiPassport().abi()
KV = {"name": "kv", "kind": "compressed_history", "block_tokens": 8, "block_bytes": 64}
INDEX = {"name": "idx", "kind": "indexer", "of": "kv", "block_tokens": 8, "block_bytes": 64}
WINDOW = {"name": "swa", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 4, "block_bytes": 64}


class Bed:
    """Books of one holder with chains of named prompts."""

    def __init__(self, groups: list[dict[str, object]], slots: Sequence[int], eviction: EvictionFactory) -> None:
        self.model = ModelSpec.load({"name": "m", "groups": groups})
        pools = [PoolLayout(g, 0, count, 64) for g, count in enumerate(slots)]
        self.books = Books(self.model, (0,), header_arena(ArenaLayout(pools), 1), eviction=eviction)

    def digest(self, prompt: str, end: int) -> bytes:
        return f"{prompt}:{end}".encode().ljust(32, b".")

    def units(self, prompt: str, tokens: int) -> dict[int, bytes]:
        return {
            unit: b"".join(self.digest(prompt, end) for end in range(unit, tokens + 1, unit))
            for unit in self.model.units_tokens
        }

    def store(self, prompt: str, tokens: int, at_s: float, first: int = 0) -> list[Obj]:
        """Store what lies behind `first` tokens of a prompt."""
        books, units = self.books, self.units(prompt, tokens)
        books.now_s = at_s
        objects = []
        for group, spec in enumerate(self.model.groups):
            unit = spec.unit_tokens
            for index in range(first // unit, tokens // unit):
                base, home = books.leaving.structure.rests_on(group, index, units)
                digest = self.digest(prompt, (index + 1) * unit)
                objects.append(
                    Obj(
                        spec.kind,
                        group,
                        0,
                        digest,
                        (index + 1) * unit,
                        b"n",
                        b"w",
                        "",
                        0,
                        64,
                        ABI,
                        base=base,
                        home=home,
                    )
                )
        assert books.lacking(objects) is None
        for obj in objects:
            books.reserve(obj)
        for obj in objects:
            books.seal(obj, bytes(16))
        books.stored(objects)
        books.install_all(objects)
        return objects

    def use(self, prompt: str, tokens: int, at_s: float) -> None:
        """Lease a prompt's blocks for a moment."""
        self.books.now_s = at_s
        slots = [obj.slot for obj in self.held(prompt) if obj.position <= tokens]
        self.books.touch_slots(np.array(slots, dtype=np.int64))

    def generated(self, prompt: str, tokens: int, output_tokens: int) -> None:
        """Tell how long a prompt's output became."""
        keys = tuple(self.units(prompt, tokens).items())
        self.books.generated(Prompt(b"n", b"w", "", tokens, keys), output_tokens)

    def held(self, prompt: str, group: int | None = None) -> list[Obj]:
        tables = [t for (g, _), t in self.books.table.items() if group in (None, g)]
        return [obj for table in tables for d, obj in table.items() if d.startswith(f"{prompt}:".encode())]

    def ends(self, prompt: str, group: int = 0) -> list[int]:
        return sorted(obj.position for obj in self.held(prompt, group))


@pytest.mark.parametrize("name", NAMES)
def test_history_leaves_from_its_far_end_under_every_policy(name: str) -> None:
    bed = Bed([KV], [12], eviction_policy(name))
    bed.store("a", 64, 0.0)
    for step, other in enumerate("bcdefgh"):
        bed.store(other, 16, 1.0 + step)
        for prompt in "abcdefgh":
            ends = bed.ends(prompt)
            assert ends == list(range(8, 8 * len(ends) + 1, 8)), f"{prompt} has a hole"


@pytest.mark.parametrize("name", NAMES)
def test_what_a_lease_holds_never_leaves(name: str) -> None:
    bed = Bed([KV], [8], eviction_policy(name))
    held = bed.store("a", 32, 0.0)
    loose = bed.store("b", 32, 1.0)
    for obj in held:
        bed.books.pin(obj)
    for step, other in enumerate("cdefg"):
        bed.store(other, 32, 2.0 + step)
    assert all(obj.visible for obj in held)
    assert not any(obj.visible for obj in loose)  # without a pin they went


@pytest.mark.parametrize(("name", "together"), [("default", True), ("s3fifo", True), ("lru", False)])
def test_a_history_block_takes_along_what_nobody_reaches_without_it(name: str, together: bool) -> None:
    bed = Bed([KV, INDEX, WINDOW], [6, 12, 24], eviction_policy(name))
    bed.store("a", 32, 0.0)
    bed.store("b", 32, 100.0)  # two of a's history blocks must go: index and window have room
    kept = bed.ends("a")
    assert len(kept) == 2
    assert (bed.ends("a", 1) == kept) is together
    assert (max(bed.ends("a", 2)) <= max(kept)) is together


def test_an_indexer_block_that_makes_room_leaves_with_its_history() -> None:
    bed = Bed([KV, INDEX], [12, 6], eviction_policy("default"))
    bed.store("a", 32, 0.0)
    bed.store("b", 32, 100.0)
    assert bed.ends("a", 1) == bed.ends("a", 0) == [8, 16]
    assert bed.ends("b", 1) == bed.ends("b", 0) == [8, 16, 24, 32]


def test_what_proved_useless_leaves_first() -> None:
    bed = Bed([KV], [8], eviction_policy("default"))
    bed.store("a", 32, 0.0)
    bed.store("b", 32, 50.0)
    for obj in bed.held("b"):
        bed.books.make_first_out(obj)
    bed.store("c", 32, 60.0)
    assert bed.ends("b") == []
    assert bed.ends("a") == [8, 16, 24, 32]


def test_a_retained_prompt_outlives_a_later_one_and_not_its_time() -> None:
    def survivors(retain: bool, wait_s: float) -> list[int]:
        bed = Bed([KV], [8], eviction_policy("lru"))
        bed.store("a", 32, 0.0)
        bed.store("b", 32, 1.0)
        if retain:
            slots = np.array([obj.slot for obj in bed.held("a")], dtype=np.int64)
            bed.books.leaving.retained.keep(slots, 1.0, 1.0, 10.0)
        bed.store("c", 32, 1.0 + wait_s)
        return bed.ends("a")

    assert survivors(retain=False, wait_s=1.0) == []
    assert survivors(retain=True, wait_s=1.0) == [8, 16, 24, 32]
    assert survivors(retain=True, wait_s=20.0) == []


def test_retaining_everything_pins_nothing() -> None:
    bed = Bed([KV], [8], eviction_policy("default"))
    for prompt in "ab":
        bed.store(prompt, 32, 0.0)
        slots = np.array([obj.slot for obj in bed.held(prompt)], dtype=np.int64)
        bed.books.leaving.retained.keep(slots, 4.0, 0.0, 1000.0)
    bed.store("c", 64, 1.0)
    assert bed.ends("c") == list(range(8, 65, 8))


def test_the_default_policy_learns_which_prompts_come_back() -> None:
    def found(name: str) -> int:
        bed = Bed([KV], [64], eviction_policy(name))
        count = 0
        for number in range(800):
            bed.store(f"long{number}", 64, float(number))  # eight blocks that never come back
            bed.store(f"short{number}", 16, float(number))  # two that do, after ten others
            again = f"short{number - 10}"
            if bed.ends(again) == [8, 16]:
                bed.use(again, 16, float(number))
                count += number >= 400
            elif number >= 10:
                bed.store(again, 16, float(number), first=8 * len(bed.ends(again)))
        return count

    assert found("lru") == 0  # a hundred blocks come between
    assert found("default") > 200


def test_the_default_policy_learns_from_outputs_which_prompts_come_back() -> None:
    def found(told: dict[str, int]) -> int:
        bed = Bed([KV], [64], eviction_policy("default"))
        count = 0
        for number in range(800):
            for name in ("once", "again"):  # alike in all but their outputs; four come between, and ten of the others
                bed.store(f"{name}{number}", 32, float(number))
                if told:
                    bed.generated(f"{name}{number}", 32, told[name])
            before = f"again{number - 10}"
            if bed.ends(before) == [8, 16, 24, 32]:
                bed.use(before, 32, float(number))
                count += number >= 400
            elif number >= 10:
                bed.store(before, 32, float(number), first=8 * len(bed.ends(before)))
        return count

    assert found({"once": 900, "again": 5}) > 250
    assert found({"once": 5, "again": 900}) > 250  # which way it is is learned
    assert found({"once": 70, "again": 70}) < 230
    assert found({}) < 230


def test_an_output_is_told_of_what_is_left_of_its_prompt_and_only_to_who_hears() -> None:
    heard: list[tuple[list[int], int, float]] = []

    class Hearing(LeastRecentlyUsed):
        def generated(self, slots: Slots, output_tokens: int, now_s: float) -> None:
            heard.append((slots.tolist(), output_tokens, now_s))

    bed = Bed([KV, WINDOW], [8, 16], Hearing)
    bed.store("a", 32, 1.0)
    last = [next(obj.slot for obj in bed.held("a", group) if obj.position == 32) for group in (0, 1)]
    bed.generated("a", 32, 7)
    bed.generated("a", 64, 8)  # what is behind 32 is not here
    bed.generated("b", 32, 9)
    assert heard == [(last, 7, 1.0), (last, 8, 1.0)]
    deaf = Bed([KV], [8], LeastRecentlyUsed)
    deaf.store("a", 32, 1.0)
    deaf.generated("a", 32, 7)
    assert deaf.ends("a") == [8, 16, 24, 32]


def test_a_policy_of_another_package_is_asked() -> None:
    class Oldest:
        structured = True

        def __init__(self, pools: Sequence[PoolShape]) -> None:
            self.last = np.zeros(64)

        def arrived(self, arrivals: Arrivals, now_s: float) -> None:
            self.last[arrivals.slots] = -now_s

        def used(self, slots: Slots, tick: int, now_s: float) -> None: ...

        def left(self, slots: Slots, digests: Sequence[bytes], now_s: float) -> None: ...

        def moved(self, old: int, new: int) -> None: ...

        def values(self, slots: Slots, count: int, now_s: float) -> Values:
            return self.last[slots]

    made: Eviction = Oldest([])
    assert made.structured
    bed = Bed([KV], [8], Oldest)
    bed.store("a", 32, 0.0)
    bed.store("b", 32, 1.0)
    bed.store("c", 32, 2.0)
    assert (bed.ends("a"), bed.ends("b")) == ([8, 16, 24, 32], [])


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match="eviction: 'mru' is none of default, lru, s3fifo"):
        eviction_policy("mru")


def test_only_blocks_that_cut_a_chain_are_prefixes() -> None:
    structure = Structure(ModelSpec.load({"name": "m", "groups": [KV, INDEX, WINDOW]}))
    assert structure.prefix == (True, True, False)
    assert structure.home_group == 0
    assert ModelSpec.load({"name": "m", "groups": [KV]}).groups[0].kind is ObjectKind.COMPRESSED_HISTORY

"""Writers: store, extend, re-store under a new revision, abort, sleep over it, swap, drop."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from ...fabric.kinds import Form, ObjectKind, Reason
from ...fabric.messages import (
    Done,
    Drop,
    Objects,
    SlotRun,
    StoreAbort,
    StoreBegin,
    StoreBegun,
    StoreCommit,
    StoreItem,
    StoreQuiet,
    SwapIn,
    SwapOut,
)
from ...fabric.passport import Abi
from .judge import REVISIONS
from .machine import digest
from .models import BLOCK_BYTES, PROMPT_TOKENS_MAX, TENANTS, Text

if TYPE_CHECKING:
    from .clients import Client
    from .world import Life

Script = Generator[Any, Any, None]


class Writer:
    """The writing half of a session."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.world = client.world
        self.rng = client.rng

    def act(self, lives: list[Life]) -> Script:
        """One thing a writer does."""
        action = self.rng.choices(
            (self.store, self.extend, self.restamp, self.swap_out, self.swap_in, self.drop), (10, 4, 2, 20, 2, 2)
        )[0]
        yield from action(lives)

    def text(self, n: int | None = None) -> Text:
        rng = self.rng
        if n is None:
            n = rng.randrange(4, PROMPT_TOKENS_MAX + 1)
        tenant = TENANTS[0] if rng.random() < 0.9 else TENANTS[1]
        return self.world.library.text(self.client.prompt_name(), n, self.client.weights, tenant)

    # --- stores --------------------------------------------------------------------------------

    def store(self, lives: list[Life]) -> Script:
        """A prefill: every whole object, or only what a resume near the end needs."""
        text = self.text(self.rng.randrange(PROMPT_TOKENS_MAX // 2, PROMPT_TOKENS_MAX + 1))
        revision = 0 if self.rng.random() < 0.8 else self.rng.randrange(REVISIONS)
        chosen = self._objects(text, 0, len(text), whole=self.rng.random() < 0.5)
        if self.rng.random() < 0.1:
            chosen.pop(self.rng.randrange(len(chosen)))
        yield from self._attempt(lives, text, chosen, revision, (), replace=self.rng.random() < 0.2)

    def extend(self, lives: list[Life]) -> Script:
        """A request that grows: its new objects visible and what they outdate retired, in one commit."""
        n = self.rng.randrange(24, PROMPT_TOKENS_MAX + 1)
        text = self.text(n)
        start = self.rng.randrange(0, n)
        chosen = self._objects(text, start, n, whole=True)
        retire = tuple(self._outdated(text, n))
        yield from self._attempt(lives, text, chosen, 0, retire, replace=False)

    def restamp(self, lives: list[Life]) -> Script:
        """A re-compression: one family, or carelessly a part of it, under a new revision."""
        text = self.text(self.rng.randrange(PROMPT_TOKENS_MAX // 2, PROMPT_TOKENS_MAX + 1))
        family = self.rng.choice(self.world.model.families)
        if self.rng.random() < 0.3:
            family = (self.rng.choice(family),)
        chosen = [o for o in self._objects(text, 0, len(text), whole=True) if o.group in family]
        yield from self._attempt(lives, text, chosen, self.rng.randrange(1, REVISIONS), (), replace=True)

    def _objects(self, text: Text, start: int, end: int, *, whole: bool) -> list[Objects]:
        """The objects that end in (start, end], for every group and shard; tails and windows only near the end."""
        found = []
        model = self.world.model
        for g, spec in enumerate(model.groups):
            unit = spec.unit_tokens
            indices = [i for i in range(end // unit) if (i + 1) * unit > start]
            if spec.kind in (ObjectKind.UNCOMPRESSED_TAIL, ObjectKind.SLIDING_WINDOW) and not whole:
                near = self.world.judge.grid + 2 * max(unit, spec.window_tokens or 0, 16)
                indices = [i for i in indices if (i + 1) * unit > end - near]
            if indices:
                found += [self._run(text, g, shard, indices) for shard in range(model.shards)]
        return found

    def _run(self, text: Text, group: int, shard: int, indices: list[int]) -> Objects:
        digests = text.digests[self.world.model.groups[group].unit_tokens]
        return Objects(group, shard, tuple(indices), b"".join(digests[i] for i in indices))

    def _outdated(self, text: Text, to: int) -> list[Objects]:
        """Window and tail blocks that a resume at ``to`` or later needs no more."""
        found = []
        for g, spec in enumerate(self.world.model.groups):
            if spec.form is Form.STATE or spec.kind not in (ObjectKind.UNCOMPRESSED_TAIL, ObjectKind.SLIDING_WINDOW):
                continue
            grid = self.world.judge.grid
            needed = self.world.judge.needed(to // grid * grid) if to >= grid else []
            least = min(needed[g], default=0) if needed else 0
            sinks = range(-(-spec.sink_tokens // spec.unit_tokens))
            gone = [i for i in range(min(least, len(text.digests[spec.unit_tokens]))) if i not in sinks]
            if gone:
                found += [self._run(text, g, shard, gone) for shard in range(self.world.model.shards)]
        return found

    def _items(self, chosen: list[Objects], revision: int) -> list[StoreItem]:
        """Mostly whole objects of the layout in use; now and then another ABI, looser bytes, half a block."""
        rng, layouts = self.rng, self.world.layouts
        odd = rng.random()
        odd_group = rng.choice(chosen).group if chosen else 0
        items = []
        for objects in chosen:
            abi: Abi = layouts.first[objects.group]
            length = BLOCK_BYTES
            if objects.group == odd_group:
                if odd < 0.05:
                    abi = layouts.second[odd_group]
                elif odd < 0.08:
                    abi = layouts.loose(odd_group)
                elif odd < 0.11:
                    length = BLOCK_BYTES // 2
            items.append(StoreItem(objects, revision, length, abi))
        return items

    def _attempt(
        self,
        lives: list[Life],
        text: Text,
        chosen: list[Objects],
        revision: int,
        retire: tuple[Objects, ...],
        *,
        replace: bool,
    ) -> Script:
        """One attempt at each holder of the node, its end decided by chance."""
        if not chosen:
            return
        items = self._items(chosen, revision)
        fate = self.rng.choices(("commit", "abort", "sleep", "leave"), (80, 8, 8, 2))[0]
        for life in lives:
            message = StoreBegin(self.client.request(), text.prompt, tuple(items), retire, replace)
            begun = yield self._to(life, message)
            if not isinstance(begun, StoreBegun) or begun.refused is not None:
                self.world.counts["stores_refused"] += isinstance(begun, StoreBegun)
                continue
            yield from self._write(life, begun, items, text, fate)

    def _write(self, life: Life, begun: StoreBegun, items: list[StoreItem], text: Text, fate: str) -> Script:
        checksums = b""
        for run, item in zip(begun.slots, items, strict=True):
            yield self.rng.uniform(0.0, 0.01)
            if not life.alive:
                return
            checksums += self._fill(life, run, item)
        if fate == "leave":
            return
        if fate == "sleep":
            yield self.rng.uniform(1.0, 18.0)
        if fate == "abort":
            yield from self._abort(life, begun)
            return
        done = yield self._to(life, StoreCommit(self.client.request(), begun.attempt, checksums))
        if isinstance(done, Done) and done.refused is Reason.ATTEMPT_SUPERSEDED:
            yield self._to(life, StoreQuiet(self.client.request(), begun.attempt))
        elif isinstance(done, Done) and done.refused is None:
            self.world.counts["stores"] += 1

    def _fill(self, life: Life, run: SlotRun, item: StoreItem) -> bytes:
        """Write each slot's bytes in place; their checksums."""
        at = dict(zip(item.objects.indices, range(len(item.objects.indices)), strict=True))
        checksums = b""
        for place, index in enumerate(run.indices):
            slot = int.from_bytes(run.slots[place * 4 : place * 4 + 4], "little")
            first = at[index] * 32
            digest_of_object = item.objects.digests[first : first + 32]
            content = self.world.content.of(
                digest_of_object,
                run.group,
                run.shard,
                revision=item.revision,
                abi=item.abi,
                length=item.length,
            )
            life.arena.payload(slot)[: item.length] = memoryview(content)
            checksums += digest(content)
        return checksums

    def _abort(self, life: Life, begun: StoreBegun) -> Script:
        """Give up while bytes are still on their way: they land after the abort, until it is quiet."""
        yield self._to(life, StoreAbort(self.client.request(), begun.attempt))
        for _ in range(self.rng.randrange(1, 4)):
            yield self.rng.uniform(0.02, 0.8)
            if not life.alive:
                return
            for run in begun.slots:
                for place in range(len(run.indices)):
                    slot = int.from_bytes(run.slots[place * 4 : place * 4 + 4], "little")
                    life.arena.payload(slot)[: BLOCK_BYTES // 2] = self.rng.randrange(256)
        yield self._to(life, StoreQuiet(self.client.request(), begun.attempt))

    # --- tiers and room ------------------------------------------------------------------------

    def _some(self, text: Text) -> tuple[Objects, ...]:
        model = self.world.model
        groups = range(len(model.groups))
        if self.rng.random() < 0.6:
            groups = range((g := self.rng.randrange(len(model.groups))), g + 1)
        found = []
        for g in groups:
            count = len(text) // model.groups[g].unit_tokens
            if count:
                first = 0 if self.rng.random() < 0.6 else self.rng.randrange(count)
                found += [self._run(text, g, s, list(range(first, count))) for s in range(model.shards)]
        return tuple(found)

    def swap_out(self, lives: list[Life]) -> Script:
        objects = self._some(self.text())
        for life in lives:
            done = yield self._to(life, SwapOut(self.client.request(), objects))
            if isinstance(done, Done):
                self.world.counts[f"swap out {done.refused or done.detail or 'done'}"] += 1

    def swap_in(self, lives: list[Life]) -> Script:
        objects = self._some(self.text())
        for life in lives:
            yield self._to(life, SwapIn(self.client.request(), objects))

    def drop(self, lives: list[Life]) -> Script:
        objects = self._some(self.text())
        for life in lives:
            yield self._to(life, Drop(self.client.request(), objects))

    def _to(self, life: Life, message: Any) -> Any:
        return self.client.call(life, message)

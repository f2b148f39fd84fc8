"""A state machine over several holders: whatever is done in whatever order, no invariant breaks and every
answer is the oracle's.

Records arrive at once and time passes only when a rule lets it, so what the holders have is known
exactly: the naive oracle says which position an acquire must be granted, and a judge that shares
nothing with the engine says what each leased byte must be.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from kvfabric.fabric.effects import PeerClosed, Received
from kvfabric.fabric.identity import weights_digest16
from kvfabric.fabric.invariants import check
from kvfabric.fabric.kinds import ObjectKind, Reason, Status
from kvfabric.fabric.leases import read_refusal
from kvfabric.fabric.lifecycle import State
from kvfabric.fabric.messages import (
    Drop,
    HolderGone,
    LeaseGrant,
    Objects,
    Release,
    Renew,
    SetWeights,
    StoreAbort,
    StoreBegun,
    StoreCommit,
    StoreQuiet,
    SwapIn,
    SwapOut,
)
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.objects import Obj
from kvfabric.ops.simulate.judge import REVISIONS, Content, Held, Judge
from kvfabric.ops.simulate.mutants import BY_NAME
from kvfabric.ops.simulate.patches import Patches
from kvfabric.transport.digest import checksum

from ..fabric.many_holders import ABI, Holders
from .oracle import Copy, Group, Oracle, World

HYBRID: list[dict[str, Any]] = [
    {"name": "csa", "kind": "compressed_history", "block_tokens": 8, "ratio": 4},
    {"name": "tail", "kind": "uncompressed_tail", "of": "csa", "block_tokens": 4, "overlap_tokens": 4},
    {"name": "index", "kind": "indexer", "of": "csa", "block_tokens": 4},
    {"name": "swa", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 6, "sink_tokens": 2},
]
FINE: list[dict[str, Any]] = [
    {"name": "kv", "kind": "compressed_history", "block_tokens": 8, "endpoint_tokens": 4},
    {"name": "rows", "kind": "sliding_window", "form": "state", "grid_tokens": 4},
]
RECURRENT: list[dict[str, Any]] = [
    {"name": "full", "kind": "compressed_history", "block_tokens": 4},
    {"name": "ssm", "kind": "compressed_history", "form": "state", "grid_tokens": 8},
    {"name": "swa", "kind": "sliding_window", "block_tokens": 8, "window_tokens": 9},
]
WORLDS: tuple[tuple[list[dict[str, Any]], dict[str, tuple[int, ...]]], ...] = (
    (HYBRID, {"n0": (0,), "n1": (0,), "n2": (0,)}),
    (FINE, {"n0": (0,), "n1": (0,)}),
    (RECURRENT, {"n0": (0,), "n1": (0,)}),
    (HYBRID, {"n0": (0, 1), "n1": (0, 1)}),
    (RECURRENT, {"n0.0": (0,), "n0.1": (1,), "n1.0": (0,), "n1.1": (1,)}),
)
BLOCK_BYTES = 32
PROMPT_TOKENS = 34
PROMPTS = (
    tuple(range(PROMPT_TOKENS)),
    (*range(18), *range(500, 500 + PROMPT_TOKENS - 18)),
    tuple(range(900, 900 + PROMPT_TOKENS)),
)

SEEN: Counter[str] = Counter()
"""How often an acquire was granted, cut and served by others, over all examples."""

prompts = st.sampled_from((0, 0, 0, 1, 1, 2))
lengths = st.integers(18, PROMPT_TOKENS)
revisions = st.integers(0, REVISIONS - 1)
places = st.integers(0, 3)
masks = st.integers(1, 15)


def group_of(spec: Any) -> Group:
    return Group(
        name=spec.name,
        kind=str(spec.kind),
        unit=spec.unit_tokens,
        state=spec.grid_tokens is not None,
        endpoint=spec.endpoint_tokens,
        ratio=spec.ratio,
        lag=spec.lag_tokens,
        of=spec.of,
        overlap=spec.overlap_tokens,
        window=spec.window_tokens or 1,
        sink=spec.sink_tokens,
    )


class Fabric(RuleBasedStateMachine):
    """Everything that clients, disks and nodes may do to a fabric."""

    leases: Bundle[tuple[LeaseGrant, int, str]] = Bundle("leases")
    attempts: Bundle[tuple[str, int, StoreBegun, bytes]] = Bundle("attempts")

    @initialize(
        world=st.sampled_from(WORLDS), stored=st.lists(st.tuples(places, prompts, lengths), min_size=1, max_size=4)
    )
    def begin(
        self, world: tuple[list[dict[str, Any]], dict[str, tuple[int, ...]]], stored: list[tuple[int, int, int]]
    ) -> None:
        groups, holders = world
        shards = 1 + max(s for owned in holders.values() for s in owned)
        self.model = ModelSpec.load({"groups": [{**g, "block_bytes": BLOCK_BYTES} for g in groups], "shards": shards})
        self.fabric = Holders(self.model, holders, slots=160, verify_always=True)
        self.content, self.weights = Content(), 1
        self.judge = Judge(self.model, self.content)
        self.deadlines: dict[tuple[str, int], float] = {}
        self.over: set[tuple[str, int]] = set()
        self.texts: dict[bytes, tuple[int, ...]] = {}
        for place, prompt, n in stored:
            self.write_all(place, prompt, n, 0, 15)

    # --- helpers -------------------------------------------------------------------------------

    def nodes(self) -> list[list[str]]:
        """The holders of each node, in the order of their shards."""
        nodes: dict[str, list[str]] = {}
        for name in self.fabric.shards:
            nodes.setdefault(name.split(".")[0], []).append(name)
        return list(nodes.values())

    def node(self, place: int) -> list[str]:
        nodes = self.nodes()
        return nodes[place % len(nodes)]

    def keys(self, prompt: int, n: int) -> Any:
        """The digests of a prompt, remembered with the tokens they stand for."""
        keys = self.fabric.keys(PROMPTS[prompt][:n], weights=f"v{self.weights}")
        for unit in self.model.units_tokens:
            blob = keys.keys(unit)
            for i in range(len(blob) // 32):
                self.texts[blob[32 * i : 32 * i + 32]] = PROMPTS[prompt][: (i + 1) * unit]
        return keys

    def objects(self, keys: Any, holder: str, mask: int, start: int = 0) -> list[Objects]:
        """The objects that end behind ``start``, of the groups in the mask."""
        found = []
        for g, spec in enumerate(self.model.groups):
            chosen = [i for i in range(len(keys) // spec.unit_tokens) if (i + 1) * spec.unit_tokens > start]
            if chosen and mask >> g & 1:
                found += [self.fabric.objects(keys, g, s, chosen) for s in self.fabric.shards[holder]]
        return found

    def write(self, holder: str, begun: StoreBegun, items: list[Objects], revision: int) -> bytes:
        """Fill an attempt's slots with what its objects are; their checksums."""
        sums = b""
        for run, item in zip(begun.slots, items, strict=True):
            digests = {i: item.digests[32 * at : 32 * at + 32] for at, i in enumerate(item.indices)}
            for index, slot in zip(run.indices, np.frombuffer(run.slots, "<u4").tolist(), strict=True):
                payload = self.fabric.arenas[holder].payload(slot)
                payload[:] = np.frombuffer(self.due(digests[index], run.group, run.shard, revision), np.uint8)
                sums += checksum(payload)
        return sums

    def due(self, digest: bytes, group: int, shard: int, revision: int) -> bytes:
        return self.content.of(digest, group, shard, revision=revision, abi=ABI, length=BLOCK_BYTES)

    def begin_attempt(
        self, holder: str, keys: Any, items: list[Objects], revision: int, retire: tuple[Objects, ...] = ()
    ) -> tuple[StoreBegun, bytes]:
        begun = self.fabric.begin(holder, keys, items=items, revision=revision, retire=retire)
        return begun, self.write(holder, begun, items, revision) if begun.refused is None else b""

    def commit(
        self, holder: str, keys: Any, items: list[Objects], revision: int, retire: tuple[Objects, ...] = ()
    ) -> None:
        if not items:
            return
        begun, sums = self.begin_attempt(holder, keys, items, revision, retire)
        assert begun.refused is None, begun
        done = self.fabric.ask(holder, StoreCommit(self.fabric.name(), begun.attempt, sums))
        assert done.refused is None, done

    # --- writers -------------------------------------------------------------------------------

    def write_all(self, place: int, prompt: int, n: int, revision: int, mask: int) -> None:
        keys = self.keys(prompt, n)
        for holder in self.node(place):
            self.commit(holder, keys, self.objects(keys, holder, mask), revision)

    @rule(place=places, prompt=prompts, n=lengths, revision=revisions, mask=masks)
    def store(self, place: int, prompt: int, n: int, revision: int, mask: int) -> None:
        self.write_all(place, prompt, n, revision, mask)

    @rule(place=places, prompt=prompts, n=lengths)
    def store_whole(self, place: int, prompt: int, n: int) -> None:
        self.write_all(place, prompt, n, 0, 15)

    @rule(place=places, prompt=prompts, start=lengths, n=lengths)
    def extend(self, place: int, prompt: int, start: int, n: int) -> None:
        """New blocks in, window and tail blocks that the end needs no more out, in one commit."""
        keys = self.keys(prompt, n)
        at = n // self.judge.grid * self.judge.grid
        for holder in self.node(place):
            retire = []
            for g, spec in enumerate(self.model.groups):
                if spec.grid_tokens is None and spec.kind in (ObjectKind.UNCOMPRESSED_TAIL, ObjectKind.SLIDING_WINDOW):
                    sinks = -(-spec.sink_tokens // spec.unit_tokens)
                    least = min(self.judge.needed(at)[g] - set(range(sinks)), default=0) if at else 0
                    gone = list(range(sinks, least))
                    retire += [self.fabric.objects(keys, g, s, gone) for s in self.fabric.shards[holder] if gone]
            self.commit(holder, keys, self.objects(keys, holder, 15, min(start, n)), 0, tuple(retire))

    @rule(place=places, prompt=prompts, n=lengths, revision=revisions, family=st.integers(0, 3))
    def recompress(self, place: int, prompt: int, n: int, revision: int, family: int) -> None:
        """A history with all that is of it under another revision."""
        families = self.model.families
        mask = sum(1 << g for g in families[family % len(families)])
        self.write_all(place, prompt, n, revision, mask)

    @rule(target=attempts, place=places, prompt=prompts, n=lengths, revision=revisions)
    def begin_writing(self, place: int, prompt: int, n: int, revision: int) -> Any:
        keys = self.keys(prompt, n)
        holder = self.node(place)[0]
        items = self.objects(keys, holder, 15)
        if not items:
            return multiple()
        begun, sums = self.begin_attempt(holder, keys, items, revision)
        return (holder, self.fabric.lives[holder], begun, sums) if begun.refused is None else multiple()

    @rule(attempt=consumes(attempts))
    def commit_late(self, attempt: tuple[str, int, StoreBegun, bytes]) -> None:
        """A commit is taken if nothing came between, else refused with the reason."""
        holder, life, begun, sums = attempt
        known = self.fabric.cores[holder].stores.attempts.get(begun.attempt)
        done = self.fabric.ask(holder, StoreCommit(self.fabric.name(), begun.attempt, sums))
        if life != self.fabric.lives[holder]:
            assert done.refused is Reason.HOLDER_LOST
        elif known is None or known.superseded:
            assert done.refused in (Reason.ATTEMPT_SUPERSEDED, Reason.WEIGHTS_MISMATCH)
        elif known.weights != weights_digest16(f"v{self.weights}"):
            assert done.refused is Reason.WEIGHTS_MISMATCH
        else:
            assert done.refused is None
        self.fabric.ask(holder, StoreQuiet(self.fabric.name(), begun.attempt))

    @rule(attempt=consumes(attempts), dies=st.booleans())
    def abort(self, attempt: tuple[str, int, StoreBegun, bytes], dies: bool) -> None:
        """Given up; bytes still land until it is quiet."""
        holder, life, begun, _ = attempt
        if life != self.fabric.lives[holder]:
            return
        self.fabric.ask(holder, StoreAbort(self.fabric.name(), begun.attempt))
        if self.fabric.cores[holder].stores.aborted.get(begun.attempt):
            for run in begun.slots:
                for slot in np.frombuffer(run.slots, "<u4").tolist():
                    self.fabric.arenas[holder].payload(slot)[: BLOCK_BYTES // 2] = 0xEE
        if dies:
            self.fabric.feed(holder, PeerClosed("client:1"))
        else:
            self.fabric.ask(holder, StoreQuiet(self.fabric.name(), begun.attempt))

    # --- tiers, damage -------------------------------------------------------------------------

    @rule(place=places, prompt=prompts, n=lengths, mask=masks, start=st.sampled_from((0, 0, 8, 16)))
    def evict(self, place: int, prompt: int, n: int, mask: int, start: int) -> None:
        keys = self.keys(prompt, n)
        for holder in self.node(place):
            done = self.fabric.ask(holder, Drop(self.fabric.name(), tuple(self.objects(keys, holder, mask, start))))
            assert done.refused in (None, Reason.PINNED, Reason.GRAPH_FROZEN)

    @rule(holder=places, prompt=prompts, at=st.integers(0, 7), group=places)
    def evict_one(self, holder: int, prompt: int, at: int, group: int) -> None:
        """One object goes: what is cut is cut by it."""
        keys = self.keys(prompt, PROMPT_TOKENS)
        names = list(self.fabric.cores)
        name, g = names[holder % len(names)], group % len(self.model.groups)
        one = self.fabric.objects(
            keys, g, self.fabric.shards[name][0], [at % (len(keys) // self.model.groups[g].unit_tokens)]
        )
        self.fabric.ask(name, Drop(self.fabric.name(), (one,)))

    @rule(place=places, prompt=prompts, n=lengths, mask=masks, back=st.booleans())
    def swap(self, place: int, prompt: int, n: int, mask: int, back: bool) -> None:
        keys = self.keys(prompt, n)
        for holder in self.node(place):
            objects = tuple(self.objects(keys, holder, mask))
            out = self.fabric.ask(holder, SwapOut(self.fabric.name(), objects))
            assert out.refused in (None, Reason.PINNED, Reason.GRAPH_FROZEN)
            if back:
                done = self.fabric.ask(holder, SwapIn(self.fabric.name(), objects))
                assert done.refused in (None, Reason.CHECKSUM_MISMATCH)

    @rule(place=places, which=st.integers(0, 1 << 16), on_disk=st.booleans())
    def corrupt(self, place: int, which: int, on_disk: bool) -> None:
        """One byte turns, of an object that nobody has leased."""
        holder = self.node(place)[-1]
        if on_disk:
            entries = [entry for extent in self.fabric.disks[holder].values() for entry in enumerate(extent)]
            if entries:
                number, (entry, content) = entries[which % len(entries)]
                extent = next(
                    e for e in self.fabric.disks[holder].values() if e[number : number + 1] == [(entry, content)]
                )
                extent[number] = (entry, bytes([content[0] ^ 1]) + content[1:])
            return
        owner = self.fabric.cores[holder].ctx.books.owner
        idle = [o for o in owner if o is not None and o.visible and o.state is State.SEALED and not o.pins]
        if idle:
            self.fabric.arenas[holder].payload(idle[which % len(idle)].slot)[0] ^= 1

    # --- lives, weights, time ------------------------------------------------------------------

    @rule(place=places, which=places)
    def crash_and_restart(self, place: int, which: int) -> None:
        node = self.node(place)
        holder = node[which % len(node)]
        life = self.fabric.lives[holder]
        self.fabric.cores.pop(holder)
        for other in [*self.fabric.cores, "directory:0"]:
            self.fabric.feed(other, Received("supervisor", HolderGone(holder, life)))
        self.fabric.start(holder)
        self.tell_weights()

    @rule(seldom=st.integers(0, 4))
    def update_weights(self, seldom: int) -> None:
        if self.weights < 3 and not seldom:
            self.weights += 1
            self.tell_weights()

    def tell_weights(self) -> None:
        digests = [weights_digest16(f"v{w}") for w in range(1, self.weights + 1)]
        for holder in self.fabric.cores:
            self.fabric.feed(holder, Received("supervisor", SetWeights(digests[-1], tuple(digests[:-1]), self.weights)))

    @rule(seconds=st.sampled_from((0.5, 3.0, 12.0, 60.0)))
    def wait(self, seconds: float) -> None:
        self.fabric.pass_time(seconds)

    # --- readers -------------------------------------------------------------------------------

    @rule(
        target=leases,
        place=places,
        prompt=prompts,
        n=lengths,
        lease_s=st.sampled_from((1.0, 10.0, 100.0)),
        graph=st.booleans(),
    )
    def acquire(self, place: int, prompt: int, n: int, lease_s: float, graph: bool) -> Any:
        return self.ask(place, prompt, n, lease_s, graph)

    @rule(target=leases, place=places, prompt=prompts, n=lengths)
    def acquire_for_long(self, place: int, prompt: int, n: int) -> Any:
        return self.ask(place, prompt, n, 200.0, False)

    @rule(target=leases, place=places, n=lengths)
    def acquire_the_usual(self, place: int, n: int) -> Any:
        return self.ask(place, 0, n, 5.0, False)

    def ask(self, place: int, prompt: int, n: int, lease_s: float, graph: bool) -> Any:
        """An acquire whose answer must be the oracle's, and whose bytes must be the judge's."""
        keys = self.keys(prompt, n)
        node = self.node(place)
        readers = tuple(next(h for h in node if s in self.fabric.shards[h]) for s in range(self.model.shards))
        oracle = Oracle(
            [group_of(g) for g in self.model.groups], self.world(), PROMPTS[prompt][:n], shards=self.model.shards
        )
        expected, promised = oracle.hit(), oracle.hash_tokens()
        answer = self.fabric.acquire(
            node[0],
            PROMPTS[prompt][:n],
            readers=readers,
            lease_s=lease_s,
            graph=graph and place % 2 == 0,
            weights=f"v{self.weights}",
        )
        assert answer is not None
        assert (answer.tokens, answer.hash_tokens) == (expected, promised), answer
        assert (answer.grant is not None) == (expected > 0)
        assert (answer.status is Status.FULL_HIT) == (expected == promised > 0)
        SEEN.update(("asked", "cut" if expected < promised else "whole", str(answer.status)))
        SEEN.update(["granted"] * (expected > 0) + ["fetched"] * bool(answer.sources))
        if answer.grant is None:
            return multiple()
        self.read((answer.grant, n, "fresh"), keys)
        return (answer.grant, n, f"v{self.weights}/{prompt}")

    def world(self) -> World:
        """What all holders have of the weights in force, as the oracle takes it."""
        world = World()
        for name, core in self.fabric.cores.items():
            for (group, shard), table in core.ctx.books.table.items():
                for digest, obj in table.items():
                    tokens = self.texts.get(digest)
                    if tokens is not None and obj.weights == core.ctx.weights:
                        key = (tokens, self.model.groups[group].name, shard)
                        world.copies.setdefault(key, set()).add(self.copy(name, obj))
        return world

    def copy(self, holder: str, obj: Obj) -> Copy:
        """One copy, whether its bytes are right or wrong."""
        on_tier = obj.state in (State.ON_TIER, State.RESTORING)
        due = self.due(obj.digest, obj.group, obj.shard, obj.revision)
        if on_tier:
            assert obj.on_disk is not None
            extent, number = obj.on_disk
            there = self.fabric.disks[holder][extent][number][1]
        else:
            there = self.fabric.arenas[holder].payload(obj.slot).tobytes()
        wrong = there != due or obj.bad is not None
        return Copy(obj.revision, "checksum_mismatch" if wrong else "", on_disk=on_tier)

    def read(self, lease: tuple[LeaseGrant, int, str], keys: Any = None) -> Reason | None:
        """A read is refused for a reason that is there, or every byte is what was published."""
        grant, n, of = lease
        deadline_s = self.deadlines.get((grant.leader, grant.lease), grant.deadline_s)
        refused = read_refusal(grant, deadline_s, self.fabric.parts(grant), self.fabric.now)
        lost = any(part.incarnation != self.fabric.lives[part.holder] for part in grant.parts)
        expired = self.fabric.now >= deadline_s
        old = grant.weights != weights_digest16(f"v{self.weights}")
        if expired or lost or old:
            due = Reason.LEASE_EXPIRED if expired else Reason.HOLDER_LOST if lost else Reason.WEIGHTS_MISMATCH
            assert refused is due
            return refused
        if (grant.leader, grant.lease) in self.over:
            return refused
        assert refused is None
        if keys is None:
            weights, prompt = of.split("/")
            keys = self.fabric.keys(PROMPTS[int(prompt)][:n], weights=weights)
        held = [
            Held(run.group, run.shard, index, self.fabric.arenas[part.holder].content(slot).tobytes())
            for part in grant.parts
            for run in part.slots
            for index, slot in zip(run.indices, np.frombuffer(run.slots, "<u4").tolist(), strict=True)
        ]
        blobs = {unit: keys.keys(unit) for unit in self.model.units_tokens}
        digests = {u: [b[i : i + 32] for i in range(0, len(b), 32)] for u, b in blobs.items()}
        assert self.judge.verdict(n, grant, digests, (ABI,) * len(self.model.groups), held) is None
        return None

    @rule(lease=leases)
    def read_again(self, lease: tuple[LeaseGrant, int, str]) -> None:
        self.read(lease)

    @rule(lease=leases, lease_s=st.sampled_from((1.0, 20.0)))
    def renew(self, lease: tuple[LeaseGrant, int, str], lease_s: float) -> None:
        grant = lease[0]
        before = self.read(lease)
        renewed = self.fabric.ask(grant.leader, Renew(self.fabric.name(), grant.lease, lease_s))
        if before is None and (grant.leader, grant.lease) not in self.over:
            assert renewed.refused is None
            self.deadlines[grant.leader, grant.lease] = renewed.deadline_s
        elif (grant.leader, grant.lease) not in self.over:
            assert renewed.refused is not None

    @rule(lease=consumes(leases))
    def release(self, lease: tuple[LeaseGrant, int, str]) -> None:
        grant = lease[0]
        assert self.fabric.ask(grant.leader, Release(self.fabric.name(), grant.lease, None)).refused is None
        self.over.add((grant.leader, grant.lease))

    # --- always --------------------------------------------------------------------------------

    @invariant()
    def every_holder_is_in_order(self) -> None:
        if hasattr(self, "fabric"):
            for core in self.fabric.cores.values():
                assert check(core) == []

    def teardown(self) -> None:
        """Every process ends, every promise runs out: nothing is left."""
        if hasattr(self, "fabric"):
            for holder in self.fabric.cores:
                self.fabric.feed(holder, PeerClosed("client:1"))
            self.fabric.pass_time(500.0)
            self.fabric.at_rest()


TestFabric = Fabric.TestCase
TestFabric.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_machine_grants_cuts_and_fetches() -> None:
    """Runs after the machine, which counts."""
    if not SEEN["asked"]:
        return  # this test was picked alone
    assert SEEN["granted"] >= SEEN["asked"] / 4, SEEN
    assert SEEN["cut"] >= SEEN["asked"] / 25, SEEN
    assert SEEN["fetched"] >= SEEN["asked"] / 25, SEEN


@pytest.mark.parametrize("mistake", ["any_group", "tail_revision"])
def test_the_machine_notices_a_wrong_rule(mistake: str) -> None:
    quick = settings(max_examples=200, stateful_step_count=30, deadline=None, phases=[Phase.generate], derandomize=True)
    with Patches() as patches:
        BY_NAME[mistake].apply(patches)
        with pytest.raises((AssertionError, ExceptionGroup)):
            run_state_machine_as_test(Fabric, settings=quick)

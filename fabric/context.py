"""What all desks of one holder share: its books, its clock reading, its outbox.

Nothing here decides; the desks (``stores``, ``pins``, ``parts``, ``leader``, ``disk``, ``events``)
do. Time is the ``now`` of the event being handled; wake-ups are a heap, not timers.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .admission import ByteLimit, TenantQuota
from .arena import Arena
from .books import Books
from .effects import Effect, Send
from .eviction import EvictionFactory, LeastRecentlyUsed
from .expected import Measured
from .far_tiers import FarTiers
from .journal import Journal
from .kinds import Reason
from .leases import LeaseBook
from .messages import Done, GraphRegistered, Renewed, ShardMap, StoreBegun
from .model import ModelSpec
from .objects import Obj
from .offers import Planning
from .requests import other_request
from .restores import Behalf, RestoreLimit
from .segments import Router, span_of
from .series import Histogram
from .stored_runs import StoredRuns
from .tally import Tally
from .wakes import Wake, Wakes
from .writing import DiskAdmission

Waiter = Callable[[Obj, Reason | None], None]
"""Told once when a FILLING or RESTORING object stands (None) or will not (the reason)."""


REFUSING = frozenset({Done, StoreBegun, Renewed, GraphRegistered})
"""Replies to clients that may bear a refusal."""

LIFE_SHIFT = 32
"""Leases and attempts are numbered from incarnation << 32, so that no number of an earlier life means one of this."""


@dataclass(frozen=True, slots=True)
class HolderConfig:
    """Bounds and time-outs of one holder. ``shards``: the ranks whose bytes lie here.

    ``limits``: byte limits per kind and tenant; ``restores_max`` and ``restore_bytes_max``: what may
    be restored from a tier at a time; ``ageing_s``: how long one step of priority is worth in line;
    ``graph_check_s``: how often an expired graph share asks whether it is still leased;
    ``restore_bytes_per_s``, ``host_bytes_per_s``, ``store_bytes_per_s``: how fast the disk, host memory and the store
    that all nodes share are taken to be read until that is measured.
    """

    holder: str
    node: str
    shards: tuple[int, ...] = (0,)
    directory: str = "directory:0"
    shard_map: ShardMap | None = None
    """The directory's shards; None where ``directory`` is the only one."""
    verify_always: bool = False
    request_timeout_s: float = 2.0
    room_poll_s: float = 0.25
    transfer_timeout_s: float = 10.0
    pin_ttl_s: float | None = None
    """How long a source keeps pins that nobody ends; None: as long as all tries of a transfer may take."""
    attempt_ttl_s: float = 300.0
    zero_between_tenants: bool = False
    """Whether a slot is overwritten before another tenant's state is written to it; host memory only."""
    recovery_wait_s: float = 60.0
    rounds_max: int = 12
    transfer_retries: int = 2
    attempts_max: int = 4096
    acquires_max: int = 4096
    answers_kept: int = 1024
    restores_max: int = 256
    restore_bytes_max: int = 64 << 20
    restore_extents_max: int = 64
    restore_limits: tuple[RestoreLimit, ...] = ()
    restore_batch_bytes: int = 8 << 20
    restore_batch_objects: int = 16
    restore_share: float = 0.5
    disk_bytes_max: int | None = None
    remote: bool = False
    """Whether extents are copied to a store that all nodes share."""
    extent_objects_max: int = 4096
    extent_bytes_max: int = 256 << 20
    limits: tuple[ByteLimit, ...] = ()
    quotas: tuple[tuple[str, TenantQuota], ...] = ()
    """By tenant; ``EVERY_TENANT`` for those that have none of their own."""
    spill_share: float = 0.0
    """Of each readers' pool, how much of the least worth has a copy in host memory before it makes room; 0: none."""
    slab_shares: tuple[int, ...] = ()
    """How many slabs each readers' pool has at first, in their order; evenly where nobody says."""
    slab_look_s: float = 5.0
    """How often it is asked whether a slab should change hands."""
    slab_gather_s: float = 15.0
    """How long it is watched what each pool loses before one changes hands."""
    ageing_s: float = 5.0
    event_ack_s: float = 1.0
    event_batches_kept: int = 64
    dump_objects_max: int = 4096
    lease_s_max: float = 3600.0
    graph_check_s: float = 10.0
    restore_bytes_per_s: float = 1e9
    host_bytes_per_s: float = 5e9
    store_bytes_per_s: float = 1e8
    move_bytes_per_s: float | None = None
    """What restores, fetches, copies, writes and uploads may move together, in a second; None for no limit."""
    scrub_bytes_per_s: float | None = None
    """How fast memory is digested round and round; None for never."""
    disk_scrub_bytes_per_s: float | None = None
    """How fast what lies on the local disk is read again, round and round; None for never."""
    grants_always: bool = False
    """Without a supervisor (a library inside one process) the right to grant never ends."""

    @property
    def pins_s(self) -> float:
        """Seconds that pins asked for at a source hold there."""
        if self.pin_ttl_s is not None:
            return self.pin_ttl_s
        return (1 + self.transfer_retries) * self.transfer_timeout_s + 2 * self.request_timeout_s


class HolderContext:
    """The shared state of one holder's life."""

    def __init__(
        self,
        config: HolderConfig,
        model: ModelSpec,
        arena: Arena,
        incarnation: int,
        weights: bytes,
        *,
        planning: Planning | None = None,
        writing: DiskAdmission | None = None,
        eviction: EvictionFactory = LeastRecentlyUsed,
    ) -> None:
        self.config = config
        self.planning = planning
        """Which position is worth it; None: the longest."""
        self.model = model
        self.arena = arena
        self.incarnation = incarnation
        self.books = Books(
            model,
            config.shards,
            arena,
            config.limits,
            dict(config.quotas),
            eviction=eviction,
            slab_shares=config.slab_shares,
        )
        self.books.last_tenants = {} if config.zero_between_tenants else None
        self.books.writing = writing
        self.router = Router(config.shard_map or ShardMap(0, (config.directory,)), span_of(model))
        """Which directory shard answers for which part of a chain."""
        self.far_tiers = FarTiers()
        self.stored_runs = StoredRuns()
        """What was stored together, for who proves it."""
        self.changes_told = 0
        """Changes of objects handed to the event streams, over this life."""
        self.leases = LeaseBook(self.books)
        self.weights = weights
        self.retired: set[bytes] = set()
        self.draining = False
        self.cut = False
        self.bypassed = False
        self.suspect = 0
        """The group that causes name while bypassed."""
        self.grants_until_s = float("inf") if config.grants_always else 0.0
        self.now = 0.0
        self.effects: list[Effect] = []
        self.local: deque[Any] = deque()
        kinds, units = (g.kind for g in model.groups), (g.unit_tokens for g in model.groups)
        self.tally = Tally(tuple(kinds), tuple(units))
        self.journal = Journal()
        self.recovery = Histogram()
        """How long acquires took that had to restore."""
        self.waiters: dict[int, list[tuple[str, Waiter]]] = {}
        """Who waits for an object, each with the exchange on whose behalf."""
        self.behalf = Behalf()
        self.hurried: dict[int, float] = {}
        """By transfer or read, by when its bytes are wanted after all; for those that wait for their turn."""
        self.inflight: dict[tuple[int, int, bytes], Obj] = {}
        """FILLING objects of fetches, by key: a second request joins instead of fetching again."""
        self._wakes = Wakes()
        self._numbers = self.leases.fence = incarnation << LIFE_SHIFT
        arena.set_weights(weights)

    @property
    def mark(self) -> int:
        """The count of this life's changes of objects, those of this step included."""
        return self.changes_told + sum([len(change.objects) for change in self.books.changes])

    @property
    def counters(self) -> Counter[str]:
        """The counts of this life that bear no labels."""
        return self.tally.counters

    # --- outbox --------------------------------------------------------------------------------

    def send(self, to: str, message: Any) -> None:
        """Deliver to a peer; to this holder itself, within the same step."""
        if type(message) in REFUSING and message.refused is not None and to.startswith("client:"):
            self.tally.refusals[type(message).__name__, message.refused] += 1
        if to == self.config.holder:
            self.local.append(message)
        else:
            self.effects.append(Send(to, message))

    def do(self, effect: Effect) -> None:
        self.effects.append(effect)

    def number(self) -> int:
        """A number never used before, in this life or an earlier one."""
        self._numbers += 1
        return self._numbers

    def of_this_life(self, number: int) -> bool:
        """Whether a lease or attempt of this number was begun in this life."""
        return number >> LIFE_SHIFT == self.incarnation

    def op(self) -> str:
        """A name for one exchange, unique over all holders and lives."""
        return f"{self.config.holder}/{self.incarnation}/{self.number()}"

    def learn(self, measured: Measured) -> None:
        """What some work really took: for whoever plans by it."""
        if self.planning is not None and measured.amount > 0 and measured.seconds > 0:
            self.planning.learn(measured)

    # --- time ----------------------------------------------------------------------------------

    def wake_at(self, at: float, call: Callable[[], None]) -> Wake:
        """Have ``call`` run by the first step at or after ``at``, unless it is cancelled; it must tolerate being late."""
        return self._wakes.at(at, self.number(), call)

    def wake_due(self) -> None:
        self._wakes.run_due(self.now)

    @property
    def next_wake_s(self) -> float | None:
        return self._wakes.next_s

    def cut_off(self) -> None:
        """Grant nothing in this life any more, and refuse every reader of what was granted."""
        self.cut = True
        self.grants_until_s = 0.0
        self.arena.set_grants_until(0)

    @property
    def may_grant(self) -> bool:
        return self.now < self.grants_until_s

    # --- arrivals ------------------------------------------------------------------------------

    def await_object(self, obj: Obj, waiter: Waiter) -> None:
        self.waiters.setdefault(id(obj), []).append((self.behalf.op, waiter))

    def arrived(self, obj: Obj, refused: Reason | None) -> None:
        """Tell everyone who waits for this object, once."""
        for _, waiter in self.waiters.pop(id(obj), ()):
            waiter(obj, refused)

    def awaited_only_by(self, obj: Obj, op: str) -> bool:
        """Whether nobody but one exchange waits for this object."""
        return all(name == op for name, _ in self.waiters.get(id(obj), ()))

    @contextlib.contextmanager
    def on_behalf(self, op: str, place_s: float) -> Iterator[None]:
        """What is begun within is begun for this exchange, at its place in line."""
        before, self.behalf = self.behalf, Behalf(op, place_s)
        try:
            yield
        finally:
            self.behalf = before


@dataclass(slots=True)
class Recent:
    """The last ``size`` answers by request id, so that a retry is answered and not run again.

    ``asked`` (:func:`~.requests.gist`) tells a retry from another request that bears an id in use: that one gets a
    Misuse, not the answer to something else.
    """

    size: int
    _kept: OrderedDict[str, tuple[Any, Any]] = field(default_factory=OrderedDict)

    def get(self, request: str, asked: Any = None) -> Any | None:
        kept = self._kept.get(request)
        if kept is None:
            return None
        return kept[1] if kept[0] == asked else other_request(request)

    def put(self, request: str, answer: Any, asked: Any = None) -> None:
        self._kept[request] = (asked, answer)
        self._kept.move_to_end(request)
        while len(self._kept) > self.size:
            self._kept.popitem(last=False)

    def drop(self, request: str) -> None:
        self._kept.pop(request, None)

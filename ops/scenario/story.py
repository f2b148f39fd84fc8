"""What a scenario file says: the model, the nodes, and one record a verb.

A record's fields are the arguments of the format's table, in its words. What needs the model or
other steps to be judged (is this block's group a group of blocks, was this lease ever named) is
judged in ``checks.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Strict,
    Tag,
    model_validator,
)

from ...fabric.kinds import Layer, ObjectKind, Reason, Status
from ...fabric.model import ModelSpec

TOKENS_MAX = 1 << 24
SECONDS_MAX = 366 * 86400.0
DIRECTORY = "directory"
"""The name that ``kill``, ``restart`` and ``partition`` know the directory by."""


def _name(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _one_line(value: str) -> str:
    if "\n" in value.strip():
        raise ValueError("one line is expected")
    return value.strip()


def _shape(value: Any) -> str:
    """Which member of a union a value of the file is meant to be."""
    return "<mapping>" if isinstance(value, dict | BaseModel) else "<list>" if isinstance(value, list) else "<plain>"


Text = Annotated[str, BeforeValidator(_name)]
Name = Annotated[str, BeforeValidator(_name), Field(min_length=1, max_length=256)]
Line = Annotated[str, BeforeValidator(_name), AfterValidator(_one_line), Field(min_length=1)]
Flag = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Field(ge=0, le=TOKENS_MAX)]
Seconds = Annotated[float, Strict(), Field(ge=0, le=SECONDS_MAX, allow_inf_nan=False)]
Revision = Annotated[int, Strict(), Field(ge=0, lt=1 << 63)]


def _range(value: list[int]) -> list[int]:
    if value[0] > value[1]:
        raise ValueError(f"[from, to] is expected, {value[0]} is behind {value[1]}")
    return value


Range = Annotated[list[Count], Field(min_length=2, max_length=2), AfterValidator(_range)]
"""[from, to): empty where both are equal."""


class Record(BaseModel):
    """A mapping in the file: unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Branch(Record):
    """A prompt that shares its first ``share`` tokens with another."""

    like: PromptName
    share: Count
    then: Name


PromptName = Annotated[
    Annotated[Name, Tag("<plain>")] | Annotated[Name, Tag("<list>")] | Annotated[Branch, Tag("<mapping>")],
    Discriminator(_shape),
]


class Adapter(Record):
    """A LoRA or other adapter, by name and revision."""

    name: Name
    revision: Name


class ExtraContent(Record):
    """An image or audio content that begins at a token offset."""

    at: Count
    digest: Name


class Keyed(Record):
    """Everything that tokens are looked up by, besides the weights."""

    prompt: PromptName
    tenant: Text = ""
    salt: Text = ""
    adapter: Adapter | None = None
    extra: list[ExtraContent] = Field(default_factory=list)


class Selected(Record):
    """Objects of one group: by block, by token range or by snapshot position; all where none is said."""

    blocks: list[Count] | None = None
    tokens: Range | None = None
    positions: list[Count] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Selected:
        if sum(way is not None for way in (self.blocks, self.tokens, self.positions)) > 1:
            raise ValueError("one of blocks, tokens and positions is expected")
        return self


class Selection(Selected):
    """What a ``store`` names of one group, and the producer's stamp on it."""

    revision: Revision = 0


class Store(Keyed):
    """Publish what a prefill of the first ``tokens`` tokens left, or only what ``groups`` names."""

    at: Name
    tokens: Count
    groups: dict[str, Selection] | None = None
    shards: list[Count] | None = None
    weights: Name | None = None


class Begin(Store):
    """The first move of a store."""

    name: Name = Field(alias="as")


class Attempt(Record):
    """``commit``, ``abort`` and ``quiesce``: a later move of a store, by the name it was begun as."""

    name: Name = Field(alias="as")


class Extend(Keyed):
    """A request that holds [0, from) grows to ``to``."""

    at: Name
    tokens: Range
    revision: Revision = 0


class Drop(Selected, Keyed):
    """Evict from memory."""

    at: Name
    group: Name


class Swap(Keyed):
    """``swap_out`` and ``swap_in``: to disk and back."""

    at: Name
    groups: (
        Annotated[
            Annotated[list[Name], Tag("<list>")]
            | Annotated[list[Name], Tag("<plain>")]
            | Annotated[dict[str, Selected], Tag("<mapping>")],
            Discriminator(_shape),
        ]
        | None
    ) = None
    tokens: (
        Annotated[
            Annotated[Count, Tag("<plain>")] | Annotated[Count, Tag("<mapping>")] | Annotated[Range, Tag("<list>")],
            Discriminator(_shape),
        ]
        | None
    ) = None


class How(StrEnum):
    """In which way bytes are damaged."""

    FLIP = "flip"
    TRUNCATE = "truncate"
    TORN = "torn"


class Where(StrEnum):
    """On which tier bytes are damaged."""

    MEMORY = "memory"
    DISK = "disk"


class OneObject(Record):
    """One object of a group: a block by number, a snapshot by position."""

    block: Count | None = None
    position: Count | None = None

    @model_validator(mode="after")
    def _not_both(self) -> OneObject:
        if self.block is not None and self.position is not None:
            raise ValueError("block or position is expected, not both")
        return self


class Corrupt(OneObject, Keyed):
    """Damage one object behind the fabric's back; without ``where``, on every tier."""

    at: Name
    group: Name
    how: How = How.FLIP
    where: Where | None = None

    @model_validator(mode="after")
    def _one(self) -> Corrupt:
        if self.block is None and self.position is None:
            raise ValueError("block or position is expected")
        return self


class UpdateWeights(Record):
    """Put another weights revision in force."""

    to: Name


class AbiFields(Record):
    """What ``set_abi`` may change of a passport; what is not named stays."""

    layout: Name | None = None
    dtype: Name | None = None
    kernel: Name | None = None
    strides: Annotated[list[Count], BeforeValidator(lambda v: [v] if isinstance(v, int) else v)] | None = None
    alignment: Annotated[int, Strict(), Field(ge=1, le=1 << 20)] | None = None


class SetAbi(AbiFields):
    """Another kernel at one node."""

    at: Name
    group: Name

    @model_validator(mode="after")
    def _something(self) -> SetAbi:
        if all(getattr(self, name) is None for name in AbiFields.model_fields):
            raise ValueError("one of layout, dtype, kernel, strides and alignment is expected")
        return self


class Probe(Keyed):
    """Look up without a lease."""

    at: Name
    tokens: Count


class Acquire(Probe):
    """Ask for a lease."""

    name: Name | None = Field(default=None, alias="as")
    lease_s: Annotated[Seconds, Field(gt=0)] = 30.0
    wait_s: Seconds | None = None
    wait: Flag = True
    graph: Flag = False
    min_tokens: Count = 0

    @model_validator(mode="after")
    def _one_wait(self) -> Acquire:
        if not self.wait and self.wait_s:
            raise ValueError("wait: false is wait_s: 0, the two contradict each other")
        return self

    @property
    def waits_s(self) -> float | None:
        """None: recovery is awaited, room is not. 0: nothing is awaited."""
        return self.wait_s if self.wait else 0.0


class Read(Record):
    """Read every leased byte, of one group or of all."""

    lease: Name
    group: Name | None = None


class Renew(Record):
    """Extend a lease from now, by its own length where none is said."""

    lease: Name
    lease_s: Annotated[Seconds, Field(gt=0)] | None = None


class Release(Record):
    """End a lease."""

    lease: Name


class Advance(Record):
    """Move the clock."""

    seconds: Seconds


class Member(Record):
    """``kill`` and ``restart``: a node or the directory."""

    node: Name


class Between(Record):
    """``partition`` and ``heal``."""

    between: Annotated[list[Name], Field(min_length=2, max_length=2)]


class Fault(StrEnum):
    """What ``inject`` knows."""

    TRANSFER_FAIL = "transfer_fail"
    TRANSFER_TORN = "transfer_torn"
    NOTIFY_EARLY = "notify_early"
    LOAD_FAIL = "load_fail"
    DISK_OPEN_FAILS = "disk_open_fails"
    DISK_FULL = "disk_full"
    DISK_TORN_WRITE = "disk_torn_write"
    DISK_READ_ONLY = "disk_read_only"
    DISK_READ_ERROR = "disk_read_error"
    DISK_SHORT_READ = "disk_short_read"
    DISK_FLIPPED = "disk_flipped"
    DISK_SLOW = "disk_slow"


class Inject(OneObject):
    """Have the next operations at a node meet a fault."""

    at: Name
    fault: Fault
    times: Count = 1
    group: Name | None = None

    @model_validator(mode="after")
    def _fits(self) -> Inject:
        named = self.block is not None or self.position is not None
        if self.fault is Fault.LOAD_FAIL and self.times and not (self.group and named):
            raise ValueError("load_fail needs a group, and a block or position")
        if self.fault is not Fault.LOAD_FAIL and (self.group or named):
            raise ValueError("group, block and position belong to load_fail")
        return self


class Metrics(Record):
    """The metrics that ``check`` knows, each counted once an acquire."""

    hash_hit_tokens_total: Count | None = None
    usable_hit_tokens_total: Count | None = None
    effective_hit_tokens_total: Count | None = None
    validation_failures_total: Count | None = None


class Check(Record):
    """Assert on the fabric's own books."""

    pins: Count | None = None
    slots_lost: Annotated[int, Strict()] | None = None
    metric: Metrics | None = None

    @model_validator(mode="after")
    def _something(self) -> Check:
        if self.pins is None and self.slots_lost is None and self.metric is None:
            raise ValueError("one of pins, slots_lost and metric is expected")
        return self


class CauseExpected(Record):
    """Any subset of a cause."""

    group: Name | None = None
    kind: ObjectKind | None = None
    layer: Layer | None = None
    reason: Reason | None = None


class AnswerExpected(Record):
    """What ``acquire`` and ``probe`` may be expected to answer: any subset."""

    status: Status | None = None
    tokens: Count | None = None
    hash_tokens: Count | None = None
    cause: CauseExpected | None = None
    also: list[Name] | None = None
    replay_from: Count | None = None


class DoneExpected(Record):
    """What every other verb may be expected to answer."""

    ok: Flag | None = None
    refused: Reason | None = None


VERBS: dict[str, type[Record]] = {
    "store": Store,
    "extend": Extend,
    "begin": Begin,
    "commit": Attempt,
    "abort": Attempt,
    "quiesce": Attempt,
    "drop": Drop,
    "swap_out": Swap,
    "swap_in": Swap,
    "corrupt": Corrupt,
    "update_weights": UpdateWeights,
    "set_abi": SetAbi,
    "acquire": Acquire,
    "read": Read,
    "renew": Renew,
    "release": Release,
    "probe": Probe,
    "advance": Advance,
    "kill": Member,
    "restart": Member,
    "partition": Between,
    "heal": Between,
    "inject": Inject,
    "check": Check,
}
PARALLEL = "parallel"


def expected_of(verb: str) -> type[Record]:
    """The record that may be expected of a verb's answer."""
    return AnswerExpected if verb in {"acquire", "probe"} else DoneExpected


Slots = Annotated[int, Strict(), Field(ge=1, le=1 << 24)]


class Node(Record):
    """One node; ``capacity``: slots a group and shard.

    ``host_memory`` is this project's own key, no part of the shared format: slots a group and shard of host
    memory below what readers map there. What is swapped out then goes there before it goes to disk.
    So is ``slabs``: the groups share what their slots take there, slab by slab.
    """

    capacity: dict[str, Slots] = Field(default_factory=dict)
    host_memory: dict[str, Slots] = Field(default_factory=dict)
    slabs: Annotated[bool, Strict()] = False


@dataclass(frozen=True, slots=True)
class Step:
    """One step. ``expect`` holds the expected fields as the file says them; ``steps`` is of ``parallel``."""

    verb: str
    args: Record | None
    expect: dict[str, Any] | None
    path: tuple[str | int, ...]
    line: int
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Story:
    """One scenario, checked."""

    file: str
    scenario: str
    source: str | None
    model: ModelSpec
    nodes: dict[str, Node]
    steps: tuple[Step, ...] = field(default=())

    def each_step(self) -> list[Step]:
        """All steps, those of ``parallel`` in place of it."""
        return [inner for step in self.steps for inner in (step.steps or (step,))]

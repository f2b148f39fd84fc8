"""What the demo's processes tell each other: plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Loaded:
    """A worker's model: its fabric spec as data, and the weights revision of its tensors."""

    spec: dict[str, Any]
    weights: str
    kinds: dict[str, str]


@dataclass(frozen=True, slots=True)
class Broken:
    """One fault, as the writer caused it in the fabric.

    ``objects`` is what a cache keyed by tokens alone would hold afterwards at ``position``;
    ``other_weights`` names the revision that part of it was published under, if any.
    """

    fault: str
    kind: str
    group: str
    words: str
    position: int
    base: int
    other_weights: str
    objects: dict[str, dict[int, Any]] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt that the reader resumed. Seconds to the first token; bytes by group."""

    prefix_tokens: int
    resume_tokens: int
    computed_tokens: int
    logits_equal: bool
    status: str
    cause: str
    recompute_s: float
    reuse_s: float
    moved_bytes: dict[str, int]
    sources: tuple[str, ...]
    fence: int
    lease_left_s: float


@dataclass(frozen=True, slots=True)
class FaultRun:
    """What became of one fault."""

    fault: str
    kind: str
    group: str
    words: str
    position: int
    hash_tokens: int
    granted_tokens: int
    status: str
    cause: str
    logits_equal: bool
    tokens_wrong: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The whole demo. ``transport``: the link that moved the bytes."""

    model: str
    nodes: int
    kinds: dict[str, str]
    runs: tuple[Run, ...]
    faults: tuple[FaultRun, ...]
    transport: str
    decode_tokens: int

    @property
    def logits_equal(self) -> bool:
        """Whether every comparison held, those under faults included."""
        return all(run.logits_equal for run in self.runs) and all(fault.logits_equal for fault in self.faults)

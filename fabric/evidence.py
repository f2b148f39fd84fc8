"""What is known about the objects of one prompt, in the form the rule engine erodes.

Object i of a group of blocks is the block that ends at (i + 1) * block_tokens; of a group of
snapshots, the snapshot at (i + 1) * grid_tokens. Bit i of a bitmap speaks of object i.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .kinds import Reason


@dataclass(frozen=True, slots=True)
class Blocked:
    """Objects whose digest matches (or matched) but which may not be used, and why.

    ``from_tier`` marks a cut that came from a tier below memory: the cause's kind is then
    ``disk_prefix``.
    """

    reason: Reason
    bits: int
    from_tier: bool = False


@dataclass(frozen=True, slots=True)
class GroupEvidence:
    """One group's objects along one prompt, over everything considered.

    ``usable`` maps a revision to the objects that are usable *on every shard* in that revision
    (an object held in two revisions has its bit in both). ``matched`` holds every object some
    shard of which bears the prompt's digest, usable or not: what hashes alone would promise.
    ``blocked`` names why an object is not usable; the first entry that has its bit speaks. An
    object that no entry names is simply absent, and the reason is that of its kind.
    """

    usable: dict[int, int] = field(default_factory=dict)
    matched: int = 0
    blocked: tuple[Blocked, ...] = ()

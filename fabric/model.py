"""Model and group specs: the rules of one model's cache as data.

A spec names the cache groups of a model and, for each, the kind, the cut and the rule that says
what a resume at position p needs. No code anywhere depends on a model's name.
"""

from __future__ import annotations

from functools import cached_property
from math import gcd, lcm
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .kinds import Form, ObjectKind, SpecError
from .settings import describe, joined

GROUPS_MAX = 64
SHARDS_MAX = 64


class GroupSpec(BaseModel):
    """One cache group: layers that share one rule.

    ``ratio`` and ``lag_tokens`` belong to history; ``of`` and ``overlap_tokens`` to tails (and
    ``of`` to indexers); ``window_tokens`` and ``sink_tokens`` to windows. ``block_bytes`` is the
    payload of one object of one shard, all the group's layers together. ``bears_slots`` (an index whose bytes name
    physical slots) is refused: nobody rewrites them where the bytes arrive.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))

    name: str = Field(min_length=1, max_length=64)
    kind: ObjectKind
    form: Form = Form.BLOCKS
    block_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    grid_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    ratio: int = Field(default=1, ge=1, le=1 << 20)
    lag_tokens: int = Field(default=0, ge=0, le=1 << 30)
    of: str | None = None
    overlap_tokens: int = Field(default=0, ge=0, le=1 << 20)
    window_tokens: int | None = Field(default=None, ge=1, le=1 << 30)
    sink_tokens: int = Field(default=0, ge=0, le=1 << 20)
    endpoint_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    keep_tokens: int | None = Field(default=None, ge=0)
    bears_slots: bool = False
    block_bytes: int = Field(default=4096, ge=1, le=1 << 34)
    page_bytes: int | None = Field(default=None, ge=1, le=1 << 34)
    alignment_bytes: int = Field(default=1, ge=1, le=1 << 20)
    layers: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _fields_fit_the_kind(self) -> GroupSpec:
        if self.kind is ObjectKind.DISK_PREFIX:
            raise ValueError("kind: disk_prefix is made by swapping out, never declared")
        if self.form is Form.BLOCKS and self.block_tokens is None:
            raise ValueError("block_tokens: a group of blocks needs it")
        if self.form is Form.BLOCKS and self.grid_tokens is not None:
            raise ValueError("grid_tokens: only a group with form: state has it")
        if self.form is Form.STATE and self.grid_tokens is None:
            raise ValueError("grid_tokens: a group with form: state needs it")
        if self.form is Form.STATE and self.block_tokens is not None:
            raise ValueError("block_tokens: a group with form: state has none")
        if self.form is Form.STATE and self.endpoint_tokens is not None:
            raise ValueError("endpoint_tokens: a snapshot serves exactly its position")
        history = self.kind is ObjectKind.COMPRESSED_HISTORY
        window = self.kind is ObjectKind.SLIDING_WINDOW
        tail = self.kind is ObjectKind.UNCOMPRESSED_TAIL
        if not history and self.ratio != 1:
            raise ValueError("ratio: only compressed_history has it (a group that is `of` one takes its)")
        if not history and self.lag_tokens:
            raise ValueError("lag_tokens: only compressed_history has it")
        if self.form is Form.BLOCKS and self.block_tokens is not None and self.block_tokens % self.ratio:
            raise ValueError(f"ratio: {self.ratio} does not divide block_tokens {self.block_tokens}")
        if window and self.form is Form.BLOCKS and self.window_tokens is None:
            raise ValueError("window_tokens: a sliding_window of blocks needs it")
        if not window and (self.window_tokens is not None or self.sink_tokens):
            raise ValueError("window_tokens, sink_tokens: only sliding_window has them")
        if not tail and self.overlap_tokens:
            raise ValueError("overlap_tokens: only uncompressed_tail has it")
        if (tail or self.kind is ObjectKind.INDEXER) and self.of is None:
            raise ValueError(f"of: a group of kind {self.kind} needs it")
        if not tail and self.kind is not ObjectKind.INDEXER and self.of is not None:
            raise ValueError("of: only uncompressed_tail and indexer have it")
        if self.bears_slots:
            raise ValueError(
                "bears_slots: an index that names physical slots is true in one place only: name positions"
            )
        if self.page_bytes is not None and self.page_bytes < self.block_bytes:
            raise ValueError(f"page_bytes: {self.page_bytes} is less than block_bytes {self.block_bytes}")
        return self

    @property
    def unit_tokens(self) -> int:
        """Tokens between the ends of neighbouring objects: the block, or the snapshot grid."""
        unit = self.block_tokens if self.form is Form.BLOCKS else self.grid_tokens
        assert unit is not None
        return unit

    @property
    def endpoint_unit_tokens(self) -> int:
        """Tokens between positions this group lets a resume end at."""
        return self.endpoint_tokens or self.unit_tokens


class ModelSpec(BaseModel):
    """All cache groups of one model, in model order, and how it is sharded.

    ``chained`` false: the one group's blocks are named singly, by an engine's own hashes, each of which stands for all
    before it. Prompts list such blocks in any order and number; each is found by itself.

    Raises :class:`SpecError` from :meth:`load` with the field and the reason.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))

    name: str = Field(default="model", min_length=1, max_length=128)
    weights: str = "v1"
    groups: tuple[GroupSpec, ...] = Field(min_length=1, max_length=GROUPS_MAX)
    shards: int = Field(default=1, ge=1, le=SHARDS_MAX)
    drop_last_blocks: int = Field(default=0, ge=0, le=1 << 16)
    plan: Literal["longest", "cost"] = "longest"
    replay: bool = False
    chained: bool = True

    @model_validator(mode="after")
    def _groups_fit_together(self) -> ModelSpec:
        by_name: dict[str, GroupSpec] = {}
        first = self.groups[0]
        plain = first.kind is ObjectKind.COMPRESSED_HISTORY and first.form is Form.BLOCKS and first.ratio == 1
        if not self.chained and (len(self.groups) > 1 or not plain or first.lag_tokens or first.endpoint_tokens):
            raise ValueError("chained: blocks named singly are those of one compressed_history group of ratio 1")
        for group in self.groups:
            if group.name in by_name:
                raise ValueError(f"groups.{group.name}: the name stands twice")
            by_name[group.name] = group
        for group in self.groups:
            if group.of is None:
                continue
            target = by_name.get(group.of)
            if target is None:
                raise ValueError(f"groups.{group.name}.of: there is no group {group.of!r}")
            indexer = target.kind is ObjectKind.INDEXER
            if target.kind is not ObjectKind.COMPRESSED_HISTORY and not (
                indexer and group.kind is ObjectKind.UNCOMPRESSED_TAIL
            ):
                raise ValueError(f"groups.{group.name}.of: {group.of!r} is a {target.kind}, it must be a history group")
            if self.history_of(group).form is Form.STATE and (
                group.kind is ObjectKind.INDEXER or group.form is Form.BLOCKS
            ):
                raise ValueError(f"groups.{group.name}.of: {group.of!r} is a snapshot, it has no entries to refer to")
        return self

    def index_of(self, name: str) -> int:
        """Position of a group in model order. Raises KeyError for an unknown name."""
        return self._index_by_name[name]

    @cached_property
    def _index_by_name(self) -> dict[str, int]:
        return {group.name: i for i, group in enumerate(self.groups)}

    def group(self, name: str) -> GroupSpec:
        """The group of that name. Raises KeyError for an unknown name."""
        return self.groups[self._index_by_name[name]]

    def history_of(self, group: GroupSpec) -> GroupSpec:
        """The history group at the root of ``of`` (itself for a group that is of nothing)."""
        by_name = {g.name: g for g in self.groups}
        seen = group
        for _ in range(3):
            if seen.of is None:
                return seen
            seen = by_name[seen.of]
        raise SpecError(f"groups.{group.name}.of: the chain does not end at a history group")

    @cached_property
    def families(self) -> tuple[tuple[int, ...], ...]:
        """Groups that must bear one revision: each history group with everything `of` it.

        Windows stand alone: nothing binds their revision.
        """
        families: dict[str, list[int]] = {}
        for i, group in enumerate(self.groups):
            if group.kind is not ObjectKind.SLIDING_WINDOW:
                families.setdefault(self.history_of(group).name, []).append(i)
        return tuple(tuple(members) for members in families.values())

    @cached_property
    def grid_tokens(self) -> int:
        """Tokens between positions where a resume may end: lcm of the groups' endpoint units."""
        return lcm(*(group.endpoint_unit_tokens for group in self.groups))

    @cached_property
    def units_tokens(self) -> tuple[int, ...]:
        """The distinct object units, ascending: where a prompt needs digests."""
        return tuple(sorted({group.unit_tokens for group in self.groups}))

    @cached_property
    def cut_tokens(self) -> int:
        """gcd of all object units and endpoint units: the finest cut of the token chain."""
        return gcd(*(g.unit_tokens for g in self.groups), *(g.endpoint_unit_tokens for g in self.groups))

    @classmethod
    def load(cls, data: dict[str, Any], *, where: str = "model") -> ModelSpec:
        """Validate plain data. Raises SpecError naming ``where``, the field and the reason.

        A spec whose ``keep_tokens`` leave nothing that any prompt could ever be resumed from is refused.
        """
        # The rules are built on the specs, so they cannot be imported above.
        from .keeping import never_hits

        try:
            model = cls.model_validate(data)
        except ValidationError as error:
            raise SpecError(describe(error, where)) from None
        hopeless = never_hits(model)
        if hopeless is not None:
            raise SpecError(joined(where, hopeless))
        return model

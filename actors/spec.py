"""What a fabric is launched with: the model, the memory, the way bytes travel.

Plain data, checked once: a bad field is one line that names it. The spec travels to every process
of the fabric as JSON.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator

from ..fabric.arena import ArenaLayout, Checksum, Memory, PoolLayout
from ..fabric.budget import in_slabs, slots_for
from ..fabric.kinds import SpecError, Tier
from ..fabric.model import GroupSpec, ModelSpec
from ..fabric.passport import AbiPassport
from ..fabric.settings import describe, read, written
from ..fabric.specs import read_mapping
from ..policies.checkpoint import checkpoint_policy
from ..policies.eviction import eviction_policy
from .shards import DIRECTORY_SHARDS_MAX
from .spec_sections import (
    CostSpec,
    DiskSpec,
    LimitsSpec,
    NoticeSpec,
    PassportSpec,
    PlacementSpec,
    ScaleSpec,
    Section,
    SlabSpec,
    TransportSpec,
)

SLOTS_MAX = 1 << 24


class FabricSpec(Section):
    """One fabric. ``memory_bytes``: each holder's arena, split over the groups so that each holds the
    same prompts (``kvfabric spec size`` prints how many tokens); ``slots`` names a group's slots a shard instead.

    ``host_memory_bytes``: a tier of host memory below what readers map, split likewise, ``host_slots`` in its
    place: ``memory_bytes`` is then the tier G1 and this G2. What is swapped out goes there before it goes to disk.
    ``device``: ``cuda`` puts what readers map on a GPU, one a holder; what they are handed are tensors there.
    ``checksum``: how all holders digest payload; by default the fastest that the device can.
    ``directory_shards``: how many processes the directory is spread over.
    ``holders_per_node``: how many holders share a node without GPUs (each owns some shards).
    ``node_bytes_per_s``: what a node's holders may move together in a second, restores, fetches, copies between
    tiers, writes, drains and uploads, live requests first; each holder has an even share of it. None for no limit.
    ``node_resource``: only nodes that offer this Ray resource (one of these) get a holder.
    ``node_labels``: only nodes that bear all these Ray labels do.
    ``node_slots``: resource -> group -> slots a shard on nodes that offer it, where they differ.
    ``scrub_bytes_per_s``: how fast each holder's memory is digested, round and round, to find damage before it is
    asked for; None for never, and never under ``testing``.
    ``notices``: how a holder learns that its node goes away, so that it is drained in time.
    ``scale``: whether holders of idle nodes end, and whether nodes are asked for under pressure.
    ``disk``: the local disk tier; without it, nothing is written anywhere.
    ``checkpoint``: which windows, tails and snapshots of a prompt are kept (``all``, ``every:N``, ``ends``, ``branches``).
    ``eviction``: who makes room (``default``, ``lru``, ``s3fifo``, or an entry point of ``kvfabric.eviction``).
    ``costs``: what a model with ``plan: cost`` starts from.
    ``limits``: what kinds and tenants may take of each holder.
    ``slabs``: groups share what readers map slab by slab: memory goes from the group that loses least for want of room to
    the one that loses most, as the mix of prompts changes; what is named above is then where it begins. None for a part of its own for each group.
    ``zero_between_tenants``: overwrite a slot before another tenant's state is written to it, so that nobody is handed
    what another one left there; of slots in host memory.
    ``audit_fraction``: of which part of the leases an adapter recomputes the state too, and compares.
    ``log_acquires``: which acquires get a line of the log: none, those that fell short, all.
    ``metrics_every_s``: how often a holder's metrics are handed to Ray's metrics agent; 0: never.
    ``placement``: second copies of hot prefixes; without it, prefixes lie where they were asked for.
    ``testing``: its processes take the records of a rehearsal (``fabric/doors.py``) and their clock stands
    still until it is moved, so anyone who may connect can break it: never on a fabric that serves.
    """

    model: ModelSpec
    memory_bytes: int = Field(default=256 << 20, ge=1 << 16)
    slots: dict[str, int] = Field(default_factory=dict)
    device: Literal["cpu", "cuda"] = "cpu"
    checksum: Checksum | None = None
    host_memory_bytes: int | None = Field(default=None, ge=1 << 16)
    host_slots: dict[str, int] = Field(default_factory=dict)
    holders_per_node: int = Field(default=1, ge=1, le=64)
    node_bytes_per_s: float | None = Field(default=None, gt=0)
    directory_shards: int = Field(default=1, ge=1, le=DIRECTORY_SHARDS_MAX)
    node_resource: str | tuple[str, ...] | None = None
    node_labels: dict[str, str] = Field(default_factory=dict)
    node_slots: dict[str, dict[str, int]] = Field(default_factory=dict)
    testing: bool = False
    passports: dict[str, PassportSpec] = Field(default_factory=dict)
    transport: TransportSpec = Field(default_factory=TransportSpec)
    disk: DiskSpec | None = None
    notices: NoticeSpec = Field(default_factory=NoticeSpec)
    scale: ScaleSpec = Field(default_factory=ScaleSpec)
    checkpoint: str = "all"
    eviction: str = "default"
    costs: CostSpec = Field(default_factory=CostSpec)
    limits: LimitsSpec = Field(default_factory=LimitsSpec)
    placement: PlacementSpec | None = None
    verify: Literal["headers", "always"] = "headers"
    scrub_bytes_per_s: float | None = Field(default=8 << 20, gt=0)
    grant_s: float = Field(default=10.0, gt=0)
    lease_s_max: float = Field(default=3600.0, gt=0)
    attempt_ttl_s: float = Field(default=300.0, gt=0)
    zero_between_tenants: bool = False
    slabs: SlabSpec | None = None
    audit_fraction: float = Field(default=0.0, ge=0, le=1)
    log_acquires: Literal["none", "short", "all"] = "short"
    metrics_every_s: float = Field(default=5.0, ge=0)
    _passed_over: tuple[str, ...] = PrivateAttr(default=())
    _read_from: str = PrivateAttr(default="")

    @field_validator("checkpoint")
    @classmethod
    def _is_a_policy(cls, checkpoint: str) -> str:
        try:
            checkpoint_policy(checkpoint)
        except SpecError as error:
            raise ValueError(str(error).removeprefix("checkpoint: ")) from None
        return checkpoint

    @field_validator("eviction")
    @classmethod
    def _is_an_eviction_policy(cls, eviction: str) -> str:
        try:
            eviction_policy(eviction)
        except SpecError as error:
            raise ValueError(str(error).removeprefix("eviction: ")) from None
        return eviction

    @model_validator(mode="after")
    def _names_are_groups(self) -> FabricSpec:
        known = {group.name for group in self.model.groups}
        slots = {"slots": self.slots, "host_slots": self.host_slots}
        slots |= {f"node_slots.{r}": named for r, named in self.node_slots.items()}
        fields: dict[str, Mapping[str, Any]] = {**slots, "passports": self.passports}
        for field, names in fields.items():
            for name in names:
                if name not in known:
                    raise ValueError(f"{field}.{name}: the model has no such group")
        for field, counts in slots.items():
            for name, count in counts.items():
                if not 1 <= count <= SLOTS_MAX:
                    raise ValueError(f"{field}.{name}: {count} is not within 1..{SLOTS_MAX}")
        try:
            self.limits.byte_limits(self.model)
            self.layout(self.shards_of(0))
        except SpecError as error:
            raise ValueError(str(error)) from None
        if self.device == "cuda":
            if self.disk is not None and self.host_memory_bytes is None:
                raise ValueError("host_memory_bytes: between a GPU and a disk bytes pass through host memory")
            if self.checksum is Checksum.XXH3_128:
                raise ValueError("checksum: a GPU cannot compute xxh3_128: say lanes_128, or nothing")
            if self.testing:
                raise ValueError("testing: rehearsals work on host memory, not on a GPU's")
            if self.zero_between_tenants:
                raise ValueError("zero_between_tenants: slots in a GPU's memory are not overwritten")
        if self.host_slots and self.host_memory_bytes is None:
            raise ValueError("host_slots: without host_memory_bytes there is no host memory below what readers map")
        numa_nodes = self.transport.numa_node
        if isinstance(numa_nodes, tuple) and len(numa_nodes) != self.holders_per_node:
            raise ValueError(
                f"transport.numa_node: {len(numa_nodes)} are named for {self.holders_per_node} holders a node"
            )
        if self.holders_per_node > self.model.shards:
            raise ValueError(
                f"holders_per_node: {self.holders_per_node} are more than the model's {self.model.shards} shards"
            )
        return self

    @classmethod
    def load(cls, data: FabricSpec | ModelSpec | dict[str, Any] | str | Path, *, where: str = "spec") -> FabricSpec:
        """A spec from what a user has: a spec, a model, plain data that ``where`` names in errors, or a YAML file's path.

        Raises SpecError naming the file or field and the reason.
        """
        if isinstance(data, FabricSpec):
            return data
        if isinstance(data, ModelSpec):
            return cls(model=data)
        if isinstance(data, str | Path):
            data, where = read_mapping(data), f"{data}: "
        if not isinstance(data, dict):
            raise SpecError(f"{where}: a mapping is expected, got {type(data).__name__}")
        if "model" not in data and "groups" in data:
            data = {"model": data}
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise SpecError(describe(error, where)) from None

    @classmethod
    def read(cls, text: str) -> FabricSpec:
        """The spec that another process wrote, of this version or of one beside it (:mod:`~kvfabric.fabric.settings`).

        Raises SpecError for a field of a newer version that nobody may do without, and for what is no spec.
        """
        spec, passed_over = read(cls, text, "the fabric's spec")
        if passed_over:  # it is handed on with them: who knows them is to have them
            spec._passed_over, spec._read_from = passed_over, text  # noqa: SLF001 - its own
        return spec

    @property
    def text(self) -> str:
        """The spec for another process."""
        return self._read_from or written(self)

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Fields that a newer version set and this one does not know."""
        return self._passed_over

    def passport(self, group: GroupSpec) -> AbiPassport:
        """The passport readers and writers of a group have unless they say otherwise."""
        spec = self.passports.get(group.name)
        passport = AbiPassport(alignment_bytes=group.alignment_bytes) if spec is None else spec.passport()
        if self.digested is Checksum.XXH3_128:
            return passport
        # Records name how they are digested, so that no other way judges them.
        return replace(passport, extent_format=f"{passport.extent_format}+{self.digested}")

    def shards_of(self, place: int) -> tuple[int, ...]:
        """The shards (ranks) that the holder at ``place`` on a node owns."""
        return tuple(s for s in range(self.model.shards) if s % self.holders_per_node == place)

    def takes(self, resources: Mapping[str, float], labels: Mapping[str, str] | None = None) -> bool:
        """Whether a node that offers these Ray resources and bears these labels gets a holder."""
        known = labels or {}
        if any(known.get(key) != value for key, value in self.node_labels.items()):
            return False
        wanted = (self.node_resource,) if isinstance(self.node_resource, str) else self.node_resource
        return wanted is None or any(resources.get(resource, 0) > 0 for resource in wanted)

    def slots_on(self, resources: Mapping[str, float]) -> dict[str, int]:
        """Slots by group, where the spec names them, on a node that offers these Ray resources."""
        named = [slots for resource, slots in self.node_slots.items() if resources.get(resource, 0) > 0]
        return {group: count for slots in (self.slots, *named) for group, count in slots.items()}

    def layout(self, shards: tuple[int, ...], slots: Mapping[str, int] | None = None) -> ArenaLayout:
        """The arena of a holder that owns ``shards``; ``slots`` in place of the spec's own."""
        return self.layout_in_slabs(shards, slots)[0]

    def layout_in_slabs(
        self, shards: tuple[int, ...], slots: Mapping[str, int] | None = None
    ) -> tuple[ArenaLayout, tuple[int, ...]]:
        """The same, and where the readers' pools share it in slabs, how many each has at first. Raises SpecError."""
        split = self._split(shards, slots)
        return in_slabs(split) if self.slabs is not None else (split, ())

    def _split(self, shards: tuple[int, ...], slots: Mapping[str, int] | None) -> ArenaLayout:
        named = self.slots if slots is None else slots
        if self.host_memory_bytes is None and self.device == "cpu":
            return ArenaLayout(self._pools(Tier.G2, self.memory_bytes, named, shards), self.digested)
        pools = self._pools(Tier.G1, self.memory_bytes, named, shards)
        if self.device == "cuda":
            pools = [replace(pool, memory=Memory.CUDA) for pool in pools]
        if self.host_memory_bytes is not None:
            pools += self._pools(Tier.G2, self.host_memory_bytes, self.host_slots, shards)
        return ArenaLayout(pools, self.digested)

    @property
    def digested(self) -> Checksum:
        """How all holders of this fabric digest payload."""
        return self.checksum or (Checksum.LANES_128 if self.device == "cuda" else Checksum.XXH3_128)

    def _pools(
        self, tier: Tier, memory_bytes: int, named: Mapping[str, int], shards: tuple[int, ...]
    ) -> list[PoolLayout]:
        """The pools of one tier, a group and shard each."""
        split = slots_for(self.model, memory_bytes, len(shards), checkpoint=self.checkpoint)
        pools: list[PoolLayout] = []
        for index, group in enumerate(self.model.groups):
            count = named.get(group.name) or split[index]
            pools.extend(PoolLayout(index, shard, min(count, SLOTS_MAX), group.block_bytes, tier) for shard in shards)
        return pools


def new_secret() -> bytes:
    """The cluster's secret: what TCP peers must prove to know."""
    return secrets.token_bytes(32)

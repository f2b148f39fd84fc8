"""What a fabric is launched with: the model, the memory, the way bytes travel.

Plain data, checked once: a bad field is one line that names it. The spec travels to every process
of the fabric as JSON.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from ..fabric.admission import ByteLimit
from ..fabric.arena import ArenaLayout, Checksum, Memory, PoolLayout
from ..fabric.budget import in_slabs, slots_for
from ..fabric.kinds import ObjectKind, SpecError, Tier
from ..fabric.model import GroupSpec, ModelSpec
from ..fabric.passport import AbiPassport
from ..fabric.scaling import ScaleDownConfig, ScaleUpConfig
from ..fabric.settings import describe, read, written
from ..policies.checkpoint import checkpoint_policy
from ..policies.copies import HotCopies
from ..policies.costs import CostGuess
from ..policies.eviction import eviction_policy
from ..policies.limits import FLOOR_SHARE, KindLimit, TenantLimit, byte_limits
from .shards import DIRECTORY_SHARDS_MAX

SLOTS_MAX = 1 << 24


REMOTE_URL = re.compile(r"(s3|s3a|gs|az|abfs|abfss|https|http|file)://\S+")
SECRET = re.compile(r"secret|token|password|access_key|sas|credential")


class PassportSpec(BaseModel):
    """The ABI passport of one group, as data; the fields are those of ``AbiPassport``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: str = "any"
    kernel: str = "any"
    kernel_abi: int = 1
    layout: str = "rows"
    metadata: str = ""
    dtype: str = "uint8"
    byte_order: str = "little"
    rotary: str = ""
    strides: tuple[int, ...] = ()
    alignment_bytes: int = Field(default=1, ge=1)
    token_alignment_tokens: int = Field(default=1, ge=1)
    extent_format: str = "kvx1"
    shard: str = ""
    fields: tuple[str, ...] = ()

    def passport(self) -> AbiPassport:
        return AbiPassport(**self.model_dump())

    @classmethod
    def of(cls, passport: AbiPassport) -> PassportSpec:
        """The same passport as data."""
        return cls.model_validate({name: getattr(passport, name) for name in cls.model_fields})


UCX_LIST = r"^(\^?[A-Za-z0-9_.:@-]+(,[A-Za-z0-9_.:@-]+)*)?$"
"""As UCX_TLS and UCX_NET_DEVICES are written: names, separated by commas without spaces."""

NumaNode = Annotated[int, Field(ge=0, lt=1024)]


class TransportSpec(BaseModel):
    """How bytes travel. ``links``: the best that both sides have is taken.

    ``nixl_transports`` and ``network_devices`` are UCX's (``UCX_TLS``, ``UCX_NET_DEVICES``); empty
    leaves the choice to UCX, and what is named here wins over the environment. ``tcp_host``: the address the plain
    TCP link listens on. ``numa_node``: where a holder's memory and threads stay; a list names one for each holder of a
    node, in their order (GPU by GPU); without it the kernel decides.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    links: tuple[Literal["shared_memory", "nixl", "tcp"], ...] = ("shared_memory", "nixl", "tcp")
    nixl_backend: str = Field(default="UCX", pattern=r"^[A-Za-z0-9_]+$")
    nixl_transports: str = Field(default="", pattern=UCX_LIST)
    network_devices: str = Field(default="", pattern=UCX_LIST)
    numa_node: NumaNode | tuple[NumaNode, ...] | None = None
    tcp_host: str | None = None
    tcp_bytes_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    transfer_timeout_s: float = Field(default=10.0, gt=0)

    def numa_node_of(self, place: int) -> int | None:
        """The NUMA node of the holder at ``place`` of a node; None: the kernel's choice."""
        if isinstance(self.numa_node, tuple):
            return self.numa_node[place]
        return self.numa_node


class RestoreLimitSpec(BaseModel):
    """What may be in flight from the disk at a time for one kind of state: bytes, and extents open."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes_max: int = Field(default=32 << 20, ge=1)
    extents_max: int = Field(default=32, ge=1)


class RemoteSpec(BaseModel):
    """A store that all nodes share, for copies of the disks' extents. Needs the extra ``remote`` (obstore).

    ``url``: ``s3://bucket/prefix``, ``gs://..``, ``az://..`` or ``file:///shared/folder``; ``options``: the
    store's own, as obstore names them (``endpoint``, ``region``, ...). Credentials do not belong here: they come from
    the environment or the machine's role. ``allow_http``: plain HTTP, for a store on a trusted network. ``bytes_max``: of
    all extents there: the oldest go. ``timeout_s``: of one request; ``check_s``: how often it is listed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    options: dict[str, str] = Field(default_factory=dict)
    allow_http: bool = False
    bytes_max: int = Field(default=1 << 40, ge=1 << 16)
    timeout_s: float = Field(default=10.0, gt=0)
    check_s: float = Field(default=10.0, gt=0)

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        if not REMOTE_URL.fullmatch(url):
            raise ValueError(f"{url!r} is not an address such as s3://bucket/prefix or file:///shared/folder")
        return url

    @field_validator("options")
    @classmethod
    def _bears_no_secret(cls, options: dict[str, str]) -> dict[str, str]:
        for name in options:
            if SECRET.search(name.lower()):
                raise ValueError(
                    f"{name}: credentials come from the environment (AWS_SECRET_ACCESS_KEY, ...), not from here"
                )
        return options


class DiskSpec(BaseModel):
    """The local disk as a tier. ``path``: a folder on each node's own disk, used by the fabric alone.

    ``bytes_max``: what one holder's extents may take there; ``free_floor_bytes``: what must stay free
    on the file system; ``codec``: how blocks are packed where that saves a page; ``bytes_per_s``: what one
    holder's reads and writes may move together, None for no limit. ``restore_bytes_max``: in flight at a time,
    ``restore_limits``: of one kind (``compressed_history``, ...); ``restore_share``: which part of each pool may be
    reserved for restores, so that a burst of them leaves room for stores. ``admission``: ``second_touch`` writes
    only what was used twice; a parked request's state is always written.
    ``remote``: a store shared by all nodes, to which extents are copied and from which every node restores; None for
    none. ``scrub_bytes_per_s``: how fast what lies on the disk is read again, round and round, to find what it lost
    before that is asked for; None for never, and never under ``testing``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    bytes_max: int = Field(default=16 << 30, ge=1 << 16)
    free_floor_bytes: int = Field(default=1 << 30, ge=0)
    codec: Literal["none", "lz4", "zstd"] = "none"
    bytes_per_s: float | None = Field(default=None, gt=0)
    restore_bytes_max: int = Field(default=64 << 20, ge=1)
    restore_share: float = Field(default=0.5, gt=0, le=1)
    restore_limits: dict[ObjectKind, RestoreLimitSpec] = Field(default_factory=dict)
    admission: Literal["all", "second_touch"] = "all"
    remote: RemoteSpec | None = None
    scrub_bytes_per_s: float | None = Field(default=8 << 20, gt=0, allow_inf_nan=False)

    @field_validator("path")
    @classmethod
    def _is_absolute(cls, path: str) -> str:
        if not Path(path).is_absolute():
            raise ValueError(f"{path!r} is not absolute: every node must find its own folder there")
        return path


class KindLimitSpec(BaseModel):
    """``bytes_max``: of one kind on a holder; ``floor``: its own share of every limit on all kinds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes_max: int | None = Field(default=None, ge=1)
    floor: float = Field(default=FLOOR_SHARE, ge=0, le=1)


class TenantLimitSpec(BaseModel):
    """What a tenant may have of one holder at a time: bytes, leases, requests that wait for a tier."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes_max: int | None = Field(default=None, ge=1)
    leases_max: int | None = Field(default=None, ge=1)
    restores_max: int | None = Field(default=None, ge=1)


class LimitsSpec(BaseModel):
    """Admission to one holder. ``bytes_max``: all kinds together, where less than its memory; ``kinds``: by kind;
    ``tenants``: by tenant, ``"*"`` for each that is not named.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes_max: int | None = Field(default=None, ge=1)
    kinds: dict[ObjectKind, KindLimitSpec] = Field(default_factory=dict)
    tenants: dict[str, TenantLimitSpec] = Field(default_factory=dict)

    @property
    def by_tenant(self) -> dict[str, TenantLimit]:
        """The same as the policy takes it."""
        return {tenant: TenantLimit(**limit.model_dump()) for tenant, limit in self.tenants.items()}

    def byte_limits(self, model: ModelSpec) -> tuple[ByteLimit, ...]:
        """The limits of a holder of this model. Raises SpecError naming the field."""
        kinds = {kind: KindLimit(limit.bytes_max, limit.floor) for kind, limit in self.kinds.items()}
        return byte_limits(model, self.bytes_max, kinds, self.by_tenant)


class SlabSpec(BaseModel):
    """How groups share what readers map, slab by slab. ``look_s``: how often it is asked whether one should change hands;
    ``gather_s``: for how long it is watched before what each group loses for want of room.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    look_s: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    gather_s: float = Field(default=15.0, gt=0, allow_inf_nan=False)


class PlacementSpec(BaseModel):
    """Second copies of hot prefixes. ``hot_per_s``: grants a second that one copy serves easily; each multiple wants
    one more, up to ``copies_max``. ``keep_s``: how often copies are looked at: a cold one goes. ``share``: the part of a
    holder's memory that placed copies may take.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hot_per_s: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    half_life_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    copies_max: int = Field(default=2, ge=1, le=64)
    keep_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    share: float = Field(default=0.2, gt=0, le=1)

    def policy(self) -> HotCopies:
        """The policy, fresh for one holder's life."""
        return HotCopies(**self.model_dump())


class CostSpec(BaseModel):
    """What the plan ``cost`` believes of this hardware until it has measured it: speeds, and what starting takes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill_tokens_per_s: float = Field(default=CostGuess.prefill_tokens_per_s, gt=0, allow_inf_nan=False)
    replay_tokens_per_s: float = Field(default=CostGuess.replay_tokens_per_s, gt=0, allow_inf_nan=False)
    transfer_bytes_per_s: float = Field(default=CostGuess.transfer_bytes_per_s, gt=0, allow_inf_nan=False)
    transfer_start_s: float = Field(default=CostGuess.transfer_start_s, ge=0, allow_inf_nan=False)
    restore_bytes_per_s: float = Field(default=CostGuess.restore_bytes_per_s, gt=0, allow_inf_nan=False)
    restore_start_s: float = Field(default=CostGuess.restore_start_s, ge=0, allow_inf_nan=False)
    copy_bytes_per_s: float = Field(default=CostGuess.copy_bytes_per_s, gt=0, allow_inf_nan=False)
    copy_start_s: float = Field(default=CostGuess.copy_start_s, ge=0, allow_inf_nan=False)

    def guess(self) -> CostGuess:
        """The same as the policy takes it."""
        return CostGuess(**self.model_dump())


class NoticeSpec(BaseModel):
    """How a holder learns that its node goes away.

    ``url``: what the cloud answers 404 at as long as the machine stays (or FALSE), asked with ``headers`` every
    ``look_every_s``; ``file``: a path that appears; ``notice_s``: how long the node then stays;
    ``sigterm_s``: how long it stays after SIGTERM.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = ""
    headers: dict[str, str] = Field(default_factory=dict)
    file: str = ""
    look_every_s: float = Field(default=2.0, gt=0)
    notice_s: float = Field(default=110.0, gt=0)
    sigterm_s: float = Field(default=25.0, gt=0)

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if url and not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is no http:// or https:// address")
        return url


class ScaleSpec(BaseModel):
    """How a fabric follows the work on a cluster that grows and shrinks.

    ``idle_s``: a node on which no engine has run for so long is drained within ``drain_s`` and its holder ends, so
    that the autoscaler may take it; None: holders stay. ``min_nodes`` and ``min_bytes`` of memory stay in any case.
    ``up``: ask Ray's autoscaler for one more ``bundle`` after another, up to ``nodes_max`` nodes, while pressure
    lasts; the signal is in the status in any case. Pressure is 1 at ``refused_per_s``, ``evicted_tokens_per_s``
    or ``waiting`` restores, must last ``step_s`` to ask, and be below ``low`` for ``calm_s`` to withdraw.
    ``warm_bytes``: what a holder that joins is offered of what is worth most elsewhere, within ``warm_s``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    idle_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    drain_s: float = Field(default=20.0, ge=0, allow_inf_nan=False)
    min_nodes: int = Field(default=1, ge=0)
    min_bytes: int = Field(default=0, ge=0)
    up: bool = False
    bundle: dict[str, float] = Field(default_factory=lambda: {"CPU": 1.0})
    refused_per_s: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    evicted_tokens_per_s: float = Field(default=10_000.0, gt=0, allow_inf_nan=False)
    waiting: float = Field(default=64.0, gt=0, allow_inf_nan=False)
    low: float = Field(default=0.25, ge=0, lt=1)
    step_s: float = Field(default=15.0, gt=0, allow_inf_nan=False)
    calm_s: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    nodes_max: int = Field(default=8, ge=1)
    warm_bytes: int = Field(default=0, ge=0)
    warm_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)

    def down_config(self) -> ScaleDownConfig:
        """The same as the core takes it; endless patience where holders stay."""
        return ScaleDownConfig(float("inf") if self.idle_s is None else self.idle_s, self.min_nodes, self.min_bytes)

    def up_config(self) -> ScaleUpConfig:
        """The same as the core takes it."""
        return ScaleUpConfig(**{f.name: getattr(self, f.name) for f in fields(ScaleUpConfig)})


class FabricSpec(BaseModel):
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

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelSpec
    memory_bytes: int = Field(default=256 << 20, ge=1 << 16)
    slots: dict[str, int] = Field(default_factory=dict)
    device: Literal["cpu", "cuda"] = "cpu"
    checksum: Checksum | None = None
    host_memory_bytes: int | None = Field(default=None, ge=1 << 16)
    host_slots: dict[str, int] = Field(default_factory=dict)
    holders_per_node: int = Field(default=1, ge=1, le=64)
    node_bytes_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
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
    scrub_bytes_per_s: float | None = Field(default=8 << 20, gt=0, allow_inf_nan=False)
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
    def load(cls, data: FabricSpec | ModelSpec | dict[str, Any] | str | Path) -> FabricSpec:
        """A spec from what a user has: a spec, a model, plain data, or a YAML file's path.

        Raises SpecError naming the file or field and the reason.
        """
        if isinstance(data, FabricSpec):
            return data
        if isinstance(data, ModelSpec):
            return cls(model=data)
        where = "spec"
        if isinstance(data, str | Path):
            where = str(data)
            try:
                data = yaml.safe_load(Path(data).read_text(encoding="utf-8"))
            except (OSError, yaml.YAMLError) as error:
                raise SpecError(f"{where}: {error}") from None
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

"""The sections of a fabric's spec: passports, transport, disk, limits, placement, costs, notices, scaling.

Each is plain data, checked by itself; :class:`~kvfabric.actors.spec.FabricSpec` puts them together.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ..fabric.admission import ByteLimit
from ..fabric.kinds import ObjectKind
from ..fabric.model import ModelSpec
from ..fabric.passport import AbiPassport
from ..fabric.scaling import ScaleDownConfig, ScaleUpConfig
from ..policies.copies import HotCopies
from ..policies.costs import CostGuess
from ..policies.limits import FLOOR_SHARE, KindLimit, TenantLimit, byte_limits
from ..transport.vigil import AWAKE_S

REMOTE_URL = re.compile(r"(s3|s3a|gs|az|abfs|abfss|https|http|file)://\S+")
SECRET = re.compile(r"secret|token|password|access_key|sas|credential")


class Section(BaseModel):
    """What all parts of a spec have in common: unknown fields, endless and undefined numbers are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PassportSpec(Section):
    """The ABI passport of one group, as data; the fields are those of ``AbiPassport``."""

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


class TransportSpec(Section):
    """How bytes travel. ``links``: the best that both sides have is taken.

    ``nixl_transports`` and ``network_devices`` are UCX's (``UCX_TLS``, ``UCX_NET_DEVICES``); empty
    leaves the choice to UCX, and what is named here wins over the environment. ``tcp_host``: the address the plain
    TCP link listens on. ``numa_node``: where a holder's memory and threads stay; a list names one for each holder of a
    node, in their order (GPU by GPU); without it the kernel decides. ``awake_us``: how long a session polls for a
    reply, and a holder for the next request, before it sleeps, where that pays (microseconds; 0, the default: never).
    """

    links: tuple[Literal["shared_memory", "nixl", "tcp"], ...] = ("shared_memory", "nixl", "tcp")
    nixl_backend: str = Field(default="UCX", pattern=r"^[A-Za-z0-9_]+$")
    nixl_transports: str = Field(default="", pattern=UCX_LIST)
    network_devices: str = Field(default="", pattern=UCX_LIST)
    numa_node: NumaNode | tuple[NumaNode, ...] | None = None
    tcp_host: str | None = None
    tcp_bytes_per_s: float | None = Field(default=None, gt=0)
    transfer_timeout_s: float = Field(default=10.0, gt=0)
    awake_us: int = Field(default=round(1e6 * AWAKE_S), ge=0, le=10_000)

    @property
    def awake_s(self) -> float:
        """``awake_us`` in seconds."""
        return self.awake_us / 1e6

    def numa_node_of(self, place: int) -> int | None:
        """The NUMA node of the holder at ``place`` of a node; None: the kernel's choice."""
        if isinstance(self.numa_node, tuple):
            return self.numa_node[place]
        return self.numa_node


class RestoreLimitSpec(Section):
    """What may be in flight from the disk at a time for one kind of state: bytes, and extents open."""

    bytes_max: int = Field(default=32 << 20, ge=1)
    extents_max: int = Field(default=32, ge=1)


class RemoteSpec(Section):
    """A store that all nodes share, for copies of the disks' extents. Needs the extra ``remote`` (obstore).

    ``url``: ``s3://bucket/prefix``, ``gs://..``, ``az://..`` or ``file:///shared/folder``; ``options``: the
    store's own, as obstore names them (``endpoint``, ``region``, ...). Credentials do not belong here: they come from
    the environment or the machine's role. ``allow_http``: plain HTTP, for a store on a trusted network. ``bytes_max``: of
    all extents there: the oldest go. ``timeout_s``: of one request; ``check_s``: how often it is listed.
    """

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


class DiskSpec(Section):
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
    scrub_bytes_per_s: float | None = Field(default=8 << 20, gt=0)

    @field_validator("path")
    @classmethod
    def _is_absolute(cls, path: str) -> str:
        if not Path(path).is_absolute():
            raise ValueError(f"{path!r} is not absolute: every node must find its own folder there")
        return path


class KindLimitSpec(Section):
    """``bytes_max``: of one kind on a holder; ``floor``: its own share of every limit on all kinds."""

    bytes_max: int | None = Field(default=None, ge=1)
    floor: float = Field(default=FLOOR_SHARE, ge=0, le=1)


class TenantLimitSpec(Section):
    """What a tenant may have of one holder at a time: bytes, leases, requests that wait for a tier."""

    bytes_max: int | None = Field(default=None, ge=1)
    leases_max: int | None = Field(default=None, ge=1)
    restores_max: int | None = Field(default=None, ge=1)


class LimitsSpec(Section):
    """Admission to one holder. ``bytes_max``: all kinds together, where less than its memory; ``kinds``: by kind;
    ``tenants``: by tenant, ``"*"`` for each that is not named.
    """

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


class SlabSpec(Section):
    """How groups share what readers map, slab by slab. ``look_s``: how often it is asked whether one should change hands;
    ``gather_s``: for how long it is watched before what each group loses for want of room.
    """

    look_s: float = Field(default=5.0, gt=0)
    gather_s: float = Field(default=15.0, gt=0)


class PlacementSpec(Section):
    """Second copies of hot prefixes. ``hot_per_s``: grants a second that one copy serves easily; each multiple wants
    one more, up to ``copies_max``. ``keep_s``: how often copies are looked at: a cold one goes. ``share``: the part of a
    holder's memory that placed copies may take.
    """

    hot_per_s: float = Field(default=2.0, gt=0)
    half_life_s: float = Field(default=30.0, gt=0)
    copies_max: int = Field(default=2, ge=1, le=64)
    keep_s: float = Field(default=60.0, gt=0)
    share: float = Field(default=0.2, gt=0, le=1)

    def policy(self) -> HotCopies:
        """The policy, fresh for one holder's life."""
        return HotCopies(**self.model_dump())


class CostSpec(Section):
    """What the plan ``cost`` believes of this hardware until it has measured it: speeds, and what starting takes."""

    prefill_tokens_per_s: float = Field(default=CostGuess.prefill_tokens_per_s, gt=0)
    replay_tokens_per_s: float = Field(default=CostGuess.replay_tokens_per_s, gt=0)
    transfer_bytes_per_s: float = Field(default=CostGuess.transfer_bytes_per_s, gt=0)
    transfer_start_s: float = Field(default=CostGuess.transfer_start_s, ge=0)
    restore_bytes_per_s: float = Field(default=CostGuess.restore_bytes_per_s, gt=0)
    restore_start_s: float = Field(default=CostGuess.restore_start_s, ge=0)
    copy_bytes_per_s: float = Field(default=CostGuess.copy_bytes_per_s, gt=0)
    copy_start_s: float = Field(default=CostGuess.copy_start_s, ge=0)

    def guess(self) -> CostGuess:
        """The same as the policy takes it."""
        return CostGuess(**self.model_dump())


class NoticeSpec(Section):
    """How a holder learns that its node goes away.

    ``url``: what the cloud answers 404 at as long as the machine stays (or FALSE), asked with ``headers`` every
    ``look_every_s``; ``file``: a path that appears; ``notice_s``: how long the node then stays;
    ``sigterm_s``: how long it stays after SIGTERM.
    """

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


class ScaleSpec(Section):
    """How a fabric follows the work on a cluster that grows and shrinks.

    ``idle_s``: a node on which no engine has run for so long is drained within ``drain_s`` and its holder ends, so
    that the autoscaler may take it; None: holders stay. ``min_nodes`` and ``min_bytes`` of memory stay in any case.
    ``up``: ask Ray's autoscaler for one more ``bundle`` after another, up to ``nodes_max`` nodes, while pressure
    lasts; the signal is in the status in any case. Pressure is 1 at ``refused_per_s``, ``evicted_tokens_per_s``
    or ``waiting`` restores, must last ``step_s`` to ask, and be below ``low`` for ``calm_s`` to withdraw.
    ``warm_bytes``: what a holder that joins is offered of what is worth most elsewhere, within ``warm_s``.
    """

    idle_s: float | None = Field(default=None, gt=0)
    drain_s: float = Field(default=20.0, ge=0)
    min_nodes: int = Field(default=1, ge=0)
    min_bytes: int = Field(default=0, ge=0)
    up: bool = False
    bundle: dict[str, float] = Field(default_factory=lambda: {"CPU": 1.0})
    refused_per_s: float = Field(default=1.0, gt=0)
    evicted_tokens_per_s: float = Field(default=10_000.0, gt=0)
    waiting: float = Field(default=64.0, gt=0)
    low: float = Field(default=0.25, ge=0, lt=1)
    step_s: float = Field(default=15.0, gt=0)
    calm_s: float = Field(default=120.0, gt=0)
    nodes_max: int = Field(default=8, ge=1)
    warm_bytes: int = Field(default=0, ge=0)
    warm_s: float = Field(default=30.0, gt=0)

    def down_config(self) -> ScaleDownConfig:
        """The same as the core takes it; endless patience where holders stay."""
        return ScaleDownConfig(float("inf") if self.idle_s is None else self.idle_s, self.min_nodes, self.min_bytes)

    def up_config(self) -> ScaleUpConfig:
        """The same as the core takes it."""
        return ScaleUpConfig(**{f.name: getattr(self, f.name) for f in fields(ScaleUpConfig)})

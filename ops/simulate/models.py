"""Small random models, prompts and bounds: everything a seed decides before the first event."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from ...fabric.admission import EVERY_TENANT, ByteLimit, TenantQuota
from ...fabric.arena import ArenaLayout, PoolLayout
from ...fabric.budget import in_slabs
from ...fabric.identity import Namespace, PromptKeys, as_tokens, weights_digest16
from ...fabric.kinds import ObjectKind, Tier
from ...fabric.messages import Prompt
from ...fabric.model import ModelSpec
from ...fabric.passport import Abi, AbiPassport
from ...policies.costs import CostGuess

BLOCK_BYTES = 64
PROMPT_TOKENS_MAX = 80
TENANTS = ("acme", "bolt")


def random_model(rng: random.Random) -> ModelSpec:
    """One of the shapes that real hybrid models have, shrunk, with unequal blocks."""
    shape = rng.choice((_hybrid, _hybrid, _hybrid, _lagged, _recurrent, _full))
    groups = shape(rng)
    for group in groups:
        group["block_bytes"] = BLOCK_BYTES
    return ModelSpec.load(
        {
            "name": shape.__name__.strip("_"),
            "groups": groups,
            "shards": 2 if rng.random() < 0.25 else 1,
            "drop_last_blocks": 1 if rng.random() < 0.1 else 0,
        }
    )


def _hybrid(rng: random.Random) -> list[dict[str, Any]]:
    """Two compressed histories of unequal ratio, their tails, an indexer and a window (DeepSeek-V4)."""
    fine = rng.random() < 0.4
    groups: list[dict[str, Any]] = [
        {"name": "csa", "kind": "compressed_history", "block_tokens": rng.choice((8, 16)), "ratio": 4},
        {
            "name": "csa_tail",
            "kind": "uncompressed_tail",
            "of": "csa",
            "block_tokens": 4,
            "overlap_tokens": rng.choice((0, 4, 4)),
        },
        {"name": "index", "kind": "indexer", "of": "csa", "block_tokens": rng.choice((8, 16))},
        {
            "name": "swa",
            "kind": "sliding_window",
            "block_tokens": 4,
            "window_tokens": rng.choice((6, 10, 13)),
            "sink_tokens": rng.choice((0, 0, 3)),
        },
    ]
    if rng.random() < 0.5:
        groups.append({"name": "hca", "kind": "compressed_history", "block_tokens": 16, "ratio": 16})
        groups.append({"name": "hca_tail", "kind": "uncompressed_tail", "of": "hca", "block_tokens": 4})
    elif rng.random() < 0.5:
        groups.append(
            {"name": "index_tail", "kind": "uncompressed_tail", "of": "index", "block_tokens": 4, "overlap_tokens": 4}
        )
    if fine:
        for group in groups:
            if group["block_tokens"] > 4:
                group["endpoint_tokens"] = rng.choice((4, 8))
    return groups


def _lagged(rng: random.Random) -> list[dict[str, Any]]:
    """A history that keeps its recent tokens raw, and a window."""
    return [
        {
            "name": "old",
            "kind": "compressed_history",
            "block_tokens": 8,
            "ratio": 4,
            "lag_tokens": rng.choice((4, 6)),
            "endpoint_tokens": 4,
        },
        {"name": "raw", "kind": "uncompressed_tail", "of": "old", "block_tokens": 4},
        {"name": "swa", "kind": "sliding_window", "block_tokens": 8, "window_tokens": 9, "endpoint_tokens": 4},
    ]


def _recurrent(rng: random.Random) -> list[dict[str, Any]]:
    """Full attention beside recurrent state, and a window kept as snapshots (Qwen3-Next)."""
    return [
        {"name": "full", "kind": "compressed_history", "block_tokens": rng.choice((4, 8))},
        {"name": "state", "kind": "compressed_history", "form": "state", "grid_tokens": rng.choice((8, 16))},
        {"name": "rows", "kind": "sliding_window", "form": "state", "grid_tokens": 8},
    ]


def _full(rng: random.Random) -> list[dict[str, Any]]:
    """Ordinary attention, blocks larger than the positions a resume may end at."""
    return [
        {
            "name": "kv",
            "kind": "compressed_history",
            "block_tokens": rng.choice((4, 8)),
            "endpoint_tokens": rng.choice((2, 4)),
        },
        {"name": "index", "kind": "indexer", "of": "kv", "block_tokens": 4},
    ]


def planned(model: ModelSpec, rng: random.Random) -> ModelSpec:
    """The same model, now and then planned by cost, and replaying where its groups allow it."""
    chosen = {"plan": rng.choice(("longest", "longest", "cost")), "replay": rng.random() < 0.4}
    return ModelSpec.load(model.model_dump(mode="json") | chosen)


def random_guess(rng: random.Random) -> CostGuess:
    """What things cost to begin with: sometimes moving is dear, sometimes computing."""
    return CostGuess(
        prefill_tokens_per_s=rng.choice((200.0, 2000.0)),
        replay_tokens_per_s=rng.choice((200.0, 2000.0)),
        transfer_start_s=rng.choice((0.0, 0.01, 0.1)),
        restore_start_s=rng.choice((0.0, 0.02, 0.2)),
    )


@dataclass(frozen=True, slots=True)
class Chance:
    """How likely things go wrong; a seed draws one set."""

    loss: float
    twice: float
    late: float
    transfer_fault: float
    disk_fault: float
    fault_every_s: float


def random_chance(rng: random.Random) -> Chance:
    """From no trouble at all to a lot of it."""
    return Chance(
        loss=rng.choice((0.0, 0.005, 0.02)),
        twice=rng.choice((0.0, 0.01, 0.03)),
        late=rng.choice((0.01, 0.04)),
        transfer_fault=rng.choice((0.0, 0.15, 0.35)),
        disk_fault=rng.choice((0.0, 0.1, 0.25)),
        fault_every_s=rng.choice((1.0, 2.0, 4.0)),
    )


@dataclass(frozen=True, slots=True)
class Extras:
    """What only some worlds have: a store that all nodes share, a scrubber of disks, a budget of bytes a second.

    ``node_bytes_per_s``: what a node's holders may move together.
    """

    store: bool
    scrub_bytes_per_s: float | None
    node_bytes_per_s: float | None


def random_extras(rng: random.Random) -> Extras:
    """Each in a few of all worlds. Extents are uploaded by whole pages: with a store the budget counts those."""
    store = rng.random() < 0.2
    scrub = rng.choice((None, None, None, None, 2_000.0))
    budget = rng.choice((None, None, None, None, 16_000.0, 60_000.0))
    return Extras(store, scrub, budget * (20 if store else 1) if budget else None)


def random_limits(rng: random.Random, model: ModelSpec, slots: list[int]) -> tuple[ByteLimit, ...]:
    """Byte limits that bind now and then, in a third of all runs."""
    if rng.random() > 0.35:
        return ()
    total = sum(slots) * BLOCK_BYTES
    limits = [ByteLimit(int(total * rng.uniform(0.55, 0.8)), each_tenant=True)]
    kinds = sorted({g.kind for g in model.groups})
    if rng.random() < 0.6:
        kind = rng.choice(kinds)
        of_kind = sum(n for n, g in zip(slots, model.groups, strict=True) if g.kind is kind) * BLOCK_BYTES
        limits.append(ByteLimit(int(of_kind * rng.uniform(0.7, 0.95)), kind=ObjectKind(kind)))
    return tuple(limits)


def random_floors(rng: random.Random, limits: tuple[ByteLimit, ...]) -> tuple[ByteLimit, ...]:
    """The same limits, now and then with floors for all kinds in those that speak of all."""
    share = rng.choice((0.05, 0.15, 0.24))
    kinds = (ObjectKind.COMPRESSED_HISTORY, ObjectKind.UNCOMPRESSED_TAIL, ObjectKind.SLIDING_WINDOW, ObjectKind.INDEXER)
    return tuple(
        replace(limit, floors=tuple((kind, int(share * limit.bytes_max)) for kind in kinds))
        if not limit.kind
        else limit
        for limit in limits
    )


def random_quotas(rng: random.Random) -> tuple[tuple[str, TenantQuota], ...]:
    """Quotas that bind now and then, in half of all runs."""
    if rng.random() > 0.5:
        return ()
    each = TenantQuota(rng.choice((None, 2, 4)), rng.choice((None, 1, 2)))
    return ((EVERY_TENANT, each), (TENANTS[1], TenantQuota(rng.choice((1, 3)), 1)))


def random_slots(rng: random.Random, model: ModelSpec) -> list[int]:
    """Slots a pool for each group and shard: one long prompt always fits, all of them never do."""
    room = rng.choice((1.3, 1.8, 2.6))
    return [int(PROMPT_TOKENS_MAX // group.unit_tokens * room) + 2 for group in model.groups]


def random_host_slots(rng: random.Random, slots: list[int]) -> list[int]:
    """Slots of host memory below each pool; none in half of all runs, where readers use host memory itself."""
    if rng.random() < 0.5:
        return []
    share = rng.choice((0.15, 0.5, 1.5))
    return [max(1, int(n * share)) for n in slots]


def layout_of(
    slots: list[int], host_slots: list[int], shards: tuple[int, ...], slabs: int
) -> tuple[ArenaLayout, tuple[int, ...]]:
    """A holder's arena: for each group a pool a shard; with host slots, one of host memory below it.

    With ``slabs`` the readers' pools share their memory in so many, and have as many each at first as is said too.
    """
    top = Tier.G1 if host_slots else Tier.G2
    pools = [PoolLayout(g, s, n, BLOCK_BYTES, top) for g, n in enumerate(slots) for s in shards]
    pools += [PoolLayout(g, s, n, BLOCK_BYTES, Tier.G2) for g, n in enumerate(host_slots) for s in shards]
    layout = ArenaLayout(pools)
    return in_slabs(layout, slabs) if slabs else (layout, ())


def weights_name(number: int) -> str:
    """The name of a weights revision; later ones sort behind earlier ones."""
    return f"w{number:04d}"


@dataclass(slots=True)
class Text:
    """One prompt as its reader and writer know it, under one tenant and weights revision."""

    keys: PromptKeys
    weights: str
    tenant: str
    prompt: Prompt
    digests: dict[int, list[bytes]]

    def __len__(self) -> int:
        return len(self.keys)


class Library:
    """A tree of prompts that share prefixes, each as long as asked for."""

    def __init__(self, rng: random.Random, model: ModelSpec) -> None:
        self.model = model
        self.names = tuple(range(rng.randrange(2, 5)))
        self._tokens: dict[int, list[int]] = {}
        for name in self.names:
            tokens = [rng.randrange(1000) for _ in range(PROMPT_TOKENS_MAX + 8)]
            if name and rng.random() < 0.7:
                like = self._tokens[rng.randrange(name)]
                share = rng.randrange(8, PROMPT_TOKENS_MAX)
                tokens[:share] = like[:share]
            self._tokens[name] = tokens
        self._known: dict[tuple[int, int, str, str], Text] = {}

    def forget(self, weights: Collection[str]) -> None:
        """Texts under these weights are asked for no more, or seldom: keep no keys of them."""
        self._known = {key: text for key, text in self._known.items() if key[2] not in weights}

    def text(self, name: int, n: int, weights: str, tenant: str) -> Text:
        """The first n tokens of a prompt."""
        key = (name, n, weights, tenant)
        known = self._known.get(key)
        if known is None:
            namespace = Namespace(self.model.name, weights, tenant)
            keys = PromptKeys(self.model, namespace, as_tokens(self._tokens[name][:n]))
            units = tuple((unit, keys.keys(unit)) for unit in self.model.units_tokens)
            prompt = Prompt(namespace.digest(), weights_digest16(weights), tenant, n, units)
            digests = {unit: [blob[i : i + 32] for i in range(0, len(blob), 32)] for unit, blob in units}
            known = self._known[key] = Text(keys, weights, tenant, prompt, digests)
        return known


@dataclass(slots=True)
class Layouts:
    """The layouts that kernels of this world write and read, per group: ABI 1 mostly, ABI 2 now and then."""

    model: ModelSpec
    first: tuple[Abi, ...] = field(init=False)
    second: tuple[Abi, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.first = tuple(AbiPassport(kernel=g.name, alignment_bytes=64).abi() for g in self.model.groups)
        self.second = tuple(AbiPassport(kernel=g.name, kernel_abi=2).abi() for g in self.model.groups)

    def loose(self, group: int) -> Abi:
        """The first layout, aligned less than its reader needs."""
        return Abi(self.first[group].fingerprint, 16)

"""What a client may ask of a core, and why a request makes no sense: checked before it enters a core.

The wire codec has checked every field's type; this checks what the fields say, so that a core never
meets a group it does not have or half a digest. A request that fails is refused with one line that
names the field, and nothing else happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any

from .expected import Work
from .identity import DIGEST_BYTES
from .kinds import INDEX_DIGEST_BYTES
from .messages import (
    Acquire,
    Audited,
    Cancel,
    Computed,
    Drop,
    Generated,
    GraphIdle,
    GraphRegister,
    Lookup,
    Mark,
    Misuse,
    Objects,
    Park,
    Prompt,
    Release,
    Renew,
    Retain,
    StoreAbort,
    StoreBegin,
    StoreCommit,
    StoreQuiet,
    SwapIn,
    SwapOut,
)
from .model import ModelSpec
from .segments import span_of
from .tally import AuditOutcome

PROMPT_TOKENS_MAX = 1 << 26
NAME_CHARACTERS_MAX = 256
WEIGHTS_DIGEST_BYTES = 16
REVISION_MAX = (1 << 63) - 1
STRIPS_MAX = 1 << 16
MARKS_MAX = 64

Check = Callable[[Any, ModelSpec], str | None]


def other_request(name: str) -> Misuse:
    """What a request gets whose id stands for another one."""
    return Misuse(name, "request: its id was given to another request before: every request needs one of its own")


def gist(record: Acquire | StoreBegin | StoreCommit) -> tuple[Any, ...]:
    """What a request asks for, less its id and how long it may take: equal for a retry, and for nothing else.

    A prompt's last digests stand for all of it: each is over all tokens before.
    """
    if isinstance(record, StoreCommit):
        return (record.attempt, hash(record.checksums))
    prompt = record.prompt
    whose = (prompt.namespace, prompt.tenant, prompt.n, *[keys[-DIGEST_BYTES:] for _, keys in prompt.keys])
    if isinstance(record, Acquire):
        wanted = (record.abis, record.readers, record.min_tokens, record.probe, record.graph, record.graphs)
        return (*whose, *wanted, record.explain, record.prefetch, record.replay_tokens)
    items = [
        (item.objects.group, item.objects.shard, hash(item.objects.indices), item.revision, item.abi)
        for item in record.items
    ]
    return (*whose, items, record.replace)


def refusal_of(record: Any, model: ModelSpec) -> str | None:
    """One line that names what is wrong with a client's record; None for a sound one.

    A record that clients do not send at all is refused by its name.
    """
    check = _CHECKS.get(type(record))
    if check is None:
        return f"{type(record).__name__} is not a client's request"
    name = record.op if isinstance(record, Lookup) else record.request
    if not 0 < len(name) <= NAME_CHARACTERS_MAX:
        return f"request: its id must have 1 to {NAME_CHARACTERS_MAX} characters"
    return check(record, model)


def _prompt(prompt: Prompt) -> str | None:
    if len(prompt.namespace) != DIGEST_BYTES or len(prompt.weights) != WEIGHTS_DIGEST_BYTES:
        return f"prompt: namespace has {DIGEST_BYTES} bytes and weights {WEIGHTS_DIGEST_BYTES}"
    if not 0 <= prompt.n <= PROMPT_TOKENS_MAX:
        return f"prompt.n: {prompt.n} is not within 0..{PROMPT_TOKENS_MAX}"
    if len(prompt.tenant) > NAME_CHARACTERS_MAX:
        return f"prompt.tenant: more than {NAME_CHARACTERS_MAX} characters"
    for unit, digests in prompt.keys:
        if unit < 1 or len(digests) != prompt.n // unit * DIGEST_BYTES:
            return f"prompt.keys: {len(digests)} bytes are not the digests of {prompt.n} tokens every {unit}"
    return None


def _objects(runs: Iterable[Objects], model: ModelSpec, field: str) -> str | None:
    """Each object once: groups and shards of the model, indices ascending, one digest an index."""
    seen = set()
    for run in runs:
        if not 0 <= run.group < len(model.groups):
            return f"{field}: the model has no group number {run.group}"
        if not 0 <= run.shard < model.shards:
            return f"{field}: the model has no shard {run.shard}"
        if (run.group, run.shard) in seen:
            return f"{field}: group {run.group} of shard {run.shard} stands twice"
        seen.add((run.group, run.shard))
        indices = run.indices
        if len(run.digests) != len(indices) * DIGEST_BYTES:
            return f"{field}: {len(indices)} objects have {len(run.digests)} bytes of digests"
        if indices and (indices[0] < 0 or any(a >= b for a, b in pairwise(indices))):
            return f"{field}: indices must ascend from 0 or more"
    return None


def _seconds(value: float | None, field: str, *, least_exclusive: bool) -> str | None:
    if value is None:
        return None
    if not isfinite(value) or value < 0 or (least_exclusive and value == 0):
        return f"{field}: {value} is no time in seconds"
    return None


def _store_begin(record: StoreBegin, model: ModelSpec) -> str | None:
    refused = (
        _prompt(record.prompt)
        or _objects((item.objects for item in record.items), model, "items")
        or _objects(record.retire, model, "retire")
    )
    if refused is not None:
        return refused
    for item in record.items:
        spec = model.groups[item.objects.group]
        if not 0 < item.length <= spec.block_bytes:
            return f"items: {item.length} bytes are no object of {spec.name}, which has {spec.block_bytes}"
        if not 0 <= item.revision <= REVISION_MAX:
            return f"items: revision {item.revision} is not within 0..2^63-1"
        if item.abi.alignment_bytes < 1:
            return f"items: {item.abi.alignment_bytes} is no alignment in bytes"
        if item.objects.indices and item.objects.indices[-1] >= record.prompt.n // spec.unit_tokens:
            return f"items: {spec.name}[{item.objects.indices[-1]}] lies outside the prompt"
    return None


def _acquire(record: Acquire, model: ModelSpec) -> str | None:
    if len(record.abis) != len(model.groups):
        return f"abis: {len(record.abis)} are given for {len(model.groups)} groups"
    if any(abi.alignment_bytes < 1 for abi in record.abis):
        return "abis: an alignment is at least 1 byte"
    if len(record.readers) != model.shards or not all(record.readers):
        return f"readers: one holder is named for each of {model.shards} shards"
    if record.replay_tokens is not None and not 0 < record.replay_tokens <= PROMPT_TOKENS_MAX:
        return f"replay_tokens: {record.replay_tokens} is not within 1..{PROMPT_TOKENS_MAX}"
    if record.min_tokens < 0:
        return f"min_tokens: {record.min_tokens} is less than 0"
    return (
        _prompt(record.prompt)
        or _seconds(record.lease_s, "lease_s", least_exclusive=True)
        or _seconds(record.wait_s, "wait_s", least_exclusive=False)
        or _seconds(record.deadline_s, "deadline_s", least_exclusive=False)
        or _seconds(record.age_s, "age_s", least_exclusive=False)
        or _marks(record.marks)
    )


def _retain(record: Retain, model: ModelSpec) -> str | None:
    del model
    if not isfinite(record.weight):
        return f"weight: {record.weight} is no number"
    return _prompt(record.prompt) or _seconds(record.ttl_s, "ttl_s", least_exclusive=True)


def _generated(record: Generated, model: ModelSpec) -> str | None:
    del model
    told = record.output_tokens
    if not 0 <= told <= PROMPT_TOKENS_MAX:
        return f"output_tokens: {told} is no number of tokens"
    return _prompt(record.prompt)


def _renew(record: Renew, model: ModelSpec) -> str | None:
    del model
    return _seconds(record.lease_s, "lease_s", least_exclusive=True)


def _audited(record: Audited, model: ModelSpec) -> str | None:
    del model
    known = [str(outcome) for outcome in AuditOutcome]
    return None if record.outcome in known else f"outcome: {record.outcome!r} is none of {', '.join(known)}"


def _release(record: Release, model: ModelSpec) -> str | None:
    del model
    used = record.reused_tokens
    return None if used is None or 0 <= used <= PROMPT_TOKENS_MAX else f"reused_tokens: {used} is no number of tokens"


def _computed(record: Computed, model: ModelSpec) -> str | None:
    del model
    if record.work not in (Work.PREFILL, Work.REPLAY):
        return f"work: {record.work} is not what an engine computes"
    if not 0 < record.tokens <= PROMPT_TOKENS_MAX:
        return f"tokens: {record.tokens} is not within 1..{PROMPT_TOKENS_MAX}"
    return _seconds(record.seconds, "seconds", least_exclusive=True)


def _lookup(record: Lookup, model: ModelSpec) -> str | None:
    if len(record.strips) > STRIPS_MAX:
        return f"strips: {len(record.strips)} are more than {STRIPS_MAX}"
    span = span_of(model)
    for strip in record.strips:
        if strip.unit not in model.units_tokens:
            return f"strips: no group has objects of {strip.unit} tokens"
        if strip.first < 0 or strip.first % span:
            return f"strips: {strip.first} is not where a segment of {span} objects begins"
        if not strip.digests or len(strip.digests) % INDEX_DIGEST_BYTES:
            return f"strips: {len(strip.digests)} bytes are no index digests of {INDEX_DIGEST_BYTES} bytes"
        if (strip.first + strip.count) * strip.unit > PROMPT_TOKENS_MAX:
            return f"strips: a prompt has at most {PROMPT_TOKENS_MAX} tokens"
    return _marks(record.marks)


def _marks(marks: Sequence[Mark]) -> str | None:
    return f"marks: {len(marks)} are more than {MARKS_MAX}" if len(marks) > MARKS_MAX else None


def _moving(record: Drop | SwapIn | SwapOut, model: ModelSpec) -> str | None:
    return _objects(record.objects, model, "objects")


def _graph_register(record: GraphRegister, model: ModelSpec) -> str | None:
    for run in record.slots:
        if not 0 <= run.group < len(model.groups) or not 0 <= run.shard < model.shards:
            return f"slots: the model has no group {run.group} of shard {run.shard}"
        if len(run.slots) != 4 * len(run.indices) or len(run.versions) != 8 * len(run.indices):
            return f"slots: {len(run.indices)} indices need as many slots and versions"
    return None


def _any(record: Any, model: ModelSpec) -> str | None:
    """Nothing to check beyond the types: the core looks a number up and answers for unknown ones."""
    del record, model
    return None


_CHECKS: dict[type, Check] = {
    Acquire: _acquire,
    Audited: _audited,
    Cancel: _any,
    Computed: _computed,
    Drop: _moving,
    Generated: _generated,
    GraphIdle: _any,
    GraphRegister: _graph_register,
    Lookup: _lookup,
    Park: _any,
    Release: _release,
    Renew: _renew,
    Retain: _retain,
    StoreAbort: _any,
    StoreBegin: _store_begin,
    StoreCommit: _any,
    StoreQuiet: _any,
    SwapIn: _moving,
    SwapOut: _moving,
}

CLIENT_RECORDS = frozenset(_CHECKS)
"""What a client may ask a core. Everything else between cores comes over the proven mesh."""

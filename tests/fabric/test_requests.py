"""What a client's request must be before a core sees it (over real sockets: tests/actors/test_sessions.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfabric.fabric import wire
from kvfabric.fabric.identity import Namespace, PromptKeys, as_tokens, weights_digest16
from kvfabric.fabric.kinds import WireError
from kvfabric.fabric.messages import (
    Acquire,
    Drop,
    Generated,
    GrantUntil,
    Mark,
    Objects,
    PartOpen,
    Prompt,
    Release,
    Renew,
    Retain,
    ShardMap,
    StoreBegin,
    StoreCommit,
    StoreItem,
    Strip,
)
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.passport import Abi
from kvfabric.fabric.requests import CLIENT_RECORDS, refusal_of
from kvfabric.fabric.segments import Router

MODEL = ModelSpec.model_validate(
    {
        "shards": 2,
        "groups": [
            {"name": "kv", "kind": "compressed_history", "block_tokens": 8, "block_bytes": 100},
            {"name": "swa", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 8, "block_bytes": 50},
        ],
    }
)
KEYS = PromptKeys(MODEL, Namespace("m", "v1"), as_tokens(range(30)))
PROMPT = Prompt(
    KEYS.namespace.digest(), weights_digest16("v1"), "", 30, tuple((u, KEYS.keys(u)) for u in MODEL.units_tokens)
)
ONE = Objects(0, 0, (0, 2), KEYS.keys(8)[:32] + KEYS.keys(8)[64:96])
ITEM = StoreItem(ONE, 0, 100, Abi())
SOUND: dict[str, Any] = {
    "acquire": Acquire("r", PROMPT, (Abi(), Abi()), ("h", "h"), 1.0, None, 0, False),
    "begin": StoreBegin("r", PROMPT, (ITEM, replace(ITEM, objects=replace(ONE, shard=1))), (ONE,), False),
    "commit": StoreCommit("r", 1, bytes(32)),
    "drop": Drop("r", (ONE,)),
    "generated": Generated("r", PROMPT, 12),
    "lookup": Router(ShardMap(0, ("d",))).lookups("r", PROMPT)["d"],
    "release": Release("r", 1, 30),
    "renew": Renew("r", 1, 30.0),
    "retain": Retain("r", PROMPT, 30.0, 1.0),
}


@pytest.mark.parametrize("record", SOUND.values(), ids=SOUND)
def test_a_sound_request_is_taken(record: Any) -> None:
    assert refusal_of(record, MODEL) is None


NAN, INF = float("nan"), float("inf")
UNSOUND = [
    *[(replace(SOUND["retain"], ttl_s=s), "ttl_s") for s in (0.0, -1.0, NAN, INF)],
    (replace(SOUND["retain"], weight=NAN), "weight"),
    *[(replace(SOUND["generated"], output_tokens=n), "output_tokens") for n in (-1, 1 << 60)],
    (replace(SOUND["generated"], prompt=replace(PROMPT, namespace=b"")), "namespace"),
    (replace(SOUND["acquire"], request=""), "request"),
    (replace(SOUND["acquire"], request="x" * 257), "request"),
    (replace(SOUND["lookup"], op=""), "request"),
    (replace(SOUND["acquire"], abis=(Abi(),)), "abis"),
    (replace(SOUND["acquire"], abis=(Abi(), Abi(alignment_bytes=0))), "abis"),
    (replace(SOUND["acquire"], readers=("h",)), "readers"),
    (replace(SOUND["acquire"], readers=("h", "")), "readers"),
    (replace(SOUND["acquire"], min_tokens=-1), "min_tokens"),
    *[(replace(SOUND["acquire"], lease_s=s), "lease_s") for s in (0.0, -1.0, NAN, INF)],
    *[(replace(SOUND["acquire"], wait_s=s), "wait_s") for s in (-0.1, NAN, INF)],
    *[(replace(SOUND["acquire"], deadline_s=s), "deadline_s") for s in (-0.1, NAN, INF)],
    *[(replace(SOUND["renew"], lease_s=s), "lease_s") for s in (0.0, -1.0, NAN, INF)],
    (replace(SOUND["release"], reused_tokens=-1), "reused_tokens"),
    (replace(SOUND["acquire"], prompt=replace(PROMPT, n=-1)), "prompt.n"),
    (replace(SOUND["acquire"], prompt=replace(PROMPT, n=1 << 40)), "prompt.n"),
    (replace(SOUND["acquire"], prompt=replace(PROMPT, n=32)), "prompt.keys"),
    (replace(SOUND["acquire"], prompt=replace(PROMPT, namespace=b"")), "namespace"),
    (replace(SOUND["acquire"], prompt=replace(PROMPT, weights=bytes(15))), "weights"),
    (replace(SOUND["acquire"], prompt=replace(PROMPT, tenant="t" * 257)), "tenant"),
    (replace(SOUND["acquire"], prompt=replace(PROMPT, keys=((0, b""),))), "prompt.keys"),
    (replace(SOUND["lookup"], strips=(Strip(5, 0, bytes(16)),)), "strips: no group"),
    (replace(SOUND["lookup"], strips=(Strip(8, 3, bytes(16)),)), "strips: 3"),
    (replace(SOUND["lookup"], strips=(Strip(8, -256, bytes(16)),)), "strips: -256"),
    (replace(SOUND["lookup"], strips=(Strip(8, 0, b""),)), "strips: 0 bytes"),
    (replace(SOUND["lookup"], strips=(Strip(8, 0, bytes(17)),)), "strips: 17 bytes"),
    (replace(SOUND["lookup"], strips=(Strip(8, 1 << 26, bytes(16)),)), "strips: a prompt"),
    (replace(SOUND["lookup"], marks=(Mark("h", 1, 1),) * 65), "marks"),
    (replace(SOUND["acquire"], marks=(Mark("h", 1, 1),) * 65), "marks"),
    (Drop("r", (replace(ONE, group=2),)), "objects: the model has no group"),
    (Drop("r", (replace(ONE, group=-1),)), "objects: the model has no group"),
    (Drop("r", (replace(ONE, shard=2),)), "objects: the model has no shard"),
    (Drop("r", (ONE, ONE)), "stands twice"),
    (Drop("r", (replace(ONE, digests=bytes(63)),)), "bytes of digests"),
    (Drop("r", (replace(ONE, indices=(2, 0)),)), "ascend"),
    (Drop("r", (replace(ONE, indices=(-2, 0)),)), "ascend"),
    *[(StoreBegin("r", PROMPT, (replace(ITEM, length=n),), (), False), "bytes are no object of kv") for n in (0, 101)],
    *[(StoreBegin("r", PROMPT, (replace(ITEM, revision=n),), (), False), "revision") for n in (-1, 1 << 63)],
    (StoreBegin("r", PROMPT, (replace(ITEM, abi=Abi(alignment_bytes=0)),), (), False), "alignment"),
    (StoreBegin("r", PROMPT, (replace(ITEM, objects=replace(ONE, indices=(0, 3))),), (), False), "outside the prompt"),
    (StoreBegin("r", PROMPT, (), (replace(ONE, group=5),), False), "retire: the model has no group"),
]


@pytest.mark.parametrize(("record", "words"), UNSOUND)
def test_an_unsound_request_is_refused_by_the_field(record: Any, words: str) -> None:
    refused = refusal_of(record, MODEL)
    assert refused is not None
    assert words in refused


@pytest.mark.parametrize("record", [GrantUntil(1, 10.0), PartOpen("o", PROMPT, (), 8, (), (), (), (), 1.0), ONE])
def test_what_is_no_clients_record_is_refused_by_its_name(record: Any) -> None:
    assert refusal_of(record, MODEL) == f"{type(record).__name__} is not a client's request"


@given(st.sampled_from(sorted(SOUND)), st.data())
def test_a_request_with_any_one_number_changed_is_refused_in_words_or_taken_but_never_raises(
    name: str, data: st.DataObject
) -> None:
    """Whatever the wire lets through, the check answers for."""
    schema, number, fields = _plain(SOUND[name])
    path = data.draw(st.sampled_from(_paths(fields)))
    holder = fields
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = data.draw(st.integers(-3, 1 << 40) | st.just(None) | st.binary(max_size=40) | st.floats())
    try:
        record = wire.decode(_packed(schema, number, fields))
    except WireError:
        return
    assert type(record) in CLIENT_RECORDS
    refused = refusal_of(record, MODEL)
    assert refused is None or "\n" not in refused


def _plain(record: Any) -> tuple[int, int, list[Any]]:
    schema, number, fields = msgpack.unpackb(wire.encode(record), raw=False)
    return schema, number, fields


def _packed(schema: int, number: int, fields: list[Any]) -> bytes:
    return bytes(msgpack.packb([schema, number, fields]))


def _paths(plain: Any, at: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    if isinstance(plain, list):
        return [path for i, inner in enumerate(plain) for path in _paths(inner, (*at, i))]
    return [at]

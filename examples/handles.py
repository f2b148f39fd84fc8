"""The fabric through its Ray actor handles alone: bytes in, bytes out, no socket, no shared memory.

Run it with ``python examples/handles.py``. ``fabric.holder(node)`` and ``fabric.directory`` are actor handles whose
method ``request(bytes) -> bytes`` takes the wire records of ``kvfabric.fabric.messages``. A session does the same over
a socket, many times faster; handles suit tools, other runtimes, and looking at what a process knows.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import ray
import xxhash

import kvfabric
from kvfabric.fabric import wire
from kvfabric.fabric.identity import Namespace, PromptKeys, as_tokens, weights_digest16
from kvfabric.fabric.messages import (
    Acquire,
    Lookup,
    Mark,
    Objects,
    Prompt,
    ReadSlots,
    Release,
    StatusRequest,
    StoreBegin,
    StoreCommit,
    StoreItem,
    Strip,
    WriteSlots,
)
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.segments import narrow

MODEL = ModelSpec.model_validate(
    {
        "name": "tiny",
        "groups": [
            {"name": "history", "kind": "compressed_history", "block_tokens": 16, "block_bytes": 4096},
            {"name": "window", "kind": "sliding_window", "block_tokens": 16, "window_tokens": 32, "block_bytes": 1024},
        ],
    }
)
TOKENS = list(range(1000, 1070))
BLOCKS = len(TOKENS) // 16


def ask(handle: Any, record: Any) -> Any:
    """One wire record to a process, its reply back."""
    return wire.decode(ray.get(handle.request.remote(wire.encode(record)), timeout=30))


def content(group: int, index: int) -> bytes:
    """The bytes of one object."""
    return bytes([16 * group + index + 1]) * MODEL.groups[group].block_bytes


def prompt() -> Prompt:
    """The prompt as the fabric sees it: namespace and digests, never tokens."""
    keys = PromptKeys(MODEL, Namespace(MODEL.name, MODEL.weights), as_tokens(TOKENS))
    units = tuple((unit, keys.keys(unit)) for unit in MODEL.units_tokens)
    return Prompt(keys.namespace.digest(), weights_digest16(MODEL.weights), "", len(TOKENS), units)


def store(holder: Any, asked: Prompt, fabric: kvfabric.Fabric) -> int:
    """Reserve slots for every block of both groups, write them, make them visible with their checksums.

    Returns the holder's mark: a look-up that bears it sees what was stored.
    """
    digests = dict(asked.keys)[16]
    items = tuple(
        StoreItem(
            Objects(group, 0, tuple(range(BLOCKS)), digests), 0, spec.block_bytes, fabric.spec.passport(spec).abi()
        )
        for group, spec in enumerate(MODEL.groups)
    )
    begun = ask(holder, StoreBegin("store-1", asked, items, (), False))
    print(f"attempt {begun.attempt}: {sum(len(run.indices) for run in begun.slots)} slots, refused {begun.refused}")
    writes = []
    for run in begun.slots:
        slots = np.frombuffer(run.slots, dtype="<u4").tolist()
        writes += [(slot, content(run.group, index)) for slot, index in zip(slots, run.indices, strict=True)]
    ask(holder, WriteSlots("write-1", begun.attempt, tuple(writes)))
    sums = b"".join(xxhash.xxh3_128_digest(payload) for _, payload in writes)
    done = ask(holder, StoreCommit("commit-1", begun.attempt, sums))
    print(f"committed: refused {done.refused}")
    return int(done.mark)


def main() -> None:
    """Store at node 0's holder; look up, acquire, read and release at node 1's."""
    with kvfabric.launch(kvfabric.FabricSpec(model=MODEL, memory_bytes=8 << 20), nodes=2) as fabric:
        addresses = sorted(h["address"] for h in fabric.status()["holders"])
        near, far = (fabric.holder(address.split(":")[1]) for address in addresses)
        asked = prompt()
        incarnation = next(m.incarnation for m in fabric.info().members if m.address == addresses[0])
        mark = Mark(addresses[0], incarnation, store(near, asked, fabric))

        # The directory hears of a commit milliseconds later: the mark makes it wait for that.
        strips = tuple(Strip(unit, 0, narrow(keys)) for unit, keys in asked.keys)
        found = ask(fabric.directory, Lookup("lookup-1", 0, strips, (mark,)))
        told = [f"group {lane.group} at {stripe.holder}" for stripe in found.stripes for lane in stripe.lanes]
        print(f"directory, epoch {found.epoch}: {', '.join(told)}")

        abis = tuple(fabric.spec.passport(group).abi() for group in MODEL.groups)
        answer = ask(far, Acquire("acquire-1", asked, abis, (addresses[1],), 10.0, None, 0, False))
        print(f"acquire at {addresses[1]}: {answer.status}, {answer.tokens} tokens, moved {dict(answer.moved_bytes)}")
        for run in answer.grant.parts[0].slots:
            payload = ask(far, ReadSlots("read-1", answer.grant.lease, run.group, 0, run.indices)).payload
            right = all(got == content(run.group, index) for index, got in zip(run.indices, payload, strict=True))
            print(f"  group {run.group}: blocks {list(run.indices)}, the right bytes: {right}")
        ask(far, Release("release-1", answer.grant.lease, answer.tokens))

        status = json.loads(ask(far, StatusRequest("status-1")).status)
        print(f"released: {status['leases']} leases, {status['pinned_slots']} pinned slots")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)

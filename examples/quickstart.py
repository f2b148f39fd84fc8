"""The fabric on a laptop: launch, publish a prompt's state, resume from it on another node, release.

Run it with ``python examples/quickstart.py``. The bytes are made up; an engine's adapter would bring its cache's.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import ray

import kvfabric

MODEL = {
    "name": "tiny-hybrid",
    "groups": [
        # one entry every 4 tokens, the raw tokens behind the last entry, and a window of 32 tokens
        {"name": "compressed", "kind": "compressed_history", "block_tokens": 16, "ratio": 4, "block_bytes": 8192},
        {"name": "tail", "kind": "uncompressed_tail", "of": "compressed", "block_tokens": 4, "block_bytes": 2048},
        {"name": "window", "kind": "sliding_window", "block_tokens": 16, "window_tokens": 32, "block_bytes": 16384},
    ],
}
PROMPT = [(17 * i) % 32_000 for i in range(100)]


class Worker:
    """An inference worker: a process on one node with a session of its own."""

    def __init__(self) -> None:
        self.session = kvfabric.connect()

    def prefill_and_publish(self, tokens: list[int]) -> str:
        """Publish every object of the prompt, by group and index: one array of ``block_bytes`` each."""
        objects = {
            group.name: {
                index: np.full(group.block_bytes, index + 1, dtype=np.uint8)
                for index in range(len(tokens) // group.unit_tokens)
            }
            for group in self.session.model.groups
        }
        stored = self.session.publish(tokens, objects)
        return "published" if stored.ok else f"not published: {stored.refused}"

    def resume(self, tokens: list[int]) -> dict[str, Any]:
        """Acquire the longest prefix that every group can resume at, read it, release it."""
        deadline = time.monotonic() + 5.0
        while not self.session.probe(tokens).tokens and time.monotonic() < deadline:
            time.sleep(0.01)  # the directory hears of another node's state milliseconds after its commit
        answer = self.session.acquire(tokens)
        if answer.lease is None:
            return {"status": answer.status, "cause": answer.cause}
        with answer.lease as lease:
            read = {}
            for name in lease.views:
                with lease.read(name) as views:  # zero-copy and read-only; checked before and after
                    read[name] = {index: int(view[0]) for index, view in views.items()}
            return {
                "status": answer.status,
                "tokens": lease.tokens,
                "moved": answer.moved_bytes,
                "fence": lease.fence,
                "read": read,
            }


def main() -> None:
    """Two workers on two nodes of a cluster that lives as long as this process."""
    with kvfabric.launch({"model": MODEL, "memory_bytes": 32 << 20}, nodes=2) as fabric:
        holders = fabric.status()["holders"]
        print(f"launched: {len(holders)} holders, links {', '.join(holders[0]['links'])}")
        actor: Any = ray.remote(Worker)
        near, far = (actor.options(num_cpus=0, resources={f"kvfabric_node_{i}": 0.1}).remote() for i in range(2))
        print(f"node 0 has a prompt of {len(PROMPT)} tokens: {ray.get(near.prefill_and_publish.remote(PROMPT))}")
        longer = [*PROMPT, 1, 2, 3]
        for attempt in ("first", "second"):
            told = ray.get(far.resume.remote(longer))
            if "tokens" not in told:
                print(f"node 1, {attempt} time: {told['status']}, it would compute all: {told['cause']}")
                continue
            print(
                f"node 1, {attempt} time: {told['status']}, resumes at token {told['tokens']} of {len(longer)}"
                f" under fence {told['fence']}; moved {sum(told['moved'].values())} bytes {told['moved']}"
            )
            print(
                f"  read { ({name: len(read) for name, read in told['read'].items()}) } objects, the right ones:",
                end=" ",
            )
            print(all(first == index + 1 for read in told["read"].values() for index, first in read.items()))
    print("shut down")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)

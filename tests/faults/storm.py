"""Many sessions in many processes, forked from one warm parent: ``python storm.py`` with a JSON order on stdin.

Each session publishes, acquires, reads, renews, abandons and releases at random for a while; each process prints
what came of it as one JSON line. Every second process ends without closing anything.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfabric import Lease, LeaseRefused, Session
from kvfabric.actors.info import FabricInfo
from kvfabric.fabric.model import ModelSpec

PROMPTS = 24
NEEDED = {"csa": range(4), "idx": range(4), "tail": range(15, 16), "swa": range(12, 16)}
"""What a resume at 64 of the 70 tokens needs."""


def tokens_of(number: int) -> list[int]:
    return [(number * 1_000_003 + 7919 * i) % 50_000 for i in range(70)]


def content(number: int, group: str, index: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """The one right content of an object."""
    rng = np.random.default_rng([number, sum(group.encode()), index])
    return rng.integers(0, 256, nbytes, dtype=np.uint8)


def objects(model: ModelSpec, number: int) -> dict[str, dict[int, Any]]:
    return {g: {i: content(number, g, i, model.group(g).block_bytes) for i in at} for g, at in NEEDED.items()}


@dataclass
class Walker:
    """One session's way through the storm."""

    session: Session
    rng: random.Random
    right: list[dict[str, dict[int, Any]]]
    came: Counter[str]

    def step(self) -> None:
        number = self.rng.randrange(PROMPTS)
        if self.rng.random() < 0.3:
            stored = self.session.publish(tokens_of(number), self.right[number], replace=self.rng.random() < 0.5)
            self.came["stored" if stored.ok else f"not stored: {stored.refused}"] += 1
            return
        lease_s = self.rng.choice((0.3, 2.0))
        wait_s = self.rng.choice((None, None, 0.2))
        lease = self.session.acquire(tokens_of(number), lease_s=lease_s, wait_s=wait_s).lease
        if lease is None:
            self.came["not granted"] += 1
            return
        self.came["granted"] += 1
        self.read(lease, number)
        what = self.rng.random()
        if what < 0.3:
            self.came["abandoned"] += 1
            return
        if what < 0.6:
            if self.rng.random() < 0.2:
                time.sleep(0.3)
            refused = lease.renew(1.0)
            self.came["renewed" if refused is None else f"not renewed: {refused}"] += 1
            self.read(lease, number)
        lease.release()

    def read(self, lease: Lease, number: int) -> None:
        """Every leased byte, under the lease's guard."""
        for group in lease.views:
            wrong = 0
            try:
                with lease.read(group) as views:
                    for index, view in views.items():
                        wrong += not np.array_equal(view, self.right[number][group][index])
            except LeaseRefused as refused:
                self.came[f"refused: {refused.reason}"] += 1
                return
            self.came["wrong"] += wrong


def walk(walker: Walker, until: float) -> None:
    try:
        while time.monotonic() < until:
            walker.step()
    except BaseException:  # noqa: BLE001 - the process tells of it
        traceback.print_exc()
        walker.came["raised"] += 1


def process(order: dict[str, Any], number: int) -> None:
    info = FabricInfo.decode(bytes.fromhex(order["info"]), order["nodes"][number % len(order["nodes"])])
    right = [objects(info.spec.model, n) for n in range(PROMPTS)]
    sessions = [Session(lambda: info, name=info.name) for _ in range(order["sessions"])]
    walkers = [
        Walker(session, random.Random(f"{order['seed']}/{number}/{n}"), right, Counter())
        for n, session in enumerate(sessions)
    ]
    until = time.monotonic() + order["for_s"]
    threads = [threading.Thread(target=walk, args=(walker, until)) for walker in walkers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.stdout.write(json.dumps(sum((w.came for w in walkers), Counter())) + "\n")
    sys.stdout.flush()
    if number % 2 == 0:
        for session in sessions:
            session.close()


def main() -> None:
    order = json.loads(sys.stdin.readline())
    children = []
    for number in range(order["processes"]):
        child = os.fork()
        if not child:
            try:
                process(order, number)
            except BaseException:  # noqa: BLE001 - os._exit would swallow it
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


if __name__ == "__main__":
    main()

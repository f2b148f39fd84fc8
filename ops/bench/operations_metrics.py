"""What counting costs: the integers and the log's entry of one acquire, beside an acquire and its release over the socket.

The counting is timed as the holder does it, on the very answer that the acquire gave; the acquires run
in turns with it, so that a busy machine slows both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...actors.fabric import Fabric, connect
from ...actors.session import Session
from ...fabric.journal import Answered, Journal
from ...fabric.kinds import Status
from ...fabric.messages import Answer as WireAnswer
from ...fabric.tally import Tally
from .directory_core import figure

TOKENS = 1024
TURNS = 200
COUNTS = 4000
COST_TARGET_PERCENT = 1.0


def metrics_cost(fabric: Fabric) -> Iterator[dict[str, Any]]:
    """``metrics_of_an_acquire``: seconds of counting over seconds of an acquire, release included."""
    with connect(fabric.name) as session:
        prompt = _stored(session)
        answer = WireAnswer("r", Status.FULL_HIT, TOKENS, TOKENS, TOKENS, None, (), None, None, None)
        kinds, units = zip(*((g.kind, g.unit_tokens) for g in session.model.groups), strict=True)
        tally, journal, message = Tally(kinds, units), Journal(), session.request(prompt)
        asked, counted = [], []
        for _ in range(TURNS):
            began = time.perf_counter()
            lease = session.acquire(prompt).lease
            if lease is None:
                raise RuntimeError("the prompt that was stored is not granted")
            lease.release(reused_tokens=TOKENS)
            asked.append(time.perf_counter() - began)
            began = time.perf_counter()
            for _ in range(COUNTS // TURNS):
                tally.answered(TOKENS + 1, answer, TOKENS)
                journal.add(Answered(began, message, answer))
            counted.append((time.perf_counter() - began) / (COUNTS // TURNS))
    cost_s, acquire_s = statistics.median(counted), statistics.median(asked)
    yield figure("metrics_of_an_acquire", 100 * cost_s / acquire_s, "percent", COST_TARGET_PERCENT)
    yield figure("counting_an_acquire", cost_s * 1e9, "ns")
    yield figure("acquire_and_release", acquire_s * 1e6, "us")


def _stored(session: Session) -> Any:
    prompt = session.keys(np.random.default_rng(7).integers(0, 50_000, TOKENS + 1))
    group = session.model.groups[0]
    block = np.zeros(group.block_bytes, dtype=np.uint8)
    if not session.publish(prompt, {group.name: dict.fromkeys(range(TOKENS // group.unit_tokens), block)}).ok:
        raise RuntimeError("the prompt was not stored")
    return prompt

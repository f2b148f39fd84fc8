"""Traces: files in the format of Mooncake's open traces, and a generator of the same shape.

A line is ``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one id a
512-token block]}``; equal ids at equal places mean an equal prefix
(kvcache-ai/Mooncake, ``FAST25-release/traces``).
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...fabric.kinds import SpecError

BLOCK_TOKENS = 512
ID_MAX = (1 << 63) - 1
TOKENS_MAX = 1 << 31
LINE_BYTES_MAX = 1 << 22
BAD_LINES_TOLD_MAX = 20


class Request(NamedTuple):
    """One request. ``blocks``: an id for each whole block of the prompt; a partial last one is not stored."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: Sequence[int]

    @property
    def reusable_blocks(self) -> int:
        """How many blocks may be reused: at least one token is computed."""
        return min(len(self.blocks), (self.input_tokens - 1) // BLOCK_TOKENS)


@dataclass(slots=True)
class Trace:
    """A trace in memory, by time. ``bad``: lines that were skipped, the first of them told by number and reason."""

    name: str
    requests: list[Request]
    bad: int = 0
    told: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Input tokens of all requests."""
        return sum(request.input_tokens for request in self.requests)


def load(path: Path, *, lenient: bool = False, progress: Callable[[int], None] | None = None) -> Trace:
    """Read a trace. ``progress`` is told the bytes read so far.

    Raises SpecError naming the file, the line and the reason for the first line that is no request;
    with ``lenient`` such lines are counted and skipped.
    """
    trace = Trace(path.name, [])
    read = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES_MAX), b""), 1):
                read += len(line)
                if not line.strip():
                    continue
                found = _request(line)
                if isinstance(found, Request):
                    trace.requests.append(found)
                elif not lenient:
                    raise SpecError(f"{path}:{number}: {found}; --lenient skips such lines")
                else:
                    trace.bad += 1
                    if len(trace.told) < BAD_LINES_TOLD_MAX:
                        trace.told.append(f"{path.name}:{number}: {found}")
                if progress is not None:
                    progress(read)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
    if not trace.requests:
        raise SpecError(f"{path}: there is no request in it")
    trace.requests.sort(key=lambda request: request.at_s)
    return trace


def _request(line: bytes) -> Request | str:
    """The request of a line, or what is wrong with it."""
    try:
        plain = json.loads(line)
    except (ValueError, RecursionError):
        return "not one JSON object (or longer than a line may be)"
    if not isinstance(plain, dict):
        return "not a JSON object"
    numbers: dict[str, Any] = {}
    for name, most in (("timestamp", 1e15), ("input_length", TOKENS_MAX), ("output_length", TOKENS_MAX)):
        value = plain.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            return f"{name}: {value!r} is no number within 0..{most:g}"
        numbers[name] = value
    tokens = int(numbers["input_length"])
    ids = plain.get("hash_ids")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i <= ID_MAX for i in ids):
        return "hash_ids: not a list of whole numbers"
    whole = tokens // BLOCK_TOKENS
    if not whole <= len(ids) <= whole + 1:
        return f"hash_ids: {len(ids)} ids for {tokens} tokens, one a block of {BLOCK_TOKENS} is due"
    return Request(numbers["timestamp"] / 1000, tokens, int(numbers["output_length"]), array("q", ids[:whole]))


def generate(requests: int = 4000, seed: int = 1) -> Trace:
    """A trace of conversations and of questions about documents, the same for the same seed.

    Shares and lengths are of the order of the public ones: a system prompt of one block that all
    share, first turns of about 20 blocks, a third of which go on after a minute or two, documents of 50 blocks
    that are asked about a few times, and prompts that never come back.
    """
    draw = random.Random(f"trace of {seed}")
    fresh = iter(range(1, 1 << 40))
    open_threads: list[tuple[float, list[int]]] = []
    found: list[Request] = []
    now_s = 0.0
    while len(found) < requests:
        now_s += draw.expovariate(3.0)
        due = [thread for thread in open_threads if thread[0] <= now_s]
        for thread in sorted(due)[: requests - len(found)]:
            open_threads.remove(thread)
            found.append(_turn(draw, thread[0], thread[1], fresh, open_threads))
        if len(found) < requests:
            found.append(_turn(draw, now_s, [], fresh, open_threads))
    found.sort(key=lambda request: request.at_s)
    return Trace(f"generated (seed {seed})", found)


def _turn(
    draw: random.Random,
    at_s: float,
    before: list[int],
    fresh: Iterator[int],
    open_threads: list[tuple[float, list[int]]],
) -> Request:
    """One request that goes on from what stood before, and perhaps the next turn that follows it."""
    document = draw.random() < 0.3
    if before:
        blocks = before + [next(fresh) for _ in range(draw.choice((1, 1, 1, 2, 3, 8)))]
        goes_on = draw.random() < 0.5
    else:
        size = draw.randint(35, 80) if document else min(200, 1 + int(draw.lognormvariate(2.6, 0.9)))
        blocks = [0, *(next(fresh) for _ in range(size))]
        goes_on = draw.random() < (0.7 if document else 0.3)
    if goes_on:
        kept = blocks if not document or before else blocks[:-1]
        open_threads.append((at_s + draw.lognormvariate(4.5, 0.8), kept))
    tokens = len(blocks) * BLOCK_TOKENS + draw.randint(1, BLOCK_TOKENS - 1)
    return Request(at_s, tokens, draw.randint(1, 800), array("q", blocks))


def working_set_blocks(trace: Trace) -> int:
    """How many different blocks a trace stores."""
    return len({block for request in trace.requests for block in request.blocks})


def infinite_cache_hits(trace: Trace) -> list[int]:
    """By request, the blocks of its prompt that came before, in a row from the start: what no cache can exceed."""
    seen: set[int] = set()
    hits = []
    for request in trace.requests:
        count = 0
        for block in request.blocks[: request.reusable_blocks]:
            if block not in seen:
                break
            count += 1
        hits.append(count)
        seen.update(request.blocks)
    return hits

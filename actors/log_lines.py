"""Structured log lines: one JSON object each, of the logger ``kvfabric.events``, in files of their own.

Every line bears the event, the fabric, the node and the incarnation. No token ids, no salts; what was
promised, allowed and granted stands under names of its own.
"""

from __future__ import annotations

import json
import logging
import re
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from ..fabric.journal import Answered, Entry, Released, Weights
from ..fabric.kinds import Status

logger = logging.getLogger("kvfabric.events")

FILE_BYTES_MAX = 16 << 20
FILES_KEPT = 2
LINES_MAX = 200
"""Lines of one holder at one time; what came beyond is counted in one more."""


def write_to(folder: Path | None, name: str) -> None:
    """Have this process's events written to ``kvfabric-NAME.jsonl`` there, beside Ray's own logs, in bounded files."""
    if folder is None or logger.handlers:
        return
    safe = re.sub(r"[^A-Za-z0-9._-]", "-", name)
    file = RotatingFileHandler(
        folder / f"kvfabric-{safe}.jsonl", maxBytes=FILE_BYTES_MAX, backupCount=FILES_KEPT, encoding="utf-8", delay=True
    )
    file.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(file)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def line(event: str, **fields: Any) -> str:
    """One line. ``ts``: the wall clock, seconds since 1970."""
    return json.dumps({"ts": round(time.time(), 3), "event": event, **fields}, separators=(",", ":"))


def tell(event: str, **fields: Any) -> None:
    """Log one event."""
    if logger.isEnabledFor(logging.INFO):
        logger.info(line(event, **fields))


def acquire_fields(entry: Answered) -> dict[str, Any]:
    """What the line of one acquire says."""
    request, answer = entry.request, entry.answer
    cause = answer.cause
    return {
        "request": request.request,
        "lease": None if answer.grant is None else answer.grant.lease,
        "status": str(answer.status),
        "asked_tokens": request.prompt.n,
        "hash_tokens": answer.hash_tokens,
        "usable_tokens": answer.usable_tokens,
        "granted_tokens": 0 if answer.grant is None else answer.grant.tokens,
        "cause": None
        if cause is None
        else {
            "group": cause.group,
            "kind": str(cause.kind),
            "layer": str(cause.layer),
            "reason": str(cause.reason),
        },
    }


def lines_of(entries: list[Entry], *, whole: bool) -> list[tuple[str, dict[str, Any]]]:
    """The events of some entries; without ``whole``, of acquires only those that fell short."""
    found: list[tuple[str, dict[str, Any]]] = []
    for entry in entries:
        match entry:
            case Answered():
                if whole or entry.answer.status is not Status.FULL_HIT or entry.answer.cause is not None:
                    found.append(("acquire", acquire_fields(entry)))
            case Released() if whole:
                found.append(("release", {"lease": entry.lease, "reused_tokens": entry.reused}))
            case Weights():
                found.append(("weights", {"digest": entry.digest.hex()}))
    return found

"""Spans of OpenTelemetry around acquires, of who asks for them: with ``KVFABRIC_TRACING=1`` and the extra ``tracing``.

A span bears what hashes promised, the rules allowed and the lease covers, and the cause; never tokens or salts.
Without the variable nothing is imported, and an acquire costs one comparison more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ..fabric.kinds import FabricError
from ..fabric.messages import Acquire, Answer

VARIABLE = "KVFABRIC_TRACING"


def tracer() -> Any | None:
    """OpenTelemetry's tracer where tracing is asked for, else None. Raises FabricError where the extra is missing."""
    if os.environ.get(VARIABLE, "0") in {"", "0"}:
        return None
    try:
        from opentelemetry import trace
    except ImportError:
        raise FabricError(f"{VARIABLE}: install the extra: pip install 'kvfabric[tracing]'") from None
    return trace.get_tracer("kvfabric")


def traced(spans: Any | None, message: Acquire, ask: Callable[[], Answer]) -> Answer:
    """The answer, within a span where there is a tracer."""
    if spans is None:
        return ask()
    with spans.start_as_current_span("kvfabric.acquire") as span:
        answer = ask()
        span.set_attributes(attributes_of(message, answer))
        return answer


def attributes_of(message: Acquire, answer: Answer) -> dict[str, str | int | float]:
    """What a span says of an acquire."""
    found: dict[str, str | int | float] = {
        "kvfabric.request": message.request,
        "kvfabric.status": str(answer.status),
        "kvfabric.asked_tokens": message.prompt.n,
        "kvfabric.hash_tokens": answer.hash_tokens,
        "kvfabric.usable_tokens": answer.usable_tokens,
        "kvfabric.granted_tokens": 0 if answer.grant is None else answer.grant.tokens,
        "kvfabric.moved_bytes": sum(moved for _, moved in answer.moved_bytes),
        "kvfabric.sources": len(answer.sources),
    }
    if answer.cause is not None:
        found |= {
            "kvfabric.cause.group": answer.cause.group,
            "kvfabric.cause.kind": str(answer.cause.kind),
            "kvfabric.cause.layer": str(answer.cause.layer),
            "kvfabric.cause.reason": str(answer.cause.reason),
        }
    return found

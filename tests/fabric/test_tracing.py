"""A span of an acquire bears the numbers and the cause; without the variable there is none."""

from __future__ import annotations

import pytest

from kvfabric.actors.tracing import VARIABLE, traced, tracer
from kvfabric.fabric.messages import Acquire
from kvfabric.fabric.model import ModelSpec

from .one_holder import ABI, OneHolder

MODEL = ModelSpec.model_validate(
    {"groups": [{"name": "kv", "kind": "compressed_history", "block_tokens": 16, "block_bytes": 64}]}
)


def test_an_acquire_is_a_span_with_its_numbers_and_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    monkeypatch.delenv(VARIABLE, raising=False)
    assert tracer() is None
    monkeypatch.setenv(VARIABLE, "1")
    assert tracer() is not None
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    one = OneHolder(MODEL)
    one.store(range(70))
    one.core.ctx.draining = True
    message = Acquire("r", one.prompt(one.keys(range(70))), (ABI,), ("n0",), 30.0, None, 0, False)
    answer = one.acquire(range(70))
    assert traced(None, message, lambda: answer) is answer
    assert exporter.get_finished_spans() == ()
    assert traced(provider.get_tracer("t"), message, lambda: answer) is answer
    (span,) = exporter.get_finished_spans()
    assert span.name == "kvfabric.acquire"
    assert span.attributes is not None
    told = {name.removeprefix("kvfabric."): value for name, value in span.attributes.items()}
    assert (told["asked_tokens"], told["hash_tokens"], told["granted_tokens"]) == (70, 64, 0)
    assert (told["cause.group"], told["cause.reason"]) == ("kv", "draining")

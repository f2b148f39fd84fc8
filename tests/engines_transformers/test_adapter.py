"""A worker publishes and resumes through a running fabric; whatever does not fit ends in a recompute that says why."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from transformers import PreTrainedModel

import kvfabric
from kvfabric import Fabric, Reason, Session, Status
from kvfabric.actors.lease import LeaseRefused
from kvfabric.engines.transformers import adapter
from kvfabric.engines.transformers.capture import Objects, capture, write_position
from kvfabric.engines.transformers.errors import GeometryMismatch
from kvfabric.engines.transformers.generate import Generation, generate, same_logits
from kvfabric.engines.transformers.geometry import Geometry, geometry_of
from kvfabric.engines.transformers.restore import copied
from kvfabric.engines.transformers.tiny_models import build, prompt
from kvfabric.engines.transformers.weights import weights_revision
from kvfabric.fabric.tally import AuditOutcome

NAME = "adapter"
POSITION = 70
TOKENS = prompt(3, POSITION + 9)


@dataclass(frozen=True)
class Scene:
    """One model in one fabric, and a run of it that never used a cache."""

    fabric: Fabric
    model: PreTrainedModel
    geometry: Geometry
    run: Generation
    objects: Objects


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    model, _ = build("deepseek_v4")
    geometry = geometry_of(model)
    captured: dict[int, Objects] = {}

    def keep(position: int, cache: Any) -> None:
        captured[position] = capture(cache, geometry, position)

    run = generate(model, TOKENS, cuts=[POSITION], after_chunk=keep)
    slots = dict.fromkeys((group.spec.name for group in geometry.groups), 400)
    spec = {"model": geometry.model_spec(weights=weights_revision(model)).model_dump(), "slots": slots}
    with kvfabric.launch(spec, name=NAME) as fabric:
        yield Scene(fabric, model, geometry, run, captured[POSITION])


@pytest.fixture
def session(scene: Scene) -> Iterator[Session]:
    with adapter.connect(scene.model, scene.geometry, NAME) as session:
        yield session


def leases_of(scene: Scene) -> int:
    return sum(holder["leases"] for holder in scene.fabric.status()["holders"])


def reused_tokens_of(scene: Scene) -> int:
    """What readers said they really used."""
    return sum(holder["counters"].get("reused_hit_tokens_total", 0) for holder in scene.fabric.status()["holders"])


def test_what_a_worker_publishes_another_prompt_resumes_bit_for_bit(scene: Scene, session: Session) -> None:
    def publish(position: int, cache: Any) -> None:
        if position == POSITION:
            stored = adapter.publish(session, scene.model, scene.geometry, cache, TOKENS, position, salt="bits")
            assert stored.ok

    generate(scene.model, TOKENS, cuts=[POSITION], decode_tokens=1, after_chunk=publish)
    before = reused_tokens_of(scene)
    resumed = adapter.resume(session, scene.model, scene.geometry, TOKENS, salt="bits")
    assert (resumed.tokens, resumed.refused, resumed.answer.status) == (POSITION, None, Status.FULL_HIT)
    again = generate(scene.model, TOKENS, cache=resumed.cache, start=resumed.tokens)
    assert same_logits(again.logits, scene.run.logits_from(POSITION))
    assert (leases_of(scene), reused_tokens_of(scene)) == (0, before + POSITION)


def test_where_nothing_is_stored_the_answer_is_a_recompute(scene: Scene, session: Session) -> None:
    resumed = adapter.resume(session, scene.model, scene.geometry, TOKENS, salt="nobody")
    assert (resumed.cache, resumed.tokens, resumed.refused) == (None, 0, None)
    assert resumed.answer.status is Status.MISS
    again = generate(scene.model, TOKENS, cuts=[POSITION], cache=resumed.cache, start=resumed.tokens)
    assert same_logits(again.logits, scene.run.logits)


def test_a_session_that_says_another_layout_publishes_nothing_and_reuses_nothing(scene: Scene) -> None:
    """The fabric grants what its session says it reads; the adapter knows what the model reads."""
    with kvfabric.connect(NAME, weights_revision=weights_revision(scene.model)) as plain:
        with pytest.raises(GeometryMismatch, match="another passport"):
            adapter.publish(plain, scene.model, scene.geometry, scene.run.cache, TOKENS, POSITION)
        assert plain.publish(TOKENS[:POSITION], scene.objects, salt="plain").ok
        resumed = adapter.resume(plain, scene.model, scene.geometry, TOKENS, salt="plain")
        assert (resumed.answer.status, resumed.answer.tokens) == (Status.FULL_HIT, POSITION)
        assert (resumed.cache, resumed.tokens, resumed.refused) == (None, 0, Reason.ABI_MISMATCH)
        assert "another passport" in resumed.detail
    assert leases_of(scene) == 0


def test_a_lease_whose_snapshot_is_of_another_position_is_not_used(scene: Scene, session: Session) -> None:
    (tail,) = scene.objects["csa_tail"].values()
    wrong = tail.copy()
    write_position(wrong, POSITION - 1)
    broken = {**scene.objects, "csa_tail": {POSITION - 1: wrong}}
    assert session.publish(TOKENS[:POSITION], broken, salt="position").ok
    before = reused_tokens_of(scene)
    resumed = adapter.resume(session, scene.model, scene.geometry, TOKENS, salt="position")
    assert (resumed.answer.status, resumed.answer.tokens) == (Status.FULL_HIT, POSITION)
    assert (resumed.cache, resumed.tokens, resumed.refused) == (None, 0, Reason.ABI_MISMATCH)
    assert "the snapshot is of position 69, not 70" in resumed.detail
    assert (leases_of(scene), reused_tokens_of(scene)) == (0, before)


def test_weights_that_change_while_bytes_are_copied_make_the_copy_useless(
    scene: Scene, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert session.publish(TOKENS[:POSITION], scene.objects, salt="weights").ok

    def copied_meanwhile(*arguments: Any, **options: Any) -> Any:
        state = copied(*arguments, **options)
        scene.fabric.update_weights("newer")
        until_retired(session)
        return state

    monkeypatch.setattr(adapter, "copied", copied_meanwhile)
    try:
        resumed = adapter.resume(session, scene.model, scene.geometry, TOKENS, salt="weights")
        assert (resumed.answer.status, resumed.answer.tokens) == (Status.FULL_HIT, POSITION)
        assert (resumed.cache, resumed.tokens, resumed.refused) == (None, 0, Reason.WEIGHTS_MISMATCH)
        assert str(LeaseRefused(Reason.WEIGHTS_MISMATCH)) == resumed.detail
        again = generate(scene.model, TOKENS[:POSITION], decode_tokens=1)
        stored = adapter.publish(session, scene.model, scene.geometry, again.cache, TOKENS, POSITION, salt="late")
        assert stored.refused is Reason.WEIGHTS_MISMATCH
    finally:
        scene.fabric.update_weights(weights_revision(scene.model))


def until_retired(session: Session) -> None:
    """Wait until the holder on this node refuses the session's weights."""
    deadline = time.monotonic() + 10.0
    while session.publish([0], {}, salt="poll").refused is not Reason.WEIGHTS_MISMATCH:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_geometry_of_another_model_is_misuse(scene: Scene, session: Session) -> None:
    other, _ = build("gemma3")
    with pytest.raises(GeometryMismatch, match="the geometry is of deepseek_v4"):
        adapter.resume(session, other, scene.geometry, TOKENS)
    with pytest.raises(GeometryMismatch, match="model: the fabric 'adapter' serves deepseek_v4"):
        adapter.connect(other, geometry_of(other), NAME)
    with pytest.raises(GeometryMismatch, match="model: the fabric 'adapter' serves deepseek_v4"):
        adapter.publish(session, other, geometry_of(other), scene.run.cache, TOKENS, POSITION)


@pytest.fixture(scope="module")
def audited(scene: Scene) -> Iterator[Fabric]:
    """A fabric that has every lease audited."""
    slots = dict.fromkeys((group.spec.name for group in scene.geometry.groups), 100)
    spec = {"model": scene.geometry.model_spec(weights=weights_revision(scene.model)).model_dump(), "slots": slots}
    with kvfabric.launch({**spec, "audit_fraction": 1.0, "metrics_every_s": 0}, name="audited") as fabric:
        yield fabric


def audits_of(fabric: Fabric) -> dict[str, float]:
    counted = fabric.health()
    return {word: sum(facts["audits"].get(word, 0) for facts in counted.values()) for word in AuditOutcome}


@pytest.mark.parametrize(
    ("cuts", "planted", "outcome"),
    [((), None, "equal"), (None, None, "equal"), ((33,), None, "mismatch"), (None, 1, "mismatch"), ((), 1, "mismatch")],
    ids=str,
)
def test_what_an_audit_finds_is_counted_and_a_mismatch_is_neither_used_nor_served_again(
    scene: Scene, audited: Fabric, cuts: tuple[int, ...] | None, planted: int | None, outcome: str
) -> None:
    """Of state that was computed in one chunk; planted: one element of a window's rows with another sign."""
    salt = f"{cuts}-{planted}"
    objects = {name: {i: block.copy() for i, block in some.items()} for name, some in scene.objects.items()}
    if planted is not None:
        window = next(group for group in scene.geometry.groups if group.spec.name == "window")
        block = next(iter(objects[window.spec.name].values()))
        block[window.fields[0].offset_bytes + 3] ^= 0x80
    with adapter.connect(scene.model, scene.geometry, audited.name) as session:
        assert session.publish(TOKENS[:POSITION], objects, salt=salt).ok
        before = audits_of(audited)
        resumed = adapter.resume(session, scene.model, scene.geometry, TOKENS, salt=salt, audit_cuts=cuts)
        after = audits_of(audited)
        assert {word: after[word] - before[word] for word in after if after[word] != before[word]} == {outcome: 1}
        if outcome == "mismatch":
            assert (resumed.cache, resumed.tokens, resumed.refused) == (None, 0, Reason.QUARANTINED)
            again = adapter.resume(session, scene.model, scene.geometry, TOKENS, salt=salt, audit_cuts=cuts)
            assert (again.cache, again.answer.tokens, again.answer.hash_tokens) == (None, 0, POSITION)
        else:
            assert (resumed.tokens, resumed.refused) == (POSITION, None)

"""A lease that leaves windows to be computed again resumes exactly, where the model can replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from transformers import PreTrainedModel, StaticCache

import kvfabric
from kvfabric import Fabric, Reason, Session, Status
from kvfabric.engines.transformers import adapter
from kvfabric.engines.transformers.capture import Objects, capture
from kvfabric.engines.transformers.errors import UnsupportedCache
from kvfabric.engines.transformers.generate import Generation, generate, same_logits
from kvfabric.engines.transformers.geometry import Geometry, LayoutOptions, geometry_of, replayable_groups
from kvfabric.engines.transformers.replay import replay
from kvfabric.engines.transformers.restore import copied
from kvfabric.engines.transformers.tiny_models import build, prompt
from kvfabric.engines.transformers.weights import weights_revision
from kvfabric.fabric.kinds import Form
from kvfabric.fabric.replay import exact_replay_tokens

POSITION = 100  # far enough behind what either model replays: 32 tokens, or 80
TOKENS = prompt(3, POSITION + 9)


@dataclass(frozen=True)
class Scene:
    """A model whose fabric may replay, a run of it that never used a cache, and what that had at POSITION."""

    fabric: Fabric
    model: PreTrainedModel
    geometry: Geometry
    start: int
    run: Generation
    objects: Objects

    def without_windows(self) -> Objects:
        kept = {group.spec.name for group in self.geometry.groups if group.spec.window_tokens is None}
        kept -= {group.spec.name for group in self.geometry.groups if group.is_snapshot}
        return {name: held if name in kept else {} for name, held in self.objects.items()}

    def connected(self) -> Session:
        return adapter.connect(self.model, self.geometry, self.fabric.name)


def staged(family: str, name: str) -> Iterator[Scene]:
    model, _ = build(family)
    geometry = geometry_of(model)
    spec = geometry.model_spec(weights=weights_revision(model)).model_copy(update={"replay": True})
    replayed = exact_replay_tokens(spec)
    assert replayed is not None
    start = max(0, POSITION - replayed)
    captured: dict[int, Objects] = {}

    def keep(position: int, cache: Any) -> None:
        captured[position] = capture(cache, geometry, position)

    run = generate(model, TOKENS, cuts=[cut for cut in (start, POSITION) if cut], after_chunk=keep)
    slots = dict.fromkeys((group.spec.name for group in geometry.groups), 400)
    with kvfabric.launch({"model": spec.model_dump(), "slots": slots}, name=name) as fabric:
        yield Scene(fabric, model, geometry, start, run, captured[POSITION])


@pytest.fixture(scope="module")
def windowed() -> Iterator[Scene]:
    yield from staged("gemma3", "replay-gemma3")


def test_windows_that_were_not_kept_are_replayed_and_the_run_goes_on_bit_for_bit(windowed: Scene) -> None:
    assert windowed.start == POSITION - 2 * 16  # two layers, a window of 16
    with windowed.connected() as session:
        assert session.publish(TOKENS[:POSITION], windowed.without_windows(), salt="replay").ok
        resumed = adapter.resume(session, windowed.model, windowed.geometry, TOKENS, salt="replay")
        assert (resumed.answer.status, resumed.answer.replay_from) == (Status.FULL_HIT, windowed.start)
        assert (resumed.tokens, resumed.refused) == (POSITION, None)
        again = generate(windowed.model, TOKENS, cache=resumed.cache, start=resumed.tokens)
        assert same_logits(again.logits, windowed.run.logits_from(POSITION))
        assert again.tokens == windowed.run.tokens
        # the control: with the windows there, the same prompt needs no replay
        assert session.publish(TOKENS[:POSITION], windowed.objects, salt="kept").ok
        kept = adapter.resume(session, windowed.model, windowed.geometry, TOKENS, salt="kept")
        assert (kept.tokens, kept.answer.replay_from) == (POSITION, None)


def test_a_replayed_state_fills_a_static_cache_too(windowed: Scene) -> None:
    make = partial(StaticCache, config=windowed.model.config, max_cache_len=160)
    with windowed.connected() as session:
        assert session.publish(TOKENS[:POSITION], windowed.without_windows(), salt="static").ok
        resumed = adapter.resume(session, windowed.model, windowed.geometry, TOKENS, salt="static", new_cache=make)
        assert (resumed.tokens, type(resumed.cache)) == (POSITION, StaticCache)
        again = generate(windowed.model, TOKENS, cache=resumed.cache, start=resumed.tokens)
        assert again.tokens == windowed.run.tokens


@pytest.mark.parametrize("short", [0, 17])
def test_only_a_replay_that_begins_far_enough_before_is_exact(windowed: Scene, short: int) -> None:
    state = copied(windowed.model, windowed.geometry, POSITION, windowed.without_windows(), without=["window"])
    replayed = replay(windowed.model, windowed.geometry, TOKENS[:POSITION], windowed.start + short, state)
    right = copied(windowed.model, windowed.geometry, POSITION, windowed.objects)
    equal = [bool((replayed[layer][name] == right[layer][name]).all()) for layer in right for name in right[layer]]
    assert all(equal) == (short == 0)


@pytest.fixture(scope="module")
def compressed() -> Iterator[Scene]:
    yield from staged("deepseek_v4", "replay-deepseek")


def test_a_replay_that_this_adapter_cannot_do_is_a_recompute_that_says_so(compressed: Scene) -> None:
    with compressed.connected() as session:
        assert session.publish(TOKENS[:POSITION], compressed.without_windows(), salt="replay").ok
        resumed = adapter.resume(session, compressed.model, compressed.geometry, TOKENS, salt="replay")
        assert (resumed.answer.status, resumed.answer.replay_from) == (Status.FULL_HIT, compressed.start)
        assert (resumed.cache, resumed.tokens, resumed.refused) == (None, 0, Reason.WINDOW_INCOMPLETE)
        assert f"windows from {compressed.start} on are to be computed again: csa: this adapter" in resumed.detail
        # the control: nothing to replay, and the same prompt is resumed
        assert session.publish(TOKENS[:POSITION], compressed.objects, salt="kept").ok
        kept = adapter.resume(session, compressed.model, compressed.geometry, TOKENS, salt="kept")
        assert (kept.tokens, kept.refused) == (POSITION, None)
    assert sum(holder["leases"] for holder in compressed.fabric.status()["holders"]) == 0


def test_which_groups_replay_rebuilds() -> None:
    model, _ = build("gpt_oss")
    assert replayable_groups(geometry_of(model)) == {"window"}
    with pytest.raises(UnsupportedCache, match="window: this adapter replays blocks of windows"):
        replayable_groups(geometry_of(model, LayoutOptions(window_form=Form.STATE)))
    recurrent, _ = build("qwen3_next")
    with pytest.raises(UnsupportedCache, match="recurrent: this adapter"):
        replayable_groups(geometry_of(recurrent))

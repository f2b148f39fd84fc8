"""A cache restored from captured bytes continues exactly as the one they were taken from."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvfabric.engines.transformers.capture import Objects, capture
from kvfabric.engines.transformers.errors import GeometryMismatch, UnsupportedCache
from kvfabric.engines.transformers.generate import generate, same_logits, tokens_wrong
from kvfabric.engines.transformers.geometry import Geometry, LayoutOptions, geometry_of
from kvfabric.engines.transformers.library import feed
from kvfabric.engines.transformers.restore import restore
from kvfabric.engines.transformers.tiny_models import build, prompt
from kvfabric.fabric.kinds import Form

from .conftest import POSITIONS, Story, converted, tell


def resumed(story: Story, position: int, objects: Any, geometry: Geometry | None = None) -> bool:
    """Whether a resume from those objects gives bit for bit what the run without reuse gave."""
    cache = restore(story.model, geometry or story.geometry, position, objects)
    run = generate(story.model, story.tokens, cuts=POSITIONS, cache=cache, start=position)
    return same_logits(run.logits, story.run.logits_from(position)) and run.tokens == story.run.tokens


def through_the_wire(objects: Objects) -> Any:
    """As a lease gives them: other memory, read-only."""
    return {name: {i: np.frombuffer(o.tobytes(), np.uint8) for i, o in held.items()} for name, held in objects.items()}


@pytest.mark.parametrize("position", POSITIONS)
def test_a_restored_cache_continues_bit_for_bit(story: Story, position: int) -> None:
    objects = through_the_wire(story.captured[position])
    assert not any(view.flags.writeable for held in objects.values() for view in held.values())
    assert resumed(story, position, objects)


@pytest.mark.parametrize("position", [1, 17, 64, 70])
def test_what_a_restored_cache_holds_is_what_was_captured(story: Story, position: int) -> None:
    cache = restore(story.model, story.geometry, position, story.captured[position])
    assert_same_objects(capture(cache, story.geometry, position), story.captured[position])


def assert_same_objects(one: Objects, other: Objects) -> None:
    assert {name: list(held) for name, held in one.items()} == {name: list(held) for name, held in other.items()}
    for name, held in one.items():
        for index, array in held.items():
            assert np.array_equal(array, other[name][index]), (name, index)


def test_captured_objects_outlive_the_steps_that_follow(story: Story) -> None:
    run = generate(story.model, story.tokens[:70], cuts=POSITIONS, decode_tokens=1)
    held = capture(run.cache, story.geometry, 70)
    before = copy.deepcopy(held)
    generate(story.model, story.tokens, cache=run.cache, start=70, decode_tokens=8)
    assert_same_objects(held, before)
    assert_same_objects(held, story.captured[70])
    with pytest.raises(UnsupportedCache, match="position 70 implies"):
        capture(run.cache, story.geometry, 70)


def test_two_resumes_from_one_set_do_not_touch_each_other(story: Story) -> None:
    objects = through_the_wire(story.captured[70])
    first = restore(story.model, story.geometry, 70, objects)
    generate(story.model, prompt(9, 100), cache=first, start=70, decode_tokens=4)
    assert resumed(story, 70, objects)


@pytest.mark.parametrize(("begin", "end"), [(64, 70), (17, 35), (68, 87), (15, 16), (70, 70)])
def test_an_extension_adds_only_what_ends_behind_it_and_completes_the_set(story: Story, begin: int, end: int) -> None:
    run = generate(story.model, story.tokens[:end], cuts=POSITIONS, decode_tokens=1)
    added = capture(run.cache, story.geometry, end, from_token=begin)
    for group in story.geometry.groups:
        unit = group.spec.unit_tokens
        assert all(begin < (index + 1) * unit <= end or group.is_snapshot for index in added[group.spec.name])
    joined = {name: {**story.captured[begin][name], **held} for name, held in added.items()}
    for name, indices in story.geometry.required(end).items():
        assert set(indices) <= set(joined[name])
    assert resumed(story, end, joined)


def test_history_of_one_prompt_serves_a_longer_one_that_shares_the_prefix(story: Story) -> None:
    longer = [*story.tokens[:70], *prompt(5, 40)]
    cuts = [position for position in POSITIONS if position <= 70]
    alone = generate(story.model, longer, cuts=cuts)
    reused = generate(story.model, longer, cache=restore(story.model, story.geometry, 70, story.captured[70]), start=70)
    assert same_logits(reused.logits, alone.logits_from(70))
    assert tokens_wrong(alone.tokens, reused.tokens) == 0
    assert tokens_wrong(story.run.tokens, reused.tokens) > 0


WIDER = {
    "deepseek_v4": (LayoutOptions(history_entries=2, window_block_tokens=5, grid_tokens=5), 160, 160),
    "gemma3": (LayoutOptions(block_tokens=5, window_block_tokens=3), 15, 75),
    "gpt_oss": (LayoutOptions(block_tokens=4, window_form=Form.STATE, grid_tokens=2), 4, 68),
    "deepseek_v3_2": (LayoutOptions(block_tokens=8), 8, 64),
    "qwen3_next": (LayoutOptions(block_tokens=4, grid_tokens=6), 12, 84),
}


def test_wider_blocks_serve_the_positions_of_their_grid(story: Story) -> None:
    options, grid, position = WIDER[story.family]
    geometry = geometry_of(story.model, options)
    assert geometry.grid_tokens == grid
    tokens = prompt(3, position + 30)
    alone = generate(story.model, tokens, cuts=[33, position])
    held = generate(story.model, tokens[:position], cuts=[33], decode_tokens=1).cache
    objects = capture(held, geometry, position)
    assert sum(map(len, objects.values())) < sum(map(len, capture(held, story.geometry, position).values()))
    cache = restore(story.model, geometry, position, objects)
    assert same_logits(generate(story.model, tokens, cache=cache, start=position).logits, alone.logits_from(position))
    with pytest.raises(GeometryMismatch, match=f"positive multiple of {grid}"):
        capture(held, geometry, position + 1)
    with pytest.raises(GeometryMismatch, match=f"positive multiple of {grid}"):
        restore(story.model, geometry, position - 1, objects)


def test_a_window_can_be_a_snapshot(stories: dict[str, Story]) -> None:
    story = tell(stories, "deepseek_v4")
    geometry = geometry_of(story.model, LayoutOptions(window_form=Form.STATE))
    run = generate(story.model, story.tokens[:70], cuts=POSITIONS, decode_tokens=1)
    objects = capture(run.cache, geometry, 70)
    assert list(objects["window"]) == [69]
    assert resumed(story, 70, objects, geometry)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_floats_pass_unconverted(story: Story, dtype: torch.dtype) -> None:
    model = converted(story.model, dtype)
    geometry = geometry_of(model)
    assert {field.dtype for group in geometry.groups for field in group.fields} & {str(dtype).removeprefix("torch.")}
    tokens = story.tokens[:80]
    alone = generate(model, tokens, cuts=[70], decode_tokens=4)
    held = generate(model, tokens[:70], decode_tokens=1).cache
    cache = restore(model, geometry, 70, capture(held, geometry, 70))
    assert same_logits(generate(model, tokens, cache=cache, start=70, decode_tokens=4).logits, alone.logits_from(70))


# Refusals. The positive control of each is test_a_restored_cache_continues_bit_for_bit.


def test_a_set_that_lacks_any_needed_object_is_refused(story: Story) -> None:
    exact = story.captured[70]
    for name, indices in story.geometry.required(70).items():
        for index in indices:
            lacking = {**exact, name: {i: view for i, view in exact[name].items() if i != index}}
            with pytest.raises(GeometryMismatch, match=f"{name}: object {index} .* absent"):
                restore(story.model, story.geometry, 70, lacking)


def test_objects_that_the_position_does_not_need_are_ignored(story: Story) -> None:
    more = {name: {**held, 10_000: next(iter(held.values()))} for name, held in story.captured[70].items()}
    assert resumed(story, 70, more)


def test_an_object_of_another_length_is_refused(story: Story) -> None:
    for name, indices in story.geometry.required(70).items():
        view = story.captured[70][name][indices[-1]]
        wrong: Any
        for wrong in (view[:-1], np.append(view, np.uint8(0)), view.reshape(1, -1), view.astype(np.int16)):
            group = {**story.captured[70][name], indices[-1]: wrong}
            with pytest.raises(GeometryMismatch, match=f"{name}: object {indices[-1]}"):
                restore(story.model, story.geometry, 70, {**story.captured[70], name: group})


def test_a_snapshot_of_another_position_is_refused_under_any_key(story: Story) -> None:
    snapshots = [group.spec.name for group in story.geometry.groups if group.is_snapshot]
    if story.family in {"deepseek_v4", "qwen3_next"}:
        assert snapshots
    for name in snapshots:
        moved = {**story.captured[70], name: {69: story.captured[68][name][67]}}
        with pytest.raises(GeometryMismatch, match=f"{name}: the snapshot is of position 68, not 70"):
            restore(story.model, story.geometry, 70, moved)


def test_an_unknown_group_is_refused(story: Story) -> None:
    with pytest.raises(GeometryMismatch, match="'other' is not one of this model's cache"):
        restore(story.model, story.geometry, 70, {**story.captured[70], "other": {}})


def test_another_model_s_geometry_is_refused(stories: dict[str, Story]) -> None:
    gemma, gpt = tell(stories, "gemma3"), tell(stories, "gpt_oss")
    assert [g.spec.block_bytes for g in gemma.geometry.groups] == [g.spec.block_bytes for g in gpt.geometry.groups]
    with pytest.raises(GeometryMismatch, match=r"the geometry is of gemma3_text-.*, this model is gpt_oss-"):
        restore(gpt.model, gemma.geometry, 70, gemma.captured[70])


@pytest.mark.parametrize("position", [0, -1])
def test_there_is_nothing_to_capture_before_the_first_token(story: Story, position: int) -> None:
    with pytest.raises(GeometryMismatch, match="positive multiple"):
        capture(DynamicCache(config=story.model.config), story.geometry, position)


def test_an_extension_cannot_begin_behind_its_end(story: Story) -> None:
    with pytest.raises(GeometryMismatch, match="from_token 71"):
        capture(story.run.cache, story.geometry, 70, from_token=71)


# A cache that does not stand where it is said to.


def cache_at(story: Story, position: int) -> Any:
    return restore(story.model, story.geometry, position, story.captured[position])


def test_a_cache_at_another_position_is_refused(story: Story) -> None:
    for other in (68, 71):
        with pytest.raises((UnsupportedCache, GeometryMismatch), match=f"position {other} implies"):
            capture(cache_at(story, 70), story.geometry, other)


def test_an_empty_cache_is_refused(story: Story) -> None:
    with pytest.raises(UnsupportedCache, match="position 70 implies"):
        capture(DynamicCache(config=story.model.config), story.geometry, 70)


def test_a_scalar_that_the_position_does_not_imply_is_refused(stories: dict[str, Story]) -> None:
    for family, layer, spoil, name in (
        ("deepseek_v4", 1, lambda held: held.entry_count.update(indexer=16), "entry_count.indexer is 16"),
        ("deepseek_v4", 0, lambda held: setattr(held, "cumulative_length", 69), "cumulative_length is 69"),
        ("gpt_oss", 0, lambda held: setattr(held, "cumulative_length", 71), "cumulative_length is 71"),
        ("qwen3_next", 0, lambda held: held.has_previous_state.update({0: False}), "has_previous_state.0 is False"),
        (
            "deepseek_v3_2",
            2,
            lambda held: setattr(held, "indexer_position_ids", torch.zeros(1)),
            "indexer_position_ids",
        ),
    ):
        story = tell(stories, family)
        cache = cache_at(story, 70)
        spoil(cache.layers[layer])
        with pytest.raises(UnsupportedCache, match=f"cache layer {layer}: {name}"):
            capture(cache, story.geometry, 70)


def test_a_tensor_that_the_position_does_not_imply_is_refused(stories: dict[str, Story]) -> None:
    story = tell(stories, "deepseek_v4")
    for part in ("buffer_kv", "overlap_gate", "compressed_kv"):
        cache = cache_at(story, 70)
        held = getattr(cache.layers[1], part)
        held["indexer"] = held["indexer"][:, :-1]
        with pytest.raises(UnsupportedCache, match=f"cache layer 1: {part}.indexer has shape"):
            capture(cache, story.geometry, 70)
        held["indexer"] = None
        with pytest.raises(UnsupportedCache, match=f"cache layer 1: {part}.indexer is empty"):
            capture(cache, story.geometry, 70)
    cache = cache_at(story, 70)
    cache.layers[0].values = cache.layers[0].values + 1
    with pytest.raises(UnsupportedCache, match="keys and values differ"):
        capture(cache, story.geometry, 70)


def test_a_cache_with_more_than_the_window_is_refused(stories: dict[str, Story]) -> None:
    story = tell(stories, "gemma3")
    cache = DynamicCache(config=story.model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        feed(story.model, cache, torch.tensor([story.tokens[:70]]))
    with pytest.raises(UnsupportedCache, match=r"cache layer 0: keys has shape \[1, 2, 70, 16\], position 70 implies"):
        capture(cache, story.geometry, 70)


def test_a_cache_of_other_layers_is_refused(stories: dict[str, Story]) -> None:
    story, other = tell(stories, "gemma3"), tell(stories, "qwen3_next")
    with pytest.raises(
        GeometryMismatch, match=r"cache layer 0 is a .*LinearAttentionLayer, this geometry has a .*SlidingWindow"
    ):
        capture(other.run.cache, story.geometry, 70)
    cache = cache_at(story, 70)
    cache.layers.append(cache.layers[0])
    with pytest.raises(GeometryMismatch, match="the cache has 5 layers, this geometry 4"):
        capture(cache, story.geometry, 70)


def test_a_run_that_cannot_be_compared_or_continued_is_refused(stories: dict[str, Story]) -> None:
    story = tell(stories, "gemma3")
    with pytest.raises(ValueError, match="no chunk begins there"):
        story.run.logits_from(69)
    with pytest.raises(ValueError, match="at least one of the 70 tokens"):
        generate(story.model, story.tokens[:70], cache=cache_at(story, 70), start=70)
    with pytest.raises(ValueError, match="a cache that holds the tokens before it"):
        generate(story.model, story.tokens, start=70)


def test_cuts_after_the_position_decide_how_logits_round(stories: dict[str, Story]) -> None:
    """Why runs are compared under equal cuts: the exact restore is equal to the uncut run only nearly."""
    story = tell(stories, "qwen3_next")
    whole = generate(story.model, story.tokens, decode_tokens=1).logits[0][-1]
    cut = story.run.logits[len(POSITIONS)][-1]
    assert torch.allclose(whole, cut, atol=1e-3)
    assert not torch.equal(whole, cut)


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match="'gpt_2' is not one of deepseek_v4, gemma3"):
        build("gpt_2")

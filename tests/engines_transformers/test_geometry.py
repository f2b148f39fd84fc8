"""The cache groups read off a model are the kinds it has, and the layout is told apart by its digest."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    Fp8QuantizedLayer,
)

from kvfabric.engines.transformers.capture import capture
from kvfabric.engines.transformers.errors import GeometryMismatch, UnsupportedCache
from kvfabric.engines.transformers.geometry import LayoutOptions, geometry_from_cache, geometry_of, model_identity
from kvfabric.engines.transformers.layer_classes import adapter_of
from kvfabric.engines.transformers.library import cache_keyword, feed
from kvfabric.engines.transformers.passport import check_written, passports
from kvfabric.engines.transformers.rotary import rotations
from kvfabric.engines.transformers.tensors import in_host_memory
from kvfabric.engines.transformers.tiny_models import build
from kvfabric.fabric.kinds import Form, ObjectKind, SpecError

from .conftest import Story, converted, tell

HISTORY, TAIL = ObjectKind.COMPRESSED_HISTORY, ObjectKind.UNCOMPRESSED_TAIL
WINDOW, INDEXER = ObjectKind.SLIDING_WINDOW, ObjectKind.INDEXER
FLOAT = 4

# (kind, form, tokens an object, ratio, of, overlap, window, layers, bytes)
GROUPS: dict[str, dict[str, tuple[object, ...]]] = {
    "deepseek_v4": {
        "csa": (HISTORY, Form.BLOCKS, 4, 4, None, 0, None, (1, 3), 2 * 16 * FLOAT),
        "csa_index": (INDEXER, Form.BLOCKS, 4, 1, "csa", 0, None, (1, 3), 2 * 16 * FLOAT),
        # A position, then a layer: 3 rows of kv and gate, both series; 4 rows of kv and gate, one series.
        "csa_tail": (TAIL, Form.STATE, 1, 1, "csa", 4, None, (1, 3), 8 + 2 * (2 * 3 * 32 + 2 * 4 * 16) * FLOAT),
        "csa_index_tail": (
            TAIL,
            Form.STATE,
            1,
            1,
            "csa_index",
            4,
            None,
            (1, 3),
            8 + 2 * (2 * 3 * 32 + 2 * 4 * 16) * FLOAT,
        ),
        "hca": (HISTORY, Form.BLOCKS, 16, 16, None, 0, None, (2, 4), 2 * 16 * FLOAT),
        "hca_tail": (TAIL, Form.STATE, 1, 1, "hca", 0, None, (2, 4), 8 + 2 * (2 * 15 * 16) * FLOAT),
        "window": (WINDOW, Form.BLOCKS, 1, 1, None, 0, 16, (0, 1, 2, 3, 4), 5 * 16 * FLOAT),
    },
    "gemma3": {
        "kv": (HISTORY, Form.BLOCKS, 1, 1, None, 0, None, (1, 3), 2 * 2 * 2 * 16 * FLOAT),
        "window": (WINDOW, Form.BLOCKS, 1, 1, None, 0, 16, (0, 2), 2 * 2 * 2 * 16 * FLOAT),
    },
    "gpt_oss": {
        "kv": (HISTORY, Form.BLOCKS, 1, 1, None, 0, None, (1, 3), 2 * 2 * 2 * 16 * FLOAT),
        "window": (WINDOW, Form.BLOCKS, 1, 1, None, 0, 16, (0, 2), 2 * 2 * 2 * 16 * FLOAT),
    },
    "deepseek_v3_2": {
        "kv": (HISTORY, Form.BLOCKS, 1, 1, None, 0, None, (0, 1, 2, 3), 4 * (16 + 8) * FLOAT),
        "index": (INDEXER, Form.BLOCKS, 1, 1, "kv", 0, None, (0, 1, 2, 3), 4 * 16 * FLOAT),
    },
    "qwen3_next": {
        "kv": (HISTORY, Form.BLOCKS, 1, 1, None, 0, None, (1, 3), 2 * 2 * 2 * 16 * FLOAT),
        # A position, then a layer: convolution 64 channels by 4, recurrent 4 heads of 8 by 8.
        "recurrent": (HISTORY, Form.STATE, 1, 1, None, 0, None, (0, 2), 8 + 2 * (64 * 4 + 4 * 8 * 8) * FLOAT),
    },
}


def test_the_groups_are_the_kinds_the_model_has(story: Story) -> None:
    told = {
        group.spec.name: (
            group.spec.kind,
            group.spec.form,
            group.spec.unit_tokens,
            group.spec.ratio,
            group.spec.of,
            group.spec.overlap_tokens,
            group.spec.window_tokens,
            group.spec.layers,
            group.spec.block_bytes,
        )
        for group in story.geometry.groups
    }
    assert told == GROUPS[story.family]
    assert story.geometry.model_spec(weights="w").grid_tokens == 1


def test_fields_fill_an_object_without_gap_or_overlap(story: Story) -> None:
    for group in story.geometry.groups:
        end = 8 if group.is_snapshot else 0
        for field in group.fields:
            assert field.offset_bytes == end, (group.spec.name, field)
            end += field.nbytes
        assert end == group.spec.block_bytes


def test_equal_models_have_equal_layouts_and_passports(story: Story) -> None:
    twin, config = build(story.family, seed=1)
    geometry = geometry_of(twin)
    assert geometry == story.geometry
    assert geometry.layout_digest == story.geometry.layout_digest
    assert passports(config, geometry) == passports(story.model.config, story.geometry)


def test_another_cut_or_dtype_is_another_layout_under_the_same_model(story: Story) -> None:
    coarse = geometry_of(story.model, LayoutOptions(block_tokens=2, history_entries=2, window_block_tokens=3))
    narrow = geometry_of(converted(story.model, torch.bfloat16))
    digests = {story.geometry.layout_digest, coarse.layout_digest, narrow.layout_digest}
    assert len(digests) == 3
    assert {story.geometry.model, coarse.model, narrow.model} == {story.geometry.model}
    own = passports(story.model.config, story.geometry)
    check_written(own, {name: passport.abi() for name, passport in own.items()})
    for other in (coarse, narrow):
        written = {name: passport.abi() for name, passport in passports(story.model.config, other).items()}
        with pytest.raises(GeometryMismatch, match="written under another passport"):
            check_written(own, written)


def test_a_passport_of_a_group_the_model_lacks_is_refused(stories: dict[str, Story]) -> None:
    gemma, deepseek = tell(stories, "gemma3"), tell(stories, "deepseek_v3_2")
    written = {n: p.abi() for n, p in passports(deepseek.model.config, deepseek.geometry).items()}
    own = passports(gemma.model.config, gemma.geometry)
    with pytest.raises(GeometryMismatch, match="'index' is not one of this model's cache"):
        check_written(own, {"index": written["index"]})


def test_models_of_equal_shapes_with_another_rotary_base_are_told_apart(story: Story) -> None:
    config = copy.deepcopy(story.model.config)
    nested = [value for value in config.rope_parameters.values() if isinstance(value, dict)]
    for parameters in nested or [config.rope_parameters]:
        parameters["rope_theta"] = 123_456.0
    assert model_identity(config) != model_identity(story.model.config)
    mine, theirs = (passports(c, story.geometry) for c in (story.model.config, config))
    changed = {name for name in mine if mine[name].layout_fingerprint() != theirs[name].layout_fingerprint()}
    rotated = {
        group.spec.name
        for group in story.geometry.groups
        if any(field.name in rotations(config) for field in group.fields)
    }
    assert changed == rotated
    assert rotated


def test_where_a_model_came_from_does_not_name_it(story: Story) -> None:
    config = copy.deepcopy(story.model.config)
    config.name_or_path, config.transformers_version, config.use_cache = "elsewhere", "5.99", False
    assert model_identity(config) == model_identity(story.model.config)


def test_the_rotation_table_is_what_the_model_computes(story: Story) -> None:
    """A key's rotated channels depend on its position, the others do not: found by shifting positions."""
    seen = {name: _moved_channels(story, name) for name in rotations(story.model.config)}
    for name, rotation in rotations(story.model.config).items():
        assert seen[name] == set(range(rotation.start, rotation.stop)), name


def _moved_channels(story: Story, name: str) -> set[int]:
    """Channels of the first layer's tensor of that name that differ for equal tokens at other positions."""
    held = []
    for first in (0, 16):
        cache = DynamicCache(config=story.model.config)
        ids, positions = torch.tensor([story.tokens[:17]]), torch.arange(first, first + 17)[None]
        arguments: dict[str, Any] = {cache_keyword(story.model): cache, "use_cache": True}
        with torch.no_grad():
            story.model(input_ids=ids, position_ids=positions, **arguments)
        layer, field = next((f.layer, f) for g in story.geometry.groups for f in g.fields if f.name == name)
        attribute, _, key = field.name.partition(".")
        value: Any = getattr(cache.layers[layer], attribute)
        held.append(value[key] if key else value)
    if name.startswith("compressed_kv"):  # rotated at the entry's own position, which a shift does not reach
        return _entry_channels(held[0], story, name)
    moved = (held[0] != held[1]).flatten(0, -2).any(0)
    return {int(channel) for channel in moved.nonzero()}


def _entry_channels(entries: torch.Tensor, story: Story, name: str) -> set[int]:
    """Compressed entries of one repeated token, far apart: equal inputs, so that only the rotation differs."""
    cache = DynamicCache(config=story.model.config)
    with torch.no_grad():
        feed(story.model, cache, torch.full((1, 480), 7))
    held = cache.layers[1].compressed_kv[name.partition(".")[2]]  # type: ignore[union-attr]
    assert held.shape[-1] == entries.shape[-1]
    moved = (held[:, -1] - held[:, 6]).abs().squeeze(0) > 1e-3
    return {int(channel) for channel in moved.nonzero()}


# What no kind describes.


@pytest.mark.parametrize(
    "layer",
    [Fp8QuantizedLayer(), object()],
    ids=lambda layer: type(layer).__name__,
)
def test_a_layer_class_without_a_kind_is_refused_by_name(layer: Any) -> None:
    with pytest.raises(UnsupportedCache, match=rf"cache layer 3 is a .*{type(layer).__name__}: .* none of the kinds"):
        adapter_of(3, layer)


def test_a_subclass_is_refused_since_it_may_hold_more() -> None:
    class Richer(DynamicLayer):
        pass

    adapter_of(0, DynamicLayer())
    with pytest.raises(UnsupportedCache, match="Richer"):
        adapter_of(0, Richer())


def test_no_geometry_is_read_off_a_static_cache(stories: dict[str, Story]) -> None:
    story = tell(stories, "gemma3")
    cache = StaticCache(config=story.model.config, max_cache_len=32)
    with torch.no_grad():
        feed(story.model, cache, torch.tensor([story.tokens[:8]]))
    with pytest.raises(UnsupportedCache, match=r"cache layer 0 is a .*StaticSlidingWindowLayer: read the geometry off"):
        geometry_from_cache(cache, story.model.config, LayoutOptions())


def test_a_batch_is_refused(story: Story) -> None:
    cache = DynamicCache(config=story.model.config)
    with torch.no_grad():
        feed(story.model, cache, torch.tensor([story.tokens[:17]] * 2))
    with pytest.raises(UnsupportedCache, match="batch of 2"):
        geometry_from_cache(cache, story.model.config, LayoutOptions())
    with pytest.raises(UnsupportedCache, match="position 17 implies"):
        capture(cache, story.geometry, 17)


def test_a_cache_that_shows_no_shape_yet_is_refused(stories: dict[str, Story]) -> None:
    story = tell(stories, "deepseek_v4")
    with pytest.raises(UnsupportedCache, match="cache layer 0 has no keys yet"):
        geometry_from_cache(DynamicCache(config=story.model.config), story.model.config, LayoutOptions())


def test_a_window_cut_that_could_never_be_filled_is_refused(stories: dict[str, Story]) -> None:
    story = tell(stories, "gemma3")
    with pytest.raises(SpecError, match="window_block_tokens: 4 does not divide the 15 rows"):
        geometry_of(story.model, LayoutOptions(window_block_tokens=4))
    with pytest.raises(SpecError, match="block_tokens: 0 is less than 1"):
        LayoutOptions(block_tokens=0)


def test_views_of_a_gpu_are_copied_to_host_memory_and_others_stay() -> None:
    array = np.arange(12, dtype=np.uint8)
    tensor = torch.arange(12, dtype=torch.uint8)
    found = in_host_memory({3: array, 5: tensor})
    assert found[3] is array
    assert np.array_equal(found[5], array)

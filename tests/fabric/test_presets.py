"""Presets: real geometry as data, the figures that follow from it, and how it shrinks."""

from __future__ import annotations

import math

import pytest

from kvfabric.fabric.kinds import ObjectKind, SpecError
from kvfabric.fabric.presets import PRESETS, preset, source
from kvfabric.fabric.rules import needs, usable_position
from kvfabric.fabric.sizes import bytes_at, bytes_per_token, fixed_bytes, window_bytes_per_token

from .rules_by_hand import held

MIB, GIB = 1 << 20, 1 << 30


def test_deepseek_v4_flash_takes_the_published_bytes() -> None:
    flash = preset("deepseek_v4_flash")
    assert int(bytes_per_token(flash)) == 3_850
    assert window_bytes_per_token(flash) == 25_112
    assert round(fixed_bytes(flash) / MIB, 1) == 14.7
    assert round(bytes_at(flash, 1 << 20) / GIB, 2) == 3.77


def test_a_checkpoint_of_qwen3_next_takes_the_published_bytes() -> None:
    assert round(fixed_bytes(preset("qwen3_next_80b")) / MIB, 1) == 73.7


@pytest.mark.parametrize(
    ("name", "layers", "object_bytes"),
    [
        ("full_attention", {"full": 32}, {"full": 65_536}),
        (
            "deepseek_v4_flash",
            {
                "csa": 21,
                "csa_indexer": 21,
                "hca": 20,
                "swa": 43,
                "csa_tail": 21,
                "csa_indexer_tail": 21,
                "hca_tail": 20,
            },
            {"csa": 64 * 584, "csa_indexer": 64 * 132, "hca": 2 * 584, "swa": 64 * 584, "hca_tail": 8 * 4096},
        ),
        (
            "deepseek_v4_pro",
            {
                "csa": 30,
                "csa_indexer": 30,
                "hca": 31,
                "swa": 61,
                "csa_tail": 30,
                "csa_indexer_tail": 30,
                "hca_tail": 31,
            },
            {"csa": 37_376, "csa_indexer": 8_448, "hca": 1_168, "csa_tail": 32_768, "csa_indexer_tail": 8_192},
        ),
        ("deepseek_v3_2", {"latent": 61, "indexer": 61}, {"latent": 41_984, "indexer": 8_448}),
        ("gemma3_27b", {"full": 10, "window": 52}, {"full": 131_072, "window": 131_072}),
        ("gemma3_270m", {"full": 3, "window": 15}, {"full": 16_384, "window": 16_384}),
        ("gpt_oss_120b", {"full": 18, "window": 18}, {"full": 32_768, "window": 32_768}),
        ("qwen3_next_80b", {"full": 12, "gdn": 36}, {"full": 16 * 2_048, "gdn": 49_152 + 2_097_152}),
    ],
)
def test_layers_and_bytes_are_those_of_the_model(
    name: str, layers: dict[str, int], object_bytes: dict[str, int]
) -> None:
    model = preset(name)
    assert {group.name: len(set(group.layers)) for group in model.groups} == layers
    for group, layer_bytes in object_bytes.items():
        assert model.group(group).block_bytes == layer_bytes * layers[group]


@pytest.mark.parametrize(
    ("name", "group", "rows"),
    [
        ("gemma3_27b", "window", 1023),
        ("gemma3_270m", "window", 511),
        ("gpt_oss_120b", "window", 127),
        ("deepseek_v4_flash", "swa", 127),
    ],
)
def test_a_window_reaches_one_row_less_than_its_name_says(name: str, group: str, rows: int) -> None:
    model = preset(name)
    p = 8 * 1024
    unit = model.group(group).unit_tokens
    assert needs(model, p)[model.index_of(group)] == (range((p - rows) // unit, p // unit),)


@pytest.mark.parametrize("flash_or_pro", ["deepseek_v4_flash", "deepseek_v4_pro"])
def test_deepseek_v4_pages_are_padded_and_its_overlap_is_needed_at_every_position(flash_or_pro: str) -> None:
    model = preset(flash_or_pro)
    for group in model.groups:
        assert group.page_bytes is not None
        assert group.alignment_bytes == 576
        assert group.page_bytes % (576 * len(group.layers)) == 0
        assert 0 < group.page_bytes - group.block_bytes < 576 * len(group.layers)
    assert model.grid_tokens == 256
    required = dict(zip((g.name for g in model.groups), needs(model, 512), strict=True))
    assert required["csa_tail"] == required["csa_indexer_tail"] == (range(127, 128),)
    assert required["hca_tail"] == ()


def test_an_indexer_and_its_tail_are_of_the_history_they_index() -> None:
    flash = preset("deepseek_v4_flash")
    names = [[flash.groups[i].name for i in family] for family in flash.families]
    assert names == [["csa", "csa_indexer", "csa_tail", "csa_indexer_tail"], ["hca", "hca_tail"]]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("scale", [1, 2, 3, 64, 4096])
def test_a_preset_shrinks_without_changing_the_shape_of_its_rules(name: str, scale: int) -> None:
    full, small = preset(name), preset(name, scale)
    shrink = full.grid_tokens // small.grid_tokens
    assert scale % shrink == 0
    for group, less in zip(full.groups, small.groups, strict=True):
        assert less.block_bytes == math.ceil(group.block_bytes / len(group.layers) / scale) * len(group.layers)
        for field in ("unit_tokens", "ratio", "overlap_tokens", "window_tokens"):
            length, shorter = getattr(group, field), getattr(less, field)
            assert shorter == (length // shrink if length and length > 1 else length)
            assert not length or length == 1 or shorter > 1
        assert (less.kind, less.form, less.of, less.layers) == (group.kind, group.form, group.of, group.layers)


@pytest.mark.parametrize("name", PRESETS)
def test_a_prompt_that_is_all_there_resumes_at_its_last_grid_position(name: str) -> None:
    model = preset(name)
    tokens = 4 * model.grid_tokens
    evidence = [held(range(tokens // group.unit_tokens)) for group in model.groups]
    assert usable_position(model, evidence, tokens + 1) == tokens
    history = next(i for i, group in enumerate(model.groups) if group.kind is ObjectKind.COMPRESSED_HISTORY)
    evidence[history] = held(())
    assert usable_position(model, evidence, tokens + 1) == 0


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_where_its_figures_come_from(name: str) -> None:
    assert "config.json" in source(name)


def test_an_unknown_preset_or_scale_is_refused_with_what_there_is() -> None:
    with pytest.raises(SpecError, match="there is no 'gemma4'; known are full_attention, "):
        preset("gemma4")
    with pytest.raises(SpecError, match="scale: 0 is less than 1"):
        preset("full_attention", 0)

"""Every layer class of the installed transformers resumes exactly, static or dynamic, or is refused by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, QuantizedCache, StaticCache, cache_utils
from transformers.cache_utils import Cache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from kvfabric.engines.transformers import generate as generating
from kvfabric.engines.transformers.capture import Objects, capture
from kvfabric.engines.transformers.errors import GeometryMismatch, UnsupportedCache
from kvfabric.engines.transformers.generate import Generation, generate, same_logits
from kvfabric.engines.transformers.geometry import Geometry, LayoutOptions, geometry_from_cache, geometry_of
from kvfabric.engines.transformers.layer_classes import adapter_of
from kvfabric.engines.transformers.library import feed
from kvfabric.engines.transformers.proof import prove_complete
from kvfabric.engines.transformers.restore import restore
from kvfabric.engines.transformers.tiny_models import VOCABULARY, WEIGHT_STD, prompt

from .conftest import Story, tell

POSITIONS = (1, 15, 16, 17, 40)  # around a window of 16
TOKENS = prompt(11, 50)
ROOM_TOKENS = 96

_COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 512, "bos_token_id": None}
_COMMON |= {"eos_token_id": None, "pad_token_id": None, "attn_implementation": "eager"}
_ATTENTION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
_ATTENTION |= {"num_attention_heads": 4, "num_key_value_heads": 2}

# What they have that the five families do not: one window everywhere; chunks; layers that read another's cache;
# convolutions alone; recurrent state alone, or beside attention in one layer; an indexer of another shape.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_ATTENTION, "sliding_window": 16}),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**_ATTENTION, "intermediate_size_mlp": 64, "num_local_experts": 4, "attention_chunk_size": 16, "head_dim": 8},
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            **_ATTENTION,
            "head_dim": 8,
            "sliding_window": 16,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "laurel_rank": 4,
            "activation_sparsity_pattern": None,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {**_ATTENTION, "layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8},
    ),
    "mamba": ("MambaConfig", "MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 8}),
    "falcon_h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            **_ATTENTION,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
            "mamba_n_groups": 1,
        },
    ),
    "minimax_m3": (
        "MiniMaxM3VLTextConfig",
        "MiniMaxM3VLForCausalLM",
        {**_ATTENTION, "head_dim": 8, "layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "lru_width": 32,
            "attention_window_size": 16,
        },
    ),
    "minimax": ("MiniMaxConfig", "MiniMaxForCausalLM", {**_ATTENTION, "head_dim": 8, "num_local_experts": 2}),
}
RESUMABLE = tuple(name for name in MODELS if name not in {"recurrent_gemma", "minimax"})
STATIC_FAMILIES = ("gemma3", "gpt_oss", "deepseek_v3_2", "qwen3_next")


def tiny(name: str) -> PreTrainedModel:
    """A model with random weights wide enough that a lost state shows."""
    config_class, model_class, arguments = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**_COMMON, **arguments))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0.0, WEIGHT_STD)
    model.train(False).requires_grad_(False)
    assert isinstance(model, PreTrainedModel)
    return model


def static(model: PreTrainedModel, room_tokens: int = ROOM_TOKENS) -> Cache:
    return StaticCache(config=model.config, max_cache_len=room_tokens)


def dynamic(model: PreTrainedModel) -> Cache:
    return DynamicCache(config=model.config)


def run_captured(
    model: PreTrainedModel, geometry: Geometry, make: Callable[[], Cache], monkeypatch: pytest.MonkeyPatch
) -> tuple[Generation, dict[int, Objects]]:
    """A run on a cache of that class that uses nothing of the fabric but is captured at each position."""
    captured: dict[int, Objects] = {}

    def keep(position: int, cache: Cache) -> None:
        if position in POSITIONS:
            captured[position] = capture(cache, geometry, position)

    with monkeypatch.context() as patch:
        patch.setattr(generating, "fresh_cache", lambda _config: make())
        run = generate(model, TOKENS, cuts=POSITIONS, decode_tokens=12, after_chunk=keep)
    return run, captured


def assert_resumes(model: PreTrainedModel, geometry: Geometry, make: Callable[[], Cache], **run: Any) -> None:
    alone, captured = run_captured(model, geometry, make, **run)
    for position in POSITIONS:
        cache = restore(model, geometry, position, captured[position], new_cache=make)
        again = generate(model, TOKENS, cuts=POSITIONS, decode_tokens=12, cache=cache, start=position)
        assert same_logits(again.logits, alone.logits_from(position)), position
        assert again.tokens == alone.tokens


@pytest.mark.parametrize("name", RESUMABLE)
def test_a_model_of_other_layer_classes_resumes_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(name)
    geometry = geometry_of(model)
    prove_complete(model, geometry)
    for make in (dynamic, static):
        assert_resumes(model, geometry, partial(make, model), monkeypatch=monkeypatch)


@pytest.mark.parametrize("family", STATIC_FAMILIES)
def test_a_static_cache_resumes_bit_for_bit(
    stories: dict[str, Story], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = tell(stories, family)
    assert_resumes(story.model, story.geometry, partial(static, story.model), monkeypatch=monkeypatch)


def test_a_static_cache_and_a_dynamic_one_hold_the_same_objects(stories: dict[str, Story]) -> None:
    """What one captured the other goes on from: exactly as its own cache would with those bytes."""
    story = tell(stories, "gemma3")
    for position in (15, 16, 70):
        cache = restore(
            story.model, story.geometry, position, story.captured[position], new_cache=partial(static, story.model)
        )
        again = capture(cache, story.geometry, position)
        for name, held in story.captured[position].items():
            assert {i: again[name][i].tobytes() for i in held} == {i: o.tobytes() for i, o in held.items()}


# Refusals.


def test_a_static_cache_without_room_is_refused(stories: dict[str, Story]) -> None:
    story = tell(stories, "gemma3")

    def restored(room_tokens: int) -> Cache:
        make = partial(static, story.model, room_tokens)
        return restore(story.model, story.geometry, 70, story.captured[70], new_cache=make)

    with pytest.raises(GeometryMismatch, match=r"cache layer 1 .*StaticLayer. has room for 69 tokens, not for 70"):
        restored(69)
    assert restored(70).get_seq_length() == 70


def test_a_window_cut_to_its_room_is_refused_behind_it(stories: dict[str, Story]) -> None:
    """A static window made for fewer tokens than its own size drops rows that are still needed."""
    story = tell(stories, "gemma3")
    cache = static(story.model, 15)
    with pytest.raises(GeometryMismatch, match=r"cache layer 0 .*StaticSlidingWindowLayer. has room for 15 tokens"):
        restore(story.model, story.geometry, 16, story.captured[16], new_cache=lambda: cache)
    assert restore(story.model, story.geometry, 15, story.captured[15], new_cache=lambda: cache).get_seq_length() == 15


def test_a_quantized_cache_is_refused_by_the_name_of_its_layer() -> None:
    """Its bytes stand for the keys only with a scale that the first step chose."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_COMMON, **_ATTENTION)).train(False)
    quantized, plain = QuantizedCache("fp8", model.config), dynamic(model)
    for cache in (quantized, plain):
        with torch.no_grad():
            feed(model, cache, torch.tensor([TOKENS[:8]]))
    geometry = geometry_from_cache(plain, model.config, LayoutOptions())
    assert capture(plain, geometry, 8)
    for refused in (
        lambda: geometry_from_cache(quantized, model.config, LayoutOptions()),
        lambda: capture(quantized, geometry, 8),
    ):
        with pytest.raises(UnsupportedCache, match=r"cache layer 0 is a .*Fp8QuantizedLayer: .* none of the kinds"):
            refused()


def test_a_cache_that_holds_more_than_its_layers_is_refused_by_its_class(stories: dict[str, Story]) -> None:
    story = tell(stories, "gemma3")

    class Richer(DynamicCache):
        pass

    for cache in (
        MiniMaxCache(),
        EncoderDecoderCache(DynamicCache(), DynamicCache()),
        cache_utils.MtpCache(config=story.model.config),
        Richer(config=story.model.config),
    ):
        for refused in (
            partial(geometry_from_cache, cache, story.model.config, LayoutOptions()),
            partial(capture, cache, story.geometry, 16),
            partial(restore, story.model, story.geometry, 16, story.captured[16], new_cache=partial(_same, cache)),
        ):
            with pytest.raises(UnsupportedCache, match=rf"the cache is a .*{type(cache).__name__}: it may hold more"):
                refused()


def _same(cache: Cache) -> Cache:
    return cache


def test_a_model_that_does_not_run_on_the_librarys_cache_is_refused() -> None:
    with pytest.raises(
        UnsupportedCache, match="MiniMaxForCausalLM does not run on a DynamicCache: MiniMax uses cache of"
    ):
        geometry_of(tiny("minimax"))


def test_a_model_that_keeps_state_in_its_modules_is_refused() -> None:
    """Its cache layers are all known; only running it shows what they lack."""
    model = tiny("recurrent_gemma")
    geometry = geometry_of(model)
    with pytest.raises(
        UnsupportedCache, match="RecurrentGemmaForCausalLM: after 2 tokens a restored cache goes on differ"
    ):
        prove_complete(model, geometry)


def test_of_the_librarys_own_layer_classes_only_quantized_ones_are_refused() -> None:
    mixins = (cache_utils.CacheLayerMixin, cache_utils.LinearAttentionCacheLayerMixin, cache_utils.DummyLayer)
    classes = [c for _, c in inspect.getmembers(cache_utils, inspect.isclass) if issubclass(c, mixins)]
    refused = {c.__name__ for c in classes if not inspect.isabstract(c) and not is_known(c)}
    assert refused == {"Fp8QuantizedLayer", "HQQQuantizedLayer", "QuantoQuantizedLayer"}


def is_known(layer_class: Any) -> bool:
    try:
        adapter_of(0, object.__new__(layer_class))
    except UnsupportedCache:
        return False
    return True

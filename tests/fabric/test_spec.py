"""Specs from YAML files and from Hugging Face configs; what is wrong is named with its file and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvfabric.fabric.hf import FAMILIES, from_hf, read_hf
from kvfabric.fabric.kinds import SpecError
from kvfabric.fabric.presets import PRESETS, preset
from kvfabric.fabric.specs import SPEC_BYTES_MAX, dump_spec, load_spec, parse_spec, summary

CONFIGS = Path(__file__).parent / "configs"


def config(name: str, **changes: Any) -> dict[str, Any]:
    data = json.loads((CONFIGS / f"{name}.json").read_text()) | changes
    return {field: value for field, value in data.items() if value is not None}


@pytest.mark.parametrize("name", PRESETS)
def test_a_models_own_config_gives_the_groups_of_its_preset(name: str) -> None:
    assert read_hf(CONFIGS / f"{name}.json").groups == preset(name).groups


def test_a_folder_is_read_at_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("gpt_oss_120b")))
    assert read_hf(tmp_path) == from_hf(config("gpt_oss_120b"))


def test_layer_types_are_derived_as_transformers_does_where_a_config_leaves_them_out() -> None:
    for name in ("gpt_oss_120b", "gemma3_270m"):
        assert from_hf(config(name, layer_types=None)).groups == preset(name).groups
    assert from_hf(config("qwen3_next_80b", full_attention_interval=None)).groups == preset("qwen3_next_80b").groups
    layers = {g.name: g.layers for g in from_hf(config("deepseek_v4_pro", compress_ratios=None)).groups}
    assert layers["hca"][:4] == (0, 1, 2, 4)
    assert layers["csa"][:3] == (3, 5, 7)


def test_a_small_config_of_a_family_keeps_its_rules() -> None:
    tiny = config(
        "deepseek_v4_flash",
        num_hidden_layers=5,
        compress_ratios=None,
        layer_types=["sliding_attention", *["compressed_sparse_attention", "heavily_compressed_attention"] * 2],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        sliding_window=16,
        head_dim=32,
        qk_rope_head_dim=8,
        index_head_dim=16,
    )
    model = from_hf(tiny)
    assert {g.name: g.layers for g in model.groups if g.name in {"csa", "hca"}} == {"csa": (1, 3), "hca": (2, 4)}
    assert (model.group("csa").ratio, model.group("hca").ratio, model.group("swa").window_tokens) == (4, 16, 16)


def test_a_model_without_windows_or_without_history_has_no_such_group() -> None:
    full = from_hf(config("gpt_oss_120b", layer_types=["full_attention"] * 36))
    assert [g.name for g in full.groups] == ["full"]
    sliding = from_hf(config("gpt_oss_120b", layer_types=["sliding_attention"] * 36))
    assert [g.name for g in sliding.groups] == ["window"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("full_attention", {"model_type": "rwkv"}, "config.model_type: 'rwkv' is none of deepseek_v32, "),
        ("full_attention", {"model_type": None}, "config.model_type: None is none of"),
        ("full_attention", {"num_hidden_layers": None}, "config.num_hidden_layers: missing"),
        ("full_attention", {"num_hidden_layers": "32"}, "config.num_hidden_layers: '32' is not a whole number"),
        ("full_attention", {"num_key_value_heads": 0}, "config.num_key_value_heads: 0 is not a whole number"),
        ("full_attention", {"torch_dtype": "int3"}, "config.dtype: 'int3' is none of float32, bfloat16, float16"),
        ("full_attention", {"sliding_window": 4096}, "config.sliding_window: 4096, but which layers"),
        ("full_attention", {"layer_types": ["chunked_attention"] * 32}, "no rule is known for 'chunked_attention'"),
        ("gpt_oss_120b", {"layer_types": ["full_attention"]}, "config.layer_types: not a list of 36 layers"),
        ("gpt_oss_120b", {"sliding_window": None}, "config.sliding_window: missing"),
        ("gemma3_270m", {"use_bidirectional_attention": True}, "config.use_bidirectional_attention:"),
        ("deepseek_v4_flash", {"compress_ratios": [0, 7]}, "config.compress_ratios: not a list of 43 of 0, 4, 128"),
        ("deepseek_v4_flash", {"compress_rates": [4]}, "config.compress_rates: not a mapping"),
        ("deepseek_v3_2", {"kv_lora_rank": None}, "config.kv_lora_rank: missing"),
        ("qwen3_next_80b", {"linear_key_head_dim": True}, "config.linear_key_head_dim: True is not a whole number"),
    ],
)
def test_what_is_wrong_with_a_config_is_named(name: str, changes: dict[str, Any], message: str) -> None:
    assert from_hf(config(name)).groups
    with pytest.raises(SpecError) as refused:
        from_hf(config(name, **changes))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_config_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"absent\.json: cannot be read: No such file"):
        read_hf(tmp_path / "absent.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(SpecError, match=r"broken\.json: not JSON"):
        read_hf(tmp_path / "broken.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(SpecError, match=r"list\.json: not a JSON object"):
        read_hf(tmp_path / "list.json")
    (tmp_path / "other.json").write_text('{"model_type": "rwkv"}')
    with pytest.raises(SpecError, match=r"other\.json: config\.model_type: 'rwkv' is none of"):
        read_hf(tmp_path / "other.json")


def test_known_families_are_those_that_the_presets_come_from() -> None:
    kinds = set()
    for name in PRESETS:
        data = config(name)
        kinds.add(data.get("text_config", data)["model_type"])
    assert kinds <= set(FAMILIES)


@pytest.mark.parametrize("name", PRESETS)
def test_a_spec_written_as_yaml_reads_back_equal(name: str, tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(dump_spec(preset(name)))
    assert load_spec(file) == preset(name)


def test_a_spec_by_hand_is_read() -> None:
    text = """
    name: mine
    shards: 2
    groups:
      - {name: kv, kind: compressed_history, block_tokens: 64}
      - {name: idx, kind: indexer, of: kv, block_tokens: 64}
      - {name: ssm, kind: compressed_history, form: state, grid_tokens: 256}
    """
    model = parse_spec(text, where="mine.yaml")
    assert (model.name, model.shards, model.grid_tokens) == ("mine", 2, 256)


KV = "{name: kv, kind: compressed_history, block_tokens: 16}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"groups: [{KV}]\nblock_size: 3", "f.yaml: block_size: unknown field"),
        (
            "groups: [{name: kv, kind: compressed_history, block_token: 16}]",
            "f.yaml: groups.0.block_token: unknown field",
        ),
        (f"groups: [{KV.replace('}', ', bears_slots: true}')}]", "f.yaml: groups.0: bears_slots: an index that names"),
        ("groups: [{name: kv, kind: history, block_tokens: 16}]", "f.yaml: groups.0.kind: "),
        (
            "groups: [{name: kv, kind: compressed_history}]",
            "f.yaml: groups.0: block_tokens: a group of blocks needs it",
        ),
        (f"groups: [{KV}, {KV}]", "f.yaml: groups.kv: the name stands twice"),
        ("groups: []", "f.yaml: groups: "),
        (f"groups: [{KV}]\nshards: 2\nshards: 4", "f.yaml:3: 'shards' stands twice"),
        ("groups: [", "f.yaml:1: "),
        ("- kv", "f.yaml: a list where a mapping with fields such as groups or model is expected"),
        ("", "f.yaml: nothing where a mapping"),
        ("[" * 20_000, "f.yaml: nested too deep"),
        ("name: 2026-13-01", "f.yaml: month must be in 1..12"),
        ("model: {groups: [{name: kv, kind: compressed}]}", "f.yaml: model.groups.0.kind: Input should be "),
        ("groups: !!python/object/apply:os.getcwd []", "f.yaml:1: could not determine a constructor"),
        (f"groups: [{KV.replace('}', ', keep_tokens: 8}')}]", "f.yaml: groups.kv.keep_tokens: 8 tokens behind the end"),
    ],
)
def test_what_is_wrong_with_a_spec_is_named_with_its_file_and_field(text: str, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec(text, where="f.yaml")
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_a_spec_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"absent\.yaml: cannot be read: No such file"):
        load_spec(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match=r"binary\.yaml: not UTF-8 text"):
        load_spec(tmp_path / "binary.yaml")
    (tmp_path / "long.yaml").write_text("#" * (SPEC_BYTES_MAX + 1))
    with pytest.raises(SpecError, match=r"long\.yaml: longer than"):
        load_spec(tmp_path / "long.yaml")


def test_a_summary_says_what_a_spec_amounts_to_in_plain_data() -> None:
    found = summary(preset("deepseek_v4_flash"))
    assert json.loads(json.dumps(found)) == found
    assert (found["grid_tokens"], int(found["bytes_per_token"]), found["bytes_at"]["tokens"]) == (256, 3850, 1 << 20)
    needs = {group["name"]: group["needs"] for group in found["groups"]}
    assert needs["csa"] == "every block of the first c tokens, c = p rounded down to 4"
    assert needs["csa_tail"] == "tokens c - 4 to p, in the revision of csa"
    assert needs["swa"] == "the last 127 tokens before p"

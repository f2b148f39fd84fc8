"""What a recomputed block is to the leased one, and what a namespace is made of."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvfabric.engines.shared.audit import judge
from kvfabric.engines.shared.description import config_digest, digest
from kvfabric.fabric.kinds import FabricError

RNG = np.random.default_rng(1)
NUMBERS = RNG.standard_normal(4096).astype(np.float32)


def as_bytes(numbers, dtype):
    if dtype == "bfloat16":
        return (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    return numbers.astype(dtype).view(np.uint8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_equal_bytes_are_equal_rounding_is_close_and_another_block_is_neither(dtype):
    leased = as_bytes(NUMBERS, dtype)
    rounded = as_bytes(NUMBERS * np.float32(1.01), dtype)
    other = as_bytes(RNG.standard_normal(4096).astype(np.float32), dtype)
    assert judge(leased, leased.copy(), dtype) == "equal"
    assert judge(leased, rounded, dtype) == "close"
    assert judge(leased, other, dtype) == "mismatch"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_numbers_too_large_to_be_squared_are_judged_like_any_others(dtype):
    """What random bytes are, read as numbers."""
    numbers = (RNG.uniform(-1, 1, (2, 4096)) * 1e38).astype(np.float32)
    leased, other = (as_bytes(row, dtype) for row in numbers)
    assert judge(leased, other, dtype) == "mismatch"
    rounded = leased.copy()
    rounded[4] ^= 1
    assert judge(leased, rounded, dtype) == "close"


def test_one_wrong_row_of_many_is_a_mismatch():
    wrong = NUMBERS.copy()
    wrong[:64] = 0.0
    assert judge(as_bytes(NUMBERS, "float32"), as_bytes(wrong, "float32"), "float32") == "mismatch"


def test_numbers_that_cannot_be_read_are_equal_or_not():
    leased = RNG.integers(0, 256, 512, dtype=np.uint8)
    assert judge(leased, leased.copy(), "fp8_e4m3") == "equal"
    assert judge(leased, leased ^ np.uint8(1), "fp8_e4m3") == "mismatch"


def test_every_field_of_a_description_counts():
    described = {"dtype": "bfloat16", "groups": [[0, 32, ["a", "b"]]], "tp": 1, "layout": None}
    others = [{**described, "dtype": "float16"}, {**described, "groups": [[0, 32, ["b", "a"]]]}]
    others += [{**described, "tp": 2}, {**described, "layout": ""}, {**described, "more": 0}]
    digests = {digest(described), *map(digest, others)}
    assert len(digests) == 1 + len(others)
    assert digest(dict(reversed(described.items()))) == digest(described)


def test_what_has_no_plain_form_is_refused_by_name():
    with pytest.raises(FabricError, match="dtype"):
        digest({"dtype": object()})


def test_a_config_counts_less_what_says_nothing(tmp_path):
    def folder(name, **fields):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"rope_theta": 1e4, **fields}))
        return config_digest(tmp_path / name)

    same = folder("a", transformers_version="5.1", _name_or_path="x")
    assert same == folder("b", transformers_version="5.2", _name_or_path="y")
    assert same != folder("c", sliding_window=64)
    assert config_digest(tmp_path) == ""

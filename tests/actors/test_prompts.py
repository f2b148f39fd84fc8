"""What a session makes of tokens and of the keywords that say whose they are."""

from __future__ import annotations

from typing import Any

import pytest

from kvfabric.actors.prompts import Prompts
from kvfabric.fabric.identity import Extra
from kvfabric.fabric.kinds import FabricError
from kvfabric.fabric.model import ModelSpec

MODEL = ModelSpec.load({"groups": [{"name": "kv", "kind": "compressed_history", "block_tokens": 4}]})
PROMPTS = Prompts(MODEL, "v1")
IMAGE = bytes(range(32))


@pytest.mark.parametrize(
    "key",
    [
        {"tenant": None},
        {"tenant": 5},
        {"salt": 8},
        {"salt": [1, 2]},
        {"adapter": "lora"},
        {"adapter": "ab"},
        {"adapter": ("lora",)},
        {"adapter": ("lora", 1)},
        {"extra": 5},
        {"extra": [IMAGE]},
        {"extra": [(0, 32)]},
        {"extra": [(0, "digest")]},
        {"extra": [(0, b"")]},
        {"extra": [(-1, IMAGE)]},
        {"extra": [(1.5, IMAGE)]},
        {"extra": [Extra(-1, IMAGE)]},
    ],
    ids=str,
)
def test_nothing_is_made_to_fit_into_what_decides_who_shares_state(key: dict[str, Any]) -> None:
    (name,) = key
    with pytest.raises(FabricError, match=f"^{name}: "):
        PROMPTS.keys(range(8), key)


def test_each_keyword_keeps_apart_what_differs_in_it() -> None:
    given: list[dict[str, Any]] = [
        {},
        {"tenant": "a"},
        {"salt": "a"},
        {"adapter": ("a", "1")},
        {"adapter": ("a", "2")},
        {"extra": [(0, IMAGE)]},
        {"extra": [(1, IMAGE)]},
    ]
    digests = [PROMPTS.keys(range(8), key).keys(4) for key in given]
    assert len(set(digests)) == len(given)
    assert PROMPTS.keys(range(8), {"salt": b"a"}).keys(4) == PROMPTS.keys(range(8), {"salt": "a"}).keys(4)

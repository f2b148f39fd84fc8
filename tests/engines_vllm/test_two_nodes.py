"""Two vLLM engines on two nodes share their blocks through a fabric, and nobody's tokens change."""

from __future__ import annotations

import pytest

import kvfabric
from kvfabric.engines.vllm_tier.naming import EXTENSION, Naming

from ..actors.stories import eventually
from .conftest import Site, prompt

pytestmark = [pytest.mark.engines, pytest.mark.long]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_what_one_engine_computed_another_node_loads(site: Site, family: str) -> None:
    fabric = f"two-{family}"
    site.fabric(fabric, 131072 if family == "llama" else 65536)
    long, other = prompt("shared"), prompt("another")
    shares = [*long[:160], *other[:50]]
    expected = site.alone(family, [long, shares, other])
    assert len({tuple(told) for told in expected}) == 3
    first = site.engine(family, 0, fabric, worker_extension_cls=EXTENSION)
    assert first.generate([long]) == expected[:1]
    first.settle()
    assert site.reused_tokens(fabric) == 0
    naming = Naming.of(first.naming())
    with kvfabric.connect(fabric) as session:
        ranks = eventually(lambda: session.rank(naming.keys(session, long)), lambda told: told[0].local_tokens == 192)
        assert [rank.tokens for rank in ranks] == [192, 192], "a router knows who holds them"
        assert ranks[1].local_tokens == 0
        assert session.rank(naming.keys(session, other))[0].tokens == 0
    second = site.engine(family, 1, fabric)
    assert second.generate([long]) == expected[:1]
    assert site.reused_tokens(fabric) == 192, "six whole blocks of 32 of 220 tokens"
    assert second.generate([shares]) == expected[1:2], "a prompt that leaves the stored one after five blocks"
    second.forget()
    assert second.generate([shares]) == expected[1:2]
    assert site.reused_tokens(fabric) == 2 * 192, "what this engine itself stored, asked for anew"
    second.forget()
    before = site.reused_tokens(fabric)
    assert second.generate([other]) == expected[2:], "nothing of it is stored"
    assert site.reused_tokens(fabric) == before
    site.end(first)
    assert second.generate([long]) == expected[:1], "the engine that computed it is gone, its blocks are not"
    eventually(lambda: site.reused_tokens(fabric), lambda now: now == before + 192)
    site.end(second)

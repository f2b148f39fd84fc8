"""Prefill on one node, decode on another, by the connector: the same tokens, whatever becomes of the loads."""

from __future__ import annotations

import pytest

from ..actors.stories import eventually
from .conftest import Site, prompt

pytestmark = [pytest.mark.engines, pytest.mark.long]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_what_one_engine_prefilled_another_decodes(site: Site, family: str) -> None:
    fabric = f"handed-{family}"
    prompts = [prompt(f"handed {i}") for i in range(3)]
    expected = site.alone(family, prompts)
    prefill = site.engine(family, 0, fabric, connector=True)
    assert prefill.generate(prompts, 1) == [told[:1] for told in expected]
    eventually(lambda: site.stored(fabric), lambda held: held >= 18)
    assert site.reused_tokens(fabric) == 0
    decode = site.engine(family, 1, fabric, connector=True, launch=False)
    assert decode.generate(prompts) == expected
    assert site.reused_tokens(fabric) == 3 * 192
    decode.forget()
    decode.refuse_loads(True)
    assert decode.generate(prompts) == expected, "what failed was computed, and not asked for again"
    assert decode.refuse_loads(False) == 3
    decode.forget()
    assert decode.generate(prompts) == expected
    assert site.reused_tokens(fabric) == 2 * 3 * 192
    site.end(decode)
    site.end(prefill)


def test_audited_leases_are_computed_anew_found_right_and_not_counted_as_reused(site: Site) -> None:
    prompts = [prompt(f"audited in hand {i}") for i in range(2)]
    expected = site.alone("llama", prompts)
    prefill = site.engine("llama", 0, "handed-audited", connector=True, spec={"audit_fraction": 1.0})
    assert prefill.generate(prompts, 1) == [told[:1] for told in expected]
    eventually(lambda: site.stored("handed-audited"), lambda held: held >= 12)
    decode = site.engine("llama", 1, "handed-audited", connector=True, launch=False)
    decode.note_audits()
    assert decode.generate(prompts) == expected
    told = eventually(decode.audits, lambda found: len(found) == 2)
    assert set(told) <= {"equal", "close"}
    assert site.reused_tokens("handed-audited") == 0
    site.end(decode)
    site.end(prefill)

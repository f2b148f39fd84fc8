"""Identity: the digests that name state are the same everywhere, and differ wherever the state does."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfabric.actors.info import FabricInfo, check_vector
from kvfabric.actors.spec import FabricSpec
from kvfabric.fabric.identity import Extra, Namespace, PromptKeys, as_tokens, chain, join_vector, link_tokens
from kvfabric.fabric.kinds import FabricError
from kvfabric.fabric.model import ModelSpec


def model_of(*blocks: int) -> ModelSpec:
    groups = [{"name": f"g{b}", "kind": "compressed_history", "block_tokens": b} for b in blocks]
    return ModelSpec.load({"name": "m", "groups": groups})


NAMESPACE = Namespace("m", "v1")


def keys_of(tokens: object, namespace: Namespace = NAMESPACE, *, extra: tuple[Extra, ...] = ()) -> PromptKeys:
    return PromptKeys(model_of(4, 16), namespace, as_tokens(tokens), extra)


# --- the same in every process, host and Python version -----------------------------------------


def test_the_pinned_vectors_hold() -> None:
    """Changing any of these orphans every cache and splits mixed fleets: it needs another scheme name."""
    keys = keys_of(range(100))
    assert NAMESPACE.digest().hex() == "1c4dde494217bcb76cc66940d6100fe025d62af1fea28b8e8a32b49ffe304acc"
    assert keys.at(4).hex() == "95d3bc66dbcf85781496b230dcf3a1969929552901ccb285a36bbd2af6d5ea20"
    assert keys.at(64).hex() == "a01c9e158bf7768eccd26764a257e918f6743ed7212578e2babb7a22fd45110b"
    assert keys.at(100).hex() == "bf3f994c05ee2a11b26af3f968847d8176a8b07c6d03105492c09e02d77dd0a2"
    assert join_vector(model_of(4, 16)).hex() == "151a8e49a6cacd255afa8ec6a70052491b21abf7de73f6060265bfe49216c6b0"


def test_a_process_that_computes_other_digests_may_not_join() -> None:
    model = model_of(16)
    check_vector(join_vector(model), model, "holder")
    with pytest.raises(FabricError, match="other digests"):
        check_vector(bytes(32), model, "holder")


def test_a_session_refuses_a_fabric_whose_digests_it_cannot_compute() -> None:
    info = FabricInfo("f", FabricSpec(model=model_of(16)), "v1", (), "")
    assert FabricInfo.decode(info.encode(), "n").name == "f"
    wrong = info.encode().replace(join_vector(model_of(16)), bytes(32))
    with pytest.raises(FabricError, match="other digests"):
        FabricInfo.decode(wrong, "n")


# --- cuts ----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200), st.integers(1, 40))
def test_a_digest_depends_on_its_prefix_alone(tokens: list[int], cut: int) -> None:
    model = model_of(cut)
    whole = PromptKeys(model, NAMESPACE, as_tokens(tokens))
    for end in range(cut, len(tokens) + 1, cut):
        assert PromptKeys(model, NAMESPACE, as_tokens(tokens[:end])).at(end) == whole.at(end)


def test_units_share_one_chain() -> None:
    keys = keys_of(range(200))
    fine = [keys.keys(4)[i : i + 32] for i in range(0, len(keys.keys(4)), 32)]
    coarse = [keys.keys(16)[i : i + 32] for i in range(0, len(keys.keys(16)), 32)]
    assert coarse == fine[3::4]
    assert len(set(fine)) == len(fine) == 50


def test_links_are_the_whole_cuts_of_the_chain() -> None:
    keys = keys_of(range(256))
    links = chain(NAMESPACE.digest(), as_tokens(range(256)), link_tokens(4))
    assert [keys.at(64 * (i + 1)) for i in range(4)] == links


# --- what makes state another's --------------------------------------------------------------------


def test_every_part_of_a_namespace_tells_it_apart() -> None:
    spaces = [
        NAMESPACE,
        Namespace("m", "v2"),
        Namespace("m2", "v1"),
        Namespace("m", "v1", tenant="t"),
        Namespace("m", "v1", salt=b"t"),
        Namespace("m", "v1", adapter=("t", "r1")),
        Namespace("m", "v1", adapter=("t", "r2")),
        Namespace("m", "v1", adapter=("tr", "1")),
        Namespace("m", "v1", hash_scheme="engine"),
        Namespace("mv", "1"),
    ]
    for one, other in combinations(spaces, 2):
        assert one.digest() != other.digest(), (one, other)
        assert keys_of(range(64), one).at(64) != keys_of(range(64), other).at(64)


def test_another_image_behind_the_same_placeholders_never_matches() -> None:
    tokens = [7] * 80
    plain = keys_of(tokens)
    cat = keys_of(tokens, extra=(Extra(20, b"cat" * 11),))
    dog = keys_of(tokens, extra=(Extra(20, b"dog" * 11),))
    later = keys_of(tokens, extra=(Extra(21, b"cat" * 11),))
    assert plain.at(20) == cat.at(20) == dog.at(20), "before the image nothing differs"
    for end in (24, 64, 80):
        assert len({plain.at(end), cat.at(end), dog.at(end), later.at(end)}) == 4


def test_the_order_of_extra_content_does_not_matter() -> None:
    one, two = Extra(3, b"a" * 32), Extra(9, b"b" * 32)
    assert keys_of(range(64), extra=(one, two)).at(64) == keys_of(range(64), extra=(two, one)).at(64)


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], [[1, 2]]])
def test_what_is_no_token_id_is_refused(tokens: object) -> None:
    with pytest.raises(FabricError, match="tokens"):
        as_tokens(tokens)


def test_token_dtypes_do_not_matter() -> None:
    for dtype in (np.int64, np.uint16, np.int32):
        assert keys_of(np.arange(64, dtype=dtype)).at(64) == keys_of(range(64)).at(64)

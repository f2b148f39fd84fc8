"""State that is wrong in one way changes the output when nobody checks it, and nobody notices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvfabric.engines.transformers.capture import Objects, capture
from kvfabric.engines.transformers.errors import EngineError, GeometryMismatch
from kvfabric.engines.transformers.faults import Fault, Meets, Scene, faults, foreign_passport, reuse_blindly
from kvfabric.engines.transformers.generate import Generation, generate, same_logits, tokens_wrong
from kvfabric.engines.transformers.passport import passports
from kvfabric.engines.transformers.restore import restore
from kvfabric.engines.transformers.tiny_models import FAMILIES
from kvfabric.engines.transformers.weights import weights_revision
from kvfabric.fabric.evidence import GroupEvidence
from kvfabric.fabric.kinds import ObjectKind
from kvfabric.fabric.passport import abi_refusal
from kvfabric.fabric.rules import resolve, usable_position

from .conftest import POSITIONS, Story, tell

HISTORY = {"history_last_block_absent", "history_of_other_weights", "history_rope_layout", "history_layers_swapped"}
WINDOW = {"window_missing", "window_one_row_short", "window_one_token_off"}
INDEXER = {"indexer_one_block_short", "indexer_stale", "indexer_of_other_weights", "indexer_other_rotation"}
STATE = {"state_missing", "state_of_previous_position", "state_transposed"}
TAIL = {"tail_missing", "tail_one_token_short", "overlap_missing"}

EXPECTED = {
    ("deepseek_v4", 70): HISTORY | TAIL | WINDOW | INDEXER,
    ("deepseek_v4", 64): HISTORY | {"overlap_missing_aligned"} | WINDOW | INDEXER,
    ("deepseek_v4", 68): HISTORY | TAIL | WINDOW | INDEXER,
    ("gemma3", 70): HISTORY | WINDOW,
    ("gpt_oss", 70): HISTORY | WINDOW,
    ("deepseek_v3_2", 70): HISTORY | INDEXER,
    ("qwen3_next", 70): HISTORY | STATE,
}


@pytest.fixture(scope="module")
def scenes() -> dict[tuple[str, int], Scene]:
    return {}


@pytest.fixture(params=EXPECTED, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request: pytest.FixtureRequest, stories: dict[str, Story], scenes: dict[Any, Scene]) -> tuple[Story, Scene]:
    family, position = request.param
    story = tell(stories, family)
    if request.param not in scenes:
        scenes[request.param] = Scene(story.model, story.geometry, story.tokens, position, cuts=POSITIONS)
    return story, scenes[request.param]


def blind_run(story: Story, scene: Scene, objects: Objects, decode_tokens: int = 32) -> Generation:
    cache = reuse_blindly(story.model, story.geometry, scene.position, objects)
    return generate(
        story.model, story.tokens, cuts=POSITIONS, cache=cache, start=scene.position, decode_tokens=decode_tokens
    )


def test_the_faults_of_a_model_are_those_of_its_kinds(case: tuple[Story, Scene]) -> None:
    story, scene = case
    made = faults(scene)
    assert {fault.name for fault in made} == EXPECTED[story.family, scene.position]
    assert {fault.kind for fault in made} == {group.spec.kind for group in story.geometry.groups}
    for fault in made:
        assert story.geometry.group(fault.group).spec.kind is fault.kind


def test_blind_reuse_of_the_exact_set_changes_nothing(case: tuple[Story, Scene]) -> None:
    story, scene = case
    run = blind_run(story, scene, scene.exact)
    assert same_logits(run.logits, story.run.logits_from(scene.position))
    assert tokens_wrong(story.run.tokens, run.tokens) == 0


def test_every_fault_runs_on_and_changes_the_logits(case: tuple[Story, Scene]) -> None:
    story, scene = case
    wrong = {}
    for fault in faults(scene):
        run = blind_run(story, scene, fault.objects)
        assert not same_logits(run.logits, story.run.logits_from(scene.position)), fault.name
        wrong[fault.name] = tokens_wrong(story.run.tokens, run.tokens)
    assert sum(1 for count in wrong.values() if count) > len(wrong) / 2, wrong


def test_a_fault_leaves_the_exact_set_and_the_other_groups_as_they_are(case: tuple[Story, Scene]) -> None:
    story, scene = case
    fresh = Scene(story.model, story.geometry, story.tokens, scene.position, cuts=POSITIONS)
    for fault in faults(scene):
        for name, held in fault.objects.items():
            same = list(held) == list(scene.exact[name]) and all(
                np.array_equal(held[index], scene.exact[name][index]) for index in held
            )
            assert same == (name != fault.group), (fault.name, name)
    for name, held in fresh.exact.items():
        assert all(np.array_equal(held[index], scene.exact[name][index]) for index in held)


def evidence(story: Story, objects: Objects) -> tuple[GroupEvidence, ...]:
    """What a fabric that was given these objects, all of one revision, would know."""
    present = (sum(1 << index for index in objects[group.spec.name]) for group in story.geometry.groups)
    return tuple(GroupEvidence(usable={0: bits}, matched=bits) for bits in present)


def test_by_the_fabric_s_rules_a_capture_serves_its_own_position(story: Story) -> None:
    spec = story.geometry.model_spec(weights="w")
    for position in POSITIONS:
        assert usable_position(spec, evidence(story, story.captured[position]), len(story.tokens)) == position


def test_by_the_fabric_s_rules_what_was_not_stored_cannot_be_resumed_from(case: tuple[Story, Scene]) -> None:
    story, scene = case
    spec = story.geometry.model_spec(weights="w")
    met = [fault for fault in faults(scene) if fault.meets in {Meets.ABSENT, Meets.OTHER_POSITION}]
    assert met
    for fault in met:
        published = scene.published(fault)
        resolution = resolve(spec, evidence(story, published), len(story.tokens))
        assert resolution.tokens < scene.position, fault.name
        assert resolution.cause is not None
        assert (resolution.cause.group, resolution.cause.kind) == (fault.group, fault.kind), fault.name
        with pytest.raises(GeometryMismatch, match=r"absent|is of position"):
            restore(story.model, story.geometry, scene.position, published)


def test_other_weights_have_another_revision_and_another_layout_another_passport(case: tuple[Story, Scene]) -> None:
    story, scene = case
    own = passports(story.model.config, story.geometry)
    for fault in faults(scene):
        if fault.meets is Meets.OTHER_WEIGHTS:
            assert weights_revision(scene.other_model) != weights_revision(story.model)
            assert_same_shape(scene.published(fault), scene.exact)
        if fault.meets is Meets.OTHER_LAYOUT:
            assert_same_shape(scene.published(fault), scene.exact)
            mine = own[fault.group]
            assert abi_refusal(mine.abi(), mine.abi()) is None
            assert abi_refusal(foreign_passport(mine, fault).abi(), mine.abi()) is not None


def assert_same_shape(one: Objects, other: Objects) -> None:
    """Nothing that looks at keys and lengths can tell these sets apart."""
    sizes = [
        {(name, index): array.size for name, held in s.items() for index, array in held.items()} for s in (one, other)
    ]
    assert sizes[0] == sizes[1]


def test_a_fault_of_bytes_alone_passes_the_restore_that_sees_only_bytes(stories: dict[str, Story]) -> None:
    """Why weights and layout must be proven before: their faults have the right keys, lengths and positions."""
    story = tell(stories, "deepseek_v4")
    scene = Scene(story.model, story.geometry, story.tokens, 70, cuts=POSITIONS)
    by_bytes: list[Fault] = [f for f in faults(scene) if f.meets in {Meets.OTHER_WEIGHTS, Meets.OTHER_LAYOUT}]
    assert {fault.kind for fault in by_bytes} == {
        ObjectKind.COMPRESSED_HISTORY,
        ObjectKind.UNCOMPRESSED_TAIL,
        ObjectKind.INDEXER,
    }
    for fault in by_bytes:
        cache = restore(story.model, story.geometry, 70, fault.objects)
        capture(cache, story.geometry, 70)


@pytest.mark.parametrize("family", FAMILIES)
def test_faults_can_be_made_at_the_first_positions(stories: dict[str, Story], family: str) -> None:
    story = tell(stories, family)
    for position in (1, 4):
        scene = Scene(story.model, story.geometry, story.tokens, position, cuts=POSITIONS)
        for fault in faults(scene):
            blind_run(story, scene, fault.objects, decode_tokens=1)
    with pytest.raises(EngineError, match="position 1: there is none before it"):
        _ = Scene(story.model, story.geometry, story.tokens, 1).earlier

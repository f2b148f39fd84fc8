"""One story, step by step: what was expected, what came, whether they agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from ...fabric.kinds import ProtocolError
from . import story as words
from .ledger import WrongBytes
from .pure import PureWorld
from .story import Step, Story
from .verbs import Got, Verbs
from .world import Hung, World

MARGIN_S = 3600.0
"""How much longer than everything it waits for, in the story's time, a step may take."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step's outcome. Of ``parallel``, ``expected`` and ``got`` have one entry an inner step."""

    step: int
    verb: str
    expected: Any
    got: Any
    passed: bool
    line: int


@dataclass(slots=True)
class StoryResult:
    """One file's outcome."""

    file: str
    scenario: str
    cluster: dict[str, Any] | None = None
    steps: list[StepResult] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(step.passed for step in self.steps)

    def plain(self) -> dict[str, Any]:
        """The JSON line of ``--json``."""
        steps = [{k: v for k, v in asdict(step).items() if k != "line"} for step in self.steps]
        return {"scenario": self.scenario, "passed": self.passed, "cluster": self.cluster, "steps": steps}


def run_story(story: Story, world_of: Callable[[Story], World] = PureWorld) -> StoryResult:
    """Run a checked story to its end, or to the first fault of the fabric itself."""
    world = world_of(story)
    try:
        verbs = Verbs(story, world)
        result = StoryResult(story.file, story.scenario)
        for number, step in enumerate(story.steps, 1):
            outcome, broken = _run_step(verbs, world, number, step)
            result.steps.append(outcome)
            if broken:
                break
        result.cluster = world.cluster()
        return result
    finally:
        world.close()


def _run_step(verbs: Verbs, world: World, number: int, step: Step) -> tuple[StepResult, bool]:
    """The outcome, and whether the world broke so that nothing after it means anything."""
    together = step.steps or (step,)
    expected = [_expected(one) for one in together]
    broken = False
    try:
        got: list[Got] = world.run([verbs.perform(one) for one in together], MARGIN_S + sum(map(_waits_s, together)))
    except (Hung, WrongBytes, ProtocolError) as error:
        got = [{"error": f"{type(error).__name__}: {error}"}] * len(together)
        broken = True
    passed = not broken and all(map(agrees, expected, got))
    if step.steps:
        return StepResult(number, step.verb, expected, got, passed, step.line), broken
    return StepResult(number, step.verb, expected[0], got[0], passed, step.line), broken


def _expected(step: Step) -> dict[str, Any] | None:
    """What a step expects; a ``check`` is its own expectation."""
    if isinstance(step.args, words.Check):
        return {**step.args.model_dump(exclude_none=True), **(step.expect or {})}
    return step.expect


def _waits_s(step: Step) -> float:
    match step.args:
        case words.Acquire():
            return step.args.waits_s or 0.0
        case words.Advance():
            return step.args.seconds
        case _:
            return 0.0


def agrees(expected: dict[str, Any] | None, got: Got) -> bool:
    """Whether every expected field is there with the expected value; nothing expected agrees with all."""
    return expected is None or all(_equal(value, got.get(name), name) for name, value in expected.items())


def _equal(expected: Any, got: Any, name: str) -> bool:
    if isinstance(expected, dict) and isinstance(got, dict):
        return agrees(expected, got)
    if name == "ok":
        return bool(expected) is bool(got)
    return type(expected) is type(got) and bool(expected == got)

"""Where explanations come from: a running fabric, or a story told up to a step."""

from __future__ import annotations

import json
from pathlib import Path

from ...fabric.explanation import Explanation
from ...fabric.kinds import FabricError

ASKING = ("acquire", "probe")


def tokens_from(what: str) -> list[int]:
    """Token ids from the command line or a file. Raises FabricError naming what is wrong with them."""
    path = Path(what)
    text = what
    try:
        if path.is_file():
            text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FabricError(f"{what}: cannot be read: {error.strerror}") from None
    if not text.strip():
        raise FabricError(f"{what}: holds no token ids")
    try:
        if text.lstrip().startswith("["):
            return [int(token) for token in json.loads(text)]
        return [int(token) for token in text.replace(",", " ").split()]
    except (ValueError, TypeError):
        raise FabricError(f"{what}: neither token ids nor a file of them") from None


def of_tokens(fabric: str, tokens: list[int], tenant: str) -> Explanation:
    """Of a prompt in the running fabric of that name."""
    from ...actors.fabric import connect

    with connect(fabric) as session:
        return session.explain(tokens, tenant=tenant)


def of_scenario(path: Path, number: int | None) -> Explanation:
    """Of one asking step of a story, told up to it. Raises FabricError for a bad file or step."""
    from ..scenario.pure import PureWorld
    from ..scenario.run import check_files
    from ..scenario.runner import MARGIN_S
    from ..scenario.story import Probe
    from ..scenario.verbs import Verbs

    stories, problems = check_files([path])
    if problems:
        raise FabricError(str(problems[0]))
    story = stories[0]
    asking = [n for n, step in enumerate(story.steps, 1) if step.verb in ASKING]
    wanted = number if number is not None else (asking[-1] if asking else 0)
    if wanted not in asking:
        raise FabricError(f"{path}: step {wanted} asks for nothing; these do: {', '.join(map(str, asking)) or 'none'}")
    world = PureWorld(story)
    try:
        verbs = Verbs(story, world)

        for step in story.steps[: wanted - 1]:
            together = step.args if isinstance(step.args, list) else [step]
            world.run([verbs.perform(one) for one in together], MARGIN_S)
        asked = story.steps[wanted - 1].args
        assert isinstance(asked, Probe)
        found: Explanation = world.run([verbs.explain(asked)], MARGIN_S)[0]
        return found
    finally:
        world.close()

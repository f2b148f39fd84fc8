"""Where explanations come from: a running fabric, or a story told up to a step."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ...fabric.explanation import Explanation
from ...fabric.kinds import FabricError

ASKING = ("acquire", "probe")
TOLD_CHARS = 80


def tokens_from(what: str) -> list[int]:
    """Token ids from the command line or a file. Raises FabricError naming what is wrong with them."""
    told = what if len(what) <= TOLD_CHARS else f"{what[:TOLD_CHARS]}..."
    try:
        is_file = os.path.isfile(what)  # noqa: PTH113 - Path's raises where a line of ids is too long to be a name
        text = Path(what).read_text(encoding="utf-8") if is_file else what
    except OSError as error:
        raise FabricError(f"{told}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FabricError(f"{told}: neither token ids nor a file of them: not UTF-8 text") from None
    if not text.strip():
        raise FabricError(f"{told or 'tokens'}: holds no token ids")
    try:
        tokens = json.loads(text) if text.lstrip().startswith("[") else [int(t) for t in text.replace(",", " ").split()]
    except (ValueError, RecursionError):
        tokens = [None]
    if not all(type(token) is int for token in tokens):
        raise FabricError(f"{told}: neither token ids (whole numbers) nor a file of them")
    return tokens


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

"""Files in, results out: what ``kvfabric scenario`` prints."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from .checks import load_story
from .pure import PureWorld
from .runner import StoryResult, run_story
from .source import InvalidFile, Problem
from .story import Story
from .world import World

logger = logging.getLogger(__name__)

PASSED, FAILED, INVALID = 0, 1, 2
"""Exit statuses."""


@dataclass(slots=True)
class Outcome:
    """What became of some files."""

    results: list[StoryResult] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def status(self) -> int:
        """0: all passed; 1: an expectation failed; 2: a file is not valid."""
        if self.problems:
            return INVALID
        return PASSED if all(result.passed for result in self.results) else FAILED


def check_files(paths: Iterable[Path]) -> tuple[list[Story], list[Problem]]:
    """The valid files as stories, and what is wrong with the others."""
    stories: list[Story] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            stories.append(load_story(path))
        except InvalidFile as error:
            problems += error.problems
    return stories, problems


def run_files(paths: Iterable[Path], *, cluster: bool = False) -> Outcome:
    """Run every valid file, on the pure core or on a real cluster; what is wrong with others is told beside it.

    Raises FabricError where a cluster is asked for and cannot be had.
    """
    stories, problems = check_files(paths)
    with _worlds(stories, cluster=cluster) as world_of:
        return Outcome([run_story(story, world_of) for story in stories], problems)


@contextmanager
def _worlds(stories: Sequence[Story], *, cluster: bool) -> Iterator[Callable[[Story], World]]:
    if not cluster or not stories:
        yield PureWorld
        return
    from .cluster import Cluster  # loads Ray

    # Ray tells the driver on its standard output of every process that is killed; a run's own output is results alone.
    said = StringIO()
    try:
        with redirect_stdout(said), Cluster(stories) as shared:
            yield shared.world
    finally:
        logger.debug("Ray said: %s", said.getvalue())


def json_line(result: StoryResult) -> str:
    """The line that ``--json`` prints for one file."""
    return json.dumps(result.plain(), separators=(",", ":"))

"""Which window, tail and recurrent state to keep: everywhere, every so many tokens, at the ends, at branches.

all         every position a resume could end at
every:N     the last position before every N-th token
ends        the end of the prompt and the end of the output (as DeepSeek-V4 is deployed)
branches    the ends, and where requests were seen to part from what is stored
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..fabric.checkpoints import CheckpointPolicy, Trail
from ..fabric.kinds import SpecError

EVERY = "every:"
NAMES = ("all", "every:N", "ends", "branches")


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Every grid position."""

    def positions(self, trail: Trail) -> Collection[int]:
        return range(trail.grid_tokens, trail.tokens + 1, trail.grid_tokens)


@dataclass(frozen=True, slots=True)
class KeepEvery:
    """One position for every ``step_tokens`` tokens: the last on the grid not behind each multiple."""

    step_tokens: int

    def positions(self, trail: Trail) -> Collection[int]:
        step = max(self.step_tokens, trail.grid_tokens)
        found = {trail.at_or_before(end) for end in range(step, trail.tokens + 1, step)}
        return sorted(found - {0})


@dataclass(frozen=True, slots=True)
class KeepEnds:
    """The ends of prompt and output."""

    def positions(self, trail: Trail) -> Collection[int]:
        return sorted({trail.at_or_before(trail.prompt_tokens), trail.at_or_before(trail.tokens)} - {0})


@dataclass(frozen=True, slots=True)
class KeepBranches:
    """The ends, and every branch point that was observed on the way."""

    def positions(self, trail: Trail) -> Collection[int]:
        branches = {b for b in trail.branches if 0 < b <= trail.tokens}
        return sorted(branches.union(KeepEnds().positions(trail)))


def checkpoint_policy(name: str) -> CheckpointPolicy:
    """The policy that a spec names. Raises SpecError for a name that is none."""
    named: dict[str, CheckpointPolicy] = {"all": KeepAll(), "ends": KeepEnds(), "branches": KeepBranches()}
    policy = named.get(name)
    if policy is not None:
        return policy
    step = name.removeprefix(EVERY)
    if name.startswith(EVERY) and step.isdecimal() and int(step) > 0:
        return KeepEvery(int(step))
    raise SpecError(f"checkpoint: {name!r} is none of {', '.join(NAMES)} (N: tokens, at least 1)")

"""Checkpoints: at which positions of a prompt the state that is valid at one position is kept.

History and indexers serve every position behind them and are always published. Windows, tails and
snapshots serve the position they were cut at, and most of those nobody ever comes back to: a policy
says which to keep. What was not kept is computed again from the position before, or replayed.

    trail  --policy.positions-->  positions  --published-->  the objects a store publishes
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from .identity import DIGEST_BYTES
from .keeping import kept
from .kinds import Form, ObjectKind
from .model import ModelSpec
from .needs import needs_past, rules_of

POSITIONAL = frozenset({ObjectKind.UNCOMPRESSED_TAIL, ObjectKind.SLIDING_WINDOW})
"""Kinds whose blocks serve positions near them only."""


@dataclass(frozen=True, slots=True)
class Trail:
    """One prompt that is being stored. All in tokens.

    ``tokens``: its end; ``prompt_tokens``: where its output begins (its end, without output);
    ``branches``: grid positions, ascending, at which requests were seen to part from it.
    """

    grid_tokens: int
    tokens: int
    prompt_tokens: int
    branches: tuple[int, ...] = ()

    def at_or_before(self, position: int) -> int:
        """The last grid position not behind ``position``; 0 if there is none."""
        return min(position, self.tokens) // self.grid_tokens * self.grid_tokens


class CheckpointPolicy(Protocol):
    """Which positions are worth keeping. Deterministic, without state: what was observed is in the trail."""

    def positions(self, trail: Trail) -> Collection[int]:
        """Grid positions 0 < p <= trail.tokens at which windows, tails and snapshots are kept."""
        ...


def published(model: ModelSpec, positions: Collection[int], tokens: int) -> tuple[frozenset[int], ...]:
    """Per group, the objects that a store of a prompt's first ``tokens`` tokens publishes.

    All blocks of histories and indexers; of windows, tails and snapshots what a resume at one of the
    ``positions`` needs, and of windows and tails also what lies at the end, from which the prompt may
    grow. ``keep_tokens`` leaves out what it leaves out anyway. Raises ValueError for a position that is
    not on the grid.
    """
    needed: dict[int, set[int]] = {
        at: set() for at, spec in enumerate(model.groups) if spec.form is Form.STATE or spec.kind in POSITIONAL
    }
    for p in positions:
        at_p = needs_past(model, p)
        for group, of in needed.items():
            for r in at_p[group]:
                of.update(r)
    found = []
    for at, (spec, whole) in enumerate(zip(model.groups, kept(model, tokens), strict=True)):
        everything = frozenset(whole)
        if spec.form is Form.STATE:
            found.append(everything & needed[at])
        elif spec.kind in POSITIONAL:
            first = max(0, rules_of(model).groups[at].run_start(tokens)) // spec.unit_tokens
            found.append(frozenset(i for i in everything if i >= first or i in needed[at]))
        else:
            found.append(everything)
    return tuple(found)


@dataclass(slots=True)
class BranchBook:
    """Where requests were seen to part from what is stored: at most ``size_max`` positions, the latest kept.

    A position is known by the digest of the chain up to it, so prompts that share it share the branch.
    """

    grid_tokens: int
    size_max: int = 65_536
    _seen: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._seen)

    def asked(self, grid_keys: bytes, matched_tokens: int) -> None:
        """A request's digests (32 bytes a grid step) matched what is stored up to ``matched_tokens``, and no further."""
        step = matched_tokens // self.grid_tokens
        if not 0 < step <= len(grid_keys) // DIGEST_BYTES:
            return
        digest = _digest(grid_keys, step)
        self._seen[digest] = None
        self._seen.move_to_end(digest)
        while len(self._seen) > self.size_max:
            self._seen.popitem(last=False)

    def forget(self, grid_keys: bytes) -> None:
        """Nothing branches along this prompt."""
        for step in range(1, len(grid_keys) // DIGEST_BYTES + 1):
            self._seen.pop(_digest(grid_keys, step), None)

    def along(self, grid_keys: bytes) -> tuple[int, ...]:
        """The branches on a prompt's way, ascending, in tokens."""
        steps = range(1, len(grid_keys) // DIGEST_BYTES + 1)
        return tuple(step * self.grid_tokens for step in steps if _digest(grid_keys, step) in self._seen)


def trail_of(model: ModelSpec, tokens: int, prompt_tokens: int | None = None, branches: Iterable[int] = ()) -> Trail:
    """The trail of a store of ``tokens`` tokens, the first ``prompt_tokens`` (all, if None) of them the prompt."""
    prompt = tokens if prompt_tokens is None else min(prompt_tokens, tokens)
    return Trail(model.grid_tokens, tokens, prompt, tuple(branches))


def _digest(keys: bytes, step: int) -> bytes:
    return keys[(step - 1) * DIGEST_BYTES : step * DIGEST_BYTES]

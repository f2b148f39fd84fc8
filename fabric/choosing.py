"""Choosing a position: the longest one, or the one of least expected time; resumed as it is or by a replay.

Only what the rules can serve is ever chosen. A policy names the seconds; the least wins, the longer on
a tie. What was left out for its cost is named as what came too late: it would have been computed sooner.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .expected import Expected
from .kinds import Reason
from .offers import InHost, Offers, Planning, offers_of
from .planner import View
from .replay import replay_of
from .rules import Resolution, resolve


@dataclass(frozen=True, slots=True)
class Choice:
    """Where one request resumes. ``found``: the position, its revisions, what the rules say of it.

    ``replays``: windows and tails are computed again on the way. ``left_out``: of a longer position the
    first group that would have had to be brought, why it was not, and whether from a tier.
    ``expected``: what was weighed, the chosen first; empty without a policy.
    """

    found: Resolution
    replays: bool = False
    replay_tokens: int | None = None
    """How many, where the request named it: fewer than are exact, perhaps."""
    left_out: tuple[int, Reason] | None = None
    from_tier: bool = False
    expected: tuple[Expected, ...] = ()


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request allows: tiers, replay, how many tokens at least; and what waits to be restored before it."""

    tiers: bool
    replays: bool
    min_tokens: int = 0
    queued_bytes: float = 0
    explain: bool = False
    replay_tokens: int | None = None
    in_host: InHost | None = None


def choose(view: View, found: Resolution, planning: Planning | None, terms: Terms) -> Choice:
    """The position to resume at. ``found``: the longest that needs no replay, under the same terms."""
    replay = replay_of(view.model) if terms.replays else None
    if planning is None:
        if replay is None:
            return Choice(found)
        over = view.replaying().found(tiers=terms.tiers)
        # A replay that begins at or before the other position computes no less than to resume there.
        sooner = replay.start(over.tokens, terms.replay_tokens) > found.tokens
        return Choice(over, replays=True, replay_tokens=terms.replay_tokens) if sooner else Choice(found)
    if replay is None and not terms.explain and found.tokens and view.held_by_readers(found.tokens, found.revisions):
        return Choice(found)  # nothing to bring: no shorter position can be sooner
    replayed = 0 if replay is None else replay.length(terms.replay_tokens)
    offers = offers_of(
        view, tiers=terms.tiers, replayed=replayed, queued_bytes=terms.queued_bytes, in_host=terms.in_host
    )
    seconds = planning.seconds(offers)
    at = cheapest(offers, seconds, terms.min_tokens)
    replays = bool(offers.replayed[at])
    using = view.replaying() if replays else view
    longest = using.found(tiers=terms.tiers)
    weighed = tuple(planning.expected(offers, i) for i in _worth_telling(offers, seconds, at))
    tokens = int(offers.tokens[at])
    if tokens == longest.tokens:
        return Choice(longest, replays, terms.replay_tokens, expected=weighed)
    shorter = resolve(using.model, using.evidence(tiers=terms.tiers), view.prompt.n, limit_tokens=tokens)
    brought = using.first_brought(longest.tokens, longest.revisions)
    left_out = None if brought is None else (brought[0], Reason.DEADLINE_EXCEEDED)
    return Choice(shorter, replays, terms.replay_tokens, left_out, brought is not None and brought[1], weighed)


def cheapest(offers: Offers, seconds: np.typing.NDArray[np.float64], min_tokens: int = 0) -> int:
    """The offer of least expected seconds, the longer on a tie; of those with ``min_tokens``, if there are any."""
    allowed = offers.tokens >= min_tokens
    if allowed.any():
        seconds = np.where(allowed, seconds, np.inf)
    return len(offers) - 1 - int(np.argmin(seconds[::-1]))


def _worth_telling(offers: Offers, seconds: np.typing.NDArray[np.float64], chosen: int) -> list[int]:
    """The chosen offer, the longest with and without a replay, to recompute everything, and the next best."""
    replayed = offers.replayed > 0
    told = [chosen, *(int(np.flatnonzero(kind)[-1]) for kind in (~replayed, replayed) if kind.any()), 0]
    rest = seconds.copy()
    rest[told] = np.inf
    following = int(np.argmin(rest))
    return list(dict.fromkeys([*told, following] if np.isfinite(rest[following]) else told))

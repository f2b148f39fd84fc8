"""How long what lies on the tiers of other holders takes: learned from what came, for whoever has a deadline.

A leader sees its own disk's line. Of another holder it knows only when bytes that lay on its tiers were in its
memory; that is what is measured here, their place in that holder's line included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from .messages import Column, Objects
from .model import ModelSpec
from .restores import Rate

FAR_MAX = 1024
FAR_FORGET_S = 60.0
"""What was learned of another holder's tiers is worth nothing after so long: who is not asked cannot be slow for ever."""


class FarTiers:
    """How fast what lies on other holders' tiers came lately, by holder: their restore, its place in their line included."""

    def __init__(self) -> None:
        self._rates: dict[str, tuple[Rate, float]] = {}

    def done(self, holder: str, nbytes: int, since_s: float, now: float) -> None:
        """So many bytes of its tiers were in its memory at ``now``, having been asked for at ``since_s``."""
        seconds = now - since_s
        if nbytes <= 0 or seconds <= 0:
            return
        rate = self._known(holder, now) or Rate(nbytes / seconds)
        rate.done(nbytes, since_s, now)
        self._rates.pop(holder, None)
        self._rates[holder] = (rate, now)
        if len(self._rates) > FAR_MAX:
            del self._rates[next(iter(self._rates))]

    def _known(self, holder: str, now: float) -> Rate | None:
        rate, at_s = self._rates.get(holder, (None, 0.0))
        return rate if now - at_s <= FAR_FORGET_S else None

    def seconds(self, holder: str, nbytes: float, now: float, guess: Rate) -> float:
        """How long that many bytes of its tiers take; ``guess``: where nothing is known lately."""
        return (self._known(holder, now) or guess).seconds(nbytes)

    def slowest(self, tolls: Mapping[str, tuple[int, float]], now: float, guess: Rate) -> tuple[int, float] | None:
        """Of a group and bytes by holder, the group that comes last and when; None where there is none."""
        times = [(self.seconds(holder, nbytes, now, guess), group) for holder, (group, nbytes) in tolls.items()]
        return (max(times)[1], max(times)[0]) if times else None


def tolls_of(
    runs: Iterable[tuple[str, Objects]], columns: Mapping[tuple[str, int, int], Column], model: ModelSpec
) -> dict[str, tuple[int, float]]:
    """What of these runs lies on tiers alone: by holder, the first group and all bytes."""
    groups: dict[str, int] = {}
    nbytes: Counter[str] = Counter()
    for holder, run in runs:
        column = columns.get((holder, run.group, run.shard))
        tier = 0 if column is None else column.tier & ~column.memory
        count = sum(tier >> i & 1 for i in run.indices) if tier else 0
        if count:
            groups.setdefault(holder, run.group)
            nbytes[holder] += count * model.groups[run.group].block_bytes
    return {holder: (group, nbytes[holder]) for holder, group in groups.items()}

"""One acquire in progress at its leader: what is known, what was asked, what was chosen."""

from __future__ import annotations

from dataclasses import dataclass, field

from .choosing import Choice
from .kinds import Reason
from .messages import Acquire, PartGranted, PartReply, Told
from .planner import PartPlan, View
from .restores import Turn
from .rules import Resolution, resolve
from .wakes import Wake

WORKING = "working"
WAITING = "waiting"
IN_LINE = "in line to restore"
DONE = "done"


@dataclass(slots=True)
class AcquireOp:
    """One acquire in progress at its leader."""

    request: Acquire
    client: str
    view: View
    started_s: float
    op: str = ""
    phase: str = WORKING
    rounds: int = 0
    asked: set[str] = field(default_factory=set)
    directory_asked: bool = False
    asks: int = 0
    told: list[Told] = field(default_factory=list)
    shards_awaited: dict[int, str] = field(default_factory=dict)
    """Directory shards that have not answered, by the number of the question."""
    tokens: int = 0
    choice: Choice | None = None
    """Where it resumes, as last chosen."""
    limited: tuple[int, Reason] | None = None
    pending_restore: bool = False
    replies: dict[str, PartReply] = field(default_factory=dict)
    granted: dict[str, PartGranted] = field(default_factory=dict)
    plans: list[PartPlan] = field(default_factory=list)
    checked: set[str] = field(default_factory=set)
    heard: set[str] = field(default_factory=set)
    """Holders that answered at all: only of these is anything present."""
    hearing: bool = False
    """Whether those asked now owe a sign of life, and not the truth about objects."""
    moved: dict[int, int] = field(default_factory=dict)
    sources: set[str] = field(default_factory=set)
    refusal: Reason | None = None
    background: bool = False
    learned_at: int = -1
    turn: Turn | None = None
    """Its place in line to restore, while it stands there."""
    late: tuple[int, Reason] | None = None
    """Why tiers are left out of account: the group that would have come from one, and the reason."""
    restores: bool = False
    """Something of its state comes from a tier, here or at a peer."""
    charged: bool = False
    """Counted among its tenant's restores."""
    looking: bool = False
    """Only the answer is wanted: nothing is pinned, restored or moved."""
    timers: list[Wake] = field(default_factory=list)
    """Time-outs of the exchange under way."""

    @property
    def using(self) -> View:
        """What is known, under the rules by which this request resumes."""
        return self.view.replaying() if self.choice is not None and self.choice.replays else self.view

    @property
    def chosen(self) -> Resolution:
        """The position chosen; the longest that is known, before any was."""
        return self.view.found() if self.choice is None else self.choice.found

    @property
    def replays(self) -> bool:
        """Whether its reader is to compute windows and tails again."""
        return self.choice is not None and self.choice.replays

    def cancel_timers(self) -> None:
        """The exchange they wait for is over."""
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()

    @property
    def came_s(self) -> float:
        """When this request came; one that was parked keeps its age."""
        return self.started_s - self.request.age_s

    @property
    def due_s(self) -> float:
        """When its deadline is; infinite without one."""
        return float("inf") if self.request.deadline_s is None else self.started_s + self.request.deadline_s

    @property
    def wait_until_s(self) -> float:
        """Until when this request waits for room."""
        return self.started_s + (self.request.wait_s or 0.0)

    def revisions_at(self, tokens: int, found: Resolution) -> tuple[int | None, ...]:
        """The revision of each group at a position that is found, or a shorter one."""
        if tokens == found.tokens:
            return found.revisions
        using = self.using
        evidence = using.evidence(tiers=self.late is None)
        return resolve(using.model, evidence, self.request.prompt.n, limit_tokens=tokens).revisions

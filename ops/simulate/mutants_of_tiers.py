"""Mistakes with the tiers below: what the shared store has, what the scrubber reads, what the budget counts."""

from __future__ import annotations

from typing import Any

from ...fabric import flow
from ...fabric.disk_scrub import DiskScrubber
from ...fabric.effects import Effect, ExtentUploaded, WriteExtent
from ...fabric.flow import Flow
from ...fabric.kinds import Reason
from ...fabric.lifecycle import State
from ...fabric.lives import Lives
from ...fabric.objects import Obj
from ...fabric.remote_copies import RemoteCopies
from .patches import Patches


def upload_refused(patches: Patches) -> None:
    """An upload that was answered was done."""
    honest = vars(RemoteCopies)["uploaded"]
    patches.put(RemoteCopies, "uploaded", lambda copies, event: honest(copies, ExtentUploaded(event.extent)))


def upload_once(patches: Patches) -> None:
    """An upload that failed is not tried again."""
    honest = vars(RemoteCopies)["uploaded"]

    def uploaded(copies: RemoteCopies, event: ExtentUploaded) -> None:
        asked = set(vars(copies)["_asked"])
        honest(copies, event)
        if event.refused is not None:
            vars(copies)["_asked"].update(asked & {event.extent})

    patches.put(RemoteCopies, "uploaded", uploaded)


def scrub_once(patches: Patches) -> None:
    """One round is enough for a life."""
    honest = vars(DiskScrubber)["_choose"]

    def choose(scrubber: DiskScrubber) -> dict[int, Obj]:
        chosen: dict[int, Obj] = honest(scrubber)
        return {} if scrubber.found.rounds else chosen

    patches.put(DiskScrubber, "_choose", choose)


def scrub_keeps(patches: Patches) -> None:
    """A wrong copy of what is in memory as well is kept."""
    honest = vars(Lives)["wrong_on_disk"]

    def wrong(books: Lives, obj: Obj, reason: Reason) -> None:
        if obj.state is State.ON_TIER:
            honest(books, obj, reason)

    patches.put(Lives, "wrong_on_disk", wrong)


def budget_saved_up(patches: Patches) -> None:
    """What was not moved in a pause may be moved at once after it."""
    patches.put(flow, "BURST_S", 1e6)


def budget_of_reads(patches: Patches) -> None:
    """What is written out counts for nothing."""
    honest = vars(Flow)["_bytes_of"]

    def bytes_of(queue: Flow, effect: Effect) -> Any:
        return 0 if isinstance(effect, WriteExtent) else honest(queue, effect)

    patches.put(Flow, "_bytes_of", bytes_of)

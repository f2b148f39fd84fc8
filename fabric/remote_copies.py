"""The copies that a holder's extents have in the store that all nodes share (G4).

::

    written here --UploadExtent--> in the store too --room is needed--> DropLocal: restored from the store
    found in the store (another node wrote it) --> restored from there, never deleted from here

The store is one more place for the same extents under the same names; what it gives is judged by the same
digests. While it is away nothing else stops: uploads wait until it is back, restores that need it are refused.
"""

from __future__ import annotations

from .context import HolderContext
from .effects import ExtentUploaded, RemoteState, UploadExtent
from .extent_book import ExtentBook
from .kinds import Reason


class RemoteCopies:
    """What of a holder's extents is, or is to be, in the store."""

    def __init__(self, ctx: HolderContext, extents: ExtentBook) -> None:
        self.ctx = ctx
        self.extents = extents
        self.wanted = ctx.config.remote
        self.refused: Reason | None = Reason.DISK_UNAVAILABLE
        self._asked: set[int] = set()

    @property
    def uploading(self) -> int:
        """Extents on their way to the store."""
        return len(self._asked)

    def written(self, extent: int) -> None:
        """An extent stands on the local disk: copy it, if there is a store, and it works."""
        if self.wanted and self.refused is None and extent not in self._asked:
            self._asked.add(extent)
            self.ctx.do(UploadExtent(extent))

    def uploaded(self, event: ExtentUploaded) -> None:
        self._asked.discard(event.extent)
        if event.refused is None:
            self.extents.uploaded(event.extent)
            self.ctx.counters["extents_uploaded"] += 1
        else:
            self.ctx.counters["uploads_failed"] += 1

    def state(self, event: RemoteState) -> None:
        """The store failed, or is back: then what it lacks is copied."""
        self.refused = event.refused
        for extent in self.extents.not_remote():
            self.written(extent)

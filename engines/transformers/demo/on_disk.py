"""State on the writer's disk that is not yet restored, torn, or looked for in the slots it had before.

What lies on disk behind the base (:data:`~.story.BASE`) is written there by the holder, as a swap-out of a preempted
request would; the base is stored anew, in memory.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from ....actors.client import request_id
from ....fabric import wire
from ....fabric.kinds import ObjectKind
from ....fabric.messages import Objects as Run
from ....fabric.messages import SwapOut
from .records import Broken
from .story import BASE, CUTS, DISK_FAULTS, FAULT_RAGGED, STALE_PAGE_TABLE, TORN, other_prompt, salt_of, writer_prompt
from .writer import Writer

if TYPE_CHECKING:
    from ..capture import Objects
    from ..faults import Scene

DIGEST_BYTES = 32


class DiskWriter(Writer):
    """Ray actor: a :class:`Writer` whose state goes to disk as well."""

    @cached_property
    def _scene(self) -> Scene:
        from ..faults import Scene

        return Scene(self.model, self.geometry, writer_prompt(FAULT_RAGGED), FAULT_RAGGED, cuts=CUTS)

    def store_whole(self, name: str) -> None:
        """Publish complete state in the fault's namespace."""
        self._store(writer_prompt(FAULT_RAGGED), self._scene.exact, name)

    def swap_outs(self, name: str) -> tuple[bytes, bytes]:
        """Requests that write it to disk: all groups but the last, and the last."""
        units = dict(self.session.request(writer_prompt(FAULT_RAGGED), salt=salt_of(name)).prompt.keys)
        runs = []
        for number, group in enumerate(self.session.model.groups):
            digests = units[group.unit_tokens]
            runs.append(Run(number, 0, tuple(range(len(digests) // DIGEST_BYTES)), digests))
        return tuple(wire.encode(SwapOut(request_id(), tuple(part))) for part in (runs[:-1], runs[-1:]))  # type: ignore[return-value]

    def on_disk(self, name: str) -> Broken:
        """Store the base in memory again; what a cache keyed by tokens alone would resume from."""
        self._store(writer_prompt(BASE), self._base, name)
        last = self.session.model.groups[-1].name
        group = last if name == TORN else "all"
        objects = self._blind(name, last)
        words = DISK_FAULTS[name]
        return Broken(name, str(ObjectKind.DISK_PREFIX), group, words, FAULT_RAGGED, BASE, "", objects)

    def _blind(self, name: str, last: str) -> dict[str, dict[int, Any]]:
        exact = self._scene.exact
        if name == TORN:
            return {**exact, last: self._below_base(exact, last)}
        behind: Objects = {group: {} for group in exact}
        if name == STALE_PAGE_TABLE:
            from ..faults import Scene

            other = Scene(self.model, self.geometry, other_prompt(FAULT_RAGGED), FAULT_RAGGED, cuts=CUTS).exact
            behind = {group: self._behind_base(other, group) for group in exact}
        return {group: {**self._below_base(exact, group), **behind[group]} for group in exact}

    def repair_from_disk(self, name: str) -> None:
        """Publish complete state once more, in memory."""
        self.store_whole(name)

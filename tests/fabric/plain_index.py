"""The directory's index as plain dicts, a digest a key: what the compact one must always agree with."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfabric.fabric.bands import GONE
from kvfabric.fabric.kinds import INDEX_DIGEST_BYTES as KEY
from kvfabric.fabric.messages import EventRun, Lane

Copy = tuple[Lane, int]


@dataclass
class PlainIndex:
    table: dict[tuple[int, int, bytes], dict[str, Copy]] = field(default_factory=dict)
    evicted: set[tuple[int, bytes]] = field(default_factory=set)

    def apply(self, holder: str, runs: list[EventRun]) -> None:
        for run in runs:
            for place in range(len(run.digests) // KEY):
                self._one(holder, run, place)

    def _one(self, holder: str, run: EventRun, place: int) -> None:
        digest = run.digests[place * KEY : place * KEY + KEY]
        key = (run.lane.group, run.lane.shard, digest)
        if run.lane.state == GONE:
            holders = self.table.get(key, {})
            if holders.pop(holder, None) is not None and not holders and run.evicted:
                self.evicted.add((run.lane.group, digest))
            return
        version = int.from_bytes(run.versions[place * 8 : place * 8 + 8], "little")
        self.table.setdefault(key, {})[holder] = (run.lane, version)
        self.evicted.discard((run.lane.group, digest))

    def end_life(self, holder: str) -> None:
        for holders in self.table.values():
            holders.pop(holder, None)

    def lookup(self, groups: dict[int, list[bytes]], shards: int) -> dict[tuple[str, int, int], dict[int, Copy]]:
        found: dict[tuple[str, int, int], dict[int, Copy]] = {}
        for group, digests in groups.items():
            for shard in range(shards):
                for index, digest in enumerate(digests):
                    for holder, copy in self.table.get((group, shard, digest), {}).items():
                        found.setdefault((holder, group, shard), {})[index] = copy
        return found

    def gone(self, groups: dict[int, list[bytes]]) -> dict[int, set[int]]:
        found = {}
        for group, digests in groups.items():
            bits = {i for i, digest in enumerate(digests) if (group, digest) in self.evicted}
            if bits:
                found[group] = bits
        return found

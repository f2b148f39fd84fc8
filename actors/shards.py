"""How many directory shards a fabric has, and the way from one number to another.

Growing: the fresh shards start first, then everyone is told the map that names them. Shrinking: everyone is told the
map without the last shards, which go on for a while so that who asks by the old map is told where to ask.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ..fabric.messages import ShardMap

DIRECTORY_SHARDS_MAX = 64
RETIRE_S = 5.0
"""How long a shard that answers for nothing any more stays."""
_PREFIX = "directory:"


def is_directory(address: str) -> bool:
    """Whether an address is a directory shard's."""
    return address.startswith(_PREFIX)


def shard_names(count: int) -> tuple[str, ...]:
    """The addresses of so many shards."""
    return tuple(f"{_PREFIX}{number}" for number in range(count))


class DirectoryShards:
    """The map in force, the number wanted, and who stays a while after it was let go."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.map = ShardMap(0, shard_names(count))
        self._retiring: dict[str, float] = {}

    def wanted(self, now_s: float) -> Iterator[str]:
        """The shards that ought to run now."""
        yield from shard_names(max(self.count, len(self.map.shards)))
        for shard, until_s in list(self._retiring.items()):
            if until_s <= now_s or shard in self.map.shards:
                del self._retiring[shard]
            elif shard not in shard_names(max(self.count, len(self.map.shards))):
                yield shard

    def due(self, up: Collection[str]) -> bool:
        """Whether the number wanted and the map differ and every shard wanted is up."""
        names = shard_names(self.count)
        return names != self.map.shards and all(name in up for name in names)

    def next_map(self, epoch: int, now_s: float) -> ShardMap:
        """Put the number wanted in force under a fresh epoch."""
        before, self.map = self.map, ShardMap(epoch, shard_names(self.count))
        self._retiring.update({shard: now_s + RETIRE_S for shard in before.shards if shard not in self.map.shards})
        return self.map

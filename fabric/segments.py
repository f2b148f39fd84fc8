"""Segments: how a chain is cut for the directory, and which shard answers for which cut.

A segment is 256 consecutive objects of one chain, aligned to their index; its *anchor* is the index
digest of its first object, so all continuations that share that object share the segment. Shards
own segments by rendezvous hash of the anchor: a hot system prompt is spread over all shards, a
prompt asks each shard once, and when shards come or go only the segments that must move do.

Blocks of a model that is not ``chained`` are a segment each: wherever a prompt lists one, it is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash

from .kinds import INDEX_DIGEST_BYTES
from .messages import Lookup, Mark, Prompt, ShardMap, Strip
from .model import ModelSpec

SEGMENT_OBJECTS = 256
_WIDE = 32


class ChainPlace(NamedTuple):
    """Where an object lies in its chain: index digests of its segment's first object and of the object before it.

    ``parent`` is b"" for the first object of a segment.
    """

    anchor: bytes
    parent: bytes


def span_of(model: ModelSpec) -> int:
    """Objects a segment spans."""
    return SEGMENT_OBJECTS if model.chained else 1


def stands_at(model: ModelSpec, unit_tokens: int, keys: bytes, index: int) -> tuple[int, ChainPlace]:
    """Where object ``index`` of a prompt ends in its chain, in tokens, and its place there.

    ``keys``: the prompt's digests, 32 bytes each. A block named singly is a chain by itself.
    """
    if model.chained:
        return (index + 1) * unit_tokens, chain_place(keys, index)
    return unit_tokens, chain_place(keys[index * _WIDE : (index + 1) * _WIDE], 0)


def chain_place(keys: bytes, index: int) -> ChainPlace:
    """The place of object ``index`` of a prompt with digests ``keys`` (32 bytes each)."""
    start = index - index % SEGMENT_OBJECTS
    anchor = keys[start * _WIDE : start * _WIDE + INDEX_DIGEST_BYTES]
    before = (index - 1) * _WIDE
    return ChainPlace(anchor, b"" if index == start else keys[before : before + INDEX_DIGEST_BYTES])


def narrow(keys: bytes) -> bytes:
    """Index digests (16 bytes each) of digests of 32 bytes each."""
    wide = np.frombuffer(keys, dtype=np.uint64).reshape(-1, 4)
    return np.ascontiguousarray(wide[:, :2]).tobytes()


@dataclass(slots=True)
class Router:
    """Which shard owns which segment, under one epoch of the shard map. Raises ValueError for a map without shards."""

    map: ShardMap
    span: int = SEGMENT_OBJECTS
    """Objects a segment spans (:func:`span_of`)."""
    _seeds: list[int] = field(init=False)

    def __post_init__(self) -> None:
        if not self.map.shards:
            raise ValueError("shard map: there is no shard")
        self._seeds = [xxhash.xxh3_64_intdigest(shard.encode()) for shard in self.map.shards]

    @property
    def shards(self) -> tuple[str, ...]:
        return self.map.shards

    def update(self, told: ShardMap) -> bool:
        """Take a newer map; True where it is one."""
        if told.epoch <= self.map.epoch or not told.shards:
            return False
        self.map = told
        self.__post_init__()
        return True

    def owner(self, anchor: bytes) -> str:
        """The shard that answers for a segment."""
        seeds = self._seeds
        if len(seeds) == 1:
            return self.map.shards[0]
        draw = xxhash.xxh3_64_intdigest
        weights = [draw(anchor, seed) for seed in seeds]
        return self.map.shards[weights.index(max(weights))]

    def lookups(
        self, op: str, prompt: Prompt, marks: Iterable[Mark] = (), only: Sequence[tuple[int, int]] | None = None
    ) -> dict[str, Lookup]:
        """What to ask each shard of a prompt: its segments' index digests. ``only``: (unit, first index) of segments."""
        strips: dict[str, list[Strip]] = {}
        wanted = None if only is None else set(only)
        step = self.span * INDEX_DIGEST_BYTES
        for unit, wide in prompt.keys:
            keys = narrow(wide)
            for start in range(0, len(keys), step):
                first = start // INDEX_DIGEST_BYTES
                if wanted is not None and (unit, first) not in wanted:
                    continue
                part = keys[start : start + step]
                mine = strips.setdefault(self.owner(part[:INDEX_DIGEST_BYTES]), [])
                last = mine[-1] if mine else None
                if last is not None and last.unit == unit and last.first + last.count == first:
                    mine[-1] = Strip(unit, last.first, last.digests + part)
                else:
                    mine.append(Strip(unit, first, part))
        told = tuple(marks)
        return {shard: Lookup(op, self.map.epoch, tuple(cut), told) for shard, cut in strips.items()}

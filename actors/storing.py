"""A session's verbs that store: objects of a prompt, written in place, visible in one step."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ..fabric.growth import retired_by_growth
from ..fabric.identity import PromptKeys
from ..fabric.kinds import FabricError, Reason
from ..fabric.messages import Done, Mark, Objects, StoreBegin, StoreItem
from ..fabric.model import ModelSpec
from ..fabric.passport import Abi
from .approximate import Approximations
from .attempt import Attempt, Stored, bytes_of, copy_into
from .checkpoints import Checkpoints
from .client import HolderClient, HolderLost, request_id
from .holders import Holders
from .lookahead import Lookahead
from .prompts import Prompts

ObjectsByGroup = Mapping[str, Mapping[int, npt.NDArray[Any]]]

MARK_S = 5.0
"""How long a look-up insists on seeing this session's own write: later the directory knows it or was restarted."""


def _indices(wanted: Mapping[str, Iterable[int]]) -> dict[str, list[int]]:
    """Each group's indices, ascending. Raises FabricError for anything but whole numbers by group."""
    if not isinstance(wanted, Mapping):
        raise FabricError(f"objects: groups with their indices are expected, got {type(wanted).__name__}")
    found = {}
    for group, indices in wanted.items():
        try:
            found[group] = sorted({operator.index(index) for index in indices})
        except TypeError:
            raise FabricError(f"objects.{group}: whole numbers are expected as indices") from None
    return found


class Storing:
    """Methods of a session."""

    if TYPE_CHECKING:
        _lock: threading.Lock
        _holders: Holders
        _prompts: Prompts
        _abis: tuple[Abi, ...]
        _marks: dict[str, tuple[float, Mark]]
        _approximations: Approximations
        _checkpoints: Checkpoints
        _lookahead: Lookahead

        @property
        def model(self) -> ModelSpec: ...

    def publish(
        self,
        tokens: Any,
        objects: ObjectsByGroup,
        *,
        revision: int = 0,
        shard: int = 0,
        replace: bool = False,
        prompt_tokens: int | None = None,
        **key: Any,
    ) -> Stored:
        """Store objects of a prompt: group -> index -> array, ``block_bytes`` each (any dtype).

        Index i is the block that ends at (i + 1) * block_tokens, or the snapshot at (i + 1) *
        grid_tokens. What is there already in this revision is left alone unless ``replace``; windows,
        tails and snapshots that the fabric's ``checkpoint`` policy does not keep are left out
        (``prompt_tokens``: where the output begins). Raises FabricError for objects that do not fit the model.
        """
        wanted = _indices(objects)
        keys = self._prompts.keys(tokens, key)
        worth = self._checkpoints.kept(keys, wanted, prompt_tokens)
        return self._fill(self._begin(keys, worth, revision, shard, (), replace=replace), objects)

    def extend(
        self,
        tokens: Any,
        from_token: int,
        objects: ObjectsByGroup,
        *,
        revision: int = 0,
        shard: int = 0,
        prompt_tokens: int | None = None,
        **key: Any,
    ) -> Stored:
        """A request that held ``from_token`` tokens grew to all of them.

        Its new objects become visible and the window and tail blocks they outdate leave, in one step. What
        the fabric's ``checkpoint`` policy keeps for an earlier position stays.
        """
        keys = self._prompts.keys(tokens, key)
        offered = _indices(objects)
        if not 0 <= from_token <= len(keys):
            raise FabricError(f"from_token: {from_token} is not within the prompt's 0..{len(keys)}")
        wanted = self._checkpoints.kept(keys, offered, prompt_tokens)
        outdated = {self.model.groups[g].name: i for g, i in enumerate(retired_by_growth(self.model, len(keys)))}
        if not self._checkpoints.keeps_all:  # what is kept for another position than the end stays
            worth = self._checkpoints.kept(keys, outdated, prompt_tokens)
            outdated = {name: tuple(i for i in old if i not in worth[name]) for name, old in outdated.items()}
        retire = []
        for name, indices in outdated.items():
            fresh = set(wanted.get(name, ()))
            old = [i for i in indices if i not in fresh]
            if old:
                retire.append(self._prompts.objects(keys, self.model.index_of(name), shard, old))
        return self._fill(self._begin(keys, wanted, revision, shard, tuple(retire), replace=True), objects)

    def begin(
        self,
        tokens: Any,
        wanted: Mapping[str, Iterable[int]],
        *,
        revision: int = 0,
        shard: int = 0,
        replace: bool = False,
        prompt_tokens: int | None = None,
        **key: Any,
    ) -> Attempt | Stored:
        """Reserve slots for objects, all or nothing, to be written in place; or why there are none.

        What :meth:`publish` would leave out has no slot: ask the attempt (``(group, index) in attempt``).
        """
        keys = self._prompts.keys(tokens, key)
        offered = _indices(wanted)
        worth = self._checkpoints.kept(keys, offered, prompt_tokens)
        return self._begin(keys, worth, revision, shard, (), replace=replace)

    def checkpoints(self, tokens: Any, *, prompt_tokens: int | None = None, **key: Any) -> tuple[int, ...]:
        """At which positions, in tokens, an engine should capture windows, tails and recurrent state of a prompt.

        By the fabric's ``checkpoint`` policy and by where this session's requests parted from what is stored.
        """
        return self._checkpoints.positions(self._prompts.keys(tokens, key), prompt_tokens)

    def _begin(
        self,
        keys: PromptKeys,
        wanted: Mapping[str, Sequence[int]],
        revision: int,
        shard: int,
        retire: tuple[Objects, ...],
        *,
        replace: bool,
    ) -> Attempt | Stored:
        self._approximations.check(keys)
        items = []
        for name, indices in wanted.items():
            group = self._prompts.group(name)
            spec = self.model.groups[group]
            limit = len(keys) // spec.unit_tokens
            if indices and not (indices[0] >= 0 and indices[-1] < limit):
                raise FabricError(f"objects.{name}: index {indices[-1]} lies outside the prompt's {limit} objects")
            abi = self._abis[group]
            items.append(StoreItem(self._prompts.objects(keys, group, shard, indices), revision, spec.block_bytes, abi))
        message = StoreBegin(request_id(), keys.prompt, tuple(items), retire, replace)

        def ask() -> Attempt | Stored:
            client = self._holders.client(self._holders.of_shard(shard))
            begun, writer = client.begin(message)
            if begun.refused is not None:
                return Stored(begun.refused, begun.group)
            return Attempt(self.model, client, begun, writer, partial(self._wrote, keys, client))

        try:
            return self._holders.again(ask)
        except HolderLost:
            return Stored(Reason.HOLDER_LOST)

    def _fill(self, begun: Attempt | Stored, objects: ObjectsByGroup) -> Stored:
        if isinstance(begun, Stored):
            return begun
        wanted = ((group, index, views[index]) for group, views in objects.items() for index in views)
        given = [entry for entry in wanted if entry[:2] in begun]
        try:
            if begun.on_gpu:  # as arrays or as tensors of any device
                for group, index, array in given:
                    copy_into(begun.view(group, index), array, f"objects.{group}[{index}]")
                return begun.commit()
            size = {group: self.model.group(group).block_bytes for group in objects}
            rows = [(g, i, [bytes_of(array, size[g], f"objects.{g}[{i}]")]) for g, i, array in given]
        except FabricError:
            begun.abort()
            raise
        return begun.store(rows)

    def _wrote(self, keys: PromptKeys, client: HolderClient, done: Done) -> None:
        """Remember what this session stored: its next look-ups see it, and no old answer hides it."""
        self._lookahead.wrote(keys.prompt)
        with self._lock:
            self._marks.pop(client.member.address, None)
            mark = Mark(client.member.address, client.member.incarnation, done.mark)
            self._marks[client.member.address] = (time.monotonic() + MARK_S, mark)

    def _fresh_marks(self) -> tuple[Mark, ...]:
        """Where the directory must have got for this session to see its own writes; none once they are old."""
        if not self._marks:
            return ()
        now = time.monotonic()
        with self._lock:
            self._marks = {a: kept for a, kept in self._marks.items() if now < kept[0]}
            return tuple(mark for _, mark in self._marks.values())

"""A session's checkpoints: what of a prompt is worth publishing, by the fabric's policy and what was asked here."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from ..fabric.checkpoints import BranchBook, published, trail_of
from ..fabric.identity import PromptKeys
from ..fabric.model import ModelSpec
from ..policies.checkpoint import KeepAll, checkpoint_policy


class Checkpoints:
    """Thread-safe. Requests tell where they parted from what is stored; stores ask what to keep."""

    def __init__(self, model: ModelSpec, policy: str) -> None:
        self._model = model
        self._policy = checkpoint_policy(policy)
        self._branches = BranchBook(model.grid_tokens)
        self._lock = threading.Lock()

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever left out."""
        return isinstance(self._policy, KeepAll)

    def heard(self, keys: PromptKeys, hash_tokens: int) -> None:
        """A request matched what is stored up to there."""
        if not self.keeps_all:
            with self._lock:
                self._branches.asked(keys.keys(self._model.grid_tokens), hash_tokens)

    def positions(self, keys: PromptKeys, prompt_tokens: int | None) -> tuple[int, ...]:
        """Where the policy wants windows, tails and snapshots of this prompt, ascending."""
        with self._lock:
            branches = self._branches.along(keys.keys(self._model.grid_tokens))
        trail = trail_of(self._model, len(keys), prompt_tokens, branches)
        return tuple(sorted(self._policy.positions(trail)))

    def kept(
        self, keys: PromptKeys, wanted: Mapping[str, Sequence[int]], prompt_tokens: int | None
    ) -> dict[str, list[int]]:
        """Of the objects that a store offers, by group, those worth publishing."""
        if self.keeps_all:
            return {group: list(indices) for group, indices in wanted.items()}
        worth = published(self._model, self.positions(keys, prompt_tokens), len(keys))
        places = {group.name: at for at, group in enumerate(self._model.groups)}
        return {
            name: [i for i in indices if name not in places or i in worth[places[name]]]
            for name, indices in wanted.items()
        }

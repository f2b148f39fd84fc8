"""What each group lost for want of room: tokens that would have been hits with more memory for it.

Of two kinds, which never count the same tokens twice:

* history that made room and came again, computed or fetched anew: its prompt's hash did not even match;
* an answer cut short by another group, where the objects that would have served farther had made room lately.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from .messages import Prompt
from .model import ModelSpec
from .objects import DIGEST_BYTES


class Losses:
    """Counts for whoever shares memory out; follows nothing until it is asked to."""

    def __init__(self, model: ModelSpec, prefix: Sequence[bool]) -> None:
        """``prefix``: by group, whether a resume needs all objects up to its position."""
        self._model = model
        self._prefix = tuple(prefix)
        self._tokens: Counter[int] = Counter()
        self._size_max = 0
        self._left: OrderedDict[tuple[int, bytes], None] = OrderedDict()

    def follow(self, size_max: int) -> None:
        """Count from here on, and remember so much of what leaves."""
        self._size_max = size_max

    @property
    def follows(self) -> bool:
        """Whether anybody asked for it."""
        return self._size_max > 0

    def left(self, group: int, digest: bytes) -> None:
        """An object made room."""
        if self._size_max:
            self._left[group, digest] = None
            if len(self._left) > self._size_max:
                self._left.popitem(last=False)

    def came(self, group: int, digests: Sequence[bytes]) -> None:
        """These objects were stored, fetched or restored: those that made room lately did so too early."""
        if self._left:
            again = sum(self._left.pop((group, digest), 0) is None for digest in digests)
            if self._prefix[group]:
                self._tokens[group] += again * self._model.groups[group].unit_tokens

    def cut(self, name: str, prompt: Prompt, promised: int, granted: int) -> None:
        """An answer was cut by the group of that name: what was lost with what made room there lately."""
        group = next(g for g, spec in enumerate(self._model.groups) if spec.name == name)
        if not self._left or self._prefix[group]:
            return
        unit = self._model.groups[group].unit_tokens
        keys = dict(prompt.keys).get(unit, b"")
        for end in range(min(promised // unit, len(keys) // DIGEST_BYTES), granted // unit, -1):
            if (group, keys[(end - 1) * DIGEST_BYTES : end * DIGEST_BYTES]) in self._left:
                self._tokens[group] += end * unit - granted
                return

    def short(self, group: int, tokens: int) -> None:
        """A store or a lease of so many tokens was refused for want of room in that group."""
        if self._size_max:
            self._tokens[group] += tokens

    def relieved(self, group: int) -> None:
        """The group got more memory: what made room there before that tells nothing of what it lacks from here on."""
        for entry in [entry for entry in self._left if entry[0] == group]:
            del self._left[entry]

    def taken(self) -> Counter[int]:
        """Tokens by group since the last call."""
        taken, self._tokens = self._tokens, Counter()
        return taken

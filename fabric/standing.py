"""Proofs that still stand: a prompt that was granted whole from memory is granted again by its proof.

Hot prompts come again and again while nothing of theirs changes. Then the answer is the one that was
given, and its proof says whether it still holds: :meth:`~kvfabric.fabric.validation.Proof.stands`
looks at every slot. Whatever differs, in the request or in a slot, takes the whole path.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from .books import Books
from .messages import Acquire, Prompt
from .passport import Abi
from .validation import Proof

PROOFS_MAX = 1024
SLOTS_MAX = 1 << 17
"""Of all proofs kept together: each takes about a hundred bytes a slot."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What was granted for a prompt to readers of these ABIs, all of it on this holder and in memory."""

    prompt: Prompt
    abis: tuple[Abi, ...]
    readers: tuple[str, ...]
    proof: Proof
    tokens_lost_to_alignment: int


class StandingProofs:
    """The last proofs of whole hits, least recently used first to go."""

    def __init__(self, proofs_max: int = PROOFS_MAX, slots_max: int = SLOTS_MAX) -> None:
        self._proofs_max = proofs_max
        self._slots_max = slots_max
        self._slots = 0
        self._kept: OrderedDict[bytes, Standing] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, request: Acquire, proof: Proof, tokens_lost_to_alignment: int = 0) -> Standing:
        """Keep what was granted; nothing that alone is larger than all there may be."""
        standing = Standing(request.prompt, request.abis, request.readers, proof, tokens_lost_to_alignment)
        key = _key(request.prompt)
        self._drop(key)
        if len(proof.claim.slots) > self._slots_max:
            return standing
        self._kept[key] = standing
        self._slots += len(proof.claim.slots)
        while len(self._kept) > self._proofs_max or self._slots > self._slots_max:
            self._drop(next(iter(self._kept)))
        return standing

    def find(self, request: Acquire, books: Books) -> Standing | None:
        """What was granted for the same prompt to the same readers, if its proof still stands."""
        key = _key(request.prompt)
        standing = self._kept.get(key)
        if standing is None or standing.prompt != request.prompt or standing.abis != request.abis:
            return None
        if standing.readers != request.readers:
            return None
        if not standing.proof.stands(books):
            self._drop(key)
            return None
        self._kept.move_to_end(key)
        return standing

    def _drop(self, key: bytes) -> None:
        dropped = self._kept.pop(key, None)
        if dropped is not None:
            self._slots -= len(dropped.proof.claim.slots)


def _key(prompt: Prompt) -> bytes:
    """The last digests of a prompt: they bear all that comes before, the namespace included."""
    return b"".join([prompt.n.to_bytes(8, "little"), *(blob[-32:] for _, blob in prompt.keys)])

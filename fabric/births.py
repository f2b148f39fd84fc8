"""Objects of a prompt as they come into being: what is known of each before it has bytes or a slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .kinds import INDEX_DIGEST_BYTES
from .messages import Prompt
from .model import ModelSpec
from .objects import Obj
from .passport import Abi
from .room import Structure
from .segments import SEGMENT_OBJECTS, ChainPlace, stands_at


class Births:
    """Makes ABSENT objects of one prompt."""

    def __init__(self, model: ModelSpec, structure: Structure, prompt: Prompt) -> None:
        self._model = model
        self._structure = structure
        self._prompt = prompt
        self._units = dict(prompt.keys)

    def of(  # noqa: PLR0917 - one place, all of one run
        self,
        group: int,
        shard: int,
        indices: Sequence[int],
        digests: Sequence[bytes],
        revision: int,
        length: int,
        abi: Abi,
    ) -> Iterator[Obj]:
        """One object for each index of the group's, with its digest. ``length``: of its payload, in bytes."""
        prompt, units = self._prompt, self._units
        spec = self._model.groups[group]
        kind, unit = spec.kind, spec.unit_tokens
        keys, rests_on = units[unit], self._structure.rests_on
        namespace, weights, tenant = prompt.namespace, prompt.weights, prompt.tenant
        chained, rests = self._model.chained, self._structure.prefix[group]
        homeless = self._structure.home_group in (None, group)
        before, anchor, last = b"", b"", -2
        for index, digest in zip(indices, digests, strict=True):
            if index == last + 1 and chained and homeless and index % SEGMENT_OBJECTS:
                # What follows the one before needs nothing cut anew.
                position, place = (index + 1) * unit, ChainPlace(anchor, before[:INDEX_DIGEST_BYTES])
                base, home = before if rests else b"", b""
            else:
                base, home = rests_on(group, index, units)
                position, place = stands_at(self._model, unit, keys, index)
            before, anchor, last = digest, place.anchor, index
            yield Obj(
                kind,
                group,
                shard,
                digest,
                position,
                namespace,
                weights,
                tenant,
                revision,
                length,
                abi,
                place=place,
                base=base,
                home=home,
            )

"""The writer on node A: prefills and publishes, then publishes state that is broken in one way."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import EngineError
from .records import Broken
from .story import ALIGNED, BASE, CUTS, FAULT_RAGGED, FAULTS_AT, RAGGED, salt_of, warm_up_prompt, writer_prompt
from .worker import Worker

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

    from ..capture import Objects
    from ..faults import Fault, Scene


class Writer(Worker):
    """Ray actor; see :class:`Worker`."""

    def publish_warm_up(self) -> None:
        """Publish a prompt of no interest, for a first transfer that nobody times."""
        from ..adapter import publish
        from ..generate import generate

        tokens = warm_up_prompt()
        run = generate(self.model, tokens, cuts=CUTS, decode_tokens=1)
        stored = publish(self.session, self.model, self.geometry, run.cache, tokens, len(tokens))
        if not stored.ok:
            raise EngineError(f"warm-up: the fabric refused to store, {stored.refused} {stored.group}".strip())

    def publish(self) -> None:
        """Prefill the prompt and publish what the cache holds at ALIGNED and RAGGED tokens.

        Raises EngineError if the fabric refuses to store.
        """
        from ..adapter import publish
        from ..generate import generate

        tokens = writer_prompt()
        published = 0

        def store(position: int, cache: Cache) -> None:
            nonlocal published
            if position in (ALIGNED, RAGGED):
                stored = publish(self.session, self.model, self.geometry, cache, tokens, position, from_token=published)
                if not stored.ok:
                    raise EngineError(f"publish at {position} tokens: refused, {stored.refused} {stored.group}".strip())
                published = position

        generate(self.model, tokens, cuts=CUTS, decode_tokens=1, after_chunk=store)

    # --- faults --------------------------------------------------------------------------------

    def fault_names(self) -> list[str]:
        """The shown faults that this model can have, in model order of their groups' kinds."""
        return list(self._faults)

    @cached_property
    def _faults(self) -> dict[str, tuple[Scene, Fault]]:
        from ..faults import Scene, faults

        tokens = writer_prompt(FAULT_RAGGED)
        found: dict[str, tuple[Scene, Fault]] = {}
        for position in sorted(set(FAULTS_AT.values()), reverse=True):
            scene = Scene(self.model, self.geometry, tokens, position, cuts=CUTS)
            found |= {f.name: (scene, f) for f in faults(scene) if FAULTS_AT.get(f.name) == position}
        return {name: found[name] for name in FAULTS_AT if name in found}

    @cached_property
    def _base(self) -> Objects:
        """What the cache holds at BASE tokens."""
        from ..faults import Scene

        return Scene(self.model, self.geometry, writer_prompt(BASE), BASE, cuts=CUTS).exact

    def break_state(self, name: str) -> Broken:
        """Publish complete state at BASE tokens and, behind it, state broken as the fault says.

        The base goes last: a reader who finds it finds all that came before.
        """
        from ..weights import weights_revision

        scene, fault = self._faults[name]
        weights = weights_revision(scene.other_model) if fault.meets == "other_weights" else ""
        self._publish_broken(scene, fault, weights)
        self._store(writer_prompt(BASE), self._base, name)
        blind = {**scene.exact, fault.group: self._spliced(scene, fault)}
        return Broken(name, str(fault.kind), fault.group, fault.words, scene.position, BASE, weights, blind)

    def repair(self, name: str) -> None:
        """Publish in the fault's namespace all that a resume at its position needs."""
        scene, _ = self._faults[name]
        self._store(writer_prompt(scene.position), scene.exact, name)

    def _publish_broken(self, scene: Scene, fault: Fault, weights: str) -> None:
        from ..adapter import connect
        from ..faults import Meets, foreign_passport
        from ..passport import passports

        tokens = writer_prompt(scene.position)
        own = {**scene.exact, fault.group: self._below_base(scene.exact, fault.group)}
        if fault.meets is Meets.ABSENT:
            own[fault.group] = self._spliced(scene, fault)
        elif fault.meets is Meets.OTHER_POSITION:
            own = scene.published(fault)
        self._store(tokens, own, fault.name)
        if fault.meets not in (Meets.OTHER_WEIGHTS, Meets.OTHER_LAYOUT):
            return
        passport = passports(self.config, self.geometry)
        if fault.meets is Meets.OTHER_LAYOUT:
            passport[fault.group] = foreign_passport(passport[fault.group], fault)
        with connect(self.model, self.geometry, weights=weights or self.weights, passport=passport) as session:
            foreign = {fault.group: self._behind_base(fault.objects, fault.group)}
            stored = session.publish(tokens, foreign, salt=salt_of(fault.name))
        if not stored.ok:
            raise EngineError(f"{fault.name}: the fabric refused to store, {stored.refused} {stored.group}".strip())

    def _store(self, tokens: list[int], objects: Objects, fault: str) -> None:
        stored = self.session.publish(tokens, objects, salt=salt_of(fault))
        if not stored.ok:
            raise EngineError(f"{fault}: the fabric refused to store, {stored.refused} {stored.group}".strip())

    def _spliced(self, scene: Scene, fault: Fault) -> dict[int, Any]:
        return {**self._below_base(scene.exact, fault.group), **self._behind_base(fault.objects, fault.group)}

    def _below_base(self, objects: Objects, name: str) -> dict[int, Any]:
        """The blocks that a resume at BASE needs; of snapshots none."""
        return {i: array for i, array in objects[name].items() if self._ends(name, i) <= BASE}

    def _behind_base(self, objects: Objects, name: str) -> dict[int, Any]:
        return {i: array for i, array in objects[name].items() if self._ends(name, i) > BASE}

    def _ends(self, name: str, index: int) -> int:
        return (index + 1) * self.geometry.group(name).spec.unit_tokens

"""A story told verb by verb from a test, on the pure world."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from kvfabric.fabric import invariants
from kvfabric.fabric.model import ModelSpec
from kvfabric.ops.scenario.pure import PureWorld
from kvfabric.ops.scenario.story import VERBS, Node, Step, Story
from kvfabric.ops.scenario.verbs import Verbs

LIMIT_S = 10_000.0


class Watched(PureWorld):
    """The pure world, with every holder's invariants judged after every step."""

    def run(self, work: Sequence[Coroutine[Any, Any, Any]], limit_s: float) -> list[Any]:
        results = super().run(work, limit_s)
        for holder, life in self._lives.items():
            found = invariants.check(life.core)
            assert not found, (holder, found)
        return results


class Stage:
    """One model's nodes, and the verbs to say to them."""

    def __init__(self, model: dict[str, Any], nodes: dict[str, dict[str, int]], *, slots: int = 256) -> None:
        spec = ModelSpec.load(model)
        room = {group.name: slots for group in spec.groups}
        self.story = Story("test", "test", None, spec, {n: Node(capacity={**room, **c}) for n, c in nodes.items()}, ())
        self.world = Watched(self.story)
        self.verbs = Verbs(self.story, self.world)

    def step(self, verb: str, args: dict[str, Any]) -> Step:
        """One step with the arguments of the format (``name`` for ``as``)."""
        record = VERBS[verb].model_validate({("as" if k == "name" else k): v for k, v in args.items()})
        tokens = getattr(record, "tokens", 0) or 0
        self.verbs.tokens_max = max(self.verbs.tokens_max, tokens if isinstance(tokens, int) else tokens[1])
        return Step(verb, record, None, (), 1)

    def do(self, verb: str, **args: Any) -> dict[str, Any]:
        """Perform one verb; its answer."""
        (got,) = self.together((verb, args))
        return got

    def together(self, *told: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
        """Perform verbs all at once; their answers."""
        return self.world.run([self.verbs.perform(self.step(verb, args)) for verb, args in told], LIMIT_S)

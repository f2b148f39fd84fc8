"""From what holders remember of one chain to a scenario file (docs/scenarios.md).

Tokens are not remembered and not needed: the chain is prompt ``P``, what leaves it is a branch of it.
Steps stand in the order of the holders' wall clocks; waits between them become ``advance``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from ...fabric.kinds import Form
from ...fabric.model import ModelSpec
from ...fabric.specs import dump_spec

GAP_S = 0.05
CHAIN = "P"


def scenario(model: ModelSpec, histories: Mapping[str, list[dict[str, Any]]], title: str) -> dict[str, Any]:
    """The scenario as plain data; ``histories``: by node, newest clocks apart by ``ago_s`` only."""
    names = {node: f"n{number}" for number, node in enumerate(sorted(histories))}
    events = sorted(
        (
            (-told["ago_s"], order, names[node], told)
            for node in sorted(histories)
            for order, told in enumerate(histories[node])
        ),
        key=lambda event: event[:2],
    )
    writer = _Writer(model)
    before: float | None = None
    for at_s, _, node, told in events:
        if before is not None and at_s - before > GAP_S:
            writer.steps.append({"advance": {"seconds": round(at_s - before, 3)}})
        before = at_s
        writer.write(node, told)
    return {
        "scenario": title,
        "model": yaml.safe_load(dump_spec(model)),
        "nodes": {name: {} for name in names.values()},
        "steps": writer.steps,
    }


class _Writer:
    """Steps of a story, one event after the other."""

    def __init__(self, model: ModelSpec) -> None:
        self.model = model
        self.steps: list[dict[str, Any]] = []
        self._held: set[tuple[str, int]] = set()

    def write(self, node: str, told: Mapping[str, Any]) -> None:
        match told["what"]:
            case "acquire":
                self._acquire(node, told)
            case "released":
                if (node, told["lease"]) in self._held:
                    self.steps.append({"release": {"lease": _lease(node, told["lease"])}})
            case "stored":
                self._stored(node, told["objects"])
            case "dropped":
                self._dropped(node, told["objects"])
            case "demoted":
                groups = {self._name(g): self._chosen(g, at) for g, _, _, at in told["objects"]}
                self.steps.append({"swap_out": {"at": node, "prompt": CHAIN, "groups": groups}})

    def _acquire(self, node: str, told: Mapping[str, Any]) -> None:
        prompt: Any = CHAIN
        if told["shared"] is not None:
            prompt = {"like": CHAIN, "share": told["shared"], "then": f"Q{told['branch']}"}
        step: dict[str, Any] = {"at": node, "prompt": prompt, "tokens": told["tokens"]}
        if told["wait_s"] is not None:
            step["wait_s"] = told["wait_s"]
        if told["min_tokens"]:
            step["min_tokens"] = told["min_tokens"]
        if told["graph"]:
            step["graph"] = True
        if told["lease"]:
            step |= {"as": _lease(node, told["lease"]), "lease_s": told["lease_s"]}
            self._held.add((node, told["lease"]))
        expect = {"status": told["status"], "tokens": told["granted"], "hash_tokens": told["hash_tokens"]}
        if told["cause"]:
            expect["cause"] = {key: str(told["cause"][key]) for key in ("group", "kind", "reason")}
        self.steps.append({"acquire": step, "expect": expect})

    def _stored(self, node: str, objects: list[Any]) -> None:
        """One step for each shard: what a holder got in one commit."""
        for shard in sorted({shard for _, shard, _, _ in objects}):
            groups: dict[str, Any] = {}
            tokens = 0
            for group, of, revision, at in objects:
                if of == shard:
                    groups[self._name(group)] = self._chosen(group, at) | ({"revision": revision} if revision else {})
                    tokens = max(tokens, (max(at) + 1) * self.model.groups[group].unit_tokens)
            step: dict[str, Any] = {"at": node, "prompt": CHAIN, "tokens": tokens, "groups": groups}
            if self.model.shards > 1:
                step["shards"] = [shard]
            self.steps.append({"store": step})

    def _dropped(self, node: str, objects: list[Any]) -> None:
        for group, _, _, at in objects:
            step = {"at": node, "prompt": CHAIN, "group": self._name(group), **self._chosen(group, at)}
            self.steps.append({"drop": step})

    def _name(self, group: int) -> str:
        return self.model.groups[group].name

    def _chosen(self, group: int, indices: list[int]) -> dict[str, Any]:
        spec = self.model.groups[group]
        if spec.form is Form.STATE:
            return {"positions": [(index + 1) * spec.unit_tokens for index in indices]}
        return {"blocks": list(indices)}


def _lease(node: str, lease: int) -> str:
    return f"L{lease}-{node}"


def dumped(story: Mapping[str, Any]) -> str:
    """The file's text: one step a line, where it fits."""
    lines = [f"scenario: {yaml.safe_dump(story['scenario']).splitlines()[0]}"]
    lines.append("model: " + _flow(story["model"]))
    lines.append("nodes: " + _flow(story["nodes"]))
    lines.append("steps:" if story["steps"] else "steps: []")
    lines += [f"  - {_flow(step)}" for step in story["steps"]]
    return "\n".join(lines) + "\n"


def _flow(data: Any) -> str:
    return yaml.safe_dump(data, default_flow_style=True, sort_keys=False, width=1 << 20).strip()

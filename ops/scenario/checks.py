"""From a file to a checked story; everything wrong with it is told at once, with file, line and field."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...fabric.kinds import Form, SpecError
from ...fabric.model import GroupSpec, ModelSpec
from .source import InvalidFile, Path_, Problem, Source, read_source
from .story import (
    DIRECTORY,
    PARALLEL,
    VERBS,
    Acquire,
    Attempt,
    Begin,
    Between,
    Line,
    Member,
    Node,
    OneObject,
    Read,
    Record,
    Release,
    Renew,
    Selected,
    SetAbi,
    Step,
    Store,
    Story,
    Swap,
    expected_of,
)
from .world import layout_of, slots_needed

PROBLEMS_MAX = 50
STEPS_MAX = 10_000


class _Head(Record):
    """The file's top: what is not judged here is judged field by field."""

    scenario: Line
    source: Line | None = None
    model: dict[str, Any]
    nodes: dict[str, Node | None]
    steps: list[Any]


def load_story(path: Path) -> Story:
    """Read and check one file. Raises InvalidFile with every problem found."""
    return _Checker(read_source(path)).story()


class _Checker:
    """Collects the problems of one file on the way to its story."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.problems: list[Problem] = []

    def problem(self, path: Path_, reason: str) -> None:
        self.problems.append(self.source.problem(path, reason))

    def story(self) -> Story:
        head = self._record(_Head, self.source.data, ())
        if head is None:
            raise InvalidFile(self.problems[:PROBLEMS_MAX])
        model = self._model(head.model)
        nodes = {name: node or Node() for name, node in head.nodes.items()}
        steps = tuple(self._steps(head.steps, ("steps",), nested=False))
        if not nodes:
            self.problem(("nodes",), "at least one node is expected")
        if model is not None:
            _References(self, model, nodes).judge(steps)
        if self.problems or model is None:
            raise InvalidFile(self.problems[:PROBLEMS_MAX])
        story = Story(self.source.file, head.scenario, head.source, model, nodes, steps)
        self._memory(story)
        if self.problems:
            raise InvalidFile(self.problems[:PROBLEMS_MAX])
        return story

    def _record(self, record: type[Record], data: Any, path: Path_) -> Any:
        """A record from plain data; None after noting what is wrong."""
        try:
            return record.model_validate(data)
        except ValidationError as error:
            for one in error.errors(include_url=False, include_context=False, include_input=False):
                where: Path_ = (*path, *(part for part in one["loc"] if not _is_tag(part)))
                self.problem(where, _reason(one["type"], one["msg"]))
            return None

    def _memory(self, story: Story) -> None:
        """Whether there is enough on each node to be shared in slabs."""
        slots = slots_needed(story)
        for name, node in story.nodes.items():
            of_node = {group.name: slots[name, group.name] for group in story.model.groups}
            try:
                layout_of(story.model, (0,), of_node, node)
            except SpecError as error:
                self.problem(("nodes", name, "capacity"), str(error))

    def _model(self, data: dict[str, Any]) -> ModelSpec | None:
        weights = data.get("weights")
        if isinstance(weights, int | float) and not isinstance(weights, bool):
            data = {**data, "weights": str(weights)}
        try:
            return ModelSpec.load(data, where="model")
        except SpecError as error:
            path, reason = _model_field(str(error), data)
            self.problem(path, reason)
            return None

    def _steps(self, data: list[Any], path: Path_, *, nested: bool) -> Iterator[Step]:
        if len(data) > STEPS_MAX:
            self.problem(path, f"at most {STEPS_MAX} steps are expected")
            return
        for number, item in enumerate(data):
            step = self._step(item, (*path, number), nested=nested)
            if step is not None:
                yield step

    def _step(self, item: Any, path: Path_, *, nested: bool) -> Step | None:
        verbs = [key for key in item if key != "expect"] if isinstance(item, dict) else []
        if len(verbs) != 1:
            self.problem(path, "a step is one verb with its arguments, and optionally expect")
            return None
        verb, line = verbs[0], self.source.line((*path, verbs[0]))
        if verb == PARALLEL and not nested:
            if "expect" in item:
                self.problem((*path, "expect"), "belongs to the steps inside parallel")
            if not isinstance(item[verb], list) or not item[verb]:
                self.problem((*path, verb), "a list of steps is expected")
                return None
            inner = tuple(self._steps(item[verb], (*path, verb), nested=True))
            return Step(verb, None, None, path, line, inner)
        if verb not in VERBS:
            known = ", ".join(VERBS) + ("" if nested else f", {PARALLEL}")
            self.problem((*path, verb), f"unknown verb, known are {known}")
            return None
        args = self._record(VERBS[verb], item[verb], (*path, verb))
        expect = item.get("expect")
        if "expect" in item:
            self._record(expected_of(verb), expect, (*path, "expect"))
        return None if args is None else Step(verb, args, expect, path, line)


def _is_tag(part: str | int) -> bool:
    """Whether a part of pydantic's location is the way a union was read, not a field of the file."""
    return isinstance(part, str) and part.startswith("<")


def _reason(kind: str, message: str) -> str:
    match kind:
        case "extra_forbidden":
            return "unknown field"
        case "missing":
            return "is missing"
        case "model_type":
            return "a mapping is expected"
        case _:
            return message.removeprefix("Value error, ")


_FIELD = re.compile(r"[a-z_]+(\.[\w-]+)*(, [a-z_]+(\.[\w-]+)*)*")
"""What stands before a colon in a spec's error, if it names fields."""


def _model_field(message: str, data: dict[str, Any]) -> tuple[Path_, str]:
    """``model.groups.1: of: reason`` or ``model: groups.kv.of: reason`` as a path into the file, and the reason."""
    named: list[str] = []
    while True:
        field, colon, rest = message.partition(": ")
        if not colon or not _FIELD.fullmatch(field):
            break
        named += field.split(",", maxsplit=1)[0].split(".")
        message = rest
    path: list[str | int] = []
    for part in named:
        if path[-1:] == ["groups"]:
            groups = data.get("groups")
            names = [g.get("name") if isinstance(g, dict) else None for g in groups] if isinstance(groups, list) else []
            path.append(int(part) if part.isdigit() else names.index(part) if part in names else part)
        else:
            path.append(part)
    return tuple(path), message


class _References:
    """Judges what a step refers to: nodes, groups, objects, leases, attempts, shards."""

    def __init__(self, checker: _Checker, model: ModelSpec, nodes: dict[str, Node]) -> None:
        self.checker = checker
        self.model = model
        self.nodes = nodes
        self.leases: set[str] = set()
        self.attempts: set[str] = set()
        for name, node in nodes.items():
            if name == DIRECTORY:
                checker.problem(("nodes", name), "this name means the directory")
            for group in node.capacity:
                self._group(group, ("nodes", name, "capacity", group))
            for group in node.host_memory:
                self._group(group, ("nodes", name, "host_memory", group))
            if 0 < len(node.host_memory) < len(model.groups):
                checker.problem(("nodes", name, "host_memory"), "either all groups have slots there or none")
        if len({tuple(sorted(node.host_memory.items())) for node in nodes.values()}) > 1:
            checker.problem(("nodes",), "host_memory: the nodes of one story have equally much of it")
        if len({node.slabs for node in nodes.values()}) > 1:
            checker.problem(("nodes",), "slabs: all nodes of one story share their memory in slabs, or none does")

    def judge(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            together = step.steps or (step,)
            for one in together:
                self._define(one.args)
            for one in together:
                self._step(one)

    def _define(self, args: Record | None) -> None:
        if isinstance(args, Acquire) and args.name is not None:
            self.leases.add(args.name)
        if isinstance(args, Begin):
            self.attempts.add(args.name)

    def _step(self, step: Step) -> None:
        path: Path_ = (*step.path, step.verb)
        args = step.args
        problem = self.checker.problem
        at = getattr(args, "at", None)
        if at is not None and at not in self.nodes:
            problem((*path, "at"), f"there is no node {at!r}")
        match args:
            case Store():
                self._store(args, path)
            case Swap():
                self._swap(args, path)
            case Attempt() if args.name not in self.attempts:
                problem((*path, "as"), f"no begin before this one is named {args.name!r}")
            case Read() | Renew() | Release() if args.lease not in self.leases:
                problem((*path, "lease"), f"no acquire before this one is named {args.lease!r}")
            case Member() if args.node not in self.nodes and args.node != DIRECTORY:
                problem((*path, "node"), f"there is no node {args.node!r}")
            case Between():
                self._between(args, path)
            case SetAbi():
                self._group(args.group, (*path, "group"))
        if isinstance(args, Read) and args.group is not None:
            self._group(args.group, (*path, "group"))
        if isinstance(args, OneObject) and getattr(args, "group", None) is not None:
            self._one_object(args, path)
        if isinstance(args, Selected):
            group = self._group(getattr(args, "group", ""), (*path, "group"))
            if group is not None:
                self._selected(group, args, path)
        cause = (step.expect or {}).get("cause") if isinstance(step.expect, dict) else None
        if isinstance(cause, dict) and isinstance(cause.get("group"), str):
            self._group(cause["group"], (*step.path, "expect", "cause", "group"))
        for place, name in enumerate((step.expect or {}).get("also") or () if isinstance(step.expect, dict) else ()):
            self._group(name, (*step.path, "expect", "also", place))

    def _group(self, name: Any, path: Path_) -> GroupSpec | None:
        if isinstance(name, str) and any(name == group.name for group in self.model.groups):
            return self.model.group(name)
        self.checker.problem(path, f"there is no group {name!r}")
        return None

    def _store(self, args: Store, path: Path_) -> None:
        for name, how in (args.groups or {}).items():
            group = self._group(name, (*path, "groups", name))
            if group is not None:
                self._selected(group, how, (*path, "groups", name))
        for place, shard in enumerate(args.shards or ()):
            if shard >= self.model.shards:
                self.checker.problem((*path, "shards", place), f"the model has shards 0 to {self.model.shards - 1}")

    def _swap(self, args: Swap, path: Path_) -> None:
        if isinstance(args.groups, list):
            for place, name in enumerate(args.groups):
                self._group(name, (*path, "groups", place))
        else:
            for name, how in (args.groups or {}).items():
                group = self._group(name, (*path, "groups", name))
                if group is not None:
                    self._selected(group, how, (*path, "groups", name))

    def _between(self, args: Between, path: Path_) -> None:
        for place, name in enumerate(args.between):
            if name not in self.nodes and name != DIRECTORY:
                self.checker.problem((*path, "between", place), f"there is no node {name!r}")
        if args.between[0] == args.between[1]:
            self.checker.problem((*path, "between"), "two different nodes are expected")

    def _selected(self, group: GroupSpec, how: Selected, path: Path_) -> None:
        if how.blocks is not None and group.form is Form.STATE:
            self.checker.problem((*path, "blocks"), f"{group.name} has snapshots: name them by positions")
        if how.positions is not None:
            if group.form is Form.BLOCKS:
                self.checker.problem((*path, "positions"), f"{group.name} has blocks: name them by blocks or tokens")
            for place, position in enumerate(how.positions):
                self._position(group, position, (*path, "positions", place))

    def _one_object(self, args: OneObject, path: Path_) -> None:
        group = self._group(getattr(args, "group", None), (*path, "group"))
        if group is None:
            return
        if args.block is not None and group.form is Form.STATE:
            self.checker.problem((*path, "block"), f"{group.name} has snapshots: name one by its position")
        if args.position is not None:
            if group.form is Form.BLOCKS:
                self.checker.problem((*path, "position"), f"{group.name} has blocks: name one by its block")
            self._position(group, args.position, (*path, "position"))

    def _position(self, group: GroupSpec, position: int, path: Path_) -> None:
        if group.form is Form.STATE and (position == 0 or position % group.unit_tokens):
            reason = f"{position} is no position of a snapshot, they lie at multiples of {group.unit_tokens}"
            self.checker.problem(path, reason)

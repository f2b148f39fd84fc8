"""YAML that remembers where each value stands, read safely and within bounds."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ...fabric.kinds import SpecError

FILE_BYTES_MAX = 4 << 20
VALUES_MAX = 200_000
"""Aliases repeat what they name: a small file may stand for a very large one."""
DEPTH_MAX = 32

Path_ = tuple[str | int, ...]
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a file: where it stands, which field, why."""

    file: str
    line: int
    field: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.field + ': ' if self.field else ''}{self.reason}"


class InvalidFile(SpecError):
    """A file is not a valid scenario. ``problems`` has one entry or more, in the order of the file."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = sorted(problems, key=lambda p: p.line)
        super().__init__("\n".join(map(str, self.problems)))


@dataclass(slots=True)
class Source:
    """The plain data of one file and the line (from 1) on which each value begins."""

    file: str
    data: Any = None
    lines: dict[Path_, int] = field(default_factory=dict)
    _values: int = 0

    def line(self, path: Path_) -> int:
        """The line of ``path``, or of the nearest thing around it."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return 1

    def problem(self, path: Path_, reason: str) -> Problem:
        return Problem(self.file, self.line(path), dotted(path), reason)

    def refuse(self, path: Path_, reason: str) -> InvalidFile:
        return InvalidFile([self.problem(path, reason)])

    def plain(self, loader: Any, node: yaml.Node, path: Path_) -> Any:
        """The value of a node; notes the line of everything below it."""
        self._values += 1
        if self._values > VALUES_MAX or len(path) > DEPTH_MAX:
            raise self.refuse(path[:2], "the file is too deep or too large")
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            loader.flatten_mapping(node)
            return self._mapping(loader, node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(loader, item, (*path, i)) for i, item in enumerate(node.value)]
        return loader.construct_object(node, deep=True)

    def _mapping(self, loader: Any, node: yaml.MappingNode, path: Path_) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable) or isinstance(key, bool | None):
                raise self.refuse(path, "keys are names")
            key = str(key)
            line = key_node.start_mark.line + 1
            if key in out:
                raise InvalidFile([Problem(self.file, line, dotted((*path, key)), "stands twice")])
            self.lines[*path, key] = line
            out[key] = self.plain(loader, value_node, (*path, key))
        return out


def dotted(path: Path_) -> str:
    """A path as people write it: ``steps[3].store.tokens``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_source(path: Path) -> Source:
    """Read one YAML document. Raises InvalidFile, naming the file and the line."""
    source = Source(str(path))
    try:
        with path.open("rb") as stream:
            raw = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise source.refuse((), f"cannot be read: {error.strerror or error}") from None
    if len(raw) > FILE_BYTES_MAX:
        raise source.refuse((), f"more than {FILE_BYTES_MAX} bytes")
    try:
        loader = _Loader(raw.decode())
    except UnicodeDecodeError:
        raise source.refuse((), "not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise _malformed(source, error) from None
    try:
        node = loader.get_single_node()
        if node is None:
            raise source.refuse((), "the file is empty")
        source.data = source.plain(loader, node, ())
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, InvalidFile):
            raise
        raise _malformed(source, error) from None
    finally:
        loader.dispose()
    return source


def _malformed(source: Source, error: Exception) -> InvalidFile:
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or str(error)
    return InvalidFile([Problem(source.file, mark.line + 1 if mark else 1, "", f"not valid YAML: {reason}")])

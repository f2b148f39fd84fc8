"""A fabric's spec from all its sources, and which source each value came from.

    defaults < FILE < KVFABRIC__FIELD (a nested one: KVFABRIC__DISK__PATH) < --set disk.path=/nvme

Strict: a name that the spec does not have is an error wherever it stands, and so is a value of another type.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...actors.spec import FabricSpec
from ...fabric.kinds import SpecError
from ...fabric.specs import read_mapping

PREFIX = "KVFABRIC__"

Field = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """The spec, and by field (dots for nesting) where its value came from: ``default`` or the source's name."""

    spec: FabricSpec
    origins: Mapping[Field, str]

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """Field, value and origin of every leaf; a group of the model is one leaf."""
        for field, value in _leaves(self.spec.model_dump(mode="json")):
            yield ".".join(field), value, self.origin(field)

    def origin(self, field: Field) -> str:
        """Where a field came from; what was set as a whole came with it."""
        while field:
            if field in self.origins:
                return self.origins[field]
            field = field[:-1]
        return "default"


def resolved(
    file: str | Path | None, *, environ: Mapping[str, str] | None = None, arguments: Iterable[str] = ()
) -> Settings:
    """The settings from all sources. Raises SpecError naming the source and the field."""
    data: dict[str, Any] = {}
    origins: dict[Field, str] = {}
    if file is not None:
        data = _read(Path(file))
        for field, _ in _leaves(data):
            origins[field] = str(file)
    for name, text in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(PREFIX):
            field = tuple(part.lower() for part in name.removeprefix(PREFIX).split("__"))
            _put(data, field, text, name)
            origins[field] = name
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals or not name:
            raise SpecError(f"--set {argument}: FIELD=VALUE is expected, with dots between nested fields")
        field = tuple(name.split("."))
        _put(data, field, text, f"--set {name}")
        origins[field] = f"--set {name}"
    return Settings(FabricSpec.load(data), origins)


def _read(path: Path) -> dict[str, Any]:
    data = read_mapping(path)
    if "model" not in data and "groups" in data:
        data = {"model": data}
    FabricSpec.load(
        data, where=f"{path}: "
    )  # what is wrong with the file is said of the file, before anything is laid over it
    return data


def _put(data: dict[str, Any], field: Field, text: str, source: str) -> None:
    """Lay one value over the data. Raises SpecError for a field that no spec has."""
    if field[0] not in FabricSpec.model_fields:
        raise SpecError(f"{source}: the spec has no field {field[0]!r}; `kvfabric config show` lists them")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise SpecError(f"{source}: {text!r} is not a value") from None
    here = data
    for part in field[:-1]:
        inner = here.setdefault(part, {})
        if not isinstance(inner, dict):
            raise SpecError(f"{source}: {part} is a single value, nothing lies below it")
        here = inner
    here[field[-1]] = value


def _leaves(data: Mapping[str, Any], above: Field = ()) -> Iterator[tuple[Field, Any]]:
    for key, value in data.items():
        field = (*above, str(key))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, field)
        else:
            yield field, value

"""Settings on their way between processes, which may run different versions of this package.

A user's settings are taken strictly: a name that the spec does not have is an error. A process that is handed another
version's settings cannot be so strict, or no field could ever be added while a fabric runs. So every field is of a
schema: those the first version had are of schema 1, one that came later says so with :func:`added`. It has a default
that means what the versions before did, and is left out of the text while it has that value. The text bears the least
schema that knows all its fields; a version that reads an older one passes over the names it does not know, and says
which; a field declared ``must`` it cannot do without, and refuses by name. In a text of a schema it knows, an unknown
name is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from .kinds import SpecError

SCHEMA = 1
NUMBER, MUST = "spec_schema", "spec_must"
"""What the text bears besides the fields."""

M = TypeVar("M", bound=BaseModel)
Path = tuple[str | int, ...]


def added(schema: int, default: Any, *, must: bool, **more: Any) -> Any:
    """A field that settings of ``schema`` and later have. ``must``: who does not know it must not go on without it."""
    return Field(default, json_schema_extra={"since": schema, "must": must}, **more)


def written(settings: BaseModel) -> str:
    """The text for another process."""
    data = settings.model_dump(mode="json")
    schema, must = 1, []
    for path, since, needed, plain in _later_fields(settings, ()):
        if plain:
            _leave_out(data, path)
            continue
        schema = max(schema, since)
        if needed:
            must.append(_dotted(path))
    if schema > 1:
        data = {NUMBER: schema, MUST: must, **data}
    return json.dumps(data)


def read(cls: type[M], text: str, where: str) -> tuple[M, tuple[str, ...]]:
    """The settings in a text, and the names in it that this version passes over.

    Raises SpecError that begins with ``where`` for what :func:`written` of this or an older version did not make, and
    for a newer one's field that nobody may do without.
    """
    try:
        data = json.loads(text)
    except ValueError:
        raise SpecError(f"{where}: not JSON") from None
    if not isinstance(data, dict):
        raise SpecError(f"{where}: a mapping is expected, got {type(data).__name__}")
    schema, must = data.pop(NUMBER, 1), data.pop(MUST, ())
    try:
        return cls.model_validate(data), ()
    except ValidationError as error:
        errors = error.errors(include_url=False)
        unknown = [e["loc"] for e in errors if e["type"] == "extra_forbidden"]
        if schema <= SCHEMA or len(unknown) < len(errors):
            raise SpecError(describe(error, where)) from None
    needed = [name for name in map(_dotted, unknown) if name in must]
    if needed:
        raise SpecError(
            f"{where}: {', '.join(needed)}: of spec schema {schema}, which nobody may pass over, and this version reads"
            f" {SCHEMA}: upgrade kvfabric here first"
        )
    for path in unknown:
        _leave_out(data, path)
    try:
        return cls.model_validate(data), tuple(map(_dotted, unknown))
    except ValidationError as error:
        raise SpecError(describe(error, where)) from None


def _later_fields(value: Any, at: Path) -> Iterator[tuple[Path, int, bool, bool]]:
    """Where a field of a later schema than 1 stands, its schema, whether it must be known, whether it is at its default."""
    if isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
            inside = getattr(value, name)
            since = int(str(extra.get("since", 1)))
            if since > 1:
                yield (*at, name), since, bool(extra["must"]), inside == field.get_default(call_default_factory=True)
            yield from _later_fields(inside, (*at, name))
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            yield from _later_fields(inside, (*at, str(key)))
    elif isinstance(value, list | tuple):
        for number, inside in enumerate(value):
            yield from _later_fields(inside, (*at, number))


def _leave_out(data: Any, path: Path) -> None:
    for step in path[:-1]:
        if isinstance(data, dict) and step not in data:
            return  # what it lies in is left out
        data = data[step]
    data.pop(path[-1], None)


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def describe(error: ValidationError, where: str) -> str:
    """One line of a pydantic error: where (it may end with ``": "``, as a file's name does), the field, the reason."""
    first = error.errors(include_url=False)[0]
    reason = "unknown field" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
    return f"{joined(where, '.'.join(map(str, first['loc'])))}: {reason}"


def joined(where: str, field: str) -> str:
    """A place and a field within it."""
    return where + field if where.endswith(": ") and field else f"{where.removesuffix(': ')}.{field}".removesuffix(".")

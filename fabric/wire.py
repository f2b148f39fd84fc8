"""Wire records: frozen dataclasses to bytes and back, msgpack with a schema number.

A record is declared with ``@record(number)``. Its codec is compiled from the type hints once, so
decoding checks every field's type on the way in: what a peer or a disk sent is data, never code.
Bitmaps (annotated ``Bits``) are ints of any size.

Schema N reads and writes N-1 too: a field that schema N gained is declared with :func:`added`, has a
default and stands last; a record it gained says so in ``@record``. A peer is spoken to in its own
schema, which its frames and its ``Member`` record bear. Any other schema is refused with both numbers.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from .kinds import WireError
from .run_encoding import (
    begin_frame,
    pack_indices,
    pack_slots,
    pack_versions,
    unpack_indices,
    unpack_slots,
    unpack_versions,
)

SCHEMA = 2
SCHEMAS_READ = tuple(range(max(1, SCHEMA - 1), SCHEMA + 1))
FRAME_BYTES_MAX = 64 << 20

Bits = Annotated[int, "bitmap"]
"""A bitmap of any length as one int."""
Indices = Annotated[tuple[int, ...], "runs of indices"]
SlotColumn = Annotated[bytes, "runs of slots"]
"""Slots, uint32 each."""
VersionColumn = Annotated[bytes, "runs of versions"]
"""Versions, uint64 each."""

Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]
T = TypeVar("T")

_by_number: dict[int, type] = {}
_number_of: dict[type, int] = {}
_since: dict[type, int] = {}
_codecs: dict[tuple[Any, int], Codec] = {}
_EXACTLY: dict[Callable[[Any], Any], type] = {}
"""Checks that pass a value of one type on as it is, and that type."""


def added(schema: int, default: T) -> T:
    """The default of a field that records of ``schema`` and later bear."""
    field: T = dataclasses.field(default=default, metadata={"since": schema})
    return field


def record(number: int, *, since: int = 1) -> Callable[[type[T]], type[T]]:
    """Declare a dataclass as wire record ``number``, known from schema ``since`` on; numbers are never reused."""

    def register(cls: type[T]) -> type[T]:
        if number in _by_number:
            raise WireError(f"record number {number} stands for {_by_number[number].__name__} already")
        _by_number[number] = cls
        _number_of[cls] = number
        _since[cls] = since
        return cls

    return register


def number_of(cls: type) -> int:
    """The number of a record's class. Raises KeyError for a class that is none."""
    return _number_of[cls]


def spoken_with(peer_schema: int) -> int:
    """The schema to speak with a peer of this one: its own, as far as this version knows it."""
    return min(SCHEMA, peer_schema)


def encode(message: Any, schema: int = SCHEMA) -> bytes:
    """Bytes of a record, as ``schema`` has it. Raises KeyError for a class that is none, WireError for another schema or a
    number of more than 64 bits.
    """
    cls = type(message)
    _check(schema)
    if _since[cls] > schema:
        raise WireError(f"{cls.__name__} is of schema {_since[cls]}, the peer speaks {schema}")
    try:
        return bytes(msgpack.packb([schema, _number_of[cls], _codec(cls, schema)[0](message)], use_bin_type=True))
    except OverflowError:
        raise WireError(f"{cls.__name__}: a number has more than 64 bits") from None


def decode(frame: bytes | memoryview) -> Any:
    """The record in ``frame``. Raises WireError for anything that is none of a known schema."""
    return read(frame)[1]


def read(frame: bytes | memoryview) -> tuple[int, Any]:
    """The schema of a frame and the record in it. Raises WireError as :func:`decode`."""
    if len(frame) > FRAME_BYTES_MAX:
        raise WireError(f"{len(frame)} bytes are more than a frame's {FRAME_BYTES_MAX}")
    try:
        plain = msgpack.unpackb(frame, raw=False, strict_map_key=False, use_list=True)
    except Exception as error:  # noqa: BLE001 - msgpack raises several families; all mean the same here
        raise WireError(f"not a record: {type(error).__name__}") from None
    if not (isinstance(plain, list) and len(plain) == 3 and type(plain[0]) is int and type(plain[1]) is int):
        raise WireError("not a record: the envelope is [schema, number, fields]")
    schema, number, fields = plain
    _check(schema)
    cls = _by_number.get(number)
    if cls is None or _since[cls] > schema:
        raise WireError(f"record {number} is not known in schema {schema}")
    begin_frame()
    return schema, _codec(cls, schema)[1](fields)


def _check(schema: int) -> None:
    if schema not in SCHEMAS_READ:
        raise WireError(f"schema {schema} found, this version reads {', '.join(map(str, SCHEMAS_READ))}")


def encode_plain(value: Any, schema: int = SCHEMA) -> bytes:
    """Bytes of a dataclass that is no record of its own, as ``schema`` has it: the reader must know which one it is."""
    _check(schema)
    return bytes(msgpack.packb([schema, 0, _codec(type(value), schema)[0](value)], use_bin_type=True))


def decode_plain(cls: type[T], frame: bytes) -> T:
    """The ``cls`` that :func:`encode_plain` made bytes of. Raises WireError for anything else."""
    try:
        plain = msgpack.unpackb(frame, raw=False, strict_map_key=False, use_list=True)
        schema, number, fields = plain
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError(f"not a {cls.__name__}: {type(error).__name__}") from None
    if number != 0:
        raise WireError(f"not a {cls.__name__}: record {number!r}")
    _check(schema)
    begin_frame()
    return typing.cast("T", _codec(cls, schema)[1](fields))


def _codec(hint: Any, schema: int) -> Codec:
    known = _codecs.get((hint, schema))
    if known is None:
        known = _codecs[hint, schema] = _compile(hint, schema)
    return known


def _compile(hint: Any, schema: int) -> Codec:
    if dataclasses.is_dataclass(hint):
        return _compile_record(typing.cast(type, hint), schema)
    annotated = _ANNOTATED.get(hint)
    if annotated is not None:
        return annotated
    if isinstance(hint, NewType):
        return _codec(hint.__supertype__, schema)
    if hint is float:
        return _same, _float
    if hint in (int, str, bytes, bool):
        return _same, _exactly(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _value, _enum(hint)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _compile_optional(args, schema)
    if origin is tuple:
        return _compile_tuple(args, schema)
    if origin is dict:
        return _compile_dict(args, schema)
    raise WireError(f"no codec for a field of type {hint}")


def _compile_record(cls: type, schema: int) -> Codec:
    hints = get_type_hints(cls, include_extras=True)
    fields = [f for f in dataclasses.fields(cls) if f.metadata.get("since", 1) <= schema]
    codecs = [_codec(hints[f.name], schema) for f in fields]
    required = sum(f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING for f in fields)
    unpackers = [unpack for _, unpack in codecs]
    build = _straight(cls, [f.name for f in fields], codecs)

    def unpack(plain: Any) -> Any:
        if type(plain) is not list or not required <= len(plain) <= len(unpackers):
            raise WireError(f"{cls.__name__}: {required} to {len(unpackers)} fields are expected")
        try:
            if len(plain) == len(unpackers):
                return build.unpack(plain)
            return cls(*[u(value) for u, value in zip(unpackers, plain, strict=False)])
        except WireError as error:
            raise WireError(f"{cls.__name__}: {error}") from None

    return build.pack, unpack


class _Straight(typing.NamedTuple):
    pack: Callable[[Any], list[Any]]
    unpack: Callable[[list[Any]], Any]


def _straight(cls: type, names: list[str], codecs: list[Codec]) -> _Straight:
    """A record's codec as straight code, as :mod:`dataclasses` makes theirs: half the time of a loop over its fields.

    The source has nothing in it but the names of the record's fields and numbers.
    """
    known: dict[str, Any] = {"cls": cls}
    packed, unpacked = [], []
    for at, (name, (pack, unpack)) in enumerate(zip(names, codecs, strict=True)):
        known[f"p{at}"], known[f"u{at}"] = pack, unpack
        packed.append(f"m.{name}" if pack is _same else f"p{at}(m.{name})")
        exact = _EXACTLY.get(unpack)
        known[f"t{at}"] = exact
        unpacked.append(f"u{at}(v{at})" if exact is None else f"v{at} if type(v{at}) is t{at} else u{at}(v{at})")
    values = "".join(f"v{at}, " for at in range(len(names)))
    source = f"def pack(m): return [{', '.join(packed)}]\n"
    source += f"def unpack(plain):\n {f'{values}= plain' if values else 'pass'}\n return cls({', '.join(unpacked)})\n"
    exec(source, known)  # noqa: S102 - see above: no text from outside
    return _Straight(known["pack"], known["unpack"])


def _compile_optional(args: tuple[Any, ...], schema: int) -> Codec:
    inner = [a for a in args if a is not type(None)]
    if len(inner) != 1 or len(args) != 2:
        raise WireError(f"no codec for a union of {args}")
    pack, unpack = _codec(inner[0], schema)
    return (
        lambda value: None if value is None else pack(value),
        lambda plain: None if plain is None else unpack(plain),
    )


def _compile_tuple(args: tuple[Any, ...], schema: int) -> Codec:
    if len(args) == 2 and args[1] is Ellipsis:
        pack, unpack = _codec(args[0], schema)
        if pack is _same:
            if args[0] in (int, str, bytes, bool):
                return list, _all_exactly(args[0])
            return list, lambda plain: tuple([unpack(v) for v in _list(plain)])
        return (
            lambda value: [pack(v) for v in value],
            lambda plain: tuple([unpack(v) for v in _list(plain)]),
        )
    codecs = [_codec(a, schema) for a in args]

    def unpack_fixed(plain: Any) -> Any:
        if len(_list(plain)) != len(codecs):
            raise WireError(f"{len(codecs)} values are expected")
        return tuple(u(v) for (_, u), v in zip(codecs, plain, strict=True))

    return lambda value: [p(v) for (p, _), v in zip(codecs, value, strict=True)], unpack_fixed


def _compile_dict(args: tuple[Any, ...], schema: int) -> Codec:
    (pack_key, unpack_key), (pack_value, unpack_value) = _codec(args[0], schema), _codec(args[1], schema)

    def unpack(plain: Any) -> Any:
        if type(plain) is not list:
            raise WireError("a list of pairs is expected")
        out = {}
        for pair in plain:
            if type(pair) is not list or len(pair) != 2:
                raise WireError("a list of pairs is expected")
            out[unpack_key(pair[0])] = unpack_value(pair[1])
        return out

    return lambda value: [[pack_key(k), pack_value(v)] for k, v in value.items()], unpack


def _same(value: Any) -> Any:
    return value


def _value(value: Enum) -> Any:
    return value.value


def _list(plain: Any) -> list[Any]:
    if type(plain) is not list:
        raise WireError("a list is expected")
    return plain


def _float(plain: Any) -> float:
    if type(plain) is not float and type(plain) is not int:
        raise WireError("a number is expected")
    return float(plain)


def _exactly(cls: type) -> Callable[[Any], Any]:
    def check(plain: Any) -> Any:
        if type(plain) is not cls:
            raise WireError(f"{cls.__name__} is expected, got {type(plain).__name__}")
        return plain

    _EXACTLY[check] = cls
    return check


def _all_exactly(cls: type) -> Callable[[Any], Any]:
    """A check of long lists of scalars that looks at them without a call each."""
    only = {cls}

    def check(plain: Any) -> Any:
        if not only.issuperset(map(type, _list(plain))):
            raise WireError(f"a list of {cls.__name__} is expected")
        return tuple(plain)

    return check


def _enum(cls: type[Enum]) -> Callable[[Any], Any]:
    members = {member.value: member for member in cls}

    def check(plain: Any) -> Any:
        try:
            return members[plain]
        except (KeyError, TypeError):
            raise WireError(f"{plain!r} is no {cls.__name__}") from None

    return check


def _pack_bits(value: int) -> bytes:
    return value.to_bytes((value.bit_length() + 7) // 8, "little")


def _unpack_bits(plain: Any) -> int:
    if type(plain) is not bytes:
        raise WireError("a bitmap is bytes")
    return int.from_bytes(plain, "little")


_ANNOTATED: dict[Any, Codec] = {
    Bits: (_pack_bits, _unpack_bits),
    Indices: (pack_indices, unpack_indices),
    SlotColumn: (pack_slots, unpack_slots),
    VersionColumn: (pack_versions, unpack_versions),
}

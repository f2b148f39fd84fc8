"""Records that come again and again, equal but for a few fields: their frames without the work of a codec.

A hot prompt is asked for by the same request under another id, and answered by the same slots under another
lease. The bytes between those fields are kept; a frame that has exactly these bytes in exactly these places is the
record that was decoded from them before, with its own values in the gaps. Everything else takes the codec.

::

    envelope ... | id | ... | lease | ... | deadline | ... | fence | ... slots and versions ...
    kept           gap  kept  gap     kept  gap        kept  gap     kept
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgpack
from xxhash import xxh3_64_intdigest

from . import wire
from .messages import Acquire, Answer, LeaseGrant, LeasePart

T = TypeVar("T")

FRAME_BYTES_MIN = 256
"""Shorter frames are decoded as quickly as they are compared."""
FORMS_MAX = 256
WEIGHT_MAX_BYTES = 32 << 20
INDEX_BYTES = 48
"""What one index, slot and version of a lease take when decoded, about."""

Path = tuple[int, ...]
Values = tuple[Any, ...]
_GAPS = {str: (b"\xd9\x20", "32s"), int: (b"\xcf", "Q"), float: (b"\xcb", "d")}
"""How msgpack begins a value that has always the same size: 32 characters, an unsigned of 2^32 or more, a float."""


@dataclass(frozen=True, slots=True)
class Shape(Generic[T]):
    """What varies in a record (``paths`` into its plain form, ascending; ``vary``), what does not (``rest``)."""

    cls: type[T]
    paths: tuple[Path, ...]
    vary: Callable[[T], Values | None]
    """The values of the gaps; None for a record that does not repeat."""
    rest: Callable[[T], Values]
    make: Callable[[T, Values], T]
    """A record like this one with other values in the gaps."""
    name: Callable[[T], object]
    """An object that all records of one form share."""
    weight_bytes: Callable[[T], int]


def _fits(values: Values) -> bool:
    """Whether each value has the size of its gap."""
    for value in values:
        kind = type(value)
        if kind is str:
            if len(value) != 32 or not value.isascii():
                return False
        elif kind is int:
            if not 1 << 32 <= value < 1 << 64:
                return False
        elif kind is not float:
            return False
    return True


class _Form(Generic[T]):
    """One record's bytes with gaps."""

    __slots__ = ("_kept", "_struct", "key", "last_gap_end", "rest", "sample", "weight_bytes")

    def __init__(self, shape: Shape[T], sample: T, values: Values, frame: bytes) -> None:
        """Raises ValueError for a frame that is not the record's, in the shortest form of each field."""
        self.sample = sample
        self.rest = shape.rest(sample)
        plain = msgpack.unpackb(frame, raw=False, strict_map_key=False, use_list=True)
        kept, layout, at = [], ">", 0
        for path, value in zip(shape.paths, values, strict=True):
            head, gap = _GAPS[type(value)]
            begin = _offset(plain, (2, *path)) + len(head)
            kept.append(frame[at:begin])
            layout += f"{begin - at}s{gap}"
            at = begin + struct.calcsize(">" + gap)
        kept.append(frame[at:])
        self.last_gap_end = at
        self._struct = struct.Struct(f"{layout}{len(frame) - at}s")
        self._kept = tuple(kept)
        self.weight_bytes = len(frame) + shape.weight_bytes(sample)
        self.key = (0, 0)
        if self.fill(values) != frame:
            raise ValueError(f"the frame is not as a {shape.cls.__name__} is encoded")

    def fill(self, values: Values) -> bytes:
        parts: list[Any] = [None] * (2 * len(values) + 1)
        parts[::2] = self._kept
        parts[1::2] = [value.encode() if type(value) is str else value for value in values]
        return self._struct.pack(*parts)

    def read(self, frame: bytes) -> Values | None:
        """The values in the gaps of a frame of this form; None for any other."""
        if len(frame) != self._struct.size:
            return None
        parts = self._struct.unpack(frame)
        if parts[::2] != self._kept:
            return None
        try:
            return tuple([part.decode("ascii") if type(part) is bytes else part for part in parts[1::2]])
        except UnicodeDecodeError:
            return None


def _offset(plain: Any, path: Path) -> int:
    """Where the value at a path begins in the shortest encoding of ``plain``."""
    packer, at = msgpack.Packer(use_bin_type=True), 0
    for place in path:
        at += len(packer.pack_array_header(len(plain)))
        at += sum(len(packer.pack(value)) for value in plain[:place])
        plain = plain[place]
    return at


class Repeats(Generic[T]):
    """The last forms of one shape, bounded in number and weight; the oldest goes first.

    :meth:`read` and the looking up of :meth:`encode` may run beside one another; who learns does so alone.
    """

    def __init__(self, shape: Shape[T], forms_max: int = FORMS_MAX, weight_max_bytes: int = WEIGHT_MAX_BYTES) -> None:
        self._shape = shape
        self._forms_max = forms_max
        self._weight_max_bytes = weight_max_bytes
        self._weight_bytes = 0
        self._by_name: dict[int, _Form[T]] = {}
        self._by_tail: dict[tuple[int, int], _Form[T]] = {}
        self._seen: dict[object, None] = {}
        """What came once: a form is made when it comes again."""
        self._head = bytes([0x93, wire.SCHEMA, wire.number_of(shape.cls)])

    def __len__(self) -> int:
        return len(self._by_name)

    def encode(self, record: T) -> bytes:
        """The frame of a record in this version's schema, as :func:`~kvfabric.fabric.wire.encode` makes it."""
        shape = self._shape
        values = shape.vary(record)
        if values is None:
            return wire.encode(record)
        name = id(shape.name(record))
        form = self._by_name.get(name)
        if form is not None and _fits(values) and form.rest == shape.rest(record):
            return form.fill(values)
        frame = wire.encode(record)
        if self._again(name):
            self._keep(name, frame, record, values)
        return frame

    def read(self, frame: bytes) -> T | None:
        """The record in a frame of a known form; None for any other frame."""
        if len(frame) < FRAME_BYTES_MIN or frame[:3] != self._head:
            return None
        form = self._by_tail.get(_tail(frame))
        if form is None:
            return None
        values = form.read(frame)
        return None if values is None else self._shape.make(form.sample, values)

    def learn(self, frame: bytes, record: T) -> None:
        """This frame was decoded to this record; it is remembered once it came twice."""
        if len(frame) < FRAME_BYTES_MIN or frame[:3] != self._head:
            return
        values = self._shape.vary(record)
        if values is not None and self._again(_tail(frame)):
            self._keep(id(self._shape.name(record)), frame, record, values)

    def _again(self, what: object) -> bool:
        if what in self._seen:
            del self._seen[what]
            return True
        self._seen[what] = None
        if len(self._seen) > self._forms_max:
            del self._seen[next(iter(self._seen))]
        return False

    def _keep(self, name: int, frame: bytes, record: T, values: Values) -> None:
        if len(frame) < FRAME_BYTES_MIN or not _fits(values):
            return
        try:
            form = _Form(self._shape, record, values, frame)
        except ValueError:
            return
        if form.last_gap_end > len(frame) - _tail_bytes(frame) or form.weight_bytes > self._weight_max_bytes:
            return
        form.key = _tail(frame)
        for old in (self._by_name.get(name), self._by_tail.get(form.key)):
            if old is not None:
                self._drop(old)
        self._by_name[name] = self._by_tail[form.key] = form
        self._weight_bytes += form.weight_bytes
        while len(self._by_name) > self._forms_max or self._weight_bytes > self._weight_max_bytes:
            self._drop(next(iter(self._by_name.values())))

    def _drop(self, form: _Form[T]) -> None:
        name = id(self._shape.name(form.sample))
        if self._by_name.get(name) is form:
            del self._by_name[name]
            self._by_tail.pop(form.key, None)
            self._weight_bytes -= form.weight_bytes


def _tail_bytes(frame: bytes) -> int:
    return len(frame) >> 2


def _tail(frame: bytes) -> tuple[int, int]:
    """What frames of one form share and others mostly do not; the gaps lie before it."""
    return len(frame), xxh3_64_intdigest(memoryview(frame)[len(frame) - _tail_bytes(frame) :])


# --- the two shapes ----------------------------------------------------------------------------


def _others(cls: type, *varying: str) -> Callable[[Any], Values]:
    return attrgetter(*[field.name for field in fields(cls) if field.name not in varying])


_rest_of_acquire = _others(Acquire, "request")
_rest_of_answer = _others(Answer, "request", "grant")
_rest_of_grant = _others(LeaseGrant, "lease", "deadline_s", "parts")
_rest_of_part = _others(LeasePart, "fence")


def _vary_answer(answer: Answer) -> Values | None:
    grant = answer.grant
    if grant is None or len(grant.parts) != 1 or answer.columns:
        return None
    return answer.request, grant.lease, grant.deadline_s, grant.parts[0].fence


def _grant(answer: Answer) -> LeaseGrant:
    assert answer.grant is not None  # nothing without one has a form
    return answer.grant


def _rest_answer(answer: Answer) -> Values:
    grant = _grant(answer)
    return _rest_of_answer(answer), _rest_of_grant(grant), _rest_of_part(grant.parts[0])


def _make_answer(like: Answer, values: Values) -> Answer:
    request, lease, deadline_s, fence = values
    grant = _grant(like)
    part = grant.parts[0]
    parts = (LeasePart(part.holder, part.incarnation, fence, part.slots),)
    granted = LeaseGrant(
        grant.leader, lease, grant.tokens, deadline_s, grant.weights, parts, grant.replay_from, grant.approximate
    )
    return Answer(
        request,
        like.status,
        like.tokens,
        like.hash_tokens,
        like.usable_tokens,
        like.cause,
        like.also,
        like.replay_from,
        like.expected_s,
        granted,
        like.tokens_lost_to_alignment,
        like.moved_bytes,
        like.sources,
        like.columns,
        like.evicted,
        like.unreachable,
        like.plan,
        like.approximate,
        like.told,
    )


def _weight_of_answer(answer: Answer) -> int:
    return sum(INDEX_BYTES * len(run.indices) for run in _grant(answer).parts[0].slots)


ACQUIRES: Shape[Acquire] = Shape(
    Acquire,
    ((0,),),
    lambda acquire: (acquire.request,),
    _rest_of_acquire,
    lambda like, values: Acquire(*values, *_rest_of_acquire(like)),
    lambda acquire: acquire.prompt,
    lambda acquire: sum(len(keys) for _, keys in acquire.prompt.keys),
)
"""A request for one prompt, under another id."""

ANSWERS: Shape[Answer] = Shape(
    Answer,
    ((0,), (9, 1), (9, 3), (9, 5, 0, 2)),
    _vary_answer,
    _rest_answer,
    _make_answer,
    lambda answer: _grant(answer).parts[0].slots,
    _weight_of_answer,
)
"""A lease of the same slots at the same versions, all of one holder."""

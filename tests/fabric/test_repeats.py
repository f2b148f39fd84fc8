"""Frames that repeat: read and written without the codec, never otherwise than by it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfabric.fabric import wire
from kvfabric.fabric.kinds import Status, WireError
from kvfabric.fabric.messages import Acquire, Answer, LeaseGrant, LeasePart, Prompt, SlotRun
from kvfabric.fabric.passport import Abi
from kvfabric.fabric.repeats import ACQUIRES, ANSWERS, FRAME_BYTES_MIN, Repeats

BLOCKS = 24


def acquire(number: int, request: str = "0" * 32, blocks: int = BLOCKS) -> Acquire:
    """A request for prompt ``number``."""
    digests = random.Random(number).randbytes(32 * blocks)
    prompt = Prompt(bytes(32), bytes(16), "", 16 * blocks + 1, ((16, digests),))
    return Acquire(request, prompt, (Abi(), Abi()), ("n0",), 30.0, None, 0, False)


def answer(number: int, request: str = "0" * 32, lease: int = 1 << 33, deadline_s: float = 1.5) -> Answer:
    """A lease of slots that are prompt ``number``'s."""
    rng = random.Random(number)
    versions = rng.randbytes(8 * BLOCKS)
    slots = tuple(SlotRun(g, 0, tuple(range(BLOCKS)), rng.randbytes(4 * BLOCKS), versions) for g in range(2))
    part = LeasePart("n0", 2, lease, slots)
    grant = LeaseGrant("n0", lease, 16 * BLOCKS, deadline_s, bytes(16), (part,))
    tokens = 16 * BLOCKS
    return Answer(request, Status.FULL_HIT, tokens, tokens, tokens, None, (), None, None, grant)


def read_twice(known: Repeats[Acquire] | Repeats[Answer], record: Acquire | Answer) -> bytes:
    """Have a record's frame learned, and return it."""
    frame = wire.encode(record)
    for _ in range(2):
        assert known.read(frame) is None
        known.learn(frame, record)  # type: ignore[arg-type] # the caller pairs them
    return frame


IDS = st.text(alphabet="0123456789abcdef", min_size=32, max_size=32)
OTHER_IDS = st.one_of(IDS, st.text(min_size=1, max_size=40), st.just("é" * 16), st.just("é" * 32))


@given(OTHER_IDS)
@settings(max_examples=60)
def test_a_request_under_another_id_is_read_and_written_as_the_codec_does(request: str) -> None:
    known = Repeats(ACQUIRES)
    read_twice(known, acquire(1))
    again = acquire(1, request)
    frame = wire.encode(again)
    found = known.read(frame)
    assert found == (again if len(request.encode()) == 32 and request.isascii() else None)
    shared = known.read(wire.encode(acquire(1)))
    assert shared is not None
    assert known.encode(replace(shared, request=request)) == frame


@given(IDS, st.integers(0, (1 << 64) - 1), st.floats(allow_nan=False))
@settings(max_examples=60)
def test_an_answer_with_another_lease_is_read_and_written_as_the_codec_does(
    request: str, lease: int, deadline_s: float
) -> None:
    known = Repeats(ANSWERS)
    first = answer(1)
    for _ in range(2):
        assert known.encode(first) == wire.encode(first)
    assert len(known) == 1
    assert first.grant is not None
    part = replace(first.grant.parts[0], fence=lease)
    grant = replace(first.grant, lease=lease, deadline_s=deadline_s, parts=(part,))
    again = replace(first, request=request, grant=grant)
    frame = wire.encode(again)
    assert known.encode(again) == frame
    assert known.read(frame) == (again if lease >= 1 << 32 else None)


@pytest.mark.parametrize("shape", ["acquire", "answer"])
def test_a_frame_that_differs_anywhere_is_never_read_as_another_than_the_codec_reads(shape: str) -> None:
    known: Repeats[Acquire] | Repeats[Answer] = Repeats(ACQUIRES) if shape == "acquire" else Repeats(ANSWERS)
    frame = read_twice(known, acquire(1) if shape == "acquire" else answer(1))
    assert known.read(frame) == wire.decode(frame)
    read = 0
    for place in range(len(frame)):
        for flip in (1, 0x80):
            other = bytearray(frame)
            other[place] ^= flip
            found = known.read(bytes(other))
            if found is not None:
                read += 1
                assert found == wire.decode(bytes(other))
    assert read >= 32  # each byte of its id may differ
    for cut in (1, len(frame) // 2, len(frame) - 1):
        assert known.read(frame[:cut]) is None
    assert known.read(frame + b"\x00") is None


def test_every_field_of_a_record_but_the_gaps_makes_another_form() -> None:
    known = Repeats(ANSWERS)
    first = answer(1)
    for _ in range(2):
        known.encode(first)
    grant = first.grant
    assert grant is not None
    part = grant.parts[0]
    others = [
        replace(first, tokens=first.tokens - 16),
        replace(first, status=Status.PARTIAL_HIT),
        replace(first, approximate=True),
        replace(first, grant=replace(grant, weights=b"\x01" * 16)),
        replace(first, grant=replace(grant, replay_from=16)),
        replace(first, grant=replace(grant, parts=(replace(part, incarnation=3),))),
        replace(first, grant=replace(grant, parts=(replace(part, slots=part.slots[:1]),))),
        replace(first, grant=replace(grant, parts=(part, replace(part, holder="n1")))),
        replace(first, grant=None),
    ]
    for other in others:
        assert known.encode(other) == wire.encode(other)


def test_what_came_once_or_is_short_is_not_remembered() -> None:
    known = Repeats(ACQUIRES)
    frame = wire.encode(acquire(1))
    known.learn(frame, acquire(1))
    assert len(known) == 0
    short = acquire(2, blocks=1)
    frame = wire.encode(short)
    assert len(frame) < FRAME_BYTES_MIN
    for _ in range(3):
        known.learn(frame, short)
    assert len(known) == 0
    assert known.read(frame) is None


def test_forms_are_bounded_in_number_and_weight_and_the_oldest_goes_first() -> None:
    few = Repeats(ACQUIRES, forms_max=3)
    frames = [read_twice(few, acquire(number)) for number in range(5)]
    assert len(few) == 3
    assert [few.read(frame) is not None for frame in frames] == [False, False, True, True, True]
    light = Repeats(ACQUIRES, weight_max_bytes=3 * len(frames[0]))
    for number in range(5):
        read_twice(light, acquire(number))
    assert len(light) == 1


def test_frames_of_an_older_schema_are_left_to_the_codec() -> None:
    known = Repeats(ACQUIRES)
    old = wire.encode(acquire(1), wire.SCHEMA - 1)
    for _ in range(3):
        known.learn(old, acquire(1))
    assert known.read(old) is None
    assert len(known) == 0


def test_a_frame_in_a_longer_form_than_the_codec_writes_is_left_to_the_codec() -> None:
    known = Repeats(ACQUIRES)
    frame = wire.encode(acquire(1))
    longer = frame[:3] + b"\xdd\x00\x00" + frame[4:6] + frame[6:]  # the list of fields with a count of 32 bits
    assert wire.decode(longer) == acquire(1)
    for _ in range(3):
        known.learn(longer, acquire(1))
    assert known.read(longer) is None
    with pytest.raises(WireError):
        wire.decode(longer[:-1])

"""Whatever bytes arrive, decoding ends soon, in a record or in one WireError, and keeps nothing."""

from __future__ import annotations

import gc
import importlib.util
import re
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfabric.fabric import wire
from kvfabric.fabric.bands import IN_MEMORY
from kvfabric.fabric.directory import DirectoryCore
from kvfabric.fabric.effects import Received
from kvfabric.fabric.kinds import FabricError, WireError
from kvfabric.fabric.messages import (
    DumpPart,
    EventBatch,
    EventRun,
    Found,
    Heartbeat,
    HolderGone,
    Lane,
    Lookup,
    Mark,
    ShardMap,
    Strip,
    Stripe,
)
from kvfabric.fabric.passport import Abi
from kvfabric.transport.frames import FRAME_BYTES_MAX, HEADER, FrameDecoder

from .directory_bed import BLOCK, MODEL

LANE = Lane(0, 0, IN_MEMORY, 3, Abi(b"x" * 8, 4))
KEYS = bytes(range(256)) * 4
FRAMES = [
    wire.encode(message)
    for message in (
        EventBatch("h", 1, 1, 9, (EventRun(LANE, BLOCK, KEYS[:16], b"", 0, KEYS[:64], bytes(32)),)),
        DumpPart("h", 1, 2, 9, 0, True, ()),
        Heartbeat("h", 1, 4),
        Lookup("op", 1, (Strip(BLOCK, 0, KEYS),), (Mark("h", 1, 2),)),
        Found("op", 1, 0, (Stripe("h", 1, (LANE,), (1 << 300) - 1, ((0, 256, b"\0" + bytes(8)),)),), ((0, 7),)),
        ShardMap(3, ("a", "b")),
    )
]


def decoded(frame: bytes) -> bool:
    """Whether it was a record; anything but a record or a WireError is a failure."""
    try:
        wire.decode(frame)
    except WireError:
        return False
    return True


def test_what_the_fuzz_starts_from_are_records():
    assert all(decoded(frame) for frame in FRAMES)


@settings(max_examples=400, deadline=500)
@given(st.binary(max_size=2000))
def test_any_bytes_are_a_record_or_a_wire_error(frame):
    decoded(frame)


@settings(max_examples=600, deadline=500)
@given(st.data())
def test_a_damaged_record_is_a_record_or_a_wire_error(data):
    frame = bytearray(data.draw(st.sampled_from(FRAMES)))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(frame) - 1))
        match data.draw(st.integers(0, 3)):
            case 0:
                frame[at] = data.draw(st.integers(0, 255))
            case 1:
                del frame[at : at + data.draw(st.integers(1, 8))]
            case 2:
                frame[at:at] = data.draw(st.binary(min_size=1, max_size=8))
            case _:
                frame[at:at] = data.draw(
                    st.sampled_from((b"\xdd\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff", b"\xd4\x01\x00"))
                )
        if not frame:
            return
    decoded(bytes(frame))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=30,
)


@settings(max_examples=400, deadline=500)
@given(st.integers(0, 80), st.lists(values, max_size=14))
def test_any_values_under_any_record_number_are_a_record_or_a_wire_error(number, fields):
    decoded(msgpack.packb([wire.SCHEMA, number, fields]))


BOMBS = {
    "nested": b"\x91" * 200_000,
    "array": b"\xdd\xff\xff\xff\xff",
    "map": b"\xdf\xff\xff\xff\xff",
    "bin": b"\xc6\xff\xff\xff\xff",
    "string": b"\xdb\xff\xff\xff\xff",
    "many": b"\xdc\xff\xff" + b"\x90" * 65535,
    "keys": msgpack.packb([1, 43, [{i: i for i in range(20_000)}]]),
    "bits": msgpack.packb([1, 44, ["op", 1, 0, [], [[0, b"\xff" * (1 << 20)]], [], False, [], None]]),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_little_time(name):
    began = time.process_time()
    decoded(BOMBS[name])
    assert time.process_time() - began < 1.0


def test_refused_frames_leave_nothing_behind():
    frames = [*BOMBS.values(), *[frame[:-3] for frame in FRAMES], b"", b"\xc1"]
    for frame in frames:
        decoded(frame)
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(20):
            for frame in frames:
                decoded(frame)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 100_000


@settings(max_examples=300, deadline=500)
@given(st.lists(st.binary(max_size=300), max_size=20))
def test_the_socket_decoder_keeps_no_more_than_a_frame(chunks):
    decoder = FrameDecoder(4096)
    fed = 0
    for chunk in chunks:
        try:
            frames = decoder.feed(chunk)
        except WireError:
            return
        fed += len(chunk)
        assert all(len(frame.payload) <= 4096 for frame in frames)
        assert len(decoder._kept) <= HEADER.size + 4096


def test_a_frame_that_announces_too_much_is_refused_before_it_comes():
    with pytest.raises(WireError, match="announced"):
        FrameDecoder().feed(HEADER.pack(FRAME_BYTES_MAX + 1, 1, 0, 0))


# --- what a peer says that is typed well and means nothing -----------------------------------------

small = st.integers(-2, 600)
nonsense_runs = st.builds(
    EventRun,
    lane=st.builds(Lane, small, small, st.integers(-1, 5), small, st.just(Abi(b"", 1))),
    unit=st.sampled_from((BLOCK, 0, 7)),
    anchor=st.sampled_from((KEYS[:16], KEYS[16:32], b"", b"short")),
    parent=st.sampled_from((b"", KEYS[:16], KEYS[16:32], b"x")),
    first=small,
    digests=st.sampled_from((b"", KEYS, KEYS[:16], KEYS[16:100], KEYS[32:48] * 3)),
    versions=st.sampled_from((b"", bytes(8), bytes(7), bytes(8 * 64))),
    evicted=st.booleans(),
)


def test_the_runs_of_this_fuzz_are_taken_where_they_make_sense():
    core = DirectoryCore("directory:0", MODEL, 1)
    run = EventRun(replace(LANE, revision=0), BLOCK, KEYS[:16], b"", 0, KEYS[:64], bytes(32))
    core.handle(Received("h", EventBatch("h", 1, 1, 0, (run,))), 0.0)
    assert core.lookup(Lookup("x", 0, (Strip(BLOCK, 0, KEYS[:64]),))).stripes[0].bits == 15


@settings(max_examples=300, deadline=1000)
@given(st.lists(st.tuples(st.integers(0, 4), small, st.lists(nonsense_runs, max_size=4)), max_size=12))
def test_nonsense_from_a_peer_neither_breaks_the_directory_nor_grows_it(said):
    core = DirectoryCore("directory:0", MODEL, 1)
    for kind, number, runs in said:
        message = (
            EventBatch("h", 1, number, number, tuple(runs)),
            DumpPart("h", 1, number, number, max(0, number % 3), bool(number % 2), tuple(runs)),
            Heartbeat("h", number, number),
            HolderGone("h", number),
            ShardMap(number, ("directory:0", "directory:1")[: number % 3]),
        )[kind]
        core.handle(Received("h", message), float(number))
        core.lookup(Lookup("x", 0, (Strip(BLOCK, 0, KEYS),)))
    assert core.index.bytes_used < 1 << 20


# --- two versions ------------------------------------------------------------------------------


def version(schema: int, fields: str) -> ModuleType:
    """The wire module as another version has it, with one record."""
    source, changed = re.subn(r"(?m)^SCHEMA = \d+$", f"SCHEMA = {schema}", Path(wire.__file__).read_text())
    assert changed == 1
    source += f"\n\n@record(9)\n@dataclasses.dataclass(frozen=True)\nclass Greeting:\n    name: str\n{fields}\n"
    name = f"kvfabric.fabric.wire_of_schema_{schema}"
    spec = importlib.util.spec_from_loader(name, loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def test_a_version_reads_the_one_before_it_and_refuses_the_rest_with_both_numbers():
    one, two, three = (
        version(1, ""),
        version(2, "    age: int = 7"),
        version(3, "    age: int = 7\n    words: tuple[str, ...] = ()"),
    )
    assert two.decode(one.encode(one.Greeting("a"))) == two.Greeting("a", 7)
    assert three.decode(two.encode(two.Greeting("a", 8))) == three.Greeting("a", 8, ())
    for reader, frame, found, reads in (
        (one, two.encode(two.Greeting("a", 8)), "schema 2", "reads 1"),
        (two, three.encode(three.Greeting("a")), "schema 3", "reads 1, 2"),
        (three, one.encode(one.Greeting("a")), "schema 1", "reads 2, 3"),
    ):
        with pytest.raises(FabricError, match=found) as refused:
            reader.decode(frame)
        assert reads in str(refused.value)
    with pytest.raises(FabricError, match="1 to 1 fields"):
        one.decode(msgpack.packb([1, 9, ["a", 8]]))

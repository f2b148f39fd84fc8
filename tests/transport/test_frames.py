"""Laws of the frame decoder: how bytes arrive does not matter, and a stranger's bytes cost nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfabric.fabric.kinds import SpecError, WireError
from kvfabric.transport.challenge import ChallengeFailed, ClientChallenge, ServerChallenge
from kvfabric.transport.endpoints import Endpoint
from kvfabric.transport.frames import HEADER, Frame, FrameDecoder, FrameStatus, encode

FRAMES = st.lists(
    st.builds(
        Frame, st.integers(0, 2**64 - 1), st.sampled_from(FrameStatus), st.integers(0, 16), st.binary(max_size=300)
    ),
    max_size=8,
)


def bytes_of(frames: list[Frame]) -> bytes:
    return b"".join(encode(f.request_id, f.status, f.payload, f.descriptors) for f in frames)


@given(FRAMES, st.lists(st.integers(1, 97), min_size=1))
def test_frames_arrive_whole_however_they_are_cut(frames: list[Frame], cuts: list[int]) -> None:
    data = bytes_of(frames)
    decoder = FrameDecoder(300)
    got: list[Frame] = []
    position = turn = 0
    while position < len(data):
        step = cuts[turn % len(cuts)]
        got += decoder.feed(data[position : position + step])
        position += step
        turn += 1
    assert got == frames


@given(st.lists(st.binary(max_size=400), max_size=20))
@settings(max_examples=300)
def test_any_bytes_give_frames_or_a_refusal_and_little_is_kept(chunks: list[bytes]) -> None:
    decoder = FrameDecoder(64)
    for chunk in chunks:
        try:
            frames = decoder.feed(chunk)
        except WireError:
            return
        assert all(len(frame.payload) <= 64 for frame in frames)
        assert len(decoder._kept) < HEADER.size + 64


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (HEADER.pack(65, 1, 0, 0), "65 bytes announced, 64 accepted"),
        (HEADER.pack(0, 1, 4, 0), "unknown status 4"),
        (HEADER.pack(0, 1, 1, 17), "17 descriptors announced"),
        (b"GET / HTTP/1.1\r\n\r\n", "bytes announced"),
    ],
)
def test_a_header_no_peer_sends_is_refused_before_its_payload_is_awaited(header: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        FrameDecoder(64).feed(header)


def test_both_sides_of_a_challenge_prove_the_secret() -> None:
    server, client = ServerChallenge(b"a" * 16), ClientChallenge(b"a" * 16)
    client.check(server.check(client.answer(server.greeting)))


def test_another_secret_proves_nothing_to_either_side() -> None:
    server, client = ServerChallenge(b"a" * 16), ClientChallenge(b"b" * 16)
    answer = client.answer(server.greeting)
    with pytest.raises(ChallengeFailed):
        server.check(answer)
    with pytest.raises(ChallengeFailed):
        client.check(ServerChallenge(b"b" * 16).check(client.answer(ServerChallenge(b"b" * 16).greeting))[::-1])


def test_a_recorded_answer_and_a_reflected_proof_are_refused() -> None:
    recorded = ClientChallenge(b"a" * 16)
    first = ServerChallenge(b"a" * 16)
    answer = recorded.answer(first.greeting)
    proof = first.check(answer)
    with pytest.raises(ChallengeFailed):
        ServerChallenge(b"a" * 16).check(answer)
    with pytest.raises(ChallengeFailed):
        first.check(answer[:32] + proof)


def test_a_short_secret_is_refused_with_its_length() -> None:
    with pytest.raises(SpecError, match="15 bytes"):
        ServerChallenge(b"a" * 15)


@pytest.mark.parametrize("text", ["unix:/a/b.sock", "unix:@name", "tcp:10.0.0.1:80", "tcp:::1:80"])
def test_an_endpoint_is_what_it_was_parsed_from(text: str) -> None:
    assert str(Endpoint.parse(text)) == text


@pytest.mark.parametrize("text", ["", "unix:", "tcp:host", "tcp:host:x", "tcp::80", "http://x", "tcp:h:65536"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="endpoint"):
        Endpoint.parse(text)


def test_a_path_the_kernel_would_cut_off_is_refused() -> None:
    with pytest.raises(SpecError, match="108 bytes"):
        Endpoint.parse("unix:/" + "x" * 107)

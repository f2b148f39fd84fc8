"""The four layers, the proof they yield, and that nothing else makes a lease."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvfabric
from kvfabric.fabric.claims import Claim
from kvfabric.fabric.invariants import check
from kvfabric.fabric.kinds import Form, Layer, ObjectKind, ProtocolError, Reason, Status
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.passport import Abi, AbiPassport, abi_refusal
from kvfabric.fabric.validation import HeldRun, Proof, Verdict, prove, whole_block

from .many_holders import Holders

GROUPS: dict[ObjectKind, list[dict[str, Any]]] = {
    ObjectKind.COMPRESSED_HISTORY: [{"name": "g", "kind": "compressed_history", "block_tokens": 8, "ratio": 4}],
    ObjectKind.UNCOMPRESSED_TAIL: [
        {"name": "h", "kind": "compressed_history", "block_tokens": 8, "ratio": 4},
        {"name": "g", "kind": "uncompressed_tail", "of": "h", "block_tokens": 4, "overlap_tokens": 4},
    ],
    ObjectKind.SLIDING_WINDOW: [{"name": "g", "kind": "sliding_window", "block_tokens": 8, "window_tokens": 9}],
    ObjectKind.INDEXER: [
        {"name": "h", "kind": "compressed_history", "block_tokens": 8},
        {"name": "g", "kind": "indexer", "of": "h", "block_tokens": 8},
    ],
}
"""For each declared kind a model whose group ``g`` is of it, the last one."""

P = range(17)
ABI_1, ABI_2 = AbiPassport(kernel="flash", kernel_abi=1).abi(), AbiPassport(kernel="flash", kernel_abi=2).abi()


def model(kind: ObjectKind, **fields: Any) -> ModelSpec:
    groups = [dict(group, block_bytes=64) for group in GROUPS[kind]]
    groups[-1].update(fields)
    return ModelSpec.load({"groups": groups})


def two_holders(kind: ObjectKind) -> Holders:
    return Holders(model(kind), {"n0": (0,), "n1": (0,)}, slots=16)


def abis(world: Holders, abi: Abi) -> tuple[Abi, ...]:
    """Readers whose last group has this layout."""
    return (*([ABI_1] * (len(world.model.groups) - 1)), abi)


def cut(world: Holders, holder: str, abi: Abi, **fields: Any) -> tuple[Status, Any]:
    answer = world.acquire(holder, P, abis=abis(world, abi), **fields)
    assert answer is not None
    return answer.status, answer.cause and (answer.cause.group, answer.cause.layer, answer.cause.reason)


# --- ABI: in memory, from a peer, from disk --------------------------------------------------------


@pytest.mark.parametrize("kind", list(GROUPS))
@pytest.mark.parametrize("where", ["memory", "peer", "disk"])
def test_written_under_abi_1_and_read_under_abi_2_is_abi_mismatch(kind: ObjectKind, where: str) -> None:
    world = two_holders(kind)
    assert world.store("n0", P, abi=ABI_1).refused is None
    reader = "n1" if where == "peer" else "n0"
    if where == "disk":
        assert world.swap_out("n0", P).refused is None
        world.start("n0")
    status, cause = cut(world, reader, ABI_2)
    assert status is Status.INVALID
    assert cause == ("g", Layer.ABI, Reason.ABI_MISMATCH)
    status, _ = cut(world, reader, ABI_1)
    assert status is Status.FULL_HIT
    assert all(check(core) == [] for core in world.cores.values())


@pytest.mark.parametrize("kind", list(GROUPS))
@pytest.mark.parametrize("where", ["memory", "peer", "disk"])
def test_written_under_a_looser_alignment_than_the_reader_needs_is_misaligned(kind: ObjectKind, where: str) -> None:
    world = two_holders(kind)
    loose, strict = Abi(ABI_1.fingerprint, 16), Abi(ABI_1.fingerprint, 64)
    assert world.store("n0", P, abi=loose).refused is None
    reader = "n1" if where == "peer" else "n0"
    if where == "disk":
        assert world.swap_out("n0", P).refused is None
        world.start("n0")
    status, cause = cut(world, reader, strict)
    assert (status, cause) == (Status.INVALID, ("g", Layer.ALIGNMENT, Reason.MISALIGNED))
    status, _ = cut(world, reader, Abi(ABI_1.fingerprint, 8))
    assert status is Status.FULL_HIT


@pytest.mark.parametrize(
    "change",
    [
        {"engine": "other"},
        {"kernel": "other"},
        {"kernel_abi": 2},
        {"layout": "blocks"},
        {"metadata": "scales"},
        {"dtype": "fp8"},
        {"byte_order": "big"},
        {"rotary": "interleaved"},
        {"strides": (64, 1)},
        {"token_alignment_tokens": 16},
        {"extent_format": "kvx2"},
        {"shard": "1/2"},
        {"fields": ("k", "v")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_of_a_passport_counts(change: dict[str, Any]) -> None:
    one, other = AbiPassport(), AbiPassport(**change)
    assert abi_refusal(one.abi(), other.abi()) is Reason.ABI_MISMATCH
    assert abi_refusal(one.abi(), AbiPassport().abi()) is None


def test_fields_of_a_passport_do_not_run_together() -> None:
    assert AbiPassport(engine="ab", kernel="c").abi() != AbiPassport(engine="a", kernel="bc").abi()


# --- the layers one by one -------------------------------------------------------------------------


def share(world: Holders, tokens: int = 16) -> dict[str, Any]:
    """Everything that proves P's share at n0."""
    core = world.cores["n0"]
    keys = world.keys(P)
    held = {}
    for g, spec in enumerate(world.model.groups):
        count = tokens // spec.unit_tokens
        objects = world.objects(keys, g, 0, range(count))
        slots = core.ctx.books.locate(g, 0, [objects.digests[32 * i : 32 * i + 32] for i in range(count)])
        assert -1 not in slots
        held[g, 0] = HeldRun(list(range(count)), slots)
    return {
        "model": world.model,
        "tokens": tokens,
        "n": len(P),
        "shards": (0,),
        "revisions": tuple(None if s.kind is ObjectKind.SLIDING_WINDOW else 0 for s in world.model.groups),
        "abis": (ABI_1,) * len(world.model.groups),
        "held": held,
        "books": core.ctx.books,
        "digests": {},
    }


def proven(how: dict[str, Any]) -> Proof | Verdict:
    how = dict(how)
    return prove(how.pop("model"), **how)


@pytest.fixture(params=list(GROUPS))
def world(request: pytest.FixtureRequest) -> Holders:
    world = two_holders(request.param)
    assert world.store("n0", P, abi=ABI_1).refused is None
    return world


def test_a_sound_share_yields_a_proof_of_four_verdicts_and_the_exact_slots(world: Holders) -> None:
    proof = proven(share(world))
    assert isinstance(proof, Proof)
    assert [v.layer for v in proof.verdicts] == [Layer.WHOLE_BLOCK, Layer.ABI, Layer.INTERSECTION, Layer.ALIGNMENT]
    assert all(v.passed for v in proof.verdicts)
    assert {(run.group, tuple(run.slots.tolist())) for run in proof.runs} == {
        (g, tuple(run.slots)) for (g, _), run in share(world)["held"].items()
    }


@pytest.mark.parametrize("tokens", [0, 4, 12, 24, -8])
def test_whole_block_refuses_what_is_off_the_grid_or_past_the_prompt(tokens: int) -> None:
    spec = model(ObjectKind.COMPRESSED_HISTORY)
    assert whole_block(spec, tokens, len(P)).reason is Reason.OFF_GRID
    assert whole_block(spec, 16, len(P)).passed
    assert whole_block(spec, 16, 16).reason is Reason.OFF_GRID, "at least one token is computed"


def refused(how: dict[str, Any]) -> tuple[Layer, Reason | None]:
    verdict = proven(how)
    assert isinstance(verdict, Verdict)
    return verdict.layer, verdict.reason


def test_the_abi_layer_refuses_another_layout(world: Holders) -> None:
    how = share(world)
    how["abis"] = (*how["abis"][:-1], ABI_2)
    assert refused(how) == (Layer.ABI, Reason.ABI_MISMATCH)


def test_the_intersection_refuses_what_is_not_held(world: Holders) -> None:
    how = share(world)
    last = len(world.model.groups) - 1
    how["held"][last, 0].indices.pop()
    how["held"][last, 0].slots.pop()
    layer, reason = refused(how)
    assert layer is Layer.INTERSECTION
    spec = world.model.groups[last]
    assert spec.form is Form.BLOCKS
    assert (
        reason
        is {
            ObjectKind.COMPRESSED_HISTORY: Reason.NOT_STORED,
            ObjectKind.UNCOMPRESSED_TAIL: Reason.TAIL_GAP,
            ObjectKind.SLIDING_WINDOW: Reason.WINDOW_INCOMPLETE,
            ObjectKind.INDEXER: Reason.INDEX_ABSENT,
        }[spec.kind]
    )


def test_the_intersection_refuses_another_shard_of_the_same_blocks(world: Holders) -> None:
    how = share(world)
    how["shards"] = (0, 1)
    assert refused(how)[0] is Layer.INTERSECTION


def test_the_intersection_refuses_a_slot_that_changed(world: Holders) -> None:
    how = share(world)
    world.arenas["n0"].begin_write(how["held"][0, 0].slots[-1])
    assert refused(how) == (Layer.INTERSECTION, Reason.VERSION_CHANGED)


def test_the_intersection_refuses_another_revision(world: Holders) -> None:
    how = share(world)
    last = len(world.model.groups) - 1
    if world.model.groups[last].kind is ObjectKind.SLIDING_WINDOW:
        return  # nothing binds a window's revision
    how["revisions"] = (*how["revisions"][:-1], 1)
    layer, reason = refused(how)
    assert layer is Layer.INTERSECTION
    assert reason in {Reason.NOT_STORED, Reason.TAIL_GAP, Reason.INDEX_STALE}


def test_alignment_refuses_half_an_object(world: Holders) -> None:
    how = share(world)
    how["books"].lengths[how["held"][0, 0].slots[-1]] = 32
    assert refused(how) == (Layer.ALIGNMENT, Reason.MISALIGNED)


def test_alignment_refuses_bytes_that_digest_otherwise(world: Holders) -> None:
    how = share(world)
    how["digests"] = {how["held"][0, 0].slots[-1]: bytes(16)}
    assert refused(how) == (Layer.ALIGNMENT, Reason.CHECKSUM_MISMATCH)
    how["digests"] = {slot: world.arenas["n0"].checksum(slot) for run in how["held"].values() for slot in run.slots}
    assert isinstance(proven(how), Proof)


# --- no other way to a lease -----------------------------------------------------------------------


def test_a_proof_is_made_by_prove_alone() -> None:
    with pytest.raises(ProtocolError, match="prove"):
        Proof(object(), tokens=16, shards=(0,), verdicts=(), runs=(), claim=Claim.of(()), headers=b"")


@cache
def calls() -> frozenset[tuple[str, str, str]]:
    """Every call in the package: (what is called, file, enclosing function)."""
    root = Path(kvfabric.__file__).parent
    found = set()
    for path in root.glob("[a-z]*/**/*.py"):
        if path.relative_to(root).parts[0] in {"tests", "examples"}:
            continue
        for scope in ast.walk(ast.parse(path.read_text())):
            if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
                found |= {(_name_of(n.func), path.name, scope.name) for n in ast.walk(scope) if isinstance(n, ast.Call)}
    return frozenset(found)


def calls_of(name: str) -> set[tuple[str, str]]:
    """Where something of that name is called: (file, enclosing function)."""
    return {(file, scope) for called, file, scope in calls() if called == name}


def _name_of(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def test_a_lease_is_built_only_from_a_proof() -> None:
    assert calls_of("Proof") == {("validation.py", "_proven")}
    assert calls_of("_proven") == {("validation.py", "prove"), ("validation.py", "prove_stored")}
    assert calls_of("SealedRun") == {("validation.py", "sealed_runs"), ("validation.py", "tail")}
    assert calls_of("prove_stored") == {("at_hand.py", "_proof")}
    assert calls_of("LeaseRecord") == {("leases.py", "grant")}
    assert calls_of("LeaseBook") == {("context.py", "__init__")}
    assert calls_of("grant") == {("grants.py", "lease")}
    assert calls_of("prove") == {("parts.py", "_prove"), ("at_hand.py", "_proof")}
    assert calls_of("no_such_function_anywhere") == set()


def test_a_lease_grant_leaves_a_holder_only_after_all_shares_were_granted() -> None:
    decoded = ("repeats.py", "_make_answer")  # a reader's, out of a frame: no holder reads an answer's
    assert calls_of("LeaseGrant") == {("leader.py", "part_granted"), ("at_hand.py", "answer"), decoded}
    assert calls_of("LeasePart") == {("leases.py", "part_of"), decoded}
    actors = Path(kvfabric.__file__).parent / "actors"
    assert [path.name for path in actors.glob("*.py") if "_answers.read(" in path.read_text()] == ["client.py"]
    assert calls_of("part_of") == {("parts.py", "grant"), ("at_hand.py", "answer")}


def test_what_was_proven_is_what_is_leased(world: Holders) -> None:
    grant = world.granted("n0", P, abis=(ABI_1,) * len(world.model.groups))
    (record,) = world.cores["n0"].ctx.leases.live.values()
    leased = {(r.group, r.indices, r.slots, r.versions) for r in grant.parts[0].slots}
    assert leased == {
        (run.group, run.indices, run.slots.astype("<u4").tobytes(), run.versions) for run in record.proof.runs
    }
    slots = np.concatenate([run.slots for run in record.proof.runs])
    assert len(set(slots.tolist())) == len(slots)

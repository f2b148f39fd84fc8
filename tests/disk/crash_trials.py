"""Kill -9 a process that writes and deletes extents, at random points, many times over one folder.

    python crash_trials.py FOLDER TRIALS SEED      prints one JSON object

Each trial forks a writer that says over a pipe what it is about to do and what it has done; the
parent kills it after a random time, opens the folder again and judges: every block of every extent
reads as it was stored, what was said to stand stands, what was said to be gone is gone, and every
byte in the folder is accounted for. One thread only, so that forking is safe.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import select
import signal
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from kvfabric.transport.disk.blocks import Want
from kvfabric.transport.disk.codecs import Codec
from tests.disk import stage

KILL_WITHIN_S = 0.06
EXTENTS_KEPT = 6


def write_for_ever(root: Path, seed: int, told: int) -> None:
    """In the child: write and delete, telling each intention before and each fact after."""
    rng = random.Random(seed)
    arena = stage.arena()
    store, found = stage.open_store(root, arena)
    standing = [h.uid for h in found.headers]

    def tell(word: str, uid: bytes) -> None:
        os.write(told, f"{word} {uid.hex()}\n".encode())

    while True:
        if len(standing) > EXTENTS_KEPT or (standing and rng.random() < 0.3):
            uid = standing.pop(rng.randrange(len(standing)))
            tell("d", uid)
            store.delete(uid)
            tell("D", uid)
        else:
            uid = secrets.token_bytes(16)  # never drawn twice, as the driver's
            keys = [rng.randrange(1 << 20) for _ in range(rng.randrange(1, stage.SLOTS // 2))]
            drafted = stage.draft(uid, arena, keys, codec=rng.choice(list(Codec)), packs=rng.random() < 0.5)
            tell("w", uid)
            store.write(drafted, stage.at_once)
            tell("W", uid)
            standing.append(uid)


def judge(root: Path, sure: set[bytes], gone: set[bytes]) -> Counter[str]:
    """Open the folder as a new life would and count what is wrong."""
    arena = stage.arena()
    store, found = stage.open_store(root, arena)
    counts: Counter[str] = Counter(extents=len(found.headers), swept=found.temporary + found.doomed + found.adopted)
    there = {h.uid for h in found.headers}
    counts["stood_and_lost"] = len(sure - there)
    counts["deleted_and_back"] = len(gone & there)
    counts["refused_headers"] = len(found.refused)
    first = arena.layout.first_slot
    for header in found.headers:
        wants = [Want(header.uid, n, first[e.group] + n % stage.SLOTS) for n, e in enumerate(header.entries)]
        for want, entry in zip(wants, header.entries, strict=True):
            (got,) = store.read([want], stage.at_once)
            counts["blocks"] += 1
            counts["wrong_blocks"] += got.wrong or got.refused is not None or got.checksum != entry.checksum
    folder = store.folder.path
    files = {p.name: p.stat().st_size for p in folder.iterdir() if p.suffix in (".kvx", ".tmp")}
    counts["lost_bytes"] = sum(size for name, size in files.items() if bytes.fromhex(name[:32]) not in there)
    counts["uncounted_bytes"] = abs(sum(files.values()) - store.used_bytes)
    store.close()
    return counts


def trial(root: Path, rng: random.Random, standing: set[bytes]) -> tuple[Counter[str], set[bytes]]:
    read_end, write_end = os.pipe()
    seed = rng.randrange(1 << 30)
    child = os.fork()
    if not child:
        os.close(read_end)
        try:
            write_for_ever(root, seed, write_end)
        finally:
            os._exit(3)
    os.close(write_end)
    select.select([read_end], [], [], 20.0)  # its first word: from here on anything may be cut
    time.sleep(rng.random() * KILL_WITHIN_S)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read_end, "rb") as pipe:
        words = [line.split() for line in pipe.read().decode().splitlines()]
    sure, gone = set(standing), set[bytes]()
    for word, name in words:
        uid = bytes.fromhex(name)
        if word == "d":
            sure.discard(uid)
        elif word == "D":
            gone.add(uid)
        elif word == "W":
            sure.add(uid)
    counts = judge(root, sure, gone)
    counts["killed"] = os.WIFSIGNALED(status)
    counts["acts"] = len(words)
    counts["cut_in_an_act"] = bool(words) and words[-1][0] in "wd"
    return counts, sure


def main() -> None:
    root, trials, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    total: Counter[str] = Counter()
    for _ in range(trials):
        store, found = stage.open_store(root)
        standing = {h.uid for h in found.headers}
        store.close()
        counts, _ = trial(root, rng, standing)
        total.update(counts)
    sys.stdout.write(json.dumps(total | {"trials": trials}))


if __name__ == "__main__":
    main()

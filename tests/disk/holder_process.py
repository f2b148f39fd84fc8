"""A real holder without a cluster: ``python holder_process.py SETUP_JSON``.

Prints its Member record in hex once it is up, serves until its standard input ends or it is killed.
A supervisor's right to grant is given once, for an hour.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from kvfabric.actors.holder import Holder
from kvfabric.fabric import wire
from kvfabric.fabric.effects import Received
from kvfabric.fabric.identity import weights_digest16
from kvfabric.fabric.messages import Birth, GrantUntil, SetWeights


async def serve(setup: dict[str, Any]) -> None:
    setup |= {"secret": b"s" * 32, "weights": weights_digest16(setup["weights"])}
    holder = Holder(setup)
    birth = wire.decode_plain(Birth, await holder.start())
    holder._feed(Received("supervisor", GrantUntil(holder.incarnation, 3600.0)))
    sys.stdout.write(wire.encode_plain(birth.member).hex() + "\n")
    sys.stdout.flush()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        word, *rest = line.split()
        match word:
            case "inject":
                await holder.inject_disk(rest[0], int(rest[1]))
            case "weights":
                retired = tuple(weights_digest16(w) for w in rest[1:])
                holder._feed(Received("supervisor", SetWeights(weights_digest16(rest[0]), retired)))
            case "purge":
                await holder._purge(wire.decode(bytes.fromhex(rest[0])))
        sys.stdout.write("ok\n")
        sys.stdout.flush()
    await holder.close()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
    os._exit(0)

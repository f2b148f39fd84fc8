"""A directory shard in a process of its own, of whatever version of the package is on its path.

Started as ``python peer_process.py NUMBER SECRET_HEX SPEC_JSON``; prints its member record's fields as JSON and serves
until its input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys

from kvfabric.actors.directory import Directory
from kvfabric.fabric import wire
from kvfabric.fabric.messages import Birth


async def main() -> None:
    number, secret, spec = sys.argv[1:]
    setup = {
        "fabric": f"versions-{secret[:8]}",
        "address": f"directory:{number}",
        "incarnation": 1,
        "node": "n",
        "host": "127.0.0.1",
        "secret": bytes.fromhex(secret),
        "spec": spec,
    }
    directory = Directory(setup)
    member = wire.decode_plain(Birth, await directory.start()).member
    where = {"address": member.address, "unix": member.unix, "tcp": member.tcp, "host": member.host}
    sys.stdout.write(json.dumps({"wire": wire.SCHEMA, **where}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await directory.close()


if __name__ == "__main__":
    asyncio.run(main())

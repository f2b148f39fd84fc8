"""Two hosts on one machine: network namespaces with addresses of their own, and the link between them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

HOSTS = ("10.91.7.1", "10.91.7.2")

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run(["which", "ip"], capture_output=True, check=False).returncode != 0,
    reason="network namespaces need root and iproute2",
)


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a pair of devices named as they are; their addresses are HOSTS."""
    names = (f"kvf{os.getpid()}a", f"kvf{os.getpid()}b")
    first, second = names
    script = [f"netns add {first}", f"netns add {second}"]
    script += [f"link add {first} netns {first} type veth peer name {second} netns {second}"]
    for name, host in zip(names, HOSTS, strict=True):
        script += [f"-n {name} addr add {host}/24 dev {name}"]
        script += [f"-n {name} link set {device} up" for device in (name, "lo")]
    try:
        for line in script:
            subprocess.run(["ip", *line.split()], check=True)
        for name in names:
            bring_up(name)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def bring_up(namespace: str) -> None:
    """Set the device up and wait until it carries."""
    subprocess.run(["ip", "-n", namespace, "link", "set", namespace, "up"], check=True)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        shown = subprocess.run(
            ["ip", "-n", namespace, "-br", "link", "show", namespace], capture_output=True, text=True
        )
        if shown.stdout.split()[1] == "UP":
            return
        time.sleep(0.01)
    raise AssertionError(f"{namespace} does not come up")


def cut(namespace: str) -> None:
    """Take the device down."""
    subprocess.run(["ip", "-n", namespace, "link", "set", namespace, "down"], check=True)

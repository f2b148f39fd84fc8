"""The checks of ``kvfabric doctor``: facts in, findings out; nothing here asks anyone.

Each finding names a check, says how bad it is, and bears a remedy unless all is well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

CLOCK_APART_S_MAX = 5.0
STALE_S_MAX = 10.0
MEMORY_FLOOR_BYTES = 512 << 20
SHM_FLOOR_BYTES = 64 << 20
GRANT_LEFT_S_MIN = 1.0


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. ``where``: a process or node; "": the fabric."""

    check: str
    level: Level
    where: str
    detail: str
    remedy: str = ""


Facts = Mapping[str, Any]
"""``status``: the fabric's; ``health``: facts by holder; ``here``: of this process; ``asked_s``: wall clock when asked."""


def _ok(check: str, detail: str) -> Finding:
    return Finding(check, Level.OK, "", detail)


def processes(facts: Facts) -> Iterator[Finding]:
    """Everyone who is wanted is up and answers."""
    told = {p.get("address"): p for p in (*facts["status"]["holders"], *facts["status"]["directory"])}
    for address, process in facts["status"]["processes"].items():
        known = told.get(address, {})
        problem = process["failure"] or known.get("error", "")
        if process["life"] == "up" and not problem:
            continue
        detail = f"{process['life']}: {problem}" if problem else process["life"]
        remedy = "see its log (ray logs actor), the node's memory and `ray status`; it is started again by itself"
        yield Finding("processes", Level.FAIL, address, detail, remedy)
    if not any(p.get("pools") for p in facts["status"]["holders"]):
        yield Finding("processes", Level.FAIL, "", "no holder is up", "node_resource: no alive node may offer it")


def invariants(facts: Facts) -> Iterator[Finding]:
    """Books and invariants of every holder."""
    for address, health in facts["health"].items():
        if health.get("violations_count"):
            remedy = "a bug: `kvfabric bypass on`, save this output, restart the holder, report it"
            detail = f"{health['violations_count']} violations; {health['violations'][0]}"
            yield Finding("invariants", Level.FAIL, address, detail, remedy)


def grants(facts: Facts) -> Iterator[Finding]:
    """Holders may grant."""
    if facts["status"]["bypassed"]:
        remedy = "`kvfabric bypass off` once the suspicion is settled"
        yield Finding("grants", Level.WARN, "", "bypassed: every acquire answers recompute", remedy)
    for address, health in facts["health"].items():
        left_s = health.get("grants_left_s")
        if health.get("draining"):
            yield Finding("grants", Level.WARN, address, "draining", "nothing to do where the node is to go")
        elif left_s is not None and left_s < GRANT_LEFT_S_MIN:
            remedy = "the supervisor does not reach it: is the supervisor alive (`kvfabric status`), is the network?"
            yield Finding("grants", Level.FAIL, address, f"its right to grant ends in {left_s:.1f} s", remedy)


def clocks(facts: Facts) -> Iterator[Finding]:
    """Wall clocks agree: logs and records are merged by them. Leases do not need it."""
    for address, health in facts["health"].items():
        apart_s = abs(health.get("wall_s", facts["asked_s"]) - facts["asked_s"])
        if apart_s > CLOCK_APART_S_MAX:
            detail = f"{apart_s:.0f} s apart from this machine's"
            yield Finding("clocks", Level.WARN, address, detail, "run an NTP client on every node")


def links(facts: Facts) -> Iterator[Finding]:
    """Every way of moving bytes started."""
    for address, health in facts["health"].items():
        for link, problem in sorted(health.get("link_problems", {}).items()):
            remedy = (
                "NIXL with UCX: `pip show nixl-cu12`, transport.nixl_backend, UCX_TLS and UCX_NET_DEVICES; bytes go over TCP"
                if link == "nixl"
                else "transport.links names it: free the port, or leave it out"
            )
            yield Finding("links", Level.WARN, address, f"{link} is not used: {problem}", remedy)


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """Ray's object store lives in /dev/shm, arenas in anonymous memory: both need room."""
    for address, health in facts["health"].items():
        if health.get("shm_free_bytes", SHM_FLOOR_BYTES) < SHM_FLOOR_BYTES:
            detail = f"shared memory has {health['shm_free_bytes'] >> 20} MiB free of {health['shm_bytes'] >> 20}"
            remedy = "give the container more (docker --shm-size, an emptyDir of medium Memory)"
            yield Finding("shared_memory", Level.WARN, address, detail, remedy)
        if health.get("memory_available_bytes", MEMORY_FLOOR_BYTES) < MEMORY_FLOOR_BYTES:
            detail = f"{health['memory_available_bytes'] >> 20} MiB of memory are free"
            remedy = "lower memory_bytes or slots, or give the node more: its kernel ends processes next"
            yield Finding("shared_memory", Level.FAIL, address, detail, remedy)


def disks(facts: Facts) -> Iterator[Finding]:
    """The disk tier works."""
    for address, health in facts["health"].items():
        disk = health.get("disk")
        if disk and disk["state"] != "ok":
            detail = f"{disk['path']}: {disk['state']}: {disk['detail'] or disk['reason']}"
            remedy = (
                "look at its free space (disk.free_floor_bytes), its mount and permissions; it is tried again by itself"
            )
            yield Finding("disk", Level.FAIL if disk["reason"] else Level.WARN, address, detail, remedy)


def directory(facts: Facts) -> Iterator[Finding]:
    """The directory keeps up."""
    for address, health in facts["health"].items():
        if health.get("staleness_s", 0.0) > STALE_S_MAX:
            detail = f"it has not seen all changes for {health['staleness_s']:.0f} s"
            remedy = "`kvfabric status`: is every directory shard up? More shards: fabric.reshard(n)"
            yield Finding("directory", Level.WARN, address, detail, remedy)


def ray_settings(facts: Facts) -> Iterator[Finding]:
    """Settings of Ray and UCX that bite."""
    for address, health in facts["health"].items():
        if health.get("niceness", 0) > 0:
            detail = f"Ray runs its workers at nice {health['niceness']}"
            remedy = "RAY_worker_niceness=0 before `ray start`: on a busy node the holder loses to everything else"
            yield Finding("ray_settings", Level.WARN, address, detail, remedy)
        environment = health.get("environment", {})
        if not health.get("infiniband", True) and "^ib" not in environment.get("UCX_MODULES", ""):
            detail = "UCX_MODULES is not ^ib on a node without InfiniBand"
            remedy = "UCX_MODULES=^ib before `ray start`: processes with NIXL crash at their exit without it"
            yield Finding("ray_settings", Level.WARN, address, detail, remedy)


def version_agreement(facts: Facts) -> Iterator[Finding]:
    """Every process runs the same releases as this one."""
    mine = facts["here"]["versions"]
    for address, health in facts["health"].items():
        theirs = health.get("versions", mine)
        apart = [p for p in sorted({*mine, *theirs}) if mine.get(p) != theirs.get(p)]
        if apart:
            detail = ", ".join(f"{p} {theirs.get(p, 'absent')} (here {mine.get(p, 'absent')})" for p in apart)
            level = Level.FAIL if "ray" in apart else Level.WARN
            yield Finding("versions", level, address, detail, "install the same releases on every node")
        unknown = health.get("settings_passed_over", ())
        if unknown:
            detail = f"does not know {', '.join(unknown)}, which the fabric's spec sets"
            yield Finding("versions", Level.WARN, address, detail, "upgrade kvfabric on this node")


Check = Callable[[Facts], Iterator[Finding]]

CHECKS: Mapping[str, tuple[Check, str]] = {
    "processes": (processes, "every process is up and answers"),
    "invariants": (invariants, "books and invariants hold on every holder"),
    "grants": (grants, "every holder may grant"),
    "clocks": (clocks, "wall clocks agree"),
    "links": (links, "every link started"),
    "shared_memory": (shared_memory, "memory and /dev/shm have room"),
    "disk": (disks, "the disk tier works, or there is none"),
    "directory": (directory, "the directory keeps up"),
    "ray_settings": (ray_settings, "no setting of Ray or UCX bites"),
    "versions": (version_agreement, "every node runs the same releases"),
}


def diagnose(facts: Facts) -> list[Finding]:
    """Every check once; a check that finds nothing wrong says so."""
    found: list[Finding] = []
    for name, (check, well) in CHECKS.items():
        problems = list(check(facts))
        found += problems or [_ok(name, well)]
    return found

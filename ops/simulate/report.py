"""What a run is printed as."""

from __future__ import annotations

import json

from .mutants import UNMUTATED, Hunt
from .run import Report


def as_json(report: Report) -> str:
    """One line."""
    return json.dumps(report.plain())


def as_text(report: Report) -> str:
    """A few lines; of a failed run the law, what was found and the last events about it."""
    plain = report.plain()
    rates = (plain["granted_per_1000_steps"], plain["restores_per_1000_steps"])
    lines = [
        f"seed {report.seed}: {report.steps} steps, {report.virtual_s:.1f} simulated s, {plain['steps_per_s']} steps/s",
        f"a thousand steps: {rates[0]} leases granted, {rates[1]} objects restored",
        f"wrong reads {report.wrong_reads}, slots lost {report.slots_lost}, hangs {report.hangs}",
    ]
    if report.failure is not None:
        lines += [f"FAILED at step {report.failure.step}: {report.failure.law}: {report.failure.detail}"]
        lines += list(report.failure.trace)
    return "\n".join(lines)


def hunt_as_json(hunt: Hunt) -> str:
    """One line."""
    return json.dumps(hunt.plain())


def hunt_as_text(hunt: Hunt) -> str:
    """One line: how a mistake was found, or that it was not."""
    if hunt.mutant == UNMUTATED:
        verdict = f"BROKEN: {hunt.law}: {hunt.detail}" if hunt.found else "clean"
        return f"{hunt.mutant:<22} {verdict}, {hunt.steps} steps"
    if not hunt.found:
        return f"{hunt.mutant:<22} SURVIVED {hunt.steps} steps"
    return f"{hunt.mutant:<22} found after {hunt.steps} steps in seed {hunt.seed}: {hunt.law}: {hunt.detail}"

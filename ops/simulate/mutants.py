"""Mutants: the core with one rule, check or step replaced by a plausible mistake.

Each replaces from outside what the core names; the simulation must notice every one of them, and
must find nothing in the core as it is. One that survives is a hole in the simulation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import mutants_of_rules as rules
from . import mutants_of_steps as steps
from . import mutants_of_tiers as tiers
from .patches import Patches
from .run import Report, simulate
from .world import World


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake: its name, what it does, how it is put in place."""

    name: str
    mistake: str
    apply: Callable[[Patches], None]
    met_in: Callable[[World], object] = lambda _: True
    """In which worlds what is replaced runs at all: in no other is it looked for."""


def _slabs(world: World) -> bool:
    return world.slabs > 0


def _drains(world: World) -> bool:
    return world.drains


def _stores(world: World) -> bool:
    return world.store is not None


def _scrubs(world: World) -> bool:
    return world.extras.scrub_bytes_per_s is not None


def _budgets(world: World) -> bool:
    return world.budget_bytes_per_s is not None


MUTANTS: tuple[Mutant, ...] = (
    Mutant("standing", "a prompt is granted again without a look at its slots", steps.standing),
    Mutant("version_reread", "the source's versions are not read again after a transfer", steps.version_reread),
    Mutant("fence", "a reader does not look at the holder's incarnation and right to grant", steps.fence),
    Mutant("deadline", "a reader does not look at its deadline", steps.deadline),
    Mutant("digest", "what a transfer brought is not digested", steps.digest),
    Mutant("restore_digest", "what a restore brought is not digested", steps.restore_digest),
    Mutant("index_revision", "an indexer of any revision will do", rules.index_revision),
    Mutant("passport", "bytes of any layout will do", rules.passport),
    Mutant("alignment", "length and alignment of the bytes are not looked at", rules.alignment),
    Mutant("overlap_optional", "a tail's overlap is not needed", rules.overlap_optional),
    Mutant("any_group", "one group suffices", rules.any_group),
    Mutant("half_block", "a history block that is needed in part is not needed", rules.half_block),
    Mutant("tail_revision", "a tail of any revision will do", rules.tail_revision),
    Mutant("window_by_length", "a window of the right length at another position will do", rules.window_by_length),
    Mutant("reuse_quarantined", "slots that foreign bytes may still reach are used again", steps.reuse_quarantined),
    Mutant("trust_directory", "a source is what the directory said it is", steps.trust_directory),
    Mutant("one_free_list", "two groups take their slots from one free list", steps.one_free_list),
    Mutant("limit_outside_charge", "a limit is asked when planning and not when charging", steps.limit_outside_charge),
    Mutant("restore_as_allocation", "a restore takes its slot as a new object does", steps.restore_as_allocation),
    Mutant("extend_in_two_steps", "a commit becomes visible in two steps", steps.extend_in_two_steps),
    Mutant("page_table_early", "restored slots are visible before their bytes are verified", steps.page_table_early),
    Mutant("grant_before_proof", "a lease is granted before the transfer is proven", steps.grant_before_proof),
    Mutant("move_under_graph", "what a graph lease froze is moved", steps.move_under_graph),
    Mutant("late_commit", "a late commit of a superseded attempt is accepted", steps.late_commit),
    Mutant("old_incarnation", "events of a dead life are listened to", steps.old_incarnation),
    Mutant("replay_short", "a replay begins one token late", rules.replay_short),
    Mutant("replay_sinks", "a replay needs no sinks", rules.replay_sinks),
    Mutant("replay_for_graphs", "a captured graph is granted a replay", rules.replay_for_graphs),
    Mutant("floors_only_planned", "a limit keeps nothing for another kind", steps.floors_only_planned),
    Mutant("quota_at_start", "a tenant's leases are not counted at the grant", steps.quota_at_start),
    Mutant("slab_not_empty", "a slab changes hands with what lies in it", steps.slab_not_empty, _slabs),
    Mutant("slab_kept", "who gave a slab away goes on using it", steps.slab_kept, _slabs),
    Mutant("drain_digest", "what a drain moved is not digested", steps.drain_digest, _drains),
    Mutant("upload_refused", "an upload that was refused counts as done", tiers.upload_refused, _stores),
    Mutant("upload_once", "an upload that failed is not tried again", tiers.upload_once, _stores),
    Mutant("scrub_once", "a disk is scrubbed once in a life", tiers.scrub_once, _scrubs),
    Mutant("scrub_keeps", "a wrong copy on disk of what is in memory is kept", tiers.scrub_keeps, _scrubs),
    Mutant("budget_saved_up", "a pause saves up bytes without end", tiers.budget_saved_up, _budgets),
    Mutant("budget_of_reads", "what is written out does not count as moved", tiers.budget_of_reads, _budgets),
    Mutant("retired_weights", "a reader does not look at the weights in force", steps.retired_weights),
)

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}

UNMUTATED = "unmutated"

SEEDS = tuple(range(1, 41))
STEPS_A_SEED = 1500
"""A mutant is looked for in these seeds, so many steps each: that bounds what finding it may cost."""


@dataclass(frozen=True, slots=True)
class Hunt:
    """How one mutant was found: by which law, in which seed, after how many steps over all seeds."""

    mutant: str
    found: bool
    steps: int
    seed: int | None
    law: str
    detail: str

    def plain(self) -> dict[str, Any]:
        """One JSON object."""
        return {
            "mutant": self.mutant,
            "found": self.found,
            "steps": self.steps,
            "seed": self.seed,
            "law": self.law,
            "detail": self.detail,
        }


def run_mutant(mutant: Mutant, seed: int, steps_max: int = STEPS_A_SEED) -> Report:
    """One seed with one mutant in place."""
    with Patches() as patches:
        mutant.apply(patches)
        return simulate(seed, steps_max)


def hunt(mutant: Mutant, seeds: tuple[int, ...] = SEEDS) -> Hunt:
    """Look for a mutant, seed by seed, until a law is broken."""
    taken = 0
    for seed in seeds:
        if not mutant.met_in(World(seed)):
            continue
        report = run_mutant(mutant, seed)
        if report.failure is not None:
            taken += report.failure.step
            return Hunt(mutant.name, True, taken, seed, report.failure.law, report.failure.detail)
        taken += report.steps
    return Hunt(mutant.name, False, taken, None, "", "")


def hunt_none(seeds: tuple[int, ...] = SEEDS) -> Hunt:
    """The core as it is, in the same seeds: nothing must be found."""
    return hunt(Mutant(UNMUTATED, "none", lambda _: None), seeds)

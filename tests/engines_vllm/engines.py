"""A vLLM engine whose loads can be broken and whose preemptions are counted."""

from __future__ import annotations

from typing import Any

from kvfabric.engines.vllm_tier import trial


class Engine(trial.Engine):
    """One engine in a process of its own. Everything it returns is plain data."""

    @property
    def tier(self) -> Any:
        return self.core.scheduler.connector.connector_scheduler.manager.secondary_tiers[0]

    def break_loads(self, every: int) -> None:
        """From here on every so-many-th block that is loaded fails; 0: none."""
        blocks = self.tier.blocks
        whole = type(blocks).load
        seen = [0]

        def load(names: Any, rows: Any) -> Any:
            moved = whole(blocks, names, rows)
            for place in list(moved.done):
                seen[0] += 1
                if every and seen[0] % every == 0:
                    rows[place][:] = 255  # what a torn transfer leaves behind
                    moved.done.remove(place)
                    moved.refused[place] = "transfer_failed"
            return moved

        blocks.load = load

    def counts(self) -> dict[str, int]:
        """What the tier told vLLM's metrics since it was last asked, labels joined."""
        stats = self.tier.get_stats()
        return {} if stats is None else {str(name): int(value) for name, value in stats.reduce().items()}

    def preemptions(self) -> int:
        """How often a request was preempted."""
        return int(self.preempted)

    def count_preemptions(self) -> None:
        self.preempted = 0
        scheduler = self.core.scheduler
        whole = scheduler._preempt_request

        def preempt(*args: Any, **kwargs: Any) -> Any:
            self.preempted += 1
            return whole(*args, **kwargs)

        scheduler._preempt_request = preempt

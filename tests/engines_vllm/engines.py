"""A vLLM engine whose loads can be broken and whose preemptions are counted."""

from __future__ import annotations

from typing import Any

from kvfabric.engines.vllm_tier import trial


class Engine(trial.Engine):
    """One engine in a process of its own. Everything it returns is plain data."""

    @property
    def tier(self) -> Any:
        return self.core.scheduler.connector.connector_scheduler.manager.secondary_tiers[0]

    @property
    def session(self) -> Any:
        """Of the tier, or of the connector where the engine has that."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        moving = getattr(get_kv_transfer_group(), "moving", None)
        return self.tier.blocks.session if moving is None else moving._session

    def naming(self) -> dict[str, Any]:
        """How it names blocks, as a router is told."""
        told: dict[str, Any] = self.llm.collective_rpc("kvfabric_naming")[0]
        return told

    def break_loads(self, every: int) -> None:
        """From here on every so-many-th block that is loaded fails; 0: none."""
        blocks = self.tier.blocks
        whole = type(blocks).load
        self.loaded = self.failed = 0

        def load(names: Any, rows: Any) -> Any:
            moved = whole(blocks, names, rows)
            for place in list(moved.done):
                self.loaded += 1
                if every and self.loaded % every == 0:
                    self.failed += 1
                    rows[place][:] = 255  # what a torn transfer leaves behind
                    moved.done.remove(place)
                    moved.refused[place] = "transfer_failed"
            return moved

        blocks.load = load

    def note_audits(self) -> None:
        """From here on remember what audits found."""
        session = self.session
        self.found: list[str] = []
        tell = session.audited

        def audited(tokens: Any, lease: Any, outcome: Any) -> Any:
            self.found.append(str(outcome))
            return tell(tokens, lease, outcome)

        session.audited = audited

    def audits(self) -> list[str]:
        """What audits found; the engine steps, so that what it computed is stored."""
        self.generate([[5] * 20], 2)
        self.settle()
        return self.found

    def refuse_loads(self, refused: bool) -> int:
        """Let the connector's loads fail at their end, or not; returns how many did since this was last said."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        moving = get_kv_transfer_group().moving
        before, self.refused = getattr(self, "refused", 0), 0

        def fill(load: Any, lease: Any) -> bool:
            whole = type(moving)._fill(moving, load, lease)
            self.refused += refused and whole
            return whole and not refused

        moving._fill = fill
        return before

    def counts(self) -> tuple[int, int]:
        """Blocks that came from the fabric since loads were broken, and those of them that were made to fail."""
        return self.loaded, self.failed

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

"""vLLM engines in processes of their own, on nodes of one embedded cluster: what the tests here drive."""

from __future__ import annotations

from typing import Any


class Engine:
    """One engine. Everything it returns is plain data."""

    def __init__(self, folder: str, transfer: dict[str, Any] | None, options: dict[str, Any]) -> None:
        from pathlib import Path

        from kvfabric.engines.vllm_tier import trial

        trial.environment()
        self.llm = trial.start(Path(folder), transfer, **options)

    def generate(self, prompts: list[list[int]], tokens: int = 16) -> list[list[int]]:
        from kvfabric.engines.vllm_tier import trial

        return trial.generate(self.llm, prompts, tokens)

    def salted(self, prompt: list[int], salt: str, tokens: int = 16) -> list[int]:
        """As ``generate``, under a cache salt."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=tokens)
        asked = {"prompt_token_ids": prompt, "cache_salt": salt}
        return list(self.llm.generate([asked], sampling, use_tqdm=False)[0].outputs[0].token_ids)

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def tier(self) -> Any:
        return self.core.scheduler.connector.connector_scheduler.manager.secondary_tiers[0]

    def settle(self) -> None:
        """Step until nothing is under way between the engine's memory and the fabric."""
        import time

        manager = self.core.scheduler.connector.connector_scheduler.manager
        deadline = time.monotonic() + 60
        while manager.has_pending_work() or self.llm.llm_engine.has_unfinished_requests():
            assert time.monotonic() < deadline
            self.core.step_fn()
            time.sleep(0.005)

    def forget(self) -> None:
        """Forget all that this engine has in its own device and host memory."""
        self.settle()
        assert self.llm.reset_prefix_cache(reset_connector=True)

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

    def close(self) -> None:
        """End the engine as its owner does."""
        self.core.shutdown()

"""The scheduler's half: nothing here waits for the fabric.

A question is answered from what the session heard, or put off (None) while it is asked in the background, for ``LOOK_S`` at
most. Requests with an adapter are computed until its files are digested. A request whose load failed is answered 0 from then on: vLLM asks again after a failure, and would load for ever.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass, field
from queue import Full, Queue
from threading import Thread
from typing import Any

from ...actors.session import Session
from ...fabric.identity import PromptKeys
from ...fabric.kinds import FabricError
from ..shared.adapters import AdapterRevisions
from ..vllm_tier.described import model_folder
from .steps import Load, Save, Step

LOOK_S = 1.0
CLOSE_S = 5.0
UNTOLD_MAX = 256
"""Ended requests whose output's length waits to be told."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Known:
    """One request: its prompt, its digests, its device blocks by group."""

    tokens: tuple[int, ...]
    key: dict[str, Any]
    keys: PromptKeys
    blocks: list[list[int]] = field(default_factory=list)
    asked_s: float | None = None
    first: int = 0
    failed: bool = False


class Asking:
    """What requests can load and what they save. Used on the scheduler's thread only."""

    def __init__(self, session: Session, salt: bytes) -> None:
        self._session = session
        self._salt = salt
        self._adapters = AdapterRevisions(model_folder)
        self._block_tokens = [group.unit_tokens for group in session.model.groups]
        self._requests: dict[str, _Known | None] = {}
        """None: one whose prompt has no token ids for all of it, or whose adapter is not digested."""
        self._loads: list[Load] = []
        self._untold: Queue[tuple[PromptKeys, int] | None] = Queue(UNTOLD_MAX)
        self._telling: Thread | None = None
        self._closing = False

    def _known(self, request: Any) -> _Known | None:
        name = request.request_id
        if name not in self._requests:
            tokens = request.prompt_token_ids
            usable = tokens is not None and request.prompt_embeds is None
            self._requests[name] = self._begin(request, tuple(tokens)) if usable else None
        return self._requests[name]

    def _begin(self, request: Any, tokens: tuple[int, ...]) -> _Known | None:
        salt = self._salt + (request.cache_salt or "").encode()
        key: dict[str, Any] = {"salt": salt}
        if request.mm_features:
            key["extra"] = [(f.mm_position.offset, f.identifier.encode()) for f in request.mm_features]
        lora = request.lora_request
        if lora is not None:
            revision = self._adapters.revision(lora.lora_path, reloaded=lora.load_inplace)
            if revision is None:
                return None
            key["adapter"] = (lora.lora_name, revision)
        return _Known(tokens, key, self._session.keys(tokens, **key))

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens past ``computed`` can be loaded; None: ask again. Loads are asynchronous."""
        known = self._known(request)
        if known is None or known.failed:
            return 0, False
        heard = self._session.probe_nowait(known.keys)
        now = time.monotonic()
        if heard is None:
            known.asked_s = known.asked_s or now
            return (None, False) if now < known.asked_s + LOOK_S else (0, False)
        known.asked_s = None
        known.first = computed
        more = max(heard.tokens, heard.restorable_tokens) - computed
        return (more, True) if more > 0 else (0, False)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Blocks were allocated for what is to be loaded."""
        known = self._known(request)
        if known is None or not external:
            return
        position = known.first + external
        ids = tuple(tuple(group) for group in blocks.get_block_ids())
        prompt = known.tokens[: position + 1]
        self._loads.append(Load(request.request_id, prompt, known.key, known.first, position, ids))

    def step(self, scheduled: Any) -> Step:
        """What this step loads and, of the prompts it computes, saves."""
        step = Step(self._loads)
        self._loads = []
        for new in scheduled.scheduled_new_reqs:
            known = self._requests.get(new.req_id)
            if known is not None:
                known.blocks = [list(group) for group in new.block_ids]
                self._save(step, known, new.num_computed_tokens, scheduled.num_scheduled_tokens[new.req_id])
        cached = scheduled.scheduled_cached_reqs
        for number, name in enumerate(cached.req_ids):
            known = self._requests.get(name)
            if known is None:
                continue
            fresh = cached.new_block_ids[number]
            if name in cached.resumed_req_ids:
                known.blocks = [list(group) for group in fresh or ()]
            elif fresh is not None:
                for held, group in zip(known.blocks, fresh, strict=True):
                    held.extend(group)
            self._save(step, known, cached.num_computed_tokens[number], scheduled.num_scheduled_tokens[name])
        return step

    def _save(self, step: Step, known: _Known, computed: int, scheduled: int) -> None:
        """Blocks of the prompt that become whole in this step. Block 0 is vLLM's null block: out of the window."""
        end = min(computed + scheduled, len(known.tokens))
        if end <= computed or not known.blocks:
            return
        blocks = tuple(
            tuple((i, held[i]) for i in range(computed // unit, min(end // unit, len(held))) if held[i])
            for unit, held in zip(self._block_tokens, known.blocks, strict=True)
        )
        if any(blocks):
            step.saves.append(Save(known.tokens[:end], known.key, blocks))

    def failed(self, requests: set[str]) -> None:
        """These loads failed."""
        for name in requests:
            known = self._requests.get(name)
            if known is not None:
                known.failed = True

    def close(self) -> None:
        """End the threads that digest adapters and tell of outputs."""
        self._adapters.close()
        if self._telling is not None:
            self._closing = True
            with contextlib.suppress(Full):  # then it is awake, and sees that it ends
                self._untold.put_nowait(None)
            self._telling.join(CLOSE_S)

    def finished(self, request: str, output_tokens: int) -> None:
        """Forget a request, and tell how long its output became."""
        known = self._requests.pop(request, None)
        if known is None or self._untold.full():
            return  # a hint: what is not told is not learned
        self._untold.put_nowait((known.keys, output_tokens))
        if self._telling is None:
            self._telling = Thread(target=self._tell, name="kvfabric-tell", daemon=True)
            self._telling.start()

    def _tell(self) -> None:
        while (one := self._untold.get()) is not None and not self._closing:
            try:
                self._session.generated(*one)
            except FabricError as error:
                logger.warning("kvfabric: the length of an output could not be told: %s", error)

"""The session for asyncio: the same verbs, awaitable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..fabric.explanation import Explanation
from ..fabric.identity import PromptKeys
from ..fabric.kinds import Reason
from ..fabric.memo import Remembered
from ..fabric.ranking import NodeRank
from .answer import Answer, Parked
from .attempt import Attempt, Stored
from .graph import Graph
from .lease import Lease
from .session import Session
from .storing import ObjectsByGroup

T = TypeVar("T")


class AsyncSession:
    """A session for asyncio: the same verbs, awaitable, run in threads of its own."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="kvfabric-session")

    async def _run(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: call(*args, **kwargs))

    async def publish(self, tokens: Any, objects: ObjectsByGroup, **kwargs: Any) -> Stored:
        """See :meth:`Session.publish`."""
        return await self._run(self.session.publish, tokens, objects, **kwargs)

    async def extend(self, tokens: Any, from_token: int, objects: ObjectsByGroup, **kwargs: Any) -> Stored:
        """See :meth:`Session.extend`."""
        return await self._run(self.session.extend, tokens, from_token, objects, **kwargs)

    async def begin(self, tokens: Any, wanted: Mapping[str, Iterable[int]], **kwargs: Any) -> Attempt | Stored:
        """See :meth:`Session.begin`."""
        return await self._run(self.session.begin, tokens, wanted, **kwargs)

    async def acquire(self, tokens: Any, **kwargs: Any) -> Answer:
        """See :meth:`Session.acquire`."""
        return await self._run(self.session.acquire, tokens, **kwargs)

    async def prefetch(self, tokens: Any, **kwargs: Any) -> Answer:
        """See :meth:`Session.prefetch`."""
        return await self._run(self.session.prefetch, tokens, **kwargs)

    async def computed(self, tokens: int, seconds: float, *, replay: bool = False) -> None:
        """See :meth:`Session.computed`."""
        await self._run(self.session.computed, tokens, seconds, replay=replay)

    async def retain(self, tokens: Any, **kwargs: Any) -> bool:
        """See :meth:`Session.retain`."""
        return await self._run(self.session.retain, tokens, **kwargs)

    async def generated(self, tokens: Any, output_tokens: int, **key: Any) -> None:
        """See :meth:`Session.generated`."""
        await self._run(self.session.generated, tokens, output_tokens, **key)

    def audit_due(self, lease: Lease) -> bool:
        """See :meth:`Session.audit_due`."""
        return self.session.audit_due(lease)

    async def audited(self, tokens: Any, lease: Lease, outcome: str, **key: Any) -> Reason | None:
        """See :meth:`Session.audited`."""
        return await self._run(self.session.audited, tokens, lease, outcome, **key)

    async def park(self, lease: Lease) -> Parked:
        """See :meth:`Session.park`."""
        return await self._run(self.session.park, lease)

    async def probe(self, tokens: Any, **kwargs: Any) -> Answer:
        """See :meth:`Session.probe`."""
        return await self._run(self.session.probe, tokens, **kwargs)

    async def present(self, tokens: Any, **key: Any) -> dict[str, int]:
        """See :meth:`Session.present`."""
        return await self._run(self.session.present, tokens, **key)

    def probe_nowait(self, tokens: Any, **kwargs: Any) -> Remembered | None:
        """See :meth:`Session.probe_nowait`; it never waits, so there is nothing to await."""
        return self.session.probe_nowait(tokens, **kwargs)

    async def match_many(self, prompts: Iterable[Any], **kwargs: Any) -> list[Answer]:
        """See :meth:`Session.match_many`."""
        return await self._run(self.session.match_many, prompts, **kwargs)

    async def rank(self, tokens: Any, **kwargs: Any) -> list[NodeRank]:
        """See :meth:`Session.rank`."""
        return await self._run(self.session.rank, tokens, **kwargs)

    async def register_graph(self, lease: Lease) -> Graph | Stored:
        """See :meth:`Session.register_graph`."""
        return await self._run(self.session.register_graph, lease)

    async def keys(self, tokens: Any, **key: Any) -> PromptKeys:
        """See :meth:`Session.keys`."""
        return await self._run(self.session.keys, tokens, **key)

    async def named(self, names: Sequence[bytes], *, scheme: str, **key: Any) -> PromptKeys:
        """See :meth:`Session.named`."""
        return await self._run(self.session.named, names, scheme=scheme, **key)

    async def checkpoints(self, tokens: Any, **kwargs: Any) -> tuple[int, ...]:
        """See :meth:`Session.checkpoints`."""
        return await self._run(self.session.checkpoints, tokens, **kwargs)

    async def refresh(self) -> None:
        """See :meth:`Session.refresh`."""
        await self._run(self.session.refresh)

    async def explain(self, tokens: Any, **kwargs: Any) -> Explanation:
        """See :meth:`Session.explain`."""
        return await self._run(self.session.explain, tokens, **kwargs)

    async def close(self) -> None:
        """See :meth:`Session.close`."""
        await self._run(self.session.close)
        self._threads.shutdown(wait=False)

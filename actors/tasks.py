"""Work on the event loop that nobody awaits."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

logger = logging.getLogger(__name__)


def tell_failure(task: asyncio.Task[Any]) -> None:
    """Log what ended a task, for ``add_done_callback``: asyncio says so only once nobody remembers the task, if then."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed", task.get_coro(), exc_info=error)

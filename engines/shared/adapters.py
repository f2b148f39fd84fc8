"""Which weights an adapter has, by its files: its name and its path stay the same when somebody trains it on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from ..transformers.errors import EngineError
from ..transformers.weights import WeightsError, weights_revision

logger = logging.getLogger(__name__)

ADAPTERS_MAX = 4096
"""So many are remembered; then the first is forgotten, and digested again."""
_CONFIG = "adapter_config.json"
"""Scale and targets: the same tensors compute something else under another."""


def adapter_revision(folder: Path) -> str:
    """Of an adapter's tensors and its configuration. Raises WeightsError where there are none to read."""
    tensors = weights_revision(folder)
    try:
        config = (folder / _CONFIG).read_bytes()
    except OSError as error:
        raise WeightsError(f"{folder / _CONFIG}: cannot be read ({error})") from None
    return f"{tensors}-{blake3(config, derive_key_context='kvfabric 2026 adapter configuration').hexdigest(16)}"


class AdapterRevisions:
    """Digests adapters in a thread of its own, once each: who asks never waits for it.

    ``folder_of``: where an adapter's files are by its path, None where they are not on this machine.
    """

    def __init__(self, folder_of: Callable[[str], Path | None]) -> None:
        self._folder_of = folder_of
        self._lock = threading.Lock()
        self._known: dict[str, str | None] = {}
        """By path; None while it is being digested."""
        self._failed: set[str] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvfabric-adapters")

    def revision(self, path: str, *, reloaded: bool = False) -> str | None:
        """None while it is not known, or cannot be. ``reloaded``: the engine reads the files again for this request."""
        with self._lock:
            if reloaded and self._known.get(path) is not None:
                del self._known[path]
            if path in self._known:
                return self._known[path]
            while len(self._known) >= ADAPTERS_MAX:
                del self._known[next(iter(self._known))]
            self._known[path] = None
        self._thread.submit(self._digest, path)
        return None

    def close(self) -> None:
        """End the thread, behind what it is at."""
        self._thread.shutdown(cancel_futures=True)

    def _digest(self, path: str) -> None:
        found, why = None, "its files are not on this machine"
        try:
            folder = self._folder_of(path)
            found = None if folder is None else adapter_revision(folder)
        except (EngineError, OSError, ValueError) as error:
            why = str(error)
        with self._lock:
            if found is not None:
                if path in self._known:
                    self._known[path] = found
                self._failed.discard(path)
                return
            self._known.pop(path, None)
            told, self._failed = path in self._failed, {*list(self._failed)[-ADAPTERS_MAX:], path}
        if not told:
            logger.warning("kvfabric: requests with the adapter at %s are computed, not kept: %s", path, why)

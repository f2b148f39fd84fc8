"""One life of a NIXL agent: the arena registered with it, its peers, and transfers under way.

The only module that imports NIXL. Everything NIXL says in strings, None or log lines is turned into values
here, and what it does not guard is guarded by :mod:`nixl_link`. One thread at a time may call it.
"""

from __future__ import annotations

import importlib
import sys
import threading
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..fabric.arena import Bytes
from .link import LinkError, LinkFailure
from .nixl_settings import NixlSettings

_WHEELS = ("nixl_cu13", "nixl_cu12")
_NVIDIA_DEVICES = Path("/dev/nvidiactl")


def distributions() -> tuple[str, ...]:
    """Import names in the order to try them.

    The meta package ``nixl`` picks the wheel that fits this machine's CUDA, by importing torch: 0.7 s and 190 MiB
    for nothing where there is no GPU, where either wheel will do.
    """
    if "torch" in sys.modules or _NVIDIA_DEVICES.exists():
        return ("nixl", *_WHEELS)
    return (*_WHEELS, "nixl")


Ranges = npt.NDArray[np.uint64]
"""Memory ranges, shape (ranges, 3): address, length in bytes, device."""

DRAM, VRAM = "DRAM", "VRAM"
"""NIXL's names of host and GPU memory. All ranges of one side of a transfer are of one of them."""


class GpuRange(NamedTuple):
    """Memory of ours on a GPU: its address, its length, and the GPU's number in this process."""

    address: int
    nbytes: int
    device: int


class FlightState(Enum):
    """Where a transfer stands. Only IN_FLIGHT and BROKEN ones may still write."""

    IN_FLIGHT = "in_flight"
    DONE = "done"
    PEER_LOST = "peer_lost"
    BROKEN = "broken"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class NixlLibrary:
    """The imported modules. ``errors`` are all of NIXL's exceptions, ``disconnect_error`` the one that proves quiet."""

    name: str
    api: Any
    errors: tuple[type[Exception], ...]
    disconnect_error: type[Exception]


def load_nixl() -> NixlLibrary | LinkError:
    """Import whichever distribution is there; an UNAVAILABLE error names what was tried and why each failed."""
    reasons = []
    for name in distributions():
        try:
            importlib.import_module(name)
            api = importlib.import_module(f"{name}._api")
            bindings = api.nixlBind
        except (ImportError, OSError, AttributeError) as error:
            reasons.append(f"{name}: {error}")
            continue
        errors = tuple(
            value
            for value in vars(bindings).values()
            if isinstance(value, type) and issubclass(value, Exception) and not issubclass(value, Warning)
        )
        return NixlLibrary(name, api, (*errors, RuntimeError), bindings.nixlRemoteDisconnectError)
    return LinkError(LinkFailure.UNAVAILABLE, "NIXL cannot be imported: " + "; ".join(reasons))


_patching = threading.Lock()


def _make_agent(library: NixlLibrary, name: str, settings: NixlSettings) -> Any:
    """NIXL's Python API offers no progress delay, so the constructor it calls is wrapped while it does."""
    bindings = library.api.nixlBind
    config = library.api.nixl_agent_config(enable_prog_thread=True, backends=[settings.backend])
    with _patching:
        original = bindings.nixlAgent

        def with_delay(agent_name: str, agent_config: Any) -> Any:
            agent_config.pthrDelay = settings.progress_delay_us
            return original(agent_name, agent_config)

        bindings.nixlAgent = with_delay
        try:
            return library.api.nixl_agent(name, config)
        finally:
            bindings.nixlAgent = original


class NixlAgent:
    """An agent with ``arena`` registered, made by :meth:`start`. ``destroy`` ends it and everything it moves."""

    def __init__(self, library: NixlLibrary, agent: Any, name: str, arena: Bytes) -> None:
        self._library = library
        self._agent = agent
        self.name = name
        # Registered memory must outlive the agent: a peer's read of unmapped memory ends this process.
        self._registered: list[Bytes] = [arena]
        self._peers: set[str] = set()
        self.metadata = b""

    @classmethod
    def start(
        cls, name: str, arena: Bytes, settings: NixlSettings, gpu: GpuRange | None = None
    ) -> NixlAgent | LinkError:
        """Load NIXL, make the agent, register the arena with its part on a GPU, then take the metadata (which names both).

        Whoever owns the GPU memory keeps it as long as the agent lives.
        """
        library = load_nixl()
        if isinstance(library, LinkError):
            return library
        try:
            agent = _make_agent(library, name, settings)
            if settings.backend not in agent.backends:
                return LinkError(LinkFailure.UNAVAILABLE, f"NIXL has no backend {settings.backend}")
            made = cls(library, agent, name, arena)
            made._register(arena)
            if gpu is not None:
                agent.register_memory([(*gpu, "")], VRAM)
            made.metadata = bytes(agent.get_agent_metadata())
        except library.errors as error:
            return LinkError(
                LinkFailure.UNAVAILABLE,
                f"NIXL's {settings.backend} does not start: {error} (UCX_LOG_LEVEL=error says why)",
            )
        return made

    def _register(self, memory: Bytes) -> None:
        self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], DRAM)

    def register(self, memory: Bytes) -> None:
        """Register further memory of ours, for the agent's whole life. Raises OSError if NIXL refuses."""
        try:
            self._register(memory)
        except self._library.errors as error:
            raise OSError(f"NIXL registers no more memory: {error}") from None
        self._registered.append(memory)

    def add_peer(self, name: str, metadata: bytes) -> LinkError | None:
        """Load a peer's metadata; it must be the agent named."""
        if name in self._peers:
            return None
        try:
            loaded = self._agent.add_remote_agent(metadata)
        except self._library.errors as error:
            return LinkError(LinkFailure.REFUSED, f"NIXL refuses the metadata of {name}: {error}")
        loaded = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
        if loaded != name:
            self._peers.add(loaded)
            self.remove_peer(loaded)
            return LinkError(LinkFailure.REFUSED, f"the metadata of {name} is that of {loaded}")
        self._peers.add(name)
        return None

    def remove_peer(self, name: str) -> None:
        """Forget a peer: only this revokes what the initiator may read of it."""
        if name not in self._peers:
            return
        self._peers.discard(name)
        try:
            self._agent.remove_remote_agent(name)
        except self._library.errors:
            return  # it is gone already, which is what was wanted

    def read(
        self, peer: str, local: Ranges, remote: Ranges, memories: tuple[str, str] = (DRAM, DRAM)
    ) -> tuple[Any, FlightState, str]:
        """Post one READ; returns its handle (None if nothing was posted), where it stands, and detail.

        ``memories``: where the local and the remote ranges lie.
        """
        agent = self._agent
        handle = None
        try:
            handle = agent.initialize_xfer(
                "READ", agent.get_xfer_descs(local, memories[0]), agent.get_xfer_descs(remote, memories[1]), peer
            )
            state = agent.transfer(handle)
        except self._library.disconnect_error as error:
            return handle, FlightState.PEER_LOST, str(error)
        except self._library.errors as error:
            return handle, FlightState.BROKEN, str(error)
        return handle, _state_of(state), ""

    def check(self, handle: Any) -> tuple[FlightState, str]:
        """Where a posted transfer stands."""
        try:
            state = self._agent.check_xfer_state(handle)
        except self._library.disconnect_error as error:
            return FlightState.PEER_LOST, str(error)
        except self._library.errors as error:
            return FlightState.BROKEN, str(error)
        return _state_of(state), ""

    def release(self, handle: Any) -> None:
        """Free a handle that is DONE or PEER_LOST; releasing one in flight would stop nothing."""
        try:
            handle.release()
        except self._library.errors:
            _abandon(handle)

    def destroy(self, handles: list[Any]) -> None:
        """End the agent: no byte of any transfer arrives after this returns. ``handles`` are those still out."""
        for handle in handles:
            _abandon(handle)
        handles.clear()
        for name in list(self._peers):
            self.remove_peer(name)
        self._agent = None


def _abandon(handle: Any) -> None:
    """Keep the Python wrapper from releasing the handle again when it is collected: the agent frees it."""
    handle._released = True  # noqa: SLF001 - the wrapper has no public way to let a handle go
    handle._agent = None  # noqa: SLF001 - else it keeps the destroyed agent alive


def _state_of(word: str) -> FlightState:
    if word == "DONE":
        return FlightState.DONE
    return FlightState.IN_FLIGHT if word == "PROC" else FlightState.BROKEN

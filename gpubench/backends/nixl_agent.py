"""Transfers by NIXL's Python API, with its UCX plugin, as vLLM and Dynamo make them."""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from time import perf_counter
from typing import Any

from gpubench.backends.ucp import TransferBlock, UcxError

_MODULES = ("nixl", "nixl_cu13", "nixl_cu12")
_DEVICE = 0  # NIXL's UCX plugin needs the device only to make CUDA's context current, and each process uses one GPU
HOST_BUFFER = "host"  # Name of the buffer in host memory. All others are GPU memory.


def import_nixl() -> Any:
    """Import NIXL's Python API. Raises ModuleNotFoundError if no build of it is installed."""
    found = next((name for name in _MODULES if find_spec(name) is not None), _MODULES[0])
    return import_module(f"{found}._api")


def is_nixl_installed() -> bool:
    """True if this Python environment has NIXL."""
    return any(find_spec(name) is not None for name in _MODULES)


class NixlProcess:
    """One of the two processes of a transfer: a NIXL agent with the UCX plugin, its own memory, and the peer's."""

    def __init__(self, name: str) -> None:
        api = import_nixl()
        self._agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        self._peer: Any = ""

    def register(self, name: str, address: int, size_bytes: int) -> None:
        self._agent.register_memory([(address, size_bytes, _DEVICE, "")], _kind(name))

    def address(self) -> bytes:
        """Return the agent's metadata, with which the peer connects. All memory must be registered before."""
        return bytes(self._agent.get_agent_metadata())

    def connect(self, peer: bytes) -> None:
        self._peer = self._agent.add_remote_agent(peer)

    def prepare(self, own: str, peers: str, blocks: Sequence[TransferBlock], *, writes: bool) -> Callable[[], float]:
        """Return a function that moves all blocks, waits until NIXL reports that they have arrived, and returns the
        time in seconds.
        """
        local = [(block.local, block.size_bytes, _DEVICE) for block in blocks]
        remote = [(block.remote, block.size_bytes, _DEVICE) for block in blocks]
        agent = self._agent
        descriptors = agent.get_xfer_descs(local, _kind(own)), agent.get_xfer_descs(remote, _kind(peers))
        transfer = agent.initialize_xfer("WRITE" if writes else "READ", *descriptors, self._peer)

        def move() -> float:
            start = perf_counter()
            state = agent.transfer(transfer)
            while state == "PROC":
                state = agent.check_xfer_state(transfer)
            seconds = perf_counter() - start
            if state != "DONE":
                raise UcxError(f"NIXL's transfer ended in state {state}")
            return seconds

        return move

    def progress(self) -> int:
        """Do nothing, because NIXL has a thread that lets UCX work."""
        return 0


def _kind(name: str) -> str:
    return "DRAM" if name == HOST_BUFFER else "VRAM"

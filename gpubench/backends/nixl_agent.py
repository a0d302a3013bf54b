"""Transfers by NIXL's Python API, with its UCX plugin, as vLLM and Dynamo make them."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import packages_distributions, version
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

    @property
    def version(self) -> str:
        package = type(self._agent).__module__.partition(".")[0]
        names = packages_distributions().get(package, [package])
        return f"NIXL {version(names[0])}"

    def address(self) -> bytes:
        """Return the agent's metadata, with which the peer connects. All memory must be registered before."""
        return bytes(self._agent.get_agent_metadata())

    def register(self, name: str, address: int, size_bytes: int) -> bytes:
        """Register memory of this process. Return an empty key, because NIXL's metadata contain the keys."""
        self._agent.register_memory([(address, size_bytes, _DEVICE, "")], _kind(name))
        return b""

    def connect(self, address: bytes, keys: Mapping[str, bytes]) -> None:  # noqa: ARG002
        self._peer = self._agent.add_remote_agent(address)

    def prepare(self, own: str, peers: str, blocks: Sequence[TransferBlock], *, writes: bool) -> Any:
        """Return NIXL's handle of a transfer, which can be started repeatedly."""
        local = [(block.local, block.size_bytes, _DEVICE) for block in blocks]
        remote = [(block.remote, block.size_bytes, _DEVICE) for block in blocks]
        agent = self._agent
        descriptors = agent.get_xfer_descs(local, _kind(own)), agent.get_xfer_descs(remote, _kind(peers))
        return agent.initialize_xfer("WRITE" if writes else "READ", *descriptors, self._peer)

    def transfer(self, prepared: Any) -> float:
        """Start a transfer, wait until NIXL reports that it is done, and return the time in seconds."""
        agent = self._agent
        start = perf_counter()
        state = agent.transfer(prepared)
        while state == "PROC":
            state = agent.check_xfer_state(prepared)
        seconds = perf_counter() - start
        if state != "DONE":
            raise UcxError(f"NIXL's transfer ended in state {state}")
        return seconds

    def progress(self) -> int:
        """Do nothing, because NIXL has a thread that lets UCX work."""
        return 0


def _kind(name: str) -> str:
    return "DRAM" if name == HOST_BUFFER else "VRAM"

"""A worker of a KV transfer without a GPU. Its first argument says how it behaves; its last one is the pipe."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from gpubench.backends import kv_worker
from gpubench.ports.transfers import Moved, ProcessEnd

TABLE = """[0] [vm:{pid} :0] +--------+
[0] [vm:{pid} :0] | r0 intra-node cfg#2 |
[0] [vm:{pid} :0] | remote memory write by ucp_put*(multi) from {ends} |
[0] [vm:{pid} :0] | 0..inf | {protocol} |
[0] [vm:{pid} :0] +--------+"""
HOST_ENDS = "cuda/GPU0 to host memory", "software emulation | tcp/lo"
GPU_ENDS = "cuda/GPU0 to cuda/dev[1]", "zero-copy | cuda_ipc/cuda"


class HostRuntime:
    """CUDA's runtime on host memory."""

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}

    def malloc(self, size_bytes: int, _flags: int = 0) -> int:
        buffer = ctypes.create_string_buffer(size_bytes)
        self._held[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    mallocAsync = mallocManaged = hostAlloc = malloc  # noqa: N815

    def memcpy(self, to: int, origin: int, size_bytes: int, _kind: int) -> None:
        ctypes.memmove(to, origin, size_bytes)

    def deviceSynchronize(self) -> None: ...  # noqa: N802

    def ipcGetMemHandle(self, _address: int) -> None:  # noqa: N802
        raise RuntimeError("host memory")


def host_cupy(*_: object) -> Any:
    """CuPy, as far as a worker needs it, on host memory."""
    device = SimpleNamespace(use=lambda: None)
    return SimpleNamespace(cuda=SimpleNamespace(runtime=HostRuntime(), Device=lambda _: device))


END = ProcessEnd(ucx_files=("/ucx/libucp.so.0",), exportable=True, pid_namespace=1)
ANSWERS = {"open": (("", {}), END), "count_wrong": 3}


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def scripted(behavior: str) -> None:
    pipe = Connection(int(sys.argv[-1]))
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        if name == "transfer":
            _misbehave(behavior)
        if behavior == "dies at the start" and name == "open":
            sys.exit("libcuda.so.1: cannot open shared object file")
        failure = "UcxError: the transfer failed: Connection reset by remote peer" * (behavior == "fails")
        answer = ANSWERS.get(name)
        if name == "transfer" and len(arguments) == 2:
            answer = Moved(case=arguments[0], seconds=(0.001,) * 5, transfers=7)
        pipe.send((answer, failure if name == "transfer" else ""))


def _misbehave(behavior: str) -> None:
    for ends, protocol in (HOST_ENDS, GPU_ENDS, HOST_ENDS):
        say(TABLE.format(pid=os.getpid(), ends=ends, protocol=protocol))
    if behavior == "hangs":
        time.sleep(600)
    elif behavior == "forks":
        subprocess.run(["sleep", "600"], check=False)
    elif behavior == "dies":
        say("GPU has fallen off the bus")
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    if sys.argv[1] != "host":
        scripted(sys.argv[1])
        return
    vars(kv_worker).update(load_cupy=host_cupy, read_driver=lambda _: None)
    kv_worker.main()


if __name__ == "__main__":
    main()

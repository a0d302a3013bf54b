"""Nodes in one interval, from the rates of their links."""

from collections.abc import Sequence
from typing import Any

from gpubench.model.facts.process import GpuProcess, RankFacts
from gpubench.model.facts.traffic import GpuRates, NicRates, NodeRates, TaskFacts

KEY = "torch 127.0.0.1:29500"
Ways = tuple[float | None, float | None, float | None, float | None]


def facts(pid: int, **environment: str) -> RankFacts:
    return RankFacts(rank=0, host="node0", node=0, local_rank=0, pid=pid, environment=environment)


def task(pid: int, *together: str, communicators: bool | None = True, **more: Any) -> TaskFacts:
    return TaskFacts(
        pid=pid, name="python", together=together, communicators=communicators, **{"facts": facts(pid), **more}
    )


def gpu(index: int, ways: Ways, *pids: int, **more: Any) -> GpuRates:
    """Return the rates of a GPU in GB/s: NVLink sent and received, PCIe sent and received."""
    names = ("nvlink_sent", "nvlink_received", "pcie_sent", "pcie_received")
    processes = tuple(GpuProcess(pid=pid, memory_bytes=2**30) for pid in pids)
    values: dict[str, Any] = {"utilization_percent": 98, "processes": processes, **more}
    return GpuRates(
        index=index, bus_id=f"0000:0{index}:00.0", **values, **dict[str, Any](zip(names, ways, strict=True))
    )


def nic(
    name: str, sent: float | None, received: float | None = None, *, rdma: bool = True, up: bool = True
) -> NicRates:
    return NicRates(name=name, rdma=rdma, active=up, sent=sent, received=sent if received is None else received)


def node(gpus: Sequence[GpuRates], tasks: Sequence[TaskFacts], *nics: NicRates, **more: Any) -> NodeRates:
    values: dict[str, Any] = {"host": "node0", "begin": 0.0, "end": 1.0, **more}
    return NodeRates(gpus=tuple(gpus), tasks=tuple(tasks), nics=nics, **values)


def job(
    *ways: Ways, nics: Sequence[NicRates] = (), communicators: bool | None = True, together: bool = True, **more: Any
) -> NodeRates:
    keys = (KEY,) if together else ()
    gpus = [gpu(index, way, 100 + index, **more) for index, way in enumerate(ways)]
    return node(gpus, [task(100 + index, *keys, communicators=communicators) for index in range(len(ways))], *nics)


NVLINK: Ways = (40.0, 40.0, 0.01, 0.02)
STAGED: Ways = (0.0, 0.0, 33.0, 29.0)
IN: Ways = (0.0, 0.0, 3.0, 50.0)
OUT: Ways = (0.0, 0.0, 50.0, 0.01)
BOTH: Ways = (0.0, 0.0, 42.0, 39.0)
STILL: Ways = (0.0, 0.0, 0.01, 0.01)

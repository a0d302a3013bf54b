"""Requests of copies from a plan: for the GPUs of one process, and for ranks."""

from collections.abc import Sequence
from itertools import permutations

from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.jobs.p2p.plan import MemoryKind, P2pPlan
from gpubench.measure.p2p.machine import IPC, NETWORK, CopyMachine
from gpubench.measure.p2p.request import NVBANDWIDTH, Method, P2pRequest, default_series, sweep_series, with_latency
from gpubench.model.paths.p2p import LATENCY_BYTES, Pair, Series
from gpubench.model.paths.wiring import Wiring
from gpubench.model.terms.copies import CopyGpu, CopyPattern, Direction, Engine
from gpubench.model.terms.managed import ManagedSupport
from gpubench.model.terms.units import counted

_MANAGED_SAMPLES = 5
"""A pass over managed memory is one copy, where plain memory is copied many times in a sample."""

_BYTES, _NVBANDWIDTH_BYTES = 256 * 2**20, 512 * 2**20

_HOST_BYTES = 64 * 2**20
"""Less than between GPUs: the host fills and checks its end itself."""


def request_for_process(
    plan: P2pPlan, gpus: Sequence[CopyGpu], wiring: Wiring, managed: Sequence[ManagedSupport] = ()
) -> P2pRequest:
    """The request for the GPUs of one process; `managed` is what CUDA says of their managed memory.

    Raises:
        UsageError: `--pairs` names a GPU that is not there.
        CouldNotMeasureError: there is one GPU, and no copies with host memory were asked for.
    """
    if plan.memory is MemoryKind.MANAGED:
        return _request_for_managed(plan, gpus, wiring, managed)
    size_bytes, method = _size_and_method(plan)
    if plan.like is not None:
        ways = [(engine, way) for engine in Engine for way in (Direction.WRITE, Direction.READ)]
        series = tuple(Series(engine, way, peer=True, size_bytes=size_bytes) for engine, way in ways)
    else:
        series = default_series(size_bytes) if plan.sizes is None else sweep_series(plan.sizes)
    whole, several = plan.sizes is None and plan.pairs is None, len(gpus) > 1
    host_bytes = _HOST_BYTES if plan.like is None else size_bytes
    if not several and not (plan.host and whole):
        raise CouldNotMeasureError(
            f"{counted(len(gpus), 'GPU')}: it has nobody to copy to",
            expected="two GPUs, for copies between them",
            reason="CUDA_VISIBLE_DEVICES hides the others, or this machine has one",
            next_step="gpubench p2p, which copies between a single GPU and host memory",
        )
    pairs = _pairs_of_gpus(plan, gpus)
    return P2pRequest(
        pairs=pairs,
        series=with_latency(series, pairs, wiring) if several else (),
        host_bytes=host_bytes if plan.host and whole else None,
        patterns=tuple(CopyPattern) if plan.patterns and whole and plan.like is None and several else (),
        pattern_bytes=size_bytes,
        method=method,
        check=plan.check,
    )


def _request_for_managed(
    plan: P2pPlan, gpus: Sequence[CopyGpu], wiring: Wiring, managed: Sequence[ManagedSupport]
) -> P2pRequest:
    """Managed memory, beside plain copies of the same size: by copy engines, and by kernels that read."""
    size_bytes = _HOST_BYTES if plan.sizes is None else plan.sizes[0]
    ways = ((Engine.CE, Direction.WRITE), (Engine.SM, Direction.READ))
    series = tuple(Series(engine, way, peer=True, size_bytes=size_bytes) for engine, way in ways)
    pairs = _pairs_of_gpus(plan, gpus)
    return P2pRequest(
        pairs=pairs,
        series=with_latency(series, pairs, wiring) if len(gpus) > 1 else (),
        host_bytes=size_bytes if plan.host and plan.pairs is None else None,
        pattern_bytes=size_bytes,
        method=Method(samples=_MANAGED_SAMPLES),
        check=plan.check,
        managed_bytes=size_bytes,
        managed=tuple(managed),
    )


def request_for_ranks(plan: P2pPlan, pairs: Sequence[Pair], machine: CopyMachine) -> P2pRequest:
    """The request for ranks: copy engines on a node, written and read; NCCL between nodes; 16 bytes for latency.

    Copies with host memory, by kernels and without peer access are for one process.
    """
    size_bytes, method = _size_and_method(plan)
    ways = [(Direction.WRITE, size_bytes), (Direction.READ, size_bytes)]
    if plan.sizes is not None:
        ways = [(Direction.WRITE, size) for size in plan.sizes]
    elif plan.like is None:
        ways.append((Direction.WRITE, LATENCY_BYTES))
    scopes = {machine.scope(pair) for pair in pairs}
    series = [Series(Engine.CE, way, peer=True, size_bytes=size) for way, size in ways if IPC in scopes]
    series += [
        Series(Engine.CE, way, peer=True, size_bytes=size, network=True)
        for way, size in ways
        if NETWORK in scopes and way is Direction.WRITE
    ]
    return P2pRequest(
        pairs=tuple(pairs),
        series=tuple(series),
        pattern_bytes=size_bytes,
        method=method,
        check=plan.check,
    )


def pairs_of_ranks(plan: P2pPlan, ranks: int) -> tuple[Pair, ...]:
    """The ordered pairs to measure.

    Raises:
        UsageError: `--pairs` names a rank that is not there.
    """
    for one, other in plan.pairs or ():
        if max(one, other) >= ranks:
            raise UsageError(
                f"--pairs {one}-{other}: there is no rank {max(one, other)}",
                expected=f"ranks from 0 to {ranks - 1}: under a launcher --pairs counts ranks",
                next_step=f"start more of them: mpirun -n {max(one, other) + 1} ...",
            )
    return tuple(permutations(range(ranks), 2)) if plan.pairs is None else plan.pairs


def _size_and_method(plan: P2pPlan) -> tuple[int, Method]:
    return (_BYTES, Method()) if plan.like is None else (_NVBANDWIDTH_BYTES, NVBANDWIDTH)


def _pairs_of_gpus(plan: P2pPlan, gpus: Sequence[CopyGpu]) -> tuple[Pair, ...]:
    if plan.pairs is None:
        return tuple(permutations(range(len(gpus)), 2))
    positions = {gpu.device: position for position, gpu in enumerate(gpus)}
    for pair in plan.pairs:
        for index in pair:
            if f"GPU{index}" not in positions:
                raise UsageError(
                    f"--pairs {pair[0]}-{pair[1]}: there is no GPU{index}",
                    expected=f"GPUs among {', '.join(positions)}",
                    reason="CUDA_VISIBLE_DEVICES hides it, or this machine has fewer",
                    next_step="gpubench topo shows the GPUs and their numbers",
                )
    return tuple((positions[f"GPU{one}"], positions[f"GPU{other}"]) for one, other in plan.pairs)


def check_managed(support: Sequence[ManagedSupport]) -> None:
    """Raise CouldNotMeasureError where managed memory was asked for and no GPU has any."""
    if support and all(each.managed is False for each in support):
        raise CouldNotMeasureError(
            support[0].lacks,
            expected="a GPU with unified memory",
            reason="a vGPU without it, or a driver that was built without its kernel module nvidia-uvm",
            next_step="gpubench p2p measures plain memory",
        )

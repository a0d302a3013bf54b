"""CUDA's settings and attached tools that have a process wait for what it launches."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.conditions.definition.condition import Condition, Family, Found, Sighting, joined
from gpubench.conditions.definition.nccl_values import number
from gpubench.conditions.definition.sightings import of_ranks
from gpubench.conditions.nccl_settings import blame
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.paths.evidence import Confidence

_BLOCKING = "CUDA_LAUNCH_BLOCKING"
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_INJECTED = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")


def _blocking(run: Circumstances) -> Found:
    on = [value for value in run.values(_BLOCKING) if number(value)]
    if on:
        yield blame(run, {_BLOCKING: on}, Confidence.PROVEN, None)


def _connections(run: Circumstances) -> Found:
    few = [value for value in run.values(_CONNECTIONS) if number(value) == 1]
    if few:
        found = blame(run, {_CONNECTIONS: few}, Confidence.WEAK, None)
        yield replace(found, cure=f"{found.cure}, unless the framework asks for 1, as Megatron does")


def _attached(run: Circumstances) -> Found:
    """A tracer stops a process at will; a tool in it hears of every call; a variable alone says what was asked for."""
    found = list(_tracers(run))
    found += _tools(run)
    injected: dict[str, Iterable[str]] = {
        name: values for name in _INJECTED if (values := [each for each in run.values(name) if each])
    }
    if injected and not found:
        found.append(blame(run, injected, Confidence.LIKELY, None))
    yield from found


def _tracers(run: Circumstances) -> Iterator[Sighting]:
    for node in sorted({each.node for each in run.facts}):
        traced = [each for each in run.ranks_of(node) if each.tracer]
        if traced:
            tracers = list(dict.fromkeys(each.tracer or "" for each in traced))
            pids = ",".join(each.partition(" ")[0] for each in tracers)
            cure = f"ps -o pid,args -p {pids}; then have it detach, or run without it"
            yield of_ranks(run, traced, f"traced by process {joined(tracers)}", cure=cure)


def _tools(run: Circumstances) -> Iterator[Sighting]:
    for node in sorted({each.node for each in run.facts}):
        for (name, file), ranks in _by_tool(run.ranks_of(node)).items():
            yield of_ranks(run, ranks, f"{name} is in the process: {file}", cure=f"run without {name}")


def _by_tool(ranks: Sequence[RankFacts]) -> dict[tuple[str, str], list[RankFacts]]:
    found: dict[tuple[str, str], list[RankFacts]] = {}
    for each in ranks:
        for tool in each.tools.items():
            found.setdefault(tool, []).append(each)
    return found


PROCESS = Family.of(
    "process",
    "CUDA's settings, and tools in the process",
    Condition(
        id="tool-attached",
        title="A debugger, sanitizer or profiler is attached: gdb, strace, compute-sanitizer, nsys, ncu",
        seen_as=("========= COMPUTE-SANITIZER",),
        detection="TracerPid in /proc/self/status; their libraries in /proc/self/maps; CUDA_INJECTION64_PATH or "
        "NVTX_INJECTION64_PATH, which load one",
        settles="grep TracerPid /proc/self/status; env | grep INJECTION64; the same run without the tool",
        cure="run without the tool; env -u CUDA_INJECTION64_PATH -u NVTX_INJECTION64_PATH",
        link="https://docs.nvidia.com/compute-sanitizer/ComputeSanitizer/index.html",
        look=_attached,
    ),
    Condition(
        id="cuda-launch-blocking",
        title="CUDA_LAUNCH_BLOCKING=1: every launch waits until the GPU is done",
        detection="CUDA_LAUNCH_BLOCKING in the environment of every rank; small sizes take longer",
        settles="gpubench allreduce, and the same without: env -u CUDA_LAUNCH_BLOCKING gpubench allreduce",
        cure="unset CUDA_LAUNCH_BLOCKING",
        link="https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html",
        look=_blocking,
    ),
    Condition(
        id="cuda-max-connections",
        title="CUDA_DEVICE_MAX_CONNECTIONS=1: all streams of a process share one queue to the GPU",
        detection="CUDA_DEVICE_MAX_CONNECTIONS in the environment of every rank. Alone it costs a collective nothing; "
        "a kernel of another stream that waits holds up what comes after it. Megatron sets it on purpose, for the "
        "order of computation and communication",
        settles="gpubench overlap, and the same without: env -u CUDA_DEVICE_MAX_CONNECTIONS gpubench overlap",
        cure="unset CUDA_DEVICE_MAX_CONNECTIONS, unless the framework asks for 1",
        link="https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html",
        look=_connections,
    ),
)

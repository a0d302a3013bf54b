"""The headers of tables: one screen with what a reader needs to believe a figure, and all of it where asked for."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from gpubench.formats.text.winners import backends_beside, way_names
from gpubench.model.facts.backends import GATE, gated
from gpubench.model.facts.performance_settings import bearing_on_performance
from gpubench.model.results.report import Metadata
from gpubench.model.terms.grouping import grouped
from gpubench.model.terms.rank_identity import RankIdentity, by_device, hosts_of_nccl
from gpubench.model.terms.statistics.sampling import AUTO, DEFAULT_ITERATIONS, INTERVAL, Mode
from gpubench.model.terms.sweep import describe_dropped
from gpubench.model.terms.units import compress_names, counted, spans

INDENT = "  "
_MOST_LINES = 2
_MOST_LINES_IN_FULL = 16
_MOST_KINDS = 4
_BEARING = "! bears on performance"


def software_lines(metadata: Metadata, *, verbose: bool) -> Iterator[str]:
    """Libraries and settings: in a line each where all is asked for, else versions, and settings that bear on speed."""
    yield from _library_lines(metadata.libraries, verbose=verbose)
    yield from setting_lines(metadata.environment, verbose=verbose)
    if verbose:
        yield from default_lines(metadata)


def default_lines(metadata: Metadata) -> Iterator[str]:
    """Options that have their value from the environment or a file, and the file that was read."""
    if metadata.defaults_file is not None:
        yield f"{INDENT}options from {metadata.defaults_file} of this folder"
    for option, source in metadata.defaults.items():
        yield f"{INDENT}{option} by {source}"


def _library_lines(libraries: Mapping[str, str], *, verbose: bool) -> Iterator[str]:
    if verbose:
        yield from (f"{INDENT}{name} {text}" for name, text in libraries.items())
    elif libraries:
        yield INDENT + "; ".join(f"{name} {text.partition(' from ')[0]}" for name, text in libraries.items())


def setting_lines(environment: Mapping[str, str], *, verbose: bool) -> Iterator[str]:
    """Variables of the environment; those that bear on performance are marked, and of others there is a number."""
    bearing = bearing_on_performance(environment)
    if verbose:
        for name, value in environment.items():
            yield f"{INDENT}{name}={value}" + (f"  {_BEARING}" if name in bearing else "")
        return
    if bearing:
        yield f"{INDENT}{_BEARING}: " + ", ".join(f"{name}={value}" for name, value in bearing.items())
    if others := len(environment) - len(bearing):
        yield f"{INDENT}{counted(others, 'other setting')}: -v shows all"


def device_lines(devices: Mapping[str, str], label: str, *, verbose: bool) -> Iterator[str]:
    """Devices by name, 'GPU0': '0000:06:00.0 NVIDIA H200'; in a line each, else those of one model in one line."""
    if verbose:
        yield from (f"{INDENT}{label}{name} {text}" for name, text in devices.items())
        return
    alike = grouped(devices, lambda name: _without_address(devices[name]))
    mark = "" if label else ":"  # of a rank 'on node0: NVIDIA H200' follows
    for model, names in list(alike.items())[:_MOST_KINDS]:
        yield f"{INDENT}{label}{compress_names(names)}{mark} {model}"
    if len(alike) > _MOST_KINDS:
        yield f"{INDENT}and {len(alike) - _MOST_KINDS} more kinds: -v shows all"


def _without_address(text: str) -> str:
    return " ".join(word for word in text.split(" ") if word.count(":") < 2)


def collective_lines(metadata: Metadata, *, verbose: bool) -> Iterator[str]:
    """The header of a collective: the machine, the libraries, and how to read the figures."""
    beside = "".join(f" and {each}" for each in backends_beside(metadata))
    yield (
        f"gpubench {metadata.gpubench_version}  {metadata.collective}  backend {metadata.backend}{beside}  "
        f"{counted(len(metadata.ranks), 'rank')} on {counted(len(metadata.hosts), 'host')}{_hosts_of_nccl(metadata)}"
        + ("" if metadata.origin == "measured" else f"  ({metadata.origin.upper()})")
    )
    if metadata.backend == "host" or (
        metadata.backend == "torch:gloo" and not any(each.gpu for each in metadata.ranks)
    ):
        what = "MPI" if metadata.backend == "host" else "Gloo"
        yield f"{INDENT}{what} on CPU buffers: says nothing about GPUs or their links"
    if metadata.backend == "simulated" and metadata.profile:
        yield f"{INDENT}a model from profile {metadata.profile['name']}: nothing was measured"
        yield f"{INDENT}{metadata.source}"
    if "read_from" in metadata.options:
        yield f"{INDENT}measured by another program, read from {metadata.options['read_from']}"
    yield from rank_lines(metadata.ranks, verbose=verbose)
    yield from sharing_lines(metadata.ranks)
    yield from software_lines(metadata, verbose=verbose)
    yield f"{INDENT}{_method(metadata)}"
    ways = way_names(metadata)
    if ways:
        yield f"{INDENT}every size in {len(ways)} ways, one after the other: {', '.join(ways)}"
    yield from _clock_lines(metadata)
    yield f"{INDENT}size: larger buffer of a rank; K, M, G are 1024-based; GB/s is 1e9 bytes/s"
    for line in describe_dropped(metadata.dropped_sizes):
        yield f"{INDENT}not measured: {line}"


def _clock_lines(metadata: Metadata) -> Iterator[str]:
    """By which clock each backend is timed, where it is not the host's of all."""
    if metadata.options.get("clock") != GATE:
        return
    names = [str(metadata.backend), *backends_beside(metadata)]
    by_gpu = gated(names)
    yield f"{INDENT}{' and '.join(by_gpu)}: timed by the GPU, from a gate that opens once operations wait behind it"
    by_host = [name for name in names if name not in by_gpu]
    if by_host:
        yield f"{INDENT}{' and '.join(by_host)}: timed by the host, which waits for every operation"


def _method(metadata: Metadata) -> str:
    options = metadata.options
    graph = f" in a CUDA graph, replayed {options['graph']} times," if options["graph"] else ""
    root = f", root {options['root']}" if options["root"] is not None else ""
    types = ", ".join((*options["dtypes"], *options["ops"]))
    check = "every rank's data verified" if options["check"] else "data not verified"
    if metadata.backend == "simulated":
        return f"{types}{root}; one time a row, with noise from seed {options['seed']}; mean over ranks"
    warmup = "" if options["warmup"] is None else f" after {options['warmup']} to warm up"
    loop = f"{_loop(options)}{graph}{warmup}"
    if options["allocator"] == "nccl":
        types += ", ncclMemAlloc buffers"
    return f"{types}{root}; {loop}; mean over ranks; {check}"


def _loop(options: Mapping[str, Any]) -> str:
    alone = options.get("mode") == Mode.LATENCY
    if "budget_s" in options:
        what = "operations, each alone," if alone else "iterations"
        return f"{what} until the mean is within {INTERVAL:.0%} (95 %) or for {options['budget_s']:g} s a row"
    if options["iters"] is None:
        return "how many iterations is not said"
    if alone:
        return f"{options['iters']} operations, each alone,"
    return f"{options['iters']} iterations{_why_counted(options)}"


def _why_counted(options: Mapping[str, Any]) -> str:
    """Why there is nccl-tests' number of iterations, where as many as it takes are refused."""
    refused = "graphs" if options["graph"] else "groups" if options.get("split") else ""
    is_fallback = refused and options["iters"] == DEFAULT_ITERATIONS[Mode.THROUGHPUT]
    return f" (--iters {AUTO} is not for {refused})" if is_fallback else ""


def rank_lines(ranks: Sequence[RankIdentity], *, verbose: bool) -> Iterator[str]:
    """A line a host, and one for all with equal GPUs where hosts are many; in full a line a rank, as far as they go."""
    hosts = [list(members) for _, members in groupby(ranks, key=lambda rank: rank.host)]
    if len(hosts) > (_MOST_LINES_IN_FULL if verbose else _MOST_LINES):
        for gpus, alike in grouped(hosts, _gpus).items():
            names = compress_names([members[0].host for members in alike])
            numbers = spans([rank.rank for members in alike for rank in members])
            yield f"{INDENT}rank {numbers} on {counted(len(alike), 'host')}: {names}" + (f": {gpus}" if gpus else "")
        return
    for members in hosts:
        if not verbose or len(ranks) > _MOST_LINES_IN_FULL or not _gpus(members):
            gpus = _gpus(members)
            numbers = spans([rank.rank for rank in members])
            yield f"{INDENT}rank {numbers} on {members[0].host}" + (f": {_indices(members)}{gpus}" if gpus else "")
        else:
            yield from (
                f"{INDENT}rank {each.rank} on {each.host}: GPU {each.gpu_index} {each.gpu_bus_id} {each.gpu}"
                for each in members
            )


def _hosts_of_nccl(metadata: Metadata) -> str:
    """', 2 hosts for NCCL, by NCCL_HOSTID' where NCCL counts other hosts than there are."""
    counted_by_nccl = hosts_of_nccl(metadata.ranks)
    if all(each.nccl_host is None or each.device is None for each in metadata.ranks):
        return ""
    return f", {counted(counted_by_nccl, 'host')} for NCCL, by NCCL_HOSTID"


def sharing_lines(ranks: Sequence[RankIdentity]) -> Iterator[str]:
    """Which ranks share a GPU and how: '4 ranks share GPU 0 (MPS, 25 % of its SMs each)'; alike GPUs in one line."""
    shared: dict[str, list[RankIdentity]] = {}
    for each in by_device(ranks):
        if len(each) > 1:
            percents = sorted({rank.sm_percent for rank in each if rank.sm_percent is not None})
            shares = " or ".join(f"{percent:g} %" for percent in percents)
            how = f"MPS, {shares} of its SMs each" if percents else "taking turns"
            shared.setdefault(f"{len(each)} ranks share {{}} ({how})", []).append(each[0])
    for text, firsts in shared.items():
        names = f"GPU {spans(sorted({each.gpu_index or 0 for each in firsts}))}"
        yield INDENT + text.format(names if len(firsts) == 1 else f"each of {names}")


def _gpus(ranks: Sequence[RankIdentity]) -> str:
    return ", ".join(dict.fromkeys(rank.gpu for rank in ranks if rank.gpu))


def _indices(ranks: Sequence[RankIdentity]) -> str:
    known = sorted({rank.gpu_index for rank in ranks if rank.gpu_index is not None})
    return f"GPU {spans(known)}, " if known else ""

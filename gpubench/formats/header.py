"""Headers of tables: ranks, libraries, settings, and how values were measured."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from gpubench.formats.layout import INDENT
from gpubench.model.facts.environment import bearing_on_performance
from gpubench.model.results.report import BACKENDS, Metadata
from gpubench.model.terms import operation, settings, units
from gpubench.model.terms.ranks import RankIdentity, by_device, hosts_of_nccl
from gpubench.model.terms.statistics import AUTO, DEFAULT_ITERATIONS, INTERVAL, Mode
from gpubench.model.terms.verdict import Origin

_MOST_LINES = 2
_MOST_LINES_IN_FULL = 16


def heading(metadata: Metadata, *words: str) -> str:
    """Return the first line of a page, with the origin in capitals unless the run was measured."""
    origin = "" if metadata.origin == Origin.MEASURED else f"({metadata.origin.upper()})"
    return "  ".join(filter(None, (f"gpubench {metadata.gpubench_version}", *words, origin)))


def software_lines(metadata: Metadata, *, verbose: bool) -> Iterator[str]:
    """List libraries and settings: one a line if `verbose`, else versions and the settings that affect performance."""
    if verbose:
        yield from (f"{INDENT}{name} {text}" for name, text in metadata.libraries.items())
    elif metadata.libraries:
        yield INDENT + "; ".join(f"{name} {text.partition(' from ')[0]}" for name, text in metadata.libraries.items())
    yield from setting_lines(metadata.environment, verbose=verbose)
    if verbose:
        yield from default_lines(metadata)


def default_lines(metadata: Metadata) -> Iterator[str]:
    """List the options whose values come from the environment or a file."""
    if metadata.defaults_file is not None:
        yield f"{INDENT}options from {metadata.defaults_file} of this folder"
    for option, source in metadata.defaults.items():
        yield f"{INDENT}{option} by {source}"


def setting_lines(environment: Mapping[str, str], *, verbose: bool) -> Iterator[str]:
    """List environment variables. Those that affect performance are marked, others only counted unless `verbose`."""
    bearing = bearing_on_performance(environment)
    mark = "! affects performance"
    if verbose:
        for name, value in environment.items():
            yield f"{INDENT}{name}={value}" + (f"  {mark}" if name in bearing else "")
        return
    if bearing:
        yield f"{INDENT}{mark}: " + ", ".join(f"{name}={value}" for name, value in bearing.items())
    if others := len(environment) - len(bearing):
        yield f"{INDENT}{units.counted(others, 'other setting')}: -v shows all"


def collective_lines(metadata: Metadata, *, verbose: bool) -> Iterator[str]:
    """Return the header of a collective: the machine, the libraries, and how to read the values."""
    beside = "".join(f" and {backend}" for backend in backends_beside(metadata))
    job = f"{_ranks_on_hosts(metadata)}{_hosts_of_nccl(metadata.ranks)}"
    yield heading(metadata, str(metadata.collective), f"backend {metadata.backend}{beside}", job)
    is_gloo = metadata.backend == "torch:gloo" and not any(rank.gpu for rank in metadata.ranks)
    if metadata.backend == "host" or is_gloo:
        yield f"{INDENT}{'Gloo' if is_gloo else 'MPI'} on CPU buffers: says nothing about GPUs or their links"
    if metadata.backend == "simulated" and metadata.profile:
        yield f"{INDENT}a model from profile {metadata.profile['name']}: nothing was measured"
        yield f"{INDENT}{metadata.source}"
    if "read_from" in metadata.options:
        yield f"{INDENT}measured by another program, read from {metadata.options['read_from']}"
    yield from rank_lines(metadata, verbose=verbose)
    yield from software_lines(metadata, verbose=verbose)
    yield f"{INDENT}{_method(metadata)}"
    ways = way_names(metadata)
    if ways:
        how = f"every size in {len(ways)} ways, one after the other"
        if "turns" in metadata.options:
            how, ways = f"{len(ways) - 1} ways, each in two jobs of its own that take turns there and back", ways[:-1]
        yield f"{INDENT}{how}: {', '.join(ways)}"
    yield from _clock_lines(metadata)
    yield f"{INDENT}size: larger buffer of a rank; K, M, G are 1024-based; GB/s is 1e9 bytes/s"
    for line in units.describe_dropped(metadata.dropped_sizes):
        yield f"{INDENT}not measured: {line}"


def overlap_lines(metadata: Metadata, *, verbose: bool) -> Iterator[str]:
    """Return the header of an overlap."""
    options = metadata.options
    yield heading(
        metadata, f"overlap of {options['collective']}", f"backend {metadata.backend}", _ranks_on_hosts(metadata)
    )
    if metadata.origin == "simulated" and metadata.profile:
        yield f"{INDENT}a model from profile {metadata.profile['name']}, contention as on 2 H200s: nothing was measured"
        yield f"{INDENT}{metadata.source}"
    yield from rank_lines(metadata, verbose=verbose)
    yield from software_lines(metadata, verbose=verbose)
    types = ", ".join((*options["dtypes"], *options["ops"]))
    if metadata.origin == "simulated":
        yield f"{INDENT}{types}; one time a row, with noise from seed {options['seed']}"
    else:
        check = "every rank's data verified" if options["check"] else "data not verified"
        yield f"{INDENT}{types}; steps of one collective and some operations, {options['seconds']:g} s a phase; {check}"
    yield f"{INDENT}a collective begins as the partner's first operation does; size is the larger buffer of a rank"
    yield f"{INDENT}κm = 1 + wait for SMs + share of bandwidth and power; κc while the collective is in flight"
    for line in units.describe_dropped(metadata.dropped_sizes):
        yield f"{INDENT}not measured: {line}"


def _ranks_on_hosts(metadata: Metadata) -> str:
    return f"{units.counted(len(metadata.ranks), 'rank')} on {units.counted(len(metadata.hosts), 'host')}"


def _clock_lines(metadata: Metadata) -> Iterator[str]:
    """Name the clock that times each backend, unless the host times all of them."""
    if metadata.options.get("clock") != operation.GATE:
        return
    names = [str(metadata.backend), *backends_beside(metadata)]
    timed_by_gpu = operation.gated(names)
    how = "timed by the GPU, from a gate that opens once operations wait behind it"
    yield f"{INDENT}{' and '.join(timed_by_gpu)}: {how}"
    timed_by_host = [name for name in names if name not in timed_by_gpu]
    if timed_by_host:
        yield f"{INDENT}{' and '.join(timed_by_host)}: timed by the host, which waits for every operation"


def _method(metadata: Metadata) -> str:
    options = metadata.options
    graph = f" in a CUDA graph, replayed {options['graph']} times," if options["graph"] else ""
    root = f", root {options['root']}" if options["root"] is not None else ""
    types = ", ".join((*options["dtypes"], *options["ops"]))
    if "skew" in options:
        types += f", alltoallv: the last rank receives {options['skew']:.0%} less than rank 0"
    if metadata.backend == "simulated":
        return f"{types}{root}; one time a row, with noise from seed {options['seed']}; mean over ranks"
    check = "every rank's data verified" if options["check"] else "data not verified"
    warmup = "" if options["warmup"] is None else f" after {options['warmup']} to warm up"
    if options["allocator"] == "nccl":
        types += ", ncclMemAlloc buffers"
    return f"{types}{root}; {_loop(options)}{graph}{warmup}; mean over ranks; {check}"


def _loop(options: Mapping[str, Any]) -> str:
    is_latency = options.get("mode") == Mode.LATENCY
    if "budget_s" in options:
        what = "operations, each alone," if is_latency else "iterations"
        return f"{what} until the mean is within {INTERVAL:.0%} (95 %) or for {options['budget_s']:g} s a row"
    if options["iters"] is None:
        return "how many iterations is not said"
    if is_latency:
        return f"{options['iters']} operations, each alone,"
    refused = "graphs" if options["graph"] else "groups" if options.get("split") else ""
    is_fallback = refused and options["iters"] == DEFAULT_ITERATIONS[Mode.THROUGHPUT]
    return f"{options['iters']} iterations" + (f" (--iters {AUTO} is not for {refused})" if is_fallback else "")


def rank_lines(metadata: Metadata, *, verbose: bool) -> Iterator[str]:
    """List ranks by host, equal hosts together if there are many, and the ranks that share a GPU."""
    ranks = metadata.ranks
    hosts = [list(members) for _, members in groupby(ranks, key=lambda rank: rank.host)]
    if len(hosts) > (_MOST_LINES_IN_FULL if verbose else _MOST_LINES):
        for gpus, alike in units.grouped(hosts, _gpus).items():
            names = units.compress_names([members[0].host for members in alike])
            numbers = units.spans([rank.rank for members in alike for rank in members])
            where = f"rank {numbers} on {units.counted(len(alike), 'host')}: {names}"
            yield f"{INDENT}{where}" + (f": {gpus}" if gpus else "")
    else:
        for members in hosts:
            yield from _lines_of_host(members, verbose=verbose and len(ranks) <= _MOST_LINES_IN_FULL)
    yield from _sharing_lines(ranks)


def _lines_of_host(ranks: Sequence[RankIdentity], *, verbose: bool) -> Iterator[str]:
    gpus = _gpus(ranks)
    if verbose and gpus:
        for rank in ranks:
            yield f"{INDENT}rank {rank.rank} on {rank.host}: GPU {rank.gpu_index} {rank.gpu_bus_id} {rank.gpu}"
        return
    indices = sorted({rank.gpu_index for rank in ranks if rank.gpu_index is not None})
    numbers = f"GPU {units.spans(indices)}, " if indices else ""
    where = f"rank {units.spans([rank.rank for rank in ranks])} on {ranks[0].host}"
    yield f"{INDENT}{where}" + (f": {numbers}{gpus}" if gpus else "")


def _gpus(ranks: Sequence[RankIdentity]) -> str:
    return ", ".join(dict.fromkeys(rank.gpu for rank in ranks if rank.gpu))


def _hosts_of_nccl(ranks: Sequence[RankIdentity]) -> str:
    """Return ', 2 hosts for NCCL, by NCCL_HOSTID' if NCCL counts other hosts than there are."""
    if all(rank.nccl_host is None or rank.device is None for rank in ranks):
        return ""
    return f", {units.counted(hosts_of_nccl(ranks), 'host')} for NCCL, by NCCL_HOSTID"


def _sharing_lines(ranks: Sequence[RankIdentity]) -> Iterator[str]:
    """Return '4 ranks share GPU 0 (MPS, 25 % of its SMs each)'. GPUs that are shared alike have one line."""
    shared: dict[str, list[RankIdentity]] = {}
    for members in by_device(ranks):
        if len(members) > 1:
            percents = sorted({rank.sm_percent for rank in members if rank.sm_percent is not None})
            shares = " or ".join(f"{percent:g} %" for percent in percents)
            how = f"MPS, {shares} of its SMs each" if percents else "taking turns"
            shared.setdefault(f"{len(members)} ranks share {{}} ({how})", []).append(members[0])
    for text, firsts in shared.items():
        names = f"GPU {units.spans(sorted({rank.gpu_index or 0 for rank in firsts}))}"
        yield INDENT + text.format(names if len(firsts) == 1 else f"each of {names}")


def way_name(backend: str, setting: str | None, *, several: bool) -> str:
    """Return the setting of a row, after its backend if several backends are compared."""
    if not several:
        return setting or settings.OWN_CHOICE
    return " ".join(filter(None, (backend, setting)))


def way_names(metadata: Metadata) -> list[str]:
    """Return the names of all ways of a sweep. There are none if the sweep compares nothing."""
    names = list(metadata.options.get("settings") or ())
    if not names:
        return []
    beside, backend = backends_beside(metadata), str(metadata.backend)
    own = [name for name in (None, *names, settings.AGAIN) if name not in beside]
    ways = [way_name(backend, name, several=bool(beside)) for name in own]
    for other in beside:
        more = [*operation.KERNELS.get(other, ())]
        more += [settings.HIERARCHICAL] if settings.HIERARCHICAL in names else []
        ways += [other, *(f"{other} {name}" for name in more)]
    return ways


def backends_beside(metadata: Metadata) -> list[str]:
    """Return the backends that were measured next to the first."""
    names = metadata.options.get("settings") or ()
    return [name for name in names if name in BACKENDS and name != metadata.backend]

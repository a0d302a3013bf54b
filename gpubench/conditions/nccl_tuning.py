"""Variables (environment or NCCL's files) and plugins that slow NCCL down on a direct path."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.conditions.definition.condition import Condition, Family, Found, Look, Sighting, of_ranks
from gpubench.conditions.nccl_settings import Chosen, blame, chosen, nccl_number
from gpubench.model.facts.environment import logs_every_operation
from gpubench.model.facts.snapshot import GpuFacts, NicKind
from gpubench.model.paths.transport import Confidence

Weighed = Callable[[int], Confidence | None]  # The confidence that a value slows NCCL down; None if it does not
_OWN_CHANNELS = 16  # Channels that NCCL chooses for GPUs with many NVLinks: 16 to 24 on HGX A100, H100 and H200
_OWN_CHANNELS_OVER_PCIE = 2
_CHANNELS_PER_LINK = 2

_MOST = ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_MAX_NRINGS")
_LEAST = ("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MIN_NRINGS")
_MOST_OF_POINT_TO_POINT = "NCCL_MAX_P2P_NCHANNELS"
_OF_A_PEER = {"NCCL_NCHANNELS_PER_PEER": 2, "NCCL_NCHANNELS_PER_NET_PEER": 2}
"""Channels for one peer of sends and receives, with the fewest that NCCL chooses."""

_OWN_BYTES = {"NCCL_BUFFSIZE": 4 * 2**20, "NCCL_LL128_BUFFSIZE": 4800 * 2**10, "NCCL_LL_BUFFSIZE": 512 * 2**10}
"""NCCL's default buffer sizes of the protocols Simple, LL128 and LL (computeBuffSizes in src/init.cc)."""

_SURELY_SLOW_SHARE = 1 / 4  # Share of NCCL's default buffer below which a channel waits for its peer at every step
_OWN_THREADS, _OWN_LL128_THREADS = 512, 640
_OWN_THREADS_OVER_PCIE = 256
_SURELY_FEW_THREADS = 128
_WARP = 32

_ALGORITHMS = frozenset(("tree", "ring", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat"))

_PROTOCOLS = frozenset(("ll", "ll128", "simple"))


def _lines(run: Circumstances, weighed: Mapping[str, Weighed]) -> Found:
    blamed: dict[str, Iterable[str]] = {}
    sure: list[Confidence] = []
    for name, weigh in weighed.items():
        found = {value: weigh(count) for value in run.values(name) if (count := nccl_number(value)) is not None}
        slow = {value: confidence for value, confidence in found.items() if confidence is not None}
        if slow:
            blamed[name] = list(slow)
            sure += slow.values()
    if blamed and run.asked_of_nccl:
        yield blame(run, blamed, _surest(sure), None)


def _surest(found: Iterable[Confidence]) -> Confidence:
    return min(found, key=(Confidence.PROVEN, Confidence.LIKELY, Confidence.WEAK).index)


def _gpus(run: Circumstances) -> Iterator[GpuFacts]:
    return (gpu for _, _, gpu in run.gpus())


def _few_channels(run: Circumstances) -> Found:
    """Fewer channels than NCCL chooses; of a minimum above the maximum NCCL takes the minimum."""
    links = [sum(bool(link.active) for link in gpu.nvlinks) for gpu in _gpus(run) if gpu.nvlinks is not None]
    most = max(links, default=_OWN_CHANNELS)
    own = min(_OWN_CHANNELS, most * _CHANNELS_PER_LINK) if most else _OWN_CHANNELS_OVER_PCIE
    least = max((count for name in _LEAST for value in run.values(name) if (count := nccl_number(value))), default=0)

    def few(count: int) -> Confidence | None:
        taken = max(count, least, 1)
        return None if taken >= own else Confidence.PROVEN if taken <= own / 2 else Confidence.LIKELY

    def few_blocks(count: int) -> Confidence | None:
        return few(count) if count > 0 else None

    def few_of_a_peer(name: str) -> Weighed:
        return lambda count: Confidence.WEAK if 0 < count < _OF_A_PEER[name] else None

    weighed = {name: few_blocks if name.endswith("CTAS") else few for name in _MOST}
    point_to_point = {_MOST_OF_POINT_TO_POINT: lambda count: few(count) and Confidence.LIKELY}
    yield from _lines(run, {**weighed, **point_to_point, **{name: few_of_a_peer(name) for name in _OF_A_PEER}})


def _small_buffers(run: Circumstances) -> Found:
    def small(own: int) -> Weighed:
        def weigh(size: int) -> Confidence | None:
            if size < 0 or size >= own:
                return None
            return Confidence.PROVEN if size <= own * _SURELY_SLOW_SHARE else Confidence.LIKELY

        return weigh

    yield from _lines(run, {name: small(own) for name, own in _OWN_BYTES.items()})


def _few_threads(run: Circumstances) -> Found:
    over_nvlink = any(link.active for gpu in _gpus(run) for link in gpu.nvlinks or ())

    def few(own: int) -> Weighed:
        def weigh(count: int) -> Confidence | None:
            if count <= 0 or count % _WARP or count >= own:
                return None
            return Confidence.PROVEN if count <= _SURELY_FEW_THREADS else Confidence.LIKELY

        return weigh

    own = _OWN_THREADS if over_nvlink else _OWN_THREADS_OVER_PCIE
    yield from _lines(run, {"NCCL_NTHREADS": few(own), "NCCL_LL128_NTHREADS": few(_OWN_LL128_THREADS)})


def _forced(run: Circumstances) -> Found:
    blamed: dict[str, Iterable[str]] = {}
    sure: list[Confidence] = []
    of_algorithms = _of_algorithms_on_nodes if len(run.nodes) > 1 else _of_algorithms
    for name, known, weigh in (("NCCL_ALGO", _ALGORITHMS, of_algorithms), ("NCCL_PROTO", _PROTOCOLS, _of_protocols)):
        found = {value: weigh(chosen(value, known)) for value in run.values(name)}
        forced = {value: confidence for value, confidence in found.items() if confidence is not None}
        if forced:
            blamed[name] = list(forced)
            sure += forced.values()
    if blamed and run.asked_of_nccl:
        yield blame(run, blamed, _surest(sure), None)


def _of_algorithms(allowed: Chosen) -> Confidence | None:
    """LIKELY without rings, which carry large sizes inside a node; other algorithms may not matter there."""
    return _without(allowed, frozenset(("ring",)))


def _of_algorithms_on_nodes(allowed: Chosen) -> Confidence | None:
    """LIKELY also without trees, which carry small sizes between nodes."""
    return _without(allowed, frozenset(("ring", "tree")))


def _without(allowed: Chosen, needed: frozenset[str]) -> Confidence | None:
    if all(names >= _ALGORITHMS for names in allowed.values()):
        return None
    return Confidence.WEAK if all(names >= needed for names in allowed.values()) else Confidence.LIKELY


def _of_protocols(allowed: Chosen) -> Confidence | None:
    """PROVEN if only LL is allowed for all collectives: half of its data are flags."""
    if all(names >= _PROTOCOLS for names in allowed.values()):
        return None
    return Confidence.PROVEN if set(allowed.values()) == {frozenset(("ll",))} else Confidence.LIKELY


def _memcpy(run: Circumstances) -> Found:
    if not run.asked_of_nccl:
        return
    for name, confidence in (
        ("NCCL_P2P_USE_CUDA_MEMCPY", Confidence.PROVEN),
        ("NCCL_P2P_DIRECT_DISABLE", Confidence.WEAK),
    ):
        on = [value for value in run.values(name) if nccl_number(value)]
        if on:
            yield blame(run, {name: on}, confidence, None)


def _nvls_off(run: Circumstances) -> Found:
    multicast = any(gpu.cuda_features.get("multicast") for gpu in _gpus(run))
    if multicast and run.asked_of_nccl and "0" in run.values("NCCL_NVLS_ENABLE"):
        yield blame(run, {"NCCL_NVLS_ENABLE": ("0",)}, Confidence.WEAK, None)


def _debug(run: Circumstances) -> Found:
    """One log line for every operation, which a rank formats and writes before it continues."""
    levels = run.values("NCCL_DEBUG")
    subsystems = run.values("NCCL_DEBUG_SUBSYS")
    blamed: dict[str, Iterable[str]] = {}
    if traced := [level for level in levels if logs_every_operation(level, "")]:
        blamed["NCCL_DEBUG"] = traced
    elif any(logs_every_operation(level, listed) for level in levels for listed in subsystems):
        blamed = {"NCCL_DEBUG": levels, "NCCL_DEBUG_SUBSYS": subsystems}
    if blamed and run.asked_of_nccl:
        yield blame(run, blamed, Confidence.PROVEN, None)


_PLUGINS = {"NCCL_TUNER_PLUGIN": Confidence.LIKELY, "NCCL_TUNER_CONFIG_FILE": Confidence.LIKELY}
_PROFILER = "NCCL_PROFILER_PLUGIN"
_NET_PLUGIN = "NCCL_NET_PLUGIN"
_NO_PLUGIN = ("", "none", "STATIC_PLUGIN")
_LOADED = {"libnccl-tuner": "chooses NCCL's algorithms", "libnccl-profiler": "is called for every operation"}


def _plugin(run: Circumstances) -> Found:
    if not run.asked_of_nccl:
        return
    weighed = {**_PLUGINS, _PROFILER: Confidence.LIKELY}
    efa = any(nic.kind is NicKind.EFA for node in run.nodes.values() for nic in node.nics)
    if len(run.nodes) > 1 and not efa:
        weighed[_NET_PLUGIN] = Confidence.WEAK
    for name, confidence in weighed.items():
        values = [value for value in run.values(name) if value not in _NO_PLUGIN]
        if values:
            yield blame(run, {name: values}, confidence, None)
    yield from _loaded_plugins(run)


def _loaded_plugins(run: Circumstances) -> Iterator[Sighting]:
    for name, does in _LOADED.items():
        for node in sorted({each.node for each in run.facts}):
            having = [each for each in run.ranks_of(node) if _library(each.libraries, name)]
            if having:
                file = _library(having[0].libraries, name)
                cure = f"export {'NCCL_TUNER_PLUGIN' if name == 'libnccl-tuner' else 'NCCL_PROFILER_PLUGIN'}=none"
                yield of_ranks(run, having, f"{file} is loaded; it {does}", Confidence.LIKELY, cure=cure)


def _library(loaded: Mapping[str, str], name: str) -> str:
    return next((file for known, file in loaded.items() if known.startswith(name)), "")


_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_PLACES = "in the environment of every rank, NCCL_CONF_FILE, ~/.nccl.conf, /etc/nccl.conf"
_UNSET = "unset {}. If a file sets it, remove it there; NCCL then chooses for each size"


def _slow(id_: str, title: str, detection: str, names: str, look: Look) -> Condition:
    return Condition(
        id=id_,
        title=title,
        seen_as=tuple(f"{name} set by environment to" for name in names.split()),
        detection=f"{names.replace(' ', ', ')} {_PLACES}; {detection}",
        settles=f"gpubench allreduce against env {' '.join(f'-u {name}' for name in names.split())} gpubench allreduce",
        cure=_UNSET.format(names),
        look=look,
        aliases=("nccl-slow-settings",),
    )


NCCL_TUNING = Family.of(
    "nccl_tuning",
    "NCCL's settings that slow it down",
    _slow(
        "nccl-few-channels",
        "NCCL uses few channels or CTAs: NCCL_MAX_NCHANNELS, NCCL_MAX_CTAS; low busbw over a direct path",
        f"fewer than NCCL chooses: {_OWN_CHANNELS} over NVSwitch, {_CHANNELS_PER_LINK} for each NVLink if there are "
        f"few, {_OWN_CHANNELS_OVER_PCIE} over PCIe",
        " ".join((*_MOST, _MOST_OF_POINT_TO_POINT, *_OF_A_PEER)),
        _few_channels,
    ),
    _slow(
        "nccl-p2p-memcpy",
        "NCCL_P2P_USE_CUDA_MEMCPY=1: copy engines instead of kernels move NCCL's data; NCCL_P2P_DIRECT_DISABLE=1",
        "NCCL_P2P_DIRECT_DISABLE alone is weak evidence: on four H200s it had no cost",
        "NCCL_P2P_USE_CUDA_MEMCPY NCCL_P2P_DIRECT_DISABLE",
        _memcpy,
    ),
    _slow(
        "nccl-small-buffers",
        "NCCL's buffers are small: NCCL_BUFFSIZE below 4 MiB, NCCL_LL128_BUFFSIZE, NCCL_LL_BUFFSIZE",
        "below NCCL's defaults; proven at a quarter or less. NCCL reads no units: 4M means 4 bytes",
        " ".join(_OWN_BYTES),
        _small_buffers,
    ),
    _slow(
        "nccl-algorithm-forced",
        "NCCL is pinned to an algorithm or protocol: NCCL_ALGO, NCCL_PROTO",
        "any restriction of NCCL's choice; only LL is proven, only rings on one node is weak evidence",
        "NCCL_ALGO NCCL_PROTO",
        _forced,
    ),
    _slow(
        "nccl-few-threads",
        "NCCL's kernels have few threads: NCCL_NTHREADS below 512, NCCL_LL128_NTHREADS below 640",
        f"multiples of {_WARP} below NCCL's default, which is {_OWN_THREADS_OVER_PCIE} over PCIe",
        "NCCL_NTHREADS NCCL_LL128_NTHREADS",
        _few_threads,
    ),
    _slow(
        "nccl-debug-trace",
        "NCCL logs every operation: NCCL_DEBUG=TRACE, or INFO with NCCL_DEBUG_SUBSYS=COLL, CALL, TUNING or ALL",
        "levels and subsystems that write a line for each operation; small sizes take longer",
        "NCCL_DEBUG NCCL_DEBUG_SUBSYS",
        _debug,
    ),
    _slow(
        "nccl-plugin",
        "A plugin chooses NCCL's algorithms, profiles NCCL, or moves its data: NCCL_TUNER_PLUGIN, libnccl-tuner.so",
        "libnccl-tuner and libnccl-profiler in /proc/self/maps; a network plugin on several nodes without EFA",
        " ".join((*_PLUGINS, _PROFILER, _NET_PLUGIN)),
        _plugin,
    ),
    _slow(
        "nccl-nvls-off",
        "NCCL_NVLS_ENABLE=0: NVSwitches do not reduce (NVLink SHARP)",
        "only for GPUs with multicast; weak evidence, as it has no cost if NCCL would not use NVLS",
        "NCCL_NVLS_ENABLE",
        _nvls_off,
    ),
    link=_ENV,
)

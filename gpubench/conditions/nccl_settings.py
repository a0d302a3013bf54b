"""NCCL's default policy, and settings that slow NCCL down or prevent a direct path."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial

from msgspec.structs import replace

from gpubench.conditions.circumstances import (
    OFF,
    VERIFIED_COPIES,
    Circumstances,
    Found,
    Sighting,
    joined,
    rank_names,
    removal,
    setting_places,
    unset,
)
from gpubench.conditions.condition import Condition, Family, Look
from gpubench.conditions.logged import ASK_FOR_MORE, LoggedReason, Staged
from gpubench.conditions.peer_access import has_nvlinks
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import GpuFacts, NicKind
from gpubench.model.paths.nccl_log import RemarkKind
from gpubench.model.paths.topology import (
    DEFAULT_LEVEL,
    NCCL_POLICY,
    amd_takes_all,
    is_beyond_policy,
    is_within,
    level_allows,
    nccl_path_type,
    parse_level,
)
from gpubench.model.paths.transport import Confidence, Pair
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.verdict import Cure, Verdict

_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
# Names of allowed algorithms or protocols by collective. '' stands for all collectives.
Chosen = Mapping[str, frozenset[str]]
_NUMBER = re.compile(r"\s*([+-]?)(0[xX][0-9a-fA-F]{1,15}|[0-9]{1,18})")


def nccl_number(value: str) -> int | None:
    """Parse the leading number of a value in the same way as NCCL.

    0x10 is 16, 010 is 8, 4M is 4, and a value without a number is 0.
    """
    if not value:
        return None
    match = _NUMBER.match(value)
    if match is None:
        return 0
    sign, digits = match.groups()
    return (-1 if sign == "-" else 1) * _unsigned(digits)


def _unsigned(digits: str) -> int:
    if digits[:2].lower() == "0x":
        return int(digits, 16)
    octal = re.match(r"0[0-7]*", digits)
    return int(octal[0], 8) if octal else int(digits)


def chosen(value: str, known: frozenset[str]) -> Chosen:
    """Parse NCCL_ALGO or NCCL_PROTO into allowed names. Examples are 'ring,tree', '^ll' and 'ring;allreduce:tree'."""
    found: dict[str, frozenset[str]] = {}
    for part in value.lower().split(";"):
        collective, _, names = part.rpartition(":")
        named = frozenset(name.strip() for name in names.strip().removeprefix("^").split(",")) & known
        if named:
            found[collective.strip()] = known - named if names.strip().startswith("^") else named
    return found


P2P_DISABLE, P2P_LEVEL, SHM_DISABLE, HOSTID = "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_HOSTID"

_AMD = "1/2"


def blame(
    run: Circumstances, blamed: dict[str, Iterable[str]], confidence: Confidence, pairs: frozenset[Pair] | None
) -> Sighting:
    """Report environment variables as the cause.

    The sighting has their values, where they are set, and the command that unsets them.
    """
    having = [fact for fact in run.facts if any(_value(fact, name) in set(blamed[name]) for name in blamed)]
    places = setting_places(blamed, having)
    shown = " ".join(f"{name}={','.join(values)}" for name, values in blamed.items())
    seen = f"{shown} in {' and '.join(places)}"
    cure = removal(list(blamed), places)
    if pairs:
        return replace(run.pair_sighting(pairs, seen, confidence), cure=cure)
    places_of_them = run.rank_places(having)
    return Sighting(subject=_who(run, having), seen=seen, confidence=confidence, cure=cure, places=places_of_them)


def _value(facts: RankFacts, name: str) -> str | None:
    settings = facts.nccl_settings
    return settings[name].value if name in settings else facts.environment.get(name)


def _who(run: Circumstances, having: Sequence[RankFacts]) -> str:
    if not having or len(having) == len(run.facts):
        return "all nodes" if len(run.nodes) > 1 else "this job"
    nodes = sorted({facts.node for facts in having})
    if sum(len(run.node_ranks(node)) for node in nodes) == len(having):
        return joined(run.subject(node) for node in nodes)
    return run.subject(nodes[0], rank_names(having)) if len(nodes) == 1 else rank_names(having)


def in_log(blamed: Iterable[tuple[str, str]]) -> LoggedReason | None:
    """Return evidence and cure for variables that a log shows, or None if there are none."""
    values: dict[str, dict[str, None]] = {}
    for name, value in blamed:
        values.setdefault(name, {})[value] = None
    if not values:
        return None
    shown = [f"{name}={next(iter(found)) if len(found) == 1 else '(differs)'}" for name, found in values.items()]
    files = f"grep -E '{'|'.join(values)}' /etc/nccl.conf ~/.nccl.conf"
    cure = Cure((unset(*values), files), "If it is still set, the second command finds it in NCCL's files.")
    verb = "are" if shown[1:] else "is"
    return LoggedReason(f"{', '.join(shown)} {verb} set in the environment", cure)


def _blamed(run: Circumstances, *first: str) -> Found:
    """Find variables that prevent peer access between GPUs of one node. `first` are variables that affect a whole
    node.
    """
    by_variables: dict[tuple[str, ...], set[Pair]] = {}
    values_on = cache(partial(_values_on, run))
    for pair in run.local_pairs:
        node = run.wiring.gpus[pair[0]].node
        whole = [name for name in first if _is_on(values_on(node, name))]
        if len(whole) == len(first):
            by_variables.setdefault((*whole, *keep_off_peers(run, pair, partial(values_on, node))), set()).add(pair)
    for names, pairs in by_variables.items():
        blamed: dict[str, Iterable[str]] = {name: run.values(name) for name in names}
        if blamed:
            yield blame(run, blamed, Confidence.PROVEN, frozenset(pairs))


def _values_on(run: Circumstances, node: int, name: str) -> tuple[str, ...]:
    """Return a variable's values on a node. Values that no rank has come from a log, and apply to all nodes."""
    by_rank = [(fact.node, _value(fact, name)) for fact in run.facts]
    elsewhere = {value for on, value in by_rank if on != node} - {value for on, value in by_rank if on == node}
    return tuple(value for value in run.values(name) if value not in elsewhere)


def _is_on(values: Iterable[str]) -> bool:
    return any(value not in OFF for value in values)


def keep_off_peers(run: Circumstances, pair: Pair, values: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """Yield variables that keep NCCL from using peer access between two GPUs, if it would use it by default."""
    path = run.wiring.path(pair)
    node = run.nodes.get(run.wiring.gpus[pair[0]].node)
    if node is not None and is_beyond_policy(node, path):
        return
    if _is_on(values(P2P_DISABLE)):
        yield P2P_DISABLE
    # If the path is unknown, blame only a level that forbids every path.
    longest = nccl_path_type(path) or "NVL"
    limits = (limit for value in values(P2P_LEVEL) if (limit := parse_level(value)) is not None)
    if any(not is_within(longest, limit) for limit in limits):
        yield P2P_LEVEL


def _shm(run: Circumstances) -> Found:
    if run.uses_nccl and run.is_on(SHM_DISABLE):
        if run.local_pairs:
            yield from _blamed(run, SHM_DISABLE)
        else:
            yield blame(run, {SHM_DISABLE: run.values(SHM_DISABLE)}, Confidence.PROVEN, None)


_NO_LINK_LOST = Cure(
    comment="Nothing to repair: both ranks use one GPU. Unsetting NCCL_HOSTID makes them ranks of one host."
)


def _hostid(run: Circumstances) -> Found:
    """Find NCCL_HOSTID values that differ between ranks of one host. NCCL then treats them as ranks of several
    hosts.
    """
    values = run.values(HOSTID)
    if not run.uses_nccl or not any(values):
        return
    by_rank = {fact.rank: _value(fact, HOSTID) for fact in run.facts}
    ids = set(by_rank.values())
    if len(ids) < 2 and (run.staged is None or any(ids)):
        return
    is_by_rank = len(ids) > 1 and all(isinstance(gpu, RankIdentity) for gpu in run.wiring.gpus)
    pairs = {pair for pair in run.local_pairs if not is_by_rank or by_rank.get(pair[0]) != by_rank.get(pair[1])}
    shared = {pair for pair in pairs if run.wiring.share_gpu(pair)}
    if pairs - shared:
        yield blame(run, {HOSTID: values}, Confidence.PROVEN, frozenset(pairs - shared))
    if shared:
        seen = blame(run, {HOSTID: values}, Confidence.PROVEN, frozenset(shared))
        yield replace(seen, severity=Verdict.SKIP, cure=_NO_LINK_LOST, quiet=True)


def split_by_design(run: Circumstances, ranks: Pair) -> str:
    """Explain why two ranks on one GPU use a network: their NCCL_HOSTID differs. Return an empty text if it does
    not.
    """
    if not run.wiring.share_gpu(ranks) or len({_value(fact, HOSTID) for fact in run.facts if fact.rank in ranks}) < 2:
        return ""
    return f"{HOSTID} makes NCCL treat ranks of one GPU as ranks of different hosts"


def _policy(run: Circumstances) -> Found:
    """Find pairs whose peer access NCCL does not use by default."""
    if not run.uses_nccl:
        return
    paths: dict[Pair, str] = {}
    for pair in run.local_pairs:
        path = run.wiring.path(pair)
        raised = any(level_allows(value, path) for value in run.values(P2P_LEVEL))
        if not raised and run.wiring.is_avoided(pair):
            paths[pair] = path
    if paths:
        found = joined(list(paths.values()))
        seen = f"{NCCL_POLICY}; {'this path is' if ',' not in found else 'these paths are'} {found}"
        yield run.pair_sighting(paths, seen)


def _network_taken(run: Circumstances) -> Found:
    by_network = {pair for pair in run.local_pairs if any(way.network for way in (run.staged or {}).get(pair, ()))}
    if by_network and not run.values("NCCL_NET_DISABLE_INTRA"):
        yield run.pair_sighting(by_network, "NCCL uses a network inside the node", Confidence.WEAK)


def _against_peer_access(staged: Staged) -> Iterator[tuple[str, str]]:
    yield from _other_than(staged, P2P_DISABLE, OFF)
    for value in staged.settings(P2P_LEVEL):
        limit = parse_level(value)
        is_low = limit is not None and limit != DEFAULT_LEVEL and is_within(limit)
        if is_low and (staged.path is None or not is_within(staged.path, limit or "")):
            yield P2P_LEVEL, value


def _log_shm(staged: Staged) -> LoggedReason | None:
    found = list(_other_than(staged, SHM_DISABLE, OFF))
    return in_log([*found, *_against_peer_access(staged)]) if staged.through_local_network and found else None


def _log_hostid(staged: Staged) -> LoggedReason | None:
    if staged.one_node or not staged.through_local_network:
        return None
    reason = in_log(_other_than(staged, HOSTID, ("",)))
    if reason is None or not staged.one_gpu:
        return reason
    return reason._replace(cure=_NO_LINK_LOST, by_design=True)


def _other_than(staged: Staged, name: str, values: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    return ((name, value) for value in staged.settings(name) if value not in values)


def _log_policy(staged: Staged) -> LoggedReason | None:
    """Find a path that is longer than NCCL's default level for peer access.

    NCCL logs its path matrix after it has rerouted pairs without peer access through the CPU. So a logged PHB is the
    real path only if the driver refused nothing, no variable forbids peer access, and there are no NVLinks.
    """
    path = staged.path
    if not staged.through_shm or (path is not None and is_within(path)):
        return None
    if list(_other_than(staged, P2P_DISABLE, OFF)) or has_nvlinks(staged):
        return None
    limits = [limit for value in staged.settings(P2P_LEVEL) if (limit := parse_level(value))]
    if any(is_within(limit) or (path is not None and is_within(path, limit)) for limit in limits):
        return None
    if path is None:
        return _what_lies_between(staged)
    is_amd = any(note.about == (_AMD,) for note in staged.find_notes(RemarkKind.PROCESSOR))
    if is_amd and amd_takes_all(staged.gpus):
        return None
    seen = (
        f"the path between the GPUs is {path}; by default, NCCL uses peer access only over PCIe switches, up "
        f"to {DEFAULT_LEVEL}"
    )
    hidden = next((name for name in _BLINDING if any(value not in OFF for value in staged.settings(name))), None)
    if hidden is not None:
        return LoggedReason(
            f"{seen}; {hidden} is set and hides NCCL's messages about these GPUs",
            Cure.of(f"unset {hidden}", comment=f"Then run the job again with {ASK_FOR_MORE}."),
            is_proven=False,
        )
    if limits:
        return LoggedReason(
            f"the path between the GPUs is {path}, beyond NCCL_P2P_LEVEL",
            Cure.of(f"{VERIFIED_COPIES} && export NCCL_P2P_LEVEL=SYS"),
            is_proven=False,
        )
    if staged.is_virtual:
        return LoggedReason(
            f"{seen}; a virtual machine may not show the real path",
            Cure.of("gpubench p2p", comment="If the data are right, NCCL_P2P_LEVEL=SYS lets NCCL try peer access."),
            is_proven=False,
        )
    return LoggedReason(
        seen,
        Cure(
            comment="Nothing to repair. With NCCL_P2P_LEVEL=SYS, NCCL tries peer access, which may be faster or "
            "slower. `gpubench p2p` shows whether its data are right."
        ),
    )


_BLINDING = ("NCCL_IGNORE_DISABLED_P2P", "NCCL_TOPO_FILE")
"""With these settings, the log does not show the real paths.

The first hides that the driver refuses peer access. With the second, paths come from a file.
"""


def _what_lies_between(staged: Staged) -> LoggedReason | None:
    """Find two GPUs that use peer access to other GPUs but not to each other, if no setting or refusal explains it."""
    if not staged.peers_elsewhere:
        return None
    return LoggedReason(
        "both GPUs use peer access to other GPUs but not to each other, as across PCIe switches or sockets",
        Cure.of(
            "gpubench topo",
            comment=f"Beyond {DEFAULT_LEVEL}, there is nothing to repair. {ASK_FOR_MORE} makes NCCL log the path.",
        ),
        is_proven=False,
    )


_NETWORK_TAKEN = "nccl-net-in-node"


def _variable(
    id_: str, title: str, look: Look, log: Callable[[Staged], LoggedReason | None], names: str, *implies: str
) -> Condition:
    return Condition(
        id=id_,
        title=title,
        settles=f"compare `gpubench allreduce` with `env {' '.join(f'-u {name}' for name in names.split())} "
        "gpubench allreduce`",
        command=unset(*names.split()),
        comment="If a file sets it, remove it there.",
        look=look,
        in_log=log,
        implies=implies,
    )


NCCL_SETTINGS = Family.of(
    "nccl_settings",
    "NCCL's settings and policy",
    _variable(
        "nccl-p2p-disabled",
        "NCCL_P2P_DISABLE=1 or a low NCCL_P2P_LEVEL: NCCL uses SHM instead of P2P, without a warning",
        lambda run: _blamed(run) if run.uses_nccl else iter(()),
        lambda staged: in_log(_against_peer_access(staged)) if staged.through_shm else None,
        f"{P2P_DISABLE} {P2P_LEVEL}",
    ),
    _variable(
        "nccl-shm-disabled",
        "NCCL_SHM_DISABLE=1: NCCL uses NET/Socket between GPUs of one host",
        _shm,
        _log_shm,
        SHM_DISABLE,
        _NETWORK_TAKEN,
    ),
    _variable(
        "nccl-hostid",
        "NCCL_HOSTID makes NCCL treat ranks of one host as ranks of several hosts: NET/Socket inside a node",
        _hostid,
        _log_hostid,
        HOSTID,
        _NETWORK_TAKEN,
    ),
    Condition(
        id="nccl-default-level",
        title="NCCL uses SHM although P2P works: the path between the GPUs is PHB, NODE or SYS (default "
        "NCCL_P2P_LEVEL is PXB)",
        settles="`gpubench allreduce --evidence` with and without NCCL_P2P_LEVEL=SYS",
        command=f"{VERIFIED_COPIES} && NCCL_P2P_LEVEL=SYS gpubench allreduce --sizes 64M:1G",
        comment="There is nothing to repair. Keep this setting if the run is faster than without it and its data "
        "are right.",
        link="https://github.com/NVIDIA/nccl/issues/1817",
        look=_policy,
        in_log=_log_policy,
        by_design=True,
    ),
    Condition(
        id=_NETWORK_TAKEN,
        title="NCCL uses NET inside one node although no setting requests it",
        settles="`NCCL_NET_DISABLE_INTRA=1 gpubench allreduce`, which fails or uses another path",
        command="NCCL_NET_DISABLE_INTRA=1 gpubench allreduce",
        comment="Keep the setting if this run is faster and its data are right.",
        link="https://github.com/NVIDIA/nccl/issues/406",
        look=_network_taken,
        general=True,
    ),
    link=_ENV,
)


# Returns the confidence that a value slows NCCL down, or None if it does not
Weighed = Callable[[int], Confidence | None]
_OWN_CHANNELS = 16  # NCCL itself chooses 16 to 24 channels on HGX A100, H100 and H200
_OWN_CHANNELS_OVER_PCIE = 2
_CHANNELS_PER_LINK = 2

MOST_CHANNELS = ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_MAX_NRINGS")
LEAST_CHANNELS = ("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MIN_NRINGS")
_MAX_P2P_CHANNELS = "NCCL_MAX_P2P_NCHANNELS"
_PEER_CHANNELS = ("NCCL_NCHANNELS_PER_PEER", "NCCL_NCHANNELS_PER_NET_PEER")
_LEAST_PEER_CHANNELS = 2  # Minimum number of channels that NCCL chooses for sends and receives with one peer

_OWN_BYTES = {"NCCL_BUFFSIZE": 4 * 2**20, "NCCL_LL128_BUFFSIZE": 4800 * 2**10, "NCCL_LL_BUFFSIZE": 512 * 2**10}
"""NCCL's default buffer sizes for the protocols Simple, LL128 and LL. Source: computeBuffSizes in src/init.cc."""

_SURELY_SLOW_SHARE = 1 / 4  # With this share of the default buffer or less, a channel waits for its peer at every step
_OWN_THREADS, _OWN_LL128_THREADS = 512, 640
_OWN_THREADS_OVER_PCIE = 256
_SURELY_FEW_THREADS = 128
_WARP = 32

ALGORITHMS = frozenset(("tree", "ring", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat"))

PROTOCOLS = frozenset(("ll", "ll128", "simple"))


def _blame_slow_values(run: Circumstances, weighed: Mapping[str, Weighed]) -> Found:
    blamed: dict[str, Iterable[str]] = {}
    sure: list[Confidence] = []
    for name, weigh in weighed.items():
        found = {value: weigh(count) for value in run.values(name) if (count := nccl_number(value)) is not None}
        slow = {value: confidence for value, confidence in found.items() if confidence is not None}
        if slow:
            blamed[name] = list(slow)
            sure += slow.values()
    if blamed and run.uses_nccl:
        yield blame(run, blamed, _surest(sure), None)


def _surest(found: Iterable[Confidence]) -> Confidence:
    return min(found, key=(Confidence.PROVEN, Confidence.LIKELY, Confidence.WEAK).index)


def _gpus(run: Circumstances) -> Iterator[GpuFacts]:
    return (gpu for _, _, gpu in run.gpus())


def _few_channels(run: Circumstances) -> Found:
    """Find settings with fewer channels than NCCL would choose. If the minimum exceeds the maximum, NCCL uses the
    minimum.
    """
    links = [sum(bool(link.active) for link in gpu.nvlinks) for gpu in _gpus(run) if gpu.nvlinks is not None]
    most = max(links, default=_OWN_CHANNELS)
    own = min(_OWN_CHANNELS, most * _CHANNELS_PER_LINK) if most else _OWN_CHANNELS_OVER_PCIE
    least = max(
        (count for name in LEAST_CHANNELS for value in run.values(name) if (count := nccl_number(value))), default=0
    )

    def few(count: int) -> Confidence | None:
        taken = max(count, least, 1)
        return None if taken >= own else Confidence.PROVEN if taken <= own / 2 else Confidence.LIKELY

    weighed: dict[str, Weighed] = dict.fromkeys(MOST_CHANNELS, few)
    weighed["NCCL_MAX_CTAS"] = lambda count: few(count) if count > 0 else None
    weighed[_MAX_P2P_CHANNELS] = lambda count: few(count) and Confidence.LIKELY
    for name in _PEER_CHANNELS:
        weighed[name] = lambda count: Confidence.WEAK if 0 < count < _LEAST_PEER_CHANNELS else None
    yield from _blame_slow_values(run, weighed)


def _small_buffers(run: Circumstances) -> Found:
    def weigh(size: int, own: int) -> Confidence | None:
        if size < 0 or size >= own:
            return None
        return Confidence.PROVEN if size <= own * _SURELY_SLOW_SHARE else Confidence.LIKELY

    return _blame_slow_values(run, {name: partial(weigh, own=own) for name, own in _OWN_BYTES.items()})


def _few_threads(run: Circumstances) -> Found:
    over_nvlink = any(link.active for gpu in _gpus(run) for link in gpu.nvlinks or ())

    def weigh(count: int, own: int) -> Confidence | None:
        if count <= 0 or count % _WARP or count >= own:
            return None
        return Confidence.PROVEN if count <= _SURELY_FEW_THREADS else Confidence.LIKELY

    own = {
        "NCCL_NTHREADS": _OWN_THREADS if over_nvlink else _OWN_THREADS_OVER_PCIE,
        "NCCL_LL128_NTHREADS": _OWN_LL128_THREADS,
    }
    return _blame_slow_values(run, {name: partial(weigh, own=threads) for name, threads in own.items()})


def _forced(run: Circumstances) -> Found:
    blamed: dict[str, Iterable[str]] = {}
    sure: list[Confidence] = []
    # NCCL uses rings for large sizes, and trees for small sizes between nodes. Forbidding other algorithms may not
    # matter.
    needed = frozenset(("ring", "tree") if len(run.nodes) > 1 else ("ring",))
    for name, known, weigh in (
        ("NCCL_ALGO", ALGORITHMS, lambda allowed: _without(allowed, needed)),
        ("NCCL_PROTO", PROTOCOLS, _weigh_protocols),
    ):
        found = {value: weigh(chosen(value, known)) for value in run.values(name)}
        forced = {value: confidence for value, confidence in found.items() if confidence is not None}
        if forced:
            blamed[name] = list(forced)
            sure += forced.values()
    if blamed and run.uses_nccl:
        yield blame(run, blamed, _surest(sure), None)


def _without(allowed: Chosen, needed: frozenset[str]) -> Confidence | None:
    if all(names >= ALGORITHMS for names in allowed.values()):
        return None
    return Confidence.WEAK if all(names >= needed for names in allowed.values()) else Confidence.LIKELY


def _weigh_protocols(allowed: Chosen) -> Confidence | None:
    """Return the confidence that NCCL_PROTO slows NCCL down, or None if all protocols are allowed.

    It is PROVEN if only LL is allowed, since half of the bytes that LL sends are flags.
    """
    if all(names >= PROTOCOLS for names in allowed.values()):
        return None
    return Confidence.PROVEN if set(allowed.values()) == {frozenset(("ll",))} else Confidence.LIKELY


def _memcpy(run: Circumstances) -> Found:
    if not run.uses_nccl:
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
    if multicast and run.uses_nccl and "0" in run.values("NCCL_NVLS_ENABLE"):
        yield blame(run, {"NCCL_NVLS_ENABLE": ("0",)}, Confidence.WEAK, None)


_PLUGINS = {"NCCL_TUNER_PLUGIN": Confidence.LIKELY, "NCCL_TUNER_CONFIG_FILE": Confidence.LIKELY}
_PROFILER = "NCCL_PROFILER_PLUGIN"
_NET_PLUGIN = "NCCL_NET_PLUGIN"
_NO_PLUGIN = ("", "none", "STATIC_PLUGIN")
_LOADED = {"libnccl-tuner": "chooses NCCL's algorithms", "libnccl-profiler": "is called for every operation"}


def _plugin(run: Circumstances) -> Found:
    if not run.uses_nccl:
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
        for node in sorted({fact.node for fact in run.facts}):
            having = [rank for rank in run.node_ranks(node) if _library(rank.libraries, name)]
            if having:
                file = _library(having[0].libraries, name)
                cure = Cure.of(
                    f"export {'NCCL_TUNER_PLUGIN' if name == 'libnccl-tuner' else 'NCCL_PROFILER_PLUGIN'}=none"
                )
                yield run.rank_sighting(having, f"{file} is loaded; it {does}", Confidence.LIKELY, cure=cure)


def _library(loaded: Mapping[str, str], name: str) -> str:
    return next((file for known, file in loaded.items() if known.startswith(name)), "")


_UNSET = "If a file sets it, remove it there. NCCL then chooses for each size."


def _slow(id_: str, title: str, names: str, look: Look, link: str = "") -> Condition:
    return Condition(
        id=id_,
        title=title,
        settles=f"compare `gpubench allreduce` with `env {' '.join(f'-u {name}' for name in names.split())} "
        "gpubench allreduce`",
        command=unset(*names.split()),
        comment=_UNSET,
        link=link,
        look=look,
        aliases=("nccl-slow-settings",),
    )


NCCL_TUNING = Family.of(
    "nccl_tuning",
    "NCCL settings that make NCCL slower",
    _slow(
        "nccl-few-channels",
        "NCCL uses few channels or CTAs (NCCL_MAX_NCHANNELS, NCCL_MAX_CTAS), so busbw is low over a direct path",
        " ".join((*MOST_CHANNELS, _MAX_P2P_CHANNELS, *_PEER_CHANNELS)),
        _few_channels,
    ),
    _slow(
        "nccl-p2p-memcpy",
        "Copy engines instead of kernels move NCCL's data (NCCL_P2P_USE_CUDA_MEMCPY=1, NCCL_P2P_DIRECT_DISABLE=1)",
        "NCCL_P2P_USE_CUDA_MEMCPY NCCL_P2P_DIRECT_DISABLE",
        _memcpy,
    ),
    _slow(
        "nccl-small-buffers",
        "NCCL's buffers are small: NCCL_BUFFSIZE below 4 MiB, NCCL_LL128_BUFFSIZE, NCCL_LL_BUFFSIZE",
        " ".join(_OWN_BYTES),
        _small_buffers,
    ),
    _slow(
        "nccl-algorithm-forced",
        "NCCL is pinned to an algorithm or protocol: NCCL_ALGO, NCCL_PROTO",
        "NCCL_ALGO NCCL_PROTO",
        _forced,
    ),
    _slow(
        "nccl-few-threads",
        "NCCL's kernels have few threads: NCCL_NTHREADS below 512, NCCL_LL128_NTHREADS below 640",
        "NCCL_NTHREADS NCCL_LL128_NTHREADS",
        _few_threads,
    ),
    _slow(
        "nccl-plugin",
        "A plugin chooses NCCL's algorithms, profiles NCCL, or moves its data: NCCL_TUNER_PLUGIN, libnccl-tuner.so",
        " ".join((*_PLUGINS, _PROFILER, _NET_PLUGIN)),
        _plugin,
        "https://github.com/NVIDIA/nccl/issues/2355",
    ),
    _slow(
        "nccl-nvls-off", "NCCL_NVLS_ENABLE=0: NVSwitches do not reduce (NVLink SHARP)", "NCCL_NVLS_ENABLE", _nvls_off
    ),
    link=_ENV,
)

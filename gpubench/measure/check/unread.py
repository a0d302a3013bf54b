"""Finds facts and measurements that a check needs and did not get, with the reason and a cure if there is one."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any

from msgspec import Struct

from gpubench.conditions.checks import Check, Looked
from gpubench.conditions.circumstances import Circumstances, Facts, joined
from gpubench.conditions.subjects import NOT_THERE
from gpubench.model.facts.snapshot import GpuFacts, NicFacts
from gpubench.model.paths.topology import Topology
from gpubench.model.results.figures import Need, host_rows, memory_row, peer_rows
from gpubench.model.terms.ranks import DevicePlace
from gpubench.model.terms.verdict import Cure, Finding, Verdict


class RefusedFact(Struct, frozen=True):
    """How to describe a fact that could not be read: words, likely reason and cure. `scope` None matches every
    device.
    """

    words: tuple[str, ...]
    likely: str
    cure: Cure
    scope: str | None = None


_NO_RIGHT = (
    *("Insufficient Permissions", "operating system has blocked", "ermission denied", "not permitted", "needs root"),
)
_KERNEL_LOG = "dmesg | grep -i -E 'nvrm|xid'"

REFUSED_FACTS: tuple[RefusedFact, ...] = (
    RefusedFact(
        _NO_RIGHT,
        "this user, or this container, may not read all of /sys",
        Cure.of(
            "ls -l /sys/class/infiniband/*/ports/1",
            comment="To see whether root may read it: sudo gpubench check --quick.",
        ),
        scope="nic",
    ),
    RefusedFact(
        _NO_RIGHT,
        "this user, or this container, may not read it",
        Cure.of(
            "sudo nvidia-smi -q -i GPU",
            comment="It shows whether root may read it; in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility.",
        ),
    ),
    RefusedFact(
        ("that CUDA_VISIBLE_DEVICES names",),
        "CUDA_VISIBLE_DEVICES names an unknown GPU, names a GPU twice, or names a GPU that CUDA cannot start",
        Cure.of("unset CUDA_VISIBLE_DEVICES", comment="Then run gpubench check; `nvidia-smi -L` lists the GPUs."),
    ),
    RefusedFact(
        ("CUDA does not list it",),
        "the GPU has no device file, is split into MIG instances, or is too old for this CUDA",
        Cure.of("ls -l /dev/nvidia[0-9]*", comment="`nvidia-smi -L` lists GPUs and MIG instances."),
    ),
    RefusedFact(
        ("CUDA was not asked",),
        "the facts were read without CUDA",
        Cure.of("gpubench check", comment="Run it on the machine itself."),
    ),
    RefusedFact(
        ("requires restart",),
        "the GPU needs a reset after an error",
        Cure.of(
            "nvidia-smi --gpu-reset -i GPU",
            comment=f"Run it while the GPU is idle; the kernel log shows the error: {_KERNEL_LOG}.",
        ),
    ),
    RefusedFact(
        ("version mismatch",),
        "a new driver was installed while the old kernel module is still loaded",
        Cure.of(
            "cat /proc/driver/nvidia/version", "modinfo -F version nvidia", comment="Reboot to load the new module."
        ),
    ),
    RefusedFact(
        ("infoROM",),
        "the GPU's infoROM is corrupted",
        Cure.of("nvidia-smi -q -i GPU", comment="Have the vendor replace the GPU."),
    ),
    RefusedFact(
        ("",),
        "a fault of the NIC's driver or firmware, or an incomplete /sys",
        Cure.of("rdma link", comment="Then look at the kernel log: dmesg | grep -i -E 'mlx|infiniband|rdma'."),
        scope="nic",
    ),
    RefusedFact(
        ("",),
        "a fault of the driver, or a GPU that is about to fail",
        Cure.of("nvidia-smi -q -i GPU", comment=f"Then look at the kernel log: {_KERNEL_LOG}."),
    ),
)
"""The first match counts. The last two match every other reason."""


def _refused_fact(scope: str, reason: str) -> RefusedFact:
    """Return the description of a GPU, pair or NIC fact that could not be read for this reason."""
    return next(
        fact
        for fact in REFUSED_FACTS
        if fact.scope in (None, scope) and any(words.lower() in reason.lower() for words in fact.words)
    )


NOT_LOOKED_AT = "not-looked-at"
_AN_ERROR = ("gpu", "pair", "nic")  # The driver and the kernel know these facts, so an unreadable one is a fault


class _Subject(Struct, frozen=True):
    """A device, pair, node or process with its unknown facts and their reasons. `facts` is None if it does not
    exist.
    """

    name: str
    facts: object | None
    unknown: Mapping[str, str]
    places: tuple[DevicePlace, ...] = ()


def unread_facts(check: Check, facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each device with an unreadable fact of the check, or one that only its siblings have."""
    wanted = {scope: names for scope, names in _facts_by_scope(check).items() if scope in _AN_ERROR}
    run = facts.circumstances
    if wanted and any(True for _ in _refusals(wanted, run.distinct)):
        yield from _refusals(wanted, run)


def _refusals(wanted: Mapping[str, Sequence[str]], run: Circumstances) -> Iterator[Finding]:
    for number, node in run.nodes.items():
        if node.snapshot.kernel.wsl:
            continue  # Windows hides these facts, so skip the checks that need them
        errors = {failure.error for failure in node.snapshot.failures}
        for scope, names in wanted.items():
            subjects = list(_subjects(scope, run, number, node))
            yield from _gaps(scope, names, subjects, node)
            for subject in subjects:
                if subject.unknown:
                    reasons = _reasons(subject.unknown, names)
                    refused = {
                        name: each
                        for name, each in reasons.items()
                        if each not in errors and not _is_not_there(name, each, subject, node)
                    }
                    yield from _findings(scope, subject, refused)


_NVLINKS = "nvlinks.active"
_READ_WITH = {"memory_used_bytes": ("memory_bytes",), "idle": ("throttle_reasons",)}
"""Facts read together with another fact. If they are unreadable, the other fact has the reason."""


def _gaps(scope: str, names: Sequence[str], subjects: Sequence[_Subject], node: Topology) -> Iterator[Finding]:
    """Find facts without value or reason that siblings have, and pairs that are missing although NVML answered."""
    answered = scope == "pair" and any(gpu.uuid for gpu in node.gpus) and not node.snapshot.failures
    for name in names:
        parts = name.split("|")
        readable = {_kind(each) for each in subjects if each.facts is not None and _tells_any(each.facts, parts)}
        if parts == [_NVLINKS] and any(pair.nvlink == "OK" for pair in node.snapshot.pairs):
            readable |= {_kind(each) for each in subjects}  # the driver reports that the GPU supports copies
        for subject in subjects:
            if subject.facts is None:
                absent = answered
            else:
                known = _reasons(subject.unknown, (name, *_READ_WITH.get(name, ()))) or _tells_any(subject.facts, parts)
                absent = not known and (_kind(subject) in readable or (bool(readable) and _kind(subject) == (None,)))
            if absent:
                what = "the pair" if subject.facts is None else name.replace("|", " or ")
                yield Finding(
                    id=NOT_LOOKED_AT,
                    severity=Verdict.ERROR,
                    subject=subject.name,
                    seen=f"{what} has neither a value nor a reason",
                    expected="an answer or a reason, as for its siblings",
                    cause="a truncated or edited recording",
                    cure=Cure.of(
                        "gpubench topo --record here",
                        comment="Run it on the machine itself. It writes a new recording into the folder `here`.",
                    ),
                    subjects=(subject.name,),
                    places=subject.places,
                )


def _kind(subject: _Subject) -> tuple[object, ...]:
    """Siblings have equal kinds: GPUs of one model, NICs of one state. All pairs are siblings."""
    match subject.facts:
        case GpuFacts(name=name):
            return (name,)
        case NicFacts(kind=kind, model=model, state=state, driver=driver):
            return kind, model, state, driver
        case _:
            return ()


def _tells_any(facts: object, names: Sequence[str]) -> bool:
    return any(_tells(facts, name) for name in names)


FACT_NAMES = {
    "driver.version": "driver version",
    "driver.absent": "whether a driver is loaded",
    "bus_id": "PCI bus id",
    "nvlinks.active": "active NVLinks",
    "nvlinks.errors": "NVLink error counters",
    "fabric.state": "state of the NVLink fabric",
    "read": "peer access for reading",
    "write": "peer access for writing",
    "cuda": "peer access by CUDA",
    "pcie.generation": "PCIe generation",
    "pcie.width": "PCIe width",
    "pcie.max_generation": "highest PCIe generation",
    "pcie.max_width": "largest PCIe width",
    "idle": "whether the GPU is idle",
    "remapped_rows": "remapped memory rows",
    "retirement_pending": "memory pages waiting for retirement",
    "throttle_reasons": "reasons for lower clocks",
    "state": "port state",
    "rate_gbit_s": "port rate",
    "shm_device": "device of /dev/shm",
    "name": "GPU model",
    "memory_bytes": "GPU memory",
    "memory_used_bytes": "used GPU memory",
    "memory_errors": "memory errors",
    "mig": "MIG mode",
    "ecc": "ECC mode",
    "most_clock_mhz": "highest clock",
    "temperature_c": "temperature",
    "processes": "processes on the GPU",
    "pcie_replays": "PCIe replay counter",
    "counters": "error counters of the port",
    "hardware_counters": "hardware counters of the port",
    "libraries": "loaded libraries",
}
"""Names of the facts in messages."""


def not_looked_at(check: Check, looked: Looked, facts: Facts, in_error: Collection[str] = ()) -> str:
    """Return why a check without findings is no PASS (facts or measurements are missing), or '' if it is one."""
    lack = check.lack(facts)
    if lack:
        return lack
    reasons = {each.reason: each.subject for each in looked.unread}
    if reasons:
        reason, subject = next(iter(reasons.items()))
        return f"{subject}: {reason}" + (
            f"; and {len(reasons) - 1} more, see gpubench topo" if len(reasons) > 1 else ""
        )
    run = facts.circumstances.distinct
    nodes = {number: node for number, node in run.nodes.items() if node.snapshot.host not in in_error}
    return _absent_facts(check, run, nodes) or _absent_rows(check, facts, in_error)


def _absent_facts(check: Check, run: Circumstances, nodes: Mapping[int, Topology]) -> str:
    found: dict[str, list[str]] = {}
    every: dict[str, int] = {}
    for scope, names in _facts_by_scope(check).items():
        subjects = [each for number, node in nodes.items() for each in _subjects(scope, run, number, node)]
        for name in names:
            for subject in subjects:
                if subject.facts is None or not _tells_any(subject.facts, name.split("|")):
                    said = _said(scope, name, subject)
                    found.setdefault(said, []).append(subject.name)
                    every[said] = len(subjects)
    return "; ".join(what if len(who) == every[what] else f"{what}: {joined(who)}" for what, who in found.items())


def _said(scope: str, name: str, subject: _Subject) -> str:
    if subject.facts is None and scope == "rank":
        return "needs a job with several ranks"
    reason = next((why for one, why in subject.unknown.items() if one in (*name.split("|"), name.split(".")[0])), "")
    words = " or ".join(FACT_NAMES[each] for each in name.split("|"))
    return f"{words} could not be read" + (f" ({reason})" if reason else "")


def _facts_by_scope(check: Check) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for read in check.reads:
        scope, _, name = read.partition(".")
        found.setdefault(scope, []).append(name)
    return found


def _subjects(scope: str, run: Circumstances, number: int, node: Topology) -> Iterable[_Subject]:
    alive = [gpu for gpu in node.gpus if gpu.lost is None]
    match scope:
        case "gpu":
            return [
                _Subject(run.names_with_ids(number, gpu), gpu, gpu.unknown, run.places(number, gpu)) for gpu in alive
            ]
        case "pair":
            return _pairs(run, number, node, alive)
        case "nic":
            nics = [nic for nic in node.nics if nic.rdma]
            return [
                _Subject(run.names_with_ids(number, nic), nic, nic.unknown, run.places(number, nic)) for nic in nics
            ]
        case "port":
            ports = {port.nic: port for port in node.snapshot.rdma_ports}
            nics = [nic for nic in node.nics if nic.rdma]
            return [_Subject(run.names_with_ids(number, nic), ports.get(nic.name), nic.unknown) for nic in nics]
        case "node":
            return [_Subject(run.names_with_ids(number), node.snapshot, {})]
        case _:
            ranks = run.node_ranks(number)
            named = [_Subject(f"rank {rank.rank}", rank, rank.unknown) for rank in ranks]
            return named or [_Subject(node.snapshot.host, None, {})]


def _pairs(run: Circumstances, number: int, node: Topology, gpus: Sequence[GpuFacts]) -> Iterator[_Subject]:
    known = {(each.source, each.destination): each for each in node.snapshot.pairs}
    for one, other in permutations(gpus, 2):
        pair = known.get((one.device, other.device))
        name, unknown = run.subject(number, f"{one.device} → {other.device}"), {} if pair is None else pair.unknown
        yield _Subject(name, pair, unknown, run.places(number, one, other))


def _tells(facts: Any, name: str) -> bool:
    if isinstance(facts, tuple):
        return not facts or any(_tells(fact, name) for fact in facts)
    first, _, rest = name.partition(".")
    value = getattr(facts, first)
    if value is None or (isinstance(value, Mapping) and not value):
        return False
    return not rest or _tells(value, rest)


def _absent_rows(check: Check, facts: Facts, in_error: Collection[str]) -> str:
    """Return why the rows of a check prove nothing: not measured, not verified, or not timed."""
    measured, run = facts.measurements, facts.circumstances
    rows = measured.collectives
    nodes = {number: node for number, node in enumerate(facts.nodes) if node.snapshot.host not in in_error}
    match check.needs:
        case Need.PEER_COPIES | Need.HOST_COPIES:
            ways = _unjudged_pairs if check.needs is Need.PEER_COPIES else _unjudged_host_copies
            missing = [name for number, node in nodes.items() for name in ways(run, number, node)]
            return f"no copy was judged: {joined(missing)}" if missing else ""
        case Need.HOST_MEMORY:
            copies = {node.snapshot.host: memory_row(measured, node.snapshot.host) for node in nodes.values()}
            missing = [host for host, copy in copies.items() if copy is None or copy.bandwidth_gb_s is None]
            return f"no copy was measured on {joined(missing)}" if missing else ""
        case Need.ALL_REDUCE | Need.VERIFIED_DATA if not rows:
            return "no all-reduce was measured"
        case Need.VERIFIED_DATA if any(row.wrong is None for row in rows):
            return "data were not verified"
        case Need.ALL_REDUCE if check.name == "stragglers" and not any(row.time_us_fastest_rank for row in rows):
            return "the times of single ranks are unknown"
        case _:
            return ""


def _unjudged_pairs(run: Circumstances, number: int, node: Topology) -> Iterator[str]:
    """Yield pairs without a measurement, and pairs not judged because another job uses one of the GPUs."""
    staged = run.measurements.staged
    rows = {pair for pair, row in peer_rows(run.measurements, node).items() if row.verdict is not None}
    for (source, one), (destination, other) in permutations(enumerate(node.gpus), 2):
        seen = (source, destination) in rows or (node.snapshot.host, one.bus_id, other.bus_id) in staged
        if not seen and one.lost is None and other.lost is None:
            yield run.names_with_ids(number, one, other)


def _unjudged_host_copies(run: Circumstances, number: int, node: Topology) -> Iterator[str]:
    """Yield GPUs without judged copies in both directions between GPU and host memory."""
    ways = ({gpu.device for gpu, _ in host_rows(run.measurements, node, to_gpu=way)} for way in (True, False))
    both = set.intersection(*ways)
    return (run.names_with_ids(number, gpu) for gpu in node.gpus if gpu.lost is None and gpu.device not in both)


def _reasons(unknown: Mapping[str, str], wanted: Sequence[str]) -> dict[str, str]:
    names = [each for name in wanted for each in name.split("|")]
    return {
        name: reason
        for name, reason in unknown.items()
        if any(name == each or each.startswith(f"{name}.") or name.startswith(f"{each}.") for each in names)
    }


def _is_not_there(name: str, reason: str, subject: _Subject, node: Topology) -> bool:
    """True if no device of this kind has the fact. False if another GPU of the model on the node has it."""
    if not reason.startswith(NOT_THERE):
        return False
    if not isinstance(subject.facts, GpuFacts):
        return True
    model = subject.facts.name
    siblings = (each for each in node.gpus if each.name == model and each.lost is None)
    return all(name in sibling.unknown for sibling in siblings)


def _findings(scope: str, subject: _Subject, reasons: Mapping[str, str]) -> Iterator[Finding]:
    """Yield one finding for all unreadable facts of a device, with the cure for the first reason."""
    if reasons:
        refused = _refused_fact(scope, next(iter(reasons.values())))
        yield Finding(
            id=NOT_LOOKED_AT,
            severity=Verdict.ERROR,
            subject=subject.name,
            places=subject.places,
            seen="not read: " + "; ".join(f"{name} ({reason})" for name, reason in reasons.items()),
            expected="readable facts, as on other devices",
            cause=refused.likely,
            cure=refused.cure,
            subjects=(subject.name,),
        )

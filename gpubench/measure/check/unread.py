"""Find facts and measurements that a check needs but that are missing, with reason and cure."""

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
    """The likely cause and cure for a fact that could not be read, if the reason contains one of the `words`.

    `scope` is the type of device, for example "nic", or None for every type.
    """

    words: tuple[str, ...]
    likely: str
    cure: Cure
    scope: str | None = None


_NO_PERMISSION = (
    *("Insufficient Permissions", "operating system has blocked", "ermission denied", "not permitted", "needs root"),
)
_KERNEL_LOG = "dmesg | grep -i -E 'nvrm|xid'"

REFUSED_FACTS: tuple[RefusedFact, ...] = (
    RefusedFact(
        _NO_PERMISSION,
        "this user, or this container, may not read all of /sys",
        Cure.of(
            "ls -l /sys/class/infiniband/*/ports/1",
            comment="`sudo gpubench check --quick` shows whether root may read it.",
        ),
        scope="nic",
    ),
    RefusedFact(
        _NO_PERMISSION,
        "this user, or this container, may not read it",
        Cure.of(
            "sudo nvidia-smi -q -i GPU",
            comment="It shows whether root may read it. In a container, set "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility.",
        ),
    ),
    RefusedFact(
        ("that CUDA_VISIBLE_DEVICES names",),
        "CUDA_VISIBLE_DEVICES names an unknown GPU, names a GPU twice, or names a GPU that CUDA cannot start",
        Cure.of("unset CUDA_VISIBLE_DEVICES", comment="Then run `gpubench check`. `nvidia-smi -L` lists the GPUs."),
    ),
    RefusedFact(
        ("CUDA does not list it",),
        "the GPU has no device file, is split into MIG instances, or is too old for this CUDA",
        Cure.of("ls -l /dev/nvidia[0-9]*", comment="`nvidia-smi -L` lists GPUs and MIG instances."),
    ),
    RefusedFact(
        ("CUDA was not read", "CUDA was not asked"),  # The second is in recordings of earlier versions
        "the facts were read without CUDA",
        Cure.of("gpubench check", comment="Run it on the machine itself."),
    ),
    RefusedFact(
        ("requires restart",),
        "the GPU needs a reset after an error",
        Cure.of(
            "nvidia-smi --gpu-reset -i GPU",
            comment=f"Run it while the GPU is idle. `{_KERNEL_LOG}` shows the error.",
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
        Cure.of("rdma link", comment="Then look at the kernel log with `dmesg | grep -i -E 'mlx|infiniband|rdma'`."),
        scope="nic",
    ),
    RefusedFact(
        ("",),
        "a fault of the driver, or a GPU that is about to fail",
        Cure.of("nvidia-smi -q -i GPU", comment=f"Then look at the kernel log with `{_KERNEL_LOG}`."),
    ),
)
"""The first match is used. The last two entries match every reason."""


NOT_LOOKED_AT = "not-looked-at"
# The driver and the kernel always provide these facts, so a missing one is a fault
_ERROR_SCOPES = ("gpu", "pair", "nic")


class _Subject(Struct, frozen=True):
    """A device, pair, node or process whose facts a check needs.

    `facts` is None if nothing could be read. `unknown` has the reason for each fact that could not be read.
    """

    name: str
    facts: object | None
    unknown: Mapping[str, str]
    places: tuple[DevicePlace, ...] = ()


def unread_facts(check: Check, facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each device that lacks a fact the check needs.

    Skip facts that its type of device never has.
    """
    wanted = {scope: names for scope, names in _facts_by_scope(check).items() if scope in _ERROR_SCOPES}
    run = facts.circumstances
    if wanted and any(True for _ in _refusals(wanted, run.distinct)):
        yield from _refusals(wanted, run)


def _refusals(wanted: Mapping[str, Sequence[str]], run: Circumstances) -> Iterator[Finding]:
    for number, node in run.nodes.items():
        if node.snapshot.kernel.wsl:
            continue  # Windows hides these facts
        errors = {failure.error for failure in node.snapshot.failures}
        for scope, names in wanted.items():
            subjects = list(_subjects(scope, run, number, node))
            yield from _gaps(scope, names, subjects, node)
            for subject in subjects:
                if subject.unknown:
                    reasons = _reasons(subject.unknown, names)
                    refused = {
                        name: reason
                        for name, reason in reasons.items()
                        if reason not in errors and not _is_unsupported(name, reason, subject, node)
                    }
                    if refused:
                        yield _finding(scope, subject, refused)


_NVLINKS = "nvlinks.active"
_READ_WITH = {"memory_used_bytes": ("memory_bytes",), "idle": ("throttle_reasons",)}
"""Facts that are read together with another fact. If both could not be read, only the other fact has a reason."""


def _gaps(scope: str, names: Sequence[str], subjects: Sequence[_Subject], node: Topology) -> Iterator[Finding]:
    """Find facts that have neither a value nor a reason, although similar devices have the fact.

    Also find pairs that are missing although NVML answered.
    """
    answered = scope == "pair" and any(gpu.uuid for gpu in node.gpus) and not node.snapshot.failures
    for name in names:
        parts = name.split("|")
        readable = {_kind(device) for device in subjects if device.facts is not None and _has_any(device.facts, parts)}
        if parts == [_NVLINKS] and any(pair.nvlink == "OK" for pair in node.snapshot.pairs):
            readable |= {_kind(device) for device in subjects}  # Some pair has working NVLinks
        for subject in subjects:
            if subject.facts is None:
                absent = answered
            else:
                known = _reasons(subject.unknown, (name, *_READ_WITH.get(name, ()))) or _has_any(subject.facts, parts)
                absent = not known and (_kind(subject) in readable or (bool(readable) and _kind(subject) == (None,)))
            if absent:
                missing = "the pair" if subject.facts is None else name.replace("|", " or ")
                yield Finding(
                    id=NOT_LOOKED_AT,
                    severity=Verdict.ERROR,
                    subject=subject.name,
                    seen=f"{missing} has neither a value nor a reason",
                    expected="a value or a reason, as for its siblings",
                    cause="a truncated or edited recording",
                    cure=Cure.of(
                        "gpubench topo --record here",
                        comment="Run it on the machine itself. It writes a new recording into the folder `here`.",
                    ),
                    subjects=(subject.name,),
                    places=subject.places,
                )


def _kind(subject: _Subject) -> tuple[object, ...]:
    """Return what must be equal for two devices to have the same facts.

    It is the model of a GPU, or the kind, model, state and driver of a NIC.
    """
    match subject.facts:
        case GpuFacts(name=name):
            return (name,)
        case NicFacts(kind=kind, model=model, state=state, driver=driver):
            return kind, model, state, driver
        case _:
            return ()


def _has_any(facts: object, names: Sequence[str]) -> bool:
    return any(_has(facts, name) for name in names)


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
"""The names of facts as messages show them."""


def why_no_pass(check: Check, looked: Looked, facts: Facts, nodes_in_error: Collection[str] = ()) -> str:
    """Return the facts or measurements that are missing for a PASS, or an empty string.

    The check has no findings, so it would pass if it had seen everything that it needs.
    """
    lack = check.lack(facts)
    if lack:
        return lack
    reasons = {unread.reason: unread.subject for unread in looked.unread}
    if reasons:
        reason, subject = next(iter(reasons.items()))
        return f"{subject}: {reason}" + (
            f"; and {len(reasons) - 1} more, see gpubench topo" if len(reasons) > 1 else ""
        )
    run = facts.circumstances.distinct
    nodes = {number: node for number, node in run.nodes.items() if node.snapshot.host not in nodes_in_error}
    return _absent_facts(check, run, nodes) or _absent_rows(check, facts, nodes_in_error)


def _absent_facts(check: Check, run: Circumstances, nodes: Mapping[int, Topology]) -> str:
    found: dict[str, list[str]] = {}
    totals: dict[str, int] = {}
    for scope, names in _facts_by_scope(check).items():
        subjects = [device for number, node in nodes.items() for device in _subjects(scope, run, number, node)]
        for name in names:
            for subject in subjects:
                if subject.facts is None or not _has_any(subject.facts, name.split("|")):
                    text = _absence_text(scope, name, subject)
                    found.setdefault(text, []).append(subject.name)
                    totals[text] = len(subjects)
    return "; ".join(
        text if len(lacking) == totals[text] else f"{text}: {joined(lacking)}" for text, lacking in found.items()
    )


def _absence_text(scope: str, name: str, subject: _Subject) -> str:
    if subject.facts is None and scope == "rank":
        return "needs a job with several ranks"
    names = (*name.split("|"), name.split(".")[0])
    reason = next((reason for fact, reason in subject.unknown.items() if fact in names), "")
    words = " or ".join(FACT_NAMES[fact] for fact in name.split("|"))
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
    known = {(relation.source, relation.destination): relation for relation in node.snapshot.pairs}
    for one, other in permutations(gpus, 2):
        pair = known.get((one.device, other.device))
        name, unknown = run.subject(number, f"{one.device} → {other.device}"), {} if pair is None else pair.unknown
        yield _Subject(name, pair, unknown, run.places(number, one, other))


def _has(facts: Any, name: str) -> bool:
    if isinstance(facts, tuple):
        return not facts or any(_has(fact, name) for fact in facts)
    first, _, rest = name.partition(".")
    value = getattr(facts, first)
    if value is None or (isinstance(value, Mapping) and not value):
        return False
    return not rest or _has(value, rest)


def _absent_rows(check: Check, facts: Facts, nodes_in_error: Collection[str]) -> str:
    """Return why the rows do not justify a PASS: not measured, not judged, not verified, or without times per rank."""
    measured, run = facts.measurements, facts.circumstances
    rows = measured.collectives
    nodes = {number: node for number, node in enumerate(facts.nodes) if node.snapshot.host not in nodes_in_error}
    match check.needs:
        case Need.PEER_COPIES | Need.HOST_COPIES:
            find = _unjudged_pairs if check.needs is Need.PEER_COPIES else _unjudged_host_copies
            missing = [name for number, node in nodes.items() for name in find(run, number, node)]
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
    """Yield the pairs without a judged copy, for example because another job uses one of the GPUs."""
    staged = run.measurements.staged
    rows = {pair for pair, row in peer_rows(run.measurements, node).items() if row.verdict is not None}
    for (source, one), (destination, other) in permutations(enumerate(node.gpus), 2):
        seen = (source, destination) in rows or (node.snapshot.host, one.bus_id, other.bus_id) in staged
        if not seen and one.lost is None and other.lost is None:
            yield run.names_with_ids(number, one, other)


def _unjudged_host_copies(run: Circumstances, number: int, node: Topology) -> Iterator[str]:
    """Yield the GPUs without judged copies both to and from host memory."""
    to, back = ({gpu.device for gpu, _ in host_rows(run.measurements, node, to_gpu=to_gpu)} for to_gpu in (True, False))
    return (run.names_with_ids(number, gpu) for gpu in node.gpus if gpu.lost is None and gpu.device not in to & back)


def _reasons(unknown: Mapping[str, str], wanted: Sequence[str]) -> dict[str, str]:
    names = [fact for name in wanted for fact in name.split("|")]
    return {
        name: reason
        for name, reason in unknown.items()
        if any(name == fact or fact.startswith(f"{name}.") or name.startswith(f"{fact}.") for fact in names)
    }


def _is_unsupported(name: str, reason: str, subject: _Subject, node: Topology) -> bool:
    """True if the hardware does not support a fact, because no GPU of the same model on the node has it."""
    if not reason.startswith(NOT_THERE):
        return False
    if not isinstance(subject.facts, GpuFacts):
        return True
    model = subject.facts.name
    return all(name in gpu.unknown for gpu in node.gpus if gpu.name == model and gpu.lost is None)


def _finding(scope: str, subject: _Subject, reasons: Mapping[str, str]) -> Finding:
    """Return one finding for all facts of a device that could not be read, with the cure for the first reason."""
    first = next(iter(reasons.values())).lower()
    refused = next(
        fact
        for fact in REFUSED_FACTS
        if fact.scope in (None, scope) and any(words.lower() in first for words in fact.words)
    )
    return Finding(
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

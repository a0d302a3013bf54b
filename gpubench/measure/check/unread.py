"""Facts and measurements that a check needs and did not get, each with the reason and, where there is one, its cure."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from gpubench.conditions.checks import Check, Looked
from gpubench.conditions.definition.circumstances import Circumstances, Facts
from gpubench.conditions.definition.condition import joined
from gpubench.conditions.definition.subjects import NOT_THERE
from gpubench.model.facts.snapshot import GpuFacts, NicFacts
from gpubench.model.paths.topology import Topology
from gpubench.model.results.figures import Need, host_rows, memory_row, peer_rows
from gpubench.model.terms.verdict import Finding, Verdict


@dataclass(frozen=True, slots=True)
class RefusedFact:
    """One kind of them: the words by which NVML, CUDA or the kernel tell it, what is likely, and the next command.

    `scope` is what alone it is of: gpu, pair or nic; None for all. Ids stand in the command as in a condition's cure.
    """

    words: tuple[str, ...]
    likely: str
    next_command: str
    scope: str | None = None


_NO_RIGHT = (
    *("Insufficient Permissions", "operating system has blocked", "ermission denied", "not permitted", "needs root"),
)
_KERNEL_LOG = "dmesg | grep -i -E 'nvrm|xid'"

REFUSED_FACTS: tuple[RefusedFact, ...] = (
    RefusedFact(
        _NO_RIGHT,
        "a container, or a /sys, that this user may not read all of",
        "ls -l /sys/class/infiniband/*/ports/1; sudo gpubench check --quick shows whether root may",
        scope="nic",
    ),
    RefusedFact(
        _NO_RIGHT,
        "this user, or this container, may not ask for it",
        "sudo nvidia-smi -q -i GPU shows whether root may; in a container NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ),
    RefusedFact(
        ("that CUDA_VISIBLE_DEVICES names",),
        "an id in it that no GPU here has, one that stands in it twice, or a GPU that CUDA cannot start",
        "echo $CUDA_VISIBLE_DEVICES; nvidia-smi -L; then unset CUDA_VISIBLE_DEVICES and gpubench check",
    ),
    RefusedFact(
        ("CUDA does not list it",),
        "no device file for it, a GPU that is split into MIG instances, or one too old for this CUDA",
        "ls -l /dev/nvidia[0-9]*; nvidia-smi -L",
    ),
    RefusedFact(
        ("CUDA was not asked",),
        "facts that were read without CUDA",
        "gpubench check reads this machine with it",
    ),
    RefusedFact(
        ("requires restart",),
        "an error after which the GPU waits for a reset",
        f"nvidia-smi --gpu-reset -i GPU, once nobody uses it; {_KERNEL_LOG}",
    ),
    RefusedFact(
        ("version mismatch",),
        "a driver that was installed while the module of the one before still runs",
        "cat /proc/driver/nvidia/version; modinfo -F version nvidia; a reboot loads the new one",
    ),
    RefusedFact(
        ("infoROM",),
        "the GPU's own memory of its settings and errors is damaged",
        "nvidia-smi -q -i GPU; its vendor exchanges the GPU",
    ),
    RefusedFact(
        ("",),
        "the NIC's driver or firmware in trouble, or a /sys that is not all there",
        "rdma link; ls -l /sys/class/infiniband/*/ports/1; dmesg | grep -i -E 'mlx|infiniband|rdma'",
        scope="nic",
    ),
    RefusedFact(
        ("",),
        "a driver in trouble, or a GPU that is about to fail",
        f"nvidia-smi -q -i GPU; {_KERNEL_LOG}",
    ),
)
"""The first that fits counts; the last two fit everything else."""


def refused_fact(scope: str, reason: str) -> RefusedFact:
    """What a reason means that was given for a fact of a gpu, pair or nic."""
    return next(
        each
        for each in REFUSED_FACTS
        if each.scope in (None, scope) and any(words.lower() in reason.lower() for words in each.words)
    )


NOT_LOOKED_AT = "not-looked-at"
_AN_ERROR = ("gpu", "pair", "nic")
"""Scopes whose facts are the driver's and the kernel's to tell, so that a refusal is a fault of theirs."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """A device, a pair, a node or a process, and why facts of it are not known; None where it is not there at all."""

    name: str
    facts: object | None
    unknown: Mapping[str, str]


def unread_facts(check: Check, facts: Facts) -> Iterator[Finding]:
    """A finding for each device of which a fact that the check needs was refused, or is absent though siblings have it.

    A driver gives an answer or a reason for each: what lacks both was lost on the way, or taken out of a recording.
    """
    wanted = {scope: names for scope, names in _by_scope(check).items() if scope in _AN_ERROR}
    run = facts.circumstances
    if wanted and any(True for _ in _refusals(wanted, run.distinct)):
        yield from _refusals(wanted, run)


def _refusals(wanted: Mapping[str, Sequence[str]], run: Circumstances) -> Iterator[Finding]:
    for number, node in run.nodes.items():
        told = {each.error for each in node.snapshot.failures}
        for scope, names in wanted.items():
            subjects = list(_subjects(scope, run, number, node))
            yield from _gaps(scope, names, subjects, node)
            for subject in subjects:
                if subject.unknown:
                    reasons = _reasons(subject.unknown, names)
                    refused = {
                        name: each
                        for name, each in reasons.items()
                        if each not in told and not _is_not_there(name, each, subject, node)
                    }
                    yield from _findings(scope, subject.name, refused)


_NVLINKS = "nvlinks.active"
_READ_WITH = {"memory_used_bytes": ("memory_bytes",), "idle": ("throttle_reasons",)}
"""Facts that come with another's answer, whose refusal stands there."""


def _gaps(scope: str, names: Sequence[str], subjects: Sequence[_Subject], node: Topology) -> Iterator[Finding]:
    """Facts without a value and without a reason, of devices whose siblings have them; and pairs that are not there
    although NVML answered.
    """
    answered = scope == "pair" and any(gpu.uuid for gpu in node.gpus) and not node.snapshot.failures
    for name in names:
        parts = name.split("|")
        told = {_kind(each) for each in subjects if each.facts is not None and _tells_any(each.facts, parts)}
        if parts == [_NVLINKS] and any(pair.nvlink == "OK" for pair in node.snapshot.pairs):
            told |= {_kind(each) for each in subjects}  # the driver says that copies can take them
        for subject in subjects:
            if subject.facts is None:
                absent = answered
            else:
                known = _reasons(subject.unknown, (name, *_READ_WITH.get(name, ()))) or _tells_any(subject.facts, parts)
                absent = not known and (_kind(subject) in told or (bool(told) and _kind(subject) == (None,)))
            if absent:
                what = "the pair" if subject.facts is None else name.replace("|", " or ")
                yield Finding(
                    id=NOT_LOOKED_AT,
                    severity=Verdict.ERROR,
                    subject=subject.name,
                    seen=f"{what} has neither a value nor a reason",
                    expected="an answer or a reason, as for its siblings",
                    cause="a recording that was cut or edited",
                    next_command="gpubench topo --record DIRECTORY on the machine itself",
                    subjects=(subject.name,),
                )


def _kind(subject: _Subject) -> tuple[object, ...]:
    """What siblings have in common: GPUs their model, NICs also their state; all pairs are siblings."""
    match subject.facts:
        case GpuFacts(name=name):
            return (name,)
        case NicFacts(kind=kind, model=model, state=state, driver=driver):
            return kind, model, state, driver
        case _:
            return ()


def _tells_any(facts: object, names: Sequence[str]) -> bool:
    return any(_tells(facts, each) for each in names)


def not_looked_at(check: Check, looked: Looked, facts: Facts, in_error: Collection[str] = ()) -> str:
    """Why a check that found nothing may not say PASS: it has not seen all that it looks at. '' where it has.

    The hosts that are `in_error` are told as such.
    """
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
    """The facts of which neither a value nor a refusal is known, as in a recording that lacks them, and of what."""
    found: dict[str, list[str]] = {}
    every: dict[str, int] = {}
    for scope, names in _by_scope(check).items():
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
        return "no process was looked at"
    reason = next((why for one, why in subject.unknown.items() if one in (*name.split("|"), name.split(".")[0])), "")
    return f"{name.replace('|', ' or ')} was not read" + (f" ({reason})" if reason else "")


def _by_scope(check: Check) -> dict[str, list[str]]:
    """The facts that a check reads, by scope."""
    found: dict[str, list[str]] = {}
    for each in check.reads:
        scope, _, name = each.partition(".")
        found.setdefault(scope, []).append(name)
    return found


def _subjects(scope: str, run: Circumstances, number: int, node: Topology) -> Iterable[_Subject]:
    """Everything of one scope on a node; one that is not there where the node must have some."""
    alive = [gpu for gpu in node.gpus if gpu.lost is None]
    match scope:
        case "gpu":
            return [_Subject(run.named(number, gpu), gpu, gpu.unknown) for gpu in alive]
        case "pair":
            return _pairs(run, number, node, alive)
        case "nic":
            return [_Subject(run.named(number, nic), nic, nic.unknown) for nic in node.nics if nic.rdma]
        case "port":
            ports = {each.nic: each for each in node.snapshot.rdma_ports}
            nics = [nic for nic in node.nics if nic.rdma]
            return [_Subject(run.named(number, nic), ports.get(nic.name), nic.unknown) for nic in nics]
        case "node":
            return [_Subject(run.named(number), node.snapshot, {})]
        case _:
            ranks = run.ranks_of(number)
            named = [_Subject(f"rank {each.rank}", each, each.unknown) for each in ranks]
            return named or [_Subject(node.snapshot.host, None, {})]


def _pairs(run: Circumstances, number: int, node: Topology, gpus: Sequence[GpuFacts]) -> Iterator[_Subject]:
    known = {(each.source, each.destination): each for each in node.snapshot.pairs}
    for one, other in permutations((gpu.device for gpu in gpus), 2):
        pair = known.get((one, other))
        yield _Subject(run.on(number, f"{one} → {other}"), pair, {} if pair is None else pair.unknown)


def _tells(facts: Any, name: str) -> bool:
    """True if a fact has a value. Of several parts one that tells is enough, and a GPU without such parts has told."""
    if isinstance(facts, tuple):
        return not facts or any(_tells(each, name) for each in facts)
    first, _, rest = name.partition(".")
    value = getattr(facts, first)
    if value is None or (isinstance(value, Mapping) and not value):
        return False
    return not rest or _tells(value, rest)


def _absent_rows(check: Check, facts: Facts, in_error: Collection[str]) -> str:
    """The reason why the rows of a check do not say that all is well: not measured, not verified, not timed."""
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
            return "the times of single ranks are not known"
        case _:
            return ""


def _unjudged_pairs(run: Circumstances, number: int, node: Topology) -> Iterator[str]:
    """Pairs without a figure, or with one that says nothing because somebody uses a GPU of theirs."""
    staged, rows = run.measurements.staged, peer_rows(run.measurements, node)
    for (source, one), (destination, other) in permutations(enumerate(node.gpus), 2):
        seen = (source, destination) in rows or (node.snapshot.host, one.bus_id, other.bus_id) in staged
        if not seen and one.lost is None and other.lost is None:
            yield run.named(number, one, other)


def _unjudged_host_copies(run: Circumstances, number: int, node: Topology) -> Iterator[str]:
    """The same of GPUs whose copies from and to host memory are not both there."""
    ways = ({gpu.device for gpu, _ in host_rows(run.measurements, node, to_gpu=way)} for way in (True, False))
    both = set.intersection(*ways)
    return (run.named(number, gpu) for gpu in node.gpus if gpu.lost is None and gpu.device not in both)


def _reasons(unknown: Mapping[str, str], wanted: Sequence[str]) -> dict[str, str]:
    """Why facts with these names, or what they are part of, or a part of them, are not known."""
    names = [each for name in wanted for each in name.split("|")]
    return {
        name: reason
        for name, reason in unknown.items()
        if any(name == each or each.startswith(f"{name}.") or name.startswith(f"{each}.") for each in names)
    }


def _is_not_there(name: str, reason: str, subject: _Subject, node: Topology) -> bool:
    """True if devices of its kind do not have a fact; not where another GPU of its model on the node answers."""
    if not reason.startswith(NOT_THERE):
        return False
    if not isinstance(subject.facts, GpuFacts):
        return True
    model = subject.facts.name
    siblings = (each for each in node.gpus if each.name == model and each.lost is None)
    return all(name in each.unknown for each in siblings)


def _findings(scope: str, subject: str, reasons: Mapping[str, str]) -> Iterator[Finding]:
    """One finding on a device, where anything of it could not be read; the first reason's cure stands for all."""
    if reasons:
        refused = refused_fact(scope, next(iter(reasons.values())))
        yield Finding(
            id=NOT_LOOKED_AT,
            severity=Verdict.ERROR,
            subject=subject,
            seen="not read: " + "; ".join(f"{name} ({reason})" for name, reason in reasons.items()),
            expected="an answer, as from other GPUs and drivers",
            cause=refused.likely,
            next_command=refused.next_command,
            subjects=(subject,),
        )

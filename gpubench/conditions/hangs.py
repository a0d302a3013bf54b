"""Ranks that keep other ranks waiting, found in PyTorch Flight Recorder dumps and in output of NCCL's RAS."""

from collections.abc import Callable, Iterator
from typing import Any

from gpubench.conditions.circumstances import Sighting, joined
from gpubench.conditions.condition import Condition, Family
from gpubench.model.paths.hang import Hang, HangReason
from gpubench.model.paths.nccl_log import LogFacts
from gpubench.model.terms.units import plural
from gpubench.model.terms.verdict import NO_CURE, Cure, Verdict


def _hanging(*reasons: HangReason) -> Callable[[LogFacts], Iterator[Sighting]]:
    """Return a detector for collectives that hang for one of these reasons."""

    def find(facts: LogFacts) -> Iterator[Sighting]:
        for hang in facts.hangs:
            if hang.reason in reasons:
                theirs = "".join(f"{mark}{said}" for mark, said in ((": ", hang.theirs), ("; ", hang.now)) if said)
                operation = f"; {plural(hang.waiting, 'rank')} in {hang.operation}" if hang.operation else ""
                place = f" at {hang.place}" if hang.place else ""
                since = f" since {hang.since} UTC" if hang.since else ""
                yield Sighting(
                    subject=joined(hang.ranks),
                    names=hang.ranks,
                    seen=f"{hang.reason.value}{theirs}{operation}{place}{since}",
                    severity=None if hang.is_sure else Verdict.WARN,
                    cure=_dump_stack(hang) if hang.reason is HangReason.ABSENT else NO_CURE,
                )

    return find


def _dump_stack(hang: Hang) -> Cure:
    if hang.process is None or hang.now:
        return NO_CURE
    host, pid = hang.process
    return Cure.of(f"py-spy dump --pid {pid}", comment=f"Run it on {host}. It shows the line where that rank is.")


def _hang(id_: str, title: str, *reasons: HangReason, **more: Any) -> Condition:
    more = {"expected": "the same call on all ranks", "link": _FLIGHT_RECORDER, **more}
    return Condition(id=id_, title=title, in_job=_hanging(*reasons), **more)


_FLIGHT_RECORDER = "https://pytorch.org/docs/stable/torch_nccl_environment_variables.html"


HANGS = Family.of(
    "hangs",
    "Ranks that keep the others waiting",
    _hang(
        "rank-calls-other",
        "A rank called a different collective, size, data type or order than the other ranks of its group",
        HangReason.TYPE,
        HangReason.ORDER,
        HangReason.SIZE,
        HangReason.DTYPE,
        HangReason.UNKNOWN,
        likely="a branch of the program that ranks take differently, or data of different sizes",
        command="export TORCH_DISTRIBUTED_DEBUG=DETAIL",
        comment="PyTorch then compares the calls of all ranks before it makes them.",
    ),
    _hang(
        "rank-is-gone",
        "A rank died, left early, reported an error, or does not answer, and the others wait for it",
        HangReason.DEAD,
        HangReason.NO_DUMP,
        HangReason.LEFT,
        HangReason.SILENT,
        HangReason.ERROR,
        likely="a process that was killed, ended or stopped, or that wrote its dump to another place",
        command="dmesg -T | grep -i -E 'oom|xid'",
        comment="Run it on the node of this rank, and look at the end of its output.",
    ),
    _hang(
        "rank-did-not-join",
        "A rank did not call the collective that the others are waiting in",
        HangReason.ABSENT,
        HangReason.STARTING,
        likely="the program of this rank is busy or stuck outside of collectives: data loading, a lock, a checkpoint",
        comment="`py-spy dump` with the process id of this rank shows the line where it is.",
    ),
    _hang(
        "collective-stuck",
        "All ranks of a group wait in the same collective",
        HangReason.TOGETHER,
        HangReason.IDLE,
        expected="a collective that ends",
        likely="the network or a GPU, because the ranks agree on the call",
        command="gpubench check",
        comment="Run it on the nodes of the job. `mpirun gpubench scan` names a bad node or link.",
    ),
    _hang(
        "ras-names-no-rank",
        "NCCL's RAS reports a problem, but the text does not name the ranks",
        HangReason.NOT_NAMED,
        expected="status RUNNING, errors OK",
        likely="a truncated answer, a process that answers too late, or a job that is just starting or ending",
        command="ncclras -v",
        comment="Run it twice on a node of the job, and pass both complete answers to `gpubench explain`.",
    ),
    _hang(
        "rank-waits-elsewhere",
        "A rank waits in a collective of another group",
        HangReason.ELSEWHERE,
        likely="a hang in the other group, or ranks that use the two groups in different orders",
        comment="Call collectives of different groups in the same order on all ranks.",
    ),
    _hang(
        "rank-is-slow",
        "A rank reached a collective much later than the others",
        HangReason.SLOW,
        expected="ranks that reach the collective at the same time",
        likely="more work on this rank (data loading, a checkpoint, logging), or a slow GPU or host",
        command="gpubench check",
        comment="Run it on this rank's node. `py-spy record` shows what the program does.",
    ),
)

"""Detectors of conditions that end a job, by what NCCL or the program that called it complains of."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gpubench.conditions.definition.condition import Condition, Sighting, joined, nothing_in_facts
from gpubench.model.paths.nccl_log import Complaint, FailedCall, LogFacts
from gpubench.model.terms.verdict import Verdict

_LONGEST_SEEN = 200

_TAKEN_CARE_OF = re.compile(
    r"gdrwrap|(?:^|/)gdr\w*\.(?:cc|h):|include/net\.h:|ibvwrap|nvmlwrap|net_ib"
    r"|(?:^|/)plugin/|(?:^|/)ras/|socket\.cc:"
)
"""Where errors come from that NCCL may take care of: a plugin, GDRCopy, or verbs that are not there, a socket at the
end. What nobody took care of arrives elsewhere as well.
"""

_RAS = re.compile(r"(?:^|/)ras/")
"""NCCL's own service, which sees peers go when a job ends."""

REMOTE = 6
"""The error code of a remote process that went away, which is none of this one's."""

_CODES = {
    1: "a call of CUDA's failed",
    2: "a call of the system failed",
    3: "an internal check failed",
    4: "an argument is invalid",
    5: "the program calls it wrongly",
    REMOTE: "a remote process exited, or the network to it failed",
}
"""ncclResult_t, as NCCL's functions hand it on."""


@dataclass(frozen=True, slots=True)
class Complained:
    """Finds the complaints that `form` matches, and calls that returned one of `codes`; all are one sighting.

    `of_programs` are those alone that NCCL did not write.
    """

    form: re.Pattern[str]
    codes: frozenset[int] = frozenset()
    severity: Verdict | None = None
    of_programs: bool = False

    def __call__(self, facts: LogFacts) -> Iterator[Sighting]:
        """The sighting in a job's log, where there is one."""
        found = [each for each in facts.complaints if self._is_one(each)]
        calls = self._calls(facts)
        if not found and not calls:
            return
        writers = [*(each.processes for each in found), *(each.processes for each in calls)]
        who = joined(name for names in writers for name in names) or "a program that uses NCCL"
        if found:
            count = sum(each.count for each in found)
            seen = found[0].text[:_LONGEST_SEEN] + (f" ({count} times, or alike)" if count > 1 else "")
        else:
            seen = f"{calls[0].place} -> {calls[0].code}: {_CODES.get(calls[0].code, 'it failed')}"
        yield Sighting(subject=who, seen=seen, severity=self.severity)

    def _calls(self, facts: LogFacts) -> list[FailedCall]:
        """The calls with these codes that somebody has to hear of."""
        calls = [each for each in facts.failed_calls if each.code in self.codes]
        by_ras = any(_RAS.search(each.place) for each in calls)
        if all(_TAKEN_CARE_OF.search(each.place) for each in calls) and (by_ras or REMOTE not in self.codes):
            return []
        return calls

    def without(self, facts: LogFacts) -> LogFacts:
        """The same log without these complaints, which are explained."""
        return replace(facts, complaints=tuple(each for each in facts.complaints if not self._is_one(each)))

    def _is_one(self, complaint: Complaint) -> bool:
        is_of_nccl = bool(complaint.processes)
        return not (self.of_programs and is_of_nccl) and self.form.search(complaint.text) is not None


def complained(pattern: str, codes: Iterable[int] = ()) -> Complained:
    """For complaints in some words, in upper or lower case, and for error codes."""
    return Complained(re.compile(pattern, re.ASCII | re.IGNORECASE), frozenset(codes))


def doubted(pattern: str) -> Complained:
    """For warnings after which some releases go on and others give up."""
    return replace(complained(pattern), severity=Verdict.WARN)


def complaint(
    id_: str,
    title: str,
    pattern: str,
    *,
    cure: str,
    likely: str,
    expected: str,
    link: str,
    seen_as: tuple[str, ...],
    codes: Iterable[int] = (),
    detection: str = "NCCL's log, or the error that the program reports",
    general: bool = False,
    of_programs: bool = False,
) -> Condition:
    """A condition that shows in complaints of some words, or in error codes, and in no fact of a machine."""
    return Condition(
        id=id_,
        title=title,
        seen_as=seen_as,
        detection=detection,
        expected=expected,
        likely=likely,
        cure=cure,
        link=link,
        look=nothing_in_facts,
        in_job=replace(complained(pattern, codes), of_programs=of_programs),
        general=general,
    )

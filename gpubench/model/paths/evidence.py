"""The decision table that maps four independent kinds of evidence on a path between two GPUs to a verdict."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from gpubench.model.terms.verdict import Verdict


class State(StrEnum):
    """The state of one kind of evidence for the claim that a path is direct."""

    PRESENT = "present"
    ABSENT = "absent"
    CONTRADICTING = "contradicting"


class EvidenceUse(StrEnum):
    """The use of evidence on paths: shown in the table too, kept for JSON and the verdict, or not collected."""

    SHOWN = "shown"
    KEPT = "kept"
    OFF = "off"


class Conclusion(StrEnum):
    """The conclusion from all evidence on a path. The last two are for paths that nothing was sent over."""

    DIRECT = "direct"
    STAGED = "staged"
    WRONG = "wrong data"
    DISPUTED = "disputed"
    UNKNOWN = "unknown"
    POSSIBLE = "direct possible"
    IMPOSSIBLE = "direct impossible"


class Confidence(StrEnum):
    """The confidence in a conclusion: two kinds agree, there is one, they contradict each other, there is none."""

    PROVEN = "proven"
    LIKELY = "likely"
    WEAK = "weak"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One kind of evidence on one path: what it says, and what was seen, in words."""

    state: State = State.ABSENT
    seen: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathEvidence:
    """All evidence on one path.

    `capability` is whether the machine could do it directly, `selection` what the library chose, `measurement` what
    counters and bandwidths show, `correctness` whether the right data arrived. `by_design` says why the library goes
    through host memory here where that is no fault (a policy of its own, GPUs without peer access); empty where nothing
    makes it right.
    """

    capability: Evidence = Evidence()
    selection: Evidence = Evidence()
    measurement: Evidence = Evidence()
    correctness: Evidence = Evidence()
    by_design: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A conclusion, the verdict it leads to, and the confidence in it."""

    conclusion: Conclusion
    verdict: Verdict
    confidence: Confidence


@dataclass(frozen=True, slots=True)
class Rule:
    """A line of the decision table: the states it is for, and what follows from them.

    `states` has a word for capability, selection, measurement and correctness each, of the letters P(resent), A(bsent)
    and C(ontradicting) that the line allows.
    """

    states: str
    judgement: Judgement
    meaning: str

    def holds(self, states: Sequence[State]) -> bool:
        """True if this line is for these states of the four kinds of evidence."""
        return all(state.name[0] in allowed for state, allowed in zip(states, self.states.split(), strict=True))


_DIRECT_PROVEN = Judgement(Conclusion.DIRECT, Verdict.PASS, Confidence.PROVEN)


_DIRECT_LIKELY = Judgement(Conclusion.DIRECT, Verdict.PASS, Confidence.LIKELY)


_DIRECT_WEAK = Judgement(Conclusion.DIRECT, Verdict.PASS, Confidence.WEAK)


_DISPUTED = Judgement(Conclusion.DISPUTED, Verdict.WARN, Confidence.WEAK)


_STAGED_PROVEN = Judgement(Conclusion.STAGED, Verdict.FAIL, Confidence.PROVEN)


_STAGED_LIKELY = Judgement(Conclusion.STAGED, Verdict.FAIL, Confidence.LIKELY)


_STAGED_WEAK = Judgement(Conclusion.STAGED, Verdict.FAIL, Confidence.WEAK)


_WRONG = Judgement(Conclusion.WRONG, Verdict.FAIL, Confidence.PROVEN)


_UNKNOWN = Judgement(Conclusion.UNKNOWN, Verdict.ERROR, Confidence.NONE)


RULES = (
    Rule("PAC PAC PAC C", _WRONG, "wrong data arrived: however fast the path is, it is worthless"),
    Rule("PAC C C PA", _STAGED_PROVEN, "the library chose host memory, and the figures agree"),
    Rule("PA C A PA", _STAGED_LIKELY, "the library chose host memory; nothing measured says otherwise"),
    Rule("C C A PA", _STAGED_PROVEN, "the library chose host memory, and the machine allows nothing else"),
    Rule("PAC C P PA", _STAGED_WEAK, "the library chose host memory, yet bytes went directly: a mix of both"),
    Rule("PA P P P", _DIRECT_PROVEN, "the library chose a direct path, the figures agree, the data are right"),
    Rule("PA P P A", _DIRECT_LIKELY, "the same, with data that nobody checked"),
    Rule("C P P PA", _DIRECT_LIKELY, "direct by choice and by figures: what the driver refuses is not used"),
    Rule("P P A PA", _DIRECT_LIKELY, "the library chose a direct path, which the machine has"),
    Rule("A P A PA", _DIRECT_WEAK, "the library says direct, and nothing else says anything"),
    Rule("C P A PA", _DISPUTED, "the library says direct, the driver says impossible, no figure decides"),
    Rule("PA P C PA", _DISPUTED, "the library says direct, but the figures are those of host memory"),
    Rule("C P C PA", _STAGED_LIKELY, "driver and figures say host memory, against the library's word"),
    Rule("P A P P", _DIRECT_PROVEN, "a direct path exists, the figures show that it was taken, the data are right"),
    Rule("PA A P PA", _DIRECT_LIKELY, "figures that host memory cannot reach, or counters that moved"),
    Rule("C A P PA", _DISPUTED, "direct by the figures, impossible by the driver, and the library is silent"),
    Rule("P A C PA", _STAGED_LIKELY, "a direct path exists, and the figures are those of host memory"),
    Rule("A A C PA", _STAGED_WEAK, "the figures are those of host memory, and nothing else is known"),
    Rule("C A C PA", _STAGED_LIKELY, "the driver refuses a direct path, and the figures agree"),
    Rule("PAC A A PA", _UNKNOWN, "what was possible is known at most, not what was used: nothing is fine by omission"),
)
"""The first line that holds counts."""


def decide(evidence: PathEvidence) -> Rule:
    """The line of the table that the evidence falls into."""
    kinds = (evidence.capability, evidence.selection, evidence.measurement, evidence.correctness)
    return _line_for(*(kind.state for kind in kinds))


@cache
def _line_for(*states: State) -> Rule:
    return next(rule for rule in RULES if rule.holds(states))


def judge(evidence: PathEvidence) -> Judgement:
    """The judgement of the evidence; host memory that is used by design is no failure."""
    judgement = decide(evidence).judgement
    if judgement.conclusion is Conclusion.STAGED and evidence.by_design:
        return Judgement(judgement.conclusion, Verdict.SKIP, judgement.confidence)
    return judgement

"""What is known of the path between two GPUs, from four independent sides, and what follows from it: a decision table.

The claim that evidence is for or against is that the bytes go from GPU to GPU without passing through host memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from gpubench.model.terms.verdict import Verdict


class State(StrEnum):
    """What one kind of evidence says of the claim that a path is direct."""

    PRESENT = "present"
    ABSENT = "absent"
    CONTRADICTING = "contradicting"


class EvidenceUse(StrEnum):
    """What is done about evidence of paths: shown in the table too, kept for JSON and the verdict, or not taken."""

    SHOWN = "shown"
    KEPT = "kept"
    OFF = "off"


class Conclusion(StrEnum):
    """What all evidence together says of a path. The last two are for paths that nothing was sent over."""

    DIRECT = "direct"
    STAGED = "staged"
    WRONG = "wrong data"
    DISPUTED = "disputed"
    UNKNOWN = "unknown"
    POSSIBLE = "direct possible"
    IMPOSSIBLE = "direct impossible"


class Confidence(StrEnum):
    """How sure a conclusion is: two kinds agree, one speaks, one speaks against another, none speaks."""

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
    """What follows: the conclusion, the verdict it leads to, and how sure it is."""

    conclusion: Conclusion
    verdict: Verdict
    confidence: Confidence


@dataclass(frozen=True, slots=True)
class Rule:
    """A line of the decision table: the states it is for, one letter each (P, A, C), and what follows from them."""

    capability: str
    selection: str
    measurement: str
    correctness: str
    judgement: Judgement
    meaning: str

    def holds(self, states: Sequence[State]) -> bool:
        """Whether this line is for these states of the four kinds of evidence."""
        letters = (self.capability, self.selection, self.measurement, self.correctness)
        return all(state.name[0] in allowed for state, allowed in zip(states, letters, strict=True))


_ANY = "PAC"
_ARRIVED = "PA"
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
    Rule(_ANY, _ANY, _ANY, "C", _WRONG, "wrong data arrived: however fast the path is, it is worthless"),
    Rule(_ANY, "C", "C", _ARRIVED, _STAGED_PROVEN, "the library chose host memory, and the figures agree"),
    Rule("PA", "C", "A", _ARRIVED, _STAGED_LIKELY, "the library chose host memory; nothing measured says otherwise"),
    Rule("C", "C", "A", _ARRIVED, _STAGED_PROVEN, "the library chose host memory, and the machine allows nothing else"),
    Rule(
        _ANY, "C", "P", _ARRIVED, _STAGED_WEAK, "the library chose host memory, yet bytes went directly: a mix of both"
    ),
    Rule("PA", "P", "P", "P", _DIRECT_PROVEN, "the library chose a direct path, the figures agree, the data are right"),
    Rule("PA", "P", "P", "A", _DIRECT_LIKELY, "the same, with data that nobody checked"),
    Rule(
        "C", "P", "P", _ARRIVED, _DIRECT_LIKELY, "direct by choice and by figures: what the driver refuses is not used"
    ),
    Rule("P", "P", "A", _ARRIVED, _DIRECT_LIKELY, "the library chose a direct path, which the machine has"),
    Rule("A", "P", "A", _ARRIVED, _DIRECT_WEAK, "the library says direct, and nothing else says anything"),
    Rule("C", "P", "A", _ARRIVED, _DISPUTED, "the library says direct, the driver says impossible, no figure decides"),
    Rule("PA", "P", "C", _ARRIVED, _DISPUTED, "the library says direct, but the figures are those of host memory"),
    Rule("C", "P", "C", _ARRIVED, _STAGED_LIKELY, "driver and figures say host memory, against the library's word"),
    Rule(
        "P",
        "A",
        "P",
        "P",
        _DIRECT_PROVEN,
        "a direct path exists, the figures show that it was taken, the data are right",
    ),
    Rule("PA", "A", "P", _ARRIVED, _DIRECT_LIKELY, "figures that host memory cannot reach, or counters that moved"),
    Rule(
        "C", "A", "P", _ARRIVED, _DISPUTED, "direct by the figures, impossible by the driver, and the library is silent"
    ),
    Rule("P", "A", "C", _ARRIVED, _STAGED_LIKELY, "a direct path exists, and the figures are those of host memory"),
    Rule("A", "A", "C", _ARRIVED, _STAGED_WEAK, "the figures are those of host memory, and nothing else is known"),
    Rule("C", "A", "C", _ARRIVED, _STAGED_LIKELY, "the driver refuses a direct path, and the figures agree"),
    Rule(
        _ANY,
        "A",
        "A",
        _ARRIVED,
        _UNKNOWN,
        "what was possible is known at most, not what was used: nothing is fine by omission",
    ),
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
    """What follows from the evidence; host memory that is taken by design is no failure."""
    judgement = decide(evidence).judgement
    if judgement.conclusion is Conclusion.STAGED and evidence.by_design:
        return Judgement(judgement.conclusion, Verdict.SKIP, judgement.confidence)
    return judgement

"""The decision table: every combination of evidence against what follows from it, written down once more by hand."""

from itertools import product

import pytest
from msgspec.structs import replace

from gpubench.model.paths.transport import Conclusion, Confidence, Evidence, PathEvidence, State, judge
from gpubench.model.terms.verdict import Verdict

STATES = {"P": State.PRESENT, "A": State.ABSENT, "C": State.CONTRADICTING}

BY_HAND = """
# capability selection measurement: with right data, with data that nobody checked
PPP direct/PASS/proven      direct/PASS/likely
PPA direct/PASS/likely      direct/PASS/likely
PPC disputed/WARN/weak      disputed/WARN/weak
PAP direct/PASS/proven      direct/PASS/likely
PAA unknown/WARN/none       unknown/WARN/none
PAC staged/FAIL/likely      staged/FAIL/likely
PCP staged/FAIL/weak        staged/FAIL/weak
PCA staged/FAIL/likely      staged/FAIL/likely
PCC staged/FAIL/proven      staged/FAIL/proven
APP direct/PASS/proven      direct/PASS/likely
APA direct/PASS/weak        direct/PASS/weak
APC disputed/WARN/weak      disputed/WARN/weak
AAP direct/PASS/likely      direct/PASS/likely
AAA unknown/WARN/none       unknown/WARN/none
AAC staged/FAIL/weak        staged/FAIL/weak
ACP staged/FAIL/weak        staged/FAIL/weak
ACA staged/FAIL/likely      staged/FAIL/likely
ACC staged/FAIL/proven      staged/FAIL/proven
CPP direct/PASS/likely      direct/PASS/likely
CPA disputed/WARN/weak      disputed/WARN/weak
CPC staged/FAIL/likely      staged/FAIL/likely
CAP disputed/WARN/weak      disputed/WARN/weak
CAA unknown/WARN/none       unknown/WARN/none
CAC staged/FAIL/likely      staged/FAIL/likely
CCP staged/FAIL/weak        staged/FAIL/weak
CCA staged/FAIL/proven      staged/FAIL/proven
CCC staged/FAIL/proven      staged/FAIL/proven
"""


def expectations() -> dict[str, str]:
    found = {}
    for line in BY_HAND.strip().splitlines()[1:]:
        letters, right, unchecked = line.split()
        found[letters + "P"], found[letters + "A"] = right, unchecked
        found[letters + "C"] = "wrong data/FAIL/proven"
    return found


def evidence(letters: str, by_design: str = "") -> PathEvidence:
    capability, selection, measurement, correctness = (Evidence(STATES[letter]) for letter in letters)
    return PathEvidence(
        capability=capability,
        selection=selection,
        measurement=measurement,
        correctness=correctness,
        by_design=by_design,
    )


def test_every_combination_is_written_down() -> None:
    assert sorted(expectations()) == sorted("".join(each) for each in product("PAC", repeat=4))


@pytest.mark.parametrize(("letters", "expected"), sorted(expectations().items()))
def test_every_combination(letters: str, expected: str) -> None:
    judgement = judge(evidence(letters))
    assert f"{judgement.conclusion}/{judgement.verdict}/{judgement.confidence}" == expected
    designed = judge(evidence(letters, "a policy"))
    assert designed.conclusion is judgement.conclusion
    doubted = judge(replace(evidence(letters), in_doubt=True))
    if judgement.conclusion is Conclusion.STAGED:
        assert (designed.verdict, doubted.verdict) == (Verdict.SKIP, Verdict.WARN)
    else:
        assert designed == doubted == judgement


def test_nothing_is_fine_by_omission() -> None:
    nothing = judge(PathEvidence())
    assert (nothing.conclusion, nothing.verdict) == (Conclusion.UNKNOWN, Verdict.WARN)
    possible = judge(PathEvidence(capability=Evidence(State.PRESENT), correctness=Evidence(State.PRESENT)))
    assert possible.verdict is Verdict.WARN
    assert possible.confidence is Confidence.NONE

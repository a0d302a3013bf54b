"""Find out from the output of another benchmark why its run failed, with the parser for NCCL logs."""

import io
import re
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from gpubench.jobs.metadata import build_metadata
from gpubench.jobs.plans import ReportPlan
from gpubench.jobs.runner import presenting
from gpubench.measure.explain.report import find_failures
from gpubench.model.paths.nccl_log import LogFacts
from gpubench.model.results.report import Report
from gpubench.model.terms.verdict import SLOW_UNEXPLAINED, Cure, Finding, Origin, Verdict
from gpubench.readers.nccl_log.endings import may_be_of_any_job
from gpubench.readers.nccl_log.stream import NcclLogReader
from gpubench.readers.pasted import is_prose

_JSON = re.compile(r"\s*(?:\{|\[\s*[\[{\"])")
_TOLD_BY_ROWS = ("nccl-tests-wrong-data", "nccl-tests-unfinished")
"""Findings of an NCCL log that repeat what the rows of the same text show better."""


def failures_in(text: str, *, has_rows: bool = True) -> tuple[Finding, ...]:
    """Return the failures and warnings that programs printed in a text."""
    if _JSON.match(text):
        return ()
    reader = NcclLogReader()
    reader.read(io.BytesIO(text.encode()))
    facts = reader.facts(())
    return find_failures(drop_prose(facts) if not has_rows and is_prose(text.splitlines()) else facts)


def drop_prose(facts: LogFacts) -> LogFacts:
    """Remove warnings that may be general prose about jobs instead of output from a job."""
    return replace(
        facts, complaints=tuple(complaint for complaint in facts.complaints if not may_be_of_any_job(complaint.text))
    )


def failures_without_rows(text: str, failures: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the failures that the rows do not show, and nccl-tests' own FAILED for its mean bandwidth."""
    return (*_find_missed_minimum(text), *(failure for failure in failures if failure.id not in _TOLD_BY_ROWS))


def _find_missed_minimum(text: str) -> Iterator[Finding]:
    """Yield a finding if nccl-tests failed because its mean bandwidth is below the minimum that the user set."""
    found = re.search(r"Avg bus bandwidth\s*: *(\S{1,20}) +FAILED", text)
    if found is not None:
        yield Finding(
            id=SLOW_UNEXPLAINED,
            severity=Verdict.FAIL,
            subject="all sizes together",
            seen=f"Avg bus bandwidth {found[1]} GB/s FAILED",
            expected="at least the minimum in NCCL_TESTS_MIN_BW",
            cause="nccl-tests compares its mean over all sizes with this variable",
            cure=Cure.of("gpubench p2p", comment="It finds a slow pair."),
        )


def show_failures(plan: ReportPlan, failures: Sequence[Finding], arguments: Sequence[str]) -> int:
    """Present why a run failed if its text has no result rows. Return the exit code."""
    with presenting(plan.presentation) as presenter:
        presenter.begin(
            build_metadata(
                arguments,
                "explain",
                origin=Origin.RECORDED,
                hosts=["unknown"],
                options={"strict": plan.strict},
                source=plan.name,
            ),
            (),
        )
        presenter.end(Report(verdict=Verdict.SKIP, complete=True).add_findings(failures))
    return presenter.exit_code

"""Pairs and GPUs whose copies are slower than those of their siblings, or than on healthy machines."""

from collections.abc import Iterator, Mapping

from gpubench.conditions.checks.check import Check, Facts, join_subjects
from gpubench.model.paths.p2p import FAILED_SHARE, Oddity, Pair, odd_ones
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.expectation import Expectation, judge_bandwidth, of_copy
from gpubench.model.results.measured_copies import peer_rows
from gpubench.model.results.measurements import Need
from gpubench.model.results.report import PairRow
from gpubench.model.terms.verdict import Finding, Verdict, overall


def find(facts: Facts) -> Iterator[Finding]:
    """A warning below 90 % and FAIL below 75 % of what siblings reach, by GPU or pair; else against the profile.

    Pairs over different paths are compared by their share of what is expected of their path. Those that go through
    host memory are said to do that by another check, and a GPU that somebody uses is not judged.
    """
    for node in facts.nodes:
        rows = peer_rows(facts.measurements, node)
        profile = facts.profile(node)
        due = {pair: of_copy(profile, "p2p.write_gb_s", row.limit_gb_s, row.path_class) for pair, row in rows.items()}
        shares = {pair: (row.bandwidth_gb_s or 0) / _due_gb_s(due[pair], row) for pair, row in rows.items()}
        oddities = odd_ones(shares, len(node.gpus))
        for oddity in oddities:
            yield _odd(facts, node, oddity, rows)
        explained = {gpu for oddity in oddities for gpu in oddity.gpus}
        verdicts = {
            pair: judged
            for pair, row in rows.items()
            if not explained & set(pair)
            and (judged := judge_bandwidth(row.bandwidth_gb_s or 0, due[pair], row.limit_gb_s)) is not None
        }
        if verdicts:
            worst = min(verdicts, key=lambda pair: shares[pair])
            names = tuple(facts.subject(node, *(node.gpus[gpu] for gpu in pair)) for pair in sorted(verdicts))
            yield _finding(
                join_subjects(names), names, overall(each[0] for each in verdicts.values()), *verdicts[worst][1:]
            )


def _due_gb_s(due: Expectation | None, row: PairRow) -> float:
    """What makes pairs over different paths comparable: what is expected of the path, else the limit, else one."""
    return due.value if due is not None else row.limit_gb_s or 1.0


def _odd(facts: Facts, node: Topology, oddity: Oddity, rows: Mapping[Pair, PairRow]) -> Finding:
    share = oddity.figure / oddity.usual
    gpus = [node.gpus[gpu] for gpu in oddity.gpus]
    own = [row for pair, row in rows.items() if set(oddity.gpus) <= set(pair)]
    figures = [row.bandwidth_gb_s for row in own if row.bandwidth_gb_s is not None]
    name = facts.subject(node, *gpus)
    role = "" if oddity.role == "pair" else f" {oddity.role}"
    return _finding(
        name,
        (name,),
        Verdict.FAIL if share < FAILED_SHARE else Verdict.WARN,
        f"{min(figures):.4g} GB/s{role}, {share:.0%} of what its siblings reach",
        "what pairs over such a path reach",
    )


def _finding(subject: str, subjects: tuple[str, ...], severity: Verdict, seen: str, expected: str) -> Finding:
    return Finding(
        id="p2p-slow",
        severity=severity,
        subject=subject,
        seen=seen,
        expected=expected,
        cause="links down or noisy, lanes lost, clocks held down, or somebody else's traffic",
        next_command="gpubench p2p; nvidia-smi nvlink -e; nvidia-smi -q -d PERFORMANCE",
        subjects=subjects,
    )


P2P_BANDWIDTH = Check(
    "p2p_bandwidth", "copies are as fast as between siblings, and as expected", find, Need.PEER_COPIES
)

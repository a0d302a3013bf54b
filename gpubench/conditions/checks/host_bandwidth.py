"""GPUs whose copies to or from host memory are slow."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.profiles.expectation import judge_bandwidth, odd_among, of_copy
from gpubench.model.results.measured_copies import host_rows
from gpubench.model.results.measurements import Need
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """A warning below 90 % and FAIL below 75 % of siblings; else against the profile."""
    for node in facts.nodes:
        for to_gpu, quantity in ((True, "host_to_device_gb_s"), (False, "device_to_host_gb_s")):
            rows = host_rows(facts.measurements, node, to_gpu=to_gpu)
            figures = {gpu.device: row.bandwidth_gb_s or 0.0 for gpu, row in rows}
            odd = odd_among(figures)
            way = "from" if to_gpu else "to"
            for gpu, row in rows:
                figure = figures[gpu.device]
                if gpu.device in odd:
                    verdict, share, usual = odd[gpu.device]
                    seen, expected = f"{figure:.4g} GB/s, {share:.0%}", f"{usual:.4g} GB/s, as its siblings reach"
                else:
                    due = of_copy(facts.profile(node), quantity, row.limit_gb_s)
                    judged = judge_bandwidth(figure, due, row.limit_gb_s)
                    if judged is None:
                        continue
                    verdict, seen, expected = judged
                yield _finding(facts.subject(node, gpu), verdict, f"{seen}, {way} host memory", expected)


def _finding(subject: str, severity: Verdict, seen: str, expected: str) -> Finding:
    return Finding(
        id="host-copies-slow",
        severity=severity,
        subject=subject,
        seen=seen,
        expected=expected,
        cause="a PCIe link with fewer lanes or a lower generation, a slot of the other socket, a loaded memory",
        next_command="gpubench topo shows the link; nvidia-smi -q | grep -A 6 'GPU Link Info' while it copies",
    )


HOST_BANDWIDTH = Check("host_bandwidth", "copies with host memory are as fast as expected", find, Need.HOST_COPIES)

"""Drivers and libraries of another version than on the other nodes."""

from collections import Counter
from collections.abc import Iterator, Mapping

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.terms.verdict import Finding, Verdict

_NOT_SHARED = ("cuda_driver", "nvml")
"""Libraries that belong to the driver, of which the driver's own version tells."""


def find(facts: Facts) -> Iterator[Finding]:
    """FAIL for a node whose driver is not that of most; a warning for ranks that loaded another file of a library.

    Between equally frequent versions the newer counts as usual, so of two nodes the older one is named.
    """
    drivers = {node.snapshot.host: node.snapshot.driver.version for node in facts.nodes}
    for host, version, usual in _odd({host: each for host, each in drivers.items() if each}):
        yield _finding("driver-differs", Verdict.FAIL, host, f"driver {version}", f"{usual}, as on the other nodes")
    names = {name for rank in facts.ranks for name in rank.libraries} - set(_NOT_SHARED)
    for name in sorted(names):
        files = {
            f"rank {rank.rank} on {rank.host}": rank.libraries[name] for rank in facts.ranks if name in rank.libraries
        }
        for where, file, usual in _odd(files):
            yield _finding("library-differs", Verdict.WARN, where, f"{name} is {file}", f"{usual}, as on the others")


def _odd(found: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    tally = Counter(found.values())
    if len(tally) < 2:
        return
    usual = max(tally, key=lambda version: (tally[version], _numbers(version)))
    yield from ((where, version, usual) for where, version in found.items() if version != usual)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def _finding(name: str, severity: Verdict, subject: str, seen: str, expected: str) -> Finding:
    return Finding(
        id=name,
        severity=severity,
        subject=subject,
        seen=seen,
        expected=expected,
        cause="a node that was updated, or not; another image, module or LD_LIBRARY_PATH",
        next_command="nvidia-smi --version; ldconfig -p | grep nccl, on both nodes",
    )


VERSIONS = Check("versions", "drivers and libraries are alike on all nodes", find, without_gpus=True)

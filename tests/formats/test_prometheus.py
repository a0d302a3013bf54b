"""What a textfile says of subjects, versions and time, and of how many pairs."""

import re

from tests.cli.running import gpubench

FAULT = ("check", "--simulate", "hgx-h100-8", "--fault", "gpu5:nvlink=12")


def metrics(*arguments: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The samples by name: labels and value."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in gpubench(*arguments, "--format", "prometheus").stdout.splitlines():
        if not line.startswith("#"):
            name, labels, value = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line).groups()  # type: ignore[union-attr]
            found.setdefault(name, []).append((dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)))
    return found


def test_of_pairs_the_slowest_is_told_and_all_where_that_is_asked_for() -> None:
    few, all_ = metrics(*FAULT), metrics(*FAULT, "--section", "pairs")
    assert "gpubench_pair_bandwidth_bytes_per_second" not in few
    every = all_["gpubench_pair_bandwidth_bytes_per_second"]
    way = {"direction": "write", "engine": "ce", "peer": "on", "size_bytes": str(256 * 2**20)}
    own = [value for labels, value in every if way.items() <= labels.items() and labels["source"].startswith("GPU")]
    assert len(own) == 56
    (slowest,) = (
        value
        for labels, value in few["gpubench_slowest_pair_bandwidth_bytes_per_second"]
        if way.items() <= labels.items()
    )
    assert slowest == min(own)

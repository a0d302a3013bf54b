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


def test_every_device_has_a_verdict_and_a_finding_its_subject() -> None:
    found = metrics(*FAULT)
    judged = [labels for labels, _ in found["gpubench_verdict"]]
    gpus = {labels["subject"][:4]: labels["verdict"] for labels in judged if labels["scope"] == "gpu"}
    assert gpus == {f"GPU{number}": "FAIL" if number == 5 else "PASS" for number in range(8)}
    assert {labels["scope"] for labels in judged} == {"node", "gpu", "nic"}
    ((finding, value),) = found["gpubench_finding"]
    assert (finding["id"], finding["subject"], value) == ("nvlink-down", "GPU5 (0000:1b:00.0)", 1)


def test_versions_and_duration_are_there() -> None:
    found = metrics(*FAULT)
    ((info, one),) = found["gpubench_build_info"]
    assert (info["version"], info["driver"], one) == ("0.1.0", "580.159.04", 1)
    ((_, seconds),) = found["gpubench_last_run_duration_seconds"]
    assert 0 < seconds < 90


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

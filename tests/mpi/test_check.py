"""`gpubench check` on two hosts (network namespaces) names the host that differs."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.mpi.hosts import Hosts, connected

pytestmark = pytest.mark.mpi

PROGRAM = (sys.executable, "-m", "tests.mpi.fake_nodes")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with connected(2, tmp_path) as pair:
        yield pair


def checked(hosts: Hosts, *arguments: str, nodes: str = "", slow: str = "none") -> tuple[int, dict[str, Any], str]:
    """Check with two ranks per host. Return exit code, document and table. `nodes` is the simulated machine."""
    output = hosts.folder / "check.json"
    settings = {
        "GPUBENCH_TEST_NODES": nodes,
        "GPUBENCH_TEST_HOSTS": ",".join(hosts.names),
        "GPUBENCH_TEST_SLOW_HOST": slow,
    }
    text, code = replace(hosts, program=PROGRAM).finish("check", *arguments, "--output", str(output), **settings)
    assert output.exists(), text
    return code, json.loads(output.read_text()), text


def unwell(document: dict[str, Any]) -> dict[str, set[str]]:
    """Return the subjects without PASS by node."""
    found: dict[str, set[str]] = {}
    for row in document["verdicts"]:
        if row["verdict"] != "PASS":
            found.setdefault(row["node"], set()).add(row["scope"])
    return found


@pytest.mark.parametrize(
    ("place", "fault", "finding", "scopes"),
    [
        pytest.param(0, ".gpu3:missing=yes", "gpu-missing", {"node"}, marks=pytest.mark.slow),
        (1, ".gpu5:nvlink=12", "nvlink-down", {"node", "gpu"}),
        pytest.param(0, ":driver=570.86.10", "driver-differs", {"node"}, marks=pytest.mark.slow),
        pytest.param(1, ".nic2:rate=100", "rdma-port-slow", {"node", "nic"}, marks=pytest.mark.slow),
    ],
)
def test_of_two_hosts_the_one_that_differs_is_named(
    hosts: Hosts, place: int, fault: str, finding: str, scopes: set[str]
) -> None:
    nodes = f"hgx-h100-8 node{place}{fault}"
    code, document, text = checked(hosts, "--quick", "--strict", nodes=nodes)
    assert (code, document["verdict"]) == (1, "FAIL"), text
    assert unwell(document) == {hosts.names[place]: scopes}
    assert finding in {each["id"] for each in document["findings"]}
    assert [row["subject"] for row in document["verdicts"] if row["scope"] == "node"] == list(hosts.names)
    assert "2 nodes: 1 PASS, 1 FAIL" in text
    judged = text.partition("2 nodes: 1 PASS, 1 FAIL")[2].partition("\n\n")[0]
    assert hosts.names[place] in judged
    assert hosts.names[1 - place] not in judged


@pytest.mark.slow
def test_two_hosts_that_are_alike_are_well(hosts: Hosts) -> None:
    code, document, text = checked(hosts, "--strict", nodes="hgx-h100-8")
    # No profile expects a time of an all-reduce on CPUs, and --strict accepts no speed that is not judged.
    assert (code, document["verdict"], document["findings"]) == (3, "SKIP", []), text
    assert "speed of all-reduce not judged" in text
    assert unwell(document) == {}
    assert {(row["ranks"], row["nodes"], row["wrong"]) for row in document["rows"]} == {(4, 2, 0)}
    assert {row["source_node"] for row in document["pairs"]} == set(hosts.names)


@pytest.mark.slow
def test_a_slow_gpu_is_named_with_its_host(hosts: Hosts) -> None:
    code, document, text = checked(hosts, nodes="hgx-h100-8 node1.gpu3:speed=0.5")
    assert code == 1, text
    assert set(unwell(document)) == {hosts.names[1]}
    slow = next(each for each in document["findings"] if each["id"] == "p2p-slow")
    assert slow["subject"].startswith(f"{hosts.names[1]} GPU3 ")


@pytest.mark.slow
def test_a_slow_host_without_gpus_is_named(hosts: Hosts) -> None:
    code, document, text = checked(hosts, "--profile", "host", slow=hosts.names[0])
    assert (code, document["verdict"]) == (1, "FAIL"), text
    assert unwell(document) == {hosts.names[0]: {"node"}}
    assert [each["id"] for each in document["findings"]] == ["host-memory-slow"]
    assert {row["source_node"] for row in document["pairs"]} == set(hosts.names)

"""Jobs on several hosts: network namespaces of this machine."""

import csv
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpubench.backends.mpi.group import host_name
from tests.cli.running import INJECT, ROOT
from tests.mpi.hosts import Hosts, connected

pytestmark = pytest.mark.mpi


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with connected(2, tmp_path) as pair:
        yield pair


def test_ranks_of_two_hosts_are_one_job(hosts: Hosts, tmp_path: Path) -> None:
    output = tmp_path / "result.csv"
    text = hosts.run("allreduce", "--sizes", "1K,64K", "--iters", "3", "--output", str(output), until="verdict:")
    assert "4 ranks on 2 hosts" in text
    assert f"rank 2-3 on {hosts.names[1]}" in text
    assert "PASS: " in text
    rows = list(csv.DictReader(io.StringIO(output.read_text())))
    assert {(row["ranks"], row["nodes"], row["wrong"]) for row in rows} == {("4", "2", "0")}


@pytest.mark.slow
def test_a_rank_that_breaks_is_named_with_its_host(hosts: Hosts) -> None:
    fault = {"PYTHONPATH": f"{INJECT}{os.pathsep}{ROOT}", "GPUBENCH_TEST_FAULT": "3:raise"}
    said = f"rank 3 on {hosts.names[1]}: RuntimeError: planted in a test"
    text = hosts.run("allreduce", "--sizes", "1K:64K", "--iters", "3", until=said, **fault)
    assert said in text
    assert host_name() not in text.partition("RuntimeError")[0]


def test_one_command_starts_the_ranks_of_two_hosts_and_shows_their_rows(hosts: Hosts, tmp_path: Path) -> None:
    names, output = ",".join(f"{address}:2" for address in hosts.addresses), tmp_path / "result.json"
    options = ("--hosts", names, "--sizes", "1K,64K", "--iters", "3", "--no-check", "--output", str(output))
    said = hosts.alone("allreduce", *options)
    assert f"mpirun -n 4 --host {names}" in said
    assert "4 ranks on 2 hosts" in said
    document = json.loads(output.read_text())
    assert document["metadata"]["command"][2:4] == ["--hosts", names]
    assert document["metadata"]["hosts"] == list(hosts.names)
    assert {(row["ranks"], row["nodes"], row["wrong"]) for row in document["rows"]} == {(4, 2, None)}
    assert "no usable GPU" in hosts.alone("p2p", "--hosts", names)

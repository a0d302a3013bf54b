"""Scans of hosts (network namespaces) with slow, lossy and cut cables, and with stopped and killed processes.

Cables carry 50 Mbit/s, much less than the machine's cores, so that results depend on cables.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.cli.running import ROOT, document_so_far, gpubench
from tests.mpi.hosts import HostJob, Hosts, command, connected

pytestmark = pytest.mark.mpi

HOSTS = 8
FEW_HOSTS = 4
"""The fewest that show which one is slow. More daemons take cores from each other"""
QUEUE = ("burst", "16kb", "limit", "16mb")
USUAL = ("tbf", "rate", "50mbit", *QUEUE)
SLOW = ("tbf", "rate", "25mbit", *QUEUE)
DROPPING = ("tbf", "rate", "50mbit", "burst", "16kb", "limit", "3kb")
"""A queue of two packets, so bursts are lost"""

MOST_SCANS = 5
"""On a busy machine, cores instead of cables limit the bandwidth. The scan reports it, and is repeated"""

WORKER = b"gpubench.backends.scan_worker"
SECONDS = 120.0
SECONDS_TO_BE_LEFT = 60.0
"""Time until a supervisor behind a cut cable notices that rank 0 is gone"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with cabled(HOSTS, tmp_path) as found:
        yield found


@pytest.fixture
def few_hosts(tmp_path: Path) -> Iterator[Hosts]:
    with cabled(FEW_HOSTS, tmp_path) as found:
        yield found


@contextmanager
def cabled(count: int, folder: Path) -> Iterator[Hosts]:
    with connected(count, folder) as found:
        for number, name in enumerate(found.names):
            # BBR, the default on some machines, sends at an estimated rate, which varies by 20 %.
            command("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")
            shape(found, number, USUAL)
        yield replace(found, ranks=1)


def shape(hosts: Hosts, number: int, words: tuple[str, ...]) -> None:
    """Set this queue at both ends of a host's cable."""
    try:
        hosts.on_switch("tc", "qdisc", "replace", "dev", f"port{number}", "root", *words)
        command("ip", "netns", "exec", hosts.names[number], "tc", "qdisc", "replace", "dev", "eth0", "root", *words)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this kernel has no such queue, or there is no tc")


def words(folder: Path) -> tuple[str, ...]:
    outputs = (f"--rounds={folder / 'rounds'}", f"--output={folder / 'report.json'}")
    return ("scan", "--backend", "host", "--timeout", "4", *outputs)


def rounds_of(folder: Path) -> int:
    kept = folder / "rounds" / "scan.jsonl"
    return kept.read_text().count("\n") - 2 if kept.exists() else 0


def wait_for_round(folder: Path, job: HostJob) -> None:
    deadline = time.monotonic() + SECONDS
    while rounds_of(folder) < 1:
        if time.monotonic() > deadline or job.process.poll() is not None:
            pytest.skip(f"Open MPI's daemons got no job under way: {job.printed.read_text()[-300:]!r}")
        time.sleep(0.05)


def report_of(folder: Path, job: HostJob) -> Mapping[str, Any]:
    """Return the report, which is written before mpirun ends."""
    path, deadline = folder / "report.json", time.monotonic() + SECONDS
    while True:
        found = document_so_far(path)
        if found.get("complete"):
            return found
        if time.monotonic() > deadline or (job.process.poll() is not None and not found):
            pytest.skip(f"Open MPI's daemons got no job to its end: {job.printed.read_text()[-300:]!r}")
        time.sleep(0.1)


def check_named(hosts: Hosts, report: Mapping[str, Any], number: int, kinds: tuple[str, ...]) -> Mapping[str, Any]:
    """Assert that one host is bad in one of these ways, and that all others were measured and are healthy."""
    (part,) = report["parts"]
    assert part["nodes"] == [hosts.names[number]]
    assert part["part_kind"] in kinds, part
    others = [row for row in report["cells"] if row["node"] != hosts.names[number]]
    assert len(others) == len(hosts.names) - 1
    assert {row["verdict"] for row in others} == {"PASS"}
    assert all(row["both_ways_gb_s"] > 0 for row in others)
    assert report["verdict"] == "FAIL"
    found: Mapping[str, Any] = part
    return found


def test_a_cable_at_half_its_rate_is_named_with_what_it_carries(few_hosts: Hosts, tmp_path: Path) -> None:
    shape(few_hosts, 3, SLOW)
    report: Mapping[str, Any] = {}
    for attempt in range(MOST_SCANS):
        folder = tmp_path / f"{attempt}"
        folder.mkdir()
        with few_hosts.job(*words(folder)) as job:
            report = report_of(folder, job)
        if all(row["verdict"] != "INCONCLUSIVE" for row in report["cells"]):
            break
    part = check_named(few_hosts, report, 3, ("node",))
    assert part["percent"] == pytest.approx(50, abs=12)


@pytest.mark.slow
def test_rows_of_the_host_backend_are_judged_by_the_links(tmp_path: Path) -> None:
    """The profile sets the rate. With a rate of forty times the cables', all rows are slow."""
    output, folder = tmp_path / "rows.jsonl", tmp_path / "recorded"
    asked = ("allreduce", "--sizes", "8M", "--iters", "1", "--warmup", "0", "--out-of-place")
    outputs = (f"--output={output}", f"--profile={profile_of_links(tmp_path, 0.05)}", f"--record={folder}")
    with cabled(2, tmp_path) as hosts:
        hosts.run(*asked, *outputs, until="data right")
    check_judged(output.read_text(), 0.05, "PASS")
    faster = profile_of_links(tmp_path, 2.0)
    slow = gpubench("allreduce", "--replay", str(folder), "--profile", faster, "--format", "jsonl")
    check_judged(slow.stdout, 2.0, "FAIL")


def profile_of_links(folder: Path, rate_gbit_s: float) -> str:
    path = folder / f"links-{rate_gbit_s}.toml"
    text = (ROOT / "profiles" / "host.toml").read_text()
    text = text.replace("rate_gbit_s = 25.0", f"rate_gbit_s = {rate_gbit_s}")
    path.write_text(text.replace('name = "host"', 'name = "links"'))
    return str(path)


def check_judged(text: str, rate_gbit_s: float, verdict: str) -> None:
    rows = [row for row in map(json.loads, text.splitlines()) if "busbw_gb_s" in row]
    found = {(row["expected_source"], row["verdict"]) for row in rows}
    assert found == {(f"2 nodes by their links: {rate_gbit_s / 8:g} GB/s per node", verdict)}


@pytest.mark.slow
def test_a_port_that_drops_packets_is_named(hosts: Hosts, tmp_path: Path) -> None:
    shape(hosts, 5, DROPPING)
    with hosts.job(*words(tmp_path)) as job:
        check_named(hosts, report_of(tmp_path, job), 5, ("node", "node hangs", "node gone"))


@pytest.mark.slow
def test_a_cable_that_is_cut_under_way_is_a_node_that_is_gone_and_nothing_is_left_behind_it(
    hosts: Hosts, tmp_path: Path
) -> None:
    with hosts.job(*words(tmp_path)) as job:
        wait_for_round(tmp_path, job)
        hosts.on_switch("ip", "link", "set", "port6", "down")
        check_named(hosts, report_of(tmp_path, job), 6, ("node gone",))
        deadline = time.monotonic() + SECONDS_TO_BE_LEFT
        while workers_on(hosts, 6) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert workers_on(hosts, 6) == []


@pytest.mark.slow
def test_a_host_that_is_stopped_is_gone(hosts: Hosts, tmp_path: Path) -> None:
    with hosts.job(*words(tmp_path)) as job:
        wait_for_round(tmp_path, job)
        for pid in hosts.pids(6):
            os.kill(pid, signal.SIGSTOP)
        check_named(hosts, report_of(tmp_path, job), 6, ("node gone",))


@pytest.mark.slow
def test_a_host_that_is_killed_with_its_daemon_ends_the_job_and_its_rounds_are_judged(
    hosts: Hosts, tmp_path: Path
) -> None:
    with replace(hosts, options="--enable-recovery").job(*words(tmp_path)) as job:
        wait_for_round(tmp_path, job)
        for pid in hosts.pids(6):
            os.kill(pid, signal.SIGKILL)
        job.process.wait(SECONDS)
    result = gpubench("scan", "--replay", str(tmp_path / "rounds"), "--format", "json")
    assert len(json.loads(result.stdout)["rounds"]) == rounds_of(tmp_path) >= 1


@pytest.mark.slow
def test_a_host_whose_clock_is_wrong_is_named_and_its_figures_are_right(hosts: Hosts, tmp_path: Path) -> None:
    folder = tmp_path / "clock"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os, time\n"
        "_now = time.time\n"
        f"if os.uname().nodename == {hosts.names[2]!r}:\n"
        "    time.time = lambda: _now() - 86400\n"
    )
    with hosts.job(*words(tmp_path), PYTHONPATH=str(folder)) as job:
        report = report_of(tmp_path, job)
    assert report["parts"] == []
    (finding,) = [each for each in report["findings"] if each["id"] == "clock-differs"]
    assert finding["subject"] == hosts.names[2]
    assert finding["seen"].startswith("its clock is 864")


@pytest.mark.slow
def test_ranks_of_one_host_measure_each_other_in_phase_0(tmp_path: Path) -> None:
    with connected(3, tmp_path) as three, replace(three, ranks=2).job(*words(tmp_path), "--quick") as job:
        report = report_of(tmp_path, job)
    assert len(report["cells"]) == 6
    local = local_figures(tmp_path)
    assert [place for place, quantity in local if quantity == "copies inside the node"] == [[n, 0, 1] for n in range(3)]
    assert [place for place, quantity in local if quantity == "all-reduce inside the node"] == [
        [n, 0] for n in range(3)
    ]


@pytest.mark.slow
def test_a_worker_that_is_stopped_in_phase_0_is_named_and_the_scan_goes_on(tmp_path: Path) -> None:
    with connected(3, tmp_path) as three, replace(three, ranks=2).job(*words(tmp_path)) as job:
        deadline = time.monotonic() + SECONDS
        while not (found := workers_on(three, 1, WORKER)):
            if time.monotonic() > deadline or job.process.poll() is not None:
                pytest.skip("Open MPI's daemons got no job under way")
            time.sleep(0.02)
        os.kill(found[0], signal.SIGSTOP)
        report = report_of(tmp_path, job)
    (part,) = report["parts"]
    assert (part["part_kind"], part["nodes"]) == ("rail hangs", [three.names[1]])
    assert "its worker was stopped" in part["seen"]
    assert len(report["rounds"]) >= 3


def local_figures(folder: Path) -> list[tuple[list[int], str]]:
    """Return place and quantity of every stored value of phase 0."""
    _, local, *_ = (json.loads(line) for line in (folder / "rounds" / "scan.jsonl").read_text().splitlines())
    return sorted(zip(local["places"], local["quantities"], strict=True))


def workers_on(hosts: Hosts, number: int, module: bytes = b"gpubench") -> list[int]:
    found = []
    for pid in hosts.pids(number):
        path = Path(f"/proc/{pid}/cmdline")
        if path.exists() and module in path.read_bytes():
            found.append(pid)
    return found

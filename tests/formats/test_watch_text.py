"""The screens of a watch: what fits, what is cut, and what nobody's text can do to a terminal."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.formats.text.watch import broken, device_lines, frame_lines, plain_lines
from gpubench.model.results.watch import DeviceKind, JobRow, TrafficRow, WatchFrame, Way
from gpubench.model.terms.verdict import Origin, Verdict


def gpu(number: int, node: str = "node0", **more: Any) -> TrafficRow:
    values: dict[str, Any] = {
        "nvlink_sent_gb_s": 0.0,
        "nvlink_received_gb_s": 0.0,
        "pcie_sent_gb_s": 33.1,
        "pcie_received_gb_s": 29.04,
        "limit_percent": 52.5,
        "clock_mhz": 1980,
        "users": [f"{4000 + number} (python)"],
        **more,
    }
    return TrafficRow(
        seconds=3,
        interval_seconds=1,
        node=node,
        device=f"GPU{number}",
        device_kind=DeviceKind.GPU,
        origin=Origin.MEASURED,
        **values,
    )


def nic(name: str, sent: float | None = 20.0, node: str = "node0", limit: float | None = 50.0) -> TrafficRow:
    return TrafficRow(
        seconds=3,
        interval_seconds=1,
        node=node,
        device=name,
        device_kind=DeviceKind.NIC,
        origin=Origin.MEASURED,
        network_sent_gb_s=sent,
        network_received_gb_s=sent,
        limit_gb_s=limit,
        limit_percent=40.0,
    )


def job(node: str = "node0", way: Way = Way.STAGED, verdict: Verdict = Verdict.FAIL, **more: Any) -> JobRow:
    values: dict[str, Any] = {
        "cause": "nccl-p2p-disabled",
        "cause_seen": "NCCL_P2P_DISABLE=1 in the environment",
        "advice": "unset NCCL_P2P_DISABLE",
        **more,
    }
    return JobRow(
        node=node,
        job="python (torch 10.0.0.1:29500)",
        gpus=[f"GPU{n}" for n in range(8)],
        way=way,
        verdict=verdict,
        origin=Origin.MEASURED,
        first_seconds=1,
        seconds=3,
        nvlink_gb_s=0.0,
        pcie_sent_gb_s=264.8,
        pcie_received_gb_s=232.3,
        seen="NVLink 0.00, PCIe 265 out and 232 in GB/s: as much leaves as enters",
        **values,
    )


FULL = WatchFrame(
    seconds=3,
    rows=[*(gpu(n) for n in range(8)), *(nic(f"mlx5_{n}") for n in range(8)), nic("eth0", 0.0, limit=None)],
    jobs=[job()],
)


def text(frame: WatchFrame, width: int = 79, height: int = 23) -> list[str]:
    return [line for line, _ in frame_lines(frame, width, height, "gpubench watch  node0  3 s")]


def test_because_and_try_are_whole_on_a_small_terminal() -> None:
    because = "PCIe carries GPU0, GPU1 → GPU1, GPU2 at the rate of the NVLinks between the other GPUs: fabric state"
    advice = "systemctl restart nvidia-fabricmanager. If it fails, `systemctl status nvidia-fabricmanager` shows why"
    lines = text(replace(FULL, jobs=[replace(FULL.jobs[0], cause_seen=because, advice=advice)]))
    assert len(lines) <= 23
    assert " ".join(line.strip() for line in lines[-4:]) == f"because: {because} try:     {advice}"
    assert sum(line.startswith("GPU") for line in lines) == 9


@pytest.mark.parametrize("height", range(1, 24))
def test_a_terminal_that_shrinks_keeps_what_the_job_does(height: int) -> None:
    lines = text(FULL, 40, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= 40
    if height >= 5:
        assert any(line.startswith("staged") for line in lines)


@pytest.mark.parametrize("width", range(36, 80))
def test_no_number_is_cut(width: int) -> None:
    rows = [gpu(10, nvlink_sent_gb_s=123.4, users=["@" * 20]), nic("mlx5_10")]
    whole = [line.split() for line, _ in device_lines(rows, 200)]
    for (line, _), words in list(zip(device_lines(rows, width), whole, strict=True))[1::2]:
        assert len(line) <= width
        shown = line.partition("@")[0].split()
        assert shown == words[: len(shown)]
        assert len(shown) >= (5 if shown[0] == "GPU10" else 3)


def test_a_line_of_a_log_is_broken_where_a_width_was_chosen() -> None:
    (line,) = plain_lines(FULL)
    parts = list(broken(line, 40))
    assert max(map(len, parts)) <= 40
    assert [part.startswith(" " * 10) for part in parts] == [False, *[True] * (len(parts) - 1)]
    assert " ".join(" ".join(parts).split()) == " ".join(line.split())
    assert list(broken(line, 200)) == [line]


def test_what_is_not_known_is_a_question_mark_with_the_reason() -> None:
    row = gpu(
        0, nvlink_sent_gb_s=None, limit_percent=None, clock_mhz=None, users=None, note="nvlink sent: Not Supported"
    )
    (_, line) = [line for line, _ in device_lines([row], 120)]
    assert line.split()[1] == "?"
    assert "users not known; nvlink sent: Not Supported" in line


def test_throttling_and_errors_that_grew_are_on_the_line() -> None:
    row = gpu(0, throttle_reasons=("hw_slowdown",), errors_grown={"PCIe replays": 3})
    (_, (line, style)) = device_lines([row], 120)
    assert "throttled: hw_slowdown; +3 PCIe replays" in line
    assert style == "yellow"


def test_equal_nodes_are_one_line_and_odd_ones_are_shown() -> None:
    hosts = [f"node{n}" for n in range(16)]
    jobs = [
        job(host, Way.STAGED if host == "node3" else Way.DIRECT, Verdict.FAIL if host == "node3" else Verdict.PASS)
        for host in hosts
    ]
    jobs = [row if row.node == "node3" else job(row.node, Way.DIRECT, Verdict.PASS, cause=None) for row in jobs]
    frame = WatchFrame(seconds=3, rows=[gpu(0, host) for host in hosts], jobs=jobs, silences=[("node9", "no answer")])
    lines = text(frame, 200)
    assert any(line.startswith("14 nodes node0-2, node4-8, node10-15: direct") for line in lines)
    assert any(line.startswith("odd: 1 node node3: staged") for line in lines)
    assert any(line.startswith("odd: 1 node node9: no answer") for line in lines)
    plain = list(plain_lines(frame))
    assert len(plain) == 4
    assert plain[0].startswith("     3.0 s  node0-2, node4-8, node10-15  direct")


def test_plain_lines_say_why_where_it_is_sure() -> None:
    (line,) = plain_lines(FULL)
    assert line.endswith("python (torch 10.0.0.1:29500)  because NCCL_P2P_DISABLE=1 in the environment")
    assert list(plain_lines(WatchFrame(seconds=1, rows=[], jobs=[]))) == ["     1.0 s  no process uses a GPU"]
    waiting = WatchFrame(seconds=1, rows=[], jobs=[], waiting=True)
    assert list(plain_lines(waiting)) == ["     1.0 s  waiting for the first traffic"]
    assert "waiting for the first traffic" in text(waiting)
    unsure = job(verdict=Verdict.ERROR, cause=None, cause_seen=None, advice=None, way=Way.UNKNOWN)
    assert "  as much leaves as enters" in text(WatchFrame(seconds=1, rows=[], jobs=[unsure]))


def test_many_jobs_that_do_the_same_are_one_line() -> None:
    jobs = [
        replace(
            job(way=Way.HOST_COPIES, verdict=Verdict.SKIP, cause=None), job=f"process {n} (python)", gpus=[f"GPU{n}"]
        )
        for n in range(8)
    ]
    (line,) = plain_lines(WatchFrame(seconds=1, rows=[], jobs=jobs))
    assert line == (
        "     1.0 s  host copies GPU0-7  NVLink 0.00, PCIe 2118 out 1858 in GB/s  8 jobs, process 0 (python) and others"
    )
    assert len(list(plain_lines(WatchFrame(seconds=1, rows=[], jobs=jobs[:2])))) == 2

"""`gpubench watch` as a user runs it: simulated jobs, gates, files, recordings, terminals, and what cannot be."""

import csv
import fcntl
import io
import json
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.cli.running import PROGRAM, ROOT, environment, gpubench

MACHINE = ("watch", "--simulate", "hgx-h200-4", "--for", "4s")


def fault(kind: str) -> tuple[str, ...]:
    return (*MACHINE, "--fault", f"node0:traffic={kind}")


@pytest.mark.parametrize(
    ("kind", "said", "code"),
    [
        ("training", "PASS (simulated): python (torch node0:29500) on node0 is direct for 4 s", 0),
        (
            "staged",
            "FAIL (simulated): python (torch node0:29500) on node0 GPU0-3: sends its GPU traffic through host memory",
            1,
        ),
        ("sockets", "FAIL (simulated): node0 GPU0 and 3 more: sends its GPU traffic through the loopback", 1),
        (
            "loading",
            (
                "SKIP (simulated): the path between GPUs is unknown: python (torch node0:29500) on node0 shows "
                "loading data"
            ),
            3,
        ),
        (
            "checkpoint",
            (
                "SKIP (simulated): the path between GPUs is unknown: python (torch node0:29500) on node0 shows "
                "saving data"
            ),
            3,
        ),
        (
            "inference",
            "SKIP (simulated): the path between GPUs is unknown: process 4000 (python) on node0 shows host copies",
            3,
        ),
        ("waiting", "WARN (simulated): python (torch node0:29500) on node0 GPU0-3: GPU0 idle for 4 s", 1),
        ("idle", "SKIP (simulated): all jobs are idle, without traffic between GPUs", 3),
    ],
)
def test_a_gate_passes_only_what_was_seen_to_be_direct(kind: str, said: str, code: int) -> None:
    gate = gpubench(*fault(kind), "--strict")
    assert gate.returncode == code
    last = gate.stdout.splitlines()[-1]
    assert last.startswith(said)
    assert "simulated" in last
    assert gpubench(*fault(kind)).returncode == (1 if said.startswith("FAIL") else 0)


def test_lines_come_at_every_interval_and_say_that_they_are_simulated() -> None:
    done = gpubench(*MACHINE, "--interval", "500ms")
    lines = done.stdout.splitlines()
    assert [line.split(" s ")[0].strip() for line in lines[:8]] == [f"{n / 2:.1f}" for n in range(1, 9)]
    assert all("direct" in line for line in lines[:8])
    assert lines[8].endswith("(SIMULATED)")


def test_faults_of_the_machine_stage_its_job_and_explain_it() -> None:
    done = gpubench(*MACHINE, "--fault", "gpu1:fabric=in_progress", "--strict")
    assert done.returncode == 1
    assert "FAIL host-staged" in done.stdout
    assert "fabric" in done.stdout


def test_every_format_has_the_figures(tmp_path: Path) -> None:
    outputs = [tmp_path / f"watch{suffix}" for suffix in (".json", ".jsonl", ".csv", ".prom", ".html", ".md", ".xml")]
    options = [word for path in outputs for word in ("--output", str(path))]
    assert gpubench(*fault("staged"), *options).returncode == 1
    document = json.loads(outputs[0].read_text())
    assert len(document["traffic"]) == 4 * (4 + 2)
    assert document["jobs"][0]["way"] == "staged"
    assert document["jobs"][0]["origin"] == document["traffic"][0]["origin"] == "simulated"
    assert document["findings"][0]["id"] == "host-staged"
    kinds = [json.loads(line)["kind"] for line in outputs[1].read_text().splitlines()]
    assert kinds == ["metadata", *["traffic"] * 24, "jobs", "report"]
    rows = list(csv.DictReader(io.StringIO(outputs[2].read_text())))
    assert {row["device"] for row in rows} == {"GPU0", "GPU1", "GPU2", "GPU3", "eth0", "lo"}
    prometheus = outputs[3].read_text()
    assert 'gpubench_job_seconds{command="watch",origin="simulated",node="node0",' in prometheus
    assert (
        'gpubench_traffic_pcie_sent_bytes_per_second{command="watch",origin="simulated",node="node0",device="GPU0"}'
        in prometheus
    )
    assert "host-staged" in outputs[4].read_text()
    assert "host-staged" in outputs[5].read_text()
    again = gpubench("report", str(outputs[0]))
    assert again.returncode == 1
    assert "FAIL host-staged" in again.stdout


def test_a_stored_watch_that_somebody_edited_is_shown_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "watch.json"
    gpubench(*MACHINE, "--output", str(path))
    document = json.loads(path.read_text())
    document["jobs"][0] |= {"gpus": ["\x1b[31mGPU\u0661", "x"], "way": "upwards", "job": "a\nb"}
    path.write_text(json.dumps(document))
    done = gpubench("report", str(path))
    assert done.returncode == 0
    assert "upwards" in done.stdout
    assert "\x1b" not in done.stdout
    assert "Traceback" not in done.stderr


def test_stdout_is_for_programs_where_it_is_asked_for() -> None:
    assert json.loads(gpubench(*MACHINE, "--format", "json").stdout)["verdict"] == "PASS"
    rows = list(csv.DictReader(io.StringIO(gpubench(*MACHINE, "--format", "csv").stdout)))
    assert len(rows) == 24
    jobs = list(csv.DictReader(io.StringIO(gpubench(*MACHINE, "--format", "csv", "--section", "jobs").stdout)))
    assert [row["way"] for row in jobs] == ["direct"]
    assert gpubench(*MACHINE, "--quiet").stdout.startswith("PASS (simulated): ")
    assert gpubench(*MACHINE, "--summary").stdout.count("\n") == 1


def test_a_recording_is_judged_again_and_says_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "recorded"
    first = gpubench(*fault("staged"), "--record", str(folder))
    again = gpubench("watch", "--replay", str(folder), "--strict")
    assert again.returncode == 1
    told = [line for line in first.stdout.splitlines() if line.startswith("  seen")]
    assert told
    assert told == [line for line in again.stdout.splitlines() if line.startswith("  seen")]
    assert "(RECORDED)" in again.stdout or "(SIMULATED)" in again.stdout
    (folder / "watch.jsonl").write_text("")
    empty = gpubench("watch", "--replay", str(folder))
    assert (empty.returncode, "has no readings" in empty.stderr) == (2, True)


def test_a_transfer_between_two_idle_jobs_over_the_loopback_fails(tmp_path: Path) -> None:
    gpubench(*fault("idle"), "--record", str(tmp_path))
    file = tmp_path / "watch.jsonl"
    readings = [json.loads(line) for line in file.read_text().splitlines()]
    for second, reading in enumerate(readings):
        reading["gpus"][0] |= {"pcie_sent_gb_s": 0.43, "pcie_received_gb_s": 0.0}
        reading["gpus"][1] |= {"pcie_sent_gb_s": 0.03, "pcie_received_gb_s": 0.43}
        for each in reading["tasks"]:
            each |= {"together": [], "communicators": False}
            each["facts"]["libraries"] = {"libucp": "/opt/nixl/libucp.so.0"}
        for nic in reading["nics"]:
            carried = second * 4 * 10**8 * (nic["name"] == "lo")
            nic |= {"sent_bytes": carried, "received_bytes": carried}
    file.write_text("".join(json.dumps(reading) + "\n" for reading in readings))
    done = gpubench("watch", "--replay", str(tmp_path), "--strict")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == (
        "FAIL: GPU0 → GPU1 on node0: host-staged, 0.40 GB/s, through TCP on the loopback interface, for 2 s. "
        "Try: gpubench kv"
    )
    assert "sockets GPU0-1  NVLink 0.00" in done.stdout


def test_a_recording_that_no_watch_wrote_is_refused_with_its_line(tmp_path: Path) -> None:
    """A reading out of order made an interval, and jobs, of less than no time."""
    gpubench(*MACHINE, "--record", str(tmp_path))
    file = tmp_path / "watch.jsonl"
    lines = file.read_text().splitlines(keepends=True)

    def refused(*edited: str) -> str:
        file.write_text("".join(edited))
        done = gpubench("watch", "--replay", str(tmp_path))
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)
        assert "edited by hand" in done.stderr
        assert f"--record {tmp_path}-again" in " ".join(done.stderr.split())
        return " ".join(done.stderr.split())

    assert "line 3: node0 at 1 s, after 2 s" in refused(lines[0], lines[2], *lines[1:])
    changed = json.loads(lines[1])
    changed["gpus"][1]["nvlink_sent_bytes"] = -1
    assert "line 2.gpus[1].nvlink_sent_bytes is -1" in refused(lines[0], json.dumps(changed) + "\n", *lines[2:])


def test_a_recording_is_shown_for_as_long_as_it_is_asked_for(tmp_path: Path) -> None:
    def shown(*asked: str) -> list[str]:
        done = gpubench("watch", "--replay", str(tmp_path), *asked)
        assert done.returncode == 0, done.stderr
        return [
            line.split(" s  ")[0].strip() for line in done.stdout.splitlines() if "  direct  GPU0-3  NVLink" in line
        ]

    gpubench(*MACHINE, "--interval", "500ms", "--record", str(tmp_path))
    every = [f"{n / 2:.1f}" for n in range(1, 9)]
    assert shown() == [*every, "4.0"]
    assert shown("--for", "2s") == [*every[:4], "2.0"]
    assert shown("--for", "1h") == shown()


def test_many_nodes_are_one_line_and_the_odd_one_is_shown() -> None:
    done = gpubench(
        "watch", "--simulate", "hgx-h100-8*16", "--for", "3s", "--fault", "node5:traffic=staged", "--width", "160"
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("     1.0 s  node0-4, node6-15  direct")
    assert lines[1].startswith("     1.0 s  node5  staged")
    assert any("on node0-4, node6-15" in line for line in lines)
    assert "FAIL host-staged: python (torch node0:29500) on node5 GPU0-7" in done.stdout


def test_waiting_for_traffic_counts_from_the_first_bytes() -> None:
    done = gpubench(*MACHINE, "--until-traffic")
    assert done.returncode == 0
    assert "direct" in done.stdout


def test_only_the_jobs_that_are_asked_for() -> None:
    one = gpubench(*fault("inference"), "--pid", "4002")
    assert "GPU2" in one.stdout
    assert "GPU1" not in one.stdout
    none = gpubench(*MACHINE, "--job", "4711", "--strict")
    assert none.returncode == 3
    assert "job-not-found" in none.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--interval", "soon"), "--interval 'soon' is not a time"),
        (("--interval", "1ms"), "expected: 0.1 s to 3600 s"),
        (("--for", "100ms"), "--for 100ms is 0.1 s"),
        (("--gpus", "3-1"), "--gpus '3-1' is not a list of GPUs"),
        (("--gpus", "all"), "--gpus 'all' is not a list of GPUs"),
        (("--gpus", "1", "--simulate", "hgx-h200-4"), "--gpus and --simulate exclude each other"),
        (("--replay", "x", "--record", "y"), "exclude each other"),
        (("--replay", "/nowhere"), "has no recording"),
        (("--fault", "node0:traffic=staged"), "without --simulate"),
        (("--simulate", "hgx-h200-4", "--fault", "node0:dies=round3"), "has an effect on gpubench scan only"),
        (("--section", "pairs", "--format", "csv"), "--section 'pairs'"),
        (("--job", "", "--simulate", "hgx-h200-4"), "--job '' is not a job"),
        (("--job", "4711_3", "--simulate", "hgx-h200-4"), "--job '4711_3' is not a job"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_read(arguments: tuple[str, ...], said: str) -> None:
    done = gpubench("watch", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_fault_of_traffic_is_for_watch_alone() -> None:
    done = gpubench("topo", "--simulate", "hgx-h200-4", "--fault", "node0:traffic=staged")
    assert done.returncode == 2
    assert "has an effect on gpubench watch only" in done.stderr


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there are GPUs")
def test_without_a_gpu_nothing_is_measured() -> None:
    done = gpubench("watch", "--for", "1s")
    assert done.returncode == 3
    assert "no usable GPU" in done.stderr


def test_a_reader_that_goes_away_ends_the_watch_quietly() -> None:
    command = [*PROGRAM, "watch", "--simulate", "hgx-h200-4", "--for", "9h"]
    started = subprocess.Popen(
        command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    started.stdout.readline()
    started.stdout.close()
    assert started.wait(300) == 0
    assert started.stderr is not None
    told = started.stderr.read()
    started.stderr.close()
    assert told == ""


class Terminal:
    """A terminal of a size on which a watch runs."""

    def __init__(self, rows: int, columns: int, *arguments: str, **variables: str) -> None:
        self.process, self.descriptor = pty.fork()
        if self.process == 0:
            os.chdir(ROOT)
            inside = environment(TERM="xterm-256color", **variables)
            os.execve(sys.executable, [sys.executable, "-m", "gpubench", "watch", *arguments], inside)
        self.shown = b""
        self.resize(rows, columns)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, wanted: bytes, times: int = 1) -> None:
        deadline = time.monotonic() + 300
        while self.shown.count(wanted) < times and time.monotonic() < deadline:
            if select.select([self.descriptor], [], [], 1)[0]:
                try:
                    self.shown += os.read(self.descriptor, 2**16)
                except OSError:  # it has ended
                    break
        assert self.shown.count(wanted) >= times, self.shown[-500:]

    def type(self, text: bytes) -> None:
        os.write(self.descriptor, text)

    def end(self) -> int:
        while True:
            try:
                chunk = os.read(self.descriptor, 2**16)
            except OSError:
                break
            if not chunk:
                break
            self.shown += chunk
        os.close(self.descriptor)
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


DRAWN, ALTERNATE, BACK = b"\x1b[H", b"\x1b[?1049h", b"\x1b[?1049l"
SIMULATED = ("--simulate", "hgx-h100-8", "--fault", "node0:traffic=staged", "--interval", "200ms", "--for", "1h")


def check_report(terminal: Terminal, said: bytes = b"FAIL host-staged", code: int = 1) -> None:
    """A live watch that was ended shows its report where it was started."""
    assert terminal.end() == code
    screen, _, report = terminal.shown.partition(BACK)
    assert ALTERNATE in screen
    assert said in report
    assert b"Traceback" not in terminal.shown


def test_a_signal_ends_a_live_watch_with_its_report() -> None:
    terminal = Terminal(24, 80, *SIMULATED)
    terminal.read_until(DRAWN, times=3)
    os.kill(terminal.process, signal.SIGTERM)
    check_report(terminal)


def test_a_terminal_that_shrinks_is_drawn_as_small_as_it_is_and_q_ends_it() -> None:
    terminal = Terminal(24, 80, *SIMULATED)
    terminal.read_until(DRAWN, times=2)
    terminal.resize(8, 40)
    frame = b""
    for _ in range(20):  # frames of before may still be on their way
        terminal.read_until(DRAWN, times=terminal.shown.count(DRAWN) + 1)
        frame = terminal.shown.split(DRAWN)[-2]
        if frame.count(b"\n") <= 8:
            break
    terminal.type(b"q")
    check_report(terminal)
    assert frame.count(b"\n") <= 8
    assert b"staged" in frame


def test_a_terminal_of_another_size_is_drawn_at_once_and_ctrl_c_ends_it() -> None:
    """With the reading that was there, and not with the next."""
    terminal = Terminal(24, 80, *SIMULATED[:4], "--interval", "6s", "--for", "1h", COLUMNS="50")
    terminal.read_until(b"staged")
    assert b"PCIe out" in terminal.shown, "as wide as the terminal is, whatever COLUMNS says"
    terminal.resize(10, 40)
    terminal.read_until(b"more lines (window")
    before, _, after = terminal.shown.partition(b"more lines (window")[0].rpartition(DRAWN)
    seconds = [re.findall(rb"\(SIMULATED\)  (\d+) of", each)[-1] for each in (before, after)]
    assert seconds[0] == seconds[1]
    terminal.type(b"\x03")
    check_report(terminal, said=b"  watch  6 s  (SIMULATED)", code=0)


def test_the_recipe_ends_a_job_that_is_staged(tmp_path: Path) -> None:
    """The recipe as it stands there; `srun` stands in for itself, and what it starts for a job and for its traffic."""
    script = (ROOT / "docs/recipes/slurm/watch.sbatch").read_text()
    stand_in = """#!/bin/bash
case "$*" in *gpubench*) ;; *) exec sleep 3600;; esac
[ $TRAFFIC = refused ] && exit 1
while [ "$1" != --strict ]; do shift; done
exec {gpubench} watch "$@" --for 3s --simulate hgx-h200-4 --fault node0:traffic=$TRAFFIC
"""
    said = {"refused": "", "staged": "staged, by sockets", "loading": "no path between GPUs was seen"}
    (tmp_path / "srun").write_text(stand_in.replace("{gpubench}", shlex.join(PROGRAM)))
    (tmp_path / "srun").chmod(0o755)
    for traffic, told in said.items():
        (tmp_path / "watch.json").unlink(missing_ok=True)
        path = f"{tmp_path}:{os.environ['PATH']}"
        variables = environment(PATH=path, SLURM_JOB_ID="4711", TRAFFIC=traffic)
        shortened = script if traffic == "staged" else script.replace('wait "$training"', 'kill "$training"')
        done = subprocess.run(
            ["bash", "-c", shortened],
            env=variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert told in done.stdout, done.stderr
        assert done.stdout or traffic == "refused"
        assert "staged" not in done.stdout or traffic == "staged"


@pytest.mark.parametrize(
    ("faults", "hop", "cause"),
    [
        (("link0-3:staged=yes",), "GPU3 → GPU0", "no known cause was found"),
        (("link1-2:p2p=NS",), "GPU1 → GPU2", "no peer access: NVML reports NS"),
        (("gpu2:p2p=NS",), "GPU1, GPU2 → GPU2, GPU3", "no peer access: NVML reports NS"),
        (("link0-2:staged=yes",), "GPU0 → GPU2", "no known cause was found"),
    ],
)
def test_one_staged_pair_of_a_ring_is_named(faults: tuple[str, ...], hop: str, cause: str) -> None:
    options = [word for each in faults for word in ("--fault", each)]
    gate = gpubench(*MACHINE, *options, "--strict", "--format", "json")
    assert gate.returncode == 1
    (finding,) = json.loads(gate.stdout)["findings"]
    assert (finding["id"], finding["severity"]) == ("host-staged", "FAIL")
    assert finding["subject"].endswith(f"on node0 {hop}")
    assert set(finding["subjects"]) == set(hop.replace(",", "").split()) - {"→"}
    assert cause in finding["cause"]

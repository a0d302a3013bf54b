"""Verdicts and findings on KV transfers, from transfers with scripted protocols, times, data and errors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import permutations
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.errors import CouldNotMeasureError
from gpubench.jobs.runner import NullListener
from gpubench.measure.kv import KvRequest, KvRun, Measured
from gpubench.measure.p2p.request import CopyMachine, wiring_of_process
from gpubench.measure.paths import Meter
from gpubench.model.facts.process import GpuProcess
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.p2p import Pair
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.ucx import Allocation, ProtocolRange
from gpubench.model.results.kv import KvRow
from gpubench.model.results.report import EvidenceRow, Report, Row
from gpubench.model.terms.operation import Direction
from gpubench.model.terms.verdict import Finding, Origin, Verdict
from gpubench.ports.copies import LinkBytes, LinkCounters
from gpubench.ports.transfers import Moved, OpenTransfers, ProcessEnd, TransferCase
from gpubench.profiles import match_node
from gpubench.simulated.links import NoCounters, SimulatedCopies
from gpubench.simulated.machine import parse_machine, snapshots

SIZE = 64 * 2**20
COPY_GB_S = 390.0
HEALTHY = ProcessEnd(ucx_files=("/ucx/libucp.so.0",), exportable=True, pid_namespace=1)
EXPANDABLE = replace(HEALTHY, exportable=False)
SCHEMES = {
    "direct": ProtocolRange(0, None, "zero-copy", "cuda_ipc/cuda"),
    "emulated": ProtocolRange(0, None, "software emulation", "tcp/lo"),
    "staged": ProtocolRange(0, None, "fragmented copy-in/copy-out, cuda_copy", "cuda_copy/cuda and sysv/memory"),
    "new words": ProtocolRange(0, None, "teleport", "wormhole/cuda"),
}
Script = Callable[[Pair, TransferCase], Moved]


def moved(scheme: str | None = "direct", gb_s: float = 380.0, size_bytes: int = SIZE, **changes: Any) -> Moved:
    seconds = size_bytes / gb_s / 1e9
    chosen = None if scheme is None else SCHEMES[scheme]
    case = TransferCase(Direction.WRITE, size_bytes)
    return replace(Moved(case=case, seconds=(seconds,) * 30, transfers=32, chosen=chosen, wrong=0), **changes)


def always(scheme: str | None = "direct", gb_s: float = 380.0, **changes: Any) -> Script:
    return lambda _, case: moved(scheme, gb_s, case.size_bytes, **changes)


class Scripted:
    """Transfers whose results come from a script. It counts the processes that are open."""

    def __init__(self, script: Script, ends: tuple[ProcessEnd, ProcessEnd], refused: Mapping[Pair, str]) -> None:
        self.script, self.ends, self.refused = script, ends, refused
        self.opened = 0
        self.asked: list[tuple[Pair, TransferCase]] = []
        self.pair: Pair = 0, 0

    @contextmanager
    def open(self, pair: Pair, allocation: Allocation) -> Iterator[OpenTransfers]:
        if pair in self.refused:
            raise CouldNotMeasureError(self.refused[pair])
        self.pair = pair
        self.opened += 1
        yield self
        self.opened -= 1

    def clear(self, case: TransferCase, *, backwards: bool) -> None: ...

    def move(self, case: TransferCase, *, backwards: bool) -> Moved:
        ordered = (self.pair[1], self.pair[0]) if backwards else self.pair
        self.asked.append((ordered, case))
        found = replace(self.script(ordered, case), case=case)
        if found.error:
            raise CouldNotMeasureError(found.error)
        self.last = found
        return found

    def count_wrong(self, case: TransferCase, *, backwards: bool) -> int:
        return self.last.wrong or 0


class Rows(NullListener):
    def __init__(self) -> None:
        self.rows: list[KvRow] = []

    def row(self, row: Row) -> None:
        assert isinstance(row, KvRow)
        self.rows.append(row)


def measured(
    script: Script = always(),  # noqa: B008
    *,
    machine: str = "hgx-h200-2",
    ends: Sequence[ProcessEnd] = (HEALTHY, HEALTHY),
    refused: Mapping[Pair, str] | None = None,
    copy: float | None = COPY_GB_S,
    edit: Callable[[Snapshot], Snapshot] = lambda node: node,
    counters: LinkCounters | None = None,
    **asked: Any,
) -> tuple[Report, list[KvRow], Scripted]:
    parsed = parse_machine(machine)
    node = Topology(edit(snapshots(parsed)[0]))
    gpus = SimulatedCopies(parsed, (), 0).gpus
    pairs = tuple((one, other) for one in range(len(gpus)) for other in range(one + 1, len(gpus))) or ((0, 0),)
    defaults = {"pairs": pairs, "allocations": (Allocation.MALLOC,), "sizes": (SIZE,), "blocks": (1,)}
    request = KvRequest(asked.pop("backend", "ucx"), **{**defaults, "to_host": False, **asked})
    matched = match_node(node, {}, None)
    shown = CopyMachine(wiring_of_process(node, gpus), gpus, (), matched, Origin.MEASURED)
    transfers, listener, lines = Scripted(script, (ends[0], ends[1]), refused or {}), Rows(), list[Measured]()

    rates = {} if copy is None else dict.fromkeys(permutations(range(len(gpus)), 2), copy)
    kv = KvRun(machine=shown, request=request, copies_gb_s=rates)
    replayed = Rows()
    report = replace(kv, transfers=transfers, meter=Meter(counters or NoCounters())).run(listener, lines.append)
    again = kv.replay(lines, replayed)
    assert (again.verdict, again.findings) == (report.verdict, report.findings)
    assert replayed.rows == listener.rows
    assert transfers.opened == 0
    return report, listener.rows, transfers


def only(report: Report) -> Finding:
    (finding,) = report.findings
    return finding


def test_a_healthy_run_passes_without_findings() -> None:
    report, rows, _ = measured()
    assert (report.verdict, report.findings) == (Verdict.PASS, ())
    assert [(row.source, row.destination, row.direction) for row in rows] == [
        (f"GPU{source}", f"GPU{1 - source}", way) for source in (0, 1) for way in ("write", "read")
    ]
    assert {(row.verdict, row.host_staged, row.verified, round(row.expected_percent or 0)) for row in rows} == {
        (Verdict.PASS, False, "last", 97)
    }
    assert {row.conclusion for row in report.rows(EvidenceRow)} == {"direct"}


@pytest.mark.parametrize(
    ("script", "options", "id_", "command"),
    [
        (always("emulated", 0.4), {"ends": (EXPANDABLE,) * 2, "allocations": (Allocation.EXPANDABLE,)},
         "kv-memory-expandable", "unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF"),
        (always("emulated", 0.4), {"ends": (EXPANDABLE,) * 2, "allocations": (Allocation.ASYNC,)},
         "kv-memory-pool", "export PYTORCH_CUDA_ALLOC_CONF=backend:native"),
        (always("emulated", 0.4), {"ends": (HEALTHY, replace(HEALTHY, pid_namespace=2))}, "kv-pid-namespaces", ""),
        (always("staged", 2.6), {"ends": (replace(HEALTHY, variables={"UCX_TLS": "^cuda_ipc"}), HEALTHY)},
         "ucx-tls", "gpubench p2p && unset UCX_TLS"),
        (always("staged", 2.6), {}, "kv-staged-unexplained", "env | grep"),
        # UCX's word counts even if the bandwidth looks fine.
        (always("staged", 300.0), {}, "kv-staged-unexplained", "env | grep"),
    ],
)  # fmt: skip
def test_a_host_staged_transfer_fails_with_its_cause_and_cure(
    script: Script, options: dict[str, Any], id_: str, command: str
) -> None:
    report, rows, _ = measured(script, **options)
    finding = only(report)
    assert (report.verdict, finding.id, finding.severity) == (Verdict.FAIL, id_, Verdict.FAIL)
    assert finding.next_command.startswith(command)
    assert finding.subjects == ("GPU0 → GPU1", "GPU1 → GPU0")
    assert {(row.verdict, row.host_staged) for row in rows} == {(Verdict.FAIL, True)}


def reads(scheme: str, gb_s: float) -> Script:
    return lambda _, case: moved(*((scheme, gb_s) if case.direction is Direction.READ else ("direct", 380.0)))


READS = reads("emulated", 0.5)


def small(scheme: str) -> Script:
    return lambda _, case: moved(scheme if case.size_bytes < SIZE else "direct", size_bytes=case.size_bytes)


@pytest.mark.parametrize(
    ("script", "asked"),
    [
        (READS, {}),
        (small("staged"), {"sizes": (2**20, SIZE)}),
        (lambda _, case: moved("staged" if case.blocks > 1 else "direct"), {"blocks": (1, 256)}),
        (always("emulated", 0.4), {"blocks": (256,)}),
        (always("emulated", 0.0004), {"sizes": (4096,)}),
        (lambda pair, _: moved("emulated" if pair == (1, 0) else "direct"), {}),
    ],
    ids=["reads", "small sizes", "many blocks", "only many blocks", "only a small size", "one way"],
)
def test_a_run_fails_if_any_of_its_transfers_is_host_staged(script: Script, asked: dict[str, Any]) -> None:
    report, rows, _ = measured(script, **asked)
    assert report.verdict is Verdict.FAIL
    assert "FAIL" in {row.verdict for row in rows}
    assert only(report).id == ("kv-get-without-nvlink" if script is READS else "kv-staged-unexplained")


@pytest.mark.parametrize(
    ("script", "machine", "verdict", "ids"),
    [
        (always(None), "hgx-h200-2", Verdict.PASS, ()),  # 380 GB/s is more than host memory can carry
        (always(None, 30.0), "hgx-h200-2", Verdict.FAIL, ("host-staged", "kv-slow")),
        (always(None, 0.05), "hgx-h200-8/1", Verdict.WARN, ("path-unknown",)),
        (always("new words", 0.05), "hgx-h200-8/1", Verdict.WARN, ("path-unknown",)),
        (always(None, 20.0), "l40s-8/2", Verdict.WARN, ("path-unknown",)),
        (always("new words", 20.0), "l40s-8/2", Verdict.WARN, ("path-unknown",)),
        (reads("new words", 380.0), "l40s-8/2", Verdict.WARN, ("path-unknown",)),
    ],
)
def test_nothing_passes_without_evidence(script: Script, machine: str, verdict: Verdict, ids: tuple[str, ...]) -> None:
    report, _, _ = measured(script, machine=machine, copy=COPY_GB_S if "h200" in machine else 20.0)
    found = {finding.id for finding in report.findings}
    assert (report.verdict, found) == (verdict, set(ids))


def test_wrong_data_fails_whatever_the_path() -> None:
    report, rows, _ = measured(lambda pair, _: moved(wrong=7 if pair == (1, 0) else 0))
    finding = only(report)
    assert (report.verdict, finding.id, finding.subject) == (Verdict.FAIL, "wrong-data", "GPU1 → GPU0")
    assert finding.seen == "wrong data arrived: 7 wrong words of 8 bytes"
    assert [(row.verdict, row.note) for row in rows[2:]] == [("FAIL", "7 wrong words")] * 2


def test_wrong_data_in_host_memory_fails() -> None:
    report, rows, _ = measured(lambda _, case: moved(wrong=int(case.to_host)), to_host=True)
    assert only(report).id == "wrong-data"
    assert [row.verdict for row in rows if row.destination == "host"] == ["FAIL", "FAIL"]


def test_transfers_to_host_memory_are_not_judged() -> None:
    report, rows, _ = measured(lambda _, case: moved("emulated" if case.to_host else "direct"), to_host=True)
    assert (report.verdict, report.findings) == (Verdict.PASS, ())
    assert {(row.verdict, row.host_staged) for row in rows if row.destination == "host"} == {(None, None)}


def test_a_peer_that_dies_is_an_error_and_other_pairs_go_on() -> None:
    def script(pair: Pair, case: TransferCase) -> Moved:
        dies = set(pair) == {0, 1} and case.direction is Direction.READ
        return Moved(case=case, error="no answer within 30 s: transfer") if dies else moved()

    report, rows, transfers = measured(script, machine="hgx-h200-4")
    finding = only(report)
    assert (report.verdict, finding.id, finding.severity) == (Verdict.ERROR, "not-measured", Verdict.ERROR)
    assert (finding.seen, finding.subjects) == ("no answer within 30 s: transfer", ("GPU0 → GPU1", "GPU1 → GPU0"))
    # A late answer to a command that timed out must not be read as the answer to the next command.
    assert [case.direction for pair, case in transfers.asked if set(pair) == {0, 1}] == ["write", "read"]
    assert sum(row.verdict == "PASS" for row in rows) == 1 + 10 * 2


def test_processes_that_do_not_start_are_an_error_and_other_pairs_go_on() -> None:
    report, rows, _ = measured(machine="hgx-h200-4", refused={(0, 1): "ucp_init_version failed: No such device"})
    finding = only(report)
    assert (report.verdict, finding.id, finding.seen) == (
        Verdict.ERROR, "not-measured", "ucp_init_version failed: No such device"
    )  # fmt: skip
    assert len(rows) == 10 * 2


def test_processes_without_a_network_are_told_so() -> None:
    report, _, _ = measured(refused={(0, 1): "ucp_ep_create failed: Destination is unreachable"})
    assert only(report).cause.startswith("no network connects the two processes")


def test_no_completed_transfer_is_never_a_pass() -> None:
    report, rows, _ = measured(refused={(0, 1): "no"})
    assert (report.verdict, rows) == (Verdict.ERROR, [])
    assert only(report).id == "not-measured"


def test_the_speed_of_two_processes_on_one_gpu_is_not_judged() -> None:
    report, rows, _ = measured(always("direct", 1900.0), machine="hgx-h200-8/1")
    assert (report.verdict, report.findings) == (Verdict.PASS, ())
    assert {(row.verdict, row.note, row.expected_gb_s) for row in rows} == {
        (None, "speed not judged: both processes use one GPU", None)
    }


def test_gpus_without_peer_access_by_design_are_skipped() -> None:
    report, rows, _ = measured(always("emulated", 0.5), machine="rtx-4090-2", copy=20.0)
    finding = only(report)
    assert (report.verdict, finding.id, finding.severity) == (Verdict.SKIP, "peer-access-refused", Verdict.SKIP)
    assert {row.verdict for row in rows} == {Verdict.SKIP}


@pytest.mark.parametrize(
    ("share", "severity"),
    [(0.96, None), (0.76, None), (0.74, Verdict.WARN), (0.51, Verdict.WARN), (0.49, Verdict.FAIL)],
)
def test_a_slow_direct_transfer_is_judged_by_a_plain_copy(share: float, severity: Verdict | None) -> None:
    report, rows, _ = measured(always("direct", share * COPY_GB_S))
    assert report.verdict is (severity or Verdict.PASS)
    assert {row.verdict for row in rows} == {severity or Verdict.PASS}
    assert {(finding.id, finding.severity) for finding in report.findings} == (
        {("kv-slow", severity)} if severity else set()
    )


def test_a_transfer_as_slow_as_a_slow_copy_fails() -> None:
    report, rows, _ = measured(always("direct", 150.0), copy=152.0)
    finding = only(report)
    assert (report.verdict, finding.id, finding.severity) == (Verdict.FAIL, "p2p-slow", Verdict.FAIL)
    assert {row.verdict for row in rows} == {Verdict.PASS}


@pytest.mark.parametrize("copy", [330.0, 390.0, 410.0])
def test_a_copy_that_is_a_little_slow_is_no_finding(copy: float) -> None:
    report, _, _ = measured(always("direct", copy), copy=copy)
    assert (report.verdict, report.findings) == (Verdict.PASS, ())


@pytest.mark.parametrize(("sizes", "blocks"), [((2**20,), (1,)), ((SIZE,), (256,))])
def test_small_transfers_and_many_blocks_have_no_speed_verdict(sizes: tuple[int, ...], blocks: tuple[int, ...]) -> None:
    report, rows, _ = measured(always("direct", 3.0), machine="l40s-8/2", copy=20.0, sizes=sizes, blocks=blocks)
    assert (report.verdict, report.findings) == (Verdict.PASS, ())
    assert {row.verdict for row in rows} == {None}


def test_the_speed_of_a_gpu_that_another_process_uses_is_not_judged() -> None:
    def busy(node: Snapshot) -> Snapshot:
        used = replace(node.gpus[1], processes=(GpuProcess(pid=4242, memory_bytes=2**30),), idle=False)
        return replace(node, gpus=(node.gpus[0], used))

    report, rows, _ = measured(always("direct", 100.0), copy=390.0, edit=busy)
    assert {(row.verdict, row.note) for row in rows} == {(Verdict.SKIP, "not judged: GPU1 is in use by process 4242")}
    finding = only(report)
    assert (report.verdict, finding.id, finding.severity) == (Verdict.WARN, "gpu-in-use", Verdict.WARN)


class Pcie:
    """Counters that show every byte on PCIe and none on NVLink."""

    def __init__(self) -> None:
        self.total = 0

    def read(self, gpu: int) -> LinkBytes:
        self.total += 8 * SIZE
        return LinkBytes(nvlink_sent=0, nvlink_received=0, pcie_sent=self.total, pcie_received=self.total)


def test_counters_that_contradict_the_library_are_a_doubt() -> None:
    script = always("direct", 380.0, transfers=1)
    report, _, _ = measured(script, counters=Pcie())
    finding = only(report)
    assert (report.verdict, finding.id, finding.severity) == (Verdict.WARN, "path-disputed", Verdict.WARN)


class NvlinkOfOnePair:
    """Counters that show the transfers from GPU0 to GPU1 on NVLink, and nothing later."""

    def __init__(self) -> None:
        self.reads = 0

    def read(self, gpu: int) -> LinkBytes:
        self.reads += 1
        moved = SIZE * min(self.reads, 9)
        return LinkBytes(nvlink_sent=moved, nvlink_received=moved, pcie_sent=0, pcie_received=0)


def test_a_transfer_that_moves_no_nvlink_counter_is_staged_if_others_moved_it() -> None:
    report, _, _ = measured(always(None, 30.0, transfers=1), counters=NvlinkOfOnePair())
    _, backwards = report.rows(EvidenceRow)
    assert backwards.measurement_seen == (
        "NVLink counters show no traffic here, although they show some on other paths of this run"
    )
    assert report.verdict is Verdict.FAIL


def test_several_copies_of_ucx_in_one_process_are_a_doubt() -> None:
    mixed = replace(HEALTHY, ucx_files=("/nixl/libucp-1a.so.0", "/usr/lib/libucp.so.0"))
    report, _, _ = measured(ends=(HEALTHY, mixed))
    finding = only(report)
    assert (report.verdict, finding.id, finding.severity) == (Verdict.WARN, "kv-two-ucx", Verdict.WARN)
    assert "/nixl/libucp-1a.so.0, /usr/lib/libucp.so.0" in finding.seen


def test_findings_name_the_memory_if_several_kinds_are_measured() -> None:
    both = (Allocation.MALLOC, Allocation.EXPANDABLE)
    report, _, _ = measured(always("emulated", 0.4), ends=(EXPANDABLE, EXPANDABLE), allocations=both)
    subjects = {finding.id: finding.subjects for finding in report.findings}
    assert subjects == {
        "kv-staged-unexplained": ("GPU0 → GPU1 (malloc)", "GPU1 → GPU0 (malloc)"),
        "kv-memory-expandable": ("GPU0 → GPU1 (expandable)", "GPU1 → GPU0 (expandable)"),
    }


def test_the_speed_of_nixl_is_not_judged_but_its_path_is() -> None:
    """On two healthy H200s, NIXL's median was 0.58 to 0.62 of a plain copy."""
    healthy, rows, _ = measured(always(gb_s=230.0), backend="nixl")
    assert (healthy.verdict, healthy.findings) == (Verdict.PASS, ())
    assert {row.note for row in rows} == {
        "speed not judged: NIXL's progress thread competes with the program that waits for the transfer"
    }
    staged, _, _ = measured(always("emulated", gb_s=0.4), backend="nixl")
    assert staged.verdict is Verdict.FAIL

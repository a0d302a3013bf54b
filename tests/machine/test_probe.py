"""The probe's children, which may hang, crash or talk nonsense, and the one snapshot made of what they say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench.errors import CouldNotMeasureError
from gpubench.machine import probe as probe_module
from gpubench.machine.drivers import CudaFacts, CudaGpu, CudaUnavailableError
from gpubench.machine.gpus import NvmlFacts, read_node
from gpubench.machine.host import RunDelay
from gpubench.machine.probe import Probe, merge, probe, run_stages, watch_errors
from gpubench.machine.stage import main, read_stage
from gpubench.machine.sysfs import SysfsFacts
from gpubench.model.facts.health import HIDDEN
from gpubench.model.facts.snapshot import (
    DriverFacts,
    GpuDirectFacts,
    GpuFacts,
    HostFacts,
    PairFacts,
    PcieLink,
    PciPlace,
    ProbeFailure,
    Snapshot,
)
from gpubench.model.terms.plain import from_plain, to_plain
from gpubench.model.terms.verdict import Origin
from tests.fakes.nvml import FakeGpu, FakeNvml
from tests.fakes.sysfs import H200, Tree

ENVIRONMENT = {"PATH": "/usr/bin:/bin"}
HANG = ["sleep", "300"]
PLACE = PciPlace(host_bridge="pci0000:00", numa_node=1)


def saying(text: str, then: str = "") -> list[str]:
    return [sys.executable, "-S", "-c", f"import os, sys, time; print({text!r}, flush=True); {then}"]


def answer(facts: object) -> list[str]:
    return ["echo", json.dumps(to_plain(facts))]


def bus(number: int) -> str:
    return f"0000:0{number}:00.0"


def nvml(*gpus: FakeGpu) -> NvmlFacts:
    return read_node(FakeNvml(*(gpus or (FakeGpu("06"), FakeGpu("07")))), 64)


def on_bus(*numbers: int) -> SysfsFacts:
    gpus = tuple(
        GpuFacts(
            index=i,
            bus_id=bus(number),
            name="NVIDIA GPU 0x2335",
            uuid=f"GPU-{number}",
            place=PLACE,
            pcie=PcieLink(width=8, max_generation=5),
        )
        for i, number in enumerate(numbers)
    )
    node = Snapshot(
        host="",
        origin=Origin.MEASURED,
        source="",
        machine=HostFacts(cpus=64),
        driver=DriverFacts(version="570.0", open_kernel_module=True),
        gpudirect=GpuDirectFacts(peermem=False),
        gpus=gpus,
        nvswitches=("0000:0f:00.0",),
    )
    return SysfsFacts(
        node=node,
        gpu_drivers=dict.fromkeys((bus(number) for number in numbers), "nvidia"),
        device_files=len(numbers),
    )


def cuda(*numbers: int, visible_devices: str | None = None) -> CudaFacts:
    return CudaFacts(
        gpus=tuple(
            CudaGpu(index=i, bus_id=bus(number), multiprocessors=132, dma_buf=True) for i, number in enumerate(numbers)
        ),
        peers={bus(one): {bus(other): True for other in numbers if other != one} for one in numbers},
        visible_devices=visible_devices,
    )


def test_a_gpu_that_the_setting_names_and_cuda_does_not_show_is_not_hidden() -> None:
    snapshot = merge("node1", None, nvml(), cuda(6, visible_devices="0,1"))
    reason = "CUDA lists 1 of the 2 GPUs that CUDA_VISIBLE_DEVICES names"
    assert snapshot.gpus[1].unknown["cuda_index"] == reason
    assert {pair.unknown["cuda"] for pair in snapshot.pairs} == {reason}
    split = merge("node1", None, nvml(), cuda(6, visible_devices="MIG-a,MIG-b"))
    assert split.gpus[1].unknown["cuda_index"] == HIDDEN


def test_cuda_that_shows_none_of_the_gpus_that_were_named_is_a_failure() -> None:
    absent = CudaFacts(absent="cuInit answered CUDA_ERROR_NO_DEVICE (100)", visible_devices="0")
    assert [each.error for each in merge("node1", None, nvml(), absent).failures] == [absent.absent]


def test_a_gpu_that_cuda_leaves_out_by_itself() -> None:
    snapshot = merge("node1", None, nvml(), cuda(6))
    assert snapshot.pairs[0].unknown["cuda"] == "CUDA does not list it"


@pytest.mark.parametrize("visible_devices", [None, ""])
def test_no_cuda_where_there_are_gpus_is_a_failure_unless_it_was_asked_for(visible_devices: str | None) -> None:
    absent = CudaFacts(absent="cuInit answered CUDA_ERROR_NO_DEVICE (100)", visible_devices=visible_devices)
    snapshot = merge("node1", None, nvml(), absent)
    hidden = visible_devices is not None
    assert [each.error for each in snapshot.failures] == ([] if hidden else [absent.absent])
    reason = HIDDEN if hidden else absent.absent
    assert snapshot.pairs[0].unknown["cuda"] == reason


def test_under_mig_cuda_s_count_is_of_an_instance() -> None:
    split = NvmlFacts(gpus=(GpuFacts(index=0, bus_id=bus(6), mig=True), GpuFacts(index=1, bus_id=bus(7), mig=False)))
    first, second = merge("node1", None, split, cuda(6, 7)).gpus
    assert (first.cuda_index, first.multiprocessors) == (0, None)
    assert first.unknown["multiprocessors"] == "under MIG, CUDA counts the SMs of an instance"
    assert (second.multiprocessors, second.unknown) == (132, {})


def test_under_mig_cuda_lists_one_instance_and_that_is_no_refusal() -> None:
    """Of two split GPUs CUDA shows one instance of the first: `CUDA does not list it` was an ERROR of check."""
    gpus = (GpuFacts(index=0, bus_id=bus(6), mig=True), GpuFacts(index=1, bus_id=bus(7), mig=True))
    pairs = (PairFacts(source="GPU0", destination="GPU1", read="NS", write="NS"),)
    snapshot = merge("node1", None, NvmlFacts(gpus=gpus, pairs=pairs), cuda(6))
    assert snapshot.pairs[0].unknown["cuda"].startswith("under MIG")


def test_a_laptop_is_no_failure() -> None:
    nothing = NvmlFacts(driver=DriverFacts(absent="NVML does not start (NVML Shared Library Not Found)"))
    snapshot = merge("laptop", SysfsFacts(), nothing, CudaFacts(absent="libcuda.so.1 cannot be loaded"))
    assert (snapshot.gpus, snapshot.pairs, snapshot.failures) == ((), (), ())
    assert snapshot.driver.absent == "NVML does not start (NVML Shared Library Not Found)"


@pytest.mark.parametrize(
    ("drivers", "device_files"),
    [({bus(5): "vfio-pci", bus(6): "nvidia", bus(7): "nvidia"}, 3), (dict.fromkeys(map(bus, (5, 6, 7)), "nvidia"), 2)],
    ids=["given to a virtual machine", "of another container"],
)
def test_gpus_of_others_are_not_lost(drivers: dict[str, str], device_files: int) -> None:
    kernel = replace(on_bus(5, 6, 7), gpu_drivers=drivers, device_files=device_files)
    snapshot = merge("node1", kernel, nvml(), None)
    assert [gpu.bus_id for gpu in snapshot.gpus] == [bus(6), bus(7)]
    assert snapshot.gpus_of_others == 1
    assert merge("node1", on_bus(5, 6, 7), nvml(), None).gpus_of_others == 0


def test_a_gpu_lost_before_it_was_named_takes_the_bus_id_that_is_left() -> None:
    facts = nvml(FakeGpu("06"), FakeGpu("07", handle_error=15), FakeGpu("08"))
    snapshot = merge("node1", on_bus(6, 7, 8), facts, None)
    assert [(gpu.index, gpu.bus_id, gpu.lost) for gpu in snapshot.gpus] == [
        (0, bus(6), None),
        (1, bus(7), "GPU is lost"),
        (2, bus(8), None),
    ]
    assert snapshot.gpus[1].place == PLACE
    assert merge("node1", None, facts, None).gpus[1].bus_id is None


@given(st.sets(st.integers(1, 9)), st.sets(st.integers(1, 9)), st.sets(st.integers(1, 9)))
def test_every_gpu_appears_once_and_indices_are_unique(kernel: set[int], driver: set[int], shown: set[int]) -> None:
    facts = NvmlFacts(gpus=tuple(GpuFacts(index=i, bus_id=bus(each)) for i, each in enumerate(sorted(driver))))
    sysfs = replace(on_bus(*sorted(kernel)), gpu_drivers={})
    gpus = merge("node1", sysfs, facts, cuda(*shown)).gpus
    assert {gpu.bus_id for gpu in gpus} == {bus(each) for each in kernel | driver}
    assert [gpu.index for gpu in gpus] == list(range(len(kernel | driver)))
    assert {gpu.bus_id for gpu in gpus if gpu.lost} == {bus(each) for each in kernel - driver}


def test_a_source_that_hangs_costs_only_itself() -> None:
    commands = {"sysfs": answer(on_bus(6, 7)), "nvml": HANG, "cuda": answer(cuda(6, 7))}
    with Probe(ENVIRONMENT, commands) as probing:
        wait_for(probing, "sysfs", "cuda")
        snapshot = probing.snapshot(0.1)
    assert snapshot.failures == (ProbeFailure(stage="nvml", error="no answer within 0.1 s", timed_out=True),)
    assert [gpu.cuda_index for gpu in snapshot.gpus] == [0, 1]


@pytest.mark.parametrize(("waited_s", "timed_out"), [(0.01, True), (0.04, True), (0.06, False)])
def test_a_child_that_waited_for_a_cpu_is_late_and_its_driver_is_not_silent(
    waited_s: float, timed_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_module, "run_delay", lambda _pid: RunDelay(ran_ns=0, waited_ns=int(waited_s * 1e9)))
    monkeypatch.setattr(probe_module, "_LEAST_WAIT_S", 0.02)
    commands = {"sysfs": answer(on_bus(6)), "nvml": HANG, "cuda": answer(cuda(6))}
    with Probe(ENVIRONMENT, commands) as probing:
        wait_for(probing, "sysfs", "cuda")
        (failure,) = probing.snapshot(0.1).failures
    assert (failure.stage, failure.timed_out) == ("nvml", timed_out)
    assert failure.error.startswith("no answer within 0.1 s")


def test_what_was_answered_in_time_counts_though_it_is_read_late() -> None:
    """As on a machine that stalled until the deadline was over."""
    with Probe(ENVIRONMENT, {stage: answer(on_bus(6)) for stage in ("sysfs", "nvml", "cuda")}) as probing:
        wait_for(probing, "sysfs", "nvml", "cuda")
        assert not [failure for failure in probing.snapshot(-1).failures if failure.timed_out]


def wait_for(probing: Probe, *stages: str) -> None:
    """Returns once these children have answered and ended."""
    for stage in stages:
        process = probing._children[stage]._process
        assert process is not None
        assert process.wait(300) == 0


def read_again(replays: int, **commands: list[str]) -> Snapshot:
    """Two GPUs, and the second reading of them after so many more replays."""
    first, second = nvml(FakeGpu("06"), FakeGpu("07")), nvml(FakeGpu("06"), FakeGpu("07"))
    before = merge("node", on_bus(6, 7), first, cuda(6, 7))
    gpus = (replace(second.gpus[0], pcie_replays=(before.gpus[0].pcie_replays or 0) + replays), *second.gpus[1:])
    stages = {"sysfs": answer(on_bus(6, 7)), "nvml": answer(replace(second, gpus=gpus)), "cuda": HANG}
    return watch_errors(before, 60, ENVIRONMENT, stages=stages | commands)


def test_what_is_counted_between_two_readings_is_kept_without_asking_cuda() -> None:
    grown = read_again(12).errors_grown
    assert grown is not None
    assert grown["GPU0"]["PCIe replays"] == 12
    assert not any(grown["GPU1"].values())


@pytest.mark.parametrize("stage", ["sysfs", "nvml"])
def test_where_a_source_does_not_answer_again_there_was_one_reading(stage: str) -> None:
    snapshot = read_again(12, **{stage: saying("", "sys.exit('no')")})
    assert snapshot.errors_grown is None
    assert snapshot.failures == ()


def test_all_sources_may_fail() -> None:
    commands = {
        "sysfs": saying("not JSON", "sys.exit('the last words')"),
        "nvml": saying("half an answer: {", "os.kill(os.getpid(), 11)"),
        "cuda": answer({"gpus": [{"index": "one"}]}),
    }
    snapshot = probe(30, ENVIRONMENT, stages=commands)
    assert {each.stage: each.error for each in snapshot.failures} == {
        "sysfs": "the last words",
        "nvml": "killed by SIGSEGV",
        "cuda": "an answer that is none: CudaFacts.gpus[0].index is 'one'",
    }
    assert not any(each.timed_out for each in snapshot.failures)
    assert (snapshot.gpus, snapshot.driver) == ((), DriverFacts())


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (["/nowhere/at/all"], "it does not start: [Errno 2] No such file or directory: '/nowhere/at/all'"),
        (["true"], "it ended without an answer"),
        (["false"], "it ended without an answer (exit code 1)"),
        (saying("[1, 2]"), "it ended without an answer"),
        (
            saying("x", "sys.stderr.write('why\\n'); sys.stderr.flush(); os.kill(os.getpid(), 6)"),
            "killed by SIGABRT: why",
        ),
        (saying("x", "os.kill(os.getpid(), 40)"), "killed by signal 40"),
    ],
)
def test_ends_without_an_answer(command: list[str], error: str) -> None:
    result = run_stages({"one": command}, ENVIRONMENT, 30)["one"]
    assert (result.document, result.error, result.timed_out) == (None, error, False)


def test_an_answer_counts_though_the_process_then_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "_SECONDS_TO_END", 0.05)
    processes = started(monkeypatch)
    results = run_stages({"one": saying('{"a": 1}', "time.sleep(300)")}, ENVIRONMENT, 30)
    assert results["one"].document == {"a": 1}
    assert processes[0].returncode is None or processes[0].returncode == -9


def test_a_process_that_closed_its_output_and_lives_on_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "_SECONDS_TO_EXIT", 0.05)
    result = run_stages({"one": saying("x", "os.close(1); time.sleep(300)")}, ENVIRONMENT, 30)["one"]
    assert result.error == "it ended without an answer"


def test_a_hanging_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = started(monkeypatch)
    run_stages({"one": HANG}, ENVIRONMENT, 0.2)
    assert processes[0].wait() == -9


def started(monkeypatch: pytest.MonkeyPatch) -> list["subprocess.Popen[bytes]"]:
    """The processes that are started from here on."""
    processes: list[subprocess.Popen[bytes]] = []
    original = subprocess.Popen.__init__

    def remember(self: "subprocess.Popen[bytes]", *arguments: object, **options: object) -> None:
        processes.append(self)
        original(self, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess.Popen, "__init__", remember)
    return processes


def test_the_child_writes_its_facts_as_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Tree(tmp_path).pci("pci0000:00/0000:06:00.0", H200)
    assert main(["sysfs", str(tmp_path)]) == 0
    written = capsys.readouterr().out
    assert written.count("\n") == 1
    assert from_plain(SysfsFacts, json.loads(written)).node.gpus[0].bus_id == bus(6)


def test_the_child_says_in_one_line_what_went_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> NvmlFacts:
        message = "NVML does not answer (Unknown Error)"
        raise CouldNotMeasureError(message, reason="a reason")

    monkeypatch.setattr("gpubench.machine.nvml.read_nvml", fail)
    assert main(["nvml", "/"]) == 3
    assert capsys.readouterr() == ("", "NVML does not answer (Unknown Error)\n")


def test_the_cuda_child_tells_none_from_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(*, absent: bool) -> object:
        message = "no CUDA"
        raise CudaUnavailableError(message, absent=absent)

    monkeypatch.setattr("gpubench.machine.drivers.load_cuda", lambda: load(absent=True))
    environment = {"CUDA_VISIBLE_DEVICES": "1"}
    assert read_stage("cuda", tmp_path, environment) == CudaFacts(absent="no CUDA", visible_devices="1")
    monkeypatch.setattr("gpubench.machine.drivers.load_cuda", lambda: load(absent=False))
    with pytest.raises(CouldNotMeasureError, match="no CUDA"):
        read_stage("cuda", tmp_path, environment)


def test_the_cuda_and_nvml_children_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gpubench.machine.drivers.load_cuda", object)
    monkeypatch.setattr("gpubench.machine.drivers.read_cuda", lambda library, visible: cuda(6, visible_devices=visible))
    assert read_stage("cuda", tmp_path, {}) == cuda(6)
    monkeypatch.setattr("gpubench.machine.nvml.read_nvml", nvml)
    assert read_stage("nvml", tmp_path, {}) == nvml()

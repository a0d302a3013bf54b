"""GPUs as NVML describes them, on a fake that can fail in every way that was met."""

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench.errors import CouldNotMeasureError
from gpubench.machine.gpus import read_node
from gpubench.machine.nvml import read_nvml
from gpubench.model.facts.process import GpuProcess, mps_in_use
from gpubench.model.facts.snapshot import Fabric, GpuFacts, NvlinkPeer
from gpubench.model.terms.units import format_ranges
from tests.fakes.nvml import (
    Clique,
    FabricV1,
    FabricV2,
    FabricV3,
    FabricV4,
    FakeGpu,
    FakeNvml,
    NVMLError,
    fields,
    process,
)


def only(gpu: FakeGpu, **changes: Any) -> GpuFacts:
    library = FakeNvml(gpu)
    for name, value in changes.items():
        setattr(library, name, value)
    return read_node(library, 64).gpus[0]


def test_peers_on_bare_metal() -> None:
    gpu = only(
        FakeGpu(
            replies={
                "nvmlDeviceGetNvLinkRemotePciInfo": SimpleNamespace(busId="00000000:C1:00.0"),
                "nvmlDeviceGetNvLinkRemoteDeviceType": 0,
            }
        )
    )
    assert gpu.nvlinks is not None
    assert (gpu.nvlinks[0].peer, gpu.nvlinks[0].peer_bus_id) == (NvlinkPeer.GPU, "0000:c1:00.0")
    assert gpu.unknown == {}


def without_fields(link: int) -> dict[int, int | None]:
    return {90: 25781}


def test_without_fields_links_are_counted_to_the_first_invalid_index() -> None:
    """As on V100: the functions know what the fields do not."""
    replies = {
        "nvmlDeviceGetCudaComputeCapability": (7, 0),
        "nvmlDeviceGetNvLinkState": lambda link: {0: 1, 1: 3, 2: 0}.get(link, 2),
        "nvmlDeviceGetNvLinkVersion": 2,
    }
    gpu = only(FakeGpu(replies=replies, fields=without_fields))
    assert gpu.nvlinks is not None
    assert [link.active for link in gpu.nvlinks] == [True, None, False]
    assert gpu.unknown["nvlinks.active"] == "Not Supported"
    assert {(link.version, link.raw_gb_s) for link in gpu.nvlinks} == {("2.0", 25.781)}
    assert gpu.nvlinks[0].errors == {"replay": 7, "recovery": 7, "crc_flit": 7}


@pytest.mark.parametrize(("reply", "links", "reason"), [(3, (), None), (2, (), None), (999, None, "Unknown Error")])
def test_a_gpu_without_nvlink_has_none(reply: int, links: tuple[()] | None, reason: str | None) -> None:
    gpu = only(FakeGpu(replies={"nvmlDeviceGetNvLinkState": lambda link: reply}, fields=lambda link: {}))
    assert gpu.nvlinks == links
    assert gpu.unknown.get("nvlinks") == reason


def test_links_are_never_counted_past_the_most_there_can_be() -> None:
    gpu = only(FakeGpu(replies={"nvmlDeviceGetNvLinkState": lambda link: 1}, fields=lambda link: {}))
    assert gpu.nvlinks is not None
    assert len(gpu.nvlinks) == FakeNvml.NVML_NVLINK_MAX_LINKS


def test_a_counter_that_is_not_supported_is_asked_for_once() -> None:
    library = FakeNvml(
        FakeGpu(
            replies={"nvmlDeviceGetNvLinkErrorCounter": NVMLError(3)}, fields=lambda link: fields(link) | {163: None}
        )
    )
    gpu = read_node(library, 64).gpus[0]
    assert gpu.nvlinks is not None
    assert all(link.errors == {"replay": 0, "recovery": 0} for link in gpu.nvlinks)
    assert library.calls.count("nvmlDeviceGetNvLinkErrorCounter") == 1
    assert gpu.unknown["nvlinks.errors.crc_flit"] == "Not Supported"


def test_unknown_numbers_of_a_newer_driver_are_unknown() -> None:
    gpu = only(
        FakeGpu(
            replies={"nvmlDeviceGetNvLinkRemoteDeviceType": 255},
            fields=lambda link: fields(link) | {166: 77},
            fabric={"state": 9},
        )
    )
    assert gpu.nvlinks is not None
    assert (gpu.nvlinks[0].peer, gpu.nvlinks[0].version) == (None, None)
    assert gpu.fabric == Fabric()


GUARDED = {
    "nvmlDeviceGetPciInfo": "bus_id",
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetUUID": "uuid",
    "nvmlDeviceGetCudaComputeCapability": "compute_capability",
    "nvmlDeviceGetMemoryInfo": "memory_bytes",
    "nvmlDeviceGetMigMode": "mig",
    "nvmlDeviceGetEccMode": "ecc",
    "nvmlDeviceGetPersistenceMode": "persistence",
    "nvmlDeviceGetCurrentClocksEventReasons": "throttle_reasons",
    "nvmlDeviceGetRemappedRows": "remapped_rows",
    "nvmlDeviceGetPcieReplayCounter": "pcie_replays",
    "nvmlDeviceGetCpuAffinity": "cpu_affinity",
    "nvmlDeviceGetBAR1MemoryInfo": "bar1_bytes",
    "nvmlDeviceGetComputeRunningProcesses": "processes",
    "nvmlDeviceGetGpuFabricInfoV": "fabric",
}


@pytest.mark.parametrize(("function", "fact"), GUARDED.items())
def test_one_refusal_costs_one_fact(function: str, fact: str) -> None:
    gpu = only(FakeGpu(replies={function: NVMLError(3)}))
    assert getattr(gpu, fact) is None
    assert gpu.unknown[fact] == "Not Supported"
    others = set(GUARDED.values()) - {fact}
    assert all(getattr(gpu, other) is not None for other in others)


@pytest.mark.parametrize(
    ("replies", "margin"),
    [
        ({"nvmlDeviceGetMarginTemperature": 53, "nvmlDeviceGetTemperatureThreshold": lambda _: 90}, 53),
        ({"nvmlDeviceGetTemperatureThreshold": lambda _: 90}, 90 - 34),
        ({}, None),
    ],
)
def test_the_margin_to_the_slowdown_temperature(replies: dict[str, Any], margin: int | None) -> None:
    assert read_node(FakeNvml(FakeGpu(replies=replies)), 64).gpus[0].slowdown_margin_c == margin


def test_a_lost_gpu_is_not_asked_again_and_costs_none_of_the_others() -> None:
    library = FakeNvml(
        FakeGpu("06"), FakeGpu("07", replies={"nvmlDeviceGetName": NVMLError(15)}), FakeGpu("08", handle_error=15)
    )
    gpus = read_node(library, 64).gpus
    assert [gpu.lost for gpu in gpus] == [None, "GPU is lost", "GPU is lost"]
    assert [gpu.bus_id for gpu in gpus] == ["0000:06:00.0", "0000:07:00.0", None]
    assert library.calls.count("nvmlDeviceGetUUID") == 1
    assert gpus[1].nvlinks is None
    assert gpus[1].unknown["nvlinks"] == "GPU is lost"
    assert gpus[0].nvlinks is not None


def test_processes_are_told_once_each() -> None:
    replies = {
        "nvmlDeviceGetComputeRunningProcesses": [process(9, 5), process(3)],
        "nvmlDeviceGetGraphicsRunningProcesses": [process(9, 6), process(4, 1)],
        "nvmlDeviceGetMPSComputeRunningProcesses": NVMLError(3),
    }
    gpu = only(FakeGpu(replies=replies), names={9: b"python3", 4: b""})
    assert gpu.processes == (
        GpuProcess(pid=3),
        GpuProcess(pid=4, memory_bytes=1),
        GpuProcess(pid=9, name="python3", memory_bytes=5),
    )


def test_clients_of_mps_are_marked_and_named() -> None:
    replies = {
        "nvmlDeviceGetComputeRunningProcesses": [process(3, 7)],
        "nvmlDeviceGetGraphicsRunningProcesses": [],
        "nvmlDeviceGetMPSComputeRunningProcesses": [process(5, 2)],
    }
    gpu = only(FakeGpu(replies=replies), names={3: b"/usr/bin/nvidia-cuda-mps-server", 5: b"python3"})
    server, client = gpu.processes or ()
    assert (server.mps, client.mps, client.label) == (False, True, "process 5 (python3) under MPS")
    assert mps_in_use([gpu], {}) == "in use on GPU0"
    assert mps_in_use([replace(gpu, processes=(server,))], {}) == "in use on GPU0"
    alone, pipes = replace(gpu, processes=(GpuProcess(pid=8),)), {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/pipes"}
    assert mps_in_use([alone], {}) == ""
    assert mps_in_use([alone], pipes) == "requested by CUDA_MPS_PIPE_DIRECTORY=/tmp/pipes"
    assert mps_in_use([gpu], pipes) == "in use on GPU0; requested by CUDA_MPS_PIPE_DIRECTORY=/tmp/pipes"


UUID = (ctypes.c_uint8 * 16)(*range(16))


@pytest.mark.parametrize(("newest", "health"), [(FabricV3, 0xAA), (FabricV2, 0xAA), (FabricV1, None)])
def test_the_fabric_in_the_newest_form_there_is(newest: type[Any], health: int | None) -> None:
    fabric = {"state": 3, "status": 0, "cliqueId": 4, "clusterUuid": UUID, "healthMask": 0xAA}
    gpu = only(FakeGpu(fabric=fabric), newest_fabric=int if newest is FabricV1 else newest)
    assert gpu.fabric == Fabric(
        state="completed",
        status="success",
        clique=4,
        cluster_uuid="00010203-0405-0607-0809-0a0b0c0d0e0f",
        health_mask=health,
    )
    assert "fabric" not in gpu.unknown


@pytest.mark.parametrize(("kinds", "expected"), [((0, 1, 2), 9), ((1, 2), None)])
def test_the_fourth_form_lists_cliques_and_that_of_pointers_counts(
    kinds: tuple[int, ...], expected: int | None
) -> None:
    cliques = (Clique * 64)(*(Clique(kind, 9 + number) for number, kind in enumerate(kinds)))
    fabric = {"state": 3, "status": 0, "clusterUuid": UUID, "healthMask": 0xAA}
    gpu = only(
        FakeGpu(fabric=fabric | {"cliques": cliques, "numCliques": len(kinds)}), c_nvmlGpuFabricInfo_v4_t=FabricV4
    )
    assert gpu.fabric is not None
    assert (gpu.fabric.clique, gpu.fabric.health_mask) == (expected, 0xAA)


def test_a_fabric_that_failed_or_has_not_finished() -> None:
    failed = only(FakeGpu(fabric={"state": 3, "status": 999})).fabric
    assert failed is not None
    assert failed.status == "Unknown Error"
    assert only(FakeGpu(fabric={"state": 2, "status": 999})).fabric == Fabric(state="in_progress")


@pytest.mark.parametrize(
    ("level", "path"), [(0, "PIX"), (10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS"), (60, None)]
)
def test_pcie_paths(level: int, path: str | None) -> None:
    replies = {"nvmlDeviceGetTopologyCommonAncestor": level, "nvmlDeviceGetP2PStatus": NVMLError(3)}
    pair = read_node(FakeNvml(*(FakeGpu(bus, replies=replies) for bus in ("06", "07"))), 64).pairs[0]
    assert pair.pcie_path == path
    assert (pair.read, pair.unknown["read"]) == (None, "Not Supported")


@pytest.mark.parametrize("code", [9, 12])
def test_a_host_without_a_driver(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(start_error=code))
    absent = read_nvml().driver.absent
    assert absent == f"NVML does not start ({NVMLError(code)})"


def test_a_driver_of_another_version_than_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(start_error=18))
    with pytest.raises(CouldNotMeasureError, match="version mismatch"):
        read_nvml()


def test_a_driver_that_starts_and_then_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml()

    def fail() -> int:
        raise NVMLError(999)

    library.nvmlDeviceGetCount = fail  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "pynvml", library)
    with pytest.raises(CouldNotMeasureError, match="does not answer"):
        read_nvml()
    assert library.calls == ["nvmlShutdown"]


def test_a_driver_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert len(read_nvml().gpus) == 4


@given(st.sets(st.integers(0, 600)))
def test_ranges_say_exactly_the_cpus(cpus: set[int]) -> None:
    said: set[int] = set()
    ranges = format_ranges(cpus)
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        said |= set(range(int(first), int(last or first) + 1))
    assert said == cpus
    assert ranges.count(",") == max(sum(cpu - 1 not in cpus for cpu in cpus) - 1, 0)


def test_utilization_is_read_and_may_be_missing() -> None:
    busy = FakeGpu(replies={"nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=42)})
    assert (only(busy).utilization_percent, only(FakeGpu()).utilization_percent) == (42, None)

"""Counted errors: of one reading what stands out, of two what came between them, and nothing that is only old."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench.model.facts.health import (
    MEMORY_ERRORS,
    REPLAYS,
    error_counts,
    growth,
    nvlink_errors,
    pcie_errors,
    port_errors,
)
from gpubench.model.facts.snapshot import GpuFacts, PcieErrors, Snapshot
from gpubench.simulated.machine import parse_machine, snapshots

NODE = snapshots(parse_machine("hgx-h100-8"))[0]
COUNTS = st.dictionaries(
    st.sampled_from(["GPU0", "GPU1", "0000:01:00.0", "mlx5_0"]),
    st.dictionaries(st.sampled_from([REPLAYS, "correctable", "link_downed"]), st.integers(0, 2**63)),
)


def with_gpu(number: int, **facts: object) -> Snapshot:
    gpus = [replace(gpu, **facts) if gpu.index == number else gpu for gpu in NODE.gpus]
    return replace(NODE, gpus=tuple(gpus))


def links(gpu: GpuFacts, **errors: int) -> tuple[object, ...]:
    first, *others = gpu.nvlinks or ()
    return replace(first, errors=errors), *others


def with_device(errors: PcieErrors) -> Snapshot:
    first, *others = NODE.pci_devices
    return replace(NODE, pci_devices=(replace(first, errors=errors), *others))


def with_ports(*totals: int) -> Snapshot:
    ports = [replace(port, counters={"symbol_error": 0}) for port in NODE.rdma_ports]
    for number, total in enumerate(totals):
        ports[number] = replace(ports[number], counters={"symbol_error": total})
    return replace(NODE, rdma_ports=tuple(ports))


def old(node: Snapshot) -> Snapshot:
    """The machine after a year: everything has counted something."""
    return replace(
        node,
        gpus=tuple(replace(gpu, pcie_replays=60 + gpu.index, nvlinks=links(gpu, replay=70)) for gpu in node.gpus),
        pci_devices=tuple(
            replace(each, errors=PcieErrors(correctable=400, nonfatal=30, fatal=0, named={"nonfatal.UnsupReq": 30}))
            for each in node.pci_devices
        ),
        rdma_ports=tuple(replace(each, counters={"link_downed": 4, "symbol_error": 3}) for each in node.rdma_ports),
    )


def everything(node: Snapshot) -> list[tuple[str, str]]:
    return [(each.device, each.seen) for find in (pcie_errors, nvlink_errors, port_errors) for each in find(node)]


def test_a_machine_that_has_run_for_a_year_has_nothing_to_say() -> None:
    assert everything(NODE) == []
    assert everything(old(NODE)) == []
    assert everything(replace(old(NODE), errors_grown=growth(error_counts(old(NODE)), error_counts(old(NODE))))) == []


@pytest.mark.parametrize(
    ("node", "found"),
    [
        (with_gpu(2, pcie_replays=1000), [("GPU2", "1,000 PCIe replays since boot, at unknown times")]),
        (with_gpu(2, pcie_replays=999), []),
        (with_gpu(2, nvlinks=links(NODE.gpus[2], replay=1000)),
         [("GPU2", "1,000 replay on link 0 since boot, at unknown times")]),
        (with_gpu(2, nvlinks=links(NODE.gpus[2], replay=999)), []),
        (with_device(PcieErrors(correctable=999)), []),
        (with_device(PcieErrors(correctable=5, nonfatal=11, named={"nonfatal.UnsupReq": 11})), []),
        (
            with_device(PcieErrors(correctable=5, nonfatal=11, named={"nonfatal.CmpltTO": 11})),
            [(NODE.pci_devices[0].bus_id, "11 nonfatal.CmpltTO since boot, at unknown times")],
        ),
        (
            with_device(PcieErrors(fatal=1, named={"fatal.ACSViol": 1})),
            [(NODE.pci_devices[0].bus_id, "1 fatal.ACSViol since boot, at unknown times")],
        ),
        (with_ports(999), []),
        (with_ports(1000), [("mlx5_0", "1,000 symbol_error since boot, at unknown times")]),
        (with_ports(*[2000] * 8), []),
        (with_ports(*[100_000] * 8), [(port.nic, "100,000 symbol_error since boot, at unknown times")
                                      for port in NODE.rdma_ports]),
    ],
)  # fmt: skip
def test_of_one_reading_what_stands_out(node: Snapshot, found: list[tuple[str, str]]) -> None:
    assert everything(node) == found


@pytest.mark.parametrize(
    ("grown", "found"),
    [
        ({"GPU1": {REPLAYS: 10}}, []),
        ({"GPU1": {REPLAYS: 11}}, [("GPU1", "11 PCIe replays during this run", False)]),
        ({"GPU1": {"replay on link 0": 6, "crc_flit on link 0": 4}}, []),
        ({"GPU1": {"replay on link 0": 6, "crc_flit on link 0": 5}},
         [("GPU1", "6 replay on link 0, 5 crc_flit on link 0 during this run", False)]),
        ({"GPU1": {"recovery on link 0": 1}}, [("GPU1", "1 recovery on link 0 during this run", True)]),
        ({NODE.pci_devices[0].bus_id: {"correctable": 10}}, []),
        ({NODE.pci_devices[0].bus_id: {"correctable": 10, "nonfatal": 1}},
         [(NODE.pci_devices[0].bus_id, "1 nonfatal during this run", True)]),
        ({"mlx5_1": {"symbol_error": 10}}, []),
        ({"mlx5_1": {"link_downed": 1}}, [("mlx5_1", "1 link_downed during this run", True)]),
    ],
)  # fmt: skip
def test_of_two_readings_what_came_between_them(
    grown: Mapping[str, Mapping[str, int]], found: list[tuple[str, str, bool]]
) -> None:
    for node in (NODE, old(NODE), with_gpu(3, pcie_replays=9000)):
        watched = replace(node, errors_grown=grown)
        seen = [each for find in (pcie_errors, nvlink_errors, port_errors) for each in find(watched)]
        assert [(each.device, each.seen, each.grave) for each in seen] == found
        assert all(each.meanwhile for each in seen)


def test_every_counter_that_could_be_read_is_in_it() -> None:
    counts = error_counts(old(NODE))
    assert counts["GPU3"][REPLAYS] == 63
    assert counts["GPU3"]["replay on link 0"] == 70
    assert counts["GPU3"][MEMORY_ERRORS] == 0
    assert counts["mlx5_0"] == {"link_downed": 4, "symbol_error": 3}
    assert counts[NODE.pci_devices[0].bus_id] == {"correctable": 400, "nonfatal": 30, "fatal": 0}
    assert error_counts(with_gpu(0, pcie_replays=None, memory_errors=None, nvlinks=None))["GPU0"] == {}


@given(COUNTS, COUNTS)
def test_growth_is_of_counters_that_both_have_and_never_negative(
    before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]
) -> None:
    grown = growth(before, after)
    assert set(grown) == set(before) & set(after)
    for device, counts in grown.items():
        assert set(counts) == set(before[device]) & set(after[device])
        assert all(0 <= count <= after[device][name] for name, count in counts.items())
    assert all(count == 0 for counts in growth(after, after).values() for count in counts.values())


def pair_of_gpus(*counts: int | None) -> Snapshot:
    """GPUs that replayed so many PCIe packets, None where the driver does not tell, and as many packets of NVLink."""
    gpus = [
        replace(gpu, pcie_replays=count, nvlinks=None if count is None else links(gpu, replay=count))
        for gpu, count in zip(NODE.gpus, counts, strict=False)
    ]
    return replace(NODE, gpus=tuple(gpus))


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        ((2000, 200), ["GPU0"]),
        ((1999, 200), []),
        ((2000, None, 200), ["GPU0"]),
        ((200, 2000), ["GPU1"]),
        ((1000,), ["GPU0"]),
    ],
)
def test_a_total_stands_out_from_those_of_siblings_alone(counts: tuple[int | None, ...], found: list[str]) -> None:
    node = pair_of_gpus(*counts)
    for errors in (list(pcie_errors(node)), list(nvlink_errors(node))):
        assert [each.device for each in errors] == found
        assert all(each.expected == f"few (its siblings have {200 if len(counts) > 1 else 0})" for each in errors)


def test_what_is_expected_follows_from_how_grave_an_error_is() -> None:
    (fatal,) = pcie_errors(with_device(PcieErrors(fatal=1)))
    assert (fatal.expected, fatal.total) == ("none", 1)
    (many,) = pcie_errors(with_device(PcieErrors(correctable=1000)))
    assert (many.expected, many.grave, many.total) == ("fewer than 1,000", False, 1000)
    assert list(pcie_errors(with_device(PcieErrors(nonfatal=10, named={"nonfatal.CmpltTO": 10})))) == []

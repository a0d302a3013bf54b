"""p2pBandwidthLatencyTest's matrices, made here after the source of the CUDA sample."""

import pytest

from gpubench.errors import UsageError
from gpubench.model.results.report import PairRow
from gpubench.readers.results.p2p_bandwidth_latency import read, recognises

WRITES = "(P2P Writes) "


def devices(model: str = "NVIDIA L4") -> str:
    line = "Device: {0}, {1}, pciBusID: {2}, pciDeviceID: 0, pciDomainID:0\n"
    return (
        "[P2P (Peer-to-Peer) GPU Bandwidth Latency Test]\n" + line.format(0, model, "3") + line.format(1, model, "4a")
    )


def access(can: str = "CAN") -> str:
    return f"Device=0 {can} Access Peer Device=1\nDevice=1 {can} Access Peer Device=0\n"


def matrix(title: str, one: float, other: float, corner: str = "  D\\D") -> str:
    return f"{title}\n {corner}     0      1 \n     0 239.70  {one:.2f} \n     1  {other:.2f} 240.15 \n"


def bandwidths(on: tuple[float, float] = (25.4, 25.6), label: str = WRITES) -> str:
    return (
        matrix("Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)", 16.4, 16.6)
        + matrix(f"Unidirectional P2P=Enabled Bandwidth {label}Matrix (GB/s)", *on)
        + matrix("Bidirectional P2P=Disabled Bandwidth Matrix (GB/s)", 17.0, 17.1)
        + matrix("Bidirectional P2P=Enabled Bandwidth Matrix (GB/s)", 50.4, 50.6)
    )


def latencies() -> str:
    return (
        matrix("P2P=Disabled Latency Matrix (us)", 12.0, 13.0, "  GPU")
        + "\n   CPU     0      1 \n     0   1.49  4.41 \n     1  4.65   1.50 \n"
        + matrix(f"P2P=Enabled Latency {WRITES}Matrix (us)", 1.25, 1.6, "  GPU")
    )


def read_rows(text: str) -> dict[tuple[object, ...], PairRow]:
    assert recognises(text)
    return {(row.source, row.direction, row.peer, row.size_bytes): row for row in read(text, "p2p.txt").pairs}


def test_every_matrix_but_those_that_nothing_compares_with() -> None:
    rows = read_rows(devices() + access() + bandwidths() + latencies())
    size = 160_000_000
    found = {key: row.bandwidth_gb_s for key, row in rows.items() if key[0] == "GPU0" and key[3] == size}
    assert found == {
        ("GPU0", "write", "off", size): 16.4,
        ("GPU0", "write", "on", size): 25.4,
        ("GPU0", "both", "on", size): 50.4,
    }
    late = rows["GPU0", "write", "on", 16]
    assert late.latency_us == 1.25
    assert late.bandwidth_gb_s == pytest.approx(16 / 1.25e3)
    assert rows["GPU1", "write", "off", 16].latency_us == 13.0
    assert len(rows) == 10
    assert (late.source_bus_id, late.destination_bus_id) == ("0000:03:00.0", "0000:4a:00.0")
    assert read(devices() + bandwidths(), "x").circumstances.gpus == ("NVIDIA L4",) * 2


def test_a_row_of_reads_and_of_old_versions_is_the_destination() -> None:
    reads = matrix("Unidirectional P2P=Enabled Bandwidth (P2P Reads) Matrix (GB/s)", 20.0, 21.0)
    size = 160_000_000
    rows = read_rows(devices() + bandwidths() + reads)
    assert rows["GPU1", "read", "on", size].bandwidth_gb_s == 20.0
    old = read_rows(devices() + bandwidths(label=""))
    assert (old["GPU1", "write", "on", size].bandwidth_gb_s, old["GPU1", "write", "off", size].bandwidth_gb_s) == (
        25.4,
        16.4,
    )


def test_what_cuda_refuses_has_no_bandwidth_with_peer_access() -> None:
    rows = read_rows(devices() + access("CANNOT") + bandwidths())
    assert {row.bandwidth_gb_s for row in rows.values() if row.peer == "on"} == {None}
    assert {row.bandwidth_gb_s for row in rows.values() if row.peer == "off"} == {16.4, 16.6}


def test_options_of_the_command() -> None:
    rows = read_rows(f"$ ./p2pBandwidthLatencyTest --numElems=1000 --sm_copy\n{devices()}{bandwidths()}")
    assert {(row.size_bytes, row.peer, row.engine) for row in rows.values()} == {
        (4000, "on", "sm"),
        (4000, "off", "ce"),
    }


def test_a_matrix_that_is_cut_is_left_out_and_named() -> None:
    text = devices() + bandwidths()
    found = read(text[: text.index("     1  25.60")], "x")
    assert not found.complete
    assert found.left_out == ("Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix: without GPU1",)
    found = read(text.replace("  25.60 240.15", "  25.6"), "x")
    assert found.left_out[0].endswith("not a valid row")
    with pytest.raises(UsageError, match="no measured values"):
        read("P2P=Enabled Latency Matrix (us)\n", "x")


def test_other_numbers_below_are_no_rows() -> None:
    assert read(devices() + bandwidths() + " 0  1  2\n 0 N/A 9.5\n 65536 5000 1.0 1.0\n", "x").complete

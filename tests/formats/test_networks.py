"""Network files of other programs: the formats that their own readers take."""

import json
import re
from collections.abc import Mapping, Sequence

import pytest
import yaml

from gpubench.formats.networks import DATA, EXPERT, NETWORKS, PIPELINE, SUFFIXES, TENSOR, ExportedFabric, network_text
from gpubench.model.results.plan import CurveRow

RANKS = 8


def curve(name: str, small_us: float, large_us: float, ranks: int = RANKS) -> Sequence[CurveRow]:
    return [
        CurveRow(
            collective=name,
            ranks=ranks,
            nodes=1,
            size_bytes=size,
            time_us=time,
            spread_percent=1.0,
            origin="measured",
            source=f"{name}.json",
        )
        for size, time in ((1024, small_us), (10**9, large_us))
    ]


INSIDE: Mapping[str, Sequence[CurveRow]] = {
    "allreduce": curve("allreduce", 14.0, 5000.0),
    "allgather": curve("allgather", 10.0, 2500.0),
    "reducescatter": curve("reducescatter", 10.0, 2500.0),
    "alltoall": curve("alltoall", 12.0, 2500.0),
}
FABRIC = ExportedFabric(
    curves={TENSOR: INSIDE, DATA: INSIDE, EXPERT: INSIDE, PIPELINE: {"sendrecv": curve("sendrecv", 6.0, 2500.0, 2)}},
    link_gb_s=450.0,
    gpus_per_node=RANKS,
    nodes=1,
    processor_usage=0.15,
)
"""All-reduce 200 GB/s of algorithm bandwidth, 350 of bus bandwidth; the others 400, and 350 too; sends 400."""


def test_calculon_computes_what_was_measured() -> None:
    """Its own formula, of calculon/network.py: latency + size · scalar · (1 + offset/n)/(bandwidth · efficiency)."""
    (network,) = json.loads(network_text("calculon", FABRIC))["networks"]
    assert set(network) == {
        "bandwidth",
        "efficiency",
        "size",
        "latency",
        "ops",
        "must_be_filled",
        "processor_usage",
    }
    assert set(network["ops"]) == {"p2p", "reduce_scatter", "all_gather", "all_reduce"}
    for name, seconds in (("all_reduce", 5000e-6), ("all_gather", 2500e-6), ("reduce_scatter", 2500e-6)):
        scalar, offset = network["ops"][name]
        size = 1e9 * scalar
        size += size / RANKS * offset
        assert size / (network["bandwidth"] * 1e9 * network["efficiency"]) == pytest.approx(seconds, rel=1e-3)
    scalar, offset = network["ops"]["p2p"]
    assert offset is None
    assert 1e9 * scalar / (network["bandwidth"] * 1e9 * network["efficiency"]) == pytest.approx(2500e-6, rel=1e-3)
    assert 0 < network["efficiency"] <= 1


def test_astra_sim_has_a_dimension_a_level() -> None:
    document = yaml.safe_load(network_text("astra-sim", FABRIC))
    assert document == {
        "topology": ["Switch"],
        "npus_count": [8],
        "bandwidth": [350.0],
        "latency": [1000.0],
    }


def test_several_nodes_are_a_second_level() -> None:
    fabric = ExportedFabric(
        curves=FABRIC.curves, link_gb_s=450.0, gpus_per_node=8, nodes=4, processor_usage=0.1, nic_gb_s=50.0
    )
    assert yaml.safe_load(network_text("astra-sim", fabric))["npus_count"] == [8, 4]
    inner, outer = json.loads(network_text("calculon", fabric))["networks"]
    assert (inner["must_be_filled"], outer["must_be_filled"], outer["bandwidth"]) == (True, False, 50.0)


def test_simai_is_read_by_its_own_rules() -> None:
    """The first line is passed over; a line that ends in a colon begins a section; of a key what precedes a comma."""
    section, found = "", dict[tuple[str, str], str]()
    for line in network_text("simai", FABRIC).splitlines()[1:]:
        if line.endswith(":"):
            section = line[:-1]
            continue
        key, _, value = line.partition(":")
        found[section, key.partition(",")[0]] = value.strip()
    assert found["TP", "allreduce"] == "350.00"
    assert found["PP", "busbw"] == "400.00"
    assert {key for key, _ in found} == {"TP", "DP", "EP", "PP"}
    assert all(re.fullmatch(r"null|\d+\.\d\d", value) for value in found.values())


def test_every_program_has_a_suffix() -> None:
    assert NETWORKS.keys() == SUFFIXES.keys()

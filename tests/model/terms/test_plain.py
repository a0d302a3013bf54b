import json
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta, Struct

from gpubench.errors import UsageError
from gpubench.model.facts.process import GpuProcess, RankFacts
from gpubench.model.facts.snapshot import (
    DriverFacts,
    Fabric,
    GpuDirectFacts,
    GpuFacts,
    HostFacts,
    NicFacts,
    NicKind,
    NumaNode,
    NvLink,
    NvlinkPeer,
    PairFacts,
    PcieLink,
    PciPlace,
    PciSwitch,
    ProbeFailure,
    RemappedRows,
    Snapshot,
)
from gpubench.model.terms.plain import from_plain, is_nested_deeper, to_plain
from gpubench.model.terms.verdict import Origin
from tests.examples import examples

TEXT = st.text(max_size=8)
TEXTS = st.none() | TEXT
COUNT = st.none() | st.integers(0, 2**40)
TRUTH = st.none() | st.booleans()
RATE = st.none() | st.floats(allow_nan=False, allow_infinity=False)
REASONS = st.dictionaries(TEXT, TEXT, max_size=2)


def several(of: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, max_size=2).map(tuple)


PCIE = st.builds(PcieLink, generation=COUNT, width=COUNT, max_generation=COUNT, max_width=COUNT)
PLACE = st.builds(PciPlace, host_bridge=TEXTS, root_port=TEXTS, switches=several(TEXT), numa_node=COUNT)
NVLINK = st.builds(
    NvLink,
    number=st.integers(0, 17),
    active=TRUTH,
    version=TEXTS,
    raw_gb_s=RATE,
    peer=st.none() | st.sampled_from(NvlinkPeer),
    peer_bus_id=TEXTS,
    errors=st.dictionaries(TEXT, st.integers(0, 9), max_size=2),
)
GPU = st.builds(
    GpuFacts,
    index=st.integers(0, 15),
    bus_id=TEXTS,
    mig=TRUTH,
    throttle_reasons=st.none() | several(TEXT),
    remapped_rows=st.none()
    | st.builds(
        RemappedRows,
        correctable=st.integers(0, 9),
        uncorrectable=st.integers(0, 9),
        pending=st.booleans(),
        failure=st.booleans(),
    ),
    pcie=PCIE,
    place=PLACE,
    nvlinks=st.none() | several(NVLINK),
    fabric=st.none() | st.builds(Fabric, state=TEXTS, status=TEXTS, clique=COUNT, health_mask=COUNT),
    processes=st.none() | several(st.builds(GpuProcess, pid=st.integers(0, 9), name=TEXTS, memory_bytes=COUNT)),
    lost=TEXTS,
    unknown=REASONS,
)
NIC = st.builds(
    NicFacts,
    name=TEXT,
    kind=st.sampled_from(NicKind),
    rate_gbit_s=RATE,
    interfaces=several(TEXT),
    pcie=PCIE,
    place=PLACE,
    unknown=REASONS,
)
PAIR = st.builds(PairFacts, source=TEXT, destination=TEXT, path=TEXTS, cuda=TRUTH, read=TEXTS, unknown=REASONS)
SNAPSHOT = st.builds(
    Snapshot,
    host=TEXT,
    origin=st.sampled_from(Origin),
    source=TEXT,
    taken_at=TEXTS,
    machine=st.builds(
        HostFacts,
        kernel=TEXTS,
        cpus=COUNT,
        numa_nodes=several(st.builds(NumaNode, number=st.integers(0, 8), cpus=TEXT)),
        virtual_machine=TRUTH,
    ),
    driver=st.builds(DriverFacts, version=TEXTS, open_kernel_module=TRUTH, absent=TEXTS),
    gpudirect=st.builds(GpuDirectFacts, peermem=TRUTH, dma_buf=TRUTH),
    gpus=several(GPU),
    nics=several(NIC),
    switches=several(st.builds(PciSwitch, bus_id=TEXT, link=PCIE, place=PLACE)),
    nvswitches=several(TEXT),
    pairs=several(PAIR),
    failures=several(st.builds(ProbeFailure, stage=TEXT, error=TEXT, timed_out=st.booleans())),
    schema_version=st.integers(1, 9),
)


@given(SNAPSHOT)
@settings(max_examples=examples(30))
def test_a_snapshot_comes_back_from_json(snapshot: Snapshot) -> None:
    assert from_plain(Snapshot, json.loads(json.dumps(to_plain(snapshot)))) == snapshot


@given(
    st.builds(
        RankFacts,
        rank=st.integers(0, 9),
        host=TEXT,
        node=st.integers(0, 9),
        local_rank=st.integers(0, 9),
        pid=st.integers(1, 9),
        namespaces=st.dictionaries(TEXT, st.integers(0, 2**40), max_size=2),
        shm_device=COUNT,
        device_files=several(TEXT),
        environment=REASONS,
    )
)
def test_the_facts_of_a_rank_come_back_from_json(facts: RankFacts) -> None:
    assert from_plain(RankFacts, json.loads(json.dumps(to_plain(facts)))) == facts


def test_defaults_are_left_out_and_false_is_not() -> None:
    assert to_plain(GpuFacts(index=0)) == {"index": 0}
    assert to_plain(GpuFacts(index=0, mig=False, nvlinks=())) == {"index": 0, "mig": False, "nvlinks": []}
    assert to_plain(NicFacts(name="a", kind=NicKind.ROCE)) == {"name": "a", "kind": "roce"}


def test_enums_and_tuples_are_themselves_again() -> None:
    nic = from_plain(NicFacts, {"name": "a", "kind": "efa", "interfaces": ["x"]})
    assert nic.kind is NicKind.EFA
    assert nic.interfaces == ("x",)


def test_whole_numbers_are_read_as_rates() -> None:
    rate = from_plain(NicFacts, {"name": "a", "kind": "efa", "rate_gbit_s": 400}).rate_gbit_s
    assert rate == 400
    assert isinstance(rate, float)


@pytest.mark.parametrize(
    ("plain", "seen", "expected"),
    [
        ([], "line 3 is []", "`object`"),
        ({"index": "0"}, "line 3.index is '0'", "`int`"),
        ({"index": True}, "line 3.index is True", "`int`"),
        ({"index": 0, "unknown": {"ecc": 1}}, "line 3.unknown[...] is `int`", "`str`"),
        ({"index": 0, "nvlinks": [{"number": 0}, 3]}, "line 3.nvlinks[1] is 3", "`object`"),
        ({"index": 0, "nvlinks": [{"number": 0, "peer": "gpus"}]}, "line 3.nvlinks[0].peer is 'gpus'", ""),
        ({"index": 0, "nvlinks": [{"number": 0, "raw_gb_s": 10**400}]}, "line 3.nvlinks[0].raw_gb_s is 1000", ""),
        ({}, "line 3 has no field 'index'", ""),
        ({"index": 0, "colour": "red"}, "line 3 has an unknown field 'colour'", ""),
    ],
)
def test_errors_name_the_place(plain: Any, seen: str, expected: str) -> None:
    with pytest.raises(UsageError) as raised:
        from_plain(GpuFacts, plain, "line 3")
    assert raised.value.seen.startswith(seen)
    assert raised.value.expected.startswith(expected)
    assert ("newer gpubench" in raised.value.reason) == ("unknown field" in seen)


class Bounded(Struct, frozen=True):
    sizes: tuple[Annotated[int, Meta(ge=1, le=64)], ...] = ()
    table: dict[str, tuple[PcieLink, ...]] = {}


def test_bounds_and_tables_of_records_are_read() -> None:
    bounded = Bounded((1, 64), {"a": (PcieLink(width=4),), "b": ()})
    assert to_plain(bounded) == {"sizes": [1, 64], "table": {"a": [{"width": 4}], "b": []}}
    assert from_plain(Bounded, to_plain(bounded)) == bounded
    with pytest.raises(UsageError, match=r"Bounded\.sizes\[1\] is 0"):
        from_plain(Bounded, {"sizes": [2, 0]})


@pytest.mark.parametrize(("plain", "levels"), [(1, 0), ([], 1), ({"a": 1}, 1), ([1, {"a": [2]}, []], 3)])
def test_nesting_is_counted_in_levels(plain: Any, levels: int) -> None:
    assert not is_nested_deeper(plain, levels)
    assert is_nested_deeper([plain], levels)

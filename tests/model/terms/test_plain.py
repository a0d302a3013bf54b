import json
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from gpubench.model.terms.plain import Within, from_plain, is_nested_deeper, to_plain
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
        ([], "GpuFacts is []", "a value of type dict"),
        ({"index": "0"}, "GpuFacts.index is '0'", "a value of type int"),
        ({"index": 1.5}, "GpuFacts.index is 1.5", "a value of type int"),
        ({"index": True}, "GpuFacts.index is True", "a value of type int"),
        ({"index": None}, "GpuFacts.index is None", "a value of type int"),
        ({"index": 0, "mig": 1}, "GpuFacts.mig is 1", "a value of type bool"),
        ({"index": 0, "name": 7}, "GpuFacts.name is 7", "a value of type str"),
        ({"index": 0, "pcie": None}, "GpuFacts.pcie is None", "a value of type dict"),
        ({"index": 0, "unknown": []}, "GpuFacts.unknown is []", "a value of type dict"),
        ({"index": 0, "unknown": {"ecc": 1}}, "GpuFacts.unknown.ecc is 1", "a value of type str"),
        ({"index": 0, "nvlinks": {}}, "GpuFacts.nvlinks is {}", "a value of type list"),
        ({"index": 0, "nvlinks": [{"number": 0}, 3]}, "GpuFacts.nvlinks[1] is 3", "a value of type dict"),
        (
            {"index": 0, "nvlinks": [{"number": 0, "raw_gb_s": True}]},
            "GpuFacts.nvlinks[0].raw_gb_s is True",
            "a value of type float",
        ),
        (
            {"index": 0, "nvlinks": [{"number": 0, "peer": "gpus"}]},
            "GpuFacts.nvlinks[0].peer is 'gpus'",
            "one of gpu, switch, cpu",
        ),
        ({"index": 0, "nvlinks": [{"number": 0, "peer": []}]}, "GpuFacts.nvlinks[0].peer is []", "one of gpu"),
        ({}, "GpuFacts has no field 'index'", "index, which every GpuFacts has"),
        ({"index": 0, "colour": "red"}, "GpuFacts has an unknown field 'colour'", "index, bus_id, name"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(plain: Any, seen: str, expected: str) -> None:
    with pytest.raises(UsageError) as raised:
        from_plain(GpuFacts, plain)
    assert raised.value.seen == seen
    assert raised.value.expected.startswith(expected)


def test_an_unknown_field_has_a_likely_reason() -> None:
    with pytest.raises(UsageError) as raised:
        from_plain(PcieLink, {"lanes": 4})
    assert "newer gpubench" in raised.value.reason


def test_a_number_beyond_every_rate_is_refused() -> None:
    with pytest.raises(UsageError, match=r"NvLink\.raw_gb_s is a number beyond"):
        from_plain(NvLink, {"number": 0, "raw_gb_s": 10**400})


def test_the_place_can_be_named() -> None:
    with pytest.raises(UsageError, match="line 3 has no field 'number'"):
        from_plain(NvLink, {}, "line 3")


@dataclass(frozen=True)
class Nested:
    table: dict[str, tuple[PcieLink, ...]]


def test_mappings_of_lists_of_dataclasses_are_read() -> None:
    nested = Nested(table={"a": (PcieLink(width=4),), "b": ()})
    assert to_plain(nested) == {"table": {"a": [{"width": 4}], "b": []}}
    assert from_plain(Nested, to_plain(nested)) == nested
    with pytest.raises(UsageError, match=r"Nested\.table\.a\[0\]\.width is 'x4'"):
        from_plain(Nested, {"table": {"a": [{"width": "x4"}]}})


@dataclass(frozen=True)
class Bounded:
    sizes: tuple[Annotated[int, Within(1, 64)], ...] = ()
    seconds: Annotated[float, Within(0.5)] | None = None
    note: Annotated[str, "no bound"] = ""


@pytest.mark.parametrize("plain", [{}, {"sizes": [1, 64], "seconds": 1}, {"seconds": None, "note": "x"}])
def test_numbers_within_their_bounds_are_read(plain: dict[str, Any]) -> None:
    assert to_plain(from_plain(Bounded, plain)) == {key: held for key, held in plain.items() if held is not None}


@pytest.mark.parametrize(
    ("plain", "seen", "expected"),
    [
        ({"sizes": [2, 0]}, "line 3.sizes[1] is 0", "1 to 64"),
        ({"sizes": [65]}, "line 3.sizes[0] is 65", "1 to 64"),
        ({"seconds": 0.25}, "line 3.seconds is 0.25", "0.5 or more"),
        ({"sizes": ["2"]}, "line 3.sizes[0] is '2'", "a value of type int"),
    ],
)
def test_a_number_outside_its_bounds_is_refused_with_its_place(plain: Any, seen: str, expected: str) -> None:
    with pytest.raises(UsageError) as raised:
        from_plain(Bounded, plain, "line 3")
    assert (raised.value.seen, raised.value.expected) == (seen, expected)


@pytest.mark.parametrize(("plain", "levels"), [(1, 0), ([], 1), ({"a": 1}, 1), ([1, {"a": [2]}, []], 3)])
def test_nesting_is_counted_in_levels(plain: Any, levels: int) -> None:
    assert not is_nested_deeper(plain, levels)
    assert is_nested_deeper([plain], levels)

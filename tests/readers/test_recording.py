import contextlib
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubench.errors import UsageError
from gpubench.model.report import Origin
from gpubench.model.snapshot import (
    SNAPSHOT_VERSION,
    DriverFacts,
    Fabric,
    GpuFacts,
    GpuProcess,
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
from gpubench.readers.recording import is_recording, read_snapshot, write_snapshot

LINKS = tuple(NvLink(number=i, active=True, version="4.0", raw_gb_s=26.5625) for i in range(18))
SNAPSHOT = Snapshot(
    host="node3",
    origin=Origin.SIMULATED,
    source="a test",
    gpus=(GpuFacts(index=0, bus_id="0000:1b:00.0", nvlinks=LINKS), GpuFacts(index=1, nvlinks=())),
    pairs=(PairFacts(source="GPU0", destination="GPU1", path="NV18"), PairFacts(source="GPU1", destination="GPU0")),
    nvswitches=("0000:c4:00.0",),
)


def refusal(text: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read_snapshot(text, "node.json")
    assert caught.value.seen.startswith("node.json")
    assert caught.value.expected
    assert caught.value.reason
    assert caught.value.next_step
    return caught.value


def test_one_device_a_line_and_long_lists_of_links_too() -> None:
    lines = write_snapshot(SNAPSHOT).split("\n")
    link = '"active": true, "version": "4.0", "raw_gb_s": 26.5625}'
    assert lines == [
        "{",
        '  "schema_version": 1,',
        '  "host": "node3",',
        '  "origin": "simulated",',
        '  "source": "a test",',
        '  "gpus": [',
        '    {"index": 0, "bus_id": "0000:1b:00.0", "nvlinks": [',
        *(f'      {{"number": {i}, {link}{"," if i < 17 else ""}' for i in range(18)),
        "    ]},",
        '    {"index": 1, "nvlinks": []}',
        "  ],",
        '  "nvswitches": ["0000:c4:00.0"],',
        '  "pairs": [',
        '    {"source": "GPU0", "destination": "GPU1", "path": "NV18"},',
        '    {"source": "GPU1", "destination": "GPU0"}',
        "  ]",
        "}",
        "",
    ]


def test_a_long_object_without_lists_and_a_long_text_stay_on_their_line() -> None:
    long = replace(SNAPSHOT, source="x" * 300, machine=HostFacts(product="y" * 300))
    text = write_snapshot(long)
    assert read_snapshot(text, "node.json") == long
    assert max(map(len, text.split("\n"))) > 300


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (Origin.MEASURED, Origin.RECORDED),
        (Origin.RECORDED, Origin.RECORDED),
        (Origin.SIMULATED, Origin.SIMULATED),
    ],
)
def test_what_was_measured_is_recorded_when_read(written: Origin, read: Origin) -> None:
    assert read_snapshot(write_snapshot(replace(SNAPSHOT, origin=written)), "x").origin is read


def test_a_byte_order_mark_does_no_harm() -> None:
    assert read_snapshot("\ufeff" + write_snapshot(SNAPSHOT), "x") == SNAPSHOT
    assert is_recording("\ufeff {")
    assert not is_recording("[1,0]<stdout>:")


def test_broken_json_is_refused_with_line_and_column() -> None:
    error = refusal('{\n  "schema_version": 1,\n  "host" "x"}')
    assert error.seen.startswith("node.json, line 3: the JSON is broken at column 10: ")


def test_a_recording_cut_in_half_is_refused_with_its_last_line() -> None:
    text = write_snapshot(SNAPSHOT)
    cut = text[: text.index('"number": 9')]
    assert refusal(cut).seen.startswith(f"node.json, line {cut.count(chr(10)) + 1}: the JSON is broken at column ")


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("[1]", "node.json, line 1: the JSON is no object"),
        ("{}", "node.json: the JSON has no schema_version"),
        ('{"schema_version": true}', "node.json: the JSON has schema_version True"),
        ('{"schema_version": "1"}', "node.json: the JSON has schema_version '1'"),
        ('{"schema_version": 0}', "node.json: the JSON has schema_version 0"),
        ('{"schema_version": 1, "host": NaN}', "node.json: the JSON has NaN, which is no number"),
        ('{"schema_version": 1, "host": 1e999}', "node.json: the JSON has 1e999, which is no number"),
        ('{"schema_version": 1}', "node.json: snapshot has no field 'host'"),
        ('{"schema_version": 1, "color": 1}', "node.json: snapshot has an unknown field 'color'"),
        (
            '{"schema_version": 1, "host": "a", "origin": "recorded", "source": "b", "gpus": [{"index": "0"}]}',
            "node.json: snapshot.gpus[0].index is '0'",
        ),
        ("[" * 100_000, "node.json: the JSON is nested too deeply"),
    ],
)
def test_what_is_no_snapshot_is_refused_by_what_is_wrong(text: str, seen: str) -> None:
    assert refusal(text).seen == seen


def test_a_number_with_too_many_digits_is_refused() -> None:
    assert refusal('{"schema_version": ' + "1" * 5000 + "}").seen.startswith("node.json: the JSON has ")


def test_a_newer_snapshot_is_refused_before_its_fields_are_read() -> None:
    error = refusal(json.dumps({"schema_version": SNAPSHOT_VERSION + 1, "color": 1}))
    assert error.seen == f"node.json: the snapshot has schema_version {SNAPSHOT_VERSION + 1}"
    assert error.reason == "a newer gpubench recorded it"


maybe_number = st.none() | st.integers()
maybe_text = st.none() | st.text(max_size=200)
maybe_flag = st.none() | st.booleans()
maybe_rate = st.none() | st.floats(allow_nan=False, allow_infinity=False)
reasons = st.dictionaries(st.text(), st.text(), max_size=3)
places = st.builds(
    PciPlace, host_bridge=maybe_text, switches=st.lists(st.text(), max_size=3).map(tuple), numa_node=maybe_number
)
pcie = st.builds(PcieLink, generation=maybe_number, width=maybe_number, max_width=maybe_number)
nvlinks = st.builds(
    NvLink,
    active=maybe_flag,
    raw_gb_s=maybe_rate,
    peer=st.none() | st.sampled_from(NvlinkPeer),
    errors=st.dictionaries(st.text(), st.integers()),
)
gpus = st.builds(
    GpuFacts,
    name=maybe_text,
    mig=maybe_flag,
    throttle_reasons=st.none() | st.lists(st.text(), max_size=3).map(tuple),
    remapped_rows=st.none() | st.builds(RemappedRows),
    pcie=pcie,
    place=places,
    nvlinks=st.none() | st.lists(nvlinks, max_size=8).map(tuple),
    fabric=st.none() | st.builds(Fabric, clique=maybe_number),
    processes=st.none() | st.lists(st.builds(GpuProcess), max_size=2).map(tuple),
    unknown=reasons,
)
nics = st.builds(NicFacts, kind=st.sampled_from(NicKind), rate_gbit_s=maybe_rate, place=places, unknown=reasons)
machine = st.builds(HostFacts, cpus=maybe_number, numa_nodes=st.lists(st.builds(NumaNode), max_size=2).map(tuple))
snapshots = st.builds(
    Snapshot,
    origin=st.sampled_from([Origin.RECORDED, Origin.SIMULATED]),
    taken_at=maybe_text,
    machine=machine,
    driver=st.builds(DriverFacts, version=maybe_text, open_kernel_module=maybe_flag),
    gpus=st.lists(gpus, max_size=3).map(tuple),
    nics=st.lists(nics, max_size=2).map(tuple),
    switches=st.lists(st.builds(PciSwitch, link=pcie, place=places), max_size=2).map(tuple),
    nvswitches=st.lists(st.text(), max_size=2).map(tuple),
    pairs=st.lists(st.builds(PairFacts, cuda=maybe_flag, read=maybe_text, unknown=reasons), max_size=3).map(tuple),
    failures=st.lists(st.builds(ProbeFailure, timed_out=st.booleans()), max_size=2).map(tuple),
)


@given(snapshots)
def test_every_snapshot_reads_back_equal(snapshot: Snapshot) -> None:
    text = write_snapshot(snapshot)
    assert read_snapshot(text, "x") == snapshot
    assert text.endswith("}\n")


@given(st.text())
def test_garbage_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        read_snapshot(text, "x")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(st.data(), JSON)
def test_any_json_in_any_field_is_read_or_refused(data: st.DataObject, value: object) -> None:
    document = json.loads(write_snapshot(SNAPSHOT))
    where = data.draw(st.sampled_from([document, document["gpus"][0], document["gpus"][0]["nvlinks"][0]]))
    where[data.draw(st.sampled_from([*where, "kind", "machine", "place", "peer", "errors"]))] = value
    with contextlib.suppress(UsageError):
        read_snapshot(json.dumps(document), "x")


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_recording_is_read_or_refused(data: st.DataObject) -> None:
    text = write_snapshot(SNAPSHOT)
    start = data.draw(st.integers(0, len(text)))
    with contextlib.suppress(UsageError):
        read_snapshot(
            text[:start] + data.draw(st.text(max_size=4)) + text[start + data.draw(st.integers(0, 40)) :], "x"
        )

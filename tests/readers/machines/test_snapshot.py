import contextlib
import json
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.model.facts.process import GpuProcess
from gpubench.model.facts.snapshot import (
    SNAPSHOT_VERSION,
    AccessControl,
    ConfidentialComputing,
    DriverFacts,
    DriverSettings,
    Fabric,
    Gid,
    GpuFacts,
    HostFacts,
    IommuFacts,
    KernelSettings,
    NicFacts,
    NicKind,
    NumaNode,
    NvLink,
    NvlinkPeer,
    PairFacts,
    PciDevice,
    PcieErrors,
    PcieLink,
    PciKind,
    PciPlace,
    PciSwitch,
    ProbeFailure,
    RdmaPort,
    RemappedRows,
    Service,
    Snapshot,
)
from gpubench.model.terms.plain import from_plain, to_plain
from gpubench.model.terms.verdict import Origin
from gpubench.readers.machines.snapshot import read as read_snapshot
from gpubench.readers.machines.snapshot import write_snapshot
from tests.examples import examples
from tests.machines.test_machines import FOLDER

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


def test_a_long_object_without_lists_and_a_long_text_stay_on_their_line() -> None:
    long = replace(SNAPSHOT, source="x" * 300, machine=HostFacts(product="y" * 300))
    text = write_snapshot(long)
    assert read_snapshot(text, "node.json") == long
    assert max(map(len, text.split("\n"))) > 300


@pytest.mark.parametrize(
    ("written", "read"),
    [(Origin.MEASURED, Origin.RECORDED), (Origin.RECORDED, Origin.RECORDED), (Origin.SIMULATED, Origin.SIMULATED)],
)
def test_what_was_measured_is_recorded_when_read(written: Origin, read: Origin) -> None:
    assert read_snapshot(write_snapshot(replace(SNAPSHOT, origin=written)), "x").origin is read


def test_broken_json_is_refused_with_line_and_column() -> None:
    error = refusal('{\n  "schema_version": 1,\n  "host" "x"}')
    assert error.seen.startswith("node.json, line 3: the JSON is broken at column 10: ")


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("[1]", "node.json, line 1: the JSON is not an object"),
        ("{}", "node.json: the JSON has no schema_version"),
        ('{"schema_version": true}', "node.json: the JSON has schema_version True"),
        ('{"schema_version": "1"}', "node.json: the JSON has schema_version '1'"),
        ('{"schema_version": 0}', "node.json: the JSON has schema_version 0"),
        ('{"schema_version": 1, "host": NaN}', "node.json: the JSON has NaN, which is not a number"),
        ('{"schema_version": 1, "host": 1e999}', "node.json: the JSON has 1e999, which is not a number"),
        ('{"schema_version": 1}', "node.json: snapshot has no field 'host'"),
        ('{"schema_version": 1, "color": 1}', "node.json: snapshot has an unknown field 'color'"),
        (
            '{"schema_version": 1, "host": "a", "origin": "recorded", "source": "b", "gpus": [{"index": "0"}]}',
            "node.json: snapshot.gpus[0].index is '0'",
        ),
    ],
)
def test_what_is_no_snapshot_is_refused_by_what_is_wrong(text: str, seen: str) -> None:
    assert refusal(text).seen == seen


def test_a_newer_snapshot_is_refused_before_its_fields_are_read() -> None:
    error = refusal(json.dumps({"schema_version": SNAPSHOT_VERSION + 1, "color": 1}))
    assert error.seen == f"node.json: the snapshot has schema_version {SNAPSHOT_VERSION + 1}"
    assert error.reason == "it was recorded by a newer gpubench"


@pytest.mark.parametrize(
    ("changed", "seen"),
    [
        ({"host": "a\nb"}, r"snapshot.host is 'a\nb'"),
        ({"source": "a\ud800"}, r"the JSON has a lone surrogate in 'a\ud800'"),
        ({"machine": {"\udfff": 1}}, r"the JSON has a lone surrogate in '\udfff'"),
        ({"gpus": [{"index": 0, "name": "\x1b[2J"}]}, r"snapshot.gpus[0].name is '\x1b[2J'"),
        ({"gpus": [{"index": 0, "bus_id": "\r"}]}, r"snapshot.gpus[0].bus_id is '\r'"),
        ({"gpus": [{"index": 3}, {"index": 3}]}, "snapshot.gpus[1] is a second GPU3"),
        ({"nics": [{"name": "a", "kind": "roce"}] * 2}, "snapshot.nics[1] is a second a"),
        ({"nics": [{"name": "GPU1", "kind": "roce"}]}, "snapshot.nics[0] is a second GPU1"),
        ({"nics": [{"name": "\x07", "kind": "roce"}]}, r"snapshot.nics[0].name is '\x07'"),
        ({"switches": [{"bus_id": "\t"}]}, r"snapshot.switches[0].bus_id is '\t'"),
        ({"gpus": [{"index": 0, "place": {"switches": ["s"] * 65}}]}, "snapshot.gpus[0].place.switches has 65 entries"),
        (
            {"switches": [{"bus_id": "s", "place": {"host_bridge": "\x7f"}}]},
            r"snapshot.switches[0].place.host_bridge is '\x7f'",
        ),
        ({"gpus": [{"index": number} for number in range(129)]}, "snapshot.gpus has 129 entries"),
        ({"nics": [{"name": str(number), "kind": "roce"} for number in range(513)]}, "snapshot.nics has 513 entries"),
        ({"switches": [{"bus_id": str(number)} for number in range(1025)]}, "snapshot.switches has 1025 entries"),
        ({"pci_devices": [{"bus_id": "\x07", "kind": "gpu"}]}, r"snapshot.pci_devices[0].bus_id is '\x07'"),
        ({"kernel": {"options": ["iommu=\x1b"]}}, r"snapshot.kernel.options[0] is 'iommu=\x1b'"),
        (
            {"driver_settings": {"registry_keys": {"a\n": "1"}}},
            r"a name in snapshot.driver_settings.registry_keys is 'a\n'",
        ),
        ({"rdma_ports": [{"nic": "a", "link_layer": "\t"}]}, r"snapshot.rdma_ports[0].link_layer is '\t'"),
        ({"pci_devices": [{"bus_id": "a", "kind": "gpu"}] * 2}, "snapshot.pci_devices[1] is a second a"),
        ({"gpus": [{"index": 0, "nvlinks": [{"number": 2}] * 2}]}, "snapshot.gpus[0].nvlinks[1] is a second link 2"),
        (
            {"gpus": [{"index": 0, "nvlinks": [{"number": 2, "raw_gb_s": 0.0}]}]},
            "snapshot.gpus[0].nvlinks: link 2 has 0 GB/s",
        ),
        (
            {"gpus": [{"index": 0, "nvlinks": [{"number": 2, "raw_gb_s": 1e9}]}]},
            "snapshot.gpus[0].nvlinks: link 2 has 1e+09 GB/s",
        ),
        ({"gpus": [{"index": 0, "pcie": {"width": 32, "max_width": 16}}]}, "snapshot.gpus[0].pcie.width is 32"),
        (
            {"gpus": [{"index": 0, "memory_used_bytes": 9, "memory_bytes": 8}]},
            "snapshot.gpus[0].memory_used_bytes is 9",
        ),
        (
            {"gpus": [{"index": n, "name": "H", "compute_capability": f"{n + 8}.0"} for n in (0, 1)]},
            "snapshot.gpus[1].compute_capability is 9.0, and that of snapshot.gpus[0] 8.0",
        ),
        (
            {"gpus": [{"index": n, "name": "H", "nvlinks": [{"number": 0, "version": f"{n}"}]} for n in (3, 4)]},
            "snapshot.gpus[1].nvlinks.version is 4, and that of snapshot.gpus[0] 3",
        ),
        ({"pairs": [{"source": "GPU0", "destination": "GPU0", "cuda": True}]}, "snapshot.pairs[0] has only GPU0"),
        (
            {"pairs": [{"source": "GPU0", "destination": "GPU7"}]},
            "snapshot.pairs[0] is of 'GPU7', which does not exist",
        ),
        ({"pairs": [{"source": "GPU0", "destination": "GPU1"}] * 2}, "snapshot.pairs[1] is a second GPU0 → GPU1"),
        (
            {"pci_devices": [{"bus_id": "a", "kind": "gpu", "above": "b"}]},
            "snapshot.pci_devices[0].above points to b, which does not exist",
        ),
        (
            {"pci_devices": [{"bus_id": "a", "kind": "gpu", "above": "a"}]},
            "snapshot.pci_devices[0].above has no end",
        ),
        (
            {"pci_devices": [{"bus_id": str(number), "kind": "gpu"} for number in range(4097)]},
            "snapshot.pci_devices has 4097 entries",
        ),
        *(
            (
                {"pairs": [{"source": "GPU0", "destination": "GPU1", "path": path}]},
                f"snapshot.pairs[0].path is {path!a}",
            )
            for path in ("NV", "NV1234", "pix", "", "NV1\n", "NV\u0661")
        ),
        (
            {"pairs": [{"source": "GPU0", "destination": "GPU1", "pcie_path": "NV1"}]},
            "snapshot.pairs[0].pcie_path is 'NV1'",
        ),
    ],
)
def test_what_is_no_machine_is_refused_by_field(changed: dict[str, object], seen: str) -> None:
    assert refusal(json.dumps(json.loads(write_snapshot(SNAPSHOT)) | changed)).seen == f"node.json: {seen}"


@pytest.mark.parametrize("path", ["NV0", "NV18", "X", "PIX", "PXB", "PHB", "NODE", "SYS"])
def test_paths_that_are_some_are_read(path: str) -> None:
    pair = PairFacts(source="GPU0", destination="GPU1", path=path)
    assert read_snapshot(write_snapshot(replace(SNAPSHOT, pairs=(pair,))), "x").pairs == (pair,)


maybe_number = st.none() | st.integers()
maybe_text = st.none() | st.text(max_size=200)
names = st.text(st.characters(exclude_categories=("C", "Z")))
maybe_flag = st.none() | st.booleans()
maybe_rate = st.none() | st.floats(allow_nan=False, allow_infinity=False)
reasons = st.dictionaries(st.text(), st.text(), max_size=3)
places = st.builds(PciPlace, host_bridge=names, switches=st.lists(names, max_size=3).map(tuple), numa_node=maybe_number)
pcie = st.builds(PcieLink, generation=maybe_number, width=maybe_number)
nvlinks = st.builds(
    NvLink,
    active=maybe_flag,
    raw_gb_s=st.none() | st.floats(0.1, 100),
    peer=st.none() | st.sampled_from(NvlinkPeer),
    errors=st.dictionaries(st.text(), st.integers()),
)
gpus = st.builds(
    GpuFacts,
    bus_id=names,
    name=names,
    uuid=maybe_text,
    mig=maybe_flag,
    throttle_reasons=st.none() | st.lists(st.text(), max_size=3).map(tuple),
    remapped_rows=st.none() | st.builds(RemappedRows),
    pcie=pcie,
    place=places,
    nvlinks=st.none() | st.lists(nvlinks, max_size=8, unique_by=lambda link: abs(link.number)).map(tuple),
    fabric=st.none() | st.builds(Fabric, clique=maybe_number),
    processes=st.none() | st.lists(st.builds(GpuProcess), max_size=2).map(tuple),
    unknown=reasons,
)
nics = st.builds(
    NicFacts,
    name=names,
    model=names,
    kind=st.sampled_from(NicKind),
    rate_gbit_s=maybe_rate,
    place=places,
    unknown=reasons,
)
machine = st.builds(HostFacts, cpus=maybe_number, numa_nodes=st.lists(st.builds(NumaNode), max_size=2).map(tuple))
kernels = st.builds(
    KernelSettings,
    options=st.none() | st.lists(names, max_size=2).map(tuple),
    wsl=maybe_flag,
    iommu=st.builds(IommuFacts, group_types=st.dictionaries(names, names, max_size=2)),
    unknown=st.dictionaries(names, names, max_size=2),
)
driver_settings = st.builds(
    DriverSettings,
    parameters=st.none() | st.dictionaries(names, names, max_size=2),
    services=st.dictionaries(names, st.builds(Service, running=maybe_flag), max_size=2),
    confidential_computing=st.none() | st.builds(ConfidentialComputing, enabled=maybe_flag),
    nvlink_bandwidth_reduced=st.none() | st.lists(names, max_size=2).map(tuple),
)
pci_devices = st.builds(
    PciDevice,
    bus_id=names,
    kind=st.sampled_from(PciKind),
    link=pcie,
    access_control=st.none() | st.builds(AccessControl, enabled=st.lists(names, max_size=2).map(tuple)),
    errors=st.none() | st.builds(PcieErrors, fatal=maybe_number, named=st.dictionaries(names, st.integers())),
    iommu_group=maybe_number,
)
rdma_ports = st.builds(
    RdmaPort,
    nic=names,
    counters=st.none() | st.dictionaries(names, st.integers(), max_size=2),
    gids=st.none() | st.lists(st.builds(Gid, kind=names, address=names), max_size=2).map(tuple),
)


def positive(value: Any) -> Any:
    """The same without numbers below 0, which no machine has."""
    match value:
        case bool():
            return value
        case int() | float():
            return abs(value)
        case dict():
            return {name: positive(held) for name, held in value.items()}
        case list() | tuple():
            return [positive(held) for held in value]
        case _:
            return value


def of_devices(snapshot: Snapshot) -> Snapshot:
    """The same with its pairs between devices that it has."""
    names = [*(gpu.device for gpu in snapshot.gpus), *(nic.device for nic in snapshot.nics)]
    ends = list(permutations(names, 2))
    pairs = zip(snapshot.pairs, ends, strict=False)
    return replace(snapshot, pairs=tuple(replace(pair, source=one, destination=two) for pair, (one, two) in pairs))


snapshots = st.builds(
    Snapshot,
    pci_devices=st.lists(pci_devices, max_size=2, unique_by=lambda device: device.bus_id).map(tuple),
    rdma_ports=st.lists(rdma_ports, max_size=2).map(tuple),
    kernel=kernels,
    driver_settings=driver_settings,
    host=names,
    origin=st.sampled_from([Origin.RECORDED, Origin.SIMULATED]),
    taken_at=maybe_text,
    machine=machine,
    driver=st.builds(DriverFacts, version=maybe_text, open_kernel_module=maybe_flag),
    gpus=st.lists(
        gpus,
        max_size=3,
        unique_by=(
            lambda gpu: abs(gpu.index),
            lambda gpu: gpu.bus_id or ("", abs(gpu.index)),
            lambda gpu: gpu.uuid or ("", abs(gpu.index)),
        ),
    ).map(tuple),
    nics=st.lists(nics, max_size=2, unique_by=lambda nic: nic.name).map(tuple),
    switches=st.lists(st.builds(PciSwitch, bus_id=names, link=pcie, place=places), max_size=2).map(tuple),
    nvswitches=st.lists(st.text(), max_size=2).map(tuple),
    pairs=st.lists(
        st.builds(PairFacts, path=st.sampled_from(["NV2", "PIX"]), cuda=maybe_flag, read=maybe_text, unknown=reasons),
        max_size=3,
    ).map(tuple),
    failures=st.lists(st.builds(ProbeFailure, timed_out=st.booleans()), max_size=2).map(tuple),
).map(lambda snapshot: of_devices(from_plain(Snapshot, positive(to_plain(snapshot)), "snapshot")))


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


@settings(max_examples=examples(40))
@given(st.data())
def test_a_damaged_recording_is_read_or_refused(data: st.DataObject) -> None:
    text = write_snapshot(SNAPSHOT)
    start = data.draw(st.integers(0, len(text)))
    with contextlib.suppress(UsageError):
        read_snapshot(
            text[:start] + data.draw(st.text(max_size=4)) + text[start + data.draw(st.integers(0, 40)) :], "x"
        )


@pytest.mark.parametrize(
    "edit",
    [
        lambda gpus: gpus[1].update(bus_id=gpus[0]["bus_id"]),
        lambda gpus: gpus[1].update(uuid=gpus[0]["uuid"]),
        lambda gpus: gpus[1].update(memory_bytes=-1),
        lambda gpus: gpus[1].update(pcie_replays=-5),
        lambda gpus: gpus[1]["nvlinks"][0].update(raw_gb_s=-25.0),
    ],
)
def test_what_no_machine_can_have_is_refused(edit: Callable[[list[dict[str, Any]]], None]) -> None:
    document = json.loads((FOLDER / "h200x4-vm/nodes/vm.json").read_text(encoding="utf-8"))
    read_snapshot(json.dumps(document), "x")
    edit(document["gpus"])
    with pytest.raises(UsageError, match=r"snapshot\.gpus\[1\]"):
        read_snapshot(json.dumps(document), "x")


def test_a_recording_cut_in_half_is_refused_with_its_last_line() -> None:
    text = write_snapshot(SNAPSHOT)
    cut = text[: text.index('"number": 9')]
    assert refusal(cut).seen.startswith(f"node.json, line {cut.count(chr(10)) + 1}: the JSON is broken at column ")


def test_a_number_with_too_many_digits_is_refused() -> None:
    assert refusal('{"schema_version": ' + "1" * 5000 + "}").seen.startswith("node.json: the JSON has ")

"""The tables of rocm-smi --showtopo and amd-smi topology, in the form that their sources print."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpubench.cli.app import app
from gpubench.errors import UsageError
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.topology import Topology, nccl_keeps_off
from gpubench.readers.machines import amd_topology
from gpubench.readers.registry import read_file, read_results

Cell = Callable[[int, int], object]


def is_far(one: int, other: int) -> bool:
    """True for the GPUs of different sockets, of which each has half."""
    return one // 2 != other // 2


def rocm_table(title: str, cell: Cell, gpus: int = 4) -> str:
    """Return a table as showTypeTopology of rocm_smi.py prints it."""
    head = "       " + "".join(f"{f'GPU{gpu}':<12} " for gpu in range(gpus))
    rows = [
        f"{f'GPU{one}':<6} " + "".join(f"{0 if one == other else cell(one, other)!s:<12} " for other in range(gpus))
        for one in range(gpus)
    ]
    return "\n".join([f" {title} between two GPUs ".center(90, "="), head, *rows, "", ""])


def rocm_smi(kind: Cell, hops: Cell = lambda *_: 1, numa: bool = True) -> str:
    nodes = "".join(
        f"GPU[{gpu}]\t\t: (Topology) Numa Node: {gpu // 2}\nGPU[{gpu}]\t\t: (Topology) Numa Affinity: {gpu // 2}\n"
        for gpu in range(4)
    )
    return (
        f"\n\n{' ROCm System Management Interface '.center(90, '=')}\n"
        + rocm_table("Weight", lambda *_: 15)
        + rocm_table("Hops", hops)
        + rocm_table("Link Type", kind)
        + (f"{' Numa Nodes '.center(90, '=')}\n{nodes}" if numa else "")
        + f"{' End of ROCm SMI Log '.center(90, '=')}\n"
    )


BUS_IDS = ("0000:0c:00.0", "0000:22:00.0", "0000:9F:00.0")


def amd_table(title: str, own: str, cell: Cell) -> str:
    """Return a table as the topology command of amdsmi_commands.py prints it."""
    rows = [
        f"{one} " + "".join(f"{own if i == j else cell(i, j)!s:<13}" for j in range(len(BUS_IDS))).rstrip()
        for i, one in enumerate(BUS_IDS)
    ]
    return "\n".join([f"{title} TABLE:", "".ljust(12) + "".join(each.rjust(13) for each in BUS_IDS), *rows, ""])


def amd_smi(access: Cell = lambda *_: "ENABLED", kind: Cell = lambda *_: "XGMI") -> str:
    tables = (
        amd_table("ACCESS", "ENABLED", access),
        amd_table("WEIGHT", "0", lambda *_: 15),
        amd_table("HOPS", "0", lambda *_: 1),
        amd_table("LINK TYPE", "SELF", kind),
        amd_table("NUMA BW", "N/A", lambda *_: "50000-50000"),
    )
    return "\n".join(tables) + "\n\nLegend:\n  SELF = Current GPU\n  ENABLED / DISABLED = Link is enabled or disabled\n"


def amd_json(kind: str = "XGMI") -> str:
    def link(i: int, j: int) -> dict[str, object]:
        own = {"link_status": "ENABLED", "link_type": "SELF" if i == j else kind, "num_hops": int(i != j)}
        return {"gpu": j, "bdf": BUS_IDS[j], "weight": 15 * (i != j), **own}

    nodes = range(len(BUS_IDS))
    return json.dumps([{"gpu": i, "bdf": BUS_IDS[i], "links": [link(i, j) for j in nodes]} for i in nodes], indent=4)


def read(text: str) -> Snapshot:
    assert amd_topology.recognises(text)
    return amd_topology.read(text, "topo.txt")


def paths(snapshot: Snapshot) -> list[list[str]]:
    return [list(row.values()) for row in Topology(snapshot).matrix.values()]


def test_xgmi_and_pcie_between_sockets_are_told_from_pcie_inside_a_numa_node() -> None:
    snapshot = read(rocm_smi(lambda one, other: "XGMI" if one % 2 == other % 2 else "PCIE"))
    assert paths(snapshot)[0] == ["X", "PCIE", "XGMI", "SYS"]
    assert [gpu.place.numa_node for gpu in snapshot.gpus] == [0, 0, 1, 1]
    assert snapshot.source == "rocm-smi text topo.txt"


def test_hops_over_two_cpus_are_between_sockets_where_no_numa_node_is_printed() -> None:
    text = rocm_smi(lambda *_: "PCIE", lambda one, other: 3 if is_far(one, other) else 2, numa=False)
    assert paths(read(text))[0] == ["X", "PCIE", "SYS", "SYS"]


def test_the_model_that_showproductname_prints_selects_the_profile() -> None:
    model = "GPU[0]\t\t: Card Series: \t\tAMD Instinct MI300X OAM\n"
    assert read(model + rocm_smi(lambda *_: "XGMI")).gpus[0].name == "AMD Instinct MI300X OAM"


@pytest.mark.parametrize(
    "text",
    [amd_smi(), amd_json(), "\n".join(f"> {line}" for line in amd_smi().split("\n"))],
    ids=["text", "JSON", "a quoted text"],
)
def test_amd_smi_names_bus_ids_and_access(text: str) -> None:
    snapshot = read(text)
    assert [gpu.bus_id for gpu in snapshot.gpus] == [each.lower() for each in BUS_IDS]
    assert paths(snapshot)[2] == ["XGMI", "XGMI", "X"]
    access = Topology(snapshot).peer_access(snapshot.gpus[0], snapshot.gpus[1])
    assert (access.possible, access.reason) == (True, "possible (ROCm)")


def test_access_that_is_disabled_is_a_refusal() -> None:
    snapshot = read(amd_smi(lambda one, other: "DISABLED" if {one, other} == {0, 1} else "ENABLED"))
    node = Topology(snapshot)
    assert node.peer_access(snapshot.gpus[1], snapshot.gpus[0]).possible is False
    assert node.peer_access(snapshot.gpus[0], snapshot.gpus[2]).possible is True


def test_the_policy_of_nccl_is_not_said_of_rccl() -> None:
    """NCCL takes peer access up to PXB; RCCL over every path, unless the processors are Intel's."""
    snapshot = read(amd_smi(kind=lambda *_: "PCIE").replace("0            1  ", "0            3  "))
    node = Topology(snapshot)
    assert node.path(*snapshot.gpus[:2]) == "SYS"
    assert nccl_keeps_off(node, *snapshot.gpus[:2]) == ""


def test_access_that_is_not_printed_is_unknown() -> None:
    snapshot = read(rocm_smi(lambda *_: "XGMI"))
    access = Topology(snapshot).peer_access(snapshot.gpus[0], snapshot.gpus[1])
    assert (access.possible, access.reason) == (None, "amd-smi topology decides")


def test_a_pair_without_its_xgmi_link_among_siblings_that_have_it_lost_one() -> None:
    snapshot = read(rocm_smi(lambda one, other: "PCIE" if {one, other} == {0, 3} else "XGMI"))
    assert Topology(snapshot).lost_links == {frozenset(("GPU0", "GPU3")): 1}


@pytest.mark.parametrize(
    ("joined", "lost"),
    [
        ("01 02 03 12 13 23", ""),
        ("01 02 12 13", "03 23"),
        ("02 03 12 13", "01 23"),
        ("01 23", ""),
        ("01 02 12", ""),
        ("", ""),
    ],
    ids=["all", "two of one GPU", "two of four GPUs", "two bridges", "a GPU without a bridge", "no links"],
)
def test_pairs_of_a_hive_without_an_xgmi_link_have_lost_it(joined: str, lost: str) -> None:
    """AMD's driver reports links between all GPUs of a hive. Bridges join only some GPUs of a machine."""
    snapshot = read(rocm_smi(lambda *ends: "XGMI" if f"{min(ends)}{max(ends)}" in joined.split() else "PCIE"))
    assert Topology(snapshot).lost_links == {frozenset(f"GPU{gpu}" for gpu in pair): 1 for pair in lost.split()}


NVIDIA_ONLY = re.compile(r"nvidia-smi|\bNV\d|NVLink|NVML|NVreg|Xid|CUDA|MIG\b|\bSMs|generic|gpubench p2p")


@pytest.mark.parametrize("ends", [{0, 1}, {0, 3}], ids=["inside a NUMA node", "between sockets"])
def test_a_missing_xgmi_link_is_a_warning_without_words_of_nvidia(ends: set[int], tmp_path: Path) -> None:
    text = topo_text(rocm_smi(lambda one, other: "PCIE" if {one, other} == ends else "XGMI"), tmp_path)
    assert "WARN nvlink-down" in text
    assert "expected: XGMI, as between its siblings" in text
    assert text.splitlines()[-1].startswith("WARN: topo ")
    assert text.splitlines()[-1].endswith("Try: amd-smi topology")
    assert NVIDIA_ONLY.findall(text) == []


@pytest.mark.parametrize(
    "access", [lambda *_: "ENABLED", lambda one, other: "DISABLED" if one < other else "ENABLED"], ids=["all", "some"]
)
def test_access_between_amd_gpus_is_described_without_words_of_nvidia(access: Cell, tmp_path: Path) -> None:
    assert NVIDIA_ONLY.findall(topo_text(amd_smi(access, lambda *_: "PCIE"), tmp_path)) == []


@pytest.mark.parametrize("machine", ["mi300x-8", "mi325x-8", "mi355x-8"])
def test_the_topology_of_a_simulated_amd_machine_has_no_words_of_nvidia(machine: str) -> None:
    shown = CliRunner().invoke(app, ["topo", "--simulate", machine], catch_exceptions=False).stdout
    text = " ".join(shown.split())
    assert NVIDIA_ONLY.findall(text) == []
    assert "xGMI links" in text
    assert "over xGMI" in text
    assert "possible (ROCm)" in text


def topo_text(tables: str, folder: Path) -> str:
    path = folder / "topo.txt"
    path.write_text(tables)
    return CliRunner().invoke(app, ["topo", "--from", str(path)], catch_exceptions=False).stdout


WHOLE = rocm_smi(lambda *_: "XGMI")
LAST = "GPU3   XGMI         XGMI         XGMI         0"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("See the link type table: below\n", "the text has no complete table of link types"),
        (WHOLE[: WHOLE.index(LAST)], "the table names 4 GPUs, but no complete row of GPU3"),
        (WHOLE[: WHOLE.index(LAST) + 24], "line 23: the row of GPU3 has 2 cells, but the header has 4 GPUs"),
        (WHOLE.replace(LAST, LAST.replace("XGMI", "XG", 1)), "'XG' is not a link type"),
        (" Link Type between two GPUs ".center(90, "="), "the table has 0 GPUs"),
        (amd_json()[:-300], "it is not complete JSON of amd-smi topology"),
        (amd_json().replace('"links"', '"peers"'), "it is not complete JSON of amd-smi topology"),
    ],
    ids=["prose", "no row", "half a row", "half a word", "a title", "half a JSON", "another JSON"],
)
def test_a_text_that_is_cut_is_refused_with_what_is_missing(text: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "topo.txt"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_file(path)
    assert what in caught.value.seen
    assert "rocm-smi --showtopo" in caught.value.next_step


@pytest.mark.parametrize("text", [WHOLE, amd_smi(), amd_json()], ids=["rocm-smi", "amd-smi", "JSON"])
def test_report_sends_a_topology_to_topo(text: str, tmp_path: Path) -> None:
    path = tmp_path / "topo.txt"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_results(path)
    assert caught.value.next_step == f"gpubench topo --from {path}"

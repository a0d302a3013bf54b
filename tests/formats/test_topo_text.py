import io
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.formats.registry import TABLE, Color, Presentation, Target
from gpubench.formats.table import Page
from gpubench.formats.text.topo import TopoView
from gpubench.machine.recorded import read_recording
from gpubench.measure.topo import examine
from gpubench.model.facts.process import GpuProcess, RankFacts
from gpubench.model.facts.snapshot import DriverFacts, GpuFacts, NicFacts, NicKind, PcieLink, Snapshot
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.fault import parse_fault
from gpubench.model.results.report import Metadata, Report
from gpubench.model.terms.verdict import Verdict
from gpubench.simulated.machine import parse_machine, snapshots
from tests.fakes.last_line import is_command
from tests.formats.sample import METADATA, ROW

MACHINES = sorted(path.parent for path in (Path(__file__).parent.parent / "machines").glob("*/nodes"))
ESCAPE = "\x1b["

recorded = pytest.mark.parametrize("machine", MACHINES, ids=lambda path: path.name)


def shown(
    nodes: Sequence[Snapshot],
    ranks: Sequence[RankFacts] = (),
    *,
    width: int = 100,
    color: bool = False,
    verbose: bool = False,
    report: Report | None = None,
    **metadata: Any,
) -> str:
    described = Metadata(
        **{
            "gpubench_version": "0",
            "run_id": "test",
            "started_at": "2026-01-01T00:00:00+00:00",
            "command": ("gpubench", "topo"),
            "subject": "topo",
            "origin": "recorded",
            "hosts": [node.host for node in nodes],
        }
        | metadata
    )
    stream = io.StringIO()
    look = Presentation(width=width, color=Color.ALWAYS if color else Color.NEVER, verbose=verbose)
    writer = TABLE.writer(Target(stream=stream), look)
    writer.begin(described, ())
    writer.end(report or examine([Topology(node) for node in nodes], ranks))
    return stream.getvalue()


@cache
def looked_at(machine: Path) -> tuple[Sequence[Snapshot], Report]:
    nodes, _ = read_recording(machine)
    return nodes, examine([Topology(node) for node in nodes])


def shown_again(machine: Path, **style: Any) -> str:
    nodes, report = looked_at(machine)
    return shown(nodes, report=report, **style)


def machine(name: str, *faults: str) -> list[Snapshot]:
    return snapshots(parse_machine(name), [parse_fault(fault) for fault in faults])


HEALTHY = machine("hgx-h100-8")[0]


def with_gpus(*changes: dict[str, Any], node: Snapshot = HEALTHY) -> Snapshot:
    gpus = [replace(gpu, **change) for gpu, change in zip(node.gpus, changes, strict=False)]
    return replace(node, gpus=(*gpus, *node.gpus[len(gpus) :]))


GONE: dict[str, Any] = {"lost": "gone", "name": None, "ecc": None, "nvlinks": None, "memory_bytes": None}
ON_ONE_SOCKET = with_gpus(*[{"cpu_affinity": "0-223"}] * 8)


def squeezed(text: str) -> str:
    """The text without the line breaks, indentation and guides that the page's width asks for."""
    return re.sub(r"[\s│├└─]+", "", text)


def table(text: str, head: str) -> list[list[str]]:
    """The table that begins with a head, as words between gaps."""
    found = text.splitlines()
    start = next(number for number, line in enumerate(found) if line.startswith(f"{head} "))
    end = next(number for number in range(start, len(found)) if not found[number].startswith((head, *"GPUmlxe")))
    return [re.split(r" {2,}", line.rstrip()) for line in found[start:end]]


@recorded
@pytest.mark.parametrize("width", [80, 100])
def test_no_line_is_wider_than_the_page(machine: Path, width: int) -> None:
    found = shown_again(machine, width=width, verbose=True).splitlines()
    assert [line for line in found if len(line.rstrip()) > width and not is_command(line)] == []


@recorded
@pytest.mark.parametrize("width", [40, 60, 160, 200])
def test_only_a_table_that_cannot_shrink_is_wider(machine: Path, width: int) -> None:
    found = shown_again(machine, width=width, verbose=True).splitlines()
    wide = [line for line in found if len(line.rstrip()) > width and not is_command(line)]
    assert all(re.match(r"(GPU|NIC|mlx5_|eth|en[ops]|wl)", line) for line in wide)
    assert not wide or width < 80


@recorded
def test_nothing_is_cut_from_the_tree_on_a_narrow_page(machine: Path) -> None:
    wide = shown_again(machine, width=200, verbose=True)
    tree = [line for line in wide.splitlines() if re.match(r"[│├└ ]*[├└]──", line)]
    narrow = squeezed(shown_again(machine, width=60, verbose=True))
    assert all(squeezed(line) in narrow for line in tree)


@recorded
def test_colour_comes_only_when_asked_for(machine: Path) -> None:
    plain, coloured = shown_again(machine), shown_again(machine, color=True)
    assert ESCAPE not in plain
    assert (ESCAPE in coloured) is any(node.gpus for node in looked_at(machine)[0])  # without any, nothing is judged
    stripped = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in stripped.splitlines()] == [line.rstrip() for line in plain.splitlines()]


def test_of_a_run_cut_short_there_is_the_verdict_alone() -> None:
    stream = io.StringIO()
    view = TopoView(Page(Target(stream=stream), Presentation()), METADATA)
    view.end(Report(verdict=Verdict.ERROR, complete=False))
    assert stream.getvalue().startswith("verdict: ERROR: the run was cut short")


def test_a_lost_gpu_does_not_make_everything_peculiar() -> None:
    text = shown([with_gpus(GONE, node=ON_ONE_SOCKET)])
    assert "  all: " in text
    assert "ECC on; MIG off" in text
    assert "not known (gone): everything of GPU0" in text
    everything = shown([replace(HEALTHY, gpus=tuple(GpuFacts(index=n, lost="gone") for n in range(2)), pairs=())])
    assert "  not known (gone): everything\n" in everything
    assert "all:" not in everything


def test_pcie_links_in_a_table() -> None:
    links: list[dict[str, Any]] = [
        {"pcie": PcieLink()},
        {"pcie": PcieLink(generation=1, width=16, max_generation=5, max_width=16), "idle": True},
        {"pcie": PcieLink(generation=1, width=16, max_generation=5, max_width=16), "idle": False},
        {"pcie": PcieLink(generation=5, width=8, max_generation=5, max_width=16), "idle": True},
        {"pcie": PcieLink(generation=4, width=16)},
        {"nvlinks": None, "place": replace(HEALTHY.gpus[5].place, numa_node=None)},
        {"nvlinks": ()},
    ]
    head, *found = table(shown([with_gpus(*links)], width=200), "GPU")
    cells = [dict(zip(head, row, strict=False)) for row in found]
    assert [row["PCIe"] for row in cells][:5] == [
        "?",
        "1 x16 (idle; 5 x16)",
        "1 x16 of 5 x16",
        "5 x8 of 5 x16",
        "4 x16",
    ]
    assert [row["NVLinks"] for row in cells][4:] == ["18 of 18 × 25", "?", "-", "18 of 18 × 25"]
    assert [row["NUMA"] for row in cells][4:6] == ["1", "?"]


def test_rates_of_links_that_nobody_knows_are_left_out() -> None:
    links = tuple(replace(link, version="3.0", raw_gb_s=None) for link in HEALTHY.gpus[0].nvlinks or ())
    assert table(shown([with_gpus({"nvlinks": links})], width=200), "GPU")[1][6] == "18 of 18"


def test_facts_have_words() -> None:
    assert HEALTHY.gpus[0].fabric
    assert HEALTHY.gpus[0].remapped_rows
    fabric, rows = HEALTHY.gpus[0].fabric, HEALTHY.gpus[0].remapped_rows
    users = (GpuProcess(pid=1), GpuProcess(pid=2))
    text = shown(
        [
            with_gpus(
                {"throttle_reasons": ("hw_slowdown", "sync_boost"), "processes": users, "fabric": None},
                {"throttle_reasons": None, "processes": users[:1], "fabric": replace(fabric, state="in_progress")},
                {"processes": None, "remapped_rows": replace(rows, correctable=2, pending=True), "persistence": None},
                {"remapped_rows": replace(rows, failure=True), "fabric": replace(fabric, health_mask=0)},
                {"remapped_rows": replace(rows, uncorrectable=3), "multiprocessors": None},
                {"remapped_rows": None, "nvlinks": None},
                node=ON_ONE_SOCKET,
            )
        ],
        width=44,
    )
    words = re.sub(r"\s+", " ", text)
    assert "fabric completed, clique 0, health healthy; throttled none; remapped rows 0; used by nobody" in words
    assert "but GPU0: throttled hw slowdown, sync boost; used by 2 processes but" in words
    assert "but GPU1: fabric in progress, health healthy; used by 1 process but" in words
    assert "but GPU2: remapped rows 2 pending but" in words
    assert "but GPU3: fabric completed, clique 0; remapped rows failed but" in words
    assert "but GPU4: remapped rows 3" in words


def test_what_is_not_known_has_its_reason() -> None:
    silent = {"unknown": {"ecc": "Not Supported", "remapped_rows": "Not Supported"}, "ecc": None}
    text = shown([with_gpus(silent, silent, node=machine("hgx-h200-2")[0])])
    assert "  not known (Not Supported): ecc, remapped rows\n" in text
    some = shown([with_gpus(silent)])
    assert "  not known (Not Supported): ecc of GPU0, remapped rows of GPU0\n" in some
    nobody = tuple(replace(gpu, multiprocessors=None, uuid=None, unknown={}) for gpu in HEALTHY.gpus)
    without = shown([replace(HEALTHY, gpus=nobody)], width=200)
    assert "  not known: SMs" in without
    assert "UUID" not in without


FULL = {"cuda_ipc": True, "virtual_memory": True, "fabric_handles": True, "multicast": True}


def test_ways_to_share_memory_have_a_line_each() -> None:
    """A missing way has its effect."""
    node = with_gpus(*[{"cuda_features": FULL}] * 6, {"cuda_features": {"multicast": False}}, GONE)
    text = shown([node], verbose=True)
    assert "  fabric handles on GPU0-5: yes, IMEX untested\n  fabric handles on GPU6: not known\n" in text
    effect = "no, so NCCL runs without NVLS, torch symmetric memory without multimem"
    assert f"  multicast on GPU0-5: yes\n  multicast on GPU6: {effect}\n" in text
    assert "CUDA IPC" not in shown([node])


@pytest.mark.parametrize("field", FULL)
def test_every_missing_way_to_share_memory_is_explained(field: str) -> None:
    text = shown([with_gpus(*[{"cuda_features": FULL | {field: False}}] * 8)], verbose=True)
    assert len(re.findall(r"^  [^:]*: no, so (?:NCCL|UCX)", text, re.MULTILINE)) == 1
    assert text.count(": yes") == 3
    assert "PASS" in text, "hardware that cannot do it is healthy"


def test_nics_have_a_line_each() -> None:
    nics = (
        NicFacts(name="mlx5_0", kind=NicKind.INFINIBAND),
        NicFacts(
            name="mlx5_1",
            kind=NicKind.ROCE,
            state="active",
            rate_gbit_s=200.0,
            bus_id="0000:aa:00.0",
            model="MT4129",
            pcie=PcieLink(generation=4, width=8, max_generation=4, max_width=16),
            place=HEALTHY.gpus[0].place,
        ),
        replace(HEALTHY.nics[0], name="eth0", kind=NicKind.ETHERNET, place=replace(HEALTHY.gpus[0].place, switches=())),
    )
    node = replace(HEALTHY, nics=nics)
    head, first, second, third = table(shown([node], width=120, verbose=True), "NIC")
    assert head == [
        *("NIC", "bus id", "link", "state", "Gb/s", "PCIe", "NUMA", "nearest GPUs", "GPUDirect RDMA", "model")
    ]
    assert first == ["mlx5_0", "-", "infiniband", "?", "?", "?", "?", "-", "possible", "-"]
    assert second == [
        "mlx5_1",
        "0000:aa:00.0",
        "roce",
        "active",
        "200",
        "4 x8 of 4 x16",
        "0",
        "0 (PIX)",
        "possible",
        "MT4129",
    ]
    assert third[-2] == "no"
    assert table(shown([node], width=70, verbose=True), "NIC")[0] == [
        *("NIC", "link", "state", "Gb/s", "NUMA", "nearest GPUs", "GPUDirect RDMA")
    ]
    unknown = replace(node, gpudirect=replace(node.gpudirect, peermem=None, dma_buf=None))
    assert table(shown([unknown], width=120, verbose=True), "NIC")[1][-2] == "?"


@pytest.mark.parametrize(
    ("pairs", "sentence"),
    [
        ({"cuda": True, "read": "OK", "write": "OK"}, "OK, CUDA and NVML agree"),
        ({"cuda": False, "read": "GNS", "write": "GNS"}, "GNS, GPU not supported; CUDA and NVML agree"),
        ({"cuda": None, "read": "OK", "write": "OK"}, "OK, as NVML says (possible)"),
        ({"cuda": True, "read": None, "write": None}, "OK, as CUDA says (possible)"),
        ({"cuda": False, "read": None, "write": None}, "no, as CUDA says (refused by CUDA)"),
        ({"cuda": None, "read": None, "write": None, "unknown": {"cuda": "not asked"}}, None),
        ({"cuda": False, "read": "OK", "write": "OK"}, "OK!, CUDA reports refused, NVML reports possible"),
        ({"cuda": True, "read": "NS", "write": "NS"}, "NS!, CUDA reports possible, NVML reports not supported"),
    ],
)
def test_peer_access_of_all_pairs_is_one_sentence(pairs: dict[str, Any], sentence: str | None) -> None:
    (node,) = machine("hgx-h200-2")
    text = shown([replace(node, pairs=tuple(replace(pair, **pairs) for pair in node.pairs))])
    said = "not known: not asked" if sentence is None else f"all 2 ordered pairs: {sentence}"
    assert f"peer access  {said}\n" in text


def test_limits_are_one_sentence_or_a_matrix_or_not_known() -> None:
    (node,) = machine("hgx-h200-4")
    whole = re.sub(r"\s+", " ", shown([node]))
    assert "limit 450 GB/s per direction between two GPUs; per GPU in total 450 over NVLink, 63 over PCIe" in whole
    odd = shown(machine("hgx-h200-4", "gpu3:nvlink=12"))
    assert re.search(r"GB/s limit +GPU0 +GPU1 +GPU2 +GPU3 +nvlink +pcie\n", odd)
    assert "per direction. nvlink and pcie: total per GPU" in odd
    hidden = tuple(replace(gpu, nvlinks=(), pcie=PcieLink()) for gpu in node.gpus)
    nics = tuple(replace(nic, pcie=PcieLink()) for nic in node.nics)
    assert "limit        not known, for the reasons in the section pairs" in shown(
        [replace(node, gpus=hidden, nics=nics)]
    )
    unlinked = tuple(replace(gpu, nvlinks=None) for gpu in node.gpus)
    assert "limit        not known between two GPUs; per GPU" in shown([replace(node, gpus=unlinked)])


def test_a_machine_in_phrases() -> None:
    node = replace(HEALTHY, nvswitches=("a", "b"), driver=replace(HEALTHY.driver, open_kernel_module=True))
    text = re.sub(r"\s+", " ", shown([node]))
    assert f"driver {node.driver.version} (runs CUDA {node.driver.cuda}), open kernel module;" in text
    assert ", 2 NVSwitches" in text
    assert "1 NVSwitch " in re.sub(r"\s+", " ", shown([replace(node, nvswitches=("a",))]))
    assert "NVSwitches" not in shown([replace(node, nvswitches=())])
    virtual = replace(node, machine=replace(node.machine, virtual_machine=True, kernel="6.1", cpu="Xeon"))
    assert "Xeon, " in shown([virtual])
    assert "Linux 6.1, virtual machine, 2 NVSwitches" in re.sub(r"\s+", " ", shown([virtual]))


def test_nodes_alike_are_one_line_and_the_odd_one_another() -> None:
    text = shown(machine("hgx-h100-8*16", "node3.gpu5:nvlink=12", "node7.gpu5:nvlink=12"))
    assert "kind A  14 nodes alike: node0-2, node4-6, node8-15\n" in text
    assert "  and node3, node7: GPU5 NVLinks active 12 (others 18)\n" in text
    assert text.count("GPU   bus id") == 1


def test_several_kinds_are_shown_one_after_the_other() -> None:
    other = [replace(node, driver=DriverFacts(version="1")) for node in machine("hgx-h100-8*2")]
    renamed = [replace(node, host=f"old{number}") for number, node in enumerate(other)]
    text = shown([*machine("hgx-h100-8*4"), *renamed])
    assert text.index("kind A  4 nodes alike: node0-3") < text.index("kind B  2 nodes alike: old0-1")
    assert text.count("GPU   bus id") == 2
    assert "each: driver 1" in text
    assert f"  differs from kind A: driver 1 (others {HEALTHY.driver.version}); CUDA unknown" in text
    assert text.count("differs from") == 1


def test_more_than_twenty_differences_are_counted() -> None:
    nodes = machine("hgx-h100-8*26", *(f"node{node}:driver=1.{node}" for node in range(23)))
    text = shown(nodes)
    assert text.count("  and node") == 20
    assert "  and 3 more differences in the section nodes\n" in text


def test_ranks_share_memory_or_not() -> None:
    def rank(number: int, shm_device: int) -> RankFacts:
        return RankFacts(
            rank=number, host="node0", node=0, local_rank=number, pid=number, shm_device=shm_device, environment={}
        )

    assert "2 ranks: one /dev/shm per node. The section ranks" in shown([HEALTHY], [rank(0, 1), rank(1, 1)])
    assert "2 ranks: several /dev/shm per node. The section ranks" in shown([HEALTHY], [rank(0, 1), rank(1, 2)])
    assert "rank" not in shown([HEALTHY], [rank(0, 1)]).replace("ranks", "rank").split("verdict")[1]
    assert "/dev/shm" not in shown([HEALTHY], [rank(0, 1)])


def test_nothing_comes_row_by_row() -> None:
    view = TopoView(Page(Target(stream=io.StringIO()), Presentation()), replace(METADATA, subject="topo"))
    with pytest.raises(TypeError, match="topo has no rows of CollectiveRow"):
        view.row(ROW)

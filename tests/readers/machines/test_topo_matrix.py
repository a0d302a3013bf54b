import contextlib
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubench.errors import UsageError
from gpubench.model.facts.snapshot import PairFacts, Snapshot
from gpubench.model.terms.verdict import Origin
from gpubench.readers.machines.topo_matrix import read as read_topo_matrix
from tests.examples import examples

CAPTURE = (Path(__file__).parents[2] / "machines" / "h200x4-smi-text" / "from.txt").read_text()

WITH_NICS = """\
	\x1b[4mGPU0	GPU1	NIC0	NIC1	NIC2	CPU Affinity	NUMA Affinity	GPU NUMA ID\x1b[0m
GPU0	 X 	NV18	PIX	NODE	SYS	0-55,112-167	0		N/A
GPU1	NV18	 X 	NODE	PXB	SYS	56-111	0-1		N/A
NIC0	PIX	NODE	 X 	NODE	SYS
NIC1	NODE	PXB	NODE	 X 	SYS
NIC2	SYS	SYS	SYS	SYS	 X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: rdmap16s27
  NIC2: rocep65s0
"""


def read(text: str) -> Snapshot:
    return read_topo_matrix(text, "topo.txt")


def paths(snapshot: Snapshot) -> dict[tuple[str, str], str | None]:
    return {(pair.source, pair.destination): pair.path for pair in snapshot.pairs}


def refusal(text: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read(text)
    assert caught.value.expected
    assert caught.value.reason
    assert caught.value.next_step
    return caught.value


def test_our_own_capture() -> None:
    snapshot = read(CAPTURE)
    assert snapshot.origin is Origin.RECORDED
    assert snapshot.source == "nvidia-smi text topo.txt"
    assert snapshot.host == ""
    assert (snapshot.driver.version, snapshot.driver.cuda) == ("580.159.04", "13.0")
    assert [gpu.index for gpu in snapshot.gpus] == [0, 1, 2, 3]
    assert [gpu.bus_id for gpu in snapshot.gpus] == [f"0000:00:0{i}.0" for i in (6, 7, 8, 9)]
    first = snapshot.gpus[0]
    assert (first.name, first.uuid) == ("NVIDIA H200", "GPU-89e4e384-defd-b940-9525-7b9d8aa44b8b")
    assert (first.cpu_affinity, first.place.numa_node) == ("0-63", 0)
    assert first.nvlinks is not None
    assert [(link.number, link.active, link.raw_gb_s) for link in first.nvlinks] == [
        (i, True, 26.562) for i in range(18)
    ]
    assert {link.peer_bus_id for link in first.nvlinks} == {None}
    assert len(snapshot.pairs) == 12
    assert list(snapshot.pairs) == [
        PairFacts(source=f"GPU{i}", destination=f"GPU{j}", path="NV18", read="OK", write="OK")
        for i in range(4)
        for j in range(4)
        if i != j
    ]


P2P = "\n".join(["\tGPU0\tGPU1\t", " GPU0\tX\t{0}\t", " GPU1\t{0}\tX\t", "", "Legend:", "  X    = Self", ""])


@pytest.mark.parametrize(
    ("letter", "field"), [("r", "read"), ("w", "write"), ("n", "nvlink"), ("a", "atomics"), ("p", "pci")]
)
def test_a_command_line_says_which_p2p_matrix_follows(letter: str, field: str) -> None:
    pair = read(f"user@node3:~$ nvidia-smi topo -p2p {letter}\n{P2P.format('GNS')}").pairs[0]
    assert pair == PairFacts(source="GPU0", destination="GPU1", **{field: "GNS"})  # type: ignore[arg-type]


def test_a_named_one_leaves_the_others_their_order() -> None:
    pair = read(P2P.format("OK") + "# nvidia-smi topo -p2p w\n" + P2P.format("TNS") + P2P.format("NS")).pairs[0]
    assert (pair.read, pair.write, pair.nvlink) == ("OK", "TNS", "NS")


def test_more_than_five_unnamed_p2p_matrices_are_not_guessed_at() -> None:
    words = ("OK", "CNS", "GNS", "TNS", "DR", "U")
    pair = read("".join(P2P.format(word) for word in words)).pairs[0]
    assert (pair.read, pair.write, pair.nvlink, pair.atomics, pair.pci) == words[:5]


def test_the_last_of_two_blocks_wins() -> None:
    old = WITH_NICS + "GPU 0: NVIDIA A (UUID: GPU-aa)\n\t Link 0: 25 GB/s\n\t Link 1: 25 GB/s\n"
    new = "\tGPU0\tGPU1\nGPU0\tX\tNV2\nGPU1\tNV2\tX\nGPU 0: NVIDIA B (UUID: GPU-bb)\n\t Link 0: <inactive>\n"
    snapshot = read(old + new)
    assert paths(snapshot) == {("GPU0", "GPU1"): "NV2", ("GPU1", "GPU0"): "NV2"}
    assert snapshot.nics == ()
    gpu = snapshot.gpus[0]
    assert (gpu.name, gpu.uuid) == ("NVIDIA B", "GPU-bb")
    assert gpu.nvlinks is not None
    assert [(link.number, link.active, link.raw_gb_s) for link in gpu.nvlinks] == [(0, False, None)]


def test_a_line_that_ends_with_a_gpus_name_is_no_header() -> None:
    assert len(read("waiting for GPU0\nusing GPU1, GPU2\n" + WITH_NICS).gpus) == 2


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("", "topo.txt, line 1: the text has no matrix"),
        ("GPU 0: NVIDIA H200 (UUID: GPU-aa)\n\n", "topo.txt, line 3: the text has no matrix"),
        (
            "a\nGPU0 GPU1 GPU2\nGPU0 X NV4 NV4\n",
            "topo.txt, line 2: the header names 3 devices, GPU0 to GPU2, but there is no row of GPU1, GPU2",
        ),
        ("GPU0 GPU1\nGPU0 X OK\n", "topo.txt, line 1: the header names 2 devices, GPU0 to GPU1, but there is no row"),
        ("GPU0 GPU1\n", "there is no row of GPU0, GPU1"),
        ("GPU0 GPU1\nGPU0 X NV4\nGPU1 PIX\n", "topo.txt, line 3: the row of GPU1 has 1 cell,"),
        ("GPU0 GPU1\nGPU0 X OK\nGPU1 OK\n", "topo.txt, line 3: the row of GPU1 has 1 cell,"),
        ("GPU0 GPU1\nGPU0 X\nGPU1 NV4 X\n", "topo.txt, line 2: the row of GPU0 has 1 cell,"),
        (
            "GPU0 GPU1\nGPU0 X N 0-3\n",
            "line 2: the row of GPU0 has 1 cell, then 'N', but the header on line 1 has 2 devices",
        ),
        ("GPU0 GPU1\nGPU0 X NV4 NV4\n", "topo.txt, line 2: the row of GPU0 has 3 cells,"),
        ("GPU0 GPU1\nGPU0 NV4 X\n", "topo.txt, line 2: the row of GPU0 has NV4 under GPU0"),
        ("GPU0 GPU1\nGPU0 X X\n", "topo.txt, line 2: the row of GPU0 has X under GPU1"),
        ("GPU0 GPU1\nGPU0 X NV4\nGPU1 NV4 X\nGPU1 PIX X\n", "line 4: this row of GPU1 contradicts the one on line 3"),
        ("GPU0 GPU1\nGPU0 X OK\nGPU1 NV4 X\n", "topo.txt, line 3: NV4 of topo -m is among the words of topo -p2p"),
    ],
)
def test_what_is_no_whole_matrix_is_refused_with_its_line(text: str, seen: str) -> None:
    error = refusal(text)
    assert seen in error.seen
    assert error.seen.startswith("topo.txt, line ")


@pytest.mark.parametrize(("gpus", "nics"), [(129, 0), (1, 513)])
def test_more_devices_than_a_node_has_are_refused(gpus: int, nics: int) -> None:
    names = [*(f"GPU{number}" for number in range(gpus)), *(f"NIC{number}" for number in range(nics))]
    rows = [" ".join([name, *("X" if other == name else "SYS" for other in names)]) for name in names[:2]]
    seen = refusal("\n".join(["", " ".join(names), *rows])).seen
    assert f"line 2: the header names {gpus} GPUs and {nics} other devices" in seen


def test_our_own_capture_cut_in_the_matrix_is_refused() -> None:
    cut = CAPTURE.index("GPU2\tNV18\tNV18\t X ")
    line = CAPTURE[:cut].count("\n") - 2
    assert f"line {line}: the header names 4 devices, GPU0 to GPU3, but there is no row of GPU2, GPU3" in (
        refusal(CAPTURE[:cut]).seen
    )
    assert f"line {line + 3}: the row of GPU2 has 2 cells" in refusal(CAPTURE[: cut + len("GPU2\tNV18\tNV18")]).seen


@dataclass(frozen=True)
class Machine:
    gpus: int
    nics: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    affinities: tuple[str, ...]
    nodes: tuple[str, ...]

    @property
    def devices(self) -> list[str]:
        return [*(f"GPU{i}" for i in range(self.gpus)), *self.nics]

    def expected(self) -> dict[tuple[str, str], str]:
        return {
            (source, destination): self.cells[i][j]
            for i, source in enumerate(self.devices)
            for j, destination in enumerate(self.devices)
            if i != j
        }


@dataclass(frozen=True)
class Style:
    tabs: bool
    underlined: str
    legend: bool
    cpu_column: bool
    numa_column: bool
    id_column: bool
    prefix: str
    ending: str


PATH_WORDS = ["PIX", "PXB", "PHB", "NODE", "SYS", "NV1", "NV4", "NV18"]
P2P_WORDS = ["OK", "CNS", "GNS", "TNS", "DR", "NS", "U"]
NIC_NAMES = ["mlx5_0", "mlx5_bond_0", "ibp12s0", "rdmap16s27", "rocep65s0", "hfi1_0", "eth0", "siw_eth0"]


def machines(words: list[str], nic_names: list[str]) -> st.SearchStrategy[Machine]:
    @st.composite
    def machine(draw: st.DrawFn) -> Machine:
        gpus = draw(st.integers(2, 8))
        nics = tuple(draw(st.lists(st.sampled_from(nic_names), unique=True, max_size=4))) if nic_names else ()
        size = gpus + len(nics)
        row = st.tuples(*[st.sampled_from(words)] * size)
        affinity = st.sampled_from(["0-63", "0-15,32-47", "7", "N/A"])
        return Machine(
            gpus,
            nics,
            draw(st.tuples(*[row] * size)),
            draw(st.tuples(*[affinity] * gpus)),
            draw(st.tuples(*[st.sampled_from(["0", "1", "0-1", "N/A"])] * gpus)),
        )

    return machine()


styles = st.builds(
    Style,
    tabs=st.booleans(),
    underlined=st.sampled_from(["", "\x1b[4m", "[4m", "^[[4m"]),
    legend=st.booleans(),
    cpu_column=st.booleans(),
    numa_column=st.booleans(),
    id_column=st.booleans(),
    prefix=st.sampled_from(["", "node3: ", "2026-01-02 03:04:05 ", "[1,0]<stdout>:", "> "]),
    ending=st.sampled_from(["\n", "\r\n"]),
)


def rendered(machine: Machine, style: Style) -> str:
    gap = "\t" if style.tabs else "    "
    short = [f"NIC{i}" for i in range(len(machine.nics))] if style.legend else machine.nics
    names = [*(f"GPU{i}" for i in range(machine.gpus)), *short]
    columns = [
        *(["CPU Affinity"] if style.cpu_column else []),
        *(["NUMA Affinity"] if style.numa_column else []),
        *(["GPU NUMA ID"] if style.id_column else []),
    ]
    end = style.underlined.replace("4m", "0m")
    lines = [f"{gap}{style.underlined}{gap.join([*names, *columns])}{end}"]
    for i, name in enumerate(names):
        cells = [" X " if i == j else machine.cells[i][j] for j in range(len(names))]
        values = (
            []
            if i >= machine.gpus
            else [
                *([machine.affinities[i]] if style.cpu_column else []),
                *([machine.nodes[i] + gap] if style.numa_column else []),
                *(["N/A"] if style.id_column else []),
            ]
        )
        lines.append(gap.join([name, *cells, *values]))
    lines += ["", "Legend:", "", "  X    = Self", "  NODE = Connection traversing PCIe"]
    if style.legend:
        lines += ["", "NIC Legend:", "", *(f"  NIC{i}: {nic}" for i, nic in enumerate(machine.nics))]
    return style.ending.join(style.prefix + line for line in lines)


@given(machines(PATH_WORDS, NIC_NAMES), styles)
def test_a_path_matrix_in_any_style_reads_back(machine: Machine, style: Style) -> None:
    snapshot = read(rendered(machine, style))
    assert paths(snapshot) == machine.expected()
    assert tuple(nic.name for nic in snapshot.nics) == machine.nics
    for gpu, affinity, node in zip(snapshot.gpus, machine.affinities, machine.nodes, strict=True):
        assert gpu.cpu_affinity == (affinity if style.cpu_column and affinity != "N/A" else None)
        assert gpu.place.numa_node == (int(node) if style.numa_column and node in "01" else None)


@given(machines(P2P_WORDS, []), styles)
def test_a_p2p_matrix_in_any_style_reads_back(machine: Machine, style: Style) -> None:
    snapshot = read(rendered(machine, style))
    assert {(pair.source, pair.destination): pair.read for pair in snapshot.pairs} == machine.expected()


@given(machines(PATH_WORDS, NIC_NAMES), styles, st.data())
def test_a_cut_matrix_never_loses_a_row_in_silence(machine: Machine, style: Style, data: st.DataObject) -> None:
    text = rendered(machine, style)
    text = text[: data.draw(st.integers(0, text.index("Legend:")))]
    with contextlib.suppress(UsageError):
        snapshot = read(text)
        assert snapshot.completed or len(snapshot.pairs) == len(machine.expected())


CUT = "     GPU0 GPU1 GPU2 NIC0 NIC1 CPU Affinity\nGPU0 X NV6 NV12 PXB SYS 0-31\nGPU1 NV6 X PIX PXB SYS 0-31\n"
WHOLE = f"{CUT}GPU2 NV12 PIX X SYS PXB 32-63\nNIC0 PXB PXB SYS X NODE\nNIC1 SYS SYS PXB NODE X\n"


@pytest.mark.parametrize(
    ("last", "completed"),
    [
        ("GPU2 NV12 PIX X SYS PXB 32-63\n", "NIC0, NIC1"),
        ("GPU2 NV12 PIX X SYS PXB 32-63\nNIC0 PXB PXB SYS X NODE\n", "NIC1"),
        ("GPU2 NV12 PIX X SYS PXB 32-63\nNIC0 PXB PXB", "NIC0, NIC1"),
        ("", "GPU2, NIC0, NIC1"),
        ("GPU2", "GPU2, NIC0, NIC1"),
        ("GPU2 NV12 PIX X", "GPU2, NIC0, NIC1"),
        ("GPU2 NV1", "GPU2, NIC0, NIC1"),
        ("GPU2 NV12 PIX X S", "GPU2, NIC0, NIC1"),
        ("GPU2 NV12 PIX X\n\nme@box:~$ \n", "GPU2, NIC0, NIC1"),
    ],
)
def test_rows_that_are_missing_are_completed_by_symmetry(last: str, completed: str) -> None:
    whole = {(pair.source, pair.destination): pair.path for pair in read(WHOLE).pairs}
    snapshot = read(CUT + last)
    assert snapshot.completed == completed
    found = {(pair.source, pair.destination): pair.path for pair in snapshot.pairs}
    assert found.items() <= whole.items()
    assert {pair for pair in whole if "NIC" not in pair[0] + pair[1]} <= found.keys()
    assert ("GPU0", "NIC1") in found
    assert read(WHOLE).completed == ""


@pytest.mark.parametrize("last", ["GPU2 NV6 PIX X", "GPU2 PIX", "GPU2 NV12 PIX X SYS PXB 32-63\nNIC0 SYS"])
def test_a_cut_row_that_contradicts_the_columns_is_refused(last: str) -> None:
    assert "the row of " in refusal(CUT + last).seen


@given(st.text(st.sampled_from("GPU01NICX\n\t :,VOK4SYmlx5_-|./ÅLink\x1b[")))
def test_garbage_is_refused_and_never_breaks(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert read(text).gpus


@settings(max_examples=examples(60))
@given(st.data())
def test_a_damaged_capture_is_read_or_refused(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, 5000))
    length = data.draw(st.integers(0, 300))
    text = CAPTURE[:start] + data.draw(st.text(max_size=8)) + CAPTURE[start + length :]
    with contextlib.suppress(UsageError):
        assert read(text[: data.draw(st.integers(0, len(text)))]).gpus

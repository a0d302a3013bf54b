import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubench.errors import UsageError
from gpubench.model.facts.snapshot import (
    GpuFacts,
    NicFacts,
    NicKind,
    NvlinkPeer,
    PcieLink,
    PciPlace,
    PciSwitch,
    Snapshot,
)
from gpubench.model.paths.topology import Topology
from gpubench.model.results.topo import tree_rows
from gpubench.model.terms.verdict import Origin
from gpubench.readers.machines.nccl_topology import read as read_nccl_topology
from tests.examples import examples

CAPTURE = (Path(__file__).parents[2] / "machines" / "h200x4-nccl-xml" / "from.xml").read_text()

VENDOR = """\
<!-- a vendor's file: no <gpu>, no <nic> -->
<system version="1">
  <cpu numaid="0" affinity="00000000,0000ffff" arch="x86_64" vendor="AuthenticAMD" familyid="23" modelid="49">
    <pci busid="ffff:ff:01.0" class="0x060400" link_speed="16 GT/s" link_width="16"> <!-- switch -->
      <pci busid="0003:00:00.0" class="0x030200" link_speed="16 GT/s" link_width="16"/>
      <pci busid="0103:00:00.0" class="0x020700" link_speed="16 GT/s" link_width="16"/>
      <pci busid="ffff:ff:02.0" class="0x060400" link_speed="8 GT/s" link_width="8">
        <pci busid="0004:00:00.0" class="0x030000" link_speed="2.5 GT/s PCIe" link_width="1"/>
        <pcilink/>
      </pci>
    </pci>
  </cpu>
  <cpu numaid="1" affinity="0000ffff,ff000001">
    <pci busid="0001:00:00.0" class="0x038000" link_speed="64.0 GT/s PCIe" link_width="4"/>
    <pci busid="0101:00:00.0" class="0x020000" vendor="0x1d0f" device="0xefa0" link_speed="8 GT/s" link_width="16"/>
    <pci busid="0102:00:00.0" class="0x020000" vendor="0x1D0F" link_speed="8 GT/s" link_width="16"/>
    <pci busid="0103:00:00.0" class="0x020000" vendor="0x1d0f" device="0xec20" link_speed="8 GT/s" link_width="16"/>
    <pci busid="0104:00:00.0" class="0x010802" link_speed="8 GT/s" link_width="4"/>
  </cpu>
</system>
"""


def read(text: str) -> Snapshot:
    return read_nccl_topology(text, "topo.xml")


def with_pci(inner: str, cpu: str = 'numaid="0"') -> Snapshot:
    return read(f"<system><cpu {cpu}>{inner}</cpu></system>")


def pci(address: str, inner: str = "", kind: str = "0x030200", more: str = "") -> str:
    return f'<pci busid="{address}" class="{kind}" link_speed="32.0 GT/s PCIe" link_width="16" {more}>{inner}</pci>'


def one_gpu(inner: str, more: str = "") -> GpuFacts:
    return with_pci(pci("0000:1b:00.0", inner, more=more)).gpus[0]


def one_nic(net: str, kind: str = "0x020000", more: str = "") -> NicFacts:
    return with_pci(pci("0000:1b:00.0", f"<nic><net {net}/></nic>", kind, more)).nics[0]


def refusal(text: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read(text)
    assert caught.value.seen.startswith("topo.xml, line ")
    assert caught.value.expected
    assert caught.value.reason
    assert caught.value.next_step
    return caught.value


def test_our_own_capture() -> None:
    snapshot = read(CAPTURE)
    assert (snapshot.host, snapshot.origin, snapshot.source) == ("", Origin.RECORDED, "NCCL topology topo.xml")
    assert snapshot.machine.cpu == "GenuineIntel family 6 model 207"
    assert (snapshot.machine.cpus, snapshot.machine.sockets, snapshot.machine.numa_nodes) == (None, None, ())
    assert [(gpu.index, gpu.bus_id) for gpu in snapshot.gpus] == [(i, f"0000:00:0{i + 6}.0") for i in range(4)]
    gpu = snapshot.gpus[0]
    assert gpu.compute_capability == "9.0"
    assert gpu.pcie == PcieLink(generation=5)
    assert gpu.unknown == {"pcie": "the file has link_width 0, which NCCL reads as 16"}
    assert gpu.place == PciPlace(host_bridge="cpu0")
    assert gpu.nvlinks is not None
    assert [link.number for link in gpu.nvlinks] == list(range(18))
    assert {(link.active, link.version, link.raw_gb_s, link.peer, link.peer_bus_id) for link in gpu.nvlinks} == {
        (True, "4.0", None, NvlinkPeer.SWITCH, None)
    }
    assert [(nic.name, nic.kind, nic.rate_gbit_s, nic.bus_id) for nic in snapshot.nics] == [
        ("eth0", NicKind.ETHERNET, 10.0, None)
    ]
    assert snapshot.nvswitches == ()


def test_a_vendors_file_tells_devices_by_their_class() -> None:
    snapshot = read(VENDOR)
    assert [(gpu.index, gpu.bus_id) for gpu in snapshot.gpus] == [
        (0, "0003:00:00.0"),
        (1, "0004:00:00.0"),
        (2, "0001:00:00.0"),
    ]
    assert {gpu.nvlinks for gpu in snapshot.gpus} == {None}
    assert snapshot.gpus[0].unknown == {"nvlinks": "the file has no <gpu> for it"}
    assert [(nic.name, nic.kind) for nic in snapshot.nics] == [
        ("nic0", NicKind.INFINIBAND),
        ("nic1", NicKind.EFA),
        ("nic2", NicKind.EFA),
        ("nic3", NicKind.ETHERNET),
    ]
    assert snapshot.nics[0].unknown == {"rate_gbit_s": "the file has no speed for it"}


def test_switches_and_what_hangs_below_them() -> None:
    snapshot = read(VENDOR)
    outer = PciPlace(host_bridge="cpu0", numa_node=0)
    inner = PciPlace(host_bridge="cpu0", numa_node=0, switches=("ffff:ff:01.0",))
    assert snapshot.switches == (
        PciSwitch(bus_id="ffff:ff:01.0", link=PcieLink(max_generation=4, max_width=16), place=outer),
        PciSwitch(bus_id="ffff:ff:02.0", link=PcieLink(max_generation=3, max_width=8), place=inner),
    )
    assert snapshot.gpus[0].place == snapshot.nics[0].place == inner
    assert snapshot.gpus[1].place.switches == ("ffff:ff:01.0", "ffff:ff:02.0")
    assert snapshot.gpus[1].pcie == PcieLink(generation=1, width=1)
    assert snapshot.gpus[2].pcie == PcieLink(generation=6, width=4)


def test_a_device_without_a_class_is_one_of_unknown_kind_where_it_hangs() -> None:
    leaf = "<pci busid='0000:00:{}.0'/>"
    text = (
        "<system version='1'><cpu numaid='0'>" + leaf.format("16") + leaf.format("17") + "</cpu><cpu numaid='1'>"
        "<pci busid='0000:45:00.0'><pci busid='0000:4f:00.0' link_speed='16 GT/s' link_width='8'/></pci></cpu></system>"
    )
    found = read(text)
    assert (found.gpus, found.nics, [switch.bus_id for switch in found.switches]) == ((), (), ["0000:45:00.0"])
    assert [(device.bus_id, device.kind, device.place) for device in found.pci_devices] == [
        ("0000:00:16.0", "unknown", PciPlace(host_bridge="cpu0", numa_node=0)),
        ("0000:00:17.0", "unknown", PciPlace(host_bridge="cpu0", numa_node=0)),
        ("0000:4f:00.0", "unknown", PciPlace(host_bridge="cpu1", numa_node=1, switches=("0000:45:00.0",))),
    ]
    assert found.pci_devices[2].link == PcieLink(max_generation=4, max_width=8)
    assert "3 devices without a class: GPUs or NICs" in found.source
    assert [(row.depth, row.element, row.what, row.gb_s) for row in tree_rows(Topology(found))][2:4] == [
        (2, "0000:00:16.0", "device of unknown kind", None),
        (2, "0000:00:17.0", "device of unknown kind", None),
    ]
    assert list(tree_rows(Topology(found)))[-1].gb_s == 15.754


@pytest.mark.parametrize(
    ("cpu", "bridge", "node", "model"),
    [
        ('numaid="3" arch="arm64"', "cpu3", 3, "arm64"),
        ('numaid="-1"', "cpu0", None, None),
        ('familyid="6"', "cpu0", None, "family 6"),
        ('numaid="0x1"', "cpu1", 1, None),
    ],
)
def test_a_cpu_without_a_node_is_named_by_its_position(
    cpu: str, bridge: str, node: int | None, model: str | None
) -> None:
    snapshot = with_pci(pci("0000:1b:00.0"), cpu)
    assert snapshot.gpus[0].place == PciPlace(host_bridge=bridge, numa_node=node)
    assert snapshot.machine.cpu == model


def test_a_file_that_joins_two_hosts_keeps_them_apart() -> None:
    host = '<cpu host_hash="0x{0}" numaid="0">{1}</cpu>'
    gpu = pci("0000:1b:00.0", '<gpu dev="5" sm="100"/>') + pci("0000:1c:00.0", '<gpu dev="4" sm="100"/>')
    net = '<nic><net name="mlx5_0" port="1" speed="400000"/></nic>'
    inner = gpu + pci("0000:2b:00.0", net, "0x020700")
    hosts = "".join(host.format(i, inner) for i in range(3))
    snapshot = read(f"<system>{hosts}</system>")
    assert snapshot.source == "NCCL topology topo.xml (3 hosts in one file, shown as one)"
    assert [gpu.index for gpu in snapshot.gpus] == list(range(6))
    assert [gpu.place.host_bridge for gpu in snapshot.gpus] == ["cpu0", "cpu0", "cpu0#1", "cpu0#1", "cpu0#2", "cpu0#2"]
    assert [nic.name for nic in snapshot.nics] == ["mlx5_0", "mlx5_0:1", "mlx5_0#2"]


@pytest.mark.parametrize(
    ("link", "expected", "reason"),
    [
        ('link_speed="16 GT/s" link_width="16"', PcieLink(generation=4, width=16), None),
        ('link_speed="2.5GT/s" link_width="0x8"', PcieLink(generation=1, width=8), None),
        (
            'link_speed="" link_width="0"',
            PcieLink(),
            "the file has no link_speed; the file has link_width 0, which NCCL reads as 16",
        ),
        (
            'link_speed="8 GT/s" link_width=""',
            PcieLink(generation=3),
            "the file has link_width 0, which NCCL reads as 16",
        ),
        ('link_speed="8 GT/s"', PcieLink(generation=3), "the file has no link_width"),
        ('link_speed="Unknown" link_width="4"', PcieLink(width=4), "the file has link_speed 'Unknown'"),
        (
            'link_speed="7 GT/s" link_width="63"',
            PcieLink(),
            "the file has link_speed '7 GT/s'; the file has link_width 63",
        ),
    ],
)
def test_pcie_links(link: str, expected: PcieLink, reason: str | None) -> None:
    for kind in ("0x030200", "0x020700"):
        snapshot = with_pci(f'<pci busid="1b:00.0" class="{kind}" {link}/>')
        device = snapshot.gpus[0] if snapshot.gpus else snapshot.nics[0]
        assert device.bus_id == "0000:1b:00.0"
        most = PcieLink(max_generation=expected.generation, max_width=expected.width)
        assert device.pcie == (expected if snapshot.gpus else most)
        assert device.unknown.get("pcie") == reason


@pytest.mark.parametrize(
    ("attributes", "kind", "gpudirect"),
    [
        ('name="eth0" gdr="1"', NicKind.ROCE, True),
        ('name="eth0" gdr="0"', NicKind.ETHERNET, False),
        ('name="mlx5_0" gdr="1"', NicKind.INFINIBAND, True),
        ('name="rdmap1" gdr="1"', NicKind.EFA, True),
        ('name="mlx5_0"', NicKind.INFINIBAND, None),
    ],
)
def test_what_nccl_found_of_gpudirect(attributes: str, kind: NicKind, gpudirect: bool | None) -> None:
    (nic,) = with_pci(f'<pci busid="1b:00.0"><nic><net {attributes}/></nic></pci>').nics
    assert (nic.kind, nic.gpudirect, nic.rdma) == (kind, gpudirect, kind is not NicKind.ETHERNET)


@pytest.mark.parametrize(
    ("device", "most", "what"),
    [
        ('<pci busid="{:x}:00:00.0" class="0x030200"/>', 128, "GPUs"),
        ('<pci busid="{:x}:00:00.0" class="0x020700"/>', 512, "NICs"),
        ('<nic><net name="eth{}"/></nic>', 512, "NICs"),
        ('<pci busid="{:x}:00:00.0" class="0x060400"/>', 1024, "PCIe switches"),
    ],
)
def test_more_devices_than_a_node_has_are_refused_with_a_line(device: str, most: int, what: str) -> None:
    lines = [device.format(number) for number in range(most + 1)]
    assert with_pci("\n".join(lines[:-1])).origin is Origin.RECORDED
    with pytest.raises(
        UsageError, match=rf"^topo\.xml, line {most + 1}: <\w+>: the file has more than {most} {what}\n"
    ):
        with_pci("\n".join(lines))


@pytest.mark.parametrize(
    ("sm", "capability", "version", "raw_gb_s"),
    [
        (60, "6.0", "1.0", None),
        (70, "7.0", "2.0", None),
        (75, "7.5", "2.0", None),
        (80, "8.0", "3.0", 25.0),
        (86, "8.6", "3.1", 14.0625),
        (89, "8.9", None, None),
        (90, "9.0", "4.0", None),
        (100, "10.0", "5.0", None),
        (103, "10.3", "5.0", None),
        (120, "12.0", "5.0", None),
    ],
)
def test_nvlinks_by_generation_of_gpu(sm: int, capability: str, version: str | None, raw_gb_s: float | None) -> None:
    gpu = one_gpu(f'<gpu sm="{sm}"><nvlink target="0000:1c:00.0" count="2" tclass="0x030200"/></gpu>')
    assert gpu.compute_capability == capability
    assert gpu.nvlinks is not None
    assert [(link.version, link.raw_gb_s) for link in gpu.nvlinks] == [(version, raw_gb_s)] * 2


@pytest.mark.parametrize(
    ("target", "tclass", "peer", "far_end"),
    [
        ("0000:1c:00.0", "0x030200", NvlinkPeer.GPU, "0000:1c:00.0"),
        ("0000:C4:00.0", "0x068000", NvlinkPeer.SWITCH, "0000:c4:00.0"),
        ("0004:04:00.0", "0x068001", NvlinkPeer.CPU, "0004:04:00.0"),
        ("fffffff:ff:ff.0", "0x068000", NvlinkPeer.SWITCH, None),
        ("ffffffff:ff:ff.0", "0x030000", NvlinkPeer.GPU, None),
        ("0000:1c:00.0", "0x088000", None, "0000:1c:00.0"),
        ("", "", None, None),
    ],
)
def test_far_ends_of_nvlinks(target: str, tclass: str, peer: NvlinkPeer | None, far_end: str | None) -> None:
    gpu = one_gpu(f'<gpu sm="90"><nvlink target="{target}" count="1" tclass="{tclass}"/></gpu>')
    assert gpu.nvlinks is not None
    assert [(link.peer, link.peer_bus_id) for link in gpu.nvlinks] == [(peer, far_end)]
    assert gpu.unknown == {}


def test_a_gpu_that_is_its_own_far_end_is_a_placeholder() -> None:
    gpu = one_gpu('<gpu sm="80"><nvlink target="0000:1b:00.0" count="1" tclass="0x030200"/></gpu>')
    assert gpu.nvlinks is not None
    assert [(link.peer, link.peer_bus_id) for link in gpu.nvlinks] == [(NvlinkPeer.GPU, None)]
    assert gpu.unknown == {"nvlinks": "the file has the GPU itself as the far end"}


def test_a_gpu_in_a_dump_without_nvlinks_has_none() -> None:
    gpu = one_gpu("<gpu/>")
    assert gpu.nvlinks == ()
    assert gpu.compute_capability is None


def test_amd_gpus_have_xgmi_links_and_compute_units() -> None:
    links = '<xgmi target="0000:20:00.0" count="1" tclass="0x038000"/>'
    snapshot = with_pci(pci("0000:1d:00.0", f'<gpu dev="0" sm="64" gcn="906">{links}</gpu>', "0x038000"))
    gpu = snapshot.gpus[0]
    assert (gpu.multiprocessors, gpu.compute_capability) == (64, None)
    assert gpu.nvlinks is not None
    assert [(link.version, link.peer, link.peer_bus_id) for link in gpu.nvlinks] == [
        ("xGMI", NvlinkPeer.GPU, "0000:20:00.0")
    ]
    assert snapshot.source == "NCCL topology topo.xml (RCCL: nvlinks are AMD xGMI)"


@pytest.mark.parametrize(("inner", "more"), [('<gpu sm="60" gcn="906"/>', ""), ('<gpu sm="60"/>', 'vendor="0x1002"')])
def test_an_amd_gpu_without_links_is_known_by_vendor_or_architecture(inner: str, more: str) -> None:
    assert one_gpu(inner, more).multiprocessors == 60


@pytest.mark.parametrize(
    ("net", "kind", "more", "expected"),
    [
        ('name="mlx5_0"', "0x020700", "", NicKind.INFINIBAND),
        ('name="ib0"', "0x020700", "", NicKind.INFINIBAND),
        ('name="mlx5_0"', "0x020000", "", NicKind.ROCE),
        ('name="bnxt_re0"', "0x020000", "", NicKind.ROCE),
        ('name="hfi1_0"', "0x020800", "", NicKind.INFINIBAND),
        ('name="rdmap16s27"', "0x020000", "", NicKind.EFA),
        ('name="efa_0"', "0x020000", "", NicKind.EFA),
        ('name="ens32"', "0x020000", 'vendor="0x1d0f" device="0xec20"', NicKind.ETHERNET),
        ('name="eth0"', "0x020000", 'vendor="0x15b3"', NicKind.ETHERNET),
    ],
)
def test_kinds_of_nics(net: str, kind: str, more: str, expected: NicKind) -> None:
    assert one_nic(net, kind, more).kind is expected


def test_an_rdma_device_without_a_pci_class_may_be_either() -> None:
    nic = with_pci('<nic><net name="mlx5_0" speed="400000"/></nic>').nics[0]
    assert nic.kind is NicKind.INFINIBAND
    assert set(nic.unknown) == {"kind"}


@pytest.mark.parametrize(("speed", "rate"), [("400000", 400.0), ("0", None), ("-1", None), ("", None)])
def test_rates_of_nics(speed: str, rate: float | None) -> None:
    nic = one_nic(f'name="mlx5_0" speed="{speed}"')
    assert nic.rate_gbit_s == rate
    assert ("rate_gbit_s" in nic.unknown) == (rate is None)


def test_several_ports_of_a_nic_are_nics_and_the_same_port_is_one() -> None:
    port = '<net name="mlx5_0" port="{}" speed="1000"/>'
    nets = f"<nic>{port.format(1)}{port.format(2)}{port.format(2)}</nic>"
    snapshot = with_pci(pci("0000:1b:00.0", nets, "0x020700"))
    assert [nic.name for nic in snapshot.nics] == ["mlx5_0", "mlx5_0:2"]


def test_nics_without_a_name_leave_those_that_are_taken() -> None:
    named = pci("0000:1b:00.0", '<nic><net name="nic0"/></nic>', "0x020000")
    assert [nic.name for nic in with_pci(named + pci("0000:1c:00.0", "", "0x020000")).nics] == ["nic0", "nic1"]


def test_a_bridge_without_a_class_is_a_switch_when_devices_hang_below() -> None:
    snapshot = with_pci(f'<pci busid="0000:01:00.0">{pci("0000:1b:00.0")}</pci>')
    assert [switch.bus_id for switch in snapshot.switches] == ["0000:01:00.0"]
    assert snapshot.gpus[0].place.switches == ("0000:01:00.0",)


GPU = pci("0000:1b:00.0")


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("<system>\n<cpu>\n", "topo.xml, line 3: the XML is broken at column 1: no element found"),
        ("<system>\n<cpu numaid='0", "topo.xml, line 2: the XML is broken at column 1: unclosed token"),
        ("<system>\n</cpu></system>", "topo.xml, line 2: the XML is broken at column 3: mismatched tag"),
        ("<system/>\n<system/>", "topo.xml, line 2: the XML is broken at column 1: junk after document element"),
        ("", "topo.xml, line 1: the XML is broken at column 1: no element found"),
        ("<system>\n\ud800</system>", "topo.xml, line 2: the XML is broken at column 1: not well-formed"),
        ("<!-- x -->\n<graphs version='1'/>", "topo.xml, line 2: <graphs> instead of <system>"),
        ("\n<system version='1'/>", "topo.xml, line 2: <system>: it has no <cpu> with a GPU"),
        ("<system><cpu numaid='0'/></system>", "topo.xml, line 1: <system>: it has no <cpu> with a GPU"),
        ("<system>\n<cpu><pci class='0x030200'/></cpu></system>", "topo.xml, line 2: <pci>: it has no busid"),
        ("<system>\n<cpu numaid='one'/></system>", "topo.xml, line 2: <cpu>: numaid is 'one'"),
        ("<system><cpu affinity='xyz'/></system>", "topo.xml, line 1: <cpu>: affinity is 'xyz'"),
        ("<system><cpu affinity='fffffffff'/></system>", "topo.xml, line 1: <cpu>: affinity is 'fffffffff'"),
        ("<system>\n" * 65, "topo.xml, line 65: <system>: elements are nested more than 64 deep"),
    ],
)
def test_what_is_no_topology_is_refused_with_its_line(text: str, seen: str) -> None:
    assert refusal(text).seen.startswith(seen)


@pytest.mark.parametrize("count", ["", "-1", "37", "1000000000", "many"])
def test_impossible_counts_of_nvlinks_are_refused(count: str) -> None:
    gpu = f'\n<gpu sm="90"><nvlink target="0000:1c:00.0" count="{count}" tclass="0x030200"/></gpu>'
    error = refusal(f"<system><cpu>{pci('0000:1b:00.0', gpu)}</cpu></system>")
    assert error.seen.startswith("topo.xml, line 2: <nvlink>: count is ")


@pytest.mark.parametrize(
    ("root", "reason"),
    [
        ("graphs", "it is NCCL's graph dump (NCCL_GRAPH_DUMP_FILE)"),
        ("topology", "it is hwloc's topology (lstopo)"),
        ("nvidia_smi_log", "it is the output of nvidia-smi -q -x"),
        ("html", "it is another program's XML"),
    ],
)
def test_the_xml_of_others_is_named(root: str, reason: str) -> None:
    error = refusal(f"<{root}/>")
    assert error.reason.startswith(reason)
    assert "NCCL_TOPO_DUMP_FILE" in error.next_step
    with_type = refusal(f'<?xml version="1.0"?>\n<!DOCTYPE {root} SYSTEM "x.dtd">\n<{root}/>')
    assert with_type.seen == "topo.xml, line 2: a document type (<!DOCTYPE>)"
    assert with_type.reason.startswith(reason)


@pytest.mark.parametrize(
    "declaration",
    [
        '<!ENTITY a "aaaaaaaaaa">'
        + "".join(f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
        '<!ENTITY i SYSTEM "file:///etc/passwd">',
        '<!ENTITY % i SYSTEM "file:///etc/passwd">',
    ],
)
def test_entities_are_refused_where_they_are_declared(declaration: str) -> None:
    text = f"<!DOCTYPE system [\n{declaration}]>\n<system><cpu numaid='&i;'>{GPU}</cpu></system>"
    error = refusal(text)
    assert error.seen == "topo.xml, line 1: a document type (<!DOCTYPE>)"
    assert "passwd" not in str(error)


@given(st.lists(st.sets(st.integers(0, 127), min_size=1), min_size=1, max_size=4))
def test_cpu_masks_read_back(nodes: list[set[int]]) -> None:
    cpus = ""
    for number, held in enumerate(nodes):
        digits = f"{sum(1 << cpu for cpu in held):032x}"
        mask = ",".join(digits[i : i + 8] for i in range(0, 32, 8))
        cpus += f'<cpu numaid="{number}" affinity="{mask}">{pci(f"0000:{number:02x}:00.0")}</cpu>'
    machine = read(f"<system>{cpus}</system>").machine
    assert machine.cpus == len(set().union(*nodes))
    for node, held in zip(machine.numa_nodes, nodes, strict=True):
        ranges = [(part.split("-")[0], part.split("-")[-1]) for part in node.cpus.split(",")]
        assert {cpu for first, last in ranges for cpu in range(int(first), int(last) + 1)} == held


@given(st.text() | st.text(st.sampled_from("<>/\"'= systemcpu?!&;-")))
def test_garbage_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        read(text)


@settings(max_examples=examples(60))
@given(st.sampled_from([CAPTURE, VENDOR]), st.data())
def test_a_damaged_file_is_read_or_refused(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    put = data.draw(st.text(max_size=6) | st.sampled_from(['"', "<", "/>", "-1", "99999999999", 'speed="x"', "&amp;"]))
    text = text[:start] + put + text[start + data.draw(st.integers(0, 60)) :]
    with contextlib.suppress(UsageError):
        read(text)


@given(st.data())
def test_a_truncated_file_is_refused(data: st.DataObject) -> None:
    with pytest.raises(UsageError, match=r"^topo\.xml, line \d+: "):
        read(CAPTURE[: data.draw(st.integers(0, CAPTURE.rindex(">")))])

"""Causes found in trees like /sys, /proc and /dev, and trees of nonsense, which must neither show causes nor crash."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from gpubench.machine.probe import merge
from gpubench.machine.process import read_rank_facts
from gpubench.machine.sysfs import read_sysfs
from gpubench.measure.paths import Explained
from gpubench.measure.topo import survey
from gpubench.model.facts.snapshot import PairFacts, Snapshot
from gpubench.model.paths.nodes import group_nodes
from gpubench.model.paths.topology import Topology
from tests.fakes.sysfs import BRIDGE, CONNECTX7, H200, Tree, config_space, link, port
from tests.machine.test_reading import as_nobody

_ACS = 0x0D
_REDIRECTING, _QUIET = 0x001D_005F, 0x0000_005F
_TOP = "pci0000:00/0000:00:01.0"
_UPSTREAM = f"{_TOP}/0000:01:00.0"


def tree_of(
    root: Path, *, acs: int | None = _QUIET, groups: str = "111", group_type: str = "identity", uplink: int = 16
) -> Tree:
    """Two GPUs and a NIC below one switch, in these IOMMU groups; without `acs` the ports have only the
    configuration space that users can read.
    """
    tree = Tree(root)
    cards = (("0", H200), ("1", H200), ("2", CONNECTX7))
    for path in (_TOP, _UPSTREAM, *(f"{_UPSTREAM}/0000:02:0{number}.0" for number, _ in cards)):
        width = uplink if path == _UPSTREAM else 16
        folder = tree.pci(path, BRIDGE | link(width=width))
        space = config_space((_ACS, acs or 0))
        (folder / "config").write_bytes(space if acs is not None else space[:64])
    for (number, files), group_number in zip(cards, groups, strict=True):
        bus_id = f"0000:0{int(number) + 3}:00.0"
        path = f"{_UPSTREAM}/0000:02:0{number}.0/{bus_id}"
        folder = tree.pci(path, files | link(), "nvidia" if files is H200 else "mlx5_core")
        (folder / "config").write_bytes(config_space())
        (folder / "iommu_group").symlink_to(f"../../../kernel/iommu_groups/{group_number}")
        tree.write(f"sys/kernel/iommu_groups/{group_number}/type", group_type)
        if files is CONNECTX7:
            tree.rdma("mlx5_0", folder, port(), hca_type="MT4129")
            tree.write("sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0")
    tree.write("proc/version", "Linux version 6.8.0-40-generic (buildd@host)")
    tree.write("proc/cpuinfo", "processor\t: 0\nmodel name\t: Intel(R) Xeon(R)\nflags\t: fpu")
    tree.write("proc/driver/nvidia/params", "NvLinkDisable: 0\nGrdmaPciTopoCheckOverride: 0")
    tree.write("sys/module/nvidia_peermem/version", "580.1")
    for file in ("nvidia0", "nvidia1", "infiniband/uverbs0"):
        tree.write(f"dev/{file}", "")
    tree.write("usr/lib/libibverbs.so.1", "")
    tree.write("etc/libibverbs.d/mlx5.driver", "driver mlx5")
    return tree


def snapshot_of(root: Path) -> Snapshot:
    """Read the tree as if NVML had granted peer access."""
    snapshot = merge("tree", read_sysfs(root), None, None, [])
    pairs = [PairFacts(source=f"GPU{one}", destination=f"GPU{1 - one}", cuda=True, read="OK") for one in range(2)]
    return replace(snapshot, pairs=tuple(pairs), gpus=tuple(replace(gpu, nvlinks=()) for gpu in snapshot.gpus))


def explained(root: Path, **environment: str) -> Explained:
    facts = replace(read_rank_facts(0, 0, 0, environment, root), memlock_bytes=-1, affinity="0")
    nodes = [Topology(snapshot_of(root))]
    return survey(nodes, group_nodes(nodes), [facts])


def ids(found: Explained) -> list[str]:
    return [row.id for row in found.conditions() if row.implied_by is None]


def test_a_healthy_tree_yields_none(tmp_path: Path) -> None:
    assert ids(explained(tree_of(tmp_path).root)) == []


@pytest.mark.parametrize(
    ("file", "text", "cause"),
    [
        ("proc/driver/nvidia/params", "NvLinkDisable: 1", "nvlink-disabled"),
        ("etc/nccl.conf", "NCCL_P2P_DISABLE=1", "nccl-p2p-disabled"),
        ("etc/nccl.conf", "NCCL_IB_HCA=ib7", "nccl-ib-hca"),
        ("proc/version", "Linux version 5.15.90.1-microsoft-standard-WSL2 (x)", "wsl"),
    ],
)
def test_a_file_shows_a_cause(tmp_path: Path, file: str, text: str, cause: str) -> None:
    tree = tree_of(tmp_path)
    tree.write(file, text)
    assert ids(explained(tree.root))[0] == cause


@pytest.mark.parametrize("missing", ["usr/lib/libibverbs.so.1", "dev/infiniband/uverbs0"])
def test_a_missing_file_shows_a_cause(tmp_path: Path, missing: str) -> None:
    tree = tree_of(tmp_path)
    (tree.root / missing).unlink()
    cause = {"usr/lib/libibverbs.so.1": "libibverbs-missing"}.get(missing, "infiniband-files-missing")
    assert ids(explained(tree.root))[0] == cause


def test_registers_show_redirection(tmp_path: Path) -> None:
    assert ids(explained(tree_of(tmp_path, acs=_REDIRECTING).root)) == ["acs-redirect", "acs-nic-redirect"]


def test_what_only_root_may_read_is_said_to_need_root_or_seen_in_the_groups(tmp_path: Path) -> None:
    found = explained(tree_of(tmp_path / "split", acs=None, groups="123").root)
    assert ids(found) == ["acs-redirect", "acs-nic-redirect"]
    assert "IOMMU groups" in found.conditions()[0].evidence
    reasons = {row.id: row.reason for row in explained(tree_of(tmp_path / "one", acs=None).root).unread()}
    assert "needs root" in reasons["acs-redirect"]
    assert "needs root" in reasons["acs-nic-redirect"]


def test_a_translating_iommu_and_a_narrow_uplink(tmp_path: Path) -> None:
    assert ids(explained(tree_of(tmp_path / "a", group_type="DMA-FQ").root)) == ["iommu-translating"]
    assert ids(explained(tree_of(tmp_path / "b", uplink=8).root)) == ["pcie-uplink"]


NONSENSE = (
    b"",
    b"\0\xff\xfe" * 40,
    b"DMA-FQ extra words",
    b"-1",
    b"9" * 400,
    b"0x",
    "\u202eNvLinkDisable: \u0661".encode(),
)


@pytest.mark.parametrize("content", NONSENSE)
def test_nonsense_in_every_file_breaks_nothing_and_blames_nobody(tmp_path: Path, content: bytes) -> None:
    tree = tree_of(tmp_path)
    kept = ("class", "vendor", "device")
    for path in sorted(tree.root.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.name not in kept and "lib" not in path.parts[-1]:
            path.write_bytes(content)
    found = explained(tree.root)
    assert ids(found) == []
    assert all(row.reason for row in found.unread())


def test_half_of_a_file_is_no_cause(tmp_path: Path) -> None:
    """Three files are cut before their values; each whole file would show a cause."""
    files = (
        ("etc/nccl.conf", "NCCL_DEBUG=INFO\nNCCL_P2P_DISABLE", "=1\n", "nccl-p2p-disabled"),
        ("proc/driver/nvidia/params", "NvLinkDisable", ": 1\nGrdmaPciTopoCheckOverride: 2\n", "nvlink-disabled"),
        ("proc/version", "Linux version 5.15.90.1-", "microsoft-standard-WSL2", "wsl"),
    )
    tree = tree_of(tmp_path)
    for length in range(max(len(before) for _, before, _, _ in files) + 1):
        for file, before, _, _ in files:
            tree.write(file, before[:length])
        assert ids(explained(tree.root)) == [], length
    for file, before, rest, cause in files:
        tree.write(file, before + rest)
        assert cause in ids(explained(tree.root))


def test_where_nothing_may_be_read_nothing_is_blamed_and_the_reasons_are_said(tmp_path: Path) -> None:
    tree = tree_of(tmp_path / "open")
    snapshot = snapshot_of(tree.root)
    closed = tree_of(tmp_path / "closed").root
    closed.chmod(0)
    with as_nobody(closed):
        facts, process = read_sysfs(closed).node, read_rank_facts(0, 0, 0, {}, closed)
    closed.chmod(0o700)
    nodes = [
        Topology(
            replace(
                snapshot, pci_devices=facts.pci_devices, rdma_ports=facts.rdma_ports, kernel=facts.kernel,
                driver_settings=facts.driver_settings, switches=facts.switches, gpudirect=facts.gpudirect,
            )
        )
    ]  # fmt: skip
    found = survey(nodes, group_nodes(nodes), [replace(process, memlock_bytes=-1)])
    assert ids(found) == []
    reasons = {row.id: row.reason for row in found.unread()}
    assert reasons["nvlink-disabled"] == "params: Permission denied"
    assert all(reasons.values())


def test_nothing_at_all_is_no_cause(tmp_path: Path) -> None:
    assert ids(explained(tmp_path)) == []

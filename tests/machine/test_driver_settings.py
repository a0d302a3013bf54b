"""The driver's parameters and registry keys, and the programs beside it, on trees written for the purpose."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.machine import sysfs
from gpubench.machine.sysfs import read_driver_settings, read_services
from tests.fakes.sysfs import Tree

PARAMS = """\
ResmanDebugLevel: 4294967295
NvLinkDisable: 0
EnableResizableBar: 1
DmaRemapPeerMmio: 1
GrdmaPciTopoCheckOverride: 2
CoherentGPUMemoryMode: ""
RegistryDwords: "ForceP2P=0x11; RMForceP2PType = 1;RmLogonRC=1;PeerMappingOverride=1"
RegistryDwordsPerDevice: "pci=0000:1B:00.0;RMNvLinkControl=1;pci=0000:1c:00.0;RmMsg=x;ForceP2P=0"
RmMsg: ""
TemporaryFilePath: "/var/tmp"
"""
MISMATCH = """\
Fabric Manager version 550.90.07 is running
fabric manager NVIDIA GPU driver interface version 570.86.15 don't match with driver version 570.124.06."""
HIDDEN = "this is the PID namespace of a container, so the host's processes are not visible"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_of_the_parameters_only_those_that_bear_on_paths_are_kept(tree: Tree) -> None:
    tree.write("proc/driver/nvidia/params", PARAMS)
    settings = read_driver_settings(tree.root)
    assert settings.parameters == {
        "NvLinkDisable": "0",
        "EnableResizableBar": "1",
        "DmaRemapPeerMmio": "1",
        "GrdmaPciTopoCheckOverride": "2",
        "CoherentGPUMemoryMode": "",
    }
    assert settings.registry_keys == {
        "ForceP2P": "0x11",
        "RMForceP2PType": "1",
        "PeerMappingOverride": "1",
        "RMNvLinkControl@0000:1b:00.0": "1",
        "ForceP2P@0000:1c:00.0": "0",
    }
    assert not {"parameters", "registry_keys"} & set(settings.unknown)


def test_what_modprobe_will_set(tree: Tree) -> None:
    tree.write("etc/modprobe.d/a.conf", "# options nvidia NVreg_NvLinkDisable=9\noptions nvidia NVreg_NvLinkDisable=1")
    tree.write(
        "usr/lib/modprobe.d/b.conf",
        'options nvidia-current NVreg_RmNvlinkBandwidth=HALF NVreg_RegistryDwords="ForceP2P=0;Other=1" NVreg_Other=1\n'
        "options nvidia_drm modeset=1\nblacklist nouveau",
    )
    tree.write("usr/lib/modprobe.d/a.conf", "options nvidia NVreg_NvLinkDisable=0")
    tree.write("etc/modprobe.d/b.conf.bak", "options nvidia NVreg_NvLinkDisable=3")
    assert read_driver_settings(tree.root).configured == {
        "NvLinkDisable": "1",
        "RmNvlinkBandwidth": "HALF",
        "ForceP2P": "0",
    }


def a_host(tree: Tree, **names: str) -> None:
    """A host's /proc with these processes, by pid ('p71')."""
    tree.symlink("proc/self/ns/pid", "pid:[4026531836]")
    for pid, name in ({"p1": "systemd"} | names).items():
        tree.write(f"proc/{pid[1:]}/comm", name)


def test_children_of_the_first_process_come_first_and_too_many_are_too_many(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysfs, "_MOST_PROCESSES", 3)
    a_host(tree, p71="nvlsm", **{f"p{pid}": "job" for pid in range(100, 140)})
    tree.write("proc/1/task/1/children", "71")
    found, unknown = read_services(tree.root)
    assert (found["nvlsm"].running, found["nvidia-imex"].running) == (True, None)
    assert unknown["services.nvidia-imex.running"] == "more than 3 processes run"


def test_in_a_container_services_are_unknown(tree: Tree) -> None:
    a_host(tree, p71="nvlsm")
    (tree.root / "proc/self/ns/pid").unlink()
    tree.symlink("proc/self/ns/pid", "pid:[4026532999]")
    found, unknown = read_services(tree.root)
    assert {each.running for each in found.values()} == {None}
    assert unknown["services.nvlsm.running"] == HIDDEN


def test_in_a_real_namespace_of_processes_services_are_unknown() -> None:
    reading = "import pathlib; from gpubench.machine.sysfs import read_services as r; print(r(pathlib.Path('/'))[1])"
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", reading]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except OSError:
        pytest.skip("no unshare here")
    if result.returncode != 0 and "unshare" in result.stderr:
        pytest.skip(f"no namespaces here: {result.stderr}")
    assert HIDDEN in result.stdout, result.stderr


@pytest.mark.parametrize(
    ("log", "version"),
    [
        (MISMATCH, "570.86.15"),
        ("x" * 100_000 + "\nFabric Manager version: 580.95.05", "580.95.05"),
        ("Fabric Manager version 580.95.05\n" + "x" * 100_000, None),
        ("", None),
    ],
)
def test_the_version_that_a_service_last_wrote(tree: Tree, log: str, version: str | None) -> None:
    tree.write("var/log/fabricmanager.log", log)
    found, unknown = read_services(tree.root)
    assert found["nv-fabricmanager"].version == version
    reason = unknown.get("services.nv-fabricmanager.version")
    assert reason == (None if version else "fabricmanager.log has no version at its end")


@given(st.text(max_size=80), st.sampled_from(["", "NvLinkDisable: ", 'RegistryDwords: "ForceP2P']))
def test_no_text_of_parameters_is_an_error(tmp_path_factory: pytest.TempPathFactory, text: str, head: str) -> None:
    tree = Tree(tmp_path_factory.getbasetemp() / "driver")
    content = (head + text).encode("utf-8", "surrogatepass")
    tree.write("proc/driver/nvidia/params", "").write_bytes(content)
    tree.write("etc/modprobe.d/x.conf", "").write_bytes(b"options nvidia NVreg_NvLinkDisable=" + content)
    settings = read_driver_settings(tree.root)
    for found in (settings.parameters, settings.registry_keys, settings.configured):
        assert all(name.isprintable() and value.isprintable() for name, value in (found or {}).items())

"""What a process may and may not do, from a tree and from this very process."""

import os
import resource
from pathlib import Path

import pytest

from gpubench.machine import process
from gpubench.machine.process import UNLIMITED, read_plugins, read_rank_facts
from gpubench.model.facts.process import RankFacts
from tests.fakes.sysfs import Tree

MAPS = """\
55d0-55d1 r--p 00000000 08:01 1 /usr/bin/python3.12
7f00-7f01 r-xp 00000000 08:01 2 /opt/nccl/lib/libnccl.so.2.28.9
7f02-7f03 r-xp 00000000 08:01 2 /opt/other/lib/libnccl.so.2
7f04-7f05 r-xp 00000000 08:01 3 /opt/amazon/lib/libnccl-net-ofi.so
7f06-7f07 r-xp 00000000 08:01 4 /opt/with space/libmpi.so.40 (deleted)
7f08-7f09 r-xp 00000000 08:01 5 /usr/lib/libmpi_cxx.so.40
7f0a-7f0b r-xp 00000000 08:01 6 /usr/lib/libcudart.so.12
7f0c-7f0d r-xp 00000000 08:01 7 /usr/lib/libcuda.so.580.159.04
7f0e-7f0f r-xp 00000000 08:01 8 /venv/lib/libucp-0a1b2c3d.so.0
7f10-7f11 rw-p 00000000 00:00 0
7f12-7f13 rw-p 00000000 00:00 0 [heap]"""


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def read(tree: Tree, **environment: str) -> RankFacts:
    return read_rank_facts(3, 1, 2, environment, tree.root)


def test_namespaces_are_this_processs_own(tree: Tree) -> None:
    for name, target in (
        ("pid", "pid:[4026531836]"),
        ("ipc", "ipc:[4026531839]"),
        ("pid_for_children", "pid:[4026530000]"),
        ("odd", "elsewhere"),
    ):
        tree.symlink(f"proc/self/ns/{name}", target)
    tree.write("proc/self/ns/file", "no link")
    assert read(tree).namespaces == {"pid": 4026531836, "ipc": 4026531839}


def test_limits_of_the_kernel(tree: Tree) -> None:
    tree.write("proc/self/status", "Name:\tpython\nNoNewPrivs:\t0\nSeccomp:\t2\nSeccomp_filters:\t1")
    tree.write("proc/sys/kernel/yama/ptrace_scope", "1")
    tree.write("proc/sys/kernel/random/boot_id", "b0074d1d")
    facts = read(tree)
    assert (facts.seccomp, facts.ptrace_scope, facts.boot_id) == (2, 1, "b0074d1d")


@pytest.mark.parametrize(("limit", "expected"), [(65536, 65536), (resource.RLIM_INFINITY, UNLIMITED)])
def test_memory_that_may_be_locked(tree: Tree, monkeypatch: pytest.MonkeyPatch, limit: int, expected: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, resource.RLIM_INFINITY))
    assert read(tree).memlock_bytes == expected


def test_plugins_that_nccl_loads_later_are_read(tree: Tree) -> None:
    tree.write("proc/self/maps", MAPS)
    first = read(tree)
    more = (
        "7f16-7f17 r-xp 00000000 08:01 3 /opt/tuner/libnccl-tuner-example.so",
        "7f18-7f19 r-xp 00000000 08:01 3 /usr/lib/libfabric.so.1",
    )
    tree.write("proc/self/maps", "\n".join((MAPS, *more)))
    later = read_plugins(first, tree.root)
    assert later.libraries == {**first.libraries, "libnccl-tuner-example": "/opt/tuner/libnccl-tuner-example.so"}


def test_device_files_that_may_not_be_used(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of devices of a control group refuses in the same call as a file's mode does."""
    for name in ("nvidia0", "nvidia1", "infiniband/uverbs0"):
        tree.write(f"dev/{name}", "")
    assert read(tree).denied_device_files == ()
    refused = {str(tree.root / "dev/nvidia1"), str(tree.root / "dev/infiniband/uverbs0")}
    monkeypatch.setattr(os, "access", lambda path, mode, effective_ids: str(path) not in refused)
    assert read(tree).denied_device_files == ("/dev/nvidia1", "/dev/infiniband/uverbs0")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ()),
        ({".dockerenv": ""}, ("docker",)),
        ({"run/.containerenv": "", "proc/self/cgroup": "0::/machine.slice/libpod-1f.scope"}, ("podman",)),
        ({"proc/self/cgroup": "0::/kubepods.slice/cri-containerd-1.scope"}, ("kubernetes", "containerd")),
        ({"proc/self/cgroup": "9:devices:/slurm/uid_1/job_2/step_0"}, ("slurm",)),
        (
            {"proc/self/mountinfo": "1 0 0:9 / / rw - ext4 x rw\n2 1 0:9 / / rw master:1 - overlay o rw"},
            ("layered root",),
        ),
        ({"proc/self/mountinfo": "1 0 0:9 / / rw - overlay x rw\n2 1 0:9 / / rw - ext4 o rw\nhalf a li"}, ()),
        ({".singularity.d/env": "", "proc/self/cgroup": "0::/"}, ("singularity",)),
    ],
)
def test_signs_of_a_container(tree: Tree, files: dict[str, str], expected: tuple[str, ...]) -> None:
    for path, text in files.items():
        tree.write(path, text)
    assert read(tree).container == expected


def test_ucx_with_and_without_its_module_for_gpus(tree: Tree) -> None:
    tree.write("proc/self/maps", MAPS)
    assert read(tree).ucx_cuda is False
    tree.write("venv/lib/ucx/libuct_cuda.so.0", "")
    assert read(tree).ucx_cuda is True


def test_nccls_settings_of_files_reach_what_depends_on_them(tree: Tree) -> None:
    tree.write("etc/nccl.conf", "NCCL_TOPO_FILE=/opt/topo.xml\nNCCL_NET_PLUGIN=ofi\nOTHER=1")
    tree.write("opt/topo.xml", "<system><cpu numaid='0'/></system>")
    (tree.root / "usr/lib").mkdir(parents=True)
    facts = read(tree)
    assert facts.nccl_files == {"/etc/nccl.conf": {"NCCL_TOPO_FILE": "/opt/topo.xml", "NCCL_NET_PLUGIN": "ofi"}}
    assert facts.topology_file is not None
    assert facts.topology_file.numa_nodes == (0,)
    assert facts.loadable["libnccl-net-ofi.so"] is None
    assert "libnccl-net.so" not in facts.loadable


def test_a_file_system_that_never_answers_costs_what_lies_on_it(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SECONDS_TO_ANSWER", 0.05)
    tree.write("proc/self/status", "Mems_allowed_list:\t0")
    pipe = tree.root / "etc/nccl.conf"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    facts = read(tree)
    pipe.write_text("let the reader go")
    assert (facts.nccl_files, facts.topology_file, facts.loadable, facts.memory_nodes) == ({}, None, {}, "0")
    for field in ("nccl_files", "topology_file", "loadable"):
        assert facts.unknown[field] == "no answer within 2 s, because a file system does not respond"

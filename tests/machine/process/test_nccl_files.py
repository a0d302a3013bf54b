"""NCCL's configuration files one by one."""

import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpubench.machine.environment import merge_settings, read_nccl_files
from tests.fakes.sysfs import Tree


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir="/home/me"))
    return Tree(tmp_path)


def test_each_file_with_its_own_variables_in_nccls_order(tree: Tree) -> None:
    tree.write("home/me/.nccl.conf", "NCCL_P2P_LEVEL=PIX\nPATH=/bin\n#NCCL_DEBUG=INFO")
    tree.write("etc/nccl.conf", "NCCL_P2P_LEVEL=SYS\nNCCL_P2P_DISABLE=1")
    files, unknown = read_nccl_files({}, tree.root)
    assert list(files.items()) == [
        ("~/.nccl.conf", {"NCCL_P2P_LEVEL": "PIX"}),
        ("/etc/nccl.conf", {"NCCL_P2P_LEVEL": "SYS", "NCCL_P2P_DISABLE": "1"}),
    ]
    assert unknown == {}
    environment = {"NCCL_P2P_DISABLE": "0", "HOME": "/root"}
    assert merge_settings(environment, files) == {"NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "PIX"}


def test_a_file_that_cannot_be_read_says_why(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree.root / "etc/nccl.conf").mkdir(parents=True)
    assert read_nccl_files({}, tree.root) == ({}, {"nccl_files./etc/nccl.conf": "nccl.conf: Is a directory"})

    def refuse(path: Path, **options: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    assert read_nccl_files({}, tree.root)[1] == {
        "nccl_files.~/.nccl.conf": "Permission denied",
        "nccl_files./etc/nccl.conf": "Permission denied",
    }

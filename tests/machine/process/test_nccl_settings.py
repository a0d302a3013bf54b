"""NCCL's variables from the environment and its configuration files."""

import pwd
from pathlib import Path

import pytest

from gpubench.machine.environment import configuration_files, nccl_settings


def test_the_environment_comes_before_the_files_and_the_users_before_the_systems(tmp_path: Path) -> None:
    user, system = tmp_path / "user.conf", tmp_path / "system.conf"
    user.write_text("# a comment=1\nNCCL_DEBUG=INFO\nNCCL_ALGO=Ring\nno variable\nNCCL_DEBUG=TRACE\n")
    system.write_text("NCCL_ALGO=Tree\nNCCL_PROTO=LL=1\n")
    environment = {"NCCL_ALGO": "NVLS", "PATH": "/bin"}
    files = [user, tmp_path / "missing", system]
    assert nccl_settings(environment, files) == {"NCCL_ALGO": "NVLS", "NCCL_DEBUG": "INFO", "NCCL_PROTO": "LL=1"}


def test_the_files_are_nccls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = Path("/etc/nccl.conf")
    assert configuration_files({"NCCL_CONF_FILE": "/site/nccl.conf"}) == (Path("/site/nccl.conf"), system)
    own = configuration_files({"HOME": "/elsewhere", "NCCL_CONF_FILE": ""})
    assert own[0].name == ".nccl.conf"
    assert own[0].parent != Path("/elsewhere")

    def nobody(_uid: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert configuration_files({}) == (system,)
    conf = tmp_path / "named.conf"
    conf.write_text("NCCL_DEBUG=WARN\n")
    assert nccl_settings({"NCCL_CONF_FILE": str(conf)})["NCCL_DEBUG"] == "WARN"

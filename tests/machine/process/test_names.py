"""Names and containers of processes, from files of /proc."""

from pathlib import Path

import pytest

from gpubench.machine.host import container_in, container_of, process_name, sees_all_pids

ID = "3f2a91bc04de" + 52 * "0"


@pytest.mark.parametrize(
    ("groups", "container"),
    [
        (f"12:memory:/docker/{ID}\n", "docker 3f2a91bc04de"),
        (f"0::/system.slice/docker-{ID}.scope\n", "docker 3f2a91bc04de"),
        (f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope", "container 3f2a91bc04de"),
        (f"0::/machine.slice/libpod-{ID}.scope", "libpod 3f2a91bc04de"),
        ("0::/user.slice/user-0.slice/session-1.scope", None),
        ("0::/docker/short", None),
        ("", None),
    ],
)
def test_a_container_is_known_by_its_control_group(groups: str, container: str | None) -> None:
    assert container_in(groups) == container


def test_a_process_is_named_by_its_program_else_by_the_kernel(tmp_path: Path) -> None:
    folder = tmp_path / "proc/7"
    folder.mkdir(parents=True)
    (folder / "comm").write_text("kworker\n")
    assert (process_name(7, tmp_path), process_name(8, tmp_path)) == ("kworker", None)
    (folder / "cmdline").write_text("/opt/python3.12\0-m\0train\0")
    assert process_name(7, tmp_path) == "python3.12"
    assert container_of(7, tmp_path) is None


def test_a_namespace_that_cannot_be_read_is_not_the_hosts(tmp_path: Path) -> None:
    assert sees_all_pids(tmp_path) is False

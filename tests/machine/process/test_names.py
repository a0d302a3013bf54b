"""Names and containers of processes, from files of /proc."""

from pathlib import Path

import pytest

from gpubench.machine.host import find_container
from tests.fakes.sysfs import Tree

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
def test_a_container_is_known_by_its_control_group(tmp_path: Path, groups: str, container: str | None) -> None:
    Tree(tmp_path).write("proc/7/cgroup", groups)
    assert find_container(7, tmp_path) == container

"""Findings about KV-cache transfers: one per transfer, with its most certain cause and a cure to paste."""

from collections.abc import Mapping
from typing import Any

import pytest

from gpubench.conditions.checks import transfer_findings
from gpubench.conditions.registry import CONDITIONS
from gpubench.model.paths.ucx import Allocation, Transfer, UcxRoute
from gpubench.model.terms.verdict import Verdict


def transfer(name: str = "GPU0 → GPU1", route: UcxRoute = UcxRoute.EMULATED, **facts: Any) -> Transfer:
    return Transfer(name=name, route=route, **{"transport": "tcp/lo", "same_node": True, **facts})


DIRECT: Mapping[str, Any] = {"route": UcxRoute.PEER, "transport": "cuda_ipc/cuda"}


def test_a_transfer_has_one_finding_with_its_most_certain_cause() -> None:
    likely, proven = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, {"UCX_TLS": "^cuda_ipc"}
    (found,) = transfer_findings([transfer(variables=likely | proven)])
    assert (found.id, found.severity) == ("ucx-tls", Verdict.FAIL)
    (found,) = transfer_findings([transfer(variables=likely)])
    assert found.id == "kv-memory-expandable"


def test_transfers_with_the_same_cause_are_one_finding_with_several_subjects() -> None:
    names = ["GPU0 → GPU1", "GPU1 → GPU0", "GPU2 → GPU3"]
    found = transfer_findings([transfer(name, allocation=Allocation.EXPANDABLE) for name in names])
    assert [finding.subjects for finding in found] == [tuple(names)]


@pytest.mark.parametrize(
    "facts",
    [
        {"allocation": Allocation.EXPANDABLE},
        {"variables": {"UCX_TLS": "^cuda_ipc", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}},
        {"same_pid_namespace": False},
    ],
)
def test_settings_that_do_not_force_host_memory_are_no_findings(facts: Mapping[str, Any]) -> None:
    assert transfer_findings([transfer(**DIRECT, **facts)]) == ()


def test_gpus_without_peer_access_are_not_blamed_on_the_allocator() -> None:
    (found,) = transfer_findings([transfer(peer_access=False, allocation=Allocation.EXPANDABLE)])
    assert (found.id, found.severity) == ("kv-no-peer-access", Verdict.WARN)


def test_a_known_allocation_outweighs_a_setting_that_it_does_not_follow() -> None:
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    (found,) = transfer_findings([transfer(allocation=Allocation.MALLOC, variables=variables)])
    assert found.id == "kv-staged-unexplained"


@pytest.mark.parametrize(
    ("variables", "commands"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, ("unset PYTORCH_CUDA_ALLOC_CONF",)),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True"},
            ("export PYTORCH_ALLOC_CONF=max_split_size_mb:128",),
        ),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True,$(reboot)"},
            ("export PYTORCH_ALLOC_CONF='$(reboot)'",),
        ),
        ({}, ("unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF",)),
    ],
)
def test_the_cure_keeps_the_other_options_of_the_allocator(
    variables: Mapping[str, str], commands: tuple[str, ...]
) -> None:
    (found,) = transfer_findings([transfer(allocation=Allocation.EXPANDABLE, variables=variables)])
    assert found.commands == commands


@pytest.mark.parametrize(
    ("listed", "is_a_cause"),
    [
        ("^cuda_ipc", True),
        ("^cuda", True),
        ("tcp,cuda_copy", True),
        ("rc,sm", True),
        ("^rc", False),
        ("all", False),
        ("rc,cuda", False),
        ("tcp,cuda_copy,cuda_ipc", False),
        ("", False),
    ],
)
def test_ucx_tls_is_a_cause_only_if_it_excludes_cuda_ipc(listed: str, is_a_cause: bool) -> None:
    (found,) = transfer_findings([transfer(variables={"UCX_TLS": listed})])
    assert (found.id == "ucx-tls") is is_a_cause


def test_a_nic_inside_a_node_is_a_doubt_and_the_cause_is_named() -> None:
    nic: dict[str, Any] = {"route": UcxRoute.RDMA, "transport": "rc_mlx5/mlx5_0:1"}
    (found,) = transfer_findings([transfer(**nic, same_pid_namespace=False)])
    assert (found.id, found.severity) == ("kv-pid-namespaces", Verdict.WARN)
    assert transfer_findings([transfer(**nic, peer_access=False)]) == ()
    assert transfer_findings([transfer(**nic | {"same_node": False})]) == ()


def test_tcp_between_nodes_may_be_by_design() -> None:
    (found,) = transfer_findings([transfer(route=UcxRoute.STAGED, same_node=False)])
    assert (found.id, found.severity) == ("kv-no-rdma-device", Verdict.WARN)


@pytest.mark.parametrize(
    ("facts", "command"),
    [
        ({"variables": {"UCX_TLS": "tcp"}}, "gpubench p2p && unset UCX_TLS"),
        (
            {"variables": {"UCX_IB_GPU_DIRECT_RDMA": "n"}, "same_node": False, "transport": "rc_mlx5/mlx5_0:1"},
            "gpubench p2p && unset UCX_IB_GPU_DIRECT_RDMA",
        ),
        ({"route": UcxRoute.RDMA, "transport": "rc_mlx5/mlx5_0:1"}, "nvidia-smi -L"),
    ],
)
def test_a_cure_changes_only_the_setting_that_was_seen(facts: Mapping[str, Any], command: str) -> None:
    causes = transfer_findings([transfer(**facts)])
    assert [finding.next_command for finding in causes] == [command]


def test_a_nic_between_amd_gpus_is_compared_with_rocm_ipc() -> None:
    (found,) = transfer_findings([transfer(route=UcxRoute.RDMA, transport="rc_mlx5/mlx5_0:1", local="rocm/GPU0")])
    assert (found.id, found.severity, found.expected) == ("kv-nic-inside-node", Verdict.WARN, "zero-copy over rocm_ipc")
    assert not found.commands


def test_the_cause_comes_before_the_path() -> None:
    (found,) = transfer_findings([transfer(same_pid_namespace=False)])
    path = "host-staged by software emulation over tcp/lo"
    assert found.seen == f"the two processes have different PID namespaces ({path})"
    (found,) = transfer_findings([transfer()])
    assert found.seen == f"{path} (cause unknown)"


def test_an_inactive_nvlink_explains_disabled_reads() -> None:
    down = next(condition for condition in CONDITIONS if condition.id == "nvlink-down")
    assert "kv-get-without-nvlink" in down.implies
    (found,) = transfer_findings([transfer(get_disabled=True)])
    assert found.seen.startswith("UCX disabled reads (GET) over CUDA IPC: it found no NVLinks, or an inactive one")

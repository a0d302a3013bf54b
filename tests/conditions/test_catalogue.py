"""The catalogue of conditions: ids, words and links. Each condition belongs to a check or explains a path."""

import re
from pathlib import Path

import pytest

from gpubench.conditions.checks import CHECKS
from gpubench.conditions.condition import Condition
from gpubench.conditions.policy import SEVERITIES
from gpubench.conditions.registry import CONDITIONS, current_ids
from tests.fakes.planted import CHECKED, PLANTS, Plant

DOCS = Path(__file__).parents[2] / "docs"
_LINK = re.compile(
    r"https://(github\.com/[\w.-]+/[\w.-]+(/(issues|pull)/\d+)?"
    r"|docs\.(nvidia\.com|kernel\.org)/[\w./-]+\.html(#[\w-]+)?"
    r"|www\.open-mpi\.org/faq/\?category=runcuda"
    r"|forums\.developer\.nvidia\.com/t/[\w-]+/\d+"
    r"|pytorch\.org/docs/stable/\w+\.html)"
)


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.id)
def test_an_entry_is_whole(condition: Condition) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", condition.id)
    assert all((condition.title, condition.cure, condition.expected))
    assert _LINK.fullmatch(condition.link) or (DOCS / condition.link).exists(), f"not in _LINK: {condition.link}"
    assert condition.check or condition.effects or condition.in_job, "needs a check, or a row of _ROWS in policy.py"
    assert bool(condition.effects) == bool(condition.settles), "what _ROWS of policy.py lists has `settles`"
    assert not condition.check or condition.check in {check.name for check in CHECKS}
    assert not condition.by_design or "nothing to repair" in condition.cure.comment.lower()


def test_ids_are_stable_names_and_what_is_implied_exists() -> None:
    ids = [condition.id for condition in CONDITIONS]
    assert len(ids) == len(set(ids)) >= 100
    assert {name for condition in CONDITIONS for name in condition.implies} <= set(ids)


def test_every_check_has_conditions_or_what_measuring_found_out() -> None:
    assert {check.name for check in CHECKS} - {condition.check for condition in CONDITIONS} == {"paths"}


def test_ids_of_earlier_versions_lead_to_those_of_now() -> None:
    assert current_ids("nic-down") == ("rdma-port-down",)
    assert current_ids("acs-redirects") == ("acs-redirect", "acs-nic-redirect")
    assert {"nccl-few-channels", "nccl-nvls-off"} <= set(current_ids("nccl-slow-settings"))
    assert {"nccl-p2p-disabled", "nccl-ib-disabled"} <= set(current_ids("fallback-expected"))
    assert current_ids("ecc-off") == ()


def test_every_finding_has_a_row_in_the_one_table_of_severities() -> None:
    ids = {condition.id for condition in CONDITIONS}
    assert set(SEVERITIES) <= ids
    assert {condition.id for condition in CONDITIONS if condition.check and not condition.by_design} <= set(SEVERITIES)
    assert all(grade.source for grade in SEVERITIES.values())


@pytest.mark.parametrize("plant", [*PLANTS, *CHECKED], ids=lambda plant: plant.id)
def test_a_condition_has_the_severity_of_the_table_and_no_other_that_it_does_not_name(plant: Plant) -> None:
    grade = SEVERITIES.get(plant.id)
    for found in plant.findings:
        if grade is not None and found.id == plant.id:
            assert found.severity is grade.severity or found.severity in grade.degrees


_SWITCHES_ON = re.compile(
    r"(?:unset|export|env -u|^(?=\w+=)|`)[^.;`]*\b(?:NCCL_(?:P2P_\w+|SHM_DISABLE|HOSTID|IB_DISABLE|NET|NET_GDR_\w+"
    r"|DMABUF_ENABLE|MNNVL_ENABLE|CUMEM_ENABLE|NVLS_ENABLE)|GGML_CUDA_P2P|UCX_(?:TLS|IB_GPU_DIRECT_RDMA)|FI_PROVIDER"
    r"|OMPI_MCA_opal_cuda_support)\b|modprobe nvidia-peermem"
)
_SWITCHES_OFF = re.compile(r"NCCL_P2P_DISABLE=1|NCCL_NVLS_ENABLE=0|unset GGML_CUDA_P2P|NCCL_NET_GDR_LEVEL=LOC")
_AFTER_A_RESTART = re.compile(
    r"RegistryDwords|iommu=pt|Switch ACS off|x-nv-gpudirect-clique|Resizable BAR|conf-compute|-mig 0|GrdmaPciTopo"
    r"|nvlink /etc/modprobe\.d/\*\. Remove the setting|then modprobe nvidia-peermem|load nvidia-peermem|Move the"
)
_VERIFIED = r"gpubench (?:p2p|allreduce|alltoall)"


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.id)
def test_a_cure_that_switches_a_data_path_on_begins_with_a_verified_copy(condition: Condition) -> None:
    """The driver grants peer access on machines that corrupt data (open-gpu-kernel-modules#1257, unsloth#10613)."""
    cure = condition.cure.text
    if _AFTER_A_RESTART.search(cure):
        assert re.search(_VERIFIED, cure), "what a restart switches on is verified before any job"
    elif _SWITCHES_ON.search(_SWITCHES_OFF.sub("", cure)):
        assert re.match(rf"(?:env (?:-u \w+ )+|\w+=\w+ )?{_VERIFIED}\b", cure)


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.id)
def test_no_cure_begins_with_what_ends_the_jobs_of_others(condition: Condition) -> None:
    """Stopping the fabric manager aborts jobs on the GPUs; switching MIG off removes the instances of others."""
    for command in condition.cure.commands:
        assert not re.match(r"systemctl (?:restart|stop)|.*-mig 0|for b|setpci|reboot", command)


@pytest.mark.parametrize("plant", [*PLANTS, *CHECKED], ids=lambda plant: plant.id)
def test_what_is_advised_for_a_planted_machine_verifies_first_too(plant: Plant) -> None:
    cures = [finding.cure for finding in plant.findings] + [each.cure for each in plant.diagnosis.named]
    for each in (cure.text for cure in cures if cure.commands):
        if _SWITCHES_ON.search(_SWITCHES_OFF.sub("", each)) and not _AFTER_A_RESTART.search(each):
            assert re.match(rf"(?:env (?:-u \w+ )+|\w+=\w+ )?{_VERIFIED}\b|grep -nE ", each), each

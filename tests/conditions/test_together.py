"""Pairs that copy simultaneously: writes that collapse below one switch, and harmless look-alikes."""

from itertools import permutations

import pytest
from msgspec.structs import replace

from gpubench.conditions.circumstances import Together
from gpubench.model.facts.snapshot import PciPlace
from tests.fakes.planted import PLANTS, Job, simulated, with_nodes, with_ranks_on_all


def collapsing() -> Job:
    return next(plant for plant in PLANTS if plant.id == "posted-write-collapse").make()


def named(job: Job) -> list[str]:
    return [each.cause.id for each in job.diagnosis().named if each.cause.id == "posted-write-collapse"]


def together(job: Job, write_gb_s: float, read_gb_s: float) -> Job:
    pairs = tuple(permutations(range(len(job.ranks)), 2))
    return replace(job, together=(Together("all to all", pairs, write_gb_s, read_gb_s),))


def test_reads_twice_as_fast_as_writes_name_it_with_both_figures() -> None:
    (found,) = [each for each in collapsing().diagnosis().named if each.cause.id == "posted-write-collapse"]
    assert found.seen == "all to all: writes reach 31 GB/s in total, reads 240 GB/s"
    assert "NCCL_P2P_READ_ENABLE=1" in found.cure.text


@pytest.mark.parametrize(("write", "read"), [(240.0, 240.0), (130.0, 240.0), (240.0, 31.0)])
def test_figures_that_differ_by_less_do_not(write: float, read: float) -> None:
    assert named(together(collapsing(), write, read)) == []


def test_nvlink_has_no_posted_writes_and_one_root_complex_no_second() -> None:
    board = with_ranks_on_all(simulated("hgx-h200-4"))
    assert named(together(board, 31, 240)) == []
    one = PciPlace(host_bridge="pci0000:00", root_port="0000:00:01.0", switches=("0000:01:00.0",))
    same = with_nodes(
        collapsing(), lambda node: replace(node, gpus=tuple(replace(gpu, place=one) for gpu in node.gpus))
    )
    assert named(same) == []

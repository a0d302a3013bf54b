"""GPUs, links and hosts that others use: confidence, subjects, and folded consequences."""

import pytest
from msgspec.structs import replace

from gpubench.conditions.circumstances import Circumstances, IssueTime
from gpubench.conditions.ranking import Named, diagnose
from gpubench.conditions.registry import CAUSES
from gpubench.model.facts.process import GpuProcess
from gpubench.model.facts.traffic import GpuUse, IdleGpu, LinkRates
from gpubench.model.paths.transport import Confidence
from gpubench.model.terms.verdict import Cure
from tests.fakes.planted import simulated, with_nodes
from tests.formats.sample import ROW

GIB = 2**30
PYTHON = GpuProcess(pid=8342, name="python", memory_bytes=12 * GIB, container="docker 3f2a91bc04de")


def around(*idle: IdleGpu) -> Circumstances:
    """Two ranks on four H200s, with these readings of the idle GPUs."""
    return replace(simulated("hgx-h200-4").circumstances(), idle_gpus=dict(enumerate(idle)))


def named(run: Circumstances) -> tuple[Named, ...]:
    return diagnose(CAUSES, run).named


def test_a_process_that_computes_is_proven_to_be_in_the_way() -> None:
    (cause,) = named(around(IdleGpu(use=GpuUse(utilization_percent=100, users=(PYTHON,)))))
    assert (cause.cause.id, cause.confidence) == ("gpu-in-use", Confidence.PROVEN)
    who = "process 8342 (python) in docker 3f2a91bc04de, 12.0 GiB"
    assert cause.seen == f"GPU0 is in use by {who}: 100 % busy while this job is idle"
    assert cause.cure == Cure.of("ps -o pid,user,args -p 8342", comment=f"End {who}, or measure after it has ended.")


def test_a_gpu_that_computes_for_nobody_who_is_shown_is_in_use_too() -> None:
    (cause,) = named(around(IdleGpu(), IdleGpu(use=GpuUse(utilization_percent=97))))
    assert cause.seen.startswith("GPU1 is in use by a process that is not visible here: 97 % busy")
    assert cause.cure == Cure.of("fuser -v /dev/nvidia*")


def test_a_process_that_sleeps_is_a_weak_cause() -> None:
    (cause,) = named(around(IdleGpu(use=GpuUse(utilization_percent=0, users=(PYTHON,)))))
    assert (cause.cause.id, cause.confidence) == ("gpu-in-use", Confidence.WEAK)


def test_who_sends_is_told_with_the_traffic_and_folded_under_it() -> None:
    sending = IdleGpu(rates=LinkRates(nvlink_sent=371.2, pcie_sent=0.02), use=GpuUse(users=(PYTHON,)))
    (cause,) = named(around(sending, IdleGpu(rates=LinkRates(nvlink_sent=0.0, nvlink_received=0.4))))
    assert (cause.cause.id, cause.confidence) == ("foreign-nvlink-traffic", Confidence.PROVEN)
    assert cause.seen.startswith(
        "GPU0 sends 371 GB/s over NVLink while this job is idle (used by process 8342 (python)"
    )
    assert [each.cause.id for each in cause.implied] == ["gpu-in-use"]


def test_of_counters_that_moved_too_far_one_sentence_is_enough() -> None:
    run = around(IdleGpu(rates=LinkRates(nvlink_sent=371.2)), IdleGpu())
    (cause,) = named(replace(run, beyond={0: 4.0, 1: 2.4}))
    assert cause.seen.endswith("; GPU1's NVLink counters show 2.4 times as much traffic as this job can cause")


@pytest.mark.parametrize(("held", "found"), [(140 * GIB // 100, []), (120 * GIB, [("memory-in-use", Confidence.WEAK)])])
def test_memory_that_was_taken_before_by_nobody_who_is_shown(held: int, found: list[tuple[str, Confidence]]) -> None:
    run = around(IdleGpu(use=GpuUse(utilization_percent=0, held_bytes=held)))
    assert [(each.cause.id, each.confidence) for each in named(run)] == found


def test_ranks_of_this_job_are_nobody_else() -> None:
    """As in an old recording, whose ranks already had CUDA contexts at the reading."""

    def used_by(pid: int) -> Circumstances:
        busy = GpuProcess(pid=pid)
        job = with_nodes(
            simulated("hgx-h200-4"),
            lambda node: replace(
                node,
                gpus=tuple(
                    replace(each, processes=(busy,), idle=False, memory_used_bytes=9 * GIB) for each in node.gpus
                ),
            ),
        )
        return replace(job.circumstances(), staged={})

    assert named(used_by(100)) == ()
    (cause,) = named(used_by(7))
    assert (cause.cause.id, cause.subject) == ("gpu-in-use", "GPU0, GPU1")


def test_a_host_that_needs_all_the_time_to_issue_operations_is_the_cause_of_slow_rows_alone() -> None:
    row = replace(ROW, size_bytes=1024, time_us=490.0, issue_us=480.0)
    healthy = replace(ROW, time_us=8.8, issue_us=6.7)
    unknown = replace(ROW, issue_us=None)
    assert named(replace(around(), issued=IssueTime.of([healthy, unknown]))) == ()
    (cause,) = named(replace(around(), issued=IssueTime.of([row, healthy, row])))
    assert cause.cause.id == "host-bound"
    placed = ROW.placement.replace("_", " ")
    assert cause.seen == f"1K {placed} takes 490 µs, and the host needs 480 µs to issue it (also in 1 more row)"

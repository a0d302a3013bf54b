"""Prometheus metrics of NCCL's Inspector, made here after plugins/profiler/inspector/inspector_prom.cc."""

import pytest

from gpubench.errors import UsageError
from gpubench.readers.results.nccl_inspector_metrics import read, recognises


def metrics(
    busbw: float = 600.0,
    time_us: float = 10737.41824,
    gpu: int = 0,
    comm: str = "DP Group 0",
    collective: str = "AllReduce",
    size: str = "4-5GB",
    kept: tuple[str, ...] = ("bus_bandwidth_gbs", "collective_exec_time_microseconds"),
) -> str:
    labels = (
        f'version="v5.1",slurm_job_id="unknown",node="n{gpu // 4}",gpu="GPU{gpu}",comm_name="{comm}",n_nodes="1",'
        f'nranks="4",collective="{collective}",message_size="{size}",algo_proto="Ring_ll"'
    )
    values = {"bus_bandwidth_gbs": busbw, "collective_exec_time_microseconds": time_us}
    return "# TYPE nccl_bus_bandwidth_gbs gauge\n" + "".join(
        f"nccl_{name}{{{labels}}} {values[name]:g}\n" for name in kept
    )


def test_size_and_time_follow_from_bandwidth_and_bucket() -> None:
    assert recognises(metrics())
    found = read(metrics(), "x.prom")
    (row,) = found.rows
    # 600 GB/s of busbw among four ranks are 400 of algbw, and 4 GiB take 10.7 ms
    assert row.size_bytes == pytest.approx(2**32, rel=1e-4)
    assert (row.collective, row.ranks, row.nodes) == ("allreduce", 4, 1)
    assert row.busbw_gb_s == pytest.approx(600)
    assert row.time_us == pytest.approx(10737.4, rel=1e-4)
    assert found.circumstances.hosts == ("n0",)


def test_a_size_stays_in_its_bucket() -> None:
    (row,) = read(metrics(busbw=600.0, time_us=50000.0), "x").rows
    assert row.size_bytes == 5 * 2**30


def test_the_block_of_a_rank_counts_as_often_as_there_are_ranks() -> None:
    (row,) = read(metrics(busbw=300.0, collective="AllGather", size="1-2GB"), "x").rows
    assert row.size_bytes == pytest.approx(4 * 2**30, rel=1e-4)


def test_the_last_gpu_to_arrive_decides_and_a_typical_communicator() -> None:
    waits = [metrics(busbw=busbw, gpu=gpu) for gpu, busbw in enumerate((100.0, 500.0, 600.0, 300.0))]
    assert [row.busbw_gb_s for row in read("".join(waits), "x").rows] == [pytest.approx(600)]
    others = [metrics(busbw=busbw, comm=f"DP Group {number}") for number, busbw in enumerate((100.0, 500.0, 600.0))]
    assert [row.busbw_gb_s for row in read("".join(others), "x").rows] == [pytest.approx(500)]


@pytest.mark.parametrize(
    "text",
    [
        metrics(kept=("bus_bandwidth_gbs",)),
        metrics(busbw=0.0),
        metrics(collective="Unknown"),
        metrics(size="large"),
    ],
)
def test_half_a_metric_is_refused(text: str) -> None:
    assert recognises(text)
    with pytest.raises(UsageError, match="no measured values"):
        read(text, "x.prom")


def test_a_line_that_is_cut_is_left_out_and_named() -> None:
    found = read(metrics() + metrics(gpu=1).replace("} 600", "}"), "x.prom")
    assert (len(found.rows), found.complete) == (1, False)
    assert found.left_out[0].startswith("line 5")

"""Steps of layouts in closed form: no communication, all of it hidden, all of it exposed, bubbles."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.measure.plan.events import ContentionTable, MeasuredContention
from gpubench.measure.plan.program import StepJob, StepSettings
from gpubench.measure.plan.report import exposed_rows
from gpubench.measure.plan.step import pass_order, predict
from gpubench.model.workload import Sharding
from tests.measure.plan.jobs import gpt, job, mlp

STEP = 0.024
MEGABYTE = 2**20
ACTIVATIONS = 512 * 1024 * 2


def bucket(megabytes: float, microbatches: int = 1) -> StepSettings:
    return StepSettings(bucket_bytes=round(megabytes * MEGABYTE), microbatches=microbatches)


def test_one_gpu_computes_and_nothing_else() -> None:
    prediction = predict(job(mlp(), "ddp", 1))
    assert prediction.seconds == pytest.approx(STEP)
    assert prediction.exposed == 0


@pytest.mark.parametrize(
    "layout", ["ddp", "zero1", "zero2", "fsdp", "tp4", "tp2 sp", "ring4", "ulysses2", "tp2 fsdp", "pp1"]
)
def test_an_infinite_bandwidth_costs_nothing(layout: str) -> None:
    prediction = predict(job(gpt(), layout, 4, gb_s=1e15))
    own = prediction.job.layout
    assert prediction.seconds == pytest.approx(STEP / own.tensor / own.context, rel=1e-6)


def test_one_bucket_is_reduced_behind_all_computation() -> None:
    """32 MiB a layer: 64 MiB in all at 100 GB/s."""
    prediction = predict(job(mlp(), "ddp", 4, settings=bucket(1000)))
    assert prediction.seconds == pytest.approx(STEP + 64 * MEGABYTE / 100e9)
    assert prediction.times.exposed == pytest.approx({"gradient all-reduce": 64 * MEGABYTE / 100e9})


def test_all_but_the_last_bucket_hide_behind_the_backward_pass() -> None:
    """A bucket a tensor: of eight reductions of 8 MiB seven hide."""
    prediction = predict(job(mlp(), "ddp", 4, settings=bucket(8)))
    assert prediction.seconds == pytest.approx(STEP + 8 * MEGABYTE / 100e9)


def test_reductions_that_take_longer_than_computation_follow_each_other() -> None:
    """The first is ready after an eighth of the backward pass, then all eight are in a row."""
    prediction = predict(job(mlp(), "ddp", 4, gb_s=1.0, settings=bucket(8)))
    assert prediction.seconds == pytest.approx(0.008 + 0.002 + 64 * MEGABYTE / 1e9)


def test_gradients_are_copied_into_buckets_and_back() -> None:
    prediction = predict(job(mlp(), "ddp", 4, gb_s=1e15, copy_gb_s=1000.0))
    assert prediction.seconds == pytest.approx(STEP + 2 * 2 * 64 * MEGABYTE / 1e12)


def test_zero_gathers_behind_the_step_what_ddp_reduced_within_it() -> None:
    prediction = predict(job(mlp(), "zero1", 4, settings=bucket(1000)))
    assert prediction.seconds == pytest.approx(STEP + 2 * 64 * MEGABYTE / 100e9)
    assert set(prediction.times.exposed) == {"gradient reduce-scatter", "parameter all-gather"}


def test_fsdp_exposes_the_first_gather_of_each_pass_and_the_last_scatter() -> None:
    """16 MiB a block; the last block is gathered anew in the backward pass."""
    prediction = predict(job(mlp(), "fsdp", 4))
    block = 16 * MEGABYTE / 100e9
    assert prediction.times.exposed == pytest.approx(
        {"parameter all-gather": 2 * block, "gradient reduce-scatter": block}
    )


def test_fsdp_without_prefetch_waits_for_scatter_and_gather_of_every_block() -> None:
    """The all-gather of a block is issued behind the reduce-scatter of the one before it."""
    with_it = predict(job(mlp(), "fsdp", 4))
    without = predict(job(mlp(), "fsdp", 4, settings=StepSettings(prefetch=False)))
    block = 16 * MEGABYTE / 100e9
    assert without.seconds - with_it.seconds == pytest.approx(3 * 2 * block)


def test_tensor_parallelism_exposes_four_reductions_a_layer() -> None:
    prediction = predict(job(gpt(), "tp4", 4))
    assert prediction.seconds == pytest.approx(STEP / 4 + 4 * 4 * ACTIVATIONS / 100e9)


def test_sequence_parallelism_moves_the_same_bytes_in_twice_as_many_operations() -> None:
    prediction = predict(job(gpt(), "tp4 sp", 4))
    assert prediction.seconds == pytest.approx(STEP / 4 + 4 * 8 * ACTIVATIONS / 100e9)


def test_a_rank_s_share_that_was_timed_takes_the_place_of_the_quotient() -> None:
    own = job(gpt(), "tp4", 4, gb_s=1e15)
    timed = replace(own, compute=replace(own.compute, by_tensor=((4, 0.003, 0.006),)))
    assert predict(timed).seconds == pytest.approx(0.009, rel=1e-6)


def test_ulysses_has_four_all_to_alls_a_layer_each_way() -> None:
    prediction = predict(job(gpt(), "ulysses4", 4, settings=bucket(1000)))
    assert prediction.times.exposed["ulysses"] == pytest.approx(4 * 8 * ACTIVATIONS / 4 / 100e9)


def test_ring_attention_hides_its_sends_behind_attention() -> None:
    fast = predict(job(gpt(sequence=8192), "ring4", 4, gb_s=1000.0, settings=bucket(1000)))
    slow = predict(job(gpt(sequence=8192), "ring4", 4, gb_s=0.1, settings=bucket(1000)))
    assert "ring attention" not in fast.times.exposed
    assert slow.times.exposed["ring attention"] > 0


def test_experts_exchange_tokens_twice_each_way() -> None:
    model = gpt(experts=4, experts_per_token=2)
    even = predict(job(model, "ep4", 4, settings=bucket(1000)))
    busy = predict(job(model, "ep4", 4, settings=StepSettings(bucket_bytes=2**30, imbalance=1.5)))
    assert even.times.exposed["experts"] == pytest.approx(4 * 4 * 2 * ACTIVATIONS / 100e9)
    assert busy.times.exposed["experts"] == pytest.approx(1.5 * even.times.exposed["experts"])


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 4), (4, 8), (4, 16)])
def test_the_bubble_is_that_of_the_formula(stages: int, microbatches: int) -> None:
    own = job(gpt(8), f"pp{stages}", stages, gb_s=1e15, settings=StepSettings(microbatches=microbatches))
    ideal = microbatches * STEP / stages
    assert predict(own).seconds == pytest.approx(ideal * (1 + (stages - 1) / microbatches), rel=1e-6)


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 8, 4), (2, 6, 4)])
def test_the_interleaved_bubble_is_that_of_the_formula(stages: int, microbatches: int, chunks: int) -> None:
    layers = stages * chunks
    settings = StepSettings(microbatches=microbatches)
    own = job(gpt(layers), f"pp{stages} v{chunks}", stages, gb_s=1e15, settings=settings)
    ideal = microbatches * STEP / stages
    assert predict(own).seconds == pytest.approx(ideal * (1 + (stages - 1) / (chunks * microbatches)), rel=1e-6)


@pytest.mark.parametrize("chunks", [1, 2])
def test_every_stage_runs_every_pass_once_and_forward_first(chunks: int) -> None:
    for stage in range(4):
        order = pass_order(stage, 4, chunks, 8)
        assert len(order) == len(set(order)) == 2 * 8 * chunks
        for each in order:
            if each.backward:
                assert order.index(replace(each, backward=False)) < order.index(each)


@pytest.mark.parametrize(
    ("layout", "gpus"), [("ddp", 4), ("fsdp", 4), ("tp2 ddp", 4), ("pp4", 4), ("pp2 v2", 2), ("tp2 pp2 ddp", 8)]
)
def test_many_microbatches_are_told_from_few(layout: str, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own = job(gpt(8), layout, gpus, latency_seconds=1e-5, settings=StepSettings(microbatches=64))
    told = predict(own)
    monkeypatch.setattr("gpubench.measure.plan.step._MOST_OPERATIONS", 10**9)
    whole = predict(own)
    assert told.shown_microbatches < whole.shown_microbatches == 64
    assert told.seconds == pytest.approx(whole.seconds, rel=1e-9)
    assert told.times.total == pytest.approx(told.seconds)


@pytest.mark.parametrize(("layout", "gpus"), [("tp2 pp2", 4), ("tp2 sp pp2 v2", 4), ("pp4", 4), ("tp2 pp2 dp2 ddp", 8)])
def test_passes_are_summed_without_a_difference(layout: str, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own = job(gpt(8), layout, gpus, latency_seconds=1e-5, settings=StepSettings(microbatches=8))
    summed = predict(own)
    monkeypatch.setattr("gpubench.measure.plan.step._sum_of", lambda _: None)
    whole = predict(own)
    assert len(summed.timeline.tasks) < len(whole.timeline.tasks)
    assert summed.seconds == pytest.approx(whole.seconds, rel=1e-9)
    # Of another stage's pass that is waited for, computation comes first where it is summed: a bubble, then exposed.
    waited = summed.exposed + summed.times.bubble
    assert waited == pytest.approx(whole.exposed + whole.times.bubble)
    assert summed.exposed == pytest.approx(whole.exposed, rel=0.1)
    rows = {(row.source, row.collective): row for row in exposed_rows(whole)}
    for row in exposed_rows(summed):
        assert (row.operations, row.bytes) == (
            rows[row.source, row.collective].operations,
            rows[row.source, row.collective].bytes,
        )


def measured(kappa_c: float, kappa_m: float) -> ContentionTable:
    return ContentionTable(
        [
            MeasuredContention(
                collective="allreduce",
                size_bytes=8 * MEGABYTE,
                partner="gemm",
                compute_slowdown=kappa_c,
                communication_slowdown=kappa_m,
                alone_seconds=8 * MEGABYTE / 100e9,
            )
        ]
    )


def test_contention_slows_the_computation_that_it_meets() -> None:
    """Seven of eight reductions meet computation; each takes (κ_c - 1)/κ_c of the time that both run."""
    free = predict(job(mlp(), "ddp", 4, settings=bucket(8)))
    slowed = predict(job(mlp(), "ddp", 4, contention=measured(1.25, 1.0), settings=bucket(8)))
    assert slowed.times.slowed == pytest.approx(7 * 8 * MEGABYTE / 100e9 * 0.2)
    assert slowed.seconds == pytest.approx(free.seconds + slowed.times.slowed)


LAYOUTS = ("ddp", "zero1", "zero2", "fsdp", "tp2 ddp", "tp4 sp", "pp2 ddp", "pp4", "ring2 ddp", "ulysses4")


@given(
    st.sampled_from(LAYOUTS),
    st.floats(0.1, 500.0),
    st.floats(0.0, 1e-3),
    st.sampled_from([1, 5, 25, 1000]),
    st.integers(1, 5),
)
def test_a_step_has_no_time_that_comes_from_nowhere(
    layout: str, gb_s: float, latency: float, megabytes: int, microbatches: int
) -> None:
    settings = bucket(megabytes, microbatches=microbatches)
    own = job(gpt(), layout, 4, gb_s=gb_s, latency_seconds=latency, settings=settings)
    prediction = predict(own)
    assert prediction.times.total == pytest.approx(prediction.seconds)
    assert prediction.exposed >= 0
    assert prediction.times.bubble >= -1e-12
    device = prediction.device
    alone: dict[str, float] = {}
    for task in prediction.timeline.tasks:
        if task.device == device:
            alone[task.stream] = alone.get(task.stream, 0.0) + task.seconds
    assert prediction.seconds >= max(alone.values()) - 1e-9


@given(st.sampled_from(LAYOUTS), st.floats(0.1, 500.0), st.floats(1.0, 10.0), st.sampled_from([1, 5, 25, 1000]))
def test_more_bandwidth_never_takes_longer(layout: str, gb_s: float, factor: float, megabytes: int) -> None:
    def seconds(speed: float) -> float:
        return predict(job(gpt(), layout, 4, gb_s=speed, settings=bucket(megabytes, microbatches=4))).seconds

    assert seconds(gb_s * factor) <= seconds(gb_s) * (1 + 1e-9)


@given(st.floats(0.0, 0.2), st.sampled_from(LAYOUTS))
def test_the_range_is_around_the_step(spread: float, layout: str) -> None:
    own: StepJob = job(gpt(), layout, 4, spread=spread, settings=StepSettings(microbatches=4))
    prediction = predict(own)
    assert prediction.least <= prediction.seconds <= prediction.most


@pytest.mark.parametrize(
    ("layout", "a_block"), [("ddp", 0.007), ("zero2", 0.004), ("fsdp", 0.01), ("zero3", 0.01), ("tp4", 0.004)]
)
def test_a_step_is_no_faster_than_its_host_issues_it(layout: str, a_block: float) -> None:
    """Four blocks; of a sharding that was not measured the blocks alone."""
    known = {None: 0.004, Sharding.DDP: 0.007, Sharding.FSDP: 0.01}
    usual = job(mlp(), layout, 4, gb_s=1e15)
    held = replace(usual, compute=replace(usual.compute, host_seconds=known))
    whole, own = predict(usual), predict(held)
    assert held.host_seconds == pytest.approx(4 * a_block)
    assert own.seconds == pytest.approx(max(whole.seconds, 4 * a_block))
    assert own.host == pytest.approx(own.seconds - whole.seconds)
    assert own.times.total + own.host == pytest.approx(own.seconds)
    assert own.least <= own.seconds <= own.most


def test_a_pipeline_stage_issues_its_own_blocks_for_every_microbatch() -> None:
    usual = job(mlp(), "pp2", 2, settings=StepSettings(microbatches=3))
    assert replace(usual, compute=replace(usual.compute, host_seconds={None: 0.004})).host_seconds == pytest.approx(
        4 / 2 * 3 * 0.004
    )

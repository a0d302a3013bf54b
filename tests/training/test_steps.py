"""Steps of layouts in closed form: no communication, all of it hidden, all of it exposed, bubbles."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench.training.events import ContentionTable, MeasuredContention, simulate
from gpubench.training.program import SMALLEST_COPY_SECONDS, StepJob, StepSettings
from gpubench.training.report import exposed_rows
from gpubench.training.step import fit_computation, predict, rhythm, step_tasks
from gpubench.training.workload import Recompute, Sharding, layers_by_stage, parse_layout
from tests.training.jobs import gpt, job, mlp

STEP = 0.024
MEGABYTE = 2**20
ACTIVATIONS = 512 * 1024 * 2


def bucket(megabytes: float, microbatches: int = 1) -> StepSettings:
    return StepSettings(bucket_bytes=round(megabytes * MEGABYTE), microbatches=microbatches)


def test_one_gpu_computes_and_nothing_else() -> None:
    prediction = predict(job(mlp(), "ddp", 1))
    assert prediction.seconds == pytest.approx(STEP)
    assert prediction.exposed == 0


@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "fsdp", "tp4", "tp2 sp", "cp4", "tp2 fsdp", "pp1"])
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
    copies = 2 * 8 * SMALLEST_COPY_SECONDS + 2 * 2 * 64 * MEGABYTE / 1e12
    assert prediction.seconds == pytest.approx(STEP + copies)


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


def test_tensor_parallelism_exposes_four_reductions_a_layer() -> None:
    prediction = predict(job(gpt(), "tp4", 4))
    assert prediction.seconds == pytest.approx(STEP / 4 + 4 * 4 * ACTIVATIONS / 100e9)


def test_sequence_parallelism_moves_the_same_bytes_in_twice_as_many_operations() -> None:
    prediction = predict(job(gpt(), "tp4 sp", 4))
    assert prediction.seconds == pytest.approx(STEP / 4 + 4 * 8 * ACTIVATIONS / 100e9)


def test_ring_attention_hides_its_sends_behind_attention() -> None:
    fast = predict(job(gpt(sequence=8192), "cp4", 4, gb_s=1000.0, settings=bucket(1000)))
    slow = predict(job(gpt(sequence=8192), "cp4", 4, gb_s=0.1, settings=bucket(1000)))
    assert "ring attention" not in fast.times.exposed
    assert slow.times.exposed["ring attention"] > 0


def test_experts_exchange_tokens_twice_each_way() -> None:
    model = gpt(experts=4, experts_per_token=2)
    even = predict(job(model, "ep4", 4, settings=bucket(1000)))
    busy = predict(job(model, "ep4", 4, settings=StepSettings(bucket_bytes=2**30, imbalance=1.5)))
    assert even.times.exposed["experts"] == pytest.approx(4 * 4 * 2 * ACTIVATIONS / 100e9)
    assert busy.times.exposed["experts"] == pytest.approx(1.5 * even.times.exposed["experts"])
    # Both products of an expert lie between the exchange to it and that back: up is four times as wide as it is deep.
    tasks = step_tasks(job(model, "ep4", 4), 1)
    there, back, *_ = [number for number, each in enumerate(tasks) if each.source == "experts"]
    inside = [each.seconds for each in tasks[there + 1 : back] if each.computes and each.seconds]
    assert len(inside) == 2


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


@dataclass(frozen=True)
class Stages:
    """A pipeline, pass by pass: seconds of forward and backward by stage, and of a send."""

    forward: list[float]
    send: float

    def seconds(self, microbatches: int) -> float:
        """Of a step by 1F1B; the backward pass takes twice as long."""
        stages = len(self.forward)
        orders = []
        for stage in range(stages):
            warm = min(stages - stage - 1, microbatches)
            order = [(False, number) for number in range(warm)]
            for number in range(microbatches - warm):
                order += [(False, warm + number), (True, number)]
            orders.append(order + [(True, number) for number in range(microbatches - warm, microbatches)])
        done: dict[tuple[int, bool, int], float] = {}
        free, places = [0.0] * stages, [0] * stages
        while any(place < 2 * microbatches for place in places):
            for stage, order in enumerate(orders):
                while places[stage] < len(order):
                    backward, number = order[places[stage]]
                    before = (stage + 1 if backward and stage < stages - 1 else stage - (not backward), False, number)
                    before = (before[0], backward and stage < stages - 1, number)
                    if before[0] >= 0 and before not in done:
                        break
                    arrived = 0.0 if before[0] < 0 else done[before] + self.send * (before[0] != stage)
                    free[stage] = max(free[stage], arrived) + self.forward[stage] * (1 + backward)
                    done[stage, backward, number] = free[stage]
                    places[stage] += 1
        return max(free)


@given(st.lists(st.floats(1.0, 1.3), min_size=2, max_size=10), st.floats(0.0, 0.3), st.integers(0, 20))
def test_a_pipeline_in_closed_form_takes_what_it_takes_pass_by_pass(
    forward: list[float], send: float, further: int
) -> None:
    microbatches = 2 * len(forward) + further
    filled, period = rhythm([3 * each for each in forward], send, 1, microbatches)
    assert filled + period * (microbatches - 1) == pytest.approx(Stages(forward, send).seconds(microbatches), rel=0.06)


@pytest.mark.parametrize(("layout", "gpus"), [("ddp", 4), ("fsdp", 4), ("zero1", 4), ("hsdp2", 4), ("tp2 ddp", 4)])
def test_many_microbatches_are_told_from_two(layout: str, gpus: int) -> None:
    """By what three take, each of which is written."""
    own = job(gpt(8), layout, gpus, latency_seconds=1e-5, settings=StepSettings(microbatches=3))
    tasks = step_tasks(own, 3)
    told = predict(own)
    assert told.seconds == pytest.approx(simulate(tasks).total, rel=1e-9)
    assert told.times.total == pytest.approx(told.seconds)
    seconds = sum(task.seconds for task in tasks if not task.computes)
    assert told.communication_seconds == pytest.approx(seconds)
    assert sum(row.operations for row in exposed_rows(told)) == sum(not task.computes for task in tasks)


def test_layers_that_do_not_divide_leave_the_last_stage_and_the_first_with_fewer() -> None:
    """Llama 3 405B has 126 layers on 16 stages."""
    assert layers_by_stage(126, parse_layout("pp16", 16)) == (7, *[8] * 14, 7)
    assert layers_by_stage(126, parse_layout("pp8 v8", 8)) == (15, *[16] * 6, 15)
    assert layers_by_stage(9, parse_layout("pp4", 4)) == (2, 3, 2, 2)
    uneven = predict(job(gpt(9), "pp4", 4, gb_s=1e15, settings=StepSettings(microbatches=8)))
    even = predict(job(gpt(12), "pp4", 4, gb_s=1e15, settings=StepSettings(microbatches=8)))
    # Nine layers of 24 / 9 ms fill the pipeline, and seven microbatches follow at the stage with three.
    assert uneven.seconds == pytest.approx((9 + 7 * 3) * STEP / 9, rel=1e-6)
    assert even.seconds == pytest.approx((12 + 7 * 3) * STEP / 12, rel=1e-6)


def test_full_recomputation_takes_a_forward_pass_more_and_its_communication() -> None:
    full = replace(gpt(), recompute=Recompute.FULL)
    assert predict(job(full, "ddp", 1)).seconds == pytest.approx(STEP + 0.008)
    own = predict(job(full, "tp4", 4))
    assert own.seconds == pytest.approx((STEP + 0.008) / 4 + 4 * 6 * ACTIVATIONS / 100e9)


def test_selective_recomputation_takes_attention_again() -> None:
    model = gpt()
    flops = sum(each.flops for each in model.operations(0))
    attention = sum(each.flops for each in model.operations(0) if each.needs_attention)
    selective = predict(job(replace(model, recompute=Recompute.SELECTIVE), "ddp", 1))
    assert selective.seconds == pytest.approx(STEP + 0.008 * attention / flops)


def test_fsdp_under_a_pipeline_gathers_and_scatters_once() -> None:
    own = predict(job(gpt(8), "pp2 fsdp", 4, settings=StepSettings(microbatches=8)))
    rows = {row.source: row for row in exposed_rows(own)}
    assert rows["parameter all-gather"].operations == rows["gradient reduce-scatter"].operations == 4
    assert rows["pipeline send"].operations == 16


def test_hsdp_reduces_shards_between_its_groups() -> None:
    own = predict(job(gpt(8), "hsdp2", 8))
    rows = {row.source: row for row in exposed_rows(own)}
    scattered, reduced = rows["gradient reduce-scatter"], rows["gradient all-reduce"]
    assert reduced.operations == scattered.operations == 8
    assert reduced.bytes == scattered.bytes / 2


@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "fsdp", "hsdp2", "pp2 fsdp"])
def test_gradients_of_32_bits_are_twice_the_bytes_and_parameters_stay(layout: str) -> None:
    sums = []
    for is_wide in (False, True):
        settings = StepSettings(bucket_bytes=None, reduces_fp32=is_wide)
        rows = exposed_rows(predict(job(mlp(), layout, 4, gb_s=10.0, settings=settings)))
        gathered = sum(row.bytes for row in rows if row.source == "parameter all-gather")
        sums.append((gathered, sum(row.bytes for row in rows if row.source.startswith("gradient"))))
    (parameters, gradients), (same, twice) = sums
    assert same == parameters
    assert twice == 2 * gradients > 0


def test_an_optimizer_takes_what_its_states_take_to_be_read_and_written() -> None:
    """64 MiB of bfloat16 are 33.5 M parameters; ZeRO shares them out."""
    settings = StepSettings(optimizer_bytes=30)
    for layout, ranks in (("ddp", 1), ("zero1", 4), ("fsdp", 4), ("hsdp2", 2)):
        own = job(mlp(), layout, 4, gb_s=1e15, copy_gb_s=1000.0, settings=settings)
        without = replace(own, settings=replace(settings, optimizer_bytes=0))
        more = predict(own).seconds - predict(without).seconds
        assert more == pytest.approx(64 * MEGABYTE / 2 * 30 / ranks / 1e12, rel=1e-6)


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp2 ddp", "pp2 ddp"])
def test_computation_follows_from_a_measured_step(layout: str) -> None:
    """Also where it starts far off, and none where communication alone takes longer."""
    own = job(gpt(8), layout, 4, settings=StepSettings(microbatches=4))
    seconds = predict(own).seconds
    guess = replace(own, compute=replace(own.compute, forward_seconds=0.8, backward_seconds=1.6))
    found = fit_computation(guess, seconds)
    assert found is not None
    assert found.forward_seconds == pytest.approx(own.compute.forward_seconds, rel=1e-3)
    assert fit_computation(own, 1e-6) is None


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


LAYOUTS = ("ddp", "zero1", "zero2", "fsdp", "hsdp2", "pp2 fsdp", "tp2 ddp", "tp4 sp", "pp2 ddp", "pp4", "cp2 ddp")


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
    prediction = predict(own, with_range=False)
    assert prediction.times.total == pytest.approx(prediction.seconds)
    assert prediction.exposed >= 0
    assert prediction.times.bubble >= -1e-12
    alone: dict[str, float] = {}
    for task in step_tasks(own, 1):
        alone[task.stream] = alone.get(task.stream, 0.0) + task.seconds
    assert prediction.seconds >= max(alone.values()) - 1e-9


@given(st.sampled_from(LAYOUTS), st.floats(0.1, 500.0), st.floats(1.0, 10.0), st.sampled_from([1, 5, 25, 1000]))
def test_more_bandwidth_never_takes_longer(layout: str, gb_s: float, factor: float, megabytes: int) -> None:
    def seconds(speed: float) -> float:
        own = job(gpt(), layout, 4, gb_s=speed, settings=bucket(megabytes, microbatches=4))
        return predict(own, with_range=False).seconds

    assert seconds(gb_s * factor) <= seconds(gb_s) * (1 + 1e-9)


@given(st.floats(0.0, 0.2), st.sampled_from(LAYOUTS))
def test_the_range_is_around_the_step(spread: float, layout: str) -> None:
    own: StepJob = job(gpt(), layout, 4, spread=spread, settings=StepSettings(microbatches=4))
    prediction = predict(own)
    assert prediction.least <= prediction.seconds <= prediction.most


@pytest.mark.parametrize(
    ("layout", "a_block"), [("ddp", 0.007), ("zero1", 0.004), ("zero2", 0.01), ("fsdp", 0.01), ("tp4", 0.004)]
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


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp2 zero1", "pp2 fsdp", "pp2 v2 ddp", "hsdp2"])
def test_few_blocks_tell_of_many(layout: str) -> None:
    own = job(gpt(48), layout, 4, latency_seconds=1e-5, settings=StepSettings(microbatches=4))
    whole = predict(replace(own, most_blocks=48), with_range=False)
    assert predict(own, with_range=False).seconds == pytest.approx(whole.seconds, rel=0.01)

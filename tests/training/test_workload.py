"""Models, layouts and the memory that their states need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.errors import UsageError
from gpubench.model.terms.operation import DataType
from gpubench.training.workload import (
    ParallelLayout,
    TransformerModel,
    misfit,
    model_with_parameters,
    parse_layout,
    states_bytes,
)

LLAMA_7B = TransformerModel(
    name="llama-2-7b", layers=32, hidden=4096, heads=32, sequence=4096, intermediate=11008, vocabulary=32000, gated=True
)
MIXTRAL = TransformerModel(
    name="mixtral-8x7b",
    layers=32,
    hidden=4096,
    heads=32,
    key_value_heads=8,
    sequence=4096,
    intermediate=14336,
    vocabulary=32000,
    gated=True,
    experts=8,
    experts_per_token=2,
)


def test_parameters_are_those_that_are_published() -> None:
    """6.74 B and 46.7 B; final norms, of 4096 elements, are left out."""
    assert LLAMA_7B.parameters == 6_738_415_616 - 4096
    assert MIXTRAL.parameters == 46_702_792_704 - 4096


def test_gpt_blocks_with_biases_have_what_pytorch_counts() -> None:
    """16 blocks as benchmarks/training/blocks.py makes them."""
    model = TransformerModel(name="gpt", layers=16, hidden=2048, heads=16, sequence=2048, biases=True)
    assert model.parameters == 16 * (12 * 2048**2 + 13 * 2048)


def test_flops_are_two_a_parameter_and_token_and_those_of_causal_attention() -> None:
    model = TransformerModel(name="gpt", layers=16, hidden=2048, heads=16, sequence=2048, batch=4)
    matrices = 16 * 12 * 2048**2
    assert model.forward_flops() == 2 * matrices * 4 * 2048 + 16 * 4 * 2 * 2048**2 * 2048


@pytest.mark.parametrize("billions", [0.3, 1, 7, 13, 70, 175])
def test_a_number_of_parameters_makes_a_model_of_about_as_many(billions: float) -> None:
    model = model_with_parameters(round(billions * 1e9), sequence=2048, batch=1)
    assert model.parameters == pytest.approx(billions * 1e9, rel=0.2)
    assert model.hidden % model.heads == 0
    assert billions < 7 or not misfit(model, parse_layout("tp8 sp", 8))


@pytest.mark.parametrize("text", ["ddp", "fsdp", "tp2 dp4 ddp", "tp2 sp pp2 dp2 zero1", "pp4 v2 dp2 ddp", "tp8"])
def test_a_layout_is_written_as_it_is_read(text: str) -> None:
    assert str(parse_layout(text, 8)) == text


@pytest.mark.parametrize("text", ["tp3", "tp2 tp4", "ddp fsdp", "foo", "tp0", "ring2 cp2", "dp4"])
def test_a_layout_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_layout(text, 8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp64", "32 heads are not divisible by tp64"),
        ("pp64", "32 layers are fewer than 64 stages"),
        ("pp2 v32", "32 layers are fewer than 64 stages"),
        ("ep2", "the model has no experts"),
        ("hsdp3", "64 data-parallel ranks are not divisible by hsdp3"),
        ("sp", "sp needs tp2 or more"),
    ],
)
def test_a_model_that_does_not_divide_is_told_why(text: str, words: str) -> None:
    assert misfit(LLAMA_7B, parse_layout(text, 64)) == words


@given(st.sampled_from(["ddp", "tp2 zero1", "tp4 sp pp2 fsdp", "pp4 v2 ddp", "cp2 zero2", "tp2 hsdp4"]))
def test_a_layout_is_read_as_it_is_written(text: str) -> None:
    layout = parse_layout(text, 32)
    assert layout.gpus == 32
    assert parse_layout(str(layout), 32) == layout


def test_what_others_call_the_same_is_the_same() -> None:
    assert parse_layout("ring2 zero3", 8) == parse_layout("cp2 fsdp", 8)


def need(layout: str, gpus: int, optimizer_bytes: int = 12) -> int:
    return states_bytes(LLAMA_7B, parse_layout(layout, gpus), optimizer_bytes)


def test_mixed_precision_with_adam_takes_sixteen_bytes_a_parameter() -> None:
    assert need("ddp", 1) == 16 * LLAMA_7B.parameters


def test_each_stage_of_zero_shares_out_more() -> None:
    needs = [need(each, 8) for each in ("ddp", "zero1", "zero2", "fsdp")]
    assert needs == sorted(needs, reverse=True)
    assert need("ddp", 8) - need("zero1", 8) == 12 * LLAMA_7B.parameters * 7 // 8


def test_without_an_optimizer_its_states_take_nothing() -> None:
    assert need("ddp", 8) - need("ddp", 8, 0) == 12 * LLAMA_7B.parameters


def test_experts_are_split_over_ranks_and_the_rest_is_not() -> None:
    whole, split = (states_bytes(MIXTRAL, parse_layout(each, 8), 0) for each in ("ddp", "ep8"))
    shared = (MIXTRAL.parameters - MIXTRAL.expert_parameters) * 4
    assert split == shared + (whole - shared) // 8


def test_float32_has_one_copy_of_the_weights() -> None:
    model = TransformerModel(name="gpt", layers=2, hidden=2048, heads=16, sequence=2048, data_type=DataType.FLOAT32)
    assert states_bytes(model, ParallelLayout()) == 16 * model.parameters

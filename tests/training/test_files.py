"""Files with a model's shape, and stored contention."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpubench.errors import UsageError
from gpubench.training.workload_file import parse_parameters, read_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "vocab_size": 32000,
    "torch_dtype": "float16",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def written(path: Path, content: dict[str, Any] | str) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_names_of_gpt2_are_known(tmp_path: Path) -> None:
    model, _ = read_model(written(tmp_path / "config.json", GPT2), sequence=512, batch=8)
    assert (model.layers, model.hidden, model.heads, model.sequence, model.batch) == (12, 768, 12, 512, 8)
    assert model.biases
    assert not model.gated
    # GPT-2 has 124,439,808 parameters, one table for words going in and out, 1024 positions and a last norm.
    assert model.parameters == 124_439_808 - 1024 * 768 - 2 * 768


@pytest.mark.parametrize("reverse", [False, True])
def test_experts_have_their_own_width_wherever_it_stands(tmp_path: Path, *, reverse: bool) -> None:
    """Qwen3-30B-A3B: 128 experts of 768 in 48 blocks make 29 of its 30.5 billion parameters."""
    config = MIXTRAL | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_local_experts": 128,
    }
    config |= {"intermediate_size": 6144, "moe_intermediate_size": 768, "num_key_value_heads": 4}
    ordered = dict(reversed(config.items())) if reverse else config
    model, _ = read_model(written(tmp_path / "config.json", ordered))
    assert model.width == 768
    assert model.expert_parameters == 48 * 128 * 3 * 2048 * 768


def test_what_of_a_config_is_not_modelled_is_said(tmp_path: Path) -> None:
    config = LLAMA | {"model_type": "newarch", "is_encoder_decoder": True}
    _, notes = read_model(written(tmp_path / "config.json", config))
    assert "model_type newarch: modelled as a decoder with an MLP of two matrices" in notes
    assert "is_encoder_decoder is not modelled" in notes


SHAPE = "layers = 2\nhidden = 256\nheads = 16\nsequence = 64\n"


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("key_value_heads = 5", "16 heads are not divisible by 5 key_value_heads"),
        ("key_value_heads = 32", "16 heads are not divisible by 32 key_value_heads"),
        ("experts = 8\nexperts_per_token = 9", "9 experts_per_token of 8 experts"),
        ('data_type = "int8"', "data_type is 'int8'"),
    ],
)
def test_a_shape_that_no_model_has_is_refused(tmp_path: Path, line: str, seen: str) -> None:
    with pytest.raises(UsageError, match=seen):
        read_model(written(tmp_path / "m.toml", SHAPE + line))


def test_a_text_model_within_another_is_read(tmp_path: Path) -> None:
    model, _ = read_model(written(tmp_path / "config.json", {"model_type": "llava", "text_config": LLAMA}))
    assert model.layers == 32


def test_toml_has_the_names_of_the_page(tmp_path: Path) -> None:
    text = "layers = 16\nhidden = 2048\nheads = 16\nsequence = 2048\nbatch = 4\nkind = 'mlp'\n"
    model, notes = read_model(written(tmp_path / "m.toml", text))
    assert model.parameters == 16 * 8 * 2048**2
    assert notes == []


@pytest.mark.parametrize(
    ("name", "content", "seen"),
    [
        ("m.toml", "layers = ", "is not TOML"),
        ("m.json", "{", "is not JSON"),
        ("m.json", "[1]", "has no keys"),
        ("m.toml", "layers = 2\nhidden = 8", "has no heads"),
        ("m.toml", "layers = 2\nhidden = 8\nheads = 3", "is not divisible by the number of heads (3)"),
        ("m.toml", "layers = 2\nhidden = 8\nheads = 2\nhiden = 3", "unknown key 'hiden'"),
        ("m.toml", "layers = 2.5\nhidden = 8\nheads = 2", "layers is 2.5"),
        ("m.toml", "layers = 0\nhidden = 8\nheads = 2", "layers is 0"),
        ("m.toml", "layers = true\nhidden = 8\nheads = 2", "layers is True"),
        ("m.toml", "layers = 2\nhidden = 8\nheads = 2\nexperts = 4", "4 experts and 0 per token"),
        ("m.toml", "layers = 2\nhidden = 8\nheads = 2\ndata_type = 'int3'", "data_type is 'int3'"),
        ("m.toml", "layers = 2\nhidden = 8\nheads = 2\ngated = 1", "gated is 1"),
        ("m.txt", "what is this", "is not the start of a file"),
        ("m.toml", "", "is empty"),
    ],
)
def test_a_model_that_cannot_be_is_refused(tmp_path: Path, name: str, content: str, seen: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_model(written(tmp_path / name, content))
    assert seen in caught.value.seen
    assert caught.value.expected


@pytest.mark.parametrize(("text", "count"), [("7B", 7 * 10**9), ("806M", 806 * 10**6), ("1.8t", 1_800_000_000_000)])
def test_parameters_have_a_unit(text: str, count: int) -> None:
    assert parse_parameters(text) == count


@pytest.mark.parametrize("text", ["7", "B", "", "-7B", "7GB", "1e9B", "1000000T"])
def test_parameters_without_one_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_parameters(text)

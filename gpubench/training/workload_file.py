"""Reads the shape of a model from TOML or JSON. Keys are gpubench's own keys or the keys of a Hugging Face
config.json.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpubench.errors import UsageError
from gpubench.model.terms.operation import DataType
from gpubench.readers.documents import Wanted, load_json, read_text
from gpubench.training.workload import BlockKind, Recompute, TransformerModel

_EXPERT_WIDTH = "moe_intermediate_size"
_KEYS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "key_value_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", _EXPERT_WIDTH),
    "vocabulary": ("vocab_size",),
    "sequence": ("seq_length", "sequence_length"),
    "batch": ("micro_batch_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
    "data_type": ("torch_dtype", "dtype"),
    "tied_embeddings": ("tie_word_embeddings",),
    "gated": (),
    "biases": (),
    "kind": (),
    "head_size": ("head_dim",),
    "recompute": (),
    "fp8": (),
    "name": ("_name_or_path",),
}
"""gpubench's keys and their synonyms. All other keys in a config.json are ignored."""

_TRAINED_TYPES = (DataType.BFLOAT16, DataType.FLOAT16, DataType.FLOAT32)
_NEEDED = ("layers", "hidden", "heads")
_MOST: Mapping[str, int] = {
    **dict.fromkeys(("layers", "heads", "key_value_heads", "experts", "experts_per_token"), 100_000),
    **dict.fromkeys(("hidden", "intermediate", "head_size"), 10_000_000),
    **dict.fromkeys(("vocabulary", "sequence", "batch"), 1_000_000_000),
}
_MAY_BE_ZERO = ("experts", "experts_per_token", "vocabulary", "key_value_heads", "intermediate", "head_size")
_MOST_BYTES = 2**24
_LONGEST = ("max_position_embeddings", "n_positions", "max_sequence_length")
USUAL_SEQUENCE = 4096
_GATED_TYPES = ("llama", "mistral", "mixtral", "qwen", "gemma", "phi3", "deepseek", "olmo", "cohere", "falcon3")
_UNTIED_TYPES = ("llama", "mistral", "mixtral", "qwen", "phi3", "deepseek", "olmo", "gpt_neox")
"""Model families in which tie_word_embeddings is false by default."""

_NOT_MODELLED = ("is_encoder_decoder", "n_shared_experts", "first_k_dense_replace", "shared_expert_intermediate_size")
_BIASED_TYPES = ("gpt2", "gpt_neo", "gpt_neox", "opt", "bloom", "bert")

_WANTED = Wanted(
    kinds="a model as TOML or JSON (layers, hidden, heads, sequence, batch, ...), or a Hugging Face config.json",
    how_to_make_one="gpubench plan --parameters 7B needs no file",
    most_bytes=_MOST_BYTES,
    example="model.toml",
)

_COUNT = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMBT]?)", re.ASCII | re.IGNORECASE)
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_parameters(text: str) -> int:
    """Parse a number of parameters such as '7B' or '806M', with factors of 1000. Raises UsageError if the unit is
    missing.
    """
    match = _COUNT.fullmatch(text.strip())
    if match is None or not match["unit"]:
        raise UsageError(
            f"--parameters {text}: {'no unit' if match else 'no number of parameters'}",
            expected="a number followed by M, B or T (1000-based): 806M, 7B, 1.8T",
            reason="7 could mean 7 billion or 7",
            next_step=f"--parameters {match['number']}B" if match else "--parameters 7B",
        )
    count = round(float(match["number"]) * _UNITS[match["unit"].upper()])
    if not 10**5 <= count <= 10**14:
        raise UsageError(f"--parameters {text} is {count:,} parameters", expected="100K to 100T")
    return count


def read_model(
    path: Path, *, sequence: int | None = None, batch: int | None = None
) -> tuple[TransformerModel, list[str]]:
    """Read the model in a file. Return it with the assumptions about it as sentences.

    Raises UsageError if the file cannot be read, or if a key is unknown, missing, or invalid.
    """
    text, name = read_text(path, _WANTED), str(path)
    plain = _loaded(text, path, name)
    is_config = any(key in plain for key in ("model_type", "architectures", "transformers_version"))
    inner = plain.get("text_config")
    if is_config and isinstance(inner, dict):
        plain = {**plain, **inner}
    values = _values(plain, name, is_config=is_config)
    notes: list[str] = []
    values.setdefault("name", path.stem if path.stem != "config" else path.resolve().parent.name)
    _assume(values, plain, notes, is_config=is_config, sequence=sequence, batch=batch)
    return _checked(values, name), notes


def _loaded(text: str, path: Path, name: str) -> dict[str, Any]:
    try:
        plain = tomllib.loads(text) if path.suffix == ".toml" else load_json(text)
    except (ValueError, RecursionError) as error:
        if path.suffix not in (".toml", ".json"):
            raise _WANTED.unknown(text, name) from None
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise _WANTED.unfit(f"{name} is not {kind}: {error}", reason="it was cut off, or edited by hand") from None
    if not isinstance(plain, dict):
        raise _WANTED.unfit(f"{name} has no keys", reason="it is another kind of file")
    found = plain.get("model", plain)
    return found if isinstance(found, dict) else plain


def _values(plain: Mapping[str, Any], name: str, *, is_config: bool) -> dict[str, Any]:
    names = {alias: key for key, aliases in _KEYS.items() for alias in (*aliases, key)}
    values: dict[str, Any] = {}
    for spelling, value in plain.items():
        key = names.get(spelling)
        if key is None and not is_config:
            near = difflib.get_close_matches(spelling, list(names), 1)
            raise UsageError(
                f"{name} has an unknown key {spelling!r}",
                expected=f"keys among {', '.join(_KEYS)}",
                reason=f"{near[0]!r} was meant" if near else "it is a different kind of file",
                next_step="docs/commands/plan.md has an example",
            )
        if key is not None and value is not None:
            values.setdefault(key, value)
    # If both keys are set, intermediate_size is the width of the few blocks that have no experts.
    if values.get("experts") and plain.get(_EXPERT_WIDTH) is not None:
        values["intermediate"] = plain[_EXPERT_WIDTH]
    return values


def _assume(
    values: dict[str, Any],
    plain: Mapping[str, Any],
    notes: list[str],
    *,
    is_config: bool,
    sequence: int | None,
    batch: int | None,
) -> None:
    """Fill in missing values from the options. Assume the other missing values, and add a note about each
    assumption.
    """
    if sequence is not None:
        values["sequence"] = sequence
    if batch is not None:
        values["batch"] = batch
    if "sequence" not in values:
        longest = next((plain[key] for key in _LONGEST if isinstance(plain.get(key), int)), USUAL_SEQUENCE)
        values["sequence"] = min(longest, USUAL_SEQUENCE)
        notes.append(f"sequence {values['sequence']} (--sequence N changes it)")
    if "batch" not in values:
        values["batch"] = 1
        notes.append("1 sequence per microbatch (--batch N changes it)")
    if is_config:
        family = str(plain.get("model_type", "")).lower()
        values.setdefault("gated", family.startswith(_GATED_TYPES))
        values.setdefault("biases", family.startswith(_BIASED_TYPES))
        # transformers' PretrainedConfig omits keys with default values. The default of tie_word_embeddings is true.
        values.setdefault("tied_embeddings", not family.startswith(_UNTIED_TYPES))
        if not family.startswith((*_GATED_TYPES, *_BIASED_TYPES)):
            notes.append(f"model_type {family or 'is missing'}: modelled as a decoder with an MLP of two matrices")
        notes.extend(f"{key} is not modelled" for key in _NOT_MODELLED if plain.get(key))
    text = str(values.get("data_type", DataType.BFLOAT16)).removeprefix("torch.")
    values["data_type"] = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}.get(text, text)


def _checked(values: dict[str, Any], name: str) -> TransformerModel:
    missing = [key for key in _NEEDED if key not in values]
    if missing:
        raise UsageError(
            f"{name} has no {missing[0]}",
            expected=f"{', '.join(_NEEDED)}; {missing[0]} may be called {' or '.join(_KEYS[missing[0]])}",
            next_step="docs/commands/plan.md has an example",
        )
    for key, most in _MOST.items():
        value = values.get(key, 1)
        least = 0 if key in _MAY_BE_ZERO else 1
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise UsageError(f"{name}: {key} is {value!r}", expected=f"a whole number from {least} to {most:,}")
    for key in ("gated", "biases", "tied_embeddings", "fp8"):
        if not isinstance(values.get(key, False), bool):
            raise UsageError(f"{name}: {key} is {values[key]!r}", expected="true or false")
    for key, kinds in (("data_type", _TRAINED_TYPES), ("kind", tuple(BlockKind)), ("recompute", tuple(Recompute))):
        if key in values and values[key] not in kinds:
            raise UsageError(f"{name}: {key} is {values[key]!r}", expected=f"one of {', '.join(kinds)}")
    _check_shape(values, name)
    own = {key: values[key] for key in _KEYS if key in values}
    own["name"] = str(own["name"])
    own["data_type"] = DataType(own["data_type"])
    own["kind"] = BlockKind(own.get("kind", BlockKind.TRANSFORMER))
    own["recompute"] = Recompute(own.get("recompute", Recompute.NONE))
    return TransformerModel(**own)


def _check_shape(values: Mapping[str, Any], name: str) -> None:
    shared = values.get("key_value_heads")
    if shared and values["heads"] % shared:
        raise UsageError(
            f"{name}: {values['heads']} heads are not divisible by {shared} key_value_heads",
            expected="the same number of heads for each key-value head",
        )
    if values.get("experts_per_token", 0) > values.get("experts", 0):
        raise UsageError(
            f"{name}: {values['experts_per_token']} experts_per_token of {values.get('experts', 0)} experts",
            expected="at most the number of experts",
        )
    if values["hidden"] % values["heads"] and not values.get("head_size"):
        raise UsageError(
            f"{name}: the hidden size {values['hidden']} is not divisible by the number of heads ({values['heads']})",
            expected="a whole number of elements per head",
        )
    if bool(values.get("experts")) != bool(values.get("experts_per_token")):
        raise UsageError(
            f"{name} has {values.get('experts', 0)} experts and {values.get('experts_per_token', 0)} per token",
            expected="both experts and experts_per_token, or neither",
        )

"""A training model: its shape and operations, its layout over GPUs, and its memory on one GPU.

Counts are for one replica of the whole model. The layout tells a GPU's share. FLOPs count multiplications and additions
separately.

Terms: `tp` tensor, `pp` pipeline, `cp` context, `ep` expert and `dp` data parallelism. `tp` is innermost (neighboring
GPUs), then `cp`, then data parallelism, then the pipeline, as Megatron-LM orders its ranks.

Mixed precision with Adam takes 2 bytes per parameter for weights, 2 for gradients and 12 for the optimizer: weights in
float32, momentum and variance (Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, section 3.1). In float32 there is no
second copy of the weights. Activations are additional. Selective recomputation repeats attention in the backward pass,
and full recomputation repeats whole blocks (Korthikanti et al. 2022, arXiv 2205.05198, section 5).
"""

import re
from collections.abc import Iterator
from enum import StrEnum
from functools import lru_cache
from math import ceil

from msgspec import Struct
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.model.terms.operation import DataType


class BlockKind(StrEnum):
    """The kind of block that a model stacks."""

    TRANSFORMER = "transformer"
    MLP = "mlp"


class Recompute(StrEnum):
    """The part of a block's forward pass that the backward pass repeats to save memory."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class ParameterTensor(Struct, frozen=True):
    """A parameter: its name within the model and number of elements. `expert` means that only some tokens use it."""

    name: str
    elements: int
    expert: bool = False


class Operation(Struct, frozen=True):
    """One operation of a block: FLOPs of its forward pass for one sequence, and its own parameters.

    `needs_attention` marks attention itself, whose FLOPs grow with the square of the sequence. A product has `inputs`
    by `outputs` weights. Both are 0 for other operations.
    """

    name: str
    flops: float
    tensors: tuple[ParameterTensor, ...] = ()
    needs_attention: bool = False
    inputs: int = 0
    outputs: int = 0


class TransformerModel(Struct, frozen=True, kw_only=True):
    """The shape of a model, and the batch of one step.

    `batch` is the number of sequences in a microbatch on one GPU. `intermediate` is the width inside the MLP. `gated`
    means a third matrix in the MLP (SwiGLU). A block has `experts` MLPs, and a token passes `experts_per_token` of
    them. `key_value_heads` is lower than `heads` if queries share them. `head_size` is set if it differs from hidden
    over heads. A `vocabulary` of 0 means blocks alone. With `fp8`, products compute in 8 bits, and everything else in
    `data_type`.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int = 1
    key_value_heads: int = 0
    intermediate: int = 0
    vocabulary: int = 0
    experts: int = 0
    experts_per_token: int = 0
    gated: bool = False
    biases: bool = False
    tied_embeddings: bool = False
    kind: BlockKind = BlockKind.TRANSFORMER
    data_type: DataType = DataType.BFLOAT16
    head_size: int = 0
    recompute: Recompute = Recompute.NONE
    fp8: bool = False

    @property
    def width(self) -> int:
        """The width inside the MLP, by default four times the hidden size."""
        return self.intermediate or 4 * self.hidden

    @property
    def query_width(self) -> int:
        """Elements per token of the queries, and of attention's output."""
        return self.head_size * self.heads or self.hidden

    @property
    def key_value_width(self) -> int:
        """Elements per token of the keys, and of the values."""
        return self.query_width // self.heads * (self.key_value_heads or self.heads)

    @property
    def tokens(self) -> int:
        """Tokens per microbatch."""
        return self.batch * self.sequence

    @property
    def activation_bytes(self) -> int:
        """Bytes of the activations between two blocks per microbatch."""
        return self.tokens * self.hidden * self.data_type.size_bytes

    def operations(self, block: int) -> tuple[Operation, ...]:
        """Return the operations of a block in forward order."""
        return _operations(self, block)

    def _written(self, block: int) -> Iterator[Operation]:
        at = f"{block}."
        if self.kind is not BlockKind.MLP:
            hidden, sequence, width = self.hidden, self.sequence, self.query_width
            yield self._norm(f"{at}norm1")
            yield self._linear(f"{at}attention.in", hidden, width + 2 * self.key_value_width)
            # With a causal mask a token sees half of the sequence on average, in scores and in weighted values.
            yield Operation(f"{at}attention", 2.0 * sequence * sequence * width, needs_attention=True)
            yield self._linear(f"{at}attention.out", width, hidden)
            yield self._norm(f"{at}norm2")
        yield from self._mlp(at)

    def ends(self) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
        """The embedding and the projection to the vocabulary, both empty for a model of blocks alone."""
        if not self.vocabulary:
            return (), ()
        table = ParameterTensor("embedding", self.vocabulary * self.hidden)
        own = () if self.tied_embeddings else (ParameterTensor("head", table.elements),)
        head = Operation("head", 2.0 * self.sequence * table.elements, own)
        return (Operation("embedding", 0.0, (table,)),), (head,)

    def head_flops(self) -> float:
        """FLOPs of the projection to the vocabulary for one sequence."""
        return sum(each.flops for each in self.ends()[1])

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        ends = sum(tensor.elements for end in self.ends() for each in end for tensor in each.tensors)
        return ends + self.layers * sum(
            tensor.elements for operation in self.operations(0) for tensor in operation.tensors
        )

    @property
    def expert_parameters(self) -> int:
        """Elements of the experts, which expert parallelism splits."""
        tensors = (tensor for operation in self.operations(0) for tensor in operation.tensors)
        return self.layers * sum(each.elements for each in tensors if each.expert)

    def forward_flops(self) -> float:
        """FLOPs of the forward pass per microbatch."""
        blocks = self.layers * sum(operation.flops for operation in self.operations(0))
        return self.batch * (blocks + self.head_flops())

    def _mlp(self, at: str) -> Iterator[Operation]:
        hidden, width = self.hidden, self.width
        into = 2 * width if self.gated else width
        if not self.experts:
            yield self._linear(f"{at}mlp.up", hidden, into)
            yield self._linear(f"{at}mlp.down", width, hidden)
            return
        yield Operation(
            f"{at}router",
            2.0 * self.sequence * hidden * self.experts,
            (ParameterTensor(f"{at}router", hidden * self.experts),),
        )
        active = 2.0 * self.sequence * self.experts_per_token
        for name, inputs, outputs in (("up", hidden, into), ("down", width, hidden)):
            # Grouped products keep the weights of all experts in one tensor.
            own = (ParameterTensor(f"{at}experts.{name}", self.experts * inputs * outputs, expert=True),)
            flops = active * inputs * outputs
            yield Operation(f"{at}experts.{name}", flops, own, inputs=inputs, outputs=outputs)

    def _linear(self, name: str, inputs: int, outputs: int) -> Operation:
        weight, bias = ParameterTensor(f"{name}.weight", inputs * outputs), ParameterTensor(f"{name}.bias", outputs)
        return Operation(
            name,
            2.0 * self.sequence * inputs * outputs,
            (weight, bias) if self.biases else (weight,),
            inputs=inputs,
            outputs=outputs,
        )

    def _norm(self, name: str) -> Operation:
        weight, bias = ParameterTensor(f"{name}.weight", self.hidden), ParameterTensor(f"{name}.bias", self.hidden)
        return Operation(name, 0.0, (weight, bias) if self.biases else (weight,))


@lru_cache(1024)
def _operations(model: TransformerModel, block: int) -> tuple[Operation, ...]:
    """Cached, because every microbatch of every layout needs the same blocks."""
    return tuple(model._written(block))  # noqa: SLF001


_ASPECT = 128  # Hidden size over layers, as in GPT-3 175B (arXiv 2005.14165, table 2.1) and Llama 2 7B
_HIDDEN_STEP = 256
_HEAD = 128


def model_with_parameters(parameters: int, *, sequence: int, batch: int) -> TransformerModel:
    """Return a model of blocks alone with about this many parameters: 12 · layers · hidden², hidden = 128 · layers."""
    ideal = (parameters * _ASPECT / 12) ** (1 / 3)
    step = 8 * _HEAD if ideal > 4 * 8 * _HEAD else _HIDDEN_STEP  # large models are split over eight GPUs by their heads
    hidden = max(step, round(ideal / step) * step)
    layers = max(1, round(parameters / (12 * hidden * hidden)))
    layers = layers if layers < 8 else round(layers / 4) * 4
    return TransformerModel(
        name=f"{parameters / 1e9:g}B",
        layers=layers,
        hidden=hidden,
        heads=max(1, hidden // _HEAD),
        sequence=sequence,
        batch=batch,
    )


class Sharding(StrEnum):
    """What data-parallel ranks shard: nothing, optimizer states, also gradients, or also parameters."""

    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    FSDP = "fsdp"

    @property
    def gathers_parameters(self) -> bool:
        """True if parameters are gathered block by block before the forward pass.

        FSDP frees them after it, and gathers them again for the backward pass.
        """
        return self in (Sharding.ZERO2, Sharding.FSDP)


GRAMMAR = (
    "words with a blank between them: ddp, zero1, zero2, fsdp (or zero3), or hsdpN (shards of N GPUs); tpN, and sp for "
    "sequence parallelism; ppN, and vN for N stages a GPU; cpN (ring attention); epN; e.g. 'tp2 sp pp4 ddp'"
)

_ALIKE = {"zero3": "fsdp", "ring": "cp"}
_WORD = re.compile(r"(?P<name>tp|pp|v|cp|ring|ep|dp|hsdp)(?P<count>\d{1,5})", re.ASCII)


class ParallelLayout(Struct, frozen=True, kw_only=True):
    """The number of ranks per kind of parallelism. `stages_per_gpu` above 1 means an interleaved pipeline.

    Expert parallelism uses data-parallel ranks, so it does not multiply. `shards` is the number of ranks that shard the
    parameters in each group (HSDP), 0 for all ranks.
    """

    data: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    pipeline: int = 1
    stages_per_gpu: int = 1
    context: int = 1
    expert: int = 1
    sharding: Sharding = Sharding.DDP
    shards: int = 0

    @property
    def gpus(self) -> int:
        """The total number of GPUs."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def gradient_ranks(self) -> int:
        """Ranks that have the same parameters and reduce their gradients."""
        return self.data * self.context

    @property
    def shard_ranks(self) -> int:
        """Ranks that shard parameters, gradients and optimizer states, as far as the layout does."""
        return self.shards or self.gradient_ranks

    @property
    def replicas(self) -> int:
        """Groups of sharding ranks, which reduce gradients between them."""
        return self.gradient_ranks // self.shard_ranks

    def __str__(self) -> str:
        words = [f"tp{self.tensor}"] if self.tensor > 1 else []
        words += ["sp"] if self.sequence_parallel else []
        words += [f"pp{self.pipeline}"] if self.pipeline > 1 else []
        words += [f"v{self.stages_per_gpu}"] if self.stages_per_gpu > 1 else []
        words += [f"cp{self.context}"] if self.context > 1 else []
        words += [f"ep{self.expert}"] if self.expert > 1 else []
        words += [f"dp{self.data}"] if words and self.data > 1 else []
        words += [f"hsdp{self.shards}" if self.shards else str(self.sharding)] if self.gradient_ranks > 1 else []
        return " ".join(words) or "one GPU"


def parse_layout(text: str, gpus: int) -> ParallelLayout:
    """Parse a layout. The remaining ranks are data-parallel. Raises UsageError."""
    counts, shardings, sequence_parallel = dict[str, int](), list[Sharding](), False
    for word in text.lower().replace(",", " ").split():
        match = _WORD.fullmatch(word)
        name = _ALIKE.get(match["name"], match["name"]) if match is not None else _ALIKE.get(word, word)
        if word == "sp":
            sequence_parallel = True
        elif name in tuple(Sharding):
            shardings.append(Sharding(name))
        elif match is not None and name not in counts and int(match["count"]) >= 1:
            counts[name] = int(match["count"])
        else:
            raise UsageError(f"--layout {text!r}: {word!r} is no word of a layout, or stands twice", expected=GRAMMAR)
    shardings += [Sharding.FSDP] if "hsdp" in counts else []
    if len(shardings) > 1:
        raise UsageError(f"--layout {text!r} says two things of one kind", expected=GRAMMAR)
    layout = ParallelLayout(
        tensor=counts.get("tp", 1),
        sequence_parallel=sequence_parallel,
        pipeline=counts.get("pp", 1),
        stages_per_gpu=counts.get("v", 1),
        context=counts.get("cp", 1),
        expert=counts.get("ep", 1),
        sharding=shardings[0] if shardings else Sharding.DDP,
        shards=counts.get("hsdp", 0),
    )
    if gpus % layout.gpus:
        raise UsageError(
            f"--layout {text!r} takes a multiple of {layout.gpus} GPUs, and there are {gpus}",
            expected="tp × pp × cp that divides the GPUs",
            next_step=f"--gpus {max(1, gpus // layout.gpus) * layout.gpus}",
        )
    left = gpus // layout.gpus
    if counts.get("dp", left) != left:
        raise UsageError(
            f"--layout {text!r}: dp{counts['dp']}, and {gpus} GPUs leave dp{left}", expected="all GPUs, each once"
        )
    return replace(layout, data=left)


def misfit(model: TransformerModel, layout: ParallelLayout) -> str:
    """Return why a model does not fit a layout, or ''."""
    heads, key_values = model.heads, model.key_value_heads or model.heads
    reasons = (
        (model.heads % layout.tensor != 0, f"{heads} heads do not divide by tp{layout.tensor}"),
        (key_values % layout.tensor != 0, f"{key_values} key-value heads do not divide by tp{layout.tensor}"),
        (model.width % layout.tensor != 0, f"an MLP of {model.width} does not divide by tp{layout.tensor}"),
        (layout.sequence_parallel and layout.tensor == 1, "sp goes with tp2 or more"),
        (
            layout.sequence_parallel and model.sequence % (layout.tensor * layout.context) != 0,
            f"a sequence of {model.sequence} does not divide by tp{layout.tensor}",
        ),
        (
            model.layers < layout.pipeline * layout.stages_per_gpu,
            f"{model.layers} layers are fewer than {layout.pipeline * layout.stages_per_gpu} stages",
        ),
        (layout.stages_per_gpu > 1 and layout.pipeline == 1, "v goes with pp2 or more"),
        (model.sequence % layout.context != 0, f"a sequence of {model.sequence} does not divide by {layout.context}"),
        (
            layout.context > 1 and model.kind is BlockKind.MLP,
            "a stack of MLPs has no attention to split a sequence over",
        ),
        (layout.expert > 1 and not model.experts, "the model has no experts"),
        (
            layout.expert > 1 and (model.experts % layout.expert != 0 or layout.data % layout.expert != 0),
            f"{model.experts} experts and dp{layout.data} do not both divide by ep{layout.expert}",
        ),
        (
            layout.shards > 0 and layout.gradient_ranks % layout.shards != 0,
            f"{layout.gradient_ranks} data-parallel ranks do not divide by hsdp{layout.shards}",
        ),
    )
    return next((words for wrong, words in reasons if wrong), "")


def layers_by_stage(layers: int, layout: ParallelLayout) -> tuple[int, ...]:
    """Return the layers of each GPU of a pipeline.

    If they do not divide by the stages, the last stage and the first have one fewer, then those before the last,
    because these have the head and the embedding (Dubey et al. 2024, arXiv 2407.21783, section 3.3.2).
    """
    parts = layout.pipeline * layout.stages_per_gpu
    most = ceil(layers / parts)
    fewer = [parts - 1, 0, *range(parts - 2, 0, -1)][: parts * most - layers]
    of_parts = [most - (part in set(fewer)) for part in range(parts)]
    return tuple(sum(of_parts[stage :: layout.pipeline]) for stage in range(layout.pipeline))


def check_layout(model: TransformerModel, layout: ParallelLayout) -> None:
    """Raise UsageError if the model does not fit the layout."""
    words = misfit(model, layout)
    if words:
        raise UsageError(
            f"--layout '{layout}' does not fit {model.name}: {words}",
            expected="heads that divide by tp, the sequence by cp, experts by ep, a layer or more for each stage",
            next_step="leave --layout out: ddp, zero1, zero2 and fsdp are compared",
        )


OPTIMIZER_BYTES = 12  # Adam's states per parameter in mixed precision
_MASTER_BYTES = 4  # Of these, the weights in float32
_HALF_BYTES = 2


def states_bytes(model: TransformerModel, layout: ParallelLayout, optimizer_bytes: int = OPTIMIZER_BYTES) -> int:
    """Return the bytes of weights, gradients and optimizer states on the fullest GPU. `optimizer_bytes` is per
    parameter.
    """
    shared = model.parameters - model.expert_parameters
    # Use the stage with most layers, and an equal share of the parameters outside blocks.
    part = max(layers_by_stage(model.layers, layout)) / model.layers
    own = ceil(shared * part / layout.tensor)
    own += ceil(model.expert_parameters * part / layout.tensor / layout.expert)
    size, ranks, sharding = model.data_type.size_bytes, layout.shard_ranks, layout.sharding
    block = ceil(own / max(1, round(model.layers * part)))
    # In a pipeline, gathered parameters and gradients stay for the following microbatches.
    gives_up = sharding is Sharding.FSDP and layout.pipeline == 1
    # One block is gathered while it computes, and the next is in flight.
    gathered = 2 * block * size if gives_up else own * size if sharding.gathers_parameters else 0
    weights = own * size // (ranks if sharding.gathers_parameters else 1) + gathered
    splits_gradients = sharding.gathers_parameters and layout.pipeline == 1
    gradients = own * size // (ranks if splits_gradients else 1) + (block * size if splits_gradients else 0)
    if optimizer_bytes and size > _HALF_BYTES:
        optimizer_bytes -= _MASTER_BYTES
    return weights + gradients + own * optimizer_bytes // (1 if sharding is Sharding.DDP else ranks)

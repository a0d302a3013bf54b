"""A training model: its shape and operations, its layout over GPUs, and its memory on one GPU.

Counts are for one replica of the whole model, and the layout determines the share of each GPU. FLOPs count
multiplications and additions separately.

Layouts have `tp` tensor, `pp` pipeline, `cp` context, `ep` expert and `dp` data parallelism. `tp` is innermost
(neighboring GPUs), then `cp`, then data parallelism, then the pipeline. Megatron-LM orders its ranks in the same way.

Mixed precision with Adam takes 2 bytes per parameter for weights, 2 for gradients and 12 for the optimizer. The
optimizer stores the weights in float32, momentum and variance (Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, section
3.1). Models in float32 have no second copy of the weights. Activations need additional memory. Selective recomputation
repeats attention in the backward pass, and full recomputation repeats whole blocks (Korthikanti et al. 2022, arXiv
2205.05198, section 5).
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
    """The kind of block in the stack of a model."""

    TRANSFORMER = "transformer"
    MLP = "mlp"


class Recompute(StrEnum):
    """The part of a block's forward pass that the backward pass computes again to save memory."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class ParameterTensor(Struct, frozen=True):
    """A parameter with its name in the model and its number of elements. `expert` is true if only some tokens use
    it.
    """

    name: str
    elements: int
    expert: bool = False


class Operation(Struct, frozen=True):
    """One operation in a block: the FLOPs of its forward pass for one sequence, and its parameters.

    - `needs_attention` is true for attention itself, whose FLOPs grow with the square of the sequence length.
    - `inputs` and `outputs` are the dimensions of the weights in a matrix product, and 0 for other operations.
    """

    name: str
    flops: float
    tensors: tuple[ParameterTensor, ...] = ()
    needs_attention: bool = False
    inputs: int = 0
    outputs: int = 0


class TransformerModel(Struct, frozen=True, kw_only=True):
    """The shape of a model, and the batch of one step.

    - `batch` is the number of sequences in a microbatch on one GPU.
    - `intermediate` is the width of the MLP. `gated` means that the MLP has a third matrix (SwiGLU).
    - `experts` is the number of MLPs in a block, of which a token uses `experts_per_token`.
    - `key_value_heads` is lower than `heads` if queries share keys and values.
    - `head_size` is only set if it differs from `hidden` divided by `heads`.
    - `vocabulary` is 0 for a model without embedding and head.
    - With `fp8`, matrix products compute in 8 bits. All other operations use `data_type`.
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
        """The width of the MLP. The default is four times the hidden size."""
        return self.intermediate or 4 * self.hidden

    @property
    def query_width(self) -> int:
        """The number of elements per token in the queries, and in the output of attention."""
        return self.head_size * self.heads or self.hidden

    @property
    def key_value_width(self) -> int:
        """The number of elements per token in the keys. The values have as many."""
        return self.query_width // self.heads * (self.key_value_heads or self.heads)

    @property
    def tokens(self) -> int:
        """The number of tokens per microbatch."""
        return self.batch * self.sequence

    @property
    def activation_bytes(self) -> int:
        """The size of the activations between two blocks, in bytes per microbatch."""
        return self.tokens * self.hidden * self.data_type.size_bytes

    def operations(self, block: int) -> tuple[Operation, ...]:
        """Return the operations of a block, in the order of the forward pass."""
        return _operations(self, block)

    def _written(self, block: int) -> Iterator[Operation]:
        at = f"{block}."
        if self.kind is not BlockKind.MLP:
            hidden, sequence, width = self.hidden, self.sequence, self.query_width
            yield self._norm(f"{at}norm1")
            yield self._linear(f"{at}attention.in", hidden, width + 2 * self.key_value_width)
            # With a causal mask, a token attends to half of the sequence on average. This halves scores and weighted
            # values.
            yield Operation(f"{at}attention", 2.0 * sequence * sequence * width, needs_attention=True)
            yield self._linear(f"{at}attention.out", width, hidden)
            yield self._norm(f"{at}norm2")
        yield from self._mlp(at)

    def ends(self) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
        """The operations of the embedding and of the vocabulary projection. Both are empty for a model that only
        has blocks.
        """
        if not self.vocabulary:
            return (), ()
        table = ParameterTensor("embedding", self.vocabulary * self.hidden)
        own = () if self.tied_embeddings else (ParameterTensor("head", table.elements),)
        head = Operation("head", 2.0 * self.sequence * table.elements, own)
        return (Operation("embedding", 0.0, (table,)),), (head,)

    def head_flops(self) -> float:
        """Return the FLOPs of the vocabulary projection for one sequence."""
        return sum(each.flops for each in self.ends()[1])

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        ends = sum(tensor.elements for end in self.ends() for each in end for tensor in each.tensors)
        return ends + self.layers * sum(
            tensor.elements for operation in self.operations(0) for tensor in operation.tensors
        )

    @property
    def expert_parameters(self) -> int:
        """The number of parameters in experts, which expert parallelism distributes over ranks."""
        tensors = (tensor for operation in self.operations(0) for tensor in operation.tensors)
        return self.layers * sum(each.elements for each in tensors if each.expert)

    def forward_flops(self) -> float:
        """Return the FLOPs of the forward pass per microbatch."""
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
            # Grouped matrix products store the weights of all experts in one tensor.
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
    """Cached, because every microbatch of every layout uses the same blocks."""
    return tuple(model._written(block))  # noqa: SLF001


_ASPECT = 128  # Hidden size divided by layers, as in GPT-3 175B (arXiv 2005.14165, table 2.1) and Llama 2 7B
_HIDDEN_STEP = 256
_HEAD = 128


def model_with_parameters(parameters: int, *, sequence: int, batch: int) -> TransformerModel:
    """Return a model without embedding and head that has about this many parameters.

    It has 12 · layers · hidden² parameters, and hidden = 128 · layers.
    """
    ideal = (parameters * _ASPECT / 12) ** (1 / 3)
    # Large models are often split over eight GPUs by attention heads
    step = 8 * _HEAD if ideal > 4 * 8 * _HEAD else _HIDDEN_STEP
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
    """What data-parallel ranks shard: nothing, optimizer states, these and gradients, or parameters as well."""

    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    FSDP = "fsdp"

    @property
    def gathers_parameters(self) -> bool:
        """True if parameters are gathered block by block before the forward pass.

        FSDP then frees them, and gathers them again for the backward pass.
        """
        return self in (Sharding.ZERO2, Sharding.FSDP)


GRAMMAR = (
    "words separated by spaces: ddp, zero1, zero2, fsdp (or zero3), or hsdpN (shards of N GPUs); tpN, and sp for "
    "sequence parallelism; ppN, and vN for N stages per GPU; cpN (ring attention); epN; e.g. 'tp2 sp pp4 ddp'"
)

_ALIKE = {"zero3": "fsdp", "ring": "cp"}
_WORD = re.compile(r"(?P<name>tp|pp|v|cp|ring|ep|dp|hsdp)(?P<count>\d{1,5})", re.ASCII)


class ParallelLayout(Struct, frozen=True, kw_only=True):
    """The number of ranks for each kind of parallelism.

    - `stages_per_gpu` above 1 means an interleaved pipeline.
    - `expert` does not multiply the number of GPUs, because expert parallelism uses data-parallel ranks.
    - `shards` is the number of ranks in each group that shards the parameters (HSDP), or 0 if all ranks shard them.
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
        """The number of ranks that have the same parameters and reduce their gradients together."""
        return self.data * self.context

    @property
    def shard_ranks(self) -> int:
        """The number of ranks over which parameters, gradients and optimizer states are sharded, if the layout
        shards them.
        """
        return self.shards or self.gradient_ranks

    @property
    def replicas(self) -> int:
        """The number of sharding groups. Gradients are reduced between the groups."""
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
    """Parse a layout such as 'tp2 pp4 ddp'. All remaining ranks are data-parallel. Raises UsageError."""
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
            raise UsageError(f"--layout {text!r}: {word!r} is not part of a layout, or is repeated", expected=GRAMMAR)
    shardings += [Sharding.FSDP] if "hsdp" in counts else []
    if len(shardings) > 1:
        raise UsageError(f"--layout {text!r} has two words of one kind", expected=GRAMMAR)
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
            f"--layout {text!r} needs a multiple of {layout.gpus} GPUs, but there are {gpus}",
            expected="tp × pp × cp that divides the GPUs",
            next_step=f"--gpus {max(1, gpus // layout.gpus) * layout.gpus}",
        )
    left = gpus // layout.gpus
    if counts.get("dp", left) != left:
        raise UsageError(
            f"--layout {text!r}: dp{counts['dp']}, but {gpus} GPUs leave dp{left}", expected="all GPUs, each once"
        )
    return replace(layout, data=left)


def misfit(model: TransformerModel, layout: ParallelLayout) -> str:
    """Return why a model does not fit a layout, or an empty text if it does."""
    heads, key_values = model.heads, model.key_value_heads or model.heads
    reasons = (
        (model.heads % layout.tensor != 0, f"{heads} heads are not divisible by tp{layout.tensor}"),
        (key_values % layout.tensor != 0, f"{key_values} key-value heads are not divisible by tp{layout.tensor}"),
        (model.width % layout.tensor != 0, f"the MLP width {model.width} is not divisible by tp{layout.tensor}"),
        (layout.sequence_parallel and layout.tensor == 1, "sp needs tp2 or more"),
        (
            layout.sequence_parallel and model.sequence % (layout.tensor * layout.context) != 0,
            f"the sequence length {model.sequence} is not divisible by tp{layout.tensor}",
        ),
        (
            model.layers < layout.pipeline * layout.stages_per_gpu,
            f"{model.layers} layers are fewer than {layout.pipeline * layout.stages_per_gpu} stages",
        ),
        (layout.stages_per_gpu > 1 and layout.pipeline == 1, "v needs pp2 or more"),
        (
            model.sequence % layout.context != 0,
            f"the sequence length {model.sequence} is not divisible by {layout.context}",
        ),
        (
            layout.context > 1 and model.kind is BlockKind.MLP,
            "a stack of MLPs has no attention to split a sequence over",
        ),
        (layout.expert > 1 and not model.experts, "the model has no experts"),
        (
            layout.expert > 1 and (model.experts % layout.expert != 0 or layout.data % layout.expert != 0),
            f"{model.experts} experts and dp{layout.data} cannot both be divided by ep{layout.expert}",
        ),
        (
            layout.shards > 0 and layout.gradient_ranks % layout.shards != 0,
            f"{layout.gradient_ranks} data-parallel ranks are not divisible by hsdp{layout.shards}",
        ),
    )
    return next((words for wrong, words in reasons if wrong), "")


def layers_by_stage(layers: int, layout: ParallelLayout) -> tuple[int, ...]:
    """Return the number of layers on each GPU of a pipeline.

    If layers are not divisible by stages, some stages have one layer fewer. These are the last stage, the first stage,
    and then the stages before the last. The last and first stage also have the head and the embedding (Dubey et al.
    2024, arXiv 2407.21783, section 3.3.2).
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
            expected="heads divisible by tp, a sequence divisible by cp, experts divisible by ep, and at least one "
            "layer per stage",
            next_step="leave --layout out, to compare ddp, zero1, zero2 and fsdp",
        )


OPTIMIZER_BYTES = 12  # Adam's optimizer states per parameter in mixed precision
_MASTER_BYTES = 4  # The float32 copy of the weights, which is part of OPTIMIZER_BYTES
_HALF_BYTES = 2


def states_bytes(model: TransformerModel, layout: ParallelLayout, optimizer_bytes: int = OPTIMIZER_BYTES) -> int:
    """Return the memory for weights, gradients and optimizer states on the GPU that needs the most, in bytes.

    `optimizer_bytes` is the size of the optimizer states per parameter.
    """
    shared = model.parameters - model.expert_parameters
    # Use the stage with the most layers, and count the parameters outside of blocks in proportion to its layers.
    part = max(layers_by_stage(model.layers, layout)) / model.layers
    own = ceil(shared * part / layout.tensor)
    own += ceil(model.expert_parameters * part / layout.tensor / layout.expert)
    size, ranks, sharding = model.data_type.size_bytes, layout.shard_ranks, layout.sharding
    block = ceil(own / max(1, round(model.layers * part)))
    # In a pipeline, gathered parameters and gradients stay in memory for the following microbatches.
    gives_up = sharding is Sharding.FSDP and layout.pipeline == 1
    # Two blocks are gathered: one that computes, and the next one, which is in flight.
    gathered = 2 * block * size if gives_up else own * size if sharding.gathers_parameters else 0
    weights = own * size // (ranks if sharding.gathers_parameters else 1) + gathered
    splits_gradients = sharding.gathers_parameters and layout.pipeline == 1
    gradients = own * size // (ranks if splits_gradients else 1) + (block * size if splits_gradients else 0)
    if optimizer_bytes and size > _HALF_BYTES:
        optimizer_bytes -= _MASTER_BYTES
    return weights + gradients + own * optimizer_bytes // (1 if sharding is Sharding.DDP else ranks)

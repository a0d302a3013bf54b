"""A model that is trained: its shape, its parameters in the order in which PyTorch registers them, its operations.

Counts are for one replica of the whole model; `layout` says what of it a GPU has. FLOPs are of multiplications and
additions, two each.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from gpubench.model.terms.operation import DataType


class BlockKind(StrEnum):
    """The kind of block that a model is a stack of."""

    TRANSFORMER = "transformer"
    MLP = "mlp"


@dataclass(frozen=True, slots=True)
class ParameterTensor:
    """One parameter: its name within the model, and its elements. `expert` is whether only some tokens reach it."""

    name: str
    elements: int
    expert: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a block: the FLOPs of its forward pass for one sequence, and the parameters that it owns.

    `needs_attention` marks the attention itself, whose FLOPs grow with the square of the sequence. A product has
    `inputs` by `outputs` weights, others have 0.
    """

    name: str
    flops: float
    tensors: tuple[ParameterTensor, ...] = ()
    needs_attention: bool = False
    inputs: int = 0
    outputs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerModel:
    """The shape of a model, and the batch of one step.

    `batch` is the sequences of a microbatch on one GPU; `intermediate` the width inside the MLP; `gated` whether the
    MLP has a third matrix (SwiGLU); `experts` MLPs a block, `experts_per_token` of which a token goes through;
    `key_value_heads` fewer than `heads` where queries share them. A `vocabulary` of 0 is blocks alone.
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

    @property
    def width(self) -> int:
        """The width inside the MLP: four times the hidden size where nothing is said."""
        return self.intermediate or 4 * self.hidden

    @property
    def key_value_width(self) -> int:
        """Elements a token of the keys, and of the values."""
        return self.hidden // self.heads * (self.key_value_heads or self.heads)

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.batch * self.sequence

    @property
    def activation_bytes(self) -> int:
        """Bytes of the activations between two blocks, of one microbatch."""
        return self.tokens * self.hidden * self.data_type.size_bytes

    def operations(self, block: int) -> tuple[Operation, ...]:
        """The operations of a block, in the order of the forward pass."""
        return _operations(self, block)

    def _written(self, block: int) -> Iterator[Operation]:
        at = f"{block}."
        if self.kind is not BlockKind.MLP:
            hidden, sequence = self.hidden, self.sequence
            yield self._norm(f"{at}norm1")
            yield self._linear(f"{at}attention.in", hidden, hidden + 2 * self.key_value_width)
            # Causal: a token looks at half of the sequence on average; scores, and the values weighted by them.
            yield Operation(f"{at}attention", 2.0 * sequence * sequence * hidden, needs_attention=True)
            yield self._linear(f"{at}attention.out", hidden, hidden)
            yield self._norm(f"{at}norm2")
        yield from self._mlp(at)

    def ends(self) -> tuple[Operation | None, Operation | None]:
        """The embedding and the projection to the vocabulary; None of a model that is blocks alone."""
        if not self.vocabulary:
            return None, None
        table = ParameterTensor("embedding", self.vocabulary * self.hidden)
        own = () if self.tied_embeddings else (ParameterTensor("head", table.elements),)
        head = Operation("head", 2.0 * self.sequence * table.elements, own)
        return Operation("embedding", 0.0, (table,)), head

    def tensors(self) -> tuple[ParameterTensor, ...]:
        """Every parameter, in the order of the forward pass."""
        first, last = self.ends()
        blocks = (each for block in range(self.layers) for each in self.operations(block))
        whole = (*((first,) if first else ()), *blocks, *((last,) if last else ()))
        return tuple(tensor for each in whole for tensor in each.tensors)

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(each.elements for each in self.tensors())

    @property
    def expert_parameters(self) -> int:
        """Elements of the experts, which expert parallelism splits."""
        return sum(each.elements for each in self.tensors() if each.expert)

    def forward_flops(self) -> float:
        """FLOPs of the forward pass of one microbatch."""
        blocks = self.layers * sum(each.flops for each in self.operations(0))
        head = self.ends()[1]
        return self.batch * (blocks + (head.flops if head else 0.0))

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
            tensors = tuple(
                ParameterTensor(f"{at}expert{expert}.{name}", inputs * outputs, expert=True)
                for expert in range(self.experts)
            )
            flops = active * inputs * outputs
            yield Operation(f"{at}experts.{name}", flops, tensors, inputs=inputs, outputs=outputs)

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
    """Kept, as every microbatch of every layout that is compared asks for the same blocks."""
    return tuple(model._written(block))  # noqa: SLF001


_ASPECT = 128
"""Hidden size over layers: GPT-3 175B has 128 (Brown et al. 2020, arXiv 2005.14165, table 2.1), Llama 2 7B too."""

_HIDDEN_STEP = 256
_HEAD = 128


def model_of_parameters(parameters: int, *, sequence: int, batch: int) -> TransformerModel:
    """A model with about so many parameters: blocks alone, 12 · layers · hidden² of them, hidden = 128 · layers.

    It has as many layers as come nearest, so that `parameters` of what is returned differs by a few percent.
    """
    ideal = (parameters * _ASPECT / 12) ** (1 / 3)
    hidden = max(_HIDDEN_STEP, round(ideal / _HIDDEN_STEP) * _HIDDEN_STEP)
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

"""The memory that a layout needs on one GPU.

Mixed precision with Adam takes 2 bytes a parameter for weights, 2 for gradients and 12 for the optimizer: weights in
float32, momentum and variance (Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, section 3.1). Activations of a block
without recomputation are s·b·h·(34 + 5·a·s/h) bytes of 16-bit types; without the term in a·s/h where attention keeps no
scores, as FlashAttention does not (Korthikanti et al. 2022, arXiv 2205.05198, equations 1, 2 and 4). Of the 34 bytes 16
are of an MLP as wide as 4·h, whose product and activation are kept, and 2 of masks of dropout, a byte each. A gated
MLP keeps four such tensors, experts those of every expert that a token goes through. In float32 there is no second
copy of the weights, and all but masks is twice as large.
"""

from dataclasses import dataclass
from math import ceil

from gpubench.model.workload.layout import ParallelLayout, Sharding
from gpubench.model.workload.transformer import BlockKind, TransformerModel

OPTIMIZER_BYTES = 12
"""Adam's states a parameter, in mixed precision."""

_MASTER_BYTES = 4
"""Of these the weights in float32."""

_HALF_BYTES = 2
"""Of an element, in the papers."""

_BESIDE_MLP, _INTO_MLP = 18, 3
"""Bytes an element of a block outside the MLP's width, and of a block that is an MLP alone."""

_ATTENTION_SPLIT = 8
"""Of these those that tensor parallelism splits, as it does the MLP's width; others only sequence parallelism does."""

_ATTENTION_MASKS, _MLP_MASKS = 2, 1
"""Of these bytes those of masks, which no type makes larger."""

OTHER_BYTES = 3 * 2**30
"""CUDA context, NCCL's buffers, the allocator's slack and workspaces: a round figure, none that was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes on the fullest GPU, by what they are for."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    other: int = OTHER_BYTES

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.other


def memory_need(
    model: TransformerModel, layout: ParallelLayout, microbatches: int, optimizer_bytes: int = OPTIMIZER_BYTES
) -> MemoryNeed:
    """What a layout needs; `optimizer_bytes` a parameter, 0 for forward and backward alone."""
    shared = model.parameters - model.expert_parameters
    own = ceil(shared / layout.tensor / layout.pipeline)
    own += ceil(model.expert_parameters / layout.tensor / layout.pipeline / layout.expert)
    size, ranks = model.data_type.size_bytes, layout.gradient_ranks
    sharding = layout.sharding
    block = ceil(own / max(1, model.layers // layout.pipeline))
    # One block is gathered while it computes, and the next is under way.
    gathered = 2 * block * size if sharding.gathers_parameters else 0
    weights = own * size // (ranks if sharding.gathers_parameters else 1) + gathered
    splits_gradients = sharding is Sharding.ZERO2 or sharding.gathers_parameters
    gradients = own * size // (ranks if splits_gradients else 1) + (block * size if splits_gradients else 0)
    if optimizer_bytes and size > _HALF_BYTES:
        optimizer_bytes -= _MASTER_BYTES
    optimizer = own * optimizer_bytes // (1 if sharding is Sharding.DDP else ranks)
    return MemoryNeed(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=_activations(model, layout, microbatches),
    )


def _activations(model: TransformerModel, layout: ParallelLayout, microbatches: int) -> int:
    elements = model.tokens * model.hidden / layout.context
    is_block = model.kind is BlockKind.TRANSFORMER
    kept = (4 if model.gated else 2) * (model.experts_per_token or 1)
    width = _HALF_BYTES * kept * model.width / model.hidden
    factor = width + (_BESIDE_MLP if is_block else _INTO_MLP)
    split = width + _ATTENTION_SPLIT if is_block else factor - _HALF_BYTES
    share = factor / layout.tensor if layout.sequence_parallel else factor - split + split / layout.tensor
    masks = (_ATTENTION_MASKS if is_block else _MLP_MASKS) * share / factor
    share = masks + (share - masks) * model.data_type.size_bytes / _HALF_BYTES
    blocks = model.layers / layout.pipeline
    # The first stage of 1F1B has as many microbatches under way as there are stages (Narayanan et al. 2021).
    under_way = min(microbatches, layout.pipeline)
    interleaved = 1 + (layout.pipeline - 1) / (layout.pipeline * layout.stages_per_gpu)
    under_way = ceil(under_way * (interleaved if layout.stages_per_gpu > 1 else 1))
    head = 4 * model.tokens * model.vocabulary / layout.tensor / layout.context if model.vocabulary else 0.0
    return ceil(elements * share * blocks * under_way + head)

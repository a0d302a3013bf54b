"""How a model is laid over GPUs: which kinds of parallelism, how many ranks of each, how gradients are reduced.

Words: `tp` tensor, `pp` pipeline, `cp` context, `ep` expert and `dp` data parallelism. `tp` is innermost (neighbouring
GPUs), then `cp`, then data parallelism, then the pipeline, as Megatron-LM orders its ranks.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from gpubench.errors import UsageError
from gpubench.model.workload.transformer import BlockKind, TransformerModel


class Sharding(StrEnum):
    """What data-parallel ranks share out: nothing; optimizer states; gradients too; parameters too."""

    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    FSDP = "fsdp"

    @property
    def gathers_parameters(self) -> bool:
        """True where parameters are gathered block by block."""
        return self in (Sharding.ZERO3, Sharding.FSDP)


class ContextKind(StrEnum):
    """How a sequence is split: keys and values go round, or all-to-alls exchange sequence for heads."""

    RING = "ring"
    ULYSSES = "ulysses"


GRAMMAR = (
    "words with a blank between them: ddp, zero1, zero2, zero3 or fsdp; tpN, and sp for sequence parallelism; ppN, and "
    "vN for N stages a GPU; ringN or ulyssesN; epN; e.g. 'tp2 sp pp4 ddp'"
)

LONG_SEQUENCE = 16384
"""Tokens from which on splitting sequences is compared where nobody asks for it."""

_WORD = re.compile(r"(?P<name>tp|pp|v|ring|ulysses|ep|dp)(?P<count>\d{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """So many ranks of each kind; `stages_per_gpu` above 1 is the interleaved pipeline.

    Expert parallelism takes ranks of data parallelism, so it does not multiply.
    """

    data: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    pipeline: int = 1
    stages_per_gpu: int = 1
    context: int = 1
    context_kind: ContextKind = ContextKind.RING
    expert: int = 1
    sharding: Sharding = Sharding.DDP

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def gradient_ranks(self) -> int:
        """Ranks that have the same parameters, and bring their gradients together."""
        return self.data * self.context

    def __str__(self) -> str:
        words = [f"tp{self.tensor}"] if self.tensor > 1 else []
        words += ["sp"] if self.sequence_parallel else []
        words += [f"pp{self.pipeline}"] if self.pipeline > 1 else []
        words += [f"v{self.stages_per_gpu}"] if self.stages_per_gpu > 1 else []
        words += [f"{self.context_kind}{self.context}"] if self.context > 1 else []
        words += [f"ep{self.expert}"] if self.expert > 1 else []
        words += [f"dp{self.data}"] if words and self.data > 1 else []
        words += [str(self.sharding)] if self.gradient_ranks > 1 else []
        return " ".join(words) or "one GPU"


def parse_layout(text: str, gpus: int) -> ParallelLayout:
    """A layout as people write it; what is not said is data parallelism over the GPUs that are left.

    Raises UsageError for an unknown word, a kind twice, or ranks that do not divide the GPUs.
    """
    counts, shardings, sequence_parallel = dict[str, int](), list[Sharding](), False
    for word in text.lower().replace(",", " ").split():
        match = _WORD.fullmatch(word)
        if word == "sp":
            sequence_parallel = True
        elif word in tuple(Sharding):
            shardings.append(Sharding(word))
        elif match is not None and match["name"] not in counts and int(match["count"]) >= 1:
            counts[match["name"]] = int(match["count"])
        else:
            raise UsageError(f"--layout {text!r}: {word!r} is no word of a layout, or stands twice", expected=GRAMMAR)
    if len(shardings) > 1 or {"ring", "ulysses"} <= counts.keys():
        raise UsageError(f"--layout {text!r} says two things of one kind", expected=GRAMMAR)
    ring = ContextKind.ULYSSES if "ulysses" in counts else ContextKind.RING
    layout = ParallelLayout(
        tensor=counts.get("tp", 1),
        sequence_parallel=sequence_parallel,
        pipeline=counts.get("pp", 1),
        stages_per_gpu=counts.get("v", 1),
        context=counts.get(ring, 1),
        context_kind=ring,
        expert=counts.get("ep", 1),
        sharding=shardings[0] if shardings else Sharding.DDP,
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
    """Why a model cannot be laid out so, in words; empty where it can."""
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
            model.layers % (layout.pipeline * layout.stages_per_gpu) != 0,
            f"{model.layers} layers do not divide by {layout.pipeline * layout.stages_per_gpu} stages",
        ),
        (layout.stages_per_gpu > 1 and layout.pipeline == 1, "v goes with pp2 or more"),
        (model.sequence % layout.context != 0, f"a sequence of {model.sequence} does not divide by {layout.context}"),
        (
            layout.context > 1 and model.kind is BlockKind.MLP,
            "a stack of MLPs has no attention to split a sequence over",
        ),
        (
            layout.context_kind is ContextKind.ULYSSES and key_values % (layout.tensor * layout.context) != 0,
            f"{key_values} key-value heads do not divide by ulysses{layout.context}"
            + (f" × tp{layout.tensor}" if layout.tensor > 1 else ""),
        ),
        (layout.expert > 1 and not model.experts, "the model has no experts"),
        (
            layout.expert > 1 and (model.experts % layout.expert != 0 or layout.data % layout.expert != 0),
            f"{model.experts} experts and dp{layout.data} do not both divide by ep{layout.expert}",
        ),
        (
            layout.pipeline > 1 and layout.sharding not in (Sharding.DDP, Sharding.ZERO1),
            f"{layout.sharding} under a pipeline gathers every microbatch again, and is not modelled",
        ),
    )
    return next((words for wrong, words in reasons if wrong), "")


def check_layout(model: TransformerModel, layout: ParallelLayout) -> None:
    """Raise UsageError where the model cannot be laid out so."""
    words = misfit(model, layout)
    if words:
        raise UsageError(
            f"--layout '{layout}' does not fit {model.name}: {words}",
            expected="heads by tp, layers by pp, the sequence by cp, experts by ep",
            next_step="leave --layout out: all that fit are compared",
        )


def layouts_for(model: TransformerModel, gpus: int, gpus_per_node: int) -> tuple[ParallelLayout, ...]:
    """Every layout worth a look: powers of two, tensor parallelism within a node, each way to shard."""
    found: list[ParallelLayout] = []
    for tensor in _powers(min(gpus, gpus_per_node)):
        for pipeline in _powers(gpus // tensor):
            for context in _powers(gpus // tensor // pipeline if model.sequence >= LONG_SEQUENCE else 1):
                found += _shared_out(model, gpus, ParallelLayout(tensor=tensor, pipeline=pipeline, context=context))
    return tuple(dict.fromkeys(each for each in found if not misfit(model, each)))


def _shared_out(model: TransformerModel, gpus: int, layout: ParallelLayout) -> list[ParallelLayout]:
    """The variants of a layout, with data parallelism over the GPUs that are left."""
    if gpus % layout.gpus:
        return []
    layout = replace(layout, data=gpus // layout.gpus)
    variants = [layout]
    if layout.tensor > 1:
        variants.append(replace(layout, sequence_parallel=True))
    if layout.context > 1:
        variants += [replace(each, context_kind=ContextKind.ULYSSES) for each in variants]
    if layout.pipeline > 1:
        variants += [replace(each, stages_per_gpu=2) for each in variants]
    if model.experts:
        variants += [replace(each, expert=count) for each in variants for count in _powers(layout.data) if count > 1]
    if layout.gradient_ranks == 1:
        return variants
    # ZeRO-3 and FSDP are the same transfers by two names.
    ways = (Sharding.DDP, Sharding.ZERO1, Sharding.ZERO2, Sharding.FSDP)
    return [replace(each, sharding=way) for each in variants for way in ways]


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << power for power in range(max(1, most).bit_length())]

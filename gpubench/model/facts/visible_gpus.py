"""The GPUs of a node that its processes were given: those that CUDA_VISIBLE_DEVICES hides are not judged."""

from collections.abc import Sequence
from dataclasses import replace

from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.facts.snapshot import GpuFacts, Snapshot

HIDDEN = "CUDA_VISIBLE_DEVICES hides it"
"""The reason why CUDA tells nothing of a GPU, or of a pair with it, that the driver has all the same."""

HIDDEN_GPUS = "hidden_gpus"
"""The option in the metadata of a report that says how many GPUs were hidden from it, and so not judged."""


def is_hidden(gpu: GpuFacts) -> bool:
    """True of a GPU that CUDA_VISIBLE_DEVICES hides from the process that read the node."""
    return gpu.unknown.get("cuda_index") == HIDDEN


def given(node: Snapshot, processes: Sequence[RankFacts]) -> Snapshot:
    """The node without its hidden GPUs, which count as those of others, as in a container that lacks them.

    `processes` are those on the node. Where each has a setting of its own, as of one GPU a rank, what one of them does
    not see another has: the node stays whole.
    """
    hidden = {gpu.device for gpu in node.gpus if is_hidden(gpu)}
    if not hidden or len({each.visible_devices for each in processes}) > 1:
        return node
    return replace(
        node,
        gpus=tuple(gpu for gpu in node.gpus if gpu.device not in hidden),
        gpus_of_others=node.gpus_of_others + len(hidden),
        pairs=tuple(pair for pair in node.pairs if hidden.isdisjoint((pair.source, pair.destination))),
    )

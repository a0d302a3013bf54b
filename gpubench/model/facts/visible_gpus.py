"""The GPUs of a node that its processes were given: those that CUDA_VISIBLE_DEVICES hides are not judged."""

from collections.abc import Iterator, Sequence
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
    not see another may have: hidden is what none of them names.
    """
    hidden = {gpu.device for gpu in node.gpus if is_hidden(gpu)}
    settings = {each.visible_devices for each in processes}
    if len(settings) > 1:
        hidden -= {device for each in settings for device in _named(node, each)}
    if not hidden:
        return node
    return replace(
        node,
        gpus=tuple(gpu for gpu in node.gpus if gpu.device not in hidden),
        gpus_of_others=node.gpus_of_others + len(hidden),
        pairs=tuple(pair for pair in node.pairs if hidden.isdisjoint((pair.source, pair.destination))),
    )


def are_named(node: Snapshot, processes: Sequence[RankFacts]) -> bool:
    """True if each process has a setting of which every entry names a GPU of the node: so many were asked for."""
    settings = [each.visible_devices for each in processes]
    return bool(settings) and all(
        setting is not None
        and all(any(_is_named(gpu, entry.strip()) for gpu in node.gpus) for entry in setting.split(","))
        for setting in settings
    )


def _named(node: Snapshot, setting: str | None) -> Iterator[str]:
    """The GPUs that a setting names, up to the first entry that CUDA does not know; all of them where that is open."""
    everything = [gpu.device for gpu in node.gpus]
    if setting is None or "MIG-" in setting or ("GPU-" in setting and not all(gpu.uuid for gpu in node.gpus)):
        yield from everything
        return
    for entry in map(str.strip, setting.split(",")):
        known = [gpu.device for gpu in node.gpus if _is_named(gpu, entry)]
        if len(known) != 1:
            return
        yield from known


def _is_named(gpu: GpuFacts, entry: str) -> bool:
    if entry.startswith("GPU-"):
        return (gpu.uuid or "").startswith(entry)
    return entry.isdecimal() and int(entry) == gpu.index

"""Backends of torch.distributed as the registry opens them."""

from typing import TYPE_CHECKING

from gpubench.hardware.torch.library import TorchDistributed, load_torch
from gpubench.hardware.torch.refusals import torch_without
from gpubench.model.facts.backends import TORCH
from gpubench.ports.backend import MultiGroupBackend

if TYPE_CHECKING:
    from gpubench.hardware.cuda.device import CudaDevice
    from gpubench.hardware.watchdog.rank import RankProgress
    from gpubench.ports.group import Group

_DEVICES = {"rccl": "cuda", "xccl": "xpu"}


def load(name: str, driver_cuda: int) -> TorchDistributed:
    """Torch with a backend by gpubench's name; `driver_cuda` of 0 is for CPUs.

    It comes before anything else that loads NCCL: the first libnccl.so.2 of a process is everybody's.
    """
    word = name.removeprefix(TORCH)
    return load_torch(word, for_cuda=driver_cuda > 0, driver_cuda=driver_cuda)


def open_backend(
    name: str,
    group: "Group",
    progress: "RankProgress",
    device: "CudaDevice | None",
    ranks_on_node: int,
    local_rank: int,
) -> MultiGroupBackend:
    """A backend by gpubench's name, on the GPU of this rank where it has one, else on a device of torch's own.

    Raises CouldNotMeasureError: torch lacks something, or cannot connect the ranks.
    """
    from gpubench.hardware.torch import backend

    found = load(name, 0 if device is None else device.driver_cuda)
    groups = backend.TorchGroups(found, name, group, one_node=ranks_on_node == group.size)
    if device is not None and found.word == "gloo":
        return backend.TorchGlooOnCuda(groups, found, device, group, progress)
    if device is not None:
        opened = backend.TorchNccl(groups, found, device, group, progress)
        progress.answer_watchdog(opened.trouble, opened.abort)
        return opened
    if found.word == "gloo":
        return backend.TorchOnCpu(groups, group, ranks_on_node, progress)
    kind = _DEVICES[name.removeprefix(TORCH)]
    of_kind = getattr(found.torch, kind)
    if not of_kind.is_available():
        raise torch_without(found.version, f"a GPU for {name} in this machine")
    index = local_rank % of_kind.device_count()
    of_kind.set_device(index)
    return backend.TorchOnDevice(groups, found, found.torch.device(kind, index), group, progress)

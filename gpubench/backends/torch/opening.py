"""Load torch for one of gpubench's backends, and open the backend on a rank."""

from typing import TYPE_CHECKING

from gpubench.backends.torch import distributed
from gpubench.backends.torch.backend import TorchGlooOnCuda, TorchGroups, TorchNccl, TorchOnCpu, TorchOnDevice
from gpubench.backends.torch.distributed import TorchDistributed, load_torch, torch_without
from gpubench.backends.torch.symmetric import TorchSymmetric, check_operations
from gpubench.model.terms.operation import TORCH, TORCH_SYMM
from gpubench.ports.backend import MultiGroupBackend

if TYPE_CHECKING:
    from gpubench.backends.cuda import CudaDevice
    from gpubench.ports.group import Group
    from gpubench.ranks.watchdog.rank import RankProgress

_DEVICES = {"rccl": "cuda", "xccl": "xpu"}


def load(name: str, driver_cuda: int) -> TorchDistributed:
    """Load torch for a backend by gpubench's name. Load it first, because a process has one libnccl. `driver_cuda` 0:
    CPUs.
    """
    backend = name.removeprefix(TORCH)
    found = load_torch(backend, for_cuda=driver_cuda > 0, driver_cuda=driver_cuda)
    if name == TORCH_SYMM:
        distributed.import_symmetric_memory(found)
        check_operations(found)
    return found


def open_backend(
    name: str,
    group: "Group",
    progress: "RankProgress",
    device: "CudaDevice | None",
    ranks_on_node: int,
    local_rank: int,
) -> MultiGroupBackend:
    """Open a backend by gpubench's name, on this rank's GPU or else on torch's device. Raise CouldNotMeasureError."""
    found = load(name, 0 if device is None else device.driver_cuda)
    groups = TorchGroups(found, name, group, one_node=ranks_on_node == group.size)
    if device is not None and name == TORCH_SYMM:
        return TorchSymmetric(groups, found, device, group, progress)
    if device is not None and found.backend == "gloo":
        return TorchGlooOnCuda(groups, found, device, group, progress)
    if device is not None:
        opened = TorchNccl(groups, found, device, group, progress)
        progress.answer_watchdog(opened.trouble, opened.abort)
        return opened
    if found.backend == "gloo":
        return TorchOnCpu(groups, group, ranks_on_node, progress)
    kind = _DEVICES[name.removeprefix(TORCH)]
    of_kind = getattr(found.torch, kind)
    if not of_kind.is_available():
        raise torch_without(found.version, f"a GPU for {name} in this machine")
    index = local_rank % of_kind.device_count()
    of_kind.set_device(index)
    return TorchOnDevice(groups, found, found.torch.device(kind, index), group, progress)

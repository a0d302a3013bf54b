"""Facts that were asked for and refused: what each refusal means, and its cure where there is one."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RefusedFact:
    """One kind of them: the words by which NVML, CUDA or the kernel tell it, what is likely, and the next command.

    `scope` is what alone it is of: gpu, pair or nic; None for all. Ids stand in the command as in a condition's cure.
    """

    words: tuple[str, ...]
    likely: str
    next_command: str
    scope: str | None = None


_NO_RIGHT = (
    *("Insufficient Permissions", "operating system has blocked", "ermission denied", "not permitted", "needs root"),
)
_KERNEL_LOG = "dmesg | grep -i -E 'nvrm|xid'"

REFUSED_FACTS: tuple[RefusedFact, ...] = (
    RefusedFact(
        _NO_RIGHT,
        "a container, or a /sys, that this user may not read all of",
        "ls -l /sys/class/infiniband/*/ports/1; sudo gpubench check --quick shows whether root may",
        scope="nic",
    ),
    RefusedFact(
        _NO_RIGHT,
        "this user, or this container, may not ask for it",
        "sudo nvidia-smi -q -i GPU shows whether root may; in a container NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ),
    RefusedFact(
        ("that CUDA_VISIBLE_DEVICES names",),
        "an id in it that no GPU here has, one that stands in it twice, or a GPU that CUDA cannot start",
        "echo $CUDA_VISIBLE_DEVICES; nvidia-smi -L; then unset CUDA_VISIBLE_DEVICES and gpubench check",
    ),
    RefusedFact(
        ("CUDA does not list it",),
        "no device file for it, a GPU that is split into MIG instances, or one too old for this CUDA",
        "ls -l /dev/nvidia[0-9]*; nvidia-smi -L",
    ),
    RefusedFact(
        ("CUDA was not asked",),
        "facts that were read without CUDA",
        "gpubench check reads this machine with it",
    ),
    RefusedFact(
        ("requires restart",),
        "an error after which the GPU waits for a reset",
        f"nvidia-smi --gpu-reset -i GPU, once nobody uses it; {_KERNEL_LOG}",
    ),
    RefusedFact(
        ("version mismatch",),
        "a driver that was installed while the module of the one before still runs",
        "cat /proc/driver/nvidia/version; modinfo -F version nvidia; a reboot loads the new one",
    ),
    RefusedFact(
        ("infoROM",),
        "the GPU's own memory of its settings and errors is damaged",
        "nvidia-smi -q -i GPU; its vendor exchanges the GPU",
    ),
    RefusedFact(
        ("",),
        "the NIC's driver or firmware in trouble, or a /sys that is not all there",
        "rdma link; ls -l /sys/class/infiniband/*/ports/1; dmesg | grep -i -E 'mlx|infiniband|rdma'",
        scope="nic",
    ),
    RefusedFact(
        ("",),
        "a driver in trouble, or a GPU that is about to fail",
        f"nvidia-smi -q -i GPU; {_KERNEL_LOG}",
    ),
)
"""The first that fits counts; the last two fit everything else."""


def refused_fact(scope: str, reason: str) -> RefusedFact:
    """What a reason means that was given for a fact of a gpu, pair or nic."""
    return next(
        each
        for each in REFUSED_FACTS
        if each.scope in (None, scope) and any(words.lower() in reason.lower() for words in each.words)
    )

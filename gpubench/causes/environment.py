"""Variables, of the environment or a configuration file, that forbid a direct path."""

from collections.abc import Iterator

from gpubench.causes.cause import OFF, SOCKET, Cause, Reason, Staged
from gpubench.causes.path_types import DEFAULT_LEVEL, is_within, level
from gpubench.model.nccl_log import RemarkKind


def _find(staged: Staged) -> Reason | None:
    blamed: dict[str, dict[str, None]] = {}
    for name, value in _inside(staged) if staged.inside else _across(staged):
        blamed.setdefault(name, {})[value] = None
    if not blamed:
        return None
    shown = [f"{name}={next(iter(values)) if len(values) == 1 else '(differs)'}" for name, values in blamed.items()]
    advice = f"unset {' '.join(blamed)}; it may also stand in /etc/nccl.conf or ~/.nccl.conf"
    return f"{', '.join(shown)} set by the environment", advice


def _inside(staged: Staged) -> Iterator[tuple[str, str]]:
    """What keeps ranks of one machine from peer access, or from the shared memory that comes next."""
    if staged.path is None or is_within(staged.path):
        yield from _other_than(staged, "NCCL_P2P_DISABLE", OFF)
        for value in staged.settings("NCCL_P2P_LEVEL"):
            if _is_below_default(level(value), staged.path):
                yield "NCCL_P2P_LEVEL", value
    if staged.network is not None:
        yield from _other_than(staged, "NCCL_SHM_DISABLE", OFF)
        if not staged.one_node:
            yield from _other_than(staged, "NCCL_HOSTID", ("",))


def _is_below_default(limit: str | None, path: str | None) -> bool:
    """Whether a limit keeps NCCL off a path, where one is known, that it takes by default."""
    if limit is None or limit == DEFAULT_LEVEL or not is_within(limit):
        return False
    return path is None or not is_within(path, limit)


def _across(staged: Staged) -> Iterator[tuple[str, str]]:
    """What keeps ranks of different machines from RDMA, or RDMA from the GPUs' memory."""
    if staged.network == SOCKET:
        yield from _other_than(staged, "NCCL_IB_DISABLE", OFF)
        for value in staged.settings("NCCL_NET"):
            if value.lower() == "socket":
                yield "NCCL_NET", value
        if staged.found(RemarkKind.NO_RDMA_DEVICE):
            yield from _other_than(staged, "NCCL_IB_HCA", ("",))
        return
    for value in staged.settings("NCCL_NET_GDR_LEVEL"):
        if level(value) == "LOC":
            yield "NCCL_NET_GDR_LEVEL", value
    for name in ("NCCL_NET_GDR_READ", "NCCL_DMABUF_ENABLE"):
        if "0" in staged.settings(name):
            yield name, "0"


def _other_than(staged: Staged, name: str, values: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    return ((name, value) for value in staged.settings(name) if value not in values)


ENVIRONMENT = Cause("environment", "a variable forbids a direct path", _find)

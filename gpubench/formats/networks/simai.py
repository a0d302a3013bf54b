"""SimAI-Analytical's busbw.yaml (aliyun/SimAI, example/busbw.yaml): bus bandwidths by kind of parallelism, GB/s.

Its reader passes over the first line, and takes what stands before the comma of a key.
"""

from collections.abc import Iterator

from gpubench.formats.networks.fabric import DATA, EXPERT, PIPELINE, TENSOR, ExportedFabric, busbw

_KINDS = {"TP": TENSOR, "DP": DATA, "EP": EXPERT}
_COLLECTIVES = ("allreduce", "allgather", "reducescatter", "alltoall")


def text(fabric: ExportedFabric) -> str:
    """The lines of the file."""
    return "\n".join(_lines(fabric)) + "\n"


def _lines(fabric: ExportedFabric) -> Iterator[str]:
    yield "gpubench"
    for kind, role in _KINDS.items():
        yield f"{kind}:"
        for name in _COLLECTIVES:
            rows = fabric.curves.get(role, {}).get(name)
            yield f"{name},: {busbw(rows):.2f}" if rows else f"{name},: null"
    yield "PP:"
    rows = fabric.curves.get(PIPELINE, {}).get("sendrecv")
    yield f"busbw: {busbw(rows):.2f}" if rows else "busbw: null"

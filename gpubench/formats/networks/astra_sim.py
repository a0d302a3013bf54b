"""ASTRA-sim's analytical network (astra-sim/astra-sim, examples/network/analytical/*.yml): a dimension a level.

Bandwidth is what a GPU sends, GB/s: the all-reduce's bus bandwidth. Latency is that of one step, in ns: the smallest
all-reduce over the 2(n - 1) steps of a ring.
"""

from gpubench.formats.networks.fabric import DATA, TENSOR, ExportedFabric, busbw, latency_seconds, sources
from gpubench.model.terms.foreign_text import printable_line

_NANOSECONDS = 1e9


def text(fabric: ExportedFabric) -> str:
    """A YAML document of one or two dimensions."""
    roles = [TENSOR] if fabric.nodes == 1 else [TENSOR, DATA]
    counts = [fabric.gpus_per_node] if fabric.nodes == 1 else [fabric.gpus_per_node, fabric.nodes]
    reduces = [fabric.curves[role]["allreduce"] for role in roles]
    bandwidths = [busbw(rows) for rows in reduces]
    latencies = [latency_seconds(rows) / (2 * (rows[0].ranks - 1)) * _NANOSECONDS for rows in reduces]
    comments = [f"# {printable_line(each)}" for each in sources(fabric)]
    return "\n".join(
        [
            *comments,
            f"topology: [ {', '.join('Switch' for _ in roles)} ]",
            f"npus_count: [ {', '.join(map(str, counts))} ]",
            f"bandwidth: [ {', '.join(f'{each:.2f}' for each in bandwidths)} ]  # GB/s",
            f"latency: [ {', '.join(f'{each:.2f}' for each in latencies)} ]  # ns",
            "",
        ]
    )

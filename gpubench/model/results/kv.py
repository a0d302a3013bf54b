"""The rows of `gpubench kv`: transfers of GPU memory between two processes."""

from typing import Annotated

from gpubench.model.paths.ucx import Allocation
from gpubench.model.results.report import OnPage, Record, Verified
from gpubench.model.terms.operation import Direction, TransferBackend
from gpubench.model.terms.verdict import Origin, Verdict


class KvRow(Record, frozen=True, kw_only=True):
    """One kind of transfer from one process to another, by UCX or NIXL."""

    section = "kv"
    on_page = OnPage(title="Transfers")
    host_fields = ("node",)

    node: str  #: host name of both processes
    source: str  #: GPU that the data come from
    destination: str  #: GPU that the data go to, or host (memory of the other process)
    source_bus_id: str | None  #: PCI address of the source
    destination_bus_id: str | None  #: PCI address of the destination (null for host memory)
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    backend: Annotated[str, TransferBackend]  #: library that moved the data: ucx or nixl
    direction: Annotated[str, Direction]  #: write by the source process, or read by the destination process
    memory: Annotated[str, Allocation]  #: how both processes allocated their GPU memory
    size_bytes: int  #: size of a transfer, over all blocks
    blocks: int  #: number of blocks of equal size per transfer
    bandwidth_gb_s: float | None  #: size divided by p50_us, in GB/s (1e9 bytes)
    p50_us: float | None  #: median time of a transfer until the data have arrived, in µs
    p99_us: float | None  #: 99th percentile of the same times; null with fewer than 20 transfers
    block_us: float | None  #: p50_us divided by the number of blocks
    expected_gb_s: float | None  #: bandwidth of a plain copy between the two GPUs in this run
    expected_percent: float | None  #: bandwidth_gb_s as a percentage of expected_gb_s
    transport: str | None  #: UCX's transports and devices for this size: cuda_ipc/cuda, tcp/lo
    protocol: str | None  #: protocol as UCX describes it: zero-copy, software emulation
    host_staged: bool | None  #: whether data between GPUs went through host memory (null if unknown or to host memory)
    nvlink_bytes: int | None  #: bytes that the source GPU sent over NVLink during the transfers
    pcie_bytes: int | None  #: bytes that the source GPU sent over PCIe during the transfers
    verified: Annotated[str | None, Verified]  #: last: the data of the last transfer were verified; no: they were not
    verdict: Annotated[str | None, Verdict]  #: verdict on the transfer (null if not judged)
    note: str | None  #: why the transfer failed or is not judged

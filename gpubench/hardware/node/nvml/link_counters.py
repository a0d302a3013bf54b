"""NVML's byte counters of the NVLinks and the PCIe link of each GPU: the proof of which way a copy went."""

from collections.abc import Sequence

from gpubench.hardware.node.nvml.answers import Answers
from gpubench.hardware.node.nvml.library import open_library
from gpubench.ports.link_counters import LinkBytes

_SENT = 138
_RECEIVED = 139
"""NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX: payload in KiB, without what the protocol adds."""

_PCIE_SENT = 197
_PCIE_RECEIVED = 198
"""NVML_FI_DEV_PCIE_COUNT_TX_BYTES and _RX_BYTES: 32 bits, headers included."""

_ALL_LINKS = 0xFFFFFFFF
_NO_SCOPE = 0
_KIB = 1024


def read_link_bytes(answers: Answers, *, nvlink_only: bool = False, pcie_only: bool = False) -> LinkBytes:
    """The counters of one GPU, all or those of one kind of link, which costs less."""
    nvlink = [] if pcie_only else [(each, _ALL_LINKS) for each in (_SENT, _RECEIVED)]
    pcie = [] if nvlink_only else [(each, _NO_SCOPE) for each in (_PCIE_SENT, _PCIE_RECEIVED)]
    values = answers.fields(nvlink + pcie)
    counts = [None if values.get(each) is None else values[each] * _KIB for each in nvlink] or [None, None]
    counts += [values.get(each) for each in pcie] or [None, None]
    return LinkBytes(*counts)


class NvmlCounters:
    """Counters of the GPUs with these PCI bus ids, in their order, from the time that the driver was loaded.

    On H200, copies of 5 and 10 GiB by copy engines and by SMs moved those of the 18 NVLinks together by what was
    copied, give or take 4 KiB, and copies through host memory by nothing. These moved the PCIe counter of the source by
    1.094 of what was copied and that of the destination by 1.079; copies over NVLink moved it by 0.03 MiB. Only copies
    of megabytes are to be judged by them.
    """

    def __init__(self, bus_ids: Sequence[str]) -> None:
        self._library = open_library()
        self._gpus = [self._find(each) for each in bus_ids]

    def read(self, gpu: int) -> LinkBytes:
        """The counters of the GPU at that position; a reading takes half a millisecond."""
        answers = self._gpus[gpu]
        if answers is None:
            return LinkBytes()
        return read_link_bytes(answers)

    def close(self) -> None:
        """Shut NVML down; nothing is counted from then on."""
        if self._library is not None:
            self._library.nvmlShutdown()
        self._library, self._gpus = None, [None] * len(self._gpus)

    def _find(self, bus_id: str) -> Answers | None:
        if self._library is None:
            return None
        try:
            return Answers(self._library, self._library.nvmlDeviceGetHandleByPciBusId(bus_id))
        except self._library.NVMLError:
            return None

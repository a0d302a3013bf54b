"""What NVML counts on the NVLinks of each GPU: the proof of which way the bytes of a copy went."""

from collections.abc import Sequence

from gpubench.hardware.nvml import open_library
from gpubench.hardware.nvml_answers import Answers

_SENT = 138
_RECEIVED = 139
"""NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX: payload in KiB, without what the protocol adds."""

_ALL_LINKS = 0xFFFFFFFF
_KIB = 1024


class NvlinkCounters:
    """Counters of the GPUs with these PCI bus ids, in their order, from the time that the driver was loaded.

    They count KiB of all links together: on H200, with 18 links each, copies of 5 and 10 GiB by copy engines and by SMs
    moved them by what was copied, give or take 4 KiB, and copies through host memory by nothing. Only copies of
    megabytes are to be judged by them.
    """

    def __init__(self, bus_ids: Sequence[str]) -> None:
        self._library = open_library()
        self._gpus = [self._find(each) for each in bus_ids]

    def read(self, gpu: int) -> tuple[int, int] | None:
        """Bytes sent and received over all NVLinks of the GPU at that position; None where nothing counts them."""
        answers = self._gpus[gpu]
        if answers is None:
            return None
        values = answers.fields([(_SENT, _ALL_LINKS), (_RECEIVED, _ALL_LINKS)])
        if len(values) < 2:
            return None
        return values[_SENT, _ALL_LINKS] * _KIB, values[_RECEIVED, _ALL_LINKS] * _KIB

    def close(self) -> None:
        """Let go of NVML; nothing is counted from then on."""
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

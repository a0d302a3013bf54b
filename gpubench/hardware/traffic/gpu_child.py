"""The child that asks NVML: `python -P -m gpubench.hardware.traffic.gpu_child [INDICES]`, a line in, a line out.

A driver may never answer: then this process hangs, and the one that watches says so.
"""

import json
import signal
import sys
from collections.abc import Sequence

from gpubench.hardware.node.nvml.library import open_library
from gpubench.hardware.node.nvml.traffic import NvmlTraffic
from gpubench.model.terms.plain import to_plain

NO_DRIVER = "NVML does not start: there is no driver, or it does not answer"


def main(arguments: Sequence[str]) -> int:
    """Answer every line with a reading, until there are no more lines; the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks, and reaches this process too
    library = open_library()
    if library is None:
        _answer({"silent": NO_DRIVER})
        return 0
    indices = [int(each) for each in arguments[0].split(",")] if arguments else None
    try:
        traffic = NvmlTraffic(library, indices)
        for _ in sys.stdin:
            _answer({"gpus": [to_plain(each) for each in traffic.read()]})
    except library.NVMLError as error:
        _answer({"silent": f"NVML does not answer ({error})"})
    return 0


def _answer(document: object) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A rank that reduces repeatedly, and misbehaves after a signal file: `ras_rank.py RANK RANKS FOLDER FAULT`.

The folder has the communicator's id, each rank's step, and the signal file. A rank whose NCCL fails prints the error
and stays.
"""

import pickle
import sys
import time
from pathlib import Path


def main(rank: int, ranks: int, folder: Path, fault: str) -> None:
    def say(phase: str) -> None:
        (folder / f"phase-{rank}").write_text(phase)

    say("imports CuPy")
    import cupy
    from cupy.cuda import nccl

    say("makes a CUDA context")
    cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()
    id_file = folder / "id"
    if rank == 0:
        (folder / "id.new").write_bytes(pickle.dumps((nccl.get_version(), nccl.get_unique_id())))
        (folder / "id.new").rename(id_file)
    say("waits for rank 0's id")
    while not id_file.exists():
        time.sleep(0.05)
    say("initializes NCCL")
    communicator = nccl.NcclCommunicator(ranks, pickle.loads(id_file.read_bytes())[1], rank)
    say("reduces")
    data, stream = cupy.ones(2**16, dtype="f4"), cupy.cuda.Stream()
    done = 0
    while True:
        if fault and (folder / "sign").exists():
            if fault == "other":
                communicator.bcast(data.data.ptr, data.size, nccl.NCCL_FLOAT32, 0, stream.ptr)
                stream.synchronize()
            time.sleep(600)
        communicator.allReduce(data.data.ptr, data.data.ptr, data.size, nccl.NCCL_FLOAT32, nccl.NCCL_MAX, stream.ptr)
        stream.synchronize()
        done += 1
        (folder / f"done-{rank}").write_text(str(done))
        time.sleep(0.01)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    except Exception as error:  # noqa: BLE001
        (Path(sys.argv[3]) / f"phase-{sys.argv[1]}").write_text(f"failed: {error}")
        time.sleep(600)

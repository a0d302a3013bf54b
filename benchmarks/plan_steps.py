"""Time real training steps of PyTorch on the GPUs here, for `benchmarks.plan_validation` to compare with
predictions.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.plan_steps --fabric healthy --folder steps/

Forward and backward, no optimizer, bf16, the gradients of one microbatch. A step is the time between two events at its
beginning; the median of `--steps` counts. Rank 0's figures are written to `FOLDER/FABRIC.rank0.json`:

- `single`: each model on one GPU, forward and backward apart, on all GPUs at once and without communication;
- `contention`: collectives beside a model's own forward and backward, and beside GEMMs; neither is a training step;
- `steps`: DDP by bucket size, FSDP2 with and without prefetch, tensor parallelism, a pipeline.

The environment sets up the fabric (NCCL_MAX_CTAS, NCCL_P2P_DISABLE); `--fabric` is its name.
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.training.models import BUCKETS, MODELS, TINY

if TYPE_CHECKING:
    from benchmarks.training.timing import Rank

Part = Callable[["Rank", str, dict[str, Any]], None]


def main() -> None:
    arguments = parse()
    # Imported here, so that --help needs no PyTorch.
    from torch.distributed import destroy_process_group

    from benchmarks.training.timing import Rank

    rank = Rank(arguments)
    try:
        measure(rank, _parts())
    finally:
        write(rank)
        destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fabric", default="healthy")
    parser.add_argument("--folder", type=Path, default=Path("steps"))
    parser.add_argument("--models", default="gpt-0.3B,mlp-0.3B,gpt-0.8B,mlp-0.8B,gpt-1.3B,gpt-7B")
    parser.add_argument("--what", default="single,contention,ddp,fsdp,tp,pp,again")
    parser.add_argument("--buckets", default=",".join(map(str, BUCKETS)))
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warm", type=int, default=3, help="untimed; DDP makes its buckets after the first")
    parser.add_argument("--settle", type=float, default=1.5, help="seconds of steps before those of one GPU are timed")
    parser.add_argument("--tiny", action="store_true", help="tiny models on CPUs with gloo")
    return parser.parse_args()


def _parts() -> Mapping[str, Part]:
    """Return the parts by their names in --what."""
    from benchmarks.training.contention import contention
    from benchmarks.training.layouts import ddp, fsdp, pp, tp
    from benchmarks.training.single import again, single

    parts: tuple[Part, ...] = (single, contention, ddp, fsdp, tp, pp, again)
    return {part.__name__: part for part in parts}


def measure(rank: "Rank", parts: Mapping[str, Part]) -> None:
    """Run all parts for each model; note a part that fails, and go on."""
    import torch

    from benchmarks.training.single import copy_gb_s

    arguments = rank.arguments
    models = TINY if arguments.tiny else MODELS
    if rank.cuda:
        rank.found["copy_gb_s"] = copy_gb_s(rank)
    for name in arguments.models.split(","):
        for word in arguments.what.split(",") if name in models else ():
            begun = time.perf_counter()
            try:
                parts[word](rank, name, models[name])
            except Exception as error:  # noqa: BLE001 - one layout that cannot run must not take the others along
                rank.found["failed"].append({"model": name, "part": word, "error": repr(error)})
                traceback.print_exc()
            write(rank)
            if rank.cuda:
                torch.cuda.empty_cache()
            if rank.number == 0:
                print(f"{arguments.fabric} {name} {word} {time.perf_counter() - begun:.1f} s", flush=True)


def write(rank: "Rank") -> None:
    if rank.number == 0:
        folder = rank.arguments.folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{rank.arguments.fabric}.rank0.json").write_text(json.dumps(rank.found, indent=1))


if __name__ == "__main__":
    main()

"""Every error gpubench reports, with its exit code and its hint."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

DONE = 0
JUDGED_AND_FAILED = 1
WRONG_USAGE = 2
COULD_NOT_MEASURE = 3


class GpubenchError(Exception):
    """One thing that stops a run: what was seen, what was expected, the likely reason, the next command.

    `where` names the rank, host and GPU it happened on, when it happened on one. Every field is plain text, so that an
    error can travel from a rank to the process that prints it.
    """

    exit_code = COULD_NOT_MEASURE

    def __init__(
        self, seen: str, *, expected: str = "", reason: str = "", next_step: str = "", where: str = ""
    ) -> None:
        super().__init__(seen)
        self.seen = seen
        self.expected = expected
        self.reason = reason
        self.next_step = next_step
        self.where = where

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.seen}" if self.where else self.seen]
        labelled = (("expected", self.expected), ("likely", self.reason), ("try", self.next_step))
        lines += [f"  {label + ':':<10}{text}" for label, text in labelled if text]
        return "\n".join(lines)

    def to_record(self) -> dict[str, str | int]:
        """The error as plain data; `from_record` is the inverse."""
        return {
            "exit_code": self.exit_code,
            "seen": self.seen,
            "expected": self.expected,
            "reason": self.reason,
            "next_step": self.next_step,
            "where": self.where,
        }

    @classmethod
    def from_record(cls, record: dict[str, str | int]) -> Self:
        """The error that `to_record` described; the exit code is kept, the subclass is not."""
        texts = {name: str(record[name]) for name in ("seen", "expected", "reason", "next_step", "where")}
        error = cls(**texts)
        error.exit_code = int(record["exit_code"])
        return error


class UsageError(GpubenchError):
    """The command line asks for something that cannot be; nothing was measured."""

    exit_code = WRONG_USAGE


class CouldNotMeasureError(GpubenchError):
    """The machine, a library or a rank kept the measurement from happening."""


class InterruptedRunError(CouldNotMeasureError):
    """Somebody ended the run: Ctrl-C, SIGTERM, or a reader that closed the pipe."""


@contextmanager
def advising(*, reason: str = "", next_step: str = "") -> Iterator[None]:
    """Give errors of usage that pass through here a likely reason and a next step, where they have none."""
    try:
        yield
    except UsageError as error:
        error.reason = error.reason or reason
        error.next_step = error.next_step or next_step
        raise


def invalid_choice(option: str, value: str, choices: Sequence[str]) -> UsageError:
    """`value` is not one of the words that `option` takes."""
    return UsageError(
        f"{option} {value!r} is not known",
        expected=f"one of {', '.join(choices)}",
        next_step=f"{option} {choices[0]}",
    )


def exclusive(options: Sequence[str], expected: str) -> UsageError:
    """Options of which only one can be."""
    seen = f"{' and '.join(options)} exclude each other"
    return UsageError(seen, expected=expected, next_step=f"leave {options[-1]} out")


def more_ranks_than_gpus(ranks: int, gpus: int, host: str) -> UsageError:
    """More ranks on one host than GPUs: NCCL refuses two ranks on one GPU."""
    return UsageError(
        f"{ranks} ranks on {host}, which shows {gpus} GPU{'s' if gpus != 1 else ''}",
        expected="at most one rank a GPU",
        reason="NCCL does not run two ranks of one job on the same GPU",
        next_step=f"--np {gpus}, or --backend host" if gpus else "--backend host",
    )


def shared_gpu(first: str, second: str, gpu: str) -> UsageError:
    """Two ranks of one host picked the same GPU."""
    return UsageError(
        f"{first} and {second} would both drive GPU {gpu}",
        expected="one rank a GPU",
        reason="CUDA_VISIBLE_DEVICES names the same single GPU for several ranks",
        next_step="let every rank see all GPUs, or give each its own: CUDA_VISIBLE_DEVICES=$OMPI_COMM_WORLD_LOCAL_RANK",
    )


class RefusedPathError(GpubenchError):
    """NCCL was told not to fall back to host memory, and had no other way."""

    exit_code = JUDGED_AND_FAILED


def no_direct_path(pair: str, said: str, cause: str, advice: str) -> RefusedPathError:
    """Under --strict, NCCL finds no transport between two ranks."""
    return RefusedPathError(
        f"NCCL refuses to go through host memory: {pair}: {said}",
        expected="a direct path between all GPUs, as --strict asks for",
        reason=cause,
        next_step=advice,
    )


def no_path(pair: str, said: str, cause: str, advice: str) -> CouldNotMeasureError:
    """NCCL finds no transport between two ranks, not even through host memory."""
    return CouldNotMeasureError(
        f"NCCL finds no path: {pair}: {said}",
        expected="peer access, shared memory or a network between all GPUs",
        reason=cause,
        next_step=advice,
    )


def no_size_left(detail: str) -> CouldNotMeasureError:
    """Every size was dropped."""
    return CouldNotMeasureError(f"no size is left to measure: {detail}", next_step="give other --sizes, e.g. 1K:64M")


def unwritable_output(path: Path, error: OSError) -> UsageError:
    """An output file that cannot be opened for writing."""
    folder = path.parent
    reason, next_step = {
        errno.ENOENT: (f"there is no folder {folder}", f"mkdir -p {folder}, or name a file in one that is there"),
        errno.ENOTDIR: (f"{folder} is a file, and no folder", "name a file in a folder"),
        errno.EISDIR: (f"{path} is a folder", f"--output {path}/{path.name} for a file in it"),
        errno.EROFS: (f"{folder} is on a disk that is mounted read-only", "name a file on another disk: df -h"),
        errno.ENOSPC: ("the disk or the quota is full", "name a file on another disk: df -h"),
    }.get(error.errno or 0, (f"{folder}, or the file in it, belongs to somebody else", f"ls -ld {folder} {path}"))
    return UsageError(
        f"--output {path} cannot be written: {os.strerror(error.errno or 0)}",
        expected="a file that can be written, which is tried before anything is measured",
        reason=reason,
        next_step=next_step,
    )


def exit_style_under_launcher(launcher: str) -> UsageError:
    """--exit-style where several processes end, each with a code, and the launcher makes one of them."""
    return UsageError(
        f"--exit-style under {launcher}",
        expected="one process: a launcher has exit codes of its own",
        next_step="leave the launcher out (gpubench starts a rank a GPU by itself), or read `verdict` in --output FILE",
    )


def output_failed(path: str, detail: str, rows: int) -> CouldNotMeasureError:
    """An output that could be written at first and now cannot."""
    return CouldNotMeasureError(
        f"{path} cannot be written any more: {detail}; the run was ended{rows_kept(rows)}",
        reason="the disk or the quota is full",
        next_step="df -h shows what is left; --output FILE writes elsewhere",
    )


def rows_kept(rows: int) -> str:
    """The end of a sentence about a run that broke: what is not lost."""
    if rows == 1:
        return "; the row measured before is kept"
    return f"; the {rows} rows measured before are kept" if rows else ""


def ranks_ended_early(exit_code: int, rows: int) -> CouldNotMeasureError:
    """The launcher came back before rank 0 had said how the run ended."""
    if exit_code < 0 or exit_code > 128:
        how = f"killed by signal {-exit_code if exit_code < 0 else exit_code - 128}"
    else:
        how = f"exit code {exit_code}"
    return CouldNotMeasureError(
        f"the ranks ended without a result (mpirun: {how}){rows_kept(rows)}",
        reason="a rank crashed or was killed; what mpirun and the ranks printed stands above",
        next_step="NCCL_DEBUG=WARN gpubench ... shows what NCCL has to say; dmesg shows an out-of-memory kill",
    )


def no_rank_started() -> CouldNotMeasureError:
    """The launcher is there, and after minutes no rank has said a word."""
    return CouldNotMeasureError(
        "mpirun started no rank in all the time that launch and MPI_Init have",
        reason="mpirun hangs, or what it printed, which stands above",
        next_step="`mpirun -n 2 hostname` shows whether MPI works here at all",
    )


def launcher_failed(exit_code: int) -> CouldNotMeasureError:
    """The launcher came back before any rank spoke."""
    return CouldNotMeasureError(
        f"mpirun ended with exit code {exit_code} before any rank started",
        reason="MPI does not work here as it is set up; what mpirun printed stands above",
        next_step="`mpirun -n 2 hostname` shows whether MPI works here at all",
    )

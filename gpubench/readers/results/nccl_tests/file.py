"""A file of nccl-tests, text or JSON, as a file of results."""

from collections.abc import Mapping, Sequence
from typing import NoReturn

from gpubench.errors import UsageError
from gpubench.model.results.result_file import NOTHING_TOLD, FileCircumstances, ResultFile, Told
from gpubench.model.terms.units import counted
from gpubench.readers.results.nccl_tests.run import NcclTestsRun


def result_file(
    runs: Sequence[NcclTestsRun],
    name: str,
    kind: str,
    remarks: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    told: Told = NOTHING_TOLD,
    damaged: int = 0,
) -> ResultFile:
    """The rows of all runs, with the circumstances of the first that has rows; `kind` is text or JSON.

    `told` is what a person says of runs that do not say it; `damaged` lines were left out. Raises UsageError where
    nothing was measured, and NotSaidError where nothing says of how many ranks, or of which collective, rows are.
    """
    measured = [run for run in runs if run.measured or run.cut]
    if not measured:
        _refuse(runs, name, damaged)
    rows = tuple(row for run in measured for row in run.rows(name, told))
    left_out = [f"{damaged} damaged lines left out"] if damaged else []
    unfinished = sum(not run.complete for run in measured)
    more = [f"{unfinished} of {len(measured)} runs did not end"] if unfinished else []
    empty = sum(not run.lines and bool(run.settings) for run in runs)
    more += [f"{empty} runs without a row"] if empty else []
    zero = sum(len(run.lines) - len(run.measured) for run in runs)
    more += [f"{counted(zero, 'row')} of size 0 left out: nothing moved"] if zero else []
    more += ["columns were cut: what they leave out follows from the rest"] if any(run.cut for run in runs) else []
    more += ["its rows have one half, taken for out of place"] if any(run.lines is run.halves for run in runs) else []
    return ResultFile(
        name=name,
        kind=f"{measured[0].program} {kind}",
        circumstances=_circumstances(measured, environment),
        rows=rows,
        complete=not unfinished and not empty,
        remarks=(*remarks, *left_out, *more),
    )


def _refuse(runs: Sequence[NcclTestsRun], name: str, damaged: int) -> NoReturn:
    """Refuse a file without a row that says anything."""
    seen, reason = f"{name} has nothing that was measured", "the run ended before its first size"
    if damaged:
        seen = f"{name} has no whole row: {counted(damaged, 'row')} damaged"
        reason = "values are missing, or other output stands among them"
    elif any(run.lines for run in runs):
        seen, reason = f"{name} has rows of size 0 alone", "with many ranks small sizes are rounded down to nothing"
    raise UsageError(
        seen,
        expected="rows of nccl-tests: size, count, type, redop, root, time, algbw, busbw, #wrong",
        reason=reason,
        next_step=f"tail {name} shows how the run ended; -e 1G makes it measure larger sizes",
    )


def _circumstances(runs: Sequence[NcclTestsRun], environment: Mapping[str, str] | None) -> FileCircumstances:
    first = runs[0]
    bounds = [run.out_of_bounds for run in runs if run.out_of_bounds is not None]
    # JSON names only the first device of each process: the others are taken to be alike.
    each = 1
    processes = {(device.host, device.pid) for device in first.devices}
    if len(first.devices) == len(processes):
        each = first.ranks_a_process
    return FileCircumstances(
        tool=" ".join(filter(None, (first.program, first.version))),
        hosts=() if first.lacks_devices else tuple(dict.fromkeys(device.host for device in first.devices)),
        gpus=() if first.lacks_devices else tuple(device.name for device in first.devices for _ in range(each)),
        libraries=dict([first.library]) if first.library else {},
        environment=environment,
        options={key: str(first.settings[key]) for key in ("warmup", "validation") if key in first.settings},
        wrong_elements=sum(bounds) if bounds else None,
    )

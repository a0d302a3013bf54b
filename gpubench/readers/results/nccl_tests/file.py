"""A file of nccl-tests, text or JSON, as a file of results."""

from collections.abc import Mapping, Sequence

from gpubench.model.results.result_file import FileCircumstances, ResultFile
from gpubench.readers.results.nccl_tests.run import NcclTestsRun


def result_file(
    runs: Sequence[NcclTestsRun],
    name: str,
    kind: str,
    remarks: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> ResultFile:
    """The rows of all runs, with the circumstances of the first that has rows.

    Raises UsageError where nothing says of how many ranks, or of which collective, rows are.
    """
    measured = [run for run in runs if run.lines]
    rows = tuple(row for run in measured for row in run.rows(name))
    unfinished = sum(not run.complete for run in measured)
    more = [f"{unfinished} of {len(measured)} runs did not end"] if unfinished else []
    empty = sum(not run.lines and bool(run.settings) for run in runs)
    more += [f"{empty} runs without a row"] if empty else []
    return ResultFile(
        name=name,
        kind=kind,
        circumstances=_circumstances(measured, environment),
        rows=rows,
        complete=not unfinished and not empty,
        remarks=(*remarks, *more),
    )


def _circumstances(runs: Sequence[NcclTestsRun], environment: Mapping[str, str] | None) -> FileCircumstances:
    first = runs[0]
    bounds = [run.out_of_bounds for run in runs if run.out_of_bounds is not None]
    # JSON names only the first device of each process: the others are taken to be alike.
    each = 1
    processes = {(device.host, device.pid) for device in first.devices}
    if len(first.devices) == len(processes):
        each = first.settings.get("threads", 1) * first.settings.get("gpus", 1)
    return FileCircumstances(
        tool=f"nccl-tests {first.version}" if first.version else "nccl-tests",
        hosts=tuple(dict.fromkeys(device.host for device in first.devices)),
        gpus=tuple(device.name for device in first.devices for _ in range(each)),
        libraries={"NCCL": first.nccl} if first.nccl else {},
        environment=environment,
        options={key: str(first.settings[key]) for key in ("warmup", "validation") if key in first.settings},
        wrong_elements=sum(bounds) if bounds else None,
    )

"""Reads the JSON of nccl-tests (-J, since 2.17.5), versions 1 to 3, also from a killed run.

Booleans are the strings "true" and "false". `env` is the whole environment, from which only settings that affect
results are kept.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpubench.errors import UsageError
from gpubench.model.facts.snapshot import normalize_bus_id
from gpubench.model.results.result_file import NO_USER_FACTS, ResultFile, UserFacts
from gpubench.model.terms.operation import Placement, nccl_version
from gpubench.readers.documents import load_json
from gpubench.readers.results.nccl_tests import table
from gpubench.readers.results.nccl_tests.run import NcclTestsRun, result_file

NEWEST_VERSION = 3

_SETTINGS = {
    "nthreads": "threads",
    "ngpus": "gpus",
    "warmup_iters": "warmup",
    "iterations": "iterations",
    "aggregated_iterations": "aggregated",
    "validation": "validation",
    "graph": "graph",
}
_LAST_OF_A_RESULT = '"experiment_name":'
_NAME = re.compile(r"([a-z_]+?)_perf(?:_mpi)?$")
_AVERAGE = re.compile(r"(?:-a|--average)[ =]?([0-3])(?!\S)")
_RECORDED = ("NCCL_", "CUDA_VISIBLE_DEVICES")
_WHOLE_BUS_ID = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}")


def recognises(text: str) -> bool:
    """Return True if a text starts like nccl-tests' JSON."""
    return re.match(r'\s*\{\s*"version"\s*:\s*\d+\s*,\s*"start_time"', text) is not None


def read(text: str, name: str, user_facts: UserFacts = NO_USER_FACTS) -> ResultFile:
    """Read the rows of a run. `user_facts` supplies facts that the text lacks.

    Raises UsageError if the text is damaged, has an unknown version, or has no rows.
    """
    document, whole = _loaded(text, name)
    version = document.get("version")
    if not isinstance(version, int) or not 1 <= version <= NEWEST_VERSION:
        raise UsageError(
            f"{name} has version {version!r} of nccl-tests' JSON",
            expected=f"1 to {NEWEST_VERSION}",
            reason="a newer nccl-tests wrote it",
            next_step="its text output, or a newer gpubench",
        )
    try:
        run = _run(document, complete=whole)
        pairs = (str(line).partition("=") for line in document.get("env", ()))
        environment = {key: value for key, _, value in pairs if key.startswith(_RECORDED)}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            f"{name} is not JSON of nccl-tests: {what}",
            expected="the output of its -J FILE",
            reason="it was edited by hand, or it is damaged",
        ) from None
    remarks = [] if whole else ["the file has no end: the run was killed"]
    return result_file([run], name, "JSON", remarks, environment, user_facts=user_facts)


def _loaded(text: str, name: str) -> tuple[dict[str, Any], bool]:
    try:
        return _object(load_json(text)), True
    except ValueError as error:
        last = text.find("}", text.rfind(_LAST_OF_A_RESULT))
        if _LAST_OF_A_RESULT in text and last > 0:
            try:
                return _object(load_json(text[: last + 1] + "]}")), False
            except ValueError:
                pass
        raise UsageError(
            f"{name}: no JSON ({error})",
            expected="the output of nccl-tests -J FILE",
            reason="the run was killed before it wrote a row, or the file was edited by hand",
        ) from None


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    return value


def _run(document: Mapping[str, Any], *, complete: bool) -> NcclTestsRun:
    config = document["config"]
    arguments = [str(argument) for argument in document.get("args", ())]
    named = _NAME.search(arguments[0].rsplit("/", 1)[-1]) if arguments else None
    average = _AVERAGE.search(" ".join(arguments[1:]))
    bounds = document.get("out_of_bounds")
    run = NcclTestsRun(
        collective=table.COLLECTIVE_NAMES.get(named[1]) if named else None,
        library=("NCCL", nccl_version(int(document["nccl_version"]))) if "nccl_version" in document else None,
        settings={own: int(config[theirs]) for theirs, own in _SETTINGS.items() if theirs in config},
        blocking=config.get("blocking_collectives") == "true",
        average=int(average[1]) if average else None,
        devices=[_device(device) for device in config["devices"]],
        out_of_bounds=int(bounds["count"]) if bounds else None,
        complete=complete and "end_time" in document,
    )
    skipped = int(config.get("per_iter_skip", 0))
    for number, result in enumerate(document.get("results", ()), 1):
        placed = tuple(_placed(result, run.settings.get("iterations", 0) - skipped))
        if len(placed) < sum(result.get(key) is not None for key in _KEYS.values()) and int(result["size"]):
            run.left_out[number] = f"result {number} ({result['size']} bytes): a time or bandwidth is not a valid value"
        run.cpu_time = run.cpu_time or any("cpu_time" in (result.get(key) or ()) for key in _KEYS.values())
        if placed:
            line = table.OutputLine.of(result, placed)
            if line.element_type not in table.ELEMENT_TYPES or line.reduction not in table.REDUCTIONS:
                raise ValueError(f"type {line.element_type!r} with redop {line.reduction!r}")
            run.lines.append(line)
    return run


def _device(plain: Mapping[str, Any]) -> table.Device:
    bus, group = str(plain["device_hex"]), int(plain["group"])
    whole = normalize_bus_id(f"{bus}.0") if _WHOLE_BUS_ID.fullmatch(bus) else None
    host, name = str(plain["hostname"]), str(plain["device_info"]).strip()
    return table.Device(int(plain["rank"]), group, int(plain["pid"]), host, int(plain["device"]), whole, name)


_KEYS = {Placement.OUT_OF_PLACE: "out_of_place", Placement.IN_PLACE: "in_place"}


def _placed(result: Mapping[str, Any], samples: int) -> Iterator[table.Placed]:
    """Yield the values of a result for each placement that was measured.

    A placement that was not measured is null. A bandwidth without a time is "nan".
    """
    for placement, key in _KEYS.items():
        body = result.get(key)
        if body is None:
            continue
        time_us = float(body["cpu_time"] if "cpu_time" in body else body["time"])
        algbw, busbw = float(body["alg_bw"]), float(body["bus_bw"])
        if not (time_us > 0 and 0 <= algbw < float("inf") and 0 <= busbw < float("inf")):
            continue
        wrong = body.get("nwrong")
        statistics = result.get(f"{key}_per_iter")
        yield table.Placed(
            placement=placement,
            time_us=time_us,
            algbw_gb_s=algbw,
            busbw_gb_s=busbw,
            wrong=None if wrong is None else int(float(wrong)),
            per_iteration=None if statistics is None else _per_iteration(statistics, samples),
        )


def _per_iteration(plain: Mapping[str, Any], samples: int) -> table.PerIteration:
    skipped = int(plain.get("skipped_iterations", 0))
    processes: Sequence[Sequence[float]] = plain.get("per_process_max_times_us", ())
    kept = [[float(time_) for time_ in times[skipped:]] for times in processes]
    return table.PerIteration(
        p50_us=float(plain["p50_us"]),
        p95_us=float(plain["p95_us"]),
        p99_us=float(plain["p99_us"]),
        cv_percent=float(plain["cv_pct"]),
        samples=len(plain["times_us"]) - skipped if "times_us" in plain else samples,
        mean_us_by_process=tuple(sum(times) / len(times) for times in kept) if kept and all(kept) else (),
    )

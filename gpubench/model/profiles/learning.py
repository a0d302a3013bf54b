"""Judge bandwidths by expected values, and derive expected values for a profile from result files."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import asdict

from gpubench.model.paths.p2p import (
    FAILED_SHARE,
    JUDGED_FROM_BYTES,
    LATENCY_BYTES,
    LIMIT_FAIL_SHARE,
    SLOW_SHARE,
    upper_quartile,
)
from gpubench.model.profiles.profile import BUSBW, TIME, Expected, ExpectedKind
from gpubench.model.results.report import CollectiveRow, PairRow
from gpubench.model.results.speed import LARGE_BYTES
from gpubench.model.terms.operation import HostMemory
from gpubench.model.terms.units import format_bandwidth, group_by, plural
from gpubench.model.terms.verdict import Verdict

if TYPE_CHECKING:
    from gpubench.model.results.result_file import ResultFile


class Expectation(Struct, frozen=True):
    """The expected bandwidth of a copy in GB/s, and a description of where it comes from."""

    value: float
    whose: str


def judge_bandwidth(
    gb_s: float, expectation: Expectation | None, limit_gb_s: float | None
) -> tuple[Verdict, str, str] | None:
    """Return the verdict for a slow bandwidth, with the measured and the expected value as text.

    Return None if the bandwidth is not slow.
    """
    if expectation is not None and gb_s < SLOW_SHARE * expectation.value:
        share = gb_s / expectation.value
        below_limit = limit_gb_s is not None and gb_s < LIMIT_FAIL_SHARE * limit_gb_s
        fails = share < FAILED_SHARE or below_limit
        seen = f"{format_bandwidth(gb_s, 4)}, {share:.0%} of expected"
        return (
            Verdict.FAIL if fails else Verdict.WARN,
            seen,
            (f"{format_bandwidth(expectation.value, 4)}, {expectation.whose}"),
        )
    if expectation is None and limit_gb_s is not None and gb_s < LIMIT_FAIL_SHARE * limit_gb_s:
        seen = f"{format_bandwidth(gb_s, 4)}, {gb_s / limit_gb_s:.0%} of the limit"
        return (
            Verdict.FAIL,
            seen,
            (f"at least {LIMIT_FAIL_SHARE:.0%} of {format_bandwidth(limit_gb_s, 4)}, the limit of the links"),
        )
    return None


def find_slow_values(figures: Mapping[str, float]) -> dict[str, tuple[Verdict, float, float]]:
    """Return values well below the usual value, by name: the verdict, the share of the usual value, and the usual
    value.
    """
    if len(figures) < 2:
        return {}
    common = upper_quartile(list(figures.values()))
    return {
        name: (Verdict.FAIL if figure < FAILED_SHARE * common else Verdict.WARN, figure / common, common)
        for name, figure in figures.items()
        if figure < SLOW_SHARE * common
    }


_DIGITS = 4


class LearningKey(Struct, frozen=True):
    """Properties that measured values must have in common for one expected value. The fields are those of
    `Expected`.
    """

    quantity: str
    gpus: int
    nodes: int = 1
    path: str | None = None
    size_bytes: int | None = None
    nccl: str | None = None
    algorithm: str | None = None


class LearningSample(Struct, frozen=True):
    """One measured value, with the ranks or GPU pair that it belongs to and its result file."""

    key: LearningKey
    value: float
    subject: str
    file: str


class Learned(Struct, frozen=True):
    """Expected values derived from results, and the outliers that were excluded."""

    expected: tuple[Expected, ...]
    outliers: tuple[LearningSample, ...]


def learn(samples: Iterable[LearningSample], source: str) -> Learned:
    """Return the median of the measured values for each key, without outliers. A note gives the range of the values."""
    expected, outliers = [], []
    for key, found in group_by(samples, lambda sample: sample.key).items():
        kept, odd = split_outliers(found)
        outliers += odd
        values = [sample.value for sample in kept]
        files = len({sample.file for sample in kept})
        note = f"the median of {plural(len(values), 'value')} of {plural(files, 'result')}"
        if len(values) > 1:
            note += f", {min(values):.{_DIGITS}g} to {max(values):.{_DIGITS}g}"
        expected.append(
            Expected(
                **asdict(key),
                value=float(f"{median(values):.{_DIGITS}g}"),
                kind=ExpectedKind.MEASURED,
                source=source,
                note=note,
            )
        )
    return Learned(tuple(expected), tuple(outliers))


def split_outliers(samples: Sequence[LearningSample]) -> tuple[list[LearningSample], list[LearningSample]]:
    """Split samples into samples near the median and outliers.

    An outlier differs from the median by more than 5 standard deviations and by more than 5 %. The standard deviation
    is estimated from the median absolute deviation.
    """
    middle = median(sample.value for sample in samples)
    deviation = 1.4826 * median(abs(sample.value - middle) for sample in samples)
    most = max(5 * deviation, 0.05 * middle)
    kept = [sample for sample in samples if abs(sample.value - middle) <= most]
    return kept, [sample for sample in samples if abs(sample.value - middle) > most]


def collect_samples(result: "ResultFile") -> list[LearningSample]:
    """Return the measured values of all collectives and pairs in a result file."""
    nccl = result.circumstances.libraries.get("NCCL", "").split(" ")[0] or None
    several = len({row.path_class for row in result.pairs if _is_between_gpus(row)}) > 1
    gpus = len({end for row in result.pairs for end in (row.source_bus_id, row.destination_bus_id) if end})
    return [
        *(sample for row in result.rows for sample in _collective_samples(row, nccl, result.name)),
        *(sample for row in result.pairs for sample in _pair_samples(row, gpus, result.name, keeps_path=several)),
    ]


def _collective_samples(row: CollectiveRow, nccl: str | None, file: str) -> list[LearningSample]:
    if row.placement != "out_of_place" or row.backend != "nccl" or row.ranks % row.nodes or row.ranks < 2:
        return []
    large = row.size_bytes >= LARGE_BYTES
    key = LearningKey(
        quantity=f"{row.collective}.{BUSBW if large else TIME}",
        gpus=row.ranks // row.nodes,
        nodes=row.nodes,
        size_bytes=row.size_bytes,
        nccl=nccl,
        algorithm=row.algorithm,
    )
    return [LearningSample(key, row.reached_gb_s if large else row.time_us, f"{row.ranks} ranks", file)]


def _pair_samples(row: PairRow, gpus: int, file: str, *, keeps_path: bool) -> list[LearningSample]:
    quantity = _quantity(row)
    value = row.latency_us if quantity and quantity.endswith("latency_us") else row.bandwidth_gb_s
    if quantity is None or value is None:
        return []
    path = row.path_class if keeps_path and quantity.startswith("p2p.") else None
    return [LearningSample(LearningKey(quantity, gpus, path=path), value, f"{row.source} → {row.destination}", file)]


def _quantity(row: PairRow) -> str | None:
    size_bytes = row.size_bytes or 0
    if not _is_between_gpus(row):
        large = size_bytes >= JUDGED_FROM_BYTES and HostMemory.parse_note(row.note) is HostMemory.PINNED
        from_host = row.source_bus_id is None
        return ("host_to_device_gb_s" if from_host else "device_to_host_gb_s") if large else None
    if row.scope != "process" or row.engine not in ("ce", "sm"):
        return None
    way = (row.engine, str(row.direction), str(row.peer))
    if size_bytes == LATENCY_BYTES:
        return {("ce", "write", "on"): "p2p.latency_us", ("ce", "write", "off"): "p2p.staged_latency_us"}.get(way)
    names = {
        ("ce", "write", "on"): "p2p.write_gb_s",
        ("ce", "read", "on"): "p2p.read_gb_s",
        ("ce", "both", "on"): "p2p.bidirectional_gb_s",
        ("sm", "write", "on"): "p2p.sm_write_gb_s",
        ("ce", "write", "off"): "p2p.staged_gb_s",
    }
    return names.get(way) if size_bytes >= JUDGED_FROM_BYTES else None


def _is_between_gpus(row: PairRow) -> bool:
    return row.source_bus_id is not None and row.destination_bus_id is not None


def format_toml(plain: Mapping[str, Any]) -> str:
    """Format a document as TOML: plain values first, then tables, then arrays of tables. Values that are None are
    omitted.
    """
    return "\n".join(_table(plain, "")).strip("\n") + "\n"


def _table(plain: Mapping[str, Any], prefix: str) -> Iterator[str]:
    tables = {key: value for key, value in plain.items() if isinstance(value, Mapping)}
    lists = {
        key: value
        for key, value in plain.items()
        if isinstance(value, Sequence) and value and all(isinstance(item, Mapping) for item in value)
    }
    for key, value in plain.items():
        if value is not None and key not in tables and key not in lists:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in tables.items():
        yield from ("", f"[{prefix}{_key(key)}]")
        yield from _table(value, f"{prefix}{_key(key)}.")
    for key, value in lists.items():
        for item in value:
            yield from ("", f"[[{prefix}{_key(key)}]]")
            yield from _table(item, f"{prefix}{_key(key)}.")


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if bare else _quoted(key)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:_}"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"TOML has no {type(value).__name__}")


def _quoted(text: str) -> str:
    """Quote a string for TOML, without characters that are unprintable or not allowed.

    Escape '##', which a CI runner could read as a command.
    """
    shown = json.dumps(re.sub("[\ud800-\udfff]", "\ufffd", text), ensure_ascii=False).replace("##", "#\\u0023")
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in shown)

"""Dated results in a folder: what a file's name says, and what tells one kind of result from another."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from gpubench.model.facts.performance_settings import logs_every_operation
from gpubench.model.results.report import Metadata
from gpubench.model.results.result_file import SHOWN_BY_ROWS
from gpubench.model.terms.units import some_of

_NAME = re.compile(
    r"(?P<stamp>\d{4}-\d\d-\d\dT\d{6}Z)-(?P<command>[a-z0-9]+)-(?P<host>[\w.+-]+)(?:~(?P<number>\d{1,9}))?\.json",
    re.ASCII,
)
_NOT_IN_NAMES = re.compile(r"[^\w.-]", re.ASCII)
_MOST_HOST_CHARACTERS = 100
_MOST_VALUE_CHARACTERS = 40

_NO_KIND = ("strict", "evidence", "seed", "timeout_s", "gpus", "past")
"""Options that change no number: how it is judged and told, by which past, a simulation's noise, how long a driver may
think. `gpus`
are devices and no option; which models they are counts by itself."""

CUT_SHORT = "cut short, or still running"
"""Why a result without an end is left out."""

_TOLD_BY_ROWS = (
    *SHOWN_BY_ROWS,
    *("mode", "graph", "settings", "groups", "ranks", "backend", "check"),
)
"""Options that say which rows there are, and so change none of them; nor does it whether data are verified, which
happens after the clock has stopped."""

_MOVE_NO_DATA = ("numpy", "CuPy")
"""Libraries that hold buffers, and are not asked while the clock runs."""

_NO_SETTING = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "NCCL_DEBUG_FILE")
"""Variables that change no number: which GPUs they leave counts by itself."""

_LOG = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS")
"""They change a number only where NCCL logs every operation; gpubench has its start logged itself."""


@dataclass(frozen=True, slots=True, order=True)
class DatedName:
    """The name of a result: when it began, in UTC, which of that second's, which command, on which host.

    The order is that of time. `number` is 1 of the first of a second.
    """

    stamp: str
    number: int
    command: str
    host: str

    def __str__(self) -> str:
        number = f"~{self.number}" if self.number > 1 else ""
        return f"{self.stamp}-{self.command}-{self.host}{number}.json"

    @classmethod
    def of(cls, metadata: Metadata, number: int = 1) -> "DatedName":
        """The name of a run: its first host, and behind a + how many others took part."""
        began = datetime.fromisoformat(metadata.started_at).astimezone(UTC)
        return cls(began.strftime("%Y-%m-%dT%H%M%SZ"), number, metadata.subject, cls.host_of(metadata.hosts))

    @staticmethod
    def host_of(hosts: Sequence[str]) -> str:
        """The hosts of a run as names of files spell them."""
        different = list(dict.fromkeys(hosts))
        first = _NOT_IN_NAMES.sub("_", different[0])[:_MOST_HOST_CHARACTERS]
        return first + (f"+{len(different) - 1}" if len(different) > 1 else "")

    @classmethod
    def parse(cls, text: str) -> "DatedName | None":
        """The parts of a file's name; None where it is no name of a dated result."""
        found = _NAME.fullmatch(text)
        return found and cls(found["stamp"], int(found["number"] or 1), found["command"], found["host"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultHead:
    """The metadata of a result, which stand before its rows: they decide which other results it may be compared with.

    `models` are its GPUs' in order of name, one a GPU, none where it does not tell; `options` has values as JSON.
    `places` are the UUIDs or bus ids of its GPUs, of a rank without one its host; `libraries` have no file names.
    """

    name: str
    run_id: str
    started_at: str
    command: str
    verdict: str
    complete: bool
    origin: str
    hosts: tuple[str, ...]
    models: tuple[str, ...]
    options: Mapping[str, str]
    places: tuple[str, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    topology: str | None = None

    @classmethod
    def of(cls, metadata: Mapping[str, Any], name: str, verdict: str, *, complete: bool) -> "ResultHead":
        """The head of a result from its metadata as plain data.

        Raises:
            KeyError, TypeError, AttributeError, ValueError: they are not as gpubench writes them.
        """
        options = dict(metadata["options"])
        models = [str(rank["gpu"]) for rank in metadata["ranks"] if rank["gpu"]]
        described = [str(text).partition(" ") for text in options.get("gpus", {}).values()]
        places = [rank["gpu_uuid"] or rank["gpu_bus_id"] or rank["host"] for rank in metadata["ranks"]]
        if "sizes" in options:
            # What was asked for is the kind; how much memory was free decides what is dropped of it.
            dropped = [each["size_bytes"] for each in metadata["dropped_sizes"]]
            options["sizes"] = sorted({*(options["sizes"] or ()), *dropped})
        options |= {"backend": metadata["backend"], "ranks": len(metadata["ranks"])}
        return cls(
            name=name,
            run_id=str(metadata["run_id"]),
            started_at=datetime.fromisoformat(metadata["started_at"]).astimezone(UTC).isoformat(timespec="seconds"),
            command=str(metadata["subject"]),
            verdict=verdict,
            complete=complete,
            origin=str(metadata["origin"]),
            hosts=tuple(sorted({str(host) for host in metadata["hosts"]})),
            models=tuple(sorted(models or [model for _, _, model in described])),
            options={key: json.dumps(value, sort_keys=True) for key, value in options.items() if key not in _NO_KIND},
            places=tuple(sorted(map(str, places or [bus_id for bus_id, _, _ in described]))),
            libraries={str(name): str(text).partition(" from ")[0] for name, text in metadata["libraries"].items()},
            settings=_bearing_on_speed(metadata["environment"]),
            topology=metadata["topology"],
        )

    @property
    def machine(self) -> tuple[object, ...]:
        """The machine: the same for two results of it. A replayed or simulated one is a machine of its own."""
        return self.origin, self.hosts

    @property
    def kind(self) -> tuple[object, ...]:
        """The command, machine, GPUs and options: the same for results that may be compared."""
        return self.command, self.machine, self.models, tuple(sorted(self.options.items()))

    def differences_from(self, other: "ResultHead") -> Iterator[str]:
        """In what this is another kind than a result of the same command: 'another machine: node8, not node7'."""
        yield from self._of_machines(other)
        changed = [name for name in {**self.options, **other.options} if _option(self, name) != _option(other, name)]
        if changed:
            yield "other options: " + "; ".join(_changed(name, self, other) for name in changed)

    def obstacles_to(self, other: "ResultHead") -> Iterator[str]:
        """Why the rows of this are no measure of another's of the same command: 'another driver: 570.1, not 580.2'.

        Which rows there are may differ. So may the topology where the GPUs are the same: a lost link is what the past
        is to show.
        """
        yield from self._of_machines(other)
        if self.places != other.places:
            yield f"other ranks or GPUs: {_place_beside(self, other)}, not {_place_beside(other, self)}"
        if not self.places and self.is_wired_otherwise(other):
            yield f"another topology: {self.topology}, not {other.topology}"
        for name in dict.fromkeys((*self.libraries, *other.libraries)):
            if name not in _MOVE_NO_DATA and self.libraries.get(name) != other.libraries.get(name):
                yield f"another {name}: {_against(name, self.libraries, other.libraries)}"
        for what, own, others in (
            ("settings", self.settings, other.settings),
            ("options", _beside_rows(self.options), _beside_rows(other.options)),
        ):
            changed = [name for name in {**own, **others} if own.get(name) != others.get(name)]
            if changed:
                yield f"other {what}: " + "; ".join(f"{name} {_against(name, own, others)}" for name in changed)

    def is_wired_otherwise(self, other: "ResultHead") -> bool:
        """True where both tell of a topology, and it is not the same."""
        return None not in (self.topology, other.topology) and self.topology != other.topology

    def _of_machines(self, other: "ResultHead") -> Iterator[str]:
        if self.origin != other.origin:
            yield f"another origin: {self.origin}, not {other.origin}"
        if self.hosts != other.hosts:
            yield f"another machine: {_hosts(self)}, not {_hosts(other)}"
        if self.models != other.models:
            yield f"other GPUs: {_models(self)}, not {_models(other)}"


def _bearing_on_speed(environment: Mapping[str, str]) -> dict[str, str]:
    """The recorded settings without those that change no number."""
    level, subsystems = (str(environment.get(name, "")) for name in _LOG)
    silent = _NO_SETTING if logs_every_operation(level, subsystems) else (*_NO_SETTING, *_LOG)
    return {str(name): str(value) for name, value in environment.items() if name not in silent}


def _beside_rows(options: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in options.items() if name not in _TOLD_BY_ROWS}


def _place_beside(head: ResultHead, other: ResultHead) -> str:
    """The first place that only one of two has; how many there are, where their numbers differ."""
    if len(head.places) != len(other.places):
        return str(len(head.places))
    return shortened(next(place for place in head.places if head.places.count(place) > other.places.count(place)))


def _against(name: str, own: Mapping[str, str], other: Mapping[str, str]) -> str:
    """'2.27, not 2.28'."""
    values = (shortened(each.get(name, "none").replace('"', "").strip("[]")) for each in (own, other))
    return ", not ".join(values)


def shortened(text: str) -> str:
    """The beginning of a value that another's file has."""
    return text if len(text) <= _MOST_VALUE_CHARACTERS else text[: _MOST_VALUE_CHARACTERS - 1] + "…"


def _hosts(head: ResultHead) -> str:
    return some_of(head.hosts, 1) or "none"


def _models(head: ResultHead) -> str:
    return " and ".join(f"{count} × {model}" for model, count in Counter(head.models).items()) or "none known"


def _option(head: ResultHead, name: str) -> str:
    return head.options.get(name, "not there")


def _changed(name: str, one: ResultHead, other: ResultHead) -> str:
    values = [_option(head, name).replace('"', "").strip("[]") for head in (one, other)]
    return f"{name} {values[0]}, not {values[1]}" if max(map(len, values)) <= _MOST_VALUE_CHARACTERS else name

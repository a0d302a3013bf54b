"""Dated results in a folder: what a file's name says, and what tells one kind of result from another."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gpubench.model.results.report import Metadata
from gpubench.model.terms.units import some_of

_NAME = re.compile(
    r"(?P<stamp>\d{4}-\d\d-\d\dT\d{6}Z)-(?P<command>[a-z0-9]+)-(?P<host>[\w.+-]+)(?:~(?P<number>\d{1,9}))?\.json",
    re.ASCII,
)
_NOT_IN_NAMES = re.compile(r"[^\w.-]", re.ASCII)
_MOST_HOST_CHARACTERS = 100
_MOST_VALUE_CHARACTERS = 40

_NO_KIND = ("strict", "evidence", "seed", "timeout_s", "gpus")
"""Options that change no number: how it is judged and told, a simulation's noise, how long a driver may think. `gpus`
are devices and no option; which models they are counts by itself."""


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

    @classmethod
    def of(cls, metadata: Mapping[str, Any], name: str, verdict: str, *, complete: bool) -> "ResultHead":
        """The head of a result from its metadata as plain data.

        Raises:
            KeyError, TypeError, AttributeError, ValueError: they are not as gpubench writes them.
        """
        options = dict(metadata["options"])
        models = [str(rank["gpu"]) for rank in metadata["ranks"] if rank["gpu"]]
        models = models or [str(text).partition(" ")[2] for text in options.get("gpus", {}).values()]
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
            models=tuple(sorted(models)),
            options={key: json.dumps(value, sort_keys=True) for key, value in options.items() if key not in _NO_KIND},
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
        if self.origin != other.origin:
            yield f"another origin: {self.origin}, not {other.origin}"
        if self.hosts != other.hosts:
            yield f"another machine: {_hosts(self)}, not {_hosts(other)}"
        if self.models != other.models:
            yield f"other GPUs: {_models(self)}, not {_models(other)}"
        changed = [name for name in {**self.options, **other.options} if _option(self, name) != _option(other, name)]
        if changed:
            yield "other options: " + "; ".join(_changed(name, self, other) for name in changed)


def _hosts(head: ResultHead) -> str:
    return some_of(head.hosts, 1) or "none"


def _models(head: ResultHead) -> str:
    return " and ".join(f"{count} × {model}" for model, count in Counter(head.models).items()) or "none known"


def _option(head: ResultHead, name: str) -> str:
    return head.options.get(name, "not there")


def _changed(name: str, one: ResultHead, other: ResultHead) -> str:
    values = [_option(head, name).replace('"', "").strip("[]") for head in (one, other)]
    return f"{name} {values[0]}, not {values[1]}" if max(map(len, values)) <= _MOST_VALUE_CHARACTERS else name

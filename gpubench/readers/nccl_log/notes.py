"""The lines of a log that explain something, each kept once with the processes that wrote it."""

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

from gpubench.model.paths.nccl_log import LoggedSetting, Note, Remark, RemarkKind
from gpubench.readers.nccl_log.remarks import (
    FIRST_WORDS,
    OwnGpu,
    parse_network,
    parse_paths,
    parse_remark,
    parse_setting,
    parse_version,
)

Key = TypeVar("Key")

_MOST = 2**14
"""Different settings and remarks that are kept: more than a job of thousands of ranks has."""

_MOST_PATHS = 2**16
"""The GPUs of a thousand nodes."""

_MOST_VERSIONS = 32
_MOST_WARNINGS = 32
_LONGEST_WARNING = 300

_BEGINNINGS = (b"NCCL_", b"Using ", b"GPU/", b"CPU/", b"NET/", b"NCCL version ")


def may_be_noted(message: bytes) -> bool:
    """True if a message begins as one does that explains something."""
    return message.startswith(_BEGINNINGS) or message.partition(b" ")[0] in FIRST_WORDS


class Notes:
    """The settings, networks, remarks, paths and warnings of a log."""

    def __init__(self) -> None:
        self.versions: dict[str, None] = {}
        self.paths: dict[tuple[str, str, str], str] = {}
        self.warnings: Counter[str] = Counter()
        self._settings: dict[tuple[str, str], dict[str, None]] = {}
        self._networks: dict[str, dict[str, None]] = {}
        self._remarks: dict[tuple[RemarkKind, tuple[str, ...]], tuple[Note, dict[str, None]]] = {}

    def add(self, host: str, process: str, message: bytes, own: OwnGpu | None = None) -> None:
        """Keep a message of level INFO that is one of these."""
        if message.startswith(b"NCCL_"):
            _keep(self._settings, parse_setting(message), process)
        elif message.startswith(b"Using "):
            _keep(self._networks, parse_network(message), process)
        elif message.startswith(b"NCCL version "):
            self.add_version(message)
        elif message.startswith(b"GPU/"):
            if len(self.paths) < _MOST_PATHS:
                self.paths |= {(host, *pair): path for pair, path in parse_paths(message).items()}
        elif note := parse_remark(message, own):
            key = note.kind, note.about
            if key in self._remarks or len(self._remarks) < _MOST:
                self._remarks.setdefault(key, (note, {}))[1][process] = None

    def add_version(self, line: bytes) -> None:
        """Keep NCCL's version, which the level VERSION prints without host and process."""
        version = parse_version(line)
        if version is not None and len(self.versions) < _MOST_VERSIONS:
            self.versions[version] = None

    def add_warning(self, host: str, process: str, message: bytes) -> None:
        """Keep a message of level WARN."""
        text = message[:_LONGEST_WARNING].decode("utf-8", "replace").strip()
        if text in self.warnings or len(self.warnings) < _MOST_WARNINGS:
            self.warnings[text] += 1
        self.add(host, process, message)

    @property
    def host_ids(self) -> dict[str, str]:
        """NCCL_HOSTID by process: where it is set, NCCL takes it for the machine."""
        return {
            process: value
            for (name, value), processes in self._settings.items()
            for process in processes
            if name == "NCCL_HOSTID"
        }

    def settings(self) -> tuple[LoggedSetting, ...]:
        """The settings by name."""
        return tuple(LoggedSetting(*key, tuple(processes)) for key, processes in sorted(self._settings.items()))

    def networks(self) -> Mapping[str, int]:
        """The number of processes that use each network."""
        return {name: len(processes) for name, processes in self._networks.items()}

    def remarks(self) -> tuple[Remark, ...]:
        """The remarks in order of appearance."""
        return tuple(Remark(note, tuple(processes)) for note, processes in self._remarks.values())


def _keep(kept: dict[Key, dict[str, None]], key: Key | None, process: str) -> None:
    if key is not None and (key in kept or len(kept) < _MOST):
        kept.setdefault(key, {})[process] = None

"""The lines of a log that explain something, each kept once with the processes that wrote it."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

from gpubench.model.paths.nccl_log import Complaint, FailedCall, LoggedSetting, Note, Remark, RemarkKind
from gpubench.readers.nccl_log import limits
from gpubench.readers.nccl_log.programs import (
    TestRuns,
    Tracebacks,
    parse_diagnostic,
    parse_gpu_model,
    parse_program_error,
    says_something,
)
from gpubench.readers.nccl_log.reached import ReachedLimits
from gpubench.readers.nccl_log.remarks import (
    FIRST_WORDS,
    OwnGpu,
    ReturnedError,
    parse_network,
    parse_paths,
    parse_remark,
    parse_setting,
    parse_version,
    shows_nvlinks,
)

Key = TypeVar("Key")

_MOST_PATHS = 2**16
"""The GPUs of a thousand nodes."""

_MOST_VERSIONS = 32
_NUMBERS = re.compile(r"\b(?:0x)?[0-9a-f]*\d[0-9a-f]*\b")
"""Complaints that differ by numbers alone are one."""

_PLACE = re.compile(rb"(?:^| )([\w./-]{1,200}:\d{1,9})$", re.ASCII)
_MOST_MODELS = 32
_LONGEST_WARNING = 300
_LONGEST_SHOWN = 60

_LAST_ERROR = b"Last error:"
"""Behind it, on a line of its own, PyTorch puts what NCCL last warned of."""

_MOST_TAGS = 32
_LONGEST_OF_OTHERS = 1024

_OF_TOPOLOGY = (b"GPU/", b"+ ", b"  ", b"Pattern ")
_BEGINNINGS = (b"NCCL_", b"Using ", b"CPU/", b"NET/", b"NCCL version ", *_OF_TOPOLOGY)


def may_be_noted(message: bytes) -> bool:
    """True if a message begins as one does that explains something."""
    return message.startswith(_BEGINNINGS) or message.partition(b" ")[0] in FIRST_WORDS


class Notes:
    """The settings, networks, remarks, paths, complaints and failed calls of a log; `reached` says what is left out."""

    def __init__(self, reached: ReachedLimits) -> None:
        self._reached = reached
        self._tellers = 0
        self._tests, self._tracebacks = TestRuns(), Tracebacks()
        self._before_last_error: dict[bytes, None] = {}
        self.versions: dict[str, None] = {}
        self.paths: dict[tuple[str, str, str], str] = {}
        self.models: dict[str, None] = {}
        self.listed_models: dict[str, None] = {}
        self.nvlink_hosts: dict[str, None] = {}
        self._complaints: dict[str, tuple[str, Counter[str]]] = {}
        self._failed_calls: dict[ReturnedError, dict[str, None]] = {}
        self._settings: dict[tuple[str, str], dict[str, None]] = {}
        self._networks: dict[str, dict[str, None]] = {}
        self._remarks: dict[tuple[RemarkKind, tuple[str, ...]], tuple[Note, dict[str, None]]] = {}

    def add(self, host: str, process: str, message: bytes, own: OwnGpu | None = None) -> None:
        """Keep a message of level INFO that is one of these."""
        if message.startswith(b"NCCL_"):
            self._keep(self._settings, parse_setting(message), process)
        elif message.startswith(b"Using "):
            self._keep(self._networks, parse_network(message), process)
        elif message.startswith(b"NCCL version "):
            self.add_version(message)
        elif message.startswith(_OF_TOPOLOGY):
            if shows_nvlinks(message):
                self.nvlink_hosts[host] = None
            if len(self.paths) < _MOST_PATHS:
                self.paths |= {(host, *pair): path for pair, path in parse_paths(message).items()}
        elif note := parse_remark(message, own):
            key = note.kind, note.about
            if key in self._remarks or self._has_room(len(self._remarks), limits.MOST_REMARKS, "remarks", note.text):
                self._tell(self._remarks.setdefault(key, (note, {}))[1], process)

    def add_version(self, line: bytes) -> None:
        """Keep NCCL's version, which the level VERSION prints without host and process."""
        version = parse_version(line)
        if version is not None and len(self.versions) < _MOST_VERSIONS:
            self.versions[version] = None

    def add_warning(self, host: str, process: str, message: bytes, head: bytes) -> None:
        """Keep a message of level WARN; of calls of CUDA's with the place in NCCL's source, with which `head` ends."""
        text = message[:_LONGEST_WARNING].decode("utf-8", "replace").strip()
        if message.startswith(b"Cuda failure") and (place := _PLACE.search(head)):
            text += f" in {place[1].decode()}"
        self._complain(text, process)
        self.add(host, process, message)

    def add_failed_call(self, process: str, call: ReturnedError) -> None:
        """Keep the error that a function of NCCL's returned."""
        self._keep(self._failed_calls, call, process)

    def add_other(self, line: bytes) -> None:
        """Keep what a line of another program says of the GPUs, or of calls of NCCL's that failed."""
        for tag in self._before_last_error:
            if line.startswith(tag):
                del self._before_last_error[tag]
                self._complain(line[len(tag) :][:_LONGEST_WARNING].decode("utf-8", "replace").strip(), "")
                break
        if not says_something(line):
            return
        line = line[:_LONGEST_OF_OTHERS]
        self._tests.add(line)
        self._tracebacks.add(line)
        if (whole := line.rstrip()).endswith(_LAST_ERROR) and len(self._before_last_error) < _MOST_TAGS:
            self._before_last_error[whole.removesuffix(_LAST_ERROR)] = None
        if diagnostic := parse_diagnostic(line):
            process, text = diagnostic
            self._complain(text, process)
        elif error := parse_program_error(line):
            self._complain(error, "")
        if model := parse_gpu_model(line):
            name, is_of_rank = model
            models = self.models if is_of_rank else self.listed_models
            if len(models) < _MOST_MODELS:
                models[name] = None

    def _complain(self, text: str, process: str) -> None:
        gist = _NUMBERS.sub("#", text)
        if gist in self._complaints or self._has_room(
            len(self._complaints), limits.MOST_WARNINGS, "different warnings", text
        ):
            _, tellers = self._complaints.setdefault(gist, (text, Counter()))
            self._tellers += process not in tellers
            tellers[process] += 1
            self._check_tellers()

    def _keep(self, kept: dict[Key, dict[str, None]], key: Key | None, process: str) -> None:
        if key is not None and (
            key in kept or self._has_room(len(kept), limits.MOST_SETTINGS, "different settings", f"{key}")
        ):
            self._tell(kept.setdefault(key, {}), process)

    def _tell(self, tellers: dict[str, None], process: str) -> None:
        self._tellers += process not in tellers
        tellers[process] = None
        self._check_tellers()

    def _check_tellers(self) -> None:
        if self._tellers > limits.MOST_TELLERS:
            most = f"{limits.MOST_TELLERS} lines of different processes that say something of their own"
            self._reached.end(f"more than {most}", most)

    def _has_room(self, count: int, most: int, what: str, text: str) -> bool:
        """True where one more of something may be kept."""
        if count >= most:
            self._reached.pass_over(f"one more: {text[:_LONGEST_SHOWN]}", f"{most} {what}")
        return count < most

    @property
    def host_ids(self) -> dict[str, str]:
        """NCCL_HOSTID by process: where it is set, NCCL takes it for the machine."""
        return {
            process: value
            for (name, value), processes in self._settings.items()
            for process in processes
            if name == "NCCL_HOSTID"
        }

    def complaints(self) -> tuple[Complaint, ...]:
        """The warnings and reported errors in order of appearance."""
        found = tuple(
            Complaint(text, counts.total(), tuple(filter(None, counts))) for text, counts in self._complaints.values()
        )
        of_whole = filter(None, (self._tests.complaint(), self._tracebacks.complaint()))
        return (*found, *(Complaint(*each, ()) for each in of_whole))

    def failed_calls(self) -> tuple[FailedCall, ...]:
        """The calls that failed, in order of appearance."""
        return tuple(FailedCall(*key, tuple(processes)) for key, processes in self._failed_calls.items())

    def addresses(self) -> Mapping[str, str]:
        """The address of the interface over which a process meets the others, by process."""
        return {
            process: note.about[1]
            for note, processes in self._remarks.values()
            if note.kind is RemarkKind.BOOTSTRAP
            for process in processes
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

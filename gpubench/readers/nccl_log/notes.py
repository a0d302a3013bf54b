"""Collect log lines from NCCL and other programs that explain a choice. Each line is kept once, with its processes."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from gpubench.model.paths.nccl_log import Complaint, FailedCall, LoggedSetting, Note, Remark, RemarkKind
from gpubench.readers import limits, pasted
from gpubench.readers.nccl_log import endings
from gpubench.readers.nccl_log.lines import ReachedLimits, format_bus_id

_LONGEST = 300

_ADDRESS = r"([\w.@-]{1,60}):\[?([\da-fA-F.:]{2,60})(?:%\w+)?\]?<"
_BOOTSTRAP = rf"Bootstrap ?: Using (?:\[\d+\])?{_ADDRESS}"

_Form = tuple[RemarkKind, re.Pattern[str]]


def _form(kind: RemarkKind, pattern: str) -> _Form:
    return kind, re.compile(pattern, re.ASCII)


_PAIR_OF_DEVICES = r" between dev -?\d{1,6}\(=([0-9a-f]{1,12})\) and dev -?\d{1,6}\(=([0-9a-f]{1,12})\)"
# Kinds of lines in which all captured values are bus ids
_ABOUT_BUS_IDS = (RemarkKind.PEER_ACCESS_REFUSED, RemarkKind.PEER_QUERY_FAILED)
_ABOUT_OWN_GPU = (RemarkKind.GDR_FAR, RemarkKind.GDR_NEAR)
"""Kinds of lines in which NCCL 2.24 and later print the rank of the GPU instead of its bus id."""

_FORMS: Mapping[str, tuple[_Form, ...]] = {
    "NET/IB": (
        _form(RemarkKind.NO_RDMA_DEVICE, r"NET/IB ?: No device found"),
        _form(
            RemarkKind.GDR_DISTANT,
            r"NET/IB ?: GPU Direct RDMA Disabled for GPU \w+(?:\[\w+\])? / HCA \d+ (?:'[^']{0,60}' )?\(distance",
        ),
        _form(RemarkKind.RDMA_DEVICES, r"NET/IB ?: Using((?: \[\d+\]\S+)+)"),
        _form(RemarkKind.RDMA_DEVICES, r"NET/IB ?: GPU Direct RDMA \(DMABUF\) enabled for HCA \d{1,6} '([\w.-]{1,60})"),
        _form(RemarkKind.BOOTSTRAP, rf"NET/IB ?: Using \[RO\]; OOB {_ADDRESS}"),
        _form(RemarkKind.RDMA_UNOPENED, r"NET/IB ?: Unable to open device (\S+)"),
    ),
    "NET/OFI": (
        _form(RemarkKind.RDMA_DEVICES, r"NET/OFI .*\b[Pp]rovider is (efa|verbs|cxi|psm\d?)\b"),
        _form(RemarkKind.GDR_DISABLED, r"NET/OFI .*(?:disabling GDR|GDR (?:is )?not supported)()()"),
        _form(RemarkKind.NETWORK_PLUGIN, r"NET/OFI "),
    ),
    "NET/Plugin": (_form(RemarkKind.NETWORK_PLUGIN, r"NET/Plugin ?: (?:Loaded|Using)\b"),),
    "Bootstrap": (_form(RemarkKind.BOOTSTRAP, _BOOTSTRAP),),
    "Bootstrap:": (_form(RemarkKind.BOOTSTRAP, _BOOTSTRAP),),
    "NET/Socket": (_form(RemarkKind.SOCKET_INTERFACES, r"NET/Socket ?: Using \[\d+\]"),),
    "Detected": (
        _form(
            RemarkKind.NICS_MIXED,
            r"Detected mixed local Net device counts across ranks \(min (\d{1,5}), max (\d{1,5})\)",
        ),
    ),
    "Failed": (_form(RemarkKind.NO_VERBS_LIBRARY, r"Failed to open libibverbs\.so"),),
    "DMA-BUF": (_form(RemarkKind.DMA_BUF, r"DMA-BUF is available on GPU device (\d{1,6})"),),
    "Check": (
        _form(
            RemarkKind.P2P_TYPE,
            r"Check P2P Type (?:isAllDirectP2p|intraNodeP2pSupport) ([01]) directMode [01](?: isAllCudaP2p ([01]))?",
        ),
    ),
    "P2P": (
        _form(RemarkKind.DRIVER_REFUSED, r"P2P is disabled between connected GPUs (\d{1,6}) and (\d{1,6})"),
        _form(RemarkKind.DRIVER_REFUSED, r"P2P not supported between GPU(\d{1,6}) and GPU(\d{1,6})"),
        _form(RemarkKind.NVLINK_REFUSED, r"P2P is disabled between NVLINK connected GPUs (\d{1,6}) and (\d{1,6})"),
    ),
    "Could": (_form(RemarkKind.PEER_ACCESS_REFUSED, "Could not enable P2P" + _PAIR_OF_DEVICES),),
    "peer": (_form(RemarkKind.PEER_QUERY_FAILED, "peer query failed" + _PAIR_OF_DEVICES),),
    "Legacy": (_form(RemarkKind.LEGACY_IPC_REFUSED, r"Legacy IPC not supported"),),
    "NVLS": (_form(RemarkKind.MULTICAST, r"NVLS multicast support is (not )?available on dev (\d{1,6})"),),
    "CC": (_form(RemarkKind.CONFIDENTIAL, r"CC On\b"),),
    "No": (
        _form(
            RemarkKind.NO_TRANSPORT,
            r"No transport found(?: for rank (\d{1,7})\[[0-9a-f]{1,12}\] -> rank (\d{1,7})\[[0-9a-f]{1,12}\])?",
        ),
    ),
    "MNNVL": (
        _form(RemarkKind.MNNVL_BROKEN, r"MNNVL \(cliqueSize \d+\) is available but not working"),
        _form(
            RemarkKind.FABRIC,
            r"MNNVL busId 0x[0-9a-f]{1,12} fabric UUID ([0-9a-f]{1,16}\.[0-9a-f]{1,16}) cliqueId 0x([0-9a-f]{1,8})",
        ),
    ),
    "CPU/": (_form(RemarkKind.PROCESSOR, r"CPU/[0-9a-fA-F]{1,6}(?:-[0-9a-fA-F]{1,6})? \((\d/\d)/"),),
    "GPU": (
        _form(RemarkKind.GDR_FAR, r"GPU Direct RDMA Disabled for GPU ([0-9a-f]{1,16}) / HCA ([0-9a-f]{1,16})"),
        _form(RemarkKind.GDR_NEAR, r"GPU Direct RDMA Enabled for GPU ([0-9a-f]{1,16}) / HCA ([0-9a-f]{1,16})"),
    ),
}
"""Patterns by the first word of the message."""

FIRST_WORDS = frozenset(word.encode() for word in _FORMS)

_INTERFACE = re.compile(r"\[\d+\]([\w.@-]{1,60}):", re.ASCII)
_SHORTEST_BUS_ID = 4
_IN_PROGRESS = b"7"
_SOCKETS = re.compile(r"(?:^|/)(?:socket|proxy|bootstrap|ras|rasnet|peers|ipcsocket)\.cc:", re.ASCII)

_GDR = re.compile(
    r"NET/[^:]{1,60}: GPU Direct RDMA (Enabled|Disabled) for (?:GPU [\w\[\]]{1,40} / )?HCA (\d{1,6}) '([^']{0,60})'"
    r"(?! \(distance)",
    re.ASCII,
)
_SETTING = re.compile(rb"(NCCL_\w{1,60}) set (?:by environment )?to (.*)", re.S)
_FAILED_CALL = re.compile(
    rb"(?:\[[\w ]{1,60}\] )?(?:([\w./-]{1,120}\.(?:cc|cu|cpp|c|h):\d{1,6})(?: \(\w{1,80}\))? -> "
    rb"|Failed to execute (operation \w{1,40} from rank \d{1,7}), retcode )([1-9]\d?)\b"
)
_VERSION = re.compile(rb"NCCL version (\d[\w.]{0,30}(?:\+cuda[\d.]{1,10})?)")
_PATHS = re.compile(rb"GPU/(?:[0-9a-fA-F]{1,4}-)?([0-9a-fA-F]{1,14}) :")
_PATH = re.compile(rb"GPU/(?:[0-9a-fA-F]{1,4}-)?([0-9a-fA-F]{1,14}) \(\d+/[\d.]+/([A-Z0-9]{2,4})\)")
_NVLINK_SIGNS = (b"+ NVL[", b"NVS/", b"/NVL)", b"/NVB)", b"/C2C)", b", type NVL/")
_LOCAL_BITS = (1 << 40) - 1
"""The bits of a bus id. NCCL 2.30 uses the bits above them to number the ranks on one GPU."""


class OwnGpu(NamedTuple):
    """The rank of the thread that wrote a line, and the bus id of its GPU."""

    rank: int
    bus: int


class ReturnedError(NamedTuple):
    """A place in NCCL's source code and the error code that it returned.

    Codes are 1 for CUDA, 2 for a system call, 3 for an internal error, and 6 for a remote process.
    """

    place: str
    code: int

    @property
    def is_of_sockets(self) -> bool:
        """True if NCCL's socket code returned the error."""
        return _SOCKETS.search(self.place) is not None


def parse_remark(message: bytes, own: OwnGpu | None = None) -> Note | None:
    """Parse a message that explains a choice. None for other messages, and for messages about another process's GPU."""
    text = message[:_LONGEST].decode("ascii", "replace").rstrip()
    if text.startswith("NET/") and (found := _GDR.match(text)):
        kind = RemarkKind.GDR_ENABLED if found[1] == "Enabled" else RemarkKind.GDR_DISABLED
        return Note(kind, (found[2], found[3]), text)
    for kind, pattern in _FORMS.get("CPU/" if text.startswith("CPU/") else text.partition(" ")[0], ()):
        if found := pattern.match(text):
            if kind is RemarkKind.SOCKET_INTERFACES:
                return Note(kind, tuple(_INTERFACE.findall(text)), text)
            groups = tuple(group or "" for group in found.groups())
            if kind in _ABOUT_OWN_GPU:
                bus = _own_bus_id(groups[0], own)
                return None if bus is None else Note(kind, (format_bus_id(bus), groups[1]), text)
            about = tuple(format_bus_id(int(group, 16)) for group in groups) if kind in _ABOUT_BUS_IDS else groups
            return Note(kind, about, text)
    return None


def _own_bus_id(gpu: str, own: OwnGpu | None) -> int | None:
    if own is None:
        return int(gpu, 16) if len(gpu) >= _SHORTEST_BUS_ID else None
    return own.bus if gpu in (f"{own.bus:x}", str(own.rank)) else None


def parse_setting(message: bytes) -> tuple[str, str] | None:
    """Parse a variable and its value: 'NCCL_P2P_DISABLE set by environment to 1.' or 'NCCL_IB_HCA set to mlx5_0'."""
    found = _SETTING.match(message[:_LONGEST])
    if found is None:
        return None
    value = found[2].decode("utf-8", "replace").strip()
    number = value.removesuffix(".")
    return found[1].decode(), number if number.lstrip("-").isdigit() else value


_BY_SPACE = re.compile(r"(?:setenv|-g?env) +(NCCL_[A-Z0-9_]{1,60}) +(\S+)", re.ASCII)
_BY_EQUALS = re.compile(r"\b(NCCL_[A-Z0-9_]{1,60})=(\"[^\"]*\"|'[^']*'|(?:(?!,[A-Z_]+=)[^\s;&|'\"\\])*)", re.ASCII)


def parse_command(text: str) -> list[tuple[str, str]]:
    """Return the NCCL variables that a command sets, with their values.

    It finds the forms `NAME=1 mpirun`, `-x NAME=1`, `--env NAME=1`, `export NAME=1` and `setenv NAME 1`.
    """
    found = [*_BY_EQUALS.findall(text), *_BY_SPACE.findall(text)]
    return [(name, value.strip("\"'")) for name, value in found]


def parse_failed_call(message: bytes) -> ReturnedError | None:
    """Parse 'transport/shm.cc:551 -> 2' or 'Failed to execute operation Connect from rank 2, retcode 2'.

    None for code 7, which means that the call is in progress.
    """
    found = _FAILED_CALL.match(message)
    if found is None or found[3] == _IN_PROGRESS:
        return None
    return ReturnedError((found[1] or found[2]).decode(), int(found[3]))


def parse_paths(message: bytes) -> dict[tuple[str, str], str]:
    """Parse one row of NCCL's path matrix: 'GPU/60 :GPU/60 (0/5000.0/LOC) GPU/70 (2/240.0/NVL) ...'."""
    row = _PATHS.match(message)
    if row is None:
        return {}
    source = _bus(row[1])
    return {(source, _bus(found[1])): found[2].decode() for found in _PATH.finditer(message, row.end())}


def _bus(text: bytes) -> str:
    return format_bus_id(int(text, 16) & _LOCAL_BITS)


Key = TypeVar("Key")

ALL_PROCESSES = ""  # Stands for all processes if a command sets a variable
_MOST_PATHS = 2**16  # Enough for all pairs of GPUs on a thousand nodes

_MOST_VERSIONS = 32
_NUMBERS = re.compile(r"\b(?:0x)?[0-9a-f]*\d[0-9a-f]*\b")
"""Numbers in a complaint. Complaints that differ only in numbers count as one."""

_PLACE = re.compile(rb"(?:^| )([\w./-]{1,200}:\d{1,9})$", re.ASCII)
_MOST_MODELS = 32
_LONGEST_WARNING = 300
_LONGEST_SHOWN = 60

_WITHOUT_PEERS = b"platform lacks GPU P2P capability"
"""vLLM prints this if the driver refuses peer access between all GPUs."""

_COLLNET = re.compile(r"(?:^|/)coll_net\.(?:cc|h):", re.ASCII)
_CALLERS_OF_COLLNET = re.compile(r"^(?:transport|init)\.cc:", re.ASCII)
"""Source files through which a failed set-up of CollNet returns. NCCL then continues without CollNet."""

_LAST_ERROR = b"Last error:"
"""On the line after this text, PyTorch prints NCCL's last warning."""

_MOST_TAGS = 32
_LONGEST_OF_OTHERS = 1024
_LONGEST_END = 256

_OF_TOPOLOGY = (b"GPU/", b"+ ", b"  ", b"Pattern ")
_BEGINNINGS = (b"NCCL_", b"Using ", b"CPU/", b"NET/", b"NCCL version ", *_OF_TOPOLOGY)


def may_be_noted(message: bytes) -> bool:
    """True if a message starts like one that explains a choice."""
    return message.startswith(_BEGINNINGS) or message.partition(b" ")[0] in FIRST_WORDS


class Notes:
    """The settings, networks, remarks, paths, complaints and failed calls from a log.

    `reached` has the exceeded limits.
    """

    def __init__(self, reached: ReachedLimits) -> None:
        self._reached = reached
        self._tellers = 0
        self._warning: tuple[str, str, bytes, bytes] | None = None
        self._tests, self._tracebacks, self._collectives = (
            endings.TestRuns(),
            endings.Tracebacks(),
            endings.FailedCollectives(),
        )
        self._before_last_error: dict[bytes, None] = {}
        self._without_collnet: dict[str, None] = {}
        self.versions: dict[str, None] = {}
        self.paths: dict[tuple[str, str, str], str] = {}
        self.models: dict[str, None] = {}
        self.listed_models: dict[str, None] = {}
        self.listed_ranks: dict[int, set[tuple[str, int]]] = {}
        self.nvlink_hosts: dict[str, None] = {}
        self._complaints: dict[str, tuple[str, Counter[str]]] = {}
        self._failed_calls: dict[ReturnedError, dict[str, None]] = {}
        self._warned: dict[ReturnedError, str] = {}
        self._last_warnings: dict[str, str] = {}
        self._settings: dict[tuple[str, str], dict[str, None]] = {}
        self._networks: dict[str, dict[str, None]] = {}
        self._remarks: dict[tuple[RemarkKind, tuple[str, ...]], tuple[Note, dict[str, None]]] = {}

    def add(self, host: str, process: str, message: bytes, own: OwnGpu | None = None) -> None:
        """Record a message of level INFO if it explains a choice."""
        if message.startswith(b"NCCL_"):
            self._keep(self._settings, parse_setting(message), process)
        elif message.startswith(b"Using "):
            network = re.match(rb"Using network (.{1,60})", message)
            name = None if network is None else network[1].decode("ascii", "replace").strip()
            self._keep(self._networks, name, process)
        elif message.startswith(b"NCCL version "):
            self.add_version(message)
        elif message.startswith(_OF_TOPOLOGY):
            if any(sign in message for sign in _NVLINK_SIGNS):
                self.nvlink_hosts[host] = None
            if len(self.paths) < _MOST_PATHS:
                self.paths |= {(host, *pair): path for pair, path in parse_paths(message).items()}
        elif note := parse_remark(message, own):
            key = note.kind, note.about
            if key in self._remarks or self._has_room(len(self._remarks), limits.MOST_REMARKS, "remarks", note.text):
                self._tell(self._remarks.setdefault(key, (note, {}))[1], process)

    def add_command(self, text: str) -> None:
        """Record the NCCL variables that a command sets."""
        for name, value in parse_command(text):
            self._keep(self._settings, (name, value), ALL_PROCESSES)

    def add_version(self, line: bytes) -> None:
        """Record NCCL's version. With NCCL_DEBUG=VERSION, the line has no host and process."""
        version = _VERSION.search(line)
        if version is not None and len(self.versions) < _MOST_VERSIONS:
            self.versions[version[1].decode()] = None

    def add_warning(self, host: str, process: str, message: bytes, head: bytes) -> None:
        """Record a message of level WARN. Later lines may continue it.

        `head` is the text before the message. For failed CUDA calls, it ends with the source location in NCCL.
        """
        self.end_warning()
        self._warning = host, process, message.strip(), head

    def continues_warning(self, line: bytes) -> bool:
        """True if a line continues the last warning. It must be indented, or the warning must still be empty."""
        if self._warning is None:
            return False
        host, process, message, head = self._warning
        text = line.strip()
        is_next = line[:1] in (b" ", b"\t") or not message
        if not text or not is_next or len(message) > _LONGEST_WARNING:
            self.end_warning()
            return False
        self._warning = host, process, b" ".join(filter(None, (message, text))), head
        return True

    def end_warning(self) -> None:
        """End the last warning, so that no line can continue it."""
        if self._warning is None:
            return
        (host, process, message, head), self._warning = self._warning, None
        text = message[:_LONGEST_WARNING].decode("utf-8", "replace").strip()
        if message.startswith(b"Cuda failure") and (place := _PLACE.search(head)):
            text += f" in {place[1].decode()}"
        self._complain(text, process)
        self._last_warnings[process] = text
        if not message.startswith(b"Cannot initialize CollNet"):
            self._without_collnet.pop(process, None)
        self.add(host, process, message)

    def add_failed_call(self, process: str, call: ReturnedError) -> None:
        """Record an error that an NCCL function returned.

        Skip errors from the set-up of CollNet, because NCCL continues without CollNet.
        """
        self.end_warning()
        if _COLLNET.search(call.place):
            self._without_collnet[process] = None
            return
        if process in self._without_collnet and _CALLERS_OF_COLLNET.search(call.place):
            return
        self._keep(self._failed_calls, call, process)
        if call in self._failed_calls:
            self._warned.setdefault(call, self._last_warnings.get(process, ""))

    def add_other(self, line: bytes) -> None:
        """Record what a line of another program reports about GPUs or failed NCCL calls."""
        for tag in self._before_last_error:
            if line.startswith(tag):
                del self._before_last_error[tag]
                self._complain(line[len(tag) :][:_LONGEST_WARNING].decode("utf-8", "replace").strip(), "")
                break
        if failed := self._collectives.add(line):
            self._complain(failed, "")
        if not endings.says_something(line) or pasted.is_told_by_person(line.decode("utf-8", "replace")):
            return
        if len(line) > _LONGEST_OF_OTHERS:
            # Keep the end of the line, because an exit code follows the command with all its arguments.
            line = line[: _LONGEST_OF_OTHERS - _LONGEST_END] + b" " + line[-_LONGEST_END:]
        self._add_relevant(line)

    def _add_relevant(self, line: bytes) -> None:
        """Record the content of a line that contains a relevant word of another program."""
        self._tests.add(line)
        self._tracebacks.add(line)
        if (whole := line.rstrip()).endswith(_LAST_ERROR) and len(self._before_last_error) < _MOST_TAGS:
            self._before_last_error[whole.removesuffix(_LAST_ERROR)] = None
        if diagnostic := endings.parse_diagnostic(line):
            process, text = diagnostic
            self._complain(text, process)
        elif _WITHOUT_PEERS in line:
            text = line[line.index(_WITHOUT_PEERS) :].decode("utf-8", "replace").strip()
            self._remarks.setdefault((RemarkKind.DRIVER_REFUSED, ()), (Note(RemarkKind.DRIVER_REFUSED, (), text), {}))
        elif error := endings.parse_program_error(line):
            self._complain(error, "")
        self._add_device(line)

    def _add_device(self, line: bytes) -> None:
        """Record the rank and the GPU model from a line of a device list."""
        if (listed := endings.parse_listed_rank(line)) and len(self.listed_ranks) < limits.MOST_LOG_RANKS:
            self.listed_ranks.setdefault(listed[0], set()).add(listed[1:])
        if model := endings.parse_gpu_model(line):
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
            most = f"{limits.MOST_TELLERS} distinct lines of different processes"
            self._reached.end(f"more than {most}", most)

    def _has_room(self, count: int, most: int, what: str, text: str) -> bool:
        if count >= most:
            self._reached.pass_over(f"one more: {text[:_LONGEST_SHOWN]}", f"{most} {what}")
        return count < most

    @property
    def host_ids(self) -> dict[str, str]:
        """NCCL_HOSTID by process. NCCL uses it to identify the machine."""
        return {
            process: value
            for (name, value), processes in self._settings.items()
            for process in processes
            if name == "NCCL_HOSTID"
        }

    def complaints(self) -> tuple[Complaint, ...]:
        """Return NCCL's warnings and the errors of other programs, in order of appearance."""
        self.end_warning()
        if failed := self._collectives.end():
            self._complain(failed, "")
        found = tuple(
            Complaint(text, counts.total(), tuple(filter(None, counts))) for text, counts in self._complaints.values()
        )
        missing_ends = filter(None, (self._tests.complaint(), self._tracebacks.complaint()))
        return (*found, *(Complaint(text, count, ()) for text, count in missing_ends))

    def failed_calls(self) -> tuple[FailedCall, ...]:
        """Return the failed NCCL calls, in order of appearance."""
        self.end_warning()
        return tuple(
            FailedCall(*key, tuple(processes), self._warned[key]) for key, processes in self._failed_calls.items()
        )

    def addresses(self) -> Mapping[str, str]:
        """Return the network address that each process uses for bootstrap."""
        return {
            process: note.about[1]
            for note, processes in self._remarks.values()
            if note.kind is RemarkKind.BOOTSTRAP
            for process in processes
        }

    def settings(self) -> tuple[LoggedSetting, ...]:
        """Return the settings, sorted by name."""
        return tuple(
            LoggedSetting(*key, tuple(filter(None, processes)), ALL_PROCESSES in processes)
            for key, processes in sorted(self._settings.items())
        )

    def networks(self) -> Mapping[str, int]:
        """Return the number of processes that use each network."""
        return {name: len(processes) for name, processes in self._networks.items()}

    def remarks(self) -> tuple[Remark, ...]:
        """Return the remarks, in order of appearance."""
        self.end_warning()
        return tuple(Remark(note, tuple(processes)) for note, processes in self._remarks.values())

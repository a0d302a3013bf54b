"""Faults that --fault simulates, such as `node3.gpu5:nvlink=12`. `FAULT_KEYS` lists all of them."""

import difflib
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import partial

from msgspec import Struct

from gpubench.errors import UsageError
from gpubench.model.facts.health import HEALTH_CONDITIONS
from gpubench.model.facts.process import THROTTLE_REASONS
from gpubench.model.profiles.profile import P2P_STATUSES

GRAMMAR = (
    "[nodeI.]gpuJ:KEY=VALUE, [nodeI.]nicJ:KEY=VALUE, [nodeI.]linkI-J:KEY=VALUE (a pair of GPUs), "
    "nodeI:KEY=VALUE, KEY=VALUE alone for every node, and for scan leafI:KEY=VALUE or leafI.railJ:KEY=VALUE, "
    "with indices from 0, node0 by default, and commas between keys: gpu5:nvlink=12,width=8"
)

_SUBJECT = re.compile(
    r"(?:node(?P<node>\d{1,6})\.)?(?:(?P<kind>gpu|nic)(?P<index>\d{1,4})|link(?P<first>\d{1,4})-(?P<second>\d{1,4}))"
    r"|node(?P<whole>\d{1,6})|leaf(?P<leaf>\d{1,6})(?:\.rail(?P<rail>\d{1,4}))?",
    re.ASCII,
)
_NUMBER = re.compile(r"\d{1,9}(?:\.\d+)?|\.\d+", re.ASCII)
_REFUSALS = P2P_STATUSES[1:]
_WIDTHS = ("1", "2", "4", "8", "16")
_GENERATIONS = ("1", "2", "3", "4", "5", "6")


class Subject(StrEnum):
    """The component that a fault affects."""

    GPU = "gpu"
    NIC = "nic"
    LINK = "link"
    NODE = "node"
    LEAF = "leaf"
    RAIL = "rail"


class ValueKind(StrEnum):
    """The type of a fault's value."""

    WORD = "word"
    COUNT = "N"
    FACTOR = "FACTOR"
    RATE = "RATE"
    VERSION = "VERSION"
    ROUND = "roundN"
    VARIABLE = "NCCL_NAME=VALUE"


_FORMS = {
    ValueKind.COUNT: (re.compile(r"\d{1,9}", re.ASCII), None, "a whole number"),
    ValueKind.FACTOR: (_NUMBER, 1.0, "above 0 and at most 1"),
    ValueKind.RATE: (_NUMBER, float("inf"), "Gb/s, above 0"),
    ValueKind.VERSION: (re.compile(r"\d{1,9}(\.\d{1,9}){0,9}", re.ASCII), None, "numbers with dots"),
    ValueKind.ROUND: (re.compile(r"round([1-9]|1[01])", re.ASCII), None, "round1 to round11"),
    ValueKind.VARIABLE: (re.compile(r"NCCL_[A-Z0-9_]+=.*", re.ASCII), None, "an NCCL variable with its value"),
}
"""By type: the pattern of a value, its maximum if it is a positive number, and a description for help texts."""

_EXAMPLES = {
    ValueKind.COUNT: "9",
    ValueKind.FACTOR: "0.5",
    ValueKind.RATE: "200",
    ValueKind.VERSION: "550.54.15",
    ValueKind.ROUND: "round2",
    ValueKind.VARIABLE: "NCCL_P2P_DISABLE=1",
}


class FaultKey(Struct, frozen=True):
    """One kind of fault: the component that it affects, its key and possible values, and its effect.

    `command` is set if only one command can simulate the fault. `changes` lists what it affects: facts, copies or
    collectives.
    """

    subject: Subject
    key: str
    effect: str
    kind: ValueKind = ValueKind.WORD
    words: tuple[str, ...] = ()
    command: str = ""
    changes: tuple[str, ...] = ("facts",)

    @property
    def values(self) -> str:
        """Possible values for a help text, such as 'pending|failure', 'N' or 'FACTOR'."""
        return "|".join(self.words) or self.kind.value

    @property
    def form(self) -> str:
        """Description of the possible values, empty if `values` lists them."""
        return "" if self.kind is ValueKind.WORD else _FORMS[self.kind][2]

    @property
    def example(self) -> str:
        """A valid value for error messages and shell completion."""
        return self.words[0] if self.words else _EXAMPLES[self.kind]

    def accepts(self, value: str) -> bool:
        """True if the value has a valid form. Whether it fits the machine is checked when the fault is applied."""
        if self.kind is ValueKind.WORD:
            return value in self.words
        form, most, _ = _FORMS[self.kind]
        return form.fullmatch(value) is not None and (most is None or 0 < float(value) <= most)


def list_fault_keys(command: str) -> Iterator[tuple[str, str]]:
    """Yield each component that a command can break, with its keys and their values."""
    for subject, part in FAULT_PARTS.items():
        keys = [key for key in FAULT_KEYS if key.subject is subject and key.command in ("", command)]
        if keys:
            # Help texts break lines only at spaces, so separate long lists of values by ' or '.
            values = {key.key: key.values if len(key.values) < 30 else key.values.replace("|", " or ") for key in keys}
            yield part, ", ".join(f"{key}={value}" for key, value in values.items())


FAULT_PARTS = {
    Subject.GPU: "[nodeI.]gpuJ",
    Subject.NIC: "[nodeI.]nicJ",
    Subject.LINK: "[nodeI.]linkI-J",
    Subject.NODE: "nodeI",
    Subject.LEAF: "leafI",
    Subject.RAIL: "leafI.railJ",
}
"""Syntax of components in --fault. I and J are numbers that count from 0."""


def _scan_fault(subject: Subject, key: str, effect: str, kind: ValueKind = ValueKind.FACTOR) -> FaultKey:
    return FaultKey(subject, key, effect, kind, command="scan")


ENV = "env"
FACTS, COPIES, COLLECTIVES = "facts", "copies", "collectives"
_MEASURED, _ALL = (COPIES, COLLECTIVES), (FACTS, COPIES, COLLECTIVES)
TRAFFIC = ("training", "staged", "sockets", "loading", "checkpoint", "inference", "waiting", "idle")
"""Kinds of jobs that a simulated machine can run for `gpubench watch`."""

HALVE_CLOCKS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake")
"""These throttle reasons reduce the SM clock to half or less (nvidia-smi manual). Copy engines have other clocks."""

_BETWEEN_NODES = (FACTS, COLLECTIVES)
_WIDTH_OF_GPU = "the GPU's PCIe link to host memory is trained to this width"
_GENERATION_OF_GPU = "the GPU's PCIe link to host memory is trained to this generation"

_gpu, _nic, _link, _node = (
    partial(FaultKey, subject) for subject in (Subject.GPU, Subject.NIC, Subject.LINK, Subject.NODE)
)

FAULT_KEYS = (
    _gpu("nvlink", "only N NVLinks of the GPU are active", ValueKind.COUNT, changes=_ALL),
    _gpu("width", _WIDTH_OF_GPU, words=_WIDTHS, changes=_ALL),
    _gpu("generation", _GENERATION_OF_GPU, words=_GENERATIONS, changes=_ALL),
    _gpu("p2p", "NVML refuses peer access with every other GPU", words=_REFUSALS, changes=_ALL),
    _gpu("cuda_peer", "CUDA refuses peer access, although NVML reports OK", words=("no",), changes=_ALL),
    _gpu("lost", "it fell off the bus: the driver lists it but cannot reach it", words=("yes",), changes=_ALL),
    _gpu("missing", "the GPU is missing, and the GPUs after it have lower numbers", words=("yes",), changes=_ALL),
    _gpu("mig", "MIG is on, so peer access is refused", words=("on",), changes=_ALL),
    _gpu("ecc", "ECC is off", words=("off",)),
    _gpu(
        "throttle",
        "its clocks are throttled for this reason; hardware reasons (`hw_`) halve them, which slows collectives",
        words=THROTTLE_REASONS,
        changes=(FACTS, COLLECTIVES),
    ),
    _gpu("rows", "row remapping in GPU memory is pending until a reset, or has failed", words=("pending", "failure")),
    _gpu(
        "fabric",
        "it has not joined the NVLink fabric, so peer access is refused",
        words=("not_started", "in_progress"),
        changes=_ALL,
    ),
    _gpu("health", "the NVLink fabric reports this condition", words=HEALTH_CONDITIONS),
    _gpu(
        "speed",
        "the GPU's links reach this share of their bandwidth (0 to 1), but all facts look healthy",
        ValueKind.FACTOR,
        changes=_MEASURED,
    ),
    _gpu("errors", "the GPU has counted N uncorrectable memory errors", ValueKind.COUNT),
    _gpu("temperature", "its chip is at N °C", ValueKind.COUNT),
    _gpu("replays", "the PCIe link has replayed N packets", ValueKind.COUNT),
    _gpu("busy", "an idle process with the pid N uses memory of the GPU", ValueKind.COUNT),
    _gpu("hang", "its rank hangs before an all-reduce (with --hang)", words=("yes",), command="watch"),
    _nic("state", "the NIC's port is not active", words=("down", "init"), changes=_BETWEEN_NODES),
    _nic("rate", "the NIC's port runs at this rate, in Gb/s", ValueKind.RATE, changes=_BETWEEN_NODES),
    _nic("width", "the NIC's PCIe link is trained to this width", words=_WIDTHS, changes=_BETWEEN_NODES),
    _nic("generation", "the NIC's PCIe link is trained to this generation", words=_GENERATIONS, changes=_BETWEEN_NODES),
    _nic("errors", "the NIC's port has counted N symbol errors", ValueKind.COUNT),
    _nic("missing", "the NIC is missing", words=("yes",), changes=_BETWEEN_NODES),
    _scan_fault(
        Subject.NIC, "bandwidth", "the NIC reaches this share of its bandwidth (0 to 1), but all facts look healthy"
    ),
    _link("nvlink", "only N NVLinks connect the two GPUs (without a switch)", ValueKind.COUNT, changes=_ALL),
    _link("p2p", "NVML refuses peer access between the two GPUs", words=_REFUSALS, changes=_ALL),
    _link(
        "staged",
        "copies and NCCL traffic between the two GPUs go through host memory, but all facts look healthy",
        words=("yes",),
        changes=_MEASURED,
    ),
    _link(
        "corrupts",
        "data that the GPUs write to each other are corrupted, but all facts look healthy",
        words=("yes",),
        changes=_MEASURED,
    ),
    _link(
        "speed",
        "copies between the two GPUs reach this share of their bandwidth (0 to 1), but all facts look healthy",
        ValueKind.FACTOR,
        changes=_MEASURED,
    ),
    _link("ipc", "UCX does not use CUDA IPC between the two GPUs", words=("no",), command="kv", changes=(COPIES,)),
    _node("driver", "the node has this driver version", ValueKind.VERSION),
    _node("cuda", "the driver supports CUDA up to this version", ValueKind.VERSION),
    _node("peermem", "the module nvidia-peermem is loaded (yes) or not (no)", words=("no", "yes")),
    _node("acs", "ACS sends traffic between GPUs up to the PCIe root and back", words=("on",)),
    _node("iommu", "the IOMMU translates addresses", words=("on",)),
    _node("clique", "the node's GPUs are in this clique of the NVLink domain", ValueKind.COUNT, changes=_BETWEEN_NODES),
    _node("imex", "the service nvidia-imex is not running", words=("down",), changes=_BETWEEN_NODES),
    _node(
        "mnnvl",
        "NCCL uses no NVLinks to other nodes, but all facts look healthy",
        words=("off",),
        changes=(COLLECTIVES,),
    ),
    _node("silent", "this source of facts never answers", words=("nvml", "cuda", "sysfs")),
    _node("driver_missing", "no NVIDIA driver is loaded", words=("yes",)),
    _node(
        ENV,
        "its ranks have this NCCL variable (repeatable; not for scan and kv)",
        ValueKind.VARIABLE,
        changes=(COLLECTIVES,),
    ),
    _node(
        "kv",
        "both processes of a transfer allocate memory this way, have separate PID namespaces, or have "
        "UCX_TLS=^cuda_ipc",
        words=("expandable", "async", "managed", "pid", "ucx_tls"),
        command="kv",
        changes=(COPIES,),
    ),
    _node("traffic", "watch sees this kind of job (default: training)", words=TRAFFIC, command="watch"),
    _scan_fault(Subject.NODE, "bandwidth", "all NICs of the node reach this share of their bandwidth (0 to 1)"),
    _scan_fault(Subject.NODE, "dips", "this share of the node's measurements (0 to 1) is 5 to 40 % too low"),
    _scan_fault(Subject.NODE, "dies", "the node stops answering in this round", ValueKind.ROUND),
    _scan_fault(Subject.NODE, "hangs", "the node's workers hang, starting in this round", ValueKind.ROUND),
    _scan_fault(Subject.LEAF, "bandwidth", "the leaf's nodes reach this share of their bandwidth (0 to 1)"),
    _scan_fault(
        Subject.LEAF, "uplink", "traffic from this leaf to other leaves reaches this share of its bandwidth (0 to 1)"
    ),
    _scan_fault(
        Subject.RAIL, "bandwidth", "the leaf's nodes reach this share of their bandwidth (0 to 1) on this rail"
    ),
    _scan_fault(
        Subject.RAIL,
        "uplink",
        "traffic from this leaf to other leaves reaches this share of its bandwidth (0 to 1) on this rail",
    ),
)


class Fault(Struct, frozen=True):
    """Faults of one component, with their keys and values in `settings`.

    `second` is the second GPU of a link, or the rail of a leaf. If `node` is None, the component is on node 0.
    """

    subject: Subject
    settings: tuple[tuple[str, str], ...]
    node: int | None = None
    index: int | None = None
    second: int | None = None

    @property
    def node_number(self) -> int:
        return self.node or 0

    @property
    def command(self) -> str:
        """The only command that can simulate this fault, empty if all commands can."""
        known = {key.key: key.command for key in FAULT_KEYS if key.subject is self.subject and key.command}
        return next((known[key] for key, _ in self.settings if key in known), "")

    def changes(self, measured: str, unused: str = "") -> bool:
        """True if the fault changes the results of `measured`: copies or collectives. The key `unused` is ignored."""
        keys = {key: value for key, value in self.settings if key != unused}
        if keys.get("throttle", HALVE_CLOCKS[0]) not in HALVE_CLOCKS and measured == COLLECTIVES:
            del keys["throttle"]
        return any(measured in key.changes for key in FAULT_KEYS if key.subject is self.subject and key.key in keys)

    def get(self, key: str) -> str | None:
        return dict(self.settings).get(key)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that the fault sets on its node."""
        pairs = (value.partition("=") for key, value in self.settings if key == ENV)
        return {name: value for name, _, value in pairs}

    @property
    def breaks_hardware(self) -> bool:
        """False if the fault only sets environment variables."""
        return any(key != ENV for key, _ in self.settings)

    @property
    def where(self) -> str:
        """The component in the syntax of --fault, such as 'node3.gpu5', 'link0-1' or 'node2'."""
        if self.subject is Subject.NODE:
            return f"node{self.node_number}"
        if self.subject in (Subject.LEAF, Subject.RAIL):
            return f"leaf{self.index}" + ("" if self.second is None else f".rail{self.second}")
        node = "" if self.node is None else f"node{self.node}."
        return f"{node}{self.subject}{self.index}" + ("" if self.second is None else f"-{self.second}")

    def __str__(self) -> str:
        return f"{self.where}:" + ",".join(f"{key}={value}" for key, value in self.settings)


def parse_fault(text: str) -> Fault:
    """Parse a fault in the syntax of `GRAMMAR`. Raises UsageError, which suggests the most similar key."""
    subject, colon, settings = text.strip().partition(":")
    match = _SUBJECT.fullmatch(subject)
    if match is None or not colon:
        raise UsageError(f"--fault {text!r} names no part that can break", expected=GRAMMAR)
    if match["whole"] is not None:
        return Fault(Subject.NODE, _parse_settings(text, Subject.NODE, settings), node=int(match["whole"]))
    if match["leaf"] is not None:
        kind = Subject.LEAF if match["rail"] is None else Subject.RAIL
        rail = None if match["rail"] is None else int(match["rail"])
        return Fault(kind, _parse_settings(text, kind, settings), None, int(match["leaf"]), rail)
    node = None if match["node"] is None else int(match["node"])
    if match["first"] is None:
        kind = Subject(match["kind"])
        return Fault(kind, _parse_settings(text, kind, settings), node, int(match["index"]))
    first, second = int(match["first"]), int(match["second"])
    if first == second:
        raise UsageError(f"--fault {text!r}: a link connects two different GPUs", expected=GRAMMAR)
    return Fault(Subject.LINK, _parse_settings(text, Subject.LINK, settings), node, first, second)


def parse_faults(text: str, nodes: int) -> tuple[Fault, ...]:
    """Parse a fault. If it names no component, as in 'imex=down', return the fault for every node. Raises
    UsageError.
    """
    if (":" in text and not text.strip().startswith(f"{ENV}=")) or "=" not in text:
        return (parse_fault(text),)
    settings = _parse_settings(text, Subject.NODE, text)
    return tuple(Fault(Subject.NODE, settings, node) for node in range(nodes))


def complete_fault(incomplete: str) -> list[str]:
    """Return shell completions of a fault: components, or keys and values after the colon."""
    part, colon, settings = incomplete.partition(":")
    match = _SUBJECT.fullmatch(part)
    if not colon or match is None:
        return [f"{name}:" for name in ("gpu0", "nic0", "link0-1", "node0", "node0.gpu0", "leaf0", "leaf0.rail0")]
    kinds = {"whole": Subject.NODE, "rail": Subject.RAIL, "leaf": Subject.LEAF, "first": Subject.LINK}
    subject = next((kind for name, kind in kinds.items() if match[name] is not None), None) or Subject(match["kind"])
    before = part + colon + "".join(settings.rpartition(",")[:2])
    keys = [key for key in FAULT_KEYS if key.subject is subject]
    return [f"{before}{key.key}={value}" for key in keys for value in key.words or (key.example,)]


def _parse_settings(text: str, subject: Subject, settings: str) -> tuple[tuple[str, str], ...]:
    known = {key.key: key for key in FAULT_KEYS if key.subject is subject}
    parsed: dict[str, tuple[str, str]] = {}
    for setting in settings.split(","):
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not equals or key not in known:
            raise _key_error(text, subject, (key, value), known)
        if not known[key].accepts(value):
            raise UsageError(f"--fault {text!r}: {key} cannot be {value!r}", expected=f"{key}={_described(known[key])}")
        what = value.partition("=")[0] if key == ENV else key
        if what in parsed:
            raise UsageError(f"--fault {text!r} sets {what} twice", expected=GRAMMAR)
        parsed[what] = key, value
    return tuple(parsed.values())


def _described(key: FaultKey) -> str:
    return f"{key.values} ({key.effect}{'; ' + _FORMS[key.kind][2] if key.kind in _FORMS else ''})"


def _key_error(text: str, subject: Subject, setting: tuple[str, str], known: Mapping[str, FaultKey]) -> UsageError:
    """Return the error for an unknown key, or for a key without a value. It suggests the most similar key."""
    key, value = setting
    where = "".join(text.strip().partition(":")[:2]) if ":" in text else ""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    next_step = ""
    if near:
        nearest = known[near[0]]
        fit = value if nearest.accepts(value) else nearest.example
        next_step = f"--fault {where}{nearest.key}={fit}"
    if key in known:
        return UsageError(
            f"--fault {text!r}: {key} has no value", expected=f"{key}={_described(known[key])}", next_step=next_step
        )
    keys = f"one of the keys of a {subject}: {', '.join(known)}"
    return UsageError(f"--fault {text!r}: a {subject} has no key {key!r}", expected=keys, next_step=next_step)

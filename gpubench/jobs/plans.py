"""The options of each command in one dataclass, which is passed from the command line to the ranks.

Plans of collectives are in `gpubench.jobs.collective.plan`. Plans of `plan` and `overlap` are in `gpubench.training`. A
plan gets its `presentation` after all other options are checked.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from gpubench.errors import UsageError, invalid_choice
from gpubench.formats.registry import Presentation
from gpubench.jobs.sources import Recording, Simulation, SimulationOptions, Source, choose_source
from gpubench.model.terms.options import (
    INPUT,
    JUDGE,
    MEASURE,
    OUTPUT,
    SIMULATE,
    RequiredPath,
    argument,
    expected_gpus,
    flag,
    judging_profile,
    one_of,
    option,
    parse_paths,
    read_from,
    require_path_option,
    required_argument,
    sharing_ranks,
    step_timeout,
    strict_option,
    unknown_choice,
)
from gpubench.model.terms.units import parse_sizes

if TYPE_CHECKING:
    from gpubench.measure.watch.jobs import WatchedJobs
    from gpubench.model.paths.transport import EvidenceUse
    from gpubench.simulated.machine import SimulatedMachine


def parse_collective(text: str) -> str:
    """Return gpubench's name of a collective. Names from nccl-tests are accepted too. Raises UsageError for an
    unknown name.
    """
    from gpubench.readers.results.nccl_tests.table import COLLECTIVE_NAMES

    name = text.lower().removesuffix("_perf")
    name = COLLECTIVE_NAMES.get(name, name)
    if name not in COLLECTIVE_NAMES.values():
        raise unknown_choice("--collective", text, tuple(COLLECTIVE_NAMES.values()))
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandPlan:
    """Options that all commands with a verdict share."""

    strict: bool = strict_option()
    presentation: Presentation = field(default_factory=Presentation)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePlan(CommandPlan):
    """Options of commands that read this machine, a simulated one or a recorded one."""

    help_group: ClassVar = MEASURE

    timeout_s: float = step_timeout("reading the driver of a node", default=20.0)
    simulation: Simulation | None = read_from(SimulationOptions, default=None)
    recording: Recording = field(default_factory=Recording)

    @property
    def source(self) -> Source:
        return choose_source(self.timeout_s, simulation=self.simulation, replay=self.recording.replay)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainPlan(CommandPlan):
    logs: list[str] = required_argument("LOG", "Files, folders of files, or - for standard input.")
    require_path: tuple[RequiredPath, ...] = require_path_option()


_GPUS = re.compile(r"(\d{1,3})(?:-(\d{1,3}))?", re.ASCII)


def parse_gpus(text: str) -> tuple[int, ...]:
    """Parse GPU numbers and ranges, for example '0,2-3'. Raises UsageError."""
    found: list[int] = []
    for part in text.split(","):
        match = _GPUS.fullmatch(part.strip())
        first, last = (-1, -2) if match is None else (int(match[1]), int(match[2] or match[1]))
        if last < first:
            raise UsageError(f"--gpus {text!r} is not a list of GPUs", expected="numbers and ranges: 0,2-3")
        found += range(first, last + 1)
    repeated = next((gpu for gpu in found if found.count(gpu) > 1), None)
    if repeated is not None:
        raise UsageError(f"--gpus {text!r} names GPU{repeated} twice", expected="each GPU once: 0,2-3")
    return tuple(found)


def _read_hosts(text: str) -> Mapping[str, int | None]:
    from gpubench.ranks.launch import read_hosts

    return read_hosts(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Hosts and GPUs of a run.

    - `gpus`: GPUs of each host, or None for all that CUDA shows
    - `hosts`: names of hosts with their slots, or None for this host or the ranks of a launcher
    - `typed`: values of all options on the command line, for the ranks on other hosts
    """

    help_group: ClassVar = MEASURE

    gpus: tuple[int, ...] | None = option(
        "LIST", "Use only these GPUs of each host, numbered as in gpubench topo: 0,2-3.", read=parse_gpus, common=True
    )
    hosts: Mapping[str, int | None] | None = option(
        "FILE|A,B",
        "Start one rank per GPU on these hosts with mpirun: a file, or names with commas.",
        read=_read_hosts,
        common=True,
    )
    slurm: bool = flag(
        "Start one rank per GPU with srun, on all nodes of this Slurm allocation.", name="--slurm/--no-slurm"
    )
    typed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def are_elsewhere(self) -> bool:
        """True if this process only starts ranks, by mpirun or srun, and presents their report."""
        return self.hosts is not None or self.slurm


def _read_folder(text: str) -> Path:
    if not text:
        raise UsageError("--logs is empty", expected="--logs DIR", reason="a variable that is not set")
    return Path(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan(CommandPlan):
    job: list[str] = required_argument("COMMAND", "The job, as you start it without gpubench.")
    logs: Path | None = option(
        "DIR",
        "New folder for the logs (default: gpubench-run-DATE-PID), shared by all hosts of the job.",
        read=_read_folder,
        common=True,
        group=OUTPUT,
    )
    hang_s: float | None = option(
        "TIME",
        "While the job runs, name any rank that makes others wait this long, e.g. 60s.",
        name="--hang",
        read=lambda text: _parse_interval("--hang", text),
        common=True,
        group=MEASURE,
    )
    require_path: tuple[RequiredPath, ...] = require_path_option()


@dataclass(frozen=True, slots=True, kw_only=True)
class TopoPlan(MachinePlan):
    from_file: Path | None = option(
        "FILE",
        "Show a file: NCCL's XML, the text of nvidia-smi topo, rocm-smi --showtopo or amd-smi topology, or a snapshot.",
        name="--from",
        read=Path,
        common=True,
        group=INPUT,
    )
    causes: bool = flag(
        "Show causes of slow or host-staged paths, cures, and unread facts, instead of the devices.",
        common=True,
        group=OUTPUT,
    )
    software: bool = flag(
        "Show NCCL, MPI, UCX, PyTorch and other libraries instead of the devices: version, file, and programs that "
        "load them.",
        common=True,
        group=OUTPUT,
    )
    profile: str | None = judging_profile()
    expected_gpus: int | None = expected_gpus()
    targets: Targets = field(default_factory=Targets)

    @property
    def source(self) -> Source:
        return choose_source(
            self.timeout_s, simulation=self.simulation, replay=self.recording.replay, file=self.from_file
        )


_NICS = re.compile(r"(\d{1,3})\s*[x×*]\s*(\d{1,5}(?:\.\d{1,3})?)(e?)")


@dataclass(frozen=True, slots=True)
class Nics:
    """The NICs of each node: their number, and the rate of each NIC in Gbit/s. `is_ethernet` means Ethernet without
    RDMA.
    """

    count: int
    rate_gbit_s: float
    is_ethernet: bool = False

    @classmethod
    def of(cls, text: str) -> "Nics":
        """Parse NICs such as '8x400' or '4x200e'. Raises UsageError."""
        found = _NICS.fullmatch(text.strip())
        if found is None or not int(found[1]) or not float(found[2]):
            raise UsageError(
                f"--nics needs the number of NICs and their rate, not {text!r}",
                expected="the NICs of a node and the Gbit/s of each: 8x400, or 4x200e for plain Ethernet",
                next_step="--nics 8x400",
            )
        return cls(int(found[1]), float(found[2]), is_ethernet=bool(found[3]))

    def __str__(self) -> str:
        return f"{self.count}x{self.rate_gbit_s:g}{'e' if self.is_ethernet else ''}"


def parse_named_machine(text: str, *, joined_by_nics: bool) -> "SimulatedMachine":
    """Return the machine that --machine names, for example 'hgx-b200-8*2'. Raises UsageError.

    NVLink connects the trays of a rack, unless `joined_by_nics` is true because --nics is used.
    """
    from gpubench.profiles import load
    from gpubench.simulated.machine import SimulatedMachine, parse_machine

    machine = parse_machine(text, "--machine")
    own = load(re.split(r"[*/\s]", text.strip())[0])
    return SimulatedMachine(own, machine.nodes) if joined_by_nics and own.domain is None else machine


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPlan(CommandPlan):
    help_group: ClassVar = INPUT

    name: str = required_argument("FILE", "A result of gpubench or of another benchmark; - for standard input.")
    machine_name: str | None = option(
        "MACHINE",
        "Profile of the machine, if the table does not name it: hgx-b200-8, or 'hgx-b200-8*2' for 2 nodes.",
        name="--machine",
        completed_as="simulate",
        common=True,
    )
    nics: Nics | None = option(
        "NxGBIT",
        "NICs of each node of the table: 8x400, or 4x200e for plain Ethernet (default: as in the profile).",
        read=Nics.of,
        common=True,
    )
    collective: str | None = option(
        "NAME",
        "Collective of a table that does not name it, or the collective to show if there are several.",
        read=parse_collective,
        common=True,
    )

    @property
    def machine(self) -> "SimulatedMachine | None":
        """The machine that --machine names, or None without this option. Raises UsageError for an unknown name."""
        name = self.machine_name
        return None if name is None else parse_named_machine(name, joined_by_nics=self.nics is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePlan(CommandPlan):
    """Options of `compare`, which compares either files or the `last` results in a folder."""

    help_group: ClassVar = INPUT

    first: str | None = argument("BASE", "Old result, or with --last a folder of results (default: results/).")
    second: str | None = argument("NEW", "New result.")
    more_base: tuple[Path, ...] = option(
        "FILE",
        "Another run of the old side. Repeatable.",
        name="--base",
        read=parse_paths,
        several=True,
        without=(),
        common=True,
    )
    more_new: tuple[Path, ...] = option(
        "FILE",
        "Another run of the new side. Repeatable.",
        name="--new",
        read=parse_paths,
        several=True,
        without=(),
        common=True,
    )
    against: str | None = option(
        "NAME",
        "Compare with the baseline saved by --save-baseline NAME.",
        completed_as="against",
        common=True,
    )
    last: int | None = option(
        "N", "Compare the newest results in a folder with the N results before them.", min=1, common=True
    )
    threshold_percent: float | None = option(
        "PERCENT",
        "Call a row slower if it lost more than this share of its bandwidth, whatever the noise.",
        name="--threshold",
        min=0,
        max=99,
        common=True,
        group=JUDGE,
    )
    other_machine: bool = flag("Compare results of different machines, per GPU and per node, as ratios.", common=True)
    collective: str | None = option(
        "NAME", "Collective of files that do not name it, as nccl-tests before 2.17.", read=parse_collective
    )

    @property
    def folder(self) -> Path:
        return Path(self.first or "results")

    @property
    def base(self) -> tuple[Path, ...]:
        """The files of the old side. Empty if results in a folder are compared. Raises UsageError for an unknown
        baseline.
        """
        if self.last is not None or self.first is None:
            return ()
        from gpubench.readers.documents import result_path
        from gpubench.readers.results.history import find_baseline

        if self.against is None:
            return (result_path(self.first), *map(result_path, self.more_base))
        return (find_baseline(self.against, os.environ), *self.more_base)

    @property
    def new(self) -> tuple[Path, ...]:
        """The files of the new side. With --against, the first file on the command line is the new side."""
        from gpubench.readers.documents import result_path

        named = self.second if self.against is None else self.first
        return () if self.last is not None or named is None else (result_path(named), *map(result_path, self.more_new))


_DURATION = re.compile(r"(?P<number>\d{1,6}(?:\.\d{1,6})?)\s*(?P<unit>ms|s|m|h|)", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
_LEAST_INTERVAL, _MOST_INTERVAL = 0.1, 3600.0
_JOB = re.compile(r"\d+|[0-9A-Fa-f]{4,64}", re.ASCII)

INTERVAL_SECONDS, LONGER_INTERVAL_SECONDS = 1.0, 2.0
"""Default time between two readings. The longer one applies to nodes with more than four GPUs."""

_MOST_GPUS_A_SECOND = 4
_INTERVAL_SECONDS_OF_RAS = 10.0


class TypedSeconds(float):
    """A time in seconds, with its original `text` from the command line."""

    text: str

    @classmethod
    def of(cls, option: str, text: str) -> "TypedSeconds":
        """Parse a time such as '30s', '5m' or '500ms'. A plain number is in seconds. Raises UsageError."""
        match = _DURATION.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"{option} {text!r} is not a time",
                expected="a number followed by ms, s, m or h",
                next_step=f"{option} 30s",
            )
        seconds = cls(float(match["number"]) * _SECONDS[match["unit"]])
        seconds.text = text
        return seconds

    def check(self, option: str, least: float, most: float) -> None:
        """Raise UsageError if the time is not between `least` and `most` seconds."""
        if not least <= self <= most:
            raise UsageError(f"{option} {self.text} is {self:g} s", expected=f"{least:g} s to {most:g} s")


def _parse_interval(option: str, text: str) -> TypedSeconds:
    interval = TypedSeconds.of(option, text)
    interval.check(option, _LEAST_INTERVAL, _MOST_INTERVAL)
    return interval


def _parse_job(text: str) -> str:
    if not _JOB.fullmatch(text):
        raise UsageError(
            f"--job {text!r} is not a job",
            expected="a Slurm job ID, or at least four digits of a container ID",
            reason="" if text else "the variable is probably not set",
        )
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPlan(MachinePlan):
    """Options of `watch`.

    - `seconds` is None to watch until interrupted. With `until_traffic`, the time starts at the first traffic.
    - `gpus` has the GPU indices of the driver, or None for all GPUs.
    """

    interval: float | None = option(
        "TIME",
        "Time between two lines: 500ms, 1s, 1m (default: 1s; 2s on nodes with more than four GPUs; 10s with --hang).",
        read=lambda text: _parse_interval("--interval", text),
        common=True,
    )
    seconds: float | None = option(
        "TIME",
        "Stop after this time, e.g. 30s, 5m. Default: until interrupted (10s with --simulate, the whole recording with "
        "--replay).",
        name="--for",
        read=lambda text: TypedSeconds.of("--for", text),
        common=True,
    )
    until_traffic: bool = flag("Wait for the first traffic. --for starts to count then.", common=True)
    hang: bool = flag(
        "Ask NCCL's RAS every 10 s which rank keeps the others of its job waiting. No counters are read.", common=True
    )
    pid: list[int] | None = option("PID", "Watch only the jobs of this process. Repeatable.", common=True)
    job: str | None = option(
        "ID",
        "Watch only this Slurm job (its number) or container (the beginning of its id).",
        read=_parse_job,
        common=True,
    )
    gpus: tuple[int, ...] | None = option(
        "LIST", "Watch only these GPUs, numbered as in nvidia-smi: 0,2-3.", read=parse_gpus, common=True
    )
    require_path: tuple[RequiredPath, ...] = require_path_option()

    @property
    def interval_s(self) -> float:
        """The interval between two readings, or between two RAS queries, in seconds."""
        if self.interval is None:
            return _INTERVAL_SECONDS_OF_RAS if self.hang else INTERVAL_SECONDS
        return self.interval

    def set_default_interval(self, gpus: int) -> "WatchPlan":
        """Return the plan with the default interval for this number of GPUs, unless the user set one.

        The default keeps the load at 1 % of a core or less, and raises an alarm within 5 s.
        """
        if self.interval is not None or min(gpus, len(self.gpus or range(gpus))) <= _MOST_GPUS_A_SECOND:
            return self
        return replace(self, interval=min(LONGER_INTERVAL_SECONDS, self.seconds or LONGER_INTERVAL_SECONDS))

    @property
    def selection(self) -> "WatchedJobs":
        from gpubench.measure.watch.jobs import WatchedJobs

        return WatchedJobs(tuple(self.pid or ()), self.job)


SCAN_BACKENDS = ("nccl", "host")


def _parse_backend(text: str) -> str:
    if text not in SCAN_BACKENDS:
        raise invalid_choice("--backend", text, SCAN_BACKENDS)
    return text


class LeafFile(NamedTuple):
    """The leaf switch of each host, and the name of the file that it was read from."""

    name: str
    leaves: Mapping[str, str]

    @classmethod
    def read(cls, text: str) -> "LeafFile":
        """Read a file that maps hosts to leaf switches. Raises UsageError."""
        from gpubench.readers.leaves import read_leaves

        return cls(text, read_leaves(Path(text)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanPlan(CommandPlan):
    """Options of `scan`. `rounds` is the folder for a new scan, and `resume` is the folder of a scan to continue."""

    help_group: ClassVar = MEASURE

    backend: str | None = option(
        "|".join(SCAN_BACKENDS),
        "Measure with NCCL between GPUs (default if there are any), or with TCP between CPU buffers.",
        read=_parse_backend,
    )
    quick: bool = flag("Stop after three rounds, without confirming suspects.", common=True)
    leaves: LeafFile | None = option(
        "FILE",
        "Leaf switch of each node: Slurm's topology.conf, the output of ibnetdiscover, or lines of NODE LEAF.",
        read=LeafFile.read,
        common=True,
        group=INPUT,
    )
    rounds: Path | None = option(
        "DIR", "Write every round to this folder as it ends.", read=Path, common=True, group=OUTPUT
    )
    resume: Path | None = option(
        "DIR", "Continue the rounds in this folder with the nodes that remain.", read=Path, common=True, group=INPUT
    )
    replay: Path | None = option(
        "DIR", "Judge the rounds in this folder without measuring.", read=Path, common=True, group=SIMULATE
    )
    hostfile: Path | None = option(
        "FILE",
        "Write the healthy nodes to this file, one per line, for mpirun --hostfile.",
        read=Path,
        common=True,
        group=OUTPUT,
    )
    every_rank: bool = flag(
        "Treat every rank as a node, so that a scan can be tried on one host.", name="--ranks-as-nodes", hidden=True
    )
    ranks_per_gpu: int = sharing_ranks("Each rank counts as a node. Works with any NCCL")
    round_timeout_s: float = step_timeout("one round", default=10.0, least=0.5)
    simulation: Simulation | None = read_from(SimulationOptions, default=None)
    seed: int = 0

    @property
    def source(self) -> Source:
        return choose_source(self.round_timeout_s, simulation=self.simulation, replay=self.replay)

    @property
    def ranks_as_nodes(self) -> bool:
        """True if every rank is treated as a node."""
        return self.every_rank or self.ranks_per_gpu > 1


FACTS_TIMEOUT_S = 20.0  # A driver that takes longer probably hangs. A Slurm prolog has no time for a longer timeout


class Depth(StrEnum):
    """How much a check measures: nothing, for half a minute, for a minute, or everything."""

    QUICK = "quick"
    BRIEF = "brief"
    DEFAULT = "default"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPlan(MachinePlan):
    """Options of `check`. `gpubench` without a command is a `brief` check."""

    quick: bool = flag("Read facts only, without measuring.", common=True)
    full: bool = flag("Measure all collectives and all ways of copying.", common=True)
    kv: bool = flag("Also measure a KV transfer between two processes, if UCX is installed.", common=True)
    profile: str | None = option(
        "NAME|FILE",
        "Judge by this profile, including its number of GPUs and NICs. host is for machines without GPUs.",
        completed_as="profile",
        common=True,
        group=JUDGE,
    )
    require_path: tuple[RequiredPath, ...] = require_path_option()
    expected_gpus: int | None = expected_gpus()
    targets: Targets = field(default_factory=Targets)
    ranks_per_gpu: int = sharing_ranks()
    timeout_s: float = step_timeout("one measurement, or on reading a driver (at most 20 s)", default=120.0)
    brief: bool = False

    @property
    def depth(self) -> Depth:
        if self.quick:
            return Depth.QUICK
        return Depth.BRIEF if self.brief else Depth.FULL if self.full else Depth.DEFAULT

    @property
    def facts_timeout_s(self) -> float:
        """The timeout for the driver to return its facts, in seconds."""
        return min(self.timeout_s, FACTS_TIMEOUT_S)

    @property
    def source(self) -> Source:
        return choose_source(self.facts_timeout_s, simulation=self.simulation, replay=self.recording.replay)


P2P_NAME = "p2p"


class MemoryKind(StrEnum):
    """Which memory to copy. MANAGED measures managed (unified) memory in addition to plain allocations."""

    PLAIN = "plain"
    MANAGED = "managed"


class As(StrEnum):
    """Programs whose parameters `p2p --as` can use."""

    NVBANDWIDTH = "nvbandwidth"


def parse_pair_option(texts: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Parse the values of --pairs. Raises UsageError."""
    from gpubench.model.paths.p2p import parse_pairs

    try:
        return parse_pairs(texts)
    except ValueError as error:
        raise UsageError(
            f"--pairs {str(error)!r} is not a pair of GPUs",
            expected="two different GPUs, numbered as in nvidia-smi: 0-1,3-5",
            next_step="--pairs 0-1",
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class P2pPlan(MachinePlan):
    """Options of `p2p`. `pairs` has GPU indices, or ranks under a launcher. None selects all pairs."""

    sizes: tuple[int, ...] | None = option(
        "SIZES",
        "Copy only these sizes, by copy engines, with peer access off and on, e.g. 8:1G or 1K,64K,1M (default: 256M "
        "in all ways, and 16 bytes for the latency).",
        read=parse_sizes,
        common=True,
    )
    pairs: tuple[tuple[int, int], ...] | None = option(
        "I-J",
        "Copy only from GPU I to GPU J (under mpirun, from rank to rank): 0-1,3-5 (default: all pairs).",
        read=parse_pair_option,
        several=True,
        common=True,
    )
    memory: MemoryKind = option(
        "|".join(MemoryKind),
        "managed also measures unified memory: prefetched, fetched by page faults, and used in place (64M, or the "
        "size in --sizes).",
        default=MemoryKind.PLAIN.value,
        read=one_of("--memory", MemoryKind),
        common=True,
    )
    like: str | None = option(
        "|".join(As),
        "Copy as nvbandwidth does: 512M, 4 warm-up and 16 timed copies, median of 3 runs.",
        name="--as",
        read=one_of("--as", As),
        hidden=True,
    )
    host: bool = flag("Also copy to and from host memory.", name="--host/--no-host", default=True)
    patterns: bool = flag(
        "Also copy between many pairs at once.", name="--patterns/--no-patterns", default=True, hidden=True
    )
    check: bool = flag("Verify the data at every destination.", name="--check/--no-check", default=True)
    shows_evidence: bool = flag("Show the evidence for every pair's path.", name="--evidence")
    veto: bool = flag(
        "Print one line for a shell instead of the table. It sets variables that avoid peer access if it is broken "
        "or slow.",
        common=True,
        group=OUTPUT,
    )
    targets: Targets = field(default_factory=Targets)
    timeout_s: float = step_timeout("reading a driver, or one copy between ranks", default=20.0)
    profile: str | None = judging_profile()
    require_path: tuple[RequiredPath, ...] = require_path_option()
    expected_gpus: int | None = expected_gpus()

    @property
    def evidence(self) -> "EvidenceUse":
        """Whether the report only stores evidence about paths, or also shows it."""
        from gpubench.model.paths.transport import EvidenceUse

        return EvidenceUse.SHOWN if self.shows_evidence else EvidenceUse.KEPT

"""The options of a collective, in one dataclass that is passed from the command line to the ranks."""

import dataclasses
import json
import signal
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec.structs import replace

from gpubench.backends.registry import BACKENDS as BACKEND_KINDS
from gpubench.backends.registry import BackendKind, backend_named, default_backend
from gpubench.errors import UsageError, exclusive, no_gpu
from gpubench.jobs.collective.nccl_tests import NcclTestsOptions
from gpubench.jobs.plans import MachinePlan, Targets
from gpubench.jobs.sources import Recording
from gpubench.model.paths.transport import EvidenceUse
from gpubench.model.terms.operation import HIERARCHICAL_OPTION as HIERARCHICAL_OPTION
from gpubench.model.terms.operation import HOST, Allocator, DataType, Placement, ReduceOp
from gpubench.model.terms.options import (
    NCCL,
    REQUIRE_PATH,
    RequiredPath,
    expected_gpus,
    flag,
    judging_profile,
    one_of,
    option,
    parse_choices,
    rank_counts,
    require_path_option,
    sharing_ranks,
    step_timeout,
    unknown_choice,
)
from gpubench.model.terms.ranks import LEAST_SECONDS_TO_START, SPLITS, TIMES_TO_START
from gpubench.model.terms.settings import (
    ALGORITHM_VARIABLE,
    CTA_POLICY,
    HIERARCHICAL,
    MAX_CTAS,
    PER_COMMUNICATOR,
    PROTOCOL_VARIABLE,
    REGISTER,
    REQUESTS,
    SET_OPTION,
    Algorithm,
    CtaPolicy,
    NcclSetting,
    Protocol,
    Registration,
    combine_values,
    parse_set_options,
)
from gpubench.model.terms.statistics import AUTO, DEFAULT_ITERATIONS, INTERVAL, Mode, Sampling
from gpubench.model.terms.units import parse_sizes

if TYPE_CHECKING:
    from gpubench.collectives.record import Collective, SweepRequest

BACKENDS = tuple(kind.name for kind in BACKEND_KINDS)
BACKEND_SUMMARIES = "; ".join(kind.summary for kind in BACKEND_KINDS)
DEFAULT_SIZES = {kind.name: kind.default_sizes for kind in BACKEND_KINDS}
SHARING_OPTION = "--ranks-per-gpu"
SOAK_ENDS = signal.SIGUSR1  # Signal that makes the first rank end a soak test on all ranks and report


COUNT_FOLDERS = "np-"
"""Beginning of the folder names, within a recording, of runs with several numbers of ranks."""


_FRAMEWORKS_NAMES = {"fp16": "float16", "fp32": "float32", "fp64": "float64", "bf16": "bfloat16"}


def parse_dtypes(texts: Iterable[str]) -> tuple[DataType, ...]:
    """Parse the data types of --dtype. Names from NCCL, nccl-tests and frameworks are accepted, such as float or
    bf16.
    """
    names = [name.strip() for text in texts for name in text.split(",")]
    return parse_choices("--dtype", [_own_name(name) for name in names], DataType)


def _own_name(type_name: str) -> str:
    lower = type_name.lower()
    if lower in tuple(DataType):
        return lower
    from gpubench.readers.results.nccl_tests.table import ELEMENT_TYPES

    name = _FRAMEWORKS_NAMES.get(lower) or ELEMENT_TYPES.get(lower, (type_name, 0))[0]
    return name if name in tuple(DataType) else type_name


def _parse_max_ctas(texts: Sequence[str]) -> tuple[str, ...]:
    words = dict.fromkeys(count.strip() for text in texts for count in text.split(","))
    for count in words:
        if not count.isdecimal() or int(count) < 1:
            raise UsageError(f"--max-ctas {count}", expected="a number of 1 or more", next_step="--max-ctas 8")
    return tuple(str(int(count)) for count in words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variants:
    """Options for NCCL settings to measure in addition to NCCL's own choice."""

    help_group: ClassVar = NCCL

    algo: tuple[Algorithm, ...] = option(
        "ALGO",
        f"Also measure with this NCCL algorithm: {', '.join(Algorithm)}. Several with commas.",
        read=lambda texts: parse_choices("--algo", texts, Algorithm),
        several=True,
        without=(),
        completed_as="algo",
    )
    proto: tuple[Protocol, ...] = option(
        "PROTO",
        f"Also measure with this NCCL protocol: {', '.join(Protocol)}. Several with commas. With --algo, every "
        "combination is measured.",
        read=lambda texts: parse_choices("--proto", texts, Protocol),
        several=True,
        without=(),
        completed_as="proto",
    )
    register: tuple[Registration, ...] = option(
        "|".join(Registration),
        "Also measure with registered buffers: user (ncclCommRegister) or symmetric (windows). Several with commas. "
        "NCCL then allocates the buffers.",
        read=lambda texts: parse_choices("--register", texts, Registration),
        several=True,
        without=(),
        completed_as="register",
    )
    cta_policy: tuple[CtaPolicy, ...] = option(
        "|".join(CtaPolicy),
        "Also measure with this NCCL policy for SMs. zero, with --register symmetric, moves data by copy engines. "
        "Several with commas.",
        read=lambda texts: parse_choices("--cta-policy", texts, CtaPolicy),
        several=True,
        hidden=True,
        without=(),
        completed_as="cta-policy",
    )
    max_ctas: tuple[str, ...] = option(
        "N",
        "Also measure with at most N SMs per operation. Several with commas.",
        read=_parse_max_ctas,
        several=True,
        without=(),
    )
    sets: tuple[tuple[str, tuple[str, ...]], ...] = option(
        "NAME=A,B",
        "Also measure with this NCCL variable set to each value, in a separate job. Repeatable. All combinations are "
        "measured, also with --algo and --proto.",
        name=SET_OPTION,
        read=lambda texts: tuple(parse_set_options(texts).items()),
        several=True,
        without=(),
    )
    hierarchical: bool = flag(
        "Also measure all-reduce in three steps: reduce-scatter within nodes, all-reduce between nodes, all-gather "
        "within nodes.",
        name=HIERARCHICAL_OPTION,
        hidden=True,
    )

    @property
    def set_variables(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.sets)

    @property
    def settings(self) -> tuple[NcclSetting, ...]:
        """Every combination of the chosen settings. Raises UsageError if two options set the same variable."""
        by_option = {ALGORITHM_VARIABLE: ("--algo", self.algo), PROTOCOL_VARIABLE: ("--proto", self.proto)}
        for variable, (name, values) in by_option.items():
            if values and variable in self.set_variables:
                raise exclusive(
                    (f"{SET_OPTION} {variable}", name), "only one of them, because both set the same variable"
                )
        chosen: dict[str, Sequence[str]] = {variable: values for variable, (_, values) in by_option.items()}
        chosen |= {REGISTER: self.register, CTA_POLICY: self.cta_policy, MAX_CTAS: self.max_ctas, **dict(self.sets)}
        return tuple(combine_values({name: values for name, values in chosen.items() if values}))


def _parse_backends(text: str) -> tuple[str, ...]:
    """Parse backend names, and return them in the order of the registry. Raises UsageError for an unknown backend."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in BACKENDS:
            raise unknown_choice("--backend", word, BACKENDS)
    return tuple(name for name in BACKENDS if name in words)


def _parse_library(text: str) -> str:
    if not Path(text).is_file():
        from gpubench.errors import unreadable_nccl_library

        raise unreadable_nccl_library(text, "there is no such file")
    return text


def nccl_library_option() -> Any:
    text = "Measure this libnccl.so.2, e.g. the one of a training framework."
    return option("PATH", text, read=_parse_library, group=NCCL)


def evidence_option() -> Any:
    text = "Show the evidence for every path, or collect none (no NCCL log, no counters)."
    return flag(text, name="--evidence/--no-evidence", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePlan(MachinePlan):
    """Options of a collective. `command` is the name of the collective.

    A launched rank builds its plan from the same `typed` values as the launching process. It also gets:

    - `turn`, the setting that all processes of this job use
    - `checks_sets`, true if this job checks that NCCL reads the variables of --set
    - `results_folder`, the folder of dated results

    A command that runs a collective during computation sets two more fields:

    - `kernels_at_once`, the number of kernels of a rank that must run on its GPU at the same time
    - `needs_gpus`, the name of the command for messages
    """

    command: str
    sizes: tuple[int, ...] | None = option(
        "SIZES",
        "Sizes in bytes: 1K:4G (doubling), 1K:4G:4 (factor 4), 1M:64M:+1M (steps of 1M), or 1K,64K,1M (default: "
        f"{DEFAULT_SIZES['nccl']} on GPUs, {DEFAULT_SIZES['host']} on CPUs).",
        read=parse_sizes,
        common=True,
    )
    dtypes: tuple[DataType, ...] = option(
        "TYPE",
        f"Data type: {', '.join(DataType)} (default: float32). Several with commas.",
        name="--dtype -d",
        read=parse_dtypes,
        several=True,
        without=(DataType.FLOAT32,),
        completed_as="dtype",
        common=True,
    )
    ops: tuple[ReduceOp, ...] = option(
        "OP",
        f"Reduction: {', '.join(ReduceOp)} (default: sum). Several with commas.",
        name="--op",
        read=lambda texts: parse_choices("--op", texts, ReduceOp),
        several=True,
        without=(ReduceOp.SUM,),
        completed_as="op",
        common=True,
    )
    root: int = option("RANK", "Root rank.", name="--root -r", default=0)
    skew: float | None = option(
        "SHARE",
        "Measure alltoallv. Rank 0 receives the full size, the last rank less by this share, the others an amount "
        "in between.",
        min=0,
        max=1,
        hidden=True,
    )
    variants: Variants = field(default_factory=Variants)
    in_place: bool = flag("Measure only in place: the result overwrites the input (default: both).")
    out_of_place: bool = flag("Measure only out of place.")
    mode: Mode = option(
        "|".join(Mode),
        "Time operations back to back, as nccl-tests does, or each one alone, with percentiles.",
        default=Mode.THROUGHPUT.value,
        read=one_of("--mode", Mode),
        completed_as="mode",
    )
    percentiles: bool = flag("Also time single operations in a second loop, for p50, p95 and p99.")
    iters: str | None = option(
        "N|auto",
        f"Timed operations per row. auto (default) repeats until the mean is known to ±{INTERVAL:.0%}. The default "
        f"with --graph, --split and --simulate is {DEFAULT_ITERATIONS[Mode.THROUGHPUT]}, with --mode latency "
        f"{DEFAULT_ITERATIONS[Mode.LATENCY]}.",
        name="--iters -n",
        common=True,
    )
    budget: float | None = option(
        "S",
        f"Maximum seconds per row with --iters {AUTO} (default: {Sampling().budget_seconds:g}).",
        min=0,
    )
    warmup: int = option("N", "Warm-up operations before each row.", name="--warmup -w", default=5, min=0)
    cycles: int = option(
        "N",
        "Repeat the sweep N times. 0 repeats until interrupted (a soak test). The table shows the first sweep, and "
        "every row with wrong data.",
        name="--cycles -N",
        default=1,
        min=0,
        show_default=False,
    )
    graph_replays: int = option(
        "N",
        "Capture the operations in a CUDA graph and time N replays.",
        name="--graph",
        default=0,
        min=0,
        show_default=False,
        group=NCCL,
    )
    check: bool = flag("Verify the data on every rank.", name="--check/--no-check", default=True)
    backends: tuple[str, ...] = option(
        "NAME",
        f"Library to measure: {', '.join(BACKENDS)} (default: nccl on GPUs, otherwise host). Several with commas "
        "are compared in one table.",
        name="--backend",
        read=_parse_backends,
        without=(),
        completed_as="backend",
        common=True,
    )
    nccl_library: str | None = nccl_library_option()
    allocator: Allocator = option(
        "|".join(Allocator),
        "Allocate buffers with cudaMalloc, as frameworks do, or ncclMemAlloc, as nccl-tests does.",
        default=Allocator.CUDA.value,
        read=one_of("--allocator", Allocator),
        completed_as="allocator",
        hidden=True,
        group=NCCL,
    )
    rank_counts: tuple[int, ...] = rank_counts(
        "Ranks to launch on this host (default: one per GPU; 2 without GPUs). 1,2,4,8 shows how the speed scales."
    )
    targets: Targets = field(default_factory=Targets)
    ranks_per_gpu: int = sharing_ranks()
    timeout_s: float = step_timeout(
        f"one operation. Starting ranks may take {TIMES_TO_START} times as long, and at least "
        f"{LEAST_SECONDS_TO_START:g} s",
        default=60.0,
        least=1,
    )
    shows_evidence: bool | None = evidence_option()
    require_path: tuple[RequiredPath, ...] = require_path_option(common=False)
    expected_gpus: int | None = expected_gpus()
    profile: str | None = judging_profile()
    split: str | None = option(
        "|".join(SPLITS),
        "Run the collective in several groups at once, with one row per group: by node, by local rank (rail), in "
        f"pairs, or in groups of N ranks. Not with --evidence, --strict or --iters {AUTO}.",
    )
    nccl_tests: NcclTestsOptions = field(default_factory=NcclTestsOptions)
    seed: int = 0
    kernels_at_once: int = 1
    needs_gpus: str = ""
    typed: Mapping[str, Any] = field(default_factory=dict)
    turn: str | None = None
    checks_sets: bool = False
    results_folder: str | None = None

    def for_ranks(self) -> str:
        """Return the values of all options as JSON, for the ranks that this process launches."""
        history = self.presentation.history
        given = {name: value for name, value in self.typed.items() if value is not None}
        return json.dumps(
            given
            | {
                "turn": self.turn,
                "checks_sets": self.checks_sets,
                "results_folder": None if history is None else str(history),
            }
        )

    @property
    def ranks(self) -> int | None:
        """The number of ranks in --np. None without it, or if it has several numbers."""
        return self.rank_counts[0] if len(self.rank_counts) == 1 else None

    @property
    def scales(self) -> bool:
        """True if the run is repeated for several numbers of ranks."""
        return len(self.rank_counts) > 1

    @property
    def each_count(self) -> "list[CollectivePlan]":
        """The plan for each number of ranks, or this plan alone."""
        return [self.for_count(count) for count in self.rank_counts] if self.scales else [self]

    def for_count(self, ranks: int) -> "CollectivePlan":
        """Return the plan for one of several numbers of ranks. Each number has its own folder in a recording."""
        replay, record = (
            None if folder is None else folder / f"{COUNT_FOLDERS}{ranks}"
            for folder in (self.recording.replay, self.recording.record)
        )
        typed = {**self.typed, "rank_counts": str(ranks)} | ({} if record is None else {"record": str(record)})
        return dataclasses.replace(self, rank_counts=(ranks,), recording=Recording(replay, record), typed=typed)

    @property
    def collective(self) -> "Collective":
        """The collective to measure. With --skew, it is the skewed form of the collective."""
        from gpubench.collectives.registry import collective_named

        found = collective_named(self.command)
        return found if self.skew is None or found.skewed is None else found.skewed(self.skew)

    @property
    def request(self) -> "SweepRequest":
        """The sweep to measure. Without --sizes, it has no sizes, because they depend on the backend.

        Raises UsageError for incompatible options.
        """
        from gpubench.collectives.record import SweepRequest

        return SweepRequest(
            collective=self.collective,
            sizes=self.sizes or (),
            dtypes=self.dtypes,
            ops=self.ops,
            placements=self._placements,
            root=self.root,
            sampling=self._sampling,
            warmup=self.warmup,
            graph_replays=self.graph_replays,
            check=self.check,
            skew=self.skew,
            cycles=self.cycles,
        )

    @property
    def _sampling(self) -> Sampling:
        """How to time a row. CUDA graphs, groups, simulations and latency mode need a fixed number of operations."""
        if self.iters == AUTO and self.graph_replays:
            raise UsageError(
                f"--iters {AUTO} with --graph",
                expected="--iters N: a CUDA graph has a fixed number of operations",
                next_step=f"--iters {DEFAULT_ITERATIONS[Mode.THROUGHPUT]} --graph {self.graph_replays}",
            )
        in_groups_or_simulated = self.split is not None or self.simulation is not None
        needs_number = in_groups_or_simulated or self.graph_replays > 0 or self.mode is Mode.LATENCY
        if self.iters == AUTO or (self.iters is None and not needs_number):
            return Sampling(
                self.mode, None, Sampling().budget_seconds if self.budget is None else self.budget, self.percentiles
            )
        if self.budget is not None:
            raise UsageError(
                f"--budget {self.budget:g} without --iters {AUTO}",
                expected=f"--budget together with --iters {AUTO}, because it limits the operations of {AUTO}",
                next_step=f"--iters {AUTO} --budget {self.budget:g}",
            )
        if self.iters is None:
            return Sampling(self.mode, DEFAULT_ITERATIONS[self.mode], percentiles=self.percentiles)
        if not self.iters.isdecimal() or int(self.iters) < 1:
            raise UsageError(
                f"--iters {self.iters}", expected=f"a number of 1 or more, or {AUTO}", next_step="--iters 20"
            )
        return Sampling(self.mode, int(self.iters), percentiles=self.percentiles)

    @property
    def _placements(self) -> tuple[Placement, ...]:
        if self.in_place:
            return (Placement.IN_PLACE,)
        if self.out_of_place or not self.collective.in_place:
            return (Placement.OUT_OF_PLACE,)
        return (Placement.OUT_OF_PLACE, Placement.IN_PLACE)

    def request_for(self, backend: str) -> "SweepRequest":
        """Return the sweep at --sizes, or at the default sizes of the backend. With several backends, use the
        default sizes of the slowest one.
        """
        slowest = self.backends[-1] if self.others else backend
        return replace(self.request, sizes=self.sizes or parse_sizes(backend_named(slowest).default_sizes))

    @property
    def backend(self) -> str | None:
        """The first backend in --backend, or None if the option is not used."""
        return next(iter(self.backends), None)

    @property
    def others(self) -> tuple[str, ...]:
        """All backends in --backend except the first."""
        return self.backends[1:]

    @property
    def settings(self) -> tuple[NcclSetting, ...]:
        """The settings to measure in addition to NCCL's own choice.

        In a job for one process-wide setting (`turn`), only the settings of its communicators.
        """
        found = self.variants.settings
        if self.turn is None:
            return found
        process = NcclSetting.parse(self.turn)
        own = [setting.communicator_part for setting in found if setting.process_part == process]
        return tuple(setting for setting in own if setting.values)

    @property
    def processes(self) -> tuple[NcclSetting, ...]:
        """The settings that NCCL reads once per process, so that each setting needs a separate job."""
        return tuple(dict.fromkeys(setting.process_part for setting in self.settings if setting.process_part.values))

    @property
    def requests(self) -> tuple[str, ...]:
        """The settings that are requested by NCCL calls for a communicator, rather than by environment variables."""
        return tuple(self.settings[0].requests) if self.settings else ()

    @property
    def is_compared(self) -> bool:
        """True if the run compares several settings or backends."""
        return bool(self.settings) or self.variants.hierarchical or bool(self.others)

    @property
    def comparison_options(self) -> tuple[str, ...]:
        """The options in use that select several settings or backends, for messages."""
        variants = self.variants
        asked = {
            "--algo": variants.algo,
            "--proto": variants.proto,
            SET_OPTION: variants.sets,
            **{f"--{name}": name in self.requests for name in REQUESTS},
            HIERARCHICAL_OPTION: variants.hierarchical,
            f"--backend {','.join(self.backends)}": self.others,
        }
        return tuple(name for name, is_given in asked.items() if is_given)

    def setting_names(self, backend: str) -> list[str]:
        """Return the names of all settings and additional backends, as in the rows."""
        own = [setting for setting in self.settings if not setting.process_part.values]
        names = [setting.name for setting in own]
        for process in self.processes:
            inside = (setting for setting in self.settings if setting.process_part == process != setting)
            names += [process.name, *(setting.name for setting in inside)]
        names += [HIERARCHICAL] if self.variants.hierarchical else []
        return [*names, *(name for name in self.others if name != backend)]

    def check_unset(self, environment: Mapping[str, str]) -> None:
        """Raise UsageError if the environment already sets a variable that the run varies.

        `environment` has the NCCL variables of the ranks. NCCL_ALGO and NCCL_PROTO are always checked together, because
        the algorithm affects NCCL's choice of protocol.
        """
        variables = dict.fromkeys(self.settings[0].variables if self.settings else ())
        if not {*PER_COMMUNICATOR}.isdisjoint(variables):
            variables |= dict.fromkeys(PER_COMMUNICATOR)
        for name in (name for name in variables if name in environment):
            raise UsageError(
                f"{' and '.join(self.comparison_options)} with {name}={environment[name]}, which is already set",
                expected="an unset variable, so that NCCL's own choice can be measured too",
                reason="it is set in the environment, or in a file such as /etc/nccl.conf",
                next_step=f"unset {name}",
            )

    @property
    def evidence(self) -> EvidenceUse:
        """How to use evidence about paths. With --split there is none, because NCCL's log and link counters do not
        distinguish groups.
        """
        if self.split is not None or self.shows_evidence is False:
            return EvidenceUse.OFF
        return EvidenceUse.SHOWN if self.shows_evidence else EvidenceUse.KEPT

    @property
    def buffer_allocator(self) -> Allocator:
        """The allocator of the buffers. With --register it is always NCCL's.

        Only NCCL's memory can be registered as a window, and it can be registered as user memory without restrictions.
        """
        return Allocator.NCCL if self.variants.register else self.allocator

    @property
    def history(self) -> Path | None:
        """The folder of dated results for this run, or None."""
        return self.presentation.history if self.results_folder is None else Path(self.results_folder)

    def check_any_gpu(self, listed: Sequence[int]) -> None:
        """Raise CouldNotMeasureError if --expect-gpus is used and no host has a GPU."""
        if self.expected_gpus is not None and not any(listed):
            raise no_gpu(
                f"--expect-gpus {self.expected_gpus}, but there is no GPU",
                for_what="--expect-gpus",
                instead="without --expect-gpus, CPU buffers are measured",
            )

    def kinds(self, *, gpus: bool) -> tuple[BackendKind, ...]:
        """Return all backends to measure. `gpus` is true if any rank has a visible GPU.

        Raises UsageError for an unknown backend.
        """
        first = default_backend(gpus=gpus) if self.backend is None else backend_named(self.backend)
        return (first, *map(backend_named, self.others))

    def refuse_gpu_options(self, why: str, *, but: Container[str] = ()) -> None:
        """Raise UsageError for options that only backends on GPUs support, except the options in `but`."""
        for name in (name for name in self._nccl_options if name not in but):
            reason = backend_named(HOST).lacks[name]
            raise UsageError(f"{name} needs GPUs, and {why}", reason=reason, next_step=f"leave {name} out")

    def refuse_what_backend_lacks(self) -> None:
        """Raise UsageError if a chosen backend does not support an option or the collective."""
        for kind in map(backend_named, self.backends):
            if kind.collectives and self.command not in kind.collectives:
                raise UsageError(
                    f"{self.command} with --backend {kind.name}",
                    expected=f"{' or '.join(kind.collectives)}, which this backend supports",
                    next_step=f"leave {kind.name} out, or gpubench {kind.collectives[0]} --backend {kind.name}",
                )
            # With several backends, options that only NCCL supports apply to NCCL alone.
            own = ("--graph",) if self.others else self._nccl_options
            for name in (name for name in own if name in self._nccl_options and name in kind.lacks):
                raise UsageError(
                    f"{name} with --backend {kind.name}",
                    expected="an option that this backend supports",
                    reason=kind.lacks[name],
                    next_step=f"leave {name} out, or --backend nccl",
                )

    @property
    def _nccl_options(self) -> tuple[str, ...]:
        """The options in use that not every backend supports."""
        options = {
            "--graph": self.graph_replays > 0,
            SHARING_OPTION: self.ranks_per_gpu > 1,
            REQUIRE_PATH: bool(self.require_path),
            "--nccl-library": self.nccl_library is not None,
            "--allocator nccl": self.allocator is Allocator.NCCL and not self.variants.register,
            **{option: True for option in self.comparison_options if option in _TO_NCCL},
        }
        return tuple(name for name, is_given in options.items() if is_given)


_TO_NCCL = ("--algo", "--proto", SET_OPTION, *(f"--{name}" for name in REQUESTS))

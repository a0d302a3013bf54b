"""The command of every collective: its options, declared once, and the run."""

import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import typer

from gpubench.cli.options import (
    NcclTestsOptions,
    PresentationOptions,
    check_outputs,
    check_profile,
    given_options,
    parse_dtypes,
)
from gpubench.cli.signature import HelpPage, typer_app
from gpubench.collectives.registry import collective_named
from gpubench.errors import UsageError, exclusive
from gpubench.formats.registry import TUNER
from gpubench.jobs.collective.plan import (
    BACKEND_SUMMARIES,
    BACKENDS,
    DEFAULT_SIZES,
    CollectivePlan,
    RankOptions,
    values_of,
)
from gpubench.jobs.options import (
    MEASURE,
    NCCL,
    flag,
    option,
    parse_choices,
    read_from,
    unknown_choice,
)
from gpubench.jobs.sources import Recording, Simulated, Simulation, SimulationOptions, source_of
from gpubench.model.paths.transport import EvidenceUse
from gpubench.model.terms.commands import Command
from gpubench.model.terms.operation import OPTION as HIERARCHICAL_OPTION
from gpubench.model.terms.operation import Allocator, DataType, Placement, ReduceOp
from gpubench.model.terms.ranks import check_split
from gpubench.model.terms.settings import (
    ALGORITHM_VARIABLE,
    CTA_POLICY,
    MAX_CTAS,
    PROTOCOL_VARIABLE,
    REGISTER,
    SET_OPTION,
    Algorithm,
    CtaPolicy,
    Protocol,
    Registration,
    every_combination,
    parse_sets,
)
from gpubench.model.terms.statistics import AUTO, DEFAULT_ITERATIONS, INTERVAL, Mode, Sampling
from gpubench.model.terms.units import parse_sizes
from gpubench.records import dataclass

if TYPE_CHECKING:
    from gpubench.collectives.record import Collective, SweepRequest
    from gpubench.jobs.collective.plan import AskedVariants


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The timing of the rows of a collective."""

    help_group: ClassVar = MEASURE

    mode: str = option(
        "|".join(Mode),
        "Time operations back to back, as nccl-tests does, or each one alone, with percentiles.",
        default="throughput",
        completed_as="mode",
    )
    iters: str | None = option(
        "N|auto",
        f"Timed operations per row. auto (default): until the mean is known to ±{INTERVAL:.0%}. Default with --graph, "
        f"--split and --simulate: {DEFAULT_ITERATIONS[Mode.THROUGHPUT]}; with --mode latency: "
        f"{DEFAULT_ITERATIONS[Mode.LATENCY]}.",
        name="--iters -n",
        common=True,
    )
    budget: float | None = option(
        "S", f"Seconds per row at most, with --iters {AUTO} (default: {Sampling().budget_seconds:g}).", min=0
    )

    def parse(self, *, graph_replays: int, counted: bool = False) -> Sampling:
        """The sampling of a row. Raises UsageError for a wrong number, or a budget beside a number.

        `counted` is whether a number is needed for another reason than a graph: groups, or a model.
        """
        mode = parse_choices("--mode", [self.mode], Mode)[0]
        if self.iters == AUTO and graph_replays:
            raise UsageError(
                f"--iters {AUTO} with --graph",
                expected="--iters N: a CUDA graph has a fixed number of operations",
                next_step=f"--iters {DEFAULT_ITERATIONS[Mode.THROUGHPUT]} --graph {graph_replays}",
            )
        needs_number = counted or graph_replays > 0 or mode is Mode.LATENCY
        if self.iters == AUTO or (self.iters is None and not needs_number):
            return Sampling(mode, None, Sampling().budget_seconds if self.budget is None else self.budget)
        if self.budget is not None:
            raise UsageError(
                f"--budget {self.budget:g} without --iters {AUTO}",
                expected=f"--budget with --iters {AUTO}, whose number of operations it limits",
                next_step=f"--iters {AUTO} --budget {self.budget:g}",
            )
        return Sampling(mode, DEFAULT_ITERATIONS[mode] if self.iters is None else self._number())

    def _number(self) -> int:
        text = self.iters or ""
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(f"--iters {text}", expected=f"a number of 1 or more, or {AUTO}", next_step="--iters 20")
        return int(text)


@dataclass(frozen=True, kw_only=True)
class VariantOptions:
    """The algorithms and protocols to measure beside NCCL's own choice."""

    help_group: ClassVar = NCCL

    algo: list[str] | None = option(
        "ALGO",
        f"Also measure with this NCCL algorithm: {', '.join(Algorithm)}. Several with commas.",
        completed_as="algo",
    )
    proto: list[str] | None = option(
        "PROTO",
        f"Also measure with this NCCL protocol: {', '.join(Protocol)}. Several with commas; with --algo, every "
        "combination.",
        completed_as="proto",
    )
    register: list[str] | None = option(
        "|".join(Registration),
        "Also measure with buffers registered: user (ncclCommRegister) or symmetric (windows). Several with commas; "
        "NCCL then allocates the buffers.",
        completed_as="register",
    )
    cta_policy: list[str] | None = option(
        "|".join(CtaPolicy),
        "Also measure with this policy for SMs; zero, with --register symmetric, moves data by copy engines. Several "
        "with commas.",
        completed_as="cta-policy",
    )
    max_ctas: list[str] | None = option("N", "Also measure with at most N SMs per operation. Several with commas.")
    sets: list[str] | None = option(
        "NAME=A,B",
        "Also measure with this variable of NCCL's set to each value, in jobs of its own. Repeatable; every "
        "combination, also with --algo and --proto.",
        name=SET_OPTION,
    )
    hierarchical: bool = flag(
        "Also measure all-reduce in three steps: reduce-scatter within nodes, all-reduce between nodes, all-gather "
        "within nodes.",
        name=HIERARCHICAL_OPTION,
    )

    def parse(self, backends: tuple[str, ...] = ()) -> "AskedVariants":
        """The variants, of every combination of algorithm, protocol and variables.

        Raises UsageError: a word is not known, or a variable is set in two ways.
        """
        from gpubench.jobs.collective.plan import AskedVariants

        by_set = parse_sets(self.sets or ())
        by_option = {
            ALGORITHM_VARIABLE: ("--algo", parse_choices("--algo", self.algo or (), Algorithm)),
            PROTOCOL_VARIABLE: ("--proto", parse_choices("--proto", self.proto or (), Protocol)),
        }
        chosen: dict[str, Sequence[str]] = {name: values for name, (_, values) in by_option.items() if values}
        for variable in (each for each in chosen if each in by_set):
            raise exclusive((f"{SET_OPTION} {variable}", by_option[variable][0]), "one of them: both set one variable")
        requests = {
            REGISTER: parse_choices("--register", self.register or (), Registration),
            CTA_POLICY: parse_choices("--cta-policy", self.cta_policy or (), CtaPolicy),
            MAX_CTAS: _parse_max_ctas(self.max_ctas or ()),
        }
        chosen |= {name: values for name, values in requests.items() if values}
        settings = tuple(every_combination({**chosen, **by_set}))
        return AskedVariants(settings, self.hierarchical, backends if len(backends) > 1 else (), tuple(by_set))


def _parse_max_ctas(texts: Sequence[str]) -> tuple[str, ...]:
    """The numbers in texts with commas, each once. Raises UsageError: one is none, or zero."""
    words = dict.fromkeys(count.strip() for text in texts for count in text.split(","))
    for count in words:
        if not count.isdecimal() or int(count) < 1:
            raise UsageError(f"--max-ctas {count}", expected="a number of 1 or more", next_step="--max-ctas 8")
    return tuple(str(int(count)) for count in words)


def _parse_backends(text: str | None) -> tuple[str, ...]:
    """The backends in a text with commas, in the order of the registry; empty without a text.

    Raises UsageError: a word is none of them.
    """
    words = [] if text is None else [asked.strip() for asked in text.split(",")]
    for asked in words:
        if asked not in BACKENDS:
            raise unknown_choice("--backend", asked, BACKENDS)
    return tuple(name for name in BACKENDS if name in words)


def check_variants(variants: "AskedVariants", excluded: Mapping[str, bool]) -> None:
    """Raise UsageError where several ways are asked for together with an option that knows one."""
    for other in (name for name, is_given in excluded.items() if variants and is_given):
        raise UsageError(
            f"{variants.options[0]} with {other}",
            expected="one of them: several settings can only be measured, and only by all ranks together",
            next_step=f"leave {other} out",
        )


@dataclass(frozen=True, kw_only=True)
class CollectiveOptions:
    """The options of a collective: what to measure, with what, and how to show it."""

    help_group: ClassVar = MEASURE

    sizes: str | None = option(
        "SIZES",
        "Sizes in bytes: 1K:4G (each twice the last), 1K:4G:4 (four times), 1M:64M:+1M (steps), or 1K,64K,1M "
        f"(default: {DEFAULT_SIZES['nccl']} on GPUs, {DEFAULT_SIZES['host']} on CPUs).",
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
    root: int = option("RANK", "Root rank.", name="--root -r", default=0, common=True)
    skew: float | None = option(
        "SHARE",
        "Measure alltoallv: rank 0 receives the size, the last rank this share less of it, the others in between.",
        min=0,
        max=1,
    )
    variants: VariantOptions
    in_place: bool = flag("Measure only in place: the result overwrites the input.")
    out_of_place: bool = flag("Measure only out of place.")
    both: bool = flag("Measure in place and out of place (default, if the collective has both).")
    sampling: SamplingOptions
    warmup: int = option("N", "Warm-up operations before each row.", name="--warmup -w", default=5, min=0)
    cycles: int = option(
        "N",
        "Repeat the sweep N times, with a line a minute; 0: until interrupted (a soak). Rows are those of the first "
        "time, and all with wrong data.",
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
    backend: str | None = option(
        "NAME",
        f"Library to measure: {', '.join(BACKENDS)} (default: nccl on GPUs, otherwise host). Several with commas "
        "are compared in one table.",
        completed_as="backend",
        common=True,
    )
    of_ranks: RankOptions
    nccl_tests: NcclTestsOptions
    simulation: Simulation | None = read_from(SimulationOptions, default=None)
    seed: int = 0
    recording: Recording

    def plan(self, collective: "Collective", shown: PresentationOptions) -> CollectivePlan:
        """The plan for a collective; UsageError for anything that cannot be, with the next step."""
        self.nccl_tests.refuse_foreign()
        self._check_replay(shown.by_default)
        check_outputs(shown.output, tuple(ReduceOp))
        ranks, backends = self.of_ranks, _parse_backends(self.backend)
        ranks.check_evidence()
        check_profile(ranks.profile)
        variants = self.variants.parse(backends)
        # Only what NCCL has allocated can be registered as a window, and as user memory without limits.
        allocator = Allocator.NCCL if REGISTER in variants.requests else ranks.allocator
        plan = CollectivePlan(
            **values_of(RankOptions, ranks)
            | {
                "backend": next(iter(backends), None),
                "allocator": allocator,
                "ranks": self.nccl_tests.ranks(ranks.ranks, shown.by_default),
                "variants": variants,
            },
            request=self._request(collective, shown.by_default),
            source=source_of(ranks.timeout_s, simulation=self.simulation, replay=self.recording.replay),
            recording=self.recording,
            presentation=shown.parse(sections()),
        )
        self._check_variants(plan)
        if plan.split is not None:
            self._check_split(plan.split)
            plan = replace(plan, evidence=EvidenceUse.OFF)
        if isinstance(plan.source, Simulated):
            if self.skew is not None:
                raise exclusive(("--simulate", "--skew"), "one of them: no profile says what a skew costs")
            if plan.backend is not None:
                raise exclusive(
                    ("--simulate", f"--backend {plan.backend}"), "one of them: a simulation, or a measurement"
                )
            plan.refuse_gpu_options("a simulated machine has no real GPUs", but=plan.variants.options)
        if plan.backend == "host":
            plan.refuse_gpu_options("--backend host uses none")
        plan.refuse_what_backend_lacks()
        return plan

    def _request(self, collective: "Collective", by_default: Container[str]) -> "SweepRequest":
        from gpubench.collectives.record import Asked

        sizes = self.nccl_tests.sizes(self.sizes, by_default)
        asked = Asked(
            **values_of(Asked, self)
            | {
                "sizes": () if sizes is None else parse_sizes(sizes),
                "placements": self._placements(collective),
                "sampling": self.sampling.parse(
                    graph_replays=self.graph_replays,
                    counted=self.of_ranks.split is not None or self.simulation is not None,
                ),
                "check": self.nccl_tests.check(own=self.check, by_default=by_default),
            }
        )
        return asked.request(collective)

    def _placements(self, collective: "Collective") -> tuple[Placement, ...]:
        chosen = {"--in-place": self.in_place, "--out-of-place": self.out_of_place, "--both": self.both}
        asked = [option for option, is_given in chosen.items() if is_given]
        if len(asked) > 1:
            raise exclusive(asked, "one of them, or none for the default")
        if not collective.in_place and (self.in_place or self.both):
            raise UsageError(
                f"{collective.name} has no in-place form",
                reason="a rank would overwrite data that it has not sent yet",
                next_step=f"gpubench {collective.name}",
            )
        if self.in_place:
            return (Placement.IN_PLACE,)
        if self.out_of_place or not collective.in_place:
            return (Placement.OUT_OF_PLACE,)
        return (Placement.OUT_OF_PLACE, Placement.IN_PLACE)

    def _check_split(self, text: str) -> None:
        """Raise UsageError for options that cannot be used with --split."""
        check_split(text)
        paths = "one group", "NCCL's log and the link counters cannot be told apart by group"
        refused = {
            "--evidence": (self.of_ranks.evidence is EvidenceUse.SHOWN, *paths),
            "--strict": (self.of_ranks.strict, *paths),
            "--record": (
                self.simulation is not None and self.recording.record is not None,
                "one group",
                "a recorded simulation is one of all ranks",
            ),
            f"--iters {AUTO}": (
                self.sampling.iters == AUTO,
                "as many iterations in every group",
                "groups would end at different times, and the last one would not share the links",
            ),
        }
        for name, (is_given, expected, reason) in refused.items():
            if is_given:
                instead = "--iters 100" if name == f"--iters {AUTO}" else f"leave {name} out"
                raise UsageError(f"{name} with --split {text}", expected=expected, reason=reason, next_step=instead)

    def _check_variants(self, plan: CollectivePlan) -> None:
        check_variants(plan.variants, {"--split": plan.split is not None})
        if any(each.format is TUNER for each in plan.presentation.outputs) and not plan.variants.settings:
            raise UsageError(
                "--output nccl_tuner.conf without settings to choose from",
                expected="--algo, --proto or --set: the file has the fastest of them by size",
                next_step=f"gpubench {plan.collective.name} --proto ll,ll128,simple --output nccl_tuner.conf",
            )
        once = {
            "--record": plan.recording.record is not None,
            "--split": plan.split is not None,
            "--simulate": isinstance(plan.source, Simulated),
            SET_OPTION: bool(plan.variants.processes),
        }
        for name in (each for each, is_given in once.items() if is_given and plan.request.cycles != 1):
            raise exclusive((f"--cycles {plan.request.cycles}", name), f"one of them: {name} measures a sweep once")
        if not plan.variants.processes:
            return
        beside = {
            "--record": plan.recording.record is not None,
            HIERARCHICAL_OPTION: plan.variants.hierarchical,
            f"--backend {self.backend}": bool(plan.variants.beside),
        }
        for name in (each for each, is_given in beside.items() if is_given):
            raise UsageError(
                f"{SET_OPTION} {plan.variants.by_set[0]} with {name}",
                expected="one of them: NCCL reads this variable once a process, so every value is a job of its own",
                next_step=f"leave {name} out",
            )

    def _check_replay(self, by_default: Container[str]) -> None:
        if self.recording.replay is None:
            return
        shown = {"--replay", "--evidence", "--strict", "--expect-gpus", "--profile"}
        simulated = {"--simulate": self.simulation is not None, "--seed": self.seed != 0}
        for name in (*given_options(self), *(name for name, is_given in simulated.items() if is_given)):
            if name not in shown and name.replace("--no-", "--") not in by_default:
                expected = "--replay alone, or with --strict, --profile, --expect-gpus and options of output"
                raise exclusive(("--replay", name), expected)


def sections() -> tuple[str, ...]:
    """The sections that a report of a collective may have."""
    return (
        *("rows", "rank_times", "evidence", "fallback", "causes", "findings"),
        *("winners", "refused", "backends", "mpi_support"),
    )


def app(command: Command) -> typer.Typer:
    """The command for typer, with the options that mean something for this collective."""
    collective = collective_named(command.name)
    means_something = {
        "ops": collective.reduces,
        "root": collective.rooted,
        "algo": not collective.point_to_point,
        "proto": not collective.point_to_point,
        "hierarchical": collective.decomposes,
        "skew": collective.skewed is not None,
    }
    without = {option for option, has_meaning in means_something.items() if not has_meaning}

    def run(options: CollectiveOptions, shown: PresentationOptions) -> int:
        from gpubench.jobs.collective import job

        return job.run(options.plan(collective, shown), sys.argv[1:])

    return typer_app(command, help_of(collective), CollectiveOptions, run, without=without)


def help_of(collective: "Collective") -> HelpPage:
    """The help of a collective: its size and bus bandwidth, and commands to start from."""
    if collective.reduces:
        example, own = "Measure another data type, and two reductions", "--dtype bfloat16 --op sum,max"
    elif collective.rooted:
        example, own = "Measure with another root", "--root 1"
    else:
        example, own = "Time ten replays of a CUDA graph", "--graph 10"
    return HelpPage(
        (
            (
                "Measure on all GPUs of this host, one rank per GPU, and keep the result",
                f"gpubench {collective.name} --sizes 1K:4G --output result.json",
            ),
            ("Measure on two nodes of eight GPUs", f"mpirun -n 16 gpubench {collective.name}"),
            (example, f"gpubench {collective.name} {own}"),
            ("Write CSV", f"gpubench {collective.name} --format csv > result.csv"),
            (
                "Try it without a GPU",
                f"gpubench {collective.name} --simulate hgx-h100-8 --fault link0-3:staged=yes",
            ),
        ),
        f"""{collective.description}

Backends: {BACKEND_SUMMARIES}.
""",
    )

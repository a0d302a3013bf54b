"""The options of the collectives: declared once, read and validated in one place."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpubench.cli.options.choices import parse_choices
from gpubench.cli.options.presentation import PLOT, PresentationOptions
from gpubench.cli.options.recording import RecordingOptions
from gpubench.cli.options.sampling import SamplingOptions
from gpubench.cli.options.simulation import SimulationOptions
from gpubench.cli.options.variants import VariantOptions, check_variants, parse_backends
from gpubench.cli.signature import given_options
from gpubench.errors import UsageError, exclusive
from gpubench.jobs.collective.plan import BACKENDS, DEFAULT_SIZES, CollectivePlan
from gpubench.model.paths.evidence import EvidenceUse
from gpubench.model.terms.allocator import Allocator
from gpubench.model.terms.hang import SECONDS_TO_START
from gpubench.model.terms.operation import DataType, Placement, ReduceOp
from gpubench.model.terms.sampling import AUTO
from gpubench.model.terms.split import SPLITS, check_split
from gpubench.model.terms.sweep import parse_sizes

if TYPE_CHECKING:
    from gpubench.collectives.record import Collective
    from gpubench.collectives.request import SweepRequest


@dataclass(frozen=True, kw_only=True)
class CollectiveOptions:
    """What to measure, with what, and how to show it."""

    sizes: Annotated[
        str | None,
        typer.Option(
            "--sizes",
            metavar="SIZES",
            help=f"1K:4G (x2), 1K:4G:4 (x4), 1M:64M:+1M (steps), or 1K,64K,1M. "
            f"Default {DEFAULT_SIZES['nccl']} on GPUs, {DEFAULT_SIZES['host']} on the host backend.",
        ),
    ] = None
    dtype: Annotated[
        list[str] | None,
        typer.Option("--dtype", metavar="TYPE", help=f"{', '.join(DataType)}; several with commas. Default float32."),
    ] = None
    op: Annotated[
        list[str] | None,
        typer.Option("--op", metavar="OP", help=f"{', '.join(ReduceOp)}; several with commas. Default sum."),
    ] = None
    root: Annotated[int, typer.Option("--root", metavar="RANK", help="The root rank.")] = 0
    variants: VariantOptions
    in_place: Annotated[bool, typer.Option("--in-place", help="Only in place: the result over the input.")] = False
    out_of_place: Annotated[bool, typer.Option("--out-of-place", help="Only out of place.")] = False
    both: Annotated[bool, typer.Option("--both", help="Both (the default, where in place exists).")] = False
    sampling: SamplingOptions
    warmup: Annotated[int, typer.Option("--warmup", metavar="N", min=0, help="Untimed operations before a row.")] = 5
    graph: Annotated[
        int,
        typer.Option(
            "--graph",
            metavar="N",
            min=0,
            help="Capture the iterations in a CUDA graph and time N replays of it.",
            show_default=False,
        ),
    ] = 0
    check: Annotated[bool, typer.Option("--check/--no-check", help="Verify every rank's data.")] = True
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            metavar="|".join(BACKENDS),
            help="nccl drives GPUs (default where there are any); host is MPI on CPU buffers; nccl,host has both.",
        ),
    ] = None
    nccl_library: Annotated[
        str | None,
        typer.Option("--nccl-library", metavar="PATH", help="Measure this libnccl.so.2, say a training framework's."),
    ] = None
    allocator: Annotated[
        str,
        typer.Option(
            "--allocator",
            metavar="|".join(Allocator),
            help="Buffers from cudaMalloc, as frameworks have them, or ncclMemAlloc, as nccl-tests.",
        ),
    ] = "cuda"
    np: Annotated[
        int | None,
        typer.Option("--np", metavar="N", min=1, help="Ranks to launch here. Default: one a GPU; 2 without GPUs."),
    ] = None
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="S",
            min=1,
            help="Seconds without one completed operation after which a run that hangs is ended; while it starts, "
            f"{SECONDS_TO_START:g}.",
        ),
    ] = 60.0
    evidence: Annotated[
        bool | None,
        typer.Option(
            "--evidence/--no-evidence",
            help="Show what is known of every path; or do not listen to NCCL and count nothing.",
        ),
    ] = None
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Exit 1 when bytes go through host memory and need not; NCCL is told to refuse it."
        ),
    ] = False
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            metavar="|".join(SPLITS),
            help="The same in groups of ranks at once, a row each: by node, by place in the node, in twos, in so many. "
            f"Not with --evidence, --strict, --simulate or --iters {AUTO}.",
        ),
    ] = None
    plot: PLOT = False
    simulation: SimulationOptions
    recording: RecordingOptions
    presentation: PresentationOptions

    def plan(self, collective: "Collective") -> CollectivePlan:
        """What these options ask of a collective.

        Raises:
            UsageError: anything that cannot be, with the next step.
        """
        from gpubench.jobs.sources import Simulated, source_of

        self._check_replay()
        backends, allocator = parse_backends(self.backend), parse_choices("--allocator", [self.allocator], Allocator)[0]
        if self.nccl_library is not None and not Path(self.nccl_library).is_file():
            from gpubench.errors import unreadable_nccl_library

            raise unreadable_nccl_library(self.nccl_library, "there is no such file")
        recording = self.recording.parse({})
        plan = CollectivePlan(
            request=self._request(collective),
            backend=next(iter(backends), None),
            nccl_library=self.nccl_library,
            allocator=allocator,
            ranks=self.np,
            timeout_s=self.timeout,
            evidence=self._evidence(),
            strict=self.strict,
            split=self.split,
            variants=self.variants.parse(host_too=len(backends) > 1),
            source=source_of(self.timeout, simulation=self.simulation.parse(), replay=recording.replay),
            recording=recording,
            presentation=self.presentation.parse(sections(), plot=self.plot),
        )
        check_variants(
            plan.variants,
            {
                "--split": plan.split is not None,
                "--simulate": isinstance(plan.source, Simulated),
                "--graph": plan.variants.host_too and plan.request.graph_replays > 0,
            },
        )
        if plan.split is not None:
            self._check_split(plan.split)
            plan = replace(plan, evidence=EvidenceUse.OFF)
        if isinstance(plan.source, Simulated):
            if plan.backend is not None:
                raise exclusive(("--simulate", f"--backend {plan.backend}"), "one of them: a model, or a measurement")
            plan.refuse_gpu_options("a simulated machine has none")
        if plan.backend == "host":
            plan.refuse_gpu_options("--backend host uses none")
        return plan

    def _request(self, collective: "Collective") -> "SweepRequest":
        from gpubench.collectives.request import SweepRequest

        return SweepRequest(
            collective=collective,
            sizes=() if self.sizes is None else parse_sizes(self.sizes),
            dtypes=parse_choices("--dtype", self.dtype or ["float32"], DataType),
            ops=parse_choices("--op", self.op or ["sum"], ReduceOp),
            root=self.root,
            placements=self._placements(collective),
            sampling=self.sampling.parse(graph_replays=self.graph),
            warmup=self.warmup,
            graph_replays=self.graph,
            check=self.check,
        )

    def _placements(self, collective: "Collective") -> tuple[Placement, ...]:
        """Out of place, in place, or both, out of place first."""
        chosen = {"--in-place": self.in_place, "--out-of-place": self.out_of_place, "--both": self.both}
        asked = [option for option, is_given in chosen.items() if is_given]
        if len(asked) > 1:
            raise exclusive(asked, "one of them, or none for the default")
        if not collective.in_place and (self.in_place or self.both):
            raise UsageError(
                f"{collective.name} has no in-place form",
                reason="NCCL defines none: a rank would overwrite what it has yet to send",
                next_step=f"gpubench {collective.name}, which measures it out of place",
            )
        if self.in_place:
            return (Placement.IN_PLACE,)
        if self.out_of_place or not collective.in_place:
            return (Placement.OUT_OF_PLACE,)
        return (Placement.OUT_OF_PLACE, Placement.IN_PLACE)

    def _evidence(self) -> EvidenceUse:
        """What to do about evidence; kept where nobody chose."""
        if self.evidence is False and self.strict:
            raise UsageError(
                "--strict with --no-evidence",
                expected="one of them: --strict judges the paths that evidence shows",
                next_step="leave --no-evidence out",
            )
        return {None: EvidenceUse.KEPT, True: EvidenceUse.SHOWN, False: EvidenceUse.OFF}[self.evidence]

    def _check_split(self, text: str) -> None:
        """Raise UsageError for what cannot be in groups: evidence is of the process and not of a group."""
        check_split(text)
        paths = "one group", "NCCL's log and the counters of links would be those of all groups at once"
        refused = {
            "--evidence": (self.evidence is True, *paths),
            "--strict": (self.strict, *paths),
            "--simulate": (self.simulation.simulate is not None, "ranks", "the model has one collective run at a time"),
            f"--iters {AUTO}": (
                self.sampling.iters == AUTO,
                "as many iterations in every group",
                "groups would end at different times, and the last ones would have the links for themselves",
            ),
        }
        for option, (is_given, expected, reason) in refused.items():
            if is_given:
                raise UsageError(
                    f"{option} with --split {text}",
                    expected=expected,
                    reason=reason,
                    next_step=f"leave {option} out"
                    if option != f"--iters {AUTO}"
                    else "--iters 100, or another number",
                )

    def _check_replay(self) -> None:
        """Raise UsageError where --replay stands beside an option that says what to measure."""
        if self.recording.replay is None:
            return
        shown = {"--replay", "--evidence", "--strict", "--plot", *given_options(self.presentation)}
        for option in given_options(self):
            if option not in shown:
                expected = "--replay alone, or with --evidence, --strict and what says how to show it"
                raise exclusive(("--replay", option), expected)


def sections() -> tuple[str, ...]:
    """What a report of a collective may have."""
    from gpubench.model.results.rank_times import RANK_TIMES_SECTION
    from gpubench.model.results.report import FINDINGS_SECTION, ROWS_SECTION
    from gpubench.model.results.rows.causes import CAUSES_SECTION
    from gpubench.model.results.rows.evidence import EVIDENCE_SECTION, FALLBACK_SECTION
    from gpubench.model.results.winners import REFUSED_SECTION, WINNERS_SECTION

    return (
        *(ROWS_SECTION, RANK_TIMES_SECTION, EVIDENCE_SECTION, FALLBACK_SECTION, CAUSES_SECTION, FINDINGS_SECTION),
        *(WINNERS_SECTION, REFUSED_SECTION),
    )

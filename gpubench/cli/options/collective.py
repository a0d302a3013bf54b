"""The options of the collectives: declared once, read and validated in one place."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gpubench.cli.options.choices import parse_choices
from gpubench.cli.options.nccl_tests import NcclTestsOptions, check_outputs, parse_dtypes
from gpubench.cli.options.presentation import PLOT, PresentationOptions
from gpubench.cli.options.profile import PROFILE, check_profile, expected_gpus
from gpubench.cli.options.recording import RecordingOptions
from gpubench.cli.options.sampling import SamplingOptions
from gpubench.cli.options.simulation import SimulationOptions
from gpubench.cli.options.variants import VariantOptions, check_variants, parse_backends
from gpubench.cli.plain_values import MEASURE, NCCL
from gpubench.cli.signature import completed, flag, given_options, option, sharing_ranks, step_timeout
from gpubench.errors import UsageError, exclusive
from gpubench.jobs.collective.plan import BACKEND_SUMMARIES, DEFAULT_SIZES, CollectivePlan
from gpubench.model.paths.evidence import EvidenceUse
from gpubench.model.terms.allocator import Allocator
from gpubench.model.terms.hang import SECONDS_TO_START
from gpubench.model.terms.operation import DataType, Placement, ReduceOp
from gpubench.model.terms.split import SPLITS, check_split
from gpubench.model.terms.statistics.sampling import AUTO
from gpubench.model.terms.sweep import parse_sizes

if TYPE_CHECKING:
    from gpubench.collectives.record import Collective
    from gpubench.collectives.request import SweepRequest


@dataclass(frozen=True, kw_only=True)
class CollectiveOptions:
    """The options of a collective: what to measure, with what, and how to show it."""

    help_group: ClassVar = MEASURE

    sizes: str | None = option(
        "SIZES",
        f"1K:4G (x2), 1K:4G:4 (x4), 1M:64M:+1M (steps), or 1K,64K,1M. "
        f"Default {DEFAULT_SIZES['nccl']} on GPUs, {DEFAULT_SIZES['host']} on the host backend.",
    )
    dtype: list[str] | None = option(
        "TYPE",
        f"{', '.join(DataType)}; several with commas. Default float32.",
        name="--dtype -d",
        autocompletion=completed("dtype"),
    )
    op: list[str] | None = option(
        "OP", f"{', '.join(ReduceOp)}; several with commas. Default sum.", autocompletion=completed("op")
    )
    root: int = option("RANK", "The root rank.", name="--root -r", default=0)
    variants: VariantOptions
    in_place: bool = flag("Only in place: the result over the input.")
    out_of_place: bool = flag("Only out of place.")
    both: bool = flag("Both (the default, where in place exists).")
    sampling: SamplingOptions
    warmup: int = option("N", "Untimed operations before a row.", name="--warmup -w", default=5, min=0)
    graph: int = option(
        "N",
        "Capture the iterations in a CUDA graph and time N replays of it.",
        default=0,
        min=0,
        show_default=False,
        rich_help_panel=NCCL,
    )
    check: bool = flag("Verify every rank's data.", name="--check/--no-check", default=True)
    backend: str | None = option(
        "NAME",
        f"{BACKEND_SUMMARIES}. Several with commas: one table, nccl,torch:nccl,host.",
        autocompletion=completed("backend"),
    )
    nccl_library: str | None = option(
        "PATH", "Measure this libnccl.so.2, say a training framework's.", rich_help_panel=NCCL
    )
    allocator: str = option(
        "|".join(Allocator),
        "Buffers from cudaMalloc, as frameworks have them, or ncclMemAlloc, as nccl-tests.",
        default="cuda",
        autocompletion=completed("allocator"),
        rich_help_panel=NCCL,
    )
    np: int | None = option("N", "Ranks to launch here. Default: one a GPU; 2 without GPUs.", min=1)
    ranks_per_gpu: int = sharing_ranks()
    timeout: float = step_timeout(f"an operation; {SECONDS_TO_START:g} while the run starts", default=60.0, least=1)
    evidence: bool | None = flag(
        "Show what is known of every path; or do not listen to NCCL and count nothing.",
        name="--evidence/--no-evidence",
        default=None,
    )
    expect_gpus: int | None = expected_gpus()
    strict: bool = flag(
        "Exit 1 for whatever is not PASS, 3 where speed was not judged; NCCL is told to refuse host memory."
    )
    profile: str | None = option("NAME|FILE", PROFILE, autocompletion=completed("profile"))
    split: str | None = option(
        "|".join(SPLITS),
        "The same in groups of ranks at once, a row each: by node, by place in the node, in twos, in so many. "
        f"Not with --evidence, --strict, --simulate or --iters {AUTO}.",
    )
    plot: bool = flag(PLOT)
    nccl_tests: NcclTestsOptions
    simulation: SimulationOptions
    recording: RecordingOptions
    presentation: PresentationOptions

    def plan(self, collective: "Collective") -> CollectivePlan:
        """The plan for a collective; UsageError for anything that cannot be, with the next step."""
        from gpubench.jobs.sources import Simulated, source_of

        self._check_replay()
        check_outputs(self.presentation.output, tuple(ReduceOp))
        check_profile(self.profile)
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
            ranks=self.nccl_tests.ranks(self.np, self.presentation.by_default),
            ranks_per_gpu=self.ranks_per_gpu,
            timeout_s=self.timeout,
            evidence=self._evidence(),
            strict=self.strict,
            split=self.split,
            profile=self.profile,
            expected_gpus=self.expect_gpus,
            variants=self.variants.parse(backends),
            source=source_of(self.timeout, simulation=self.simulation.parse(), replay=recording.replay),
            recording=recording,
            presentation=self.presentation.parse(sections(), plot=self.plot),
        )
        check_variants(
            plan.variants,
            {
                "--split": plan.split is not None,
                "--simulate": isinstance(plan.source, Simulated),
                "--graph": bool(plan.variants.beside) and plan.request.graph_replays > 0,
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
        plan.refuse_what_backend_lacks()
        return plan

    def _request(self, collective: "Collective") -> "SweepRequest":
        from gpubench.collectives.request import SweepRequest

        by_default = self.presentation.by_default
        sizes = self.nccl_tests.sizes(self.sizes, by_default)
        return SweepRequest(
            collective=collective,
            sizes=() if sizes is None else parse_sizes(sizes),
            dtypes=parse_dtypes(self.dtype),
            ops=parse_choices("--op", self.op or ["sum"], ReduceOp),
            root=self.root,
            placements=self._placements(collective),
            sampling=self.sampling.parse(
                graph_replays=self.graph, counted=self.split is not None or self.simulation.simulate is not None
            ),
            warmup=self.warmup,
            graph_replays=self.graph,
            check=self.nccl_tests.check(own=self.check, by_default=by_default),
        )

    def _placements(self, collective: "Collective") -> tuple[Placement, ...]:
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
        for name, (is_given, expected, reason) in refused.items():
            if is_given:
                instead = "--iters 100, or another number" if name == f"--iters {AUTO}" else f"leave {name} out"
                raise UsageError(f"{name} with --split {text}", expected=expected, reason=reason, next_step=instead)

    def _check_replay(self) -> None:
        """Raise UsageError where --replay stands beside an option that says what to measure."""
        if self.recording.replay is None:
            return
        shown = {
            "--replay",
            "--evidence",
            "--strict",
            "--plot",
            "--expect-gpus",
            "--profile",
            *given_options(self.presentation),
        }
        by_default = self.presentation.by_default
        for name in given_options(self):
            if name not in shown and name.replace("--no-", "--") not in by_default:
                expected = (
                    "--replay alone, or with what judges it (--strict, --profile, --expect-gpus) or says how to show it"
                )
                raise exclusive(("--replay", name), expected)


def sections() -> tuple[str, ...]:
    """The sections that a report of a collective may have."""
    from gpubench.model.results.rank_times import RANK_TIMES_SECTION
    from gpubench.model.results.report import FINDINGS_SECTION, ROWS_SECTION
    from gpubench.model.results.rows.backends import BACKENDS_SECTION, MPI_SUPPORT_SECTION
    from gpubench.model.results.rows.causes import CAUSES_SECTION
    from gpubench.model.results.rows.evidence import EVIDENCE_SECTION, FALLBACK_SECTION
    from gpubench.model.results.winners import REFUSED_SECTION, WINNERS_SECTION

    return (
        *(ROWS_SECTION, RANK_TIMES_SECTION, EVIDENCE_SECTION, FALLBACK_SECTION, CAUSES_SECTION, FINDINGS_SECTION),
        *(WINNERS_SECTION, REFUSED_SECTION, BACKENDS_SECTION, MPI_SUPPORT_SECTION),
    )

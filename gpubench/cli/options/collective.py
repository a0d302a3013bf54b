"""The options of the collectives: declared once, read and validated in one place."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from gpubench.cli.options.presentation import parse_choices, parse_presentation
from gpubench.cli.options.recording import parse_recording
from gpubench.cli.options.sampling import parse_sampling
from gpubench.cli.options.simulation import parse_simulation
from gpubench.cli.options.variants import check_ways, parse_backends, parse_ways
from gpubench.collectives.record import Collective
from gpubench.errors import UsageError, exclusive, unreadable_nccl_library
from gpubench.hardware.registry import BACKENDS
from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.jobs.sources import Simulated, source_of
from gpubench.measure.collective.cases import SweepRequest
from gpubench.model.paths.evidence import EvidenceUse
from gpubench.model.results.rank_times import RANK_TIMES_SECTION
from gpubench.model.results.report import FINDINGS_SECTION, ROWS_SECTION
from gpubench.model.results.rows.causes import CAUSES_SECTION
from gpubench.model.results.rows.evidence import EVIDENCE_SECTION, FALLBACK_SECTION
from gpubench.model.results.winners import REFUSED_SECTION, WINNERS_SECTION
from gpubench.model.terms.hang import SECONDS_TO_START
from gpubench.model.terms.operation import DataType, Placement, ReduceOp
from gpubench.model.terms.sampling import AUTO
from gpubench.model.terms.split import SPLITS, check_split
from gpubench.model.terms.sweep import parse_sizes
from gpubench.ports.memory import Allocator

SECTIONS = (
    *(ROWS_SECTION, RANK_TIMES_SECTION, EVIDENCE_SECTION, FALLBACK_SECTION, CAUSES_SECTION, FINDINGS_SECTION),
    *(WINNERS_SECTION, REFUSED_SECTION),
)


SIZES = Annotated[
    str | None,
    typer.Option(
        "--sizes",
        metavar="SIZES",
        help=f"1K:4G (x2), 1K:4G:4 (x4), 1M:64M:+1M (steps), or 1K,64K,1M. "
        f"Default {BACKENDS[0].default_sizes} on GPUs, {BACKENDS[-1].default_sizes} on the host backend.",
        show_default=False,
    ),
]
DTYPE = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        help=f"{', '.join(DataType)}; several with commas. Default float32.",
        show_default=False,
    ),
]
OP = Annotated[
    list[str] | None,
    typer.Option(
        "--op", metavar="OP", help=f"{', '.join(ReduceOp)}; several with commas. Default sum.", show_default=False
    ),
]
ROOT = Annotated[int, typer.Option("--root", metavar="RANK", help="The root rank.")]
IN_PLACE = Annotated[
    bool, typer.Option("--in-place", help="Only in place: the result over the input.", show_default=False)
]
OUT_OF_PLACE = Annotated[bool, typer.Option("--out-of-place", help="Only out of place.", show_default=False)]
BOTH = Annotated[bool, typer.Option("--both", help="Both (the default, where in place exists).", show_default=False)]
WARMUP = Annotated[int, typer.Option("--warmup", metavar="N", min=0, help="Untimed operations before a row.")]
GRAPH = Annotated[
    int,
    typer.Option(
        "--graph",
        metavar="N",
        min=0,
        help="Capture the iterations in a CUDA graph and time N replays of it.",
        show_default=False,
    ),
]
CHECK = Annotated[bool, typer.Option("--check/--no-check", help="Verify every rank's data.")]
EVIDENCE = Annotated[
    bool | None,
    typer.Option(
        "--evidence/--no-evidence",
        help="Show what is known of every path; or do not listen to NCCL and count nothing.",
        show_default=False,
    ),
]
STRICT = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Exit 1 when bytes go through host memory and need not; NCCL is told to refuse it.",
        show_default=False,
    ),
]
BACKEND = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="|".join(each.name for each in BACKENDS),
        help=f"{'; '.join(each.summary for each in BACKENDS)}; nccl,host has both.",
        show_default=False,
    ),
]
NCCL_LIBRARY = Annotated[
    str | None,
    typer.Option(
        "--nccl-library",
        metavar="PATH",
        help="Measure this libnccl.so.2, say a training framework's.",
        show_default=False,
    ),
]
ALLOCATOR = Annotated[
    str,
    typer.Option(
        "--allocator",
        metavar="|".join(Allocator),
        help="Buffers from cudaMalloc, as frameworks have them, or ncclMemAlloc, as nccl-tests.",
    ),
]
NP = Annotated[
    int | None,
    typer.Option(
        "--np", metavar="N", min=1, help="Ranks to launch here. Default: one a GPU; 2 without GPUs.", show_default=False
    ),
]
SPLIT = Annotated[
    str | None,
    typer.Option(
        "--split",
        metavar="|".join(SPLITS),
        help="The same in groups of ranks at once, a row each: by node, by place in the node, in twos, in so many. "
        f"Not with --evidence, --strict, --simulate or --iters {AUTO}.",
        show_default=False,
    ),
]
TIMEOUT = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="S",
        min=1,
        help="Seconds without one completed operation after which a run that hangs is ended; while it starts, "
        f"{SECONDS_TO_START:g}.",
    ),
]


def parse_placements(
    collective: Collective, *, in_place: bool, out_of_place: bool, both: bool
) -> tuple[Placement, ...]:
    """Out of place, in place, or both, out of place first.

    Raises:
        UsageError: more than one choice, or in place where NCCL defines no such form.
    """
    asked = [
        name
        for name, chosen in (("--in-place", in_place), ("--out-of-place", out_of_place), ("--both", both))
        if chosen
    ]
    if len(asked) > 1:
        raise exclusive(asked, "one of them, or none for the default")
    if not collective.in_place and (in_place or both):
        raise UsageError(
            f"{collective.name} has no in-place form",
            reason="NCCL defines none: a rank would overwrite what it has yet to send",
            next_step=f"gpubench {collective.name}, which measures it out of place",
        )
    if in_place:
        return (Placement.IN_PLACE,)
    if out_of_place or not collective.in_place:
        return (Placement.OUT_OF_PLACE,)
    return (Placement.OUT_OF_PLACE, Placement.IN_PLACE)


def parse_evidence(chosen: bool | None, *, strict: bool) -> EvidenceUse:  # noqa: FBT001 - typer's three answers
    """What to do about evidence; kept where nobody chose.

    Raises:
        UsageError: to be judged by what is not looked at.
    """
    if chosen is False and strict:
        raise UsageError(
            "--strict with --no-evidence",
            expected="one of them: --strict judges the paths that evidence shows",
            next_step="leave --no-evidence out",
        )
    return {None: EvidenceUse.KEPT, True: EvidenceUse.SHOWN, False: EvidenceUse.OFF}[chosen]


def parse_collective_options(collective: Collective, given: dict[str, Any]) -> CollectivePlan:
    """The options of a command from what typer read.

    Raises:
        UsageError: anything that cannot be, with the next step.
    """
    backend, library = next(iter(parse_backends(given["backend"])), None), given["nccl_library"]
    allocator = parse_choices("--allocator", [given["allocator"]], Allocator)[0]
    if library is not None and not Path(library).is_file():
        raise unreadable_nccl_library(library, "there is no such file")
    recording = parse_recording(given, {})
    request = SweepRequest(
        collective=collective,
        sizes=() if given["sizes"] is None else parse_sizes(given["sizes"]),
        dtypes=parse_choices("--dtype", given["dtype"] or ["float32"], DataType),
        ops=parse_choices("--op", given.get("op") or ["sum"], ReduceOp),
        root=given.get("root", 0),
        placements=parse_placements(
            collective, in_place=given["in_place"], out_of_place=given["out_of_place"], both=given["both"]
        ),
        sampling=parse_sampling(given),
        warmup=given["warmup"],
        graph_replays=given["graph"],
        check=given["check"],
    )
    options = CollectivePlan(
        request=request,
        backend=backend,
        nccl_library=library,
        allocator=allocator,
        ranks=given["np"],
        timeout_s=given["timeout"],
        evidence=parse_evidence(given["evidence"], strict=given["strict"]),
        strict=given["strict"],
        split=given["split"],
        variants=parse_ways(given),
        source=source_of(given["timeout"], simulation=parse_simulation(given), replay=recording.replay),
        recording=recording,
        presentation=parse_presentation(given, SECTIONS),
    )
    check_ways(
        options.variants,
        {
            "--split": options.split is not None,
            "--simulate": isinstance(options.source, Simulated),
            "--graph": options.variants.host_too and options.request.graph_replays > 0,
        },
    )
    if options.split is not None:
        options = _check_split(options, shown=given["evidence"] is True)
    if isinstance(options.source, Simulated):
        if backend is not None:
            raise exclusive(("--simulate", f"--backend {backend}"), "one of them: a model, or a measurement")
        options.refuse_gpu_options("a simulated machine has none")
    if backend == "host":
        options.refuse_gpu_options("--backend host uses none")
    return options


def _check_split(options: CollectivePlan, *, shown: bool) -> CollectivePlan:
    """The options with several groups: without evidence, which is of the process and not of a group.

    Raises:
        UsageError: together with what cannot be in groups.
    """
    text = str(options.split)
    check_split(text)
    paths = "one group", "NCCL's log and the counters of links would be those of all groups at once"
    refused = {
        "--evidence": (shown, *paths),
        "--strict": (options.strict, *paths),
        "--simulate": (isinstance(options.source, Simulated), "ranks", "the model has one collective run at a time"),
        f"--iters {AUTO}": (
            options.request.sampling.iterations is None,
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
                next_step=f"leave {option} out" if option != f"--iters {AUTO}" else "--iters 100, or another number",
            )
    return replace(options, evidence=EvidenceUse.OFF)

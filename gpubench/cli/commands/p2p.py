"""`gpubench p2p`: its options, and the run."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from gpubench.cli.options import (
    PresentationOptions,
    RecordingOptions,
    SimulationOptions,
    check_profile,
    expected_gpus,
    judging_profile,
    parse_choices,
    plotting,
)
from gpubench.cli.signature import JUDGE, MEASURE, OUTPUT, HelpPage, app_of, flag, option, step_timeout
from gpubench.errors import UsageError, exclusive
from gpubench.jobs.plans import As, MemoryKind, P2pPlan
from gpubench.model.paths.transport import EvidenceUse
from gpubench.model.terms.units import parse_sizes
from gpubench.records import dataclass

if TYPE_CHECKING:
    from gpubench.formats.presentation import Presentation

HELP = HelpPage(
    (
        ("Measure all pairs of GPUs of this host", "gpubench p2p"),
        ("Measure some pairs at several sizes", "gpubench p2p --pairs 0-1,1-0 --sizes 8:1G"),
        ("Copy as nvbandwidth does, and write CSV", "gpubench p2p --as nvbandwidth --format csv > p2p.csv"),
        ("Measure unified memory too", "gpubench p2p --memory managed"),
        (
            "Start a program without peer access where that is broken or slow",
            'eval "$(gpubench p2p --veto)" && vllm serve MODEL -tp 2',
        ),
        ("Copy between ranks", "mpirun -n 4 gpubench p2p"),
        ("Try it without a GPU", "gpubench p2p --simulate hgx-h100-8 --fault link0-3:staged=yes"),
    ),
    """
Copies run with peer access off, then on: written and read by copy engines, by a kernel, in both directions at once,
with 16 bytes for the latency, to and from host memory, and between many pairs at once. Every destination verifies the
data. Each pair is compared with its limit, with its siblings, and with healthy machines of the type.

Under mpirun or srun, copies run between ranks: through CUDA IPC within a node, by NCCL's send and receive between
nodes, disjoint pairs at the same time. Host memory, kernels, patterns and peer access off are not measured then.

Exit codes: 0 done; 1 wrong data, or with --strict a slow or host-staged pair; 2 wrong usage; 3 could not measure.
""",
)


@dataclass(frozen=True, kw_only=True)
class P2pOptions:
    """The pairs to copy between, in which ways, and how to show it."""

    help_group: ClassVar = MEASURE

    sizes: str | None = option(
        "SIZES",
        "Copy only these sizes, by copy engines, with peer access off and on: 8:1G or 1K,64K,1M (default: 256M in "
        "every way, and 16 bytes for the latency).",
        common=True,
    )
    pairs: list[str] | None = option(
        "I-J", "Copy only from GPU I to GPU J (under mpirun: ranks): 0-1,3-5 (default: all pairs).", common=True
    )
    memory: str = option(
        "|".join(MemoryKind),
        "managed: also measure unified memory, prefetched, fetched by page faults, and used in place (64M, or the one "
        "size of --sizes).",
        default=MemoryKind.PLAIN.value,
        common=True,
    )
    like: str | None = option(
        "|".join(As),
        "Copy with the parameters of nvbandwidth: 512M, 16 copies after 4, median of 3.",
        name="--as",
        common=True,
    )
    host: bool = flag("Also copy to and from host memory.", name="--host/--no-host", default=True)
    patterns: bool = flag("Also copy between many pairs at once.", name="--patterns/--no-patterns", default=True)
    check: bool = flag("Verify the data at every destination.", name="--check/--no-check", default=True)
    evidence: bool = flag("Show the evidence for every pair's path.")
    veto: bool = flag(
        "Print one line for a shell in place of the table: the environment that avoids peer access where it is broken "
        "or slow.",
        common=True,
        group=OUTPUT,
    )
    strict: bool = flag("Exit 1 for slow and host-staged pairs too.", common=True, group=JUDGE)
    timeout: float = step_timeout("reading a driver, or one copy between ranks", default=20.0)
    plot: bool = plotting()
    profile: str | None = judging_profile()
    expect_gpus: int | None = expected_gpus()
    simulation: SimulationOptions
    recording: RecordingOptions
    presentation: PresentationOptions

    def plan(self) -> P2pPlan:
        """The plan of these options. Raises UsageError for anything that cannot be, with the next step."""
        from gpubench.jobs.p2p import SECTIONS
        from gpubench.jobs.sources import source_of

        like = None if self.like is None else parse_choices("--as", [self.like], As)[0]
        if like is not None and self.sizes is not None:
            raise exclusive(("--as nvbandwidth", "--sizes"), "one of them: nvbandwidth copies 512M")
        shown = {"--simulate": self.simulation.simulate, "--record": self.recording.record, "--sizes": self.sizes}
        memory = parse_choices("--memory", [self.memory], MemoryKind)[0]
        sizes = None if self.sizes is None else parse_sizes(self.sizes)
        if memory is MemoryKind.MANAGED:
            _check_managed(like, sizes)
        check_profile(self.profile)
        recording = self.recording.parse(shown | {"--pairs": self.pairs, "--as": self.like})
        return P2pPlan(
            source=source_of(self.timeout, simulation=self.simulation.parse(), replay=recording.replay),
            recording=recording,
            pairs=self._pairs(),
            sizes=sizes,
            like=like,
            memory=memory,
            host=self.host,
            patterns=self.patterns,
            check=self.check,
            strict=self.strict,
            evidence=EvidenceUse.SHOWN if self.evidence else EvidenceUse.KEPT,
            timeout_s=self.timeout,
            profile=self.profile,
            expected_gpus=self.expect_gpus,
            presentation=self._shown(SECTIONS),
        )

    def _shown(self, sections: Sequence[str]) -> "Presentation":
        from gpubench.formats.registry import TABLE, VETO

        shown = self.presentation.parse(sections, plot=self.plot)
        if self.veto and shown.format is not TABLE:
            raise exclusive(("--veto", f"--format {shown.format.name}"), "one of them: both write to stdout")
        return replace(shown, format=VETO, show_progress=False) if self.veto else shown

    def _pairs(self) -> tuple[tuple[int, int], ...] | None:
        from gpubench.model.paths.p2p import parse_pairs

        try:
            return None if self.pairs is None else parse_pairs(self.pairs)
        except ValueError as error:
            raise UsageError(
                f"--pairs {str(error)!r} is not a pair of GPUs",
                expected="two different GPUs, numbered as in nvidia-smi: 0-1,3-5",
                next_step="--pairs 0-1",
            ) from None


def _check_managed(like: str | None, sizes: tuple[int, ...] | None) -> None:
    if like is not None:
        raise exclusive((f"--as {like}", "--memory managed"), f"one of them: {like} does not copy managed memory")
    if sizes is not None and len(sizes) != 1:
        raise UsageError(
            f"--memory managed with {len(sizes)} sizes",
            expected="one size, for pinned and managed memory",
            next_step="--sizes 256M",
        )


def _run(options: P2pOptions) -> int:
    from gpubench.jobs import p2p

    return p2p.run(options.plan(), sys.argv[1:])


app = app_of(HELP, P2pOptions, _run)

"""The plan of a collective: what is measured, where, and how it is presented."""

import signal
from collections.abc import Container, Mapping, Sequence
from dataclasses import field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gpubench.backends.registry import BACKENDS as BACKEND_KINDS
from gpubench.backends.registry import BackendKind, backend_named, default_backend
from gpubench.errors import UsageError, no_gpu
from gpubench.formats.presentation import Presentation
from gpubench.jobs.options import (
    MEASURE,
    NCCL,
    expected_gpus,
    flag,
    judging_profile,
    one_of,
    option,
    sharing_ranks,
    step_timeout,
    strict_option,
)
from gpubench.jobs.sources import Recording
from gpubench.model.paths.transport import EvidenceUse
from gpubench.model.terms.operation import HOST, Allocator
from gpubench.model.terms.operation import OPTION as HIERARCHICAL_OPTION
from gpubench.model.terms.overlap import OVERLAP, OverlapAsked
from gpubench.model.terms.ranks import LEAST_SECONDS_TO_START, SPLITS, TIMES_TO_START
from gpubench.model.terms.settings import (
    ALGORITHM_VARIABLE,
    HIERARCHICAL,
    PER_COMMUNICATOR,
    PROTOCOL_VARIABLE,
    REGISTER,
    REQUESTS,
    SET_OPTION,
    NcclSetting,
)
from gpubench.model.terms.statistics import AUTO
from gpubench.model.terms.units import parse_sizes
from gpubench.records import dataclass

if TYPE_CHECKING:
    from gpubench.collectives.record import Collective, SweepRequest
    from gpubench.jobs.sources import Source

BACKENDS = tuple(each.name for each in BACKEND_KINDS)
BACKEND_SUMMARIES = "; ".join(each.summary for each in BACKEND_KINDS)
DEFAULT_SIZES = {each.name: each.default_sizes for each in BACKEND_KINDS}
FACTS_TIMEOUT_S = 20.0
SHARING_OPTION = "--ranks-per-gpu"
SOAK_ENDS = signal.SIGUSR1  # has the first rank end a soak, with all others and a report


def _here() -> "Source":
    from gpubench.jobs.sources import Here

    return Here(FACTS_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class AskedVariants:
    """Variants to measure beside the own choice of the first backend; `backends` are all, where there are several.

    `by_set` are the variables that `--set` names, of which `settings` have the values.
    """

    settings: tuple[NcclSetting, ...] = ()
    hierarchical: bool = False
    backends: tuple[str, ...] = ()
    by_set: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.settings) or self.hierarchical or bool(self.beside)

    @property
    def beside(self) -> tuple[str, ...]:
        """The backends beside the first."""
        return self.backends[1:]

    @property
    def variables(self) -> tuple[str, ...]:
        """All variables that settings have."""
        return tuple(self.settings[0].variables) if self.settings else ()

    @property
    def requests(self) -> tuple[str, ...]:
        """What all settings ask of a communicator by calls."""
        return tuple(self.settings[0].requests) if self.settings else ()

    @property
    def processes(self) -> tuple[NcclSetting, ...]:
        """The settings that need jobs of their own, each once."""
        return tuple(dict.fromkeys(each.of_process for each in self.settings if each.of_process.values))

    def inside(self, process: NcclSetting) -> "AskedVariants":
        """The variants that the job under such a setting measures, each on a communicator of its own."""
        own = [each.of_communicator for each in self.settings if each.of_process == process]
        return replace(self, settings=tuple(each for each in own if each.values))

    @property
    def options(self) -> tuple[str, ...]:
        """The options that ask for it, for messages."""
        asked = {
            "--algo": ALGORITHM_VARIABLE in self.variables and ALGORITHM_VARIABLE not in self.by_set,
            "--proto": PROTOCOL_VARIABLE in self.variables and PROTOCOL_VARIABLE not in self.by_set,
            SET_OPTION: bool(self.by_set),
            **{f"--{name}": name in self.requests for name in REQUESTS},
            HIERARCHICAL_OPTION: self.hierarchical,
            f"--backend {','.join(self.backends)}": bool(self.beside),
        }
        return tuple(option for option, is_asked in asked.items() if is_asked)

    def names(self, backend: str) -> list[str]:
        """The names in rows, for the metadata: of nothing where there is only one way."""
        names = [each.name for each in self.inside(NcclSetting()).settings]
        for process in self.processes:
            names += [process.name, *(each.name for each in self.settings if each.of_process == process != each)]
        names += [HIERARCHICAL] if self.hierarchical else []
        return [*names, *(each for each in self.beside if each != backend)]


def check_unset(variants: AskedVariants, settings: Mapping[str, str]) -> None:
    """Raise UsageError where NCCL's own choice could not be measured, since somebody has made it.

    `settings` are NCCL's variables as NCCL will see them. An algorithm makes NCCL's choice of a protocol too.
    """
    variables = dict.fromkeys(variants.variables)
    if not {*PER_COMMUNICATOR}.isdisjoint(variables):
        variables |= dict.fromkeys(PER_COMMUNICATOR)
    for name in (each for each in variables if each in settings):
        raise UsageError(
            f"{' and '.join(variants.options)} with {name}={settings[name]} set already",
            expected="NCCL's own choice to compare with",
            reason="it stands in the environment, or in a file as /etc/nccl.conf",
            next_step=f"unset {name}",
        )


def values_of(kind: type[object], record: object) -> dict[str, Any]:
    """The values that a record has for fields of a dataclass, by their names."""
    names = (each.name for each in fields(kind))  # type: ignore[arg-type]
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


def _parse_library(text: str) -> str:
    if not Path(text).is_file():
        from gpubench.errors import unreadable_nccl_library

        raise unreadable_nccl_library(text, "there is no such file")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """What a rank is asked beside its request, as it was typed, and as plain data.

    `backend`, `ranks` and `nccl_library` are None where the machine decides; `profile` is the name or file of the one
    to judge speed by, None for a match. `overlap` is the computation beside the collective, None for none.
    `checked_variables` are those that NCCL has to know.
    """

    help_group: ClassVar = MEASURE

    backend: str | None = None
    nccl_library: str | None = option(
        "PATH", "Measure this libnccl.so.2, e.g. the one of a training framework.", read=_parse_library, group=NCCL
    )
    allocator: Allocator = option(
        "|".join(Allocator),
        "Allocate buffers with cudaMalloc, as frameworks do, or ncclMemAlloc, as nccl-tests does.",
        default=Allocator.CUDA.value,
        read=one_of("--allocator", Allocator),
        completed_as="allocator",
        group=NCCL,
    )
    ranks: int | None = option(
        "N", "Ranks to launch on this host (default: one per GPU; 2 without GPUs).", name="--np", min=1, common=True
    )
    ranks_per_gpu: int = sharing_ranks()
    timeout_s: float = step_timeout(
        f"one operation ({TIMES_TO_START} times as long, at least {LEAST_SECONDS_TO_START:g} s, to start ranks)",
        default=60.0,
        least=1,
    )
    evidence: EvidenceUse = flag(
        "Show the evidence for every path, or collect none (no NCCL log, no counters).",
        name="--evidence/--no-evidence",
        default=None,
        read=lambda shown: EvidenceUse.SHOWN if shown else EvidenceUse.OFF,
        without=EvidenceUse.KEPT,
    )
    expected_gpus: int | None = expected_gpus()
    strict: bool = strict_option()
    profile: str | None = judging_profile()
    split: str | None = option(
        "|".join(SPLITS),
        "Run the collective in several groups at once, one row a group: per node, per local rank (rail), in pairs, or "
        f"in groups of N ranks. Not with --evidence, --strict or --iters {AUTO}.",
    )
    variants: AskedVariants = AskedVariants()
    overlap: OverlapAsked | None = None
    checked_variables: tuple[str, ...] = ()

    def check_evidence(self) -> None:
        """Raise UsageError for a strict verdict on paths for which no evidence is collected."""
        if self.evidence is EvidenceUse.OFF and self.strict:
            raise UsageError(
                "--strict with --no-evidence",
                expected="one of them: --strict judges the paths that evidence shows",
                next_step="leave --no-evidence out",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePlan(RankOptions):
    """The request, its options, and their presentation; without sizes it visits the backend's default sweep.

    `results_folder` is what a rank has instead of the presentation of the process that launched it.
    """

    request: "SweepRequest"
    source: "Source" = field(default_factory=_here)
    recording: Recording = field(default_factory=Recording)
    presentation: Presentation = field(default_factory=Presentation)
    results_folder: Path | None = None

    @property
    def history(self) -> Path | None:
        """The folder of dated results that this run's own is kept in; None where it is not."""
        return self.results_folder or self.presentation.history

    @property
    def rank_options(self) -> RankOptions:
        """The options alone."""
        return RankOptions(**values_of(RankOptions, self))

    @property
    def kernels_at_once(self) -> int:
        """The kernels of a rank that have to fit on its GPU beside each other: a collective, and computation."""
        return 1 if self.overlap is None else 2

    def asking_for_gpus(self, backend: str) -> str:
        """What asks for GPUs, for messages."""
        return f"--backend {backend}" if self.overlap is None else OVERLAP

    def check_any_gpu(self, listed: Sequence[int]) -> None:
        """Raise CouldNotMeasureError where `--expect-gpus` asks for GPUs and no rank has any `listed`."""
        if self.expected_gpus is not None and not any(listed):
            raise no_gpu(
                f"--expect-gpus says {self.expected_gpus}, and there is none",
                for_what="--expect-gpus",
                instead="without it CPU buffers are measured instead",
            )

    @property
    def collective(self) -> "Collective":
        """The collective that is measured."""
        return self.request.collective

    def at_sizes_for(self, backend: str) -> "SweepRequest":
        """The request at the sizes that were asked for, else at the backend's default ones."""
        slowest = self.variants.backends[-1] if self.variants.beside else backend
        sizes = self.request.sizes or parse_sizes(backend_named(slowest).default_sizes)
        return replace(self.request, sizes=sizes)

    def kinds(self, *, gpus: bool) -> tuple[BackendKind, ...]:
        """All backends that are measured, the first first; `gpus` is true where any rank sees one.

        Raises UsageError: one is not known.
        """
        first = default_backend(gpus=gpus) if self.backend is None else backend_named(self.backend)
        return (first, *(backend_named(each) for each in self.variants.beside))

    def refuse_gpu_options(self, why: str, *, but: Container[str] = ()) -> None:
        """Raise UsageError where an option was given that only a backend on GPUs has, `but` for these."""
        for name in (each for each in self._nccl_options if each not in but):
            reason = backend_named(HOST).lacks[name]
            raise UsageError(f"{name} needs GPUs, and {why}", reason=reason, next_step=f"leave {name} out")

    def refuse_what_backend_lacks(self) -> None:
        """Raise UsageError where a backend that was asked for cannot follow an option, or lacks the collective."""
        asked = [] if self.backend is None else [backend_named(self.backend)]
        for kind in (*asked, *(backend_named(each) for each in self.variants.beside)):
            if kind.collectives and self.collective.name not in kind.collectives:
                raise UsageError(
                    f"{self.collective.name} with --backend {kind.name}",
                    expected=f"{' or '.join(kind.collectives)}, all that this backend has",
                    next_step=f"leave {kind.name} out, or gpubench {kind.collectives[0]} --backend {kind.name}",
                )
            # With several backends, options that only NCCL has are NCCL's.
            own = self._nccl_options if len(asked) == 1 and not self.variants.beside else ("--graph",)
            for name in (each for each in own if each in self._nccl_options and each in kind.lacks):
                raise UsageError(
                    f"{name} with --backend {kind.name}",
                    expected="an option that the backend can follow",
                    reason=kind.lacks[name],
                    next_step=f"leave {name} out, or --backend nccl",
                )

    @property
    def _nccl_options(self) -> tuple[str, ...]:
        """Those options that were given and that not every backend has."""
        options = {
            "--graph": self.request.graph_replays > 0,
            SHARING_OPTION: self.ranks_per_gpu > 1,
            "--nccl-library": self.nccl_library is not None,
            "--allocator nccl": self.allocator is Allocator.NCCL and REGISTER not in self.variants.requests,
            **{option: True for option in self.variants.options if option in _TO_NCCL},
        }
        return tuple(name for name, is_given in options.items() if is_given)


_TO_NCCL = ("--algo", "--proto", SET_OPTION, *(f"--{name}" for name in REQUESTS))

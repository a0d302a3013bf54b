"""Run one rank of a collective: join a group, open a backend, measure, and report."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gpubench.backends.mpi import group as mpi
from gpubench.backends.registry import backend_named
from gpubench.collectives.record import SweepRequest
from gpubench.errors import UsageError, shared_gpu_under_launcher
from gpubench.formats.delivery import say
from gpubench.jobs.collective.metadata import (
    add_mpi_support,
    collective_metadata,
    described_collective,
    nothing_measured,
    speed_judge_maker,
)
from gpubench.jobs.collective.opened import (
    Opened,
    Rank,
    add_gpu_count_finding,
    add_machine_findings,
    answer_for_all,
    count_gpus_by_host,
    open_kind,
    read_machines,
)
from gpubench.jobs.collective.plan import SOAK_ENDS, CollectivePlan
from gpubench.jobs.collective.variants import BesideBackend, VariantMaker
from gpubench.jobs.metadata import recorded_settings
from gpubench.jobs.rank import agree, read_identity
from gpubench.jobs.runner import NullListener, check_writable
from gpubench.machine.nvml import read_driver
from gpubench.measure.collective.cases import DescribedCollective
from gpubench.measure.collective.report import NO_RECORDER, Recorder
from gpubench.measure.collective.sweep import Observers, check_root, fitting_all, fitting_sizes
from gpubench.measure.collective.variants import GroupRows, Soak, SweepVariant, SynchronizedGroup, measure_variants
from gpubench.model.results.report import CollectiveRow, Metadata, Report
from gpubench.model.terms.operation import KERNELS, NCCL_ALONE
from gpubench.model.terms.ranks import Phase, RankGroup, RankIdentity, split_ranks
from gpubench.model.terms.units import DroppedSize
from gpubench.model.terms.verdict import Origin
from gpubench.ports.backend import MultiGroupBackend
from gpubench.ports.group import Group, Listener
from gpubench.ranks.channel import ChannelSender
from gpubench.ranks.watchdog.rank import RankProgress

if TYPE_CHECKING:
    from gpubench.formats.presenter import Presenter
    from gpubench.jobs.collective.opening_gpu import PathWatch


def open_backend(rank: Rank, plan: CollectivePlan, stack: ExitStack) -> Opened:
    """Open the chosen backend. The default is NCCL if any rank has a visible GPU. Raises AgreedError if a rank
    fails.
    """
    driver = read_driver(os.environ)
    use = None
    if driver.gpus:
        from gpubench.machine.traffic import NvmlUse

        # Start this before any rank has a CUDA context. The next collective call synchronizes all ranks.
        use = NvmlUse()
        stack.callback(use.close)
    sees_gpus = any(rank.group.gather(driver.visible > 0))
    kinds = agree(rank.group, lambda: plan.kinds(gpus=sees_gpus))
    if any(kind.takes_gpus(seen=sees_gpus) for kind in kinds):
        from gpubench.jobs.collective.opening_gpu import open_on_gpu

        return open_on_gpu(kinds, rank, plan, driver, use, stack)
    agree(rank.group, lambda: plan.refuse_gpu_options("no rank sees one"))
    machines = read_machines(rank, plan)
    rank.progress.enter(Phase.OPENING)
    agree(rank.group, lambda: [kind.load(0) for kind in kinds], place=str(rank.identity))
    backend = open_kind(kinds[0], rank, plan)
    return Opened(kind=kinds[0], backend=backend, identity=rank.identity, machines=lambda: machines)


class CollectiveRankJob:
    """One rank of a collective. The first rank sends rows to `listener`, to the launching process, or to the
    terminal.
    """

    def __init__(
        self,
        group: Group,
        progress: RankProgress,
        plan: CollectivePlan,
        arguments: Sequence[str],
        listener: Listener[CollectiveRow] | None = None,
    ) -> None:
        self._group, self._progress, self._plan, self._arguments = group, progress, plan, arguments
        self._own_listener = listener
        self._presenter: Presenter | None = None
        self._settings = recorded_settings(os.environ)  # Read before NCCL's log is captured, which sets variables
        self._own = group
        self._part: RankGroup | None = None
        self._parts: Sequence[RankGroup] = ()
        self._listed: Sequence[int] = ()
        self.identity, self._node_by_rank = read_identity(group)

    def run(self, channel: str | None) -> int:
        """Measure together with the other ranks, and return the exit code. Raises AgreedError on all ranks."""
        agree(self._group, lambda: self._check_ranks(channel))
        if self._plan.expected_gpus is not None:
            self._listed = self._group.gather(read_driver(os.environ).gpus)
            agree(self._group, lambda: self._plan.check_any_gpu(self._listed))
        listener = agree(self._group, lambda: self._own_listener or self._listener(channel))
        if self._plan.split is not None:
            split, identities = self._plan.split, self._group.gather(self.identity)
            self._parts = agree(self._group, lambda: split_ranks(split, identities))
            number = next(number for number, part in enumerate(self._parts) if self._group.rank in part.ranks)
            self._own, self._part = self._group.split(number, self._group.rank), self._parts[number]
        ranks_on_node = self._node_by_rank.count(self.identity.node)
        rank = Rank(self._group, self._own, self.identity, ranks_on_node, self._progress)
        with ExitStack() as stack:
            opened = open_backend(rank, self._plan, stack)
            self.identity = opened.identity
            return self._measure(rank, opened, listener)

    def _measure(self, rank: Rank, opened: Opened, listener: Listener[CollectiveRow]) -> int:
        group, backend = self._group, opened.backend
        if self._plan.require_path and opened.path_watch is not None:
            self._check_required_paths(opened.path_watch)
        self._before_sizes(opened)
        request = self._plan.request_for(backend.name)
        identities = group.gather(self.identity)
        self._progress.name_ranks(identities)
        agree(group, lambda: check_root(request.collective, request.root, self._own.size))
        beside = self._open_beside(rank, opened)
        other_backends = [other.backend for other in beside if other.backend is not None]
        answer_for_all(self._progress, [backend, *other_backends])
        sizes, dropped = self._fitting_sizes(request, opened, other_backends)
        request = replace(request, sizes=sizes)
        settings, hierarchical = self._plan.settings, self._plan.variants.hierarchical
        maker = VariantMaker(group, self.identity, request)
        variants = maker.variants(backend, opened.library, beside, settings, hierarchical=hierarchical)
        described = self._described(opened, beside, request, identities, dropped)
        metadata = self._metadata(described)
        past = None
        if group.rank == 0 and self._plan.history is not None:
            from gpubench.jobs.compare import find_past

            past = find_past(self._plan.history, metadata)
        if past is not None and past.note:
            metadata = replace(metadata, options={**metadata.options, "past": past.note})
        listener.begin(metadata)
        if opened.refusal(opened.kind, request.collective.name):
            return self._end(metadata, add_mpi_support(nothing_measured(), opened.mpi_support), opened, listener)
        with self._recorder(described, opened) as recorder:
            observers = Observers(
                path_observer=None if opened.path_watch is None else opened.path_watch.path_observer(request),
                progress=self._progress,
                read_condition=opened.read_condition,
                recorder=recorder,
                make_speed_judge=speed_judge_maker(
                    request.collective,
                    self._measuring(identities),
                    described.libraries.get("NCCL"),
                    self._plan.profile,
                    past,
                    group.gather((self.identity.node, tuple(os.sched_getaffinity(0)))),
                ),
                measures_again=self._part is None,
                soak=None if request.cycles == 1 else Soak(request.cycles, _say, _listen_for_the_end()),
            )
            report = self._rows(request, variants, identities, listener, observers)
            if observers.soak is not None and self._group.rank == 0:
                _say(observers.soak.line())
        report = self._add_findings(report, opened, described.unwatched, identities)
        for other in other_backends:
            other.close()
        return self._end(metadata, add_mpi_support(report, opened.mpi_support), opened, listener)

    def _add_findings(
        self, report: Report, opened: Opened, unwatched_reason: str, identities: Sequence[RankIdentity]
    ) -> Report:
        """Add findings about this process and its machines, which do not follow from measured rows."""
        if opened.unverified_variables:
            from gpubench.backends.nccl.library import unverified

            report = report.add_findings(last=unverified(opened.unverified_variables))
        if opened.path_watch is None:
            from gpubench.measure.path_outcome import unwatched

            report = unwatched(report, unwatched_reason)
        machines = None if opened.path_watch is None else opened.path_watch.machines()
        if machines is not None:
            report = add_machine_findings(report, machines.nodes, self._plan)
        if self._plan.require_path and self._group.rank == 0:
            from gpubench.model.results.required_path import require_evidence

            report = require_evidence(report, self._plan.require_path, () if machines is None else machines.nodes)
        if self._listed:
            report = add_gpu_count_finding(report, count_gpus_by_host(identities, self._listed), self._plan)
        return report

    def _end(self, metadata: "Metadata", report: Report, opened: Opened, listener: Listener[CollectiveRow]) -> int:
        opened.backend.close()
        self._progress.enter(Phase.OUTPUT)
        if self._group.rank == 0:
            listener.end(report)
        if self._presenter is not None:
            return self._group.broadcast(self._presenter.exit_code)
        from gpubench.model.results.ending import compute_exit_code

        return self._group.broadcast(compute_exit_code(metadata, report))

    def _check_required_paths(self, watch: "PathWatch") -> None:
        """Raise AgreedError on all ranks if the hardware lacks a path that --require-path requires."""
        from gpubench.model.results.required_path import check_possible

        around = watch.look_around()
        agree(self._group, lambda: None if around is None else check_possible(self._plan.require_path, around.wiring))

    def _before_sizes(self, opened: Opened) -> None:
        """Allocate what a subclass needs, before sizes that do not fit into the free memory are dropped."""

    def _metadata(self, described: DescribedCollective) -> "Metadata":
        return collective_metadata(described, self._plan.collective, self._arguments)

    def _measuring(self, identities: Sequence[RankIdentity]) -> Sequence[RankIdentity]:
        """Return the ranks that measure together with this rank. With --split, these are the ranks of its group."""
        return identities if self._part is None else [identities[rank] for rank in self._part.ranks]

    def _open_beside(self, rank: Rank, opened: Opened) -> list[BesideBackend]:
        found = []
        for kind in map(backend_named, self._plan.others):
            refused = opened.refusal(kind, self._plan.collective.name)
            backend = None
            if not refused:
                backend = open_kind(kind, rank, self._plan, opened.device, opened.library, connect=False)
            found.append(BesideBackend(kind, backend, refused))
        return found

    def _fitting_sizes(
        self, request: SweepRequest, opened: Opened, others: Sequence[MultiGroupBackend]
    ) -> tuple[tuple[int, ...], tuple[DroppedSize, ...]]:
        group, backend, holders = self._group, opened.backend, opened.memory_holders
        sizes, dropped = agree(group, lambda: fitting_sizes(request, self._own, backend, self.identity, holders))
        for other in others:
            own = agree(group, partial(fitting_sizes, request, group, other, self.identity))
            sizes, dropped = fitting_all([(sizes, dropped), own])
        return fitting_all(group.gather((sizes, dropped))) if self._part is not None else (sizes, dropped)

    def _rows(
        self,
        request: SweepRequest,
        variants: Sequence[SweepVariant],
        identities: Sequence[RankIdentity],
        listener: Listener[CollectiveRow],
        observers: Observers,
    ) -> Report:
        if self._part is None:
            return measure_variants(request, self._group, variants, identities, listener, observers)
        rows = GroupRows(self._part, self._own, self._group, listener)
        together = SynchronizedGroup(self._own, self._group)
        own = self._measuring(identities)
        return rows.merged(measure_variants(request, together, variants[:1], own, rows, observers))

    def _recorder(self, described: DescribedCollective, opened: Opened) -> AbstractContextManager[Recorder]:
        directory, watch = self._plan.recording.record, opened.path_watch
        if directory is None:
            return nullcontext(NO_RECORDER)
        from gpubench.jobs.collective.simulated import CollectiveRecorder

        log_text = None if watch is None else watch.log_text
        return CollectiveRecorder(
            directory, described, self._group, self._part, opened.machines, log_text, self._progress
        )

    def _check_ranks(self, channel: str | None) -> None:
        if channel is None and self._plan.ranks_per_gpu > 1:
            raise shared_gpu_under_launcher(self._plan.ranks_per_gpu, self._group.size)
        if self._plan.ranks not in (None, self._group.size):
            raise UsageError(
                f"--np {self._plan.ranks} under a launcher that started {self._group.size} ranks",
                expected="--np only if gpubench starts the ranks",
                next_step=f"leave --np out, or set the number in the launcher: mpirun -n {self._plan.ranks} ...",
            )

    def _listener(self, channel: str | None) -> Listener[CollectiveRow]:
        if self._group.rank != 0:
            return NullListener()
        if channel:
            return ChannelSender(channel)
        from gpubench.formats.presenter import Presenter

        shown = self._plan.presentation
        check_writable(shown.outputs, self._plan.recording.record)
        self._presenter = Presenter(shown, progress=shown.show_progress, is_rank=True)
        return self._presenter

    def _described(
        self,
        opened: Opened,
        beside: Sequence[BesideBackend],
        request: SweepRequest,
        identities: Sequence[RankIdentity],
        dropped: Sequence[DroppedSize],
    ) -> DescribedCollective:
        backend, unwatched = opened.backend, ""
        if opened.path_watch is None and opened.device is not None:
            unwatched = "--no-evidence, so no log was read and no counters"
            if self._part is not None:
                unwatched = "--split, because log and counters would mix all groups"
        names = self._plan.setting_names(backend.name)
        return described_collective(
            self._plan,
            request,
            settings=(*(KERNELS.get(backend.name, ()) if self._part is None else ()), *names),
            split=self._plan.split,
            backend=backend.name,
            origin=Origin.MEASURED,
            ranks=tuple(identities),
            parts=tuple(self._parts),
            dropped_sizes=tuple(dropped),
            libraries=self._libraries(opened, beside),
            environment=self._settings,
            unwatched=unwatched,
        )

    def _libraries(self, opened: Opened, beside: Sequence[BesideBackend]) -> dict[str, str]:
        libraries = dict(opened.backend.libraries())
        if isinstance(self._group, mpi.MpiGroup):
            libraries["MPI"] = mpi.library_version()
        for other in beside:
            if other.backend is not None:
                libraries = {**other.backend.libraries(), **libraries}
        if opened.library is not None:
            libraries.setdefault("NCCL", f"{opened.library.version} from {opened.library.path}")
        if opened.nccl_alone and opened.nccl_alone != libraries.get("NCCL"):
            libraries[NCCL_ALONE] = opened.nccl_alone
        if opened.mpi_support is not None:
            libraries["MPI on GPU memory"] = opened.mpi_support.statements
        return libraries


def _say(line: str) -> None:
    say(f"gpubench: note: {line}", to=sys.stderr)


def _listen_for_the_end() -> Callable[[], bool]:
    asked = Event()
    signal.signal(SOAK_ENDS, lambda *_: asked.set())
    return asked.is_set

"""What a rank does between start and end: choose a backend, describe the run, measure."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

from gpubench.cli.collective_metadata import metadata_of
from gpubench.cli.options import CollectiveOptions
from gpubench.cli.presentation import check_writable
from gpubench.cli.presenter import Presenter, rank_style
from gpubench.cli.rank import own_identity
from gpubench.cli.run_metadata import recorded_settings
from gpubench.cli.setting_options import check_unset
from gpubench.cli.watching import NodesAndRanks, PathWatch
from gpubench.cli.ways import Opener, VariantMaker
from gpubench.errors import UsageError, more_ranks_than_gpus, shared_gpu
from gpubench.hardware.cuda import device as cuda
from gpubench.hardware.launch.channel_sender import ChannelSender
from gpubench.hardware.mpi import group as mpi
from gpubench.hardware.mpi import host
from gpubench.hardware.nccl.backend import NcclBackend, NcclLibrary
from gpubench.hardware.node.nvml.condition import NvmlCondition
from gpubench.hardware.node.nvml.library import Driver, read_driver
from gpubench.hardware.process.nccl_settings import nccl_settings
from gpubench.hardware.watchdog.rank import RankProgress
from gpubench.measure.agreement import agree
from gpubench.measure.collective.cases import SweepRequest
from gpubench.measure.collective.observers import Observers, ReadCondition, no_gpu_to_read
from gpubench.measure.collective.path_evidence import unwatched
from gpubench.measure.collective.recording import VERSION, RecordedCollective, RunOptions
from gpubench.measure.collective.row_collector import NO_RECORDER, Recorder
from gpubench.measure.collective.split_groups import GroupRows, InStep
from gpubench.measure.collective.sweep import check_root, fitting_all, fitting_sizes, measure
from gpubench.measure.collective.variants import SweepVariant, measure_variants
from gpubench.model.paths.evidence import EvidenceUse
from gpubench.model.results.report import CollectiveRow, Metadata, Report, Row
from gpubench.model.terms.hang import Phase
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.model.terms.split import RankGroup, groups_of
from gpubench.model.terms.sweep import DroppedSize
from gpubench.model.terms.verdict import exit_code
from gpubench.ports.backend import Backend
from gpubench.ports.group import Group
from gpubench.ports.listener import Listener


class NullListener:
    """The listener of every rank but the first: the rows are not its to tell."""

    def begin(self, metadata: Metadata) -> None:
        """Nothing."""

    def progress(self, done: int, total: int, label: str) -> None:
        """Nothing."""

    def row(self, row: Row) -> None:
        """Nothing."""

    def end(self, report: Report) -> None:
        """Nothing."""


class CollectiveRankJob:
    """One rank's part in a job."""

    def __init__(
        self, group: mpi.MpiGroup, progress: RankProgress, options: CollectiveOptions, arguments: Sequence[str]
    ) -> None:
        self._group = group
        self._progress = progress
        self._options = options
        self._arguments = arguments
        self._settings = recorded_settings(os.environ)
        self._watch: PathWatch | None = None
        self._own = group
        self._part: RankGroup | None = None
        self._library: NcclLibrary | None = None
        self._parts: Sequence[RankGroup] = ()
        self._condition: ReadCondition = no_gpu_to_read
        self._directory = options.recording.record
        self._seen: NodesAndRanks | None = None
        self.identity, self._node_by_rank = own_identity(group)

    def run(self, channel: str | None) -> int:
        """Measure, tell the launcher or the terminal, and return the exit code.

        Raises:
            AgreedError: the run cannot be, and every rank knows it.
        """
        agree(self._group, self._check_ranks)
        listener = agree(self._group, lambda: self._listener(channel))
        if self._options.split is not None:
            split, identities = self._options.split, self._group.gather(self.identity)
            self._parts = agree(self._group, lambda: groups_of(split, identities))
            color = next(number for number, part in enumerate(self._parts) if self._group.rank in part.ranks)
            self._own, self._part = self._group.split(color, self._group.rank), self._parts[color]
        with ExitStack() as stack:
            return self._measure(self._backend(stack), listener)

    def _measure(self, backend: Opener, listener: Listener[CollectiveRow]) -> int:
        group = self._group
        request = self._options.request(self._options.sizes_for(backend.name))
        identities = group.gather(self.identity)
        self._progress.know(identities)
        agree(group, lambda: check_root(request.collective, request.root, self._own.size))
        sizes, dropped = agree(group, lambda: fitting_sizes(request, self._own, backend, self.identity))
        host_beside = self._host() if self._options.ways.host_too else None
        if host_beside is not None:
            own = agree(group, lambda: fitting_sizes(request, group, host_beside, self.identity))
            sizes, dropped = fitting_all([(sizes, dropped), own])
        if self._part is not None:
            sizes, dropped = fitting_all(group.gather((sizes, dropped)))
        request = self._options.request(sizes)
        ways = self._ways(request, backend, host_beside)
        described = self._described(backend, request, identities, dropped)
        listener.begin(metadata_of(described, request.collective, self._arguments))
        with self._keeping(described) as recorder:
            report = self._rows(request, ways, identities, listener, recorder)
        if self._watch is None:
            report = unwatched(report, described.unwatched)
        backend.close()
        self._progress.enter(Phase.OUTPUT)
        if group.rank == 0:
            listener.end(report)
        return exit_code(group.broadcast(report.verdict))

    def _rows(
        self,
        request: SweepRequest,
        ways: Sequence[SweepVariant],
        identities: Sequence[RankIdentity],
        listener: Listener[CollectiveRow],
        recorder: Recorder,
    ) -> Report:
        """Measure, in all groups at once where there are several, or in all ways."""
        backend = ways[0].backend
        observers = Observers(
            path_observer=None if self._watch is None else self._watch.path_observer(request),
            progress=self._progress,
            read_condition=self._condition,
            recorder=recorder,
        )
        if self._part is None:
            if len(ways) > 1:
                return measure_variants(request, self._group, ways, identities, listener, observers)
            return measure(request, self._group, backend, identities, listener, observers)
        rows = GroupRows(self._part, self._own, self._group, listener)
        own = [identities[rank] for rank in self._part.ranks]
        together = InStep(self._own, self._group)
        return rows.merged(measure(request, together, backend, own, rows, observers))

    def _ways(self, request: SweepRequest, backend: Opener, host_beside: Opener | None) -> Sequence[SweepVariant]:
        """One where nobody asked for more."""
        maker = VariantMaker(self._group, self.identity, request)
        return maker.ways(self._options.ways, backend, self._library, host_beside)

    def _look_around(self) -> None:
        """What a recording needs to know of nodes and processes, where nobody watches who knows it anyway."""
        if self._directory is not None:
            from gpubench.cli.collective_record import read_nodes_and_ranks

            self._seen = read_nodes_and_ranks(self._group, self.identity)

    def _keeping(self, described: RecordedCollective) -> AbstractContextManager[Recorder]:
        """Who writes down what is measured, where that was asked for."""
        if self._directory is None:
            return nullcontext(NO_RECORDER)
        from gpubench.cli.collective_record import CollectiveRecorder

        watch = self._watch
        return CollectiveRecorder(
            self._directory,
            described,
            self._group,
            self._part,
            lambda: self._seen if watch is None else watch.nodes_and_ranks(),
            None if watch is None else watch.log_text,
            self._progress,
        )

    def _why_unwatched(self, backend: Backend) -> str:
        if backend.name == "host":
            return ""
        if self._part is not None:
            return "--split: log and counters would be of all groups at once"
        return "--no-evidence: nobody listened and nothing was counted"

    def _check_ranks(self) -> None:
        if self._options.ranks not in (None, self._group.size):
            raise UsageError(
                f"--np {self._options.ranks} under a launcher that started {self._group.size} ranks",
                expected="--np only where gpubench launches itself",
                next_step=f"leave --np out, or give the number to the launcher: mpirun -n {self._options.ranks} ...",
            )

    def _listener(self, channel: str | None) -> Listener[CollectiveRow]:
        if self._group.rank != 0:
            return NullListener()
        if channel:
            return ChannelSender(channel)
        shown = self._options.presentation
        check_writable(shown.outputs, self._directory)
        return Presenter(shown, rank_style(shown), progress=False)

    def _backend(self, stack: ExitStack) -> Opener:
        """The backend asked for, else nccl where any rank sees a GPU, so that a node without one is not passed over.

        What is begun beside it ends with `stack`.
        """
        driver = read_driver(os.environ)
        name = self._options.backend
        if name is None:
            name = "nccl" if any(self._group.gather(driver.visible > 0)) else "host"
        ranks_on_node = self._node_by_rank.count(self.identity.node)
        if name == "host":
            agree(self._group, lambda: self._options.refuse_gpu_options("no rank sees one"))
            self._look_around()
            return self._host()
        if self._options.evidence is not EvidenceUse.OFF:
            self._watch = stack.enter_context(
                PathWatch(
                    self._group, self.identity, strict=self._options.strict, keeps_log=self._directory is not None
                )
            )
        else:
            self._look_around()
        self._progress.enter(Phase.OPENING)
        device, self.identity = open_gpu(self._group, self.identity, ranks_on_node, driver)
        agree(self._group, lambda: check_unset(self._options.ways, nccl_settings(os.environ)))
        condition = NvmlCondition(str(self.identity.gpu_bus_id))
        stack.callback(condition.close)
        self._condition = condition.read
        library = agree(self._group, lambda: NcclLibrary(self._options.nccl_library), place=str(self.identity))
        self._library = library
        if self._watch is not None:
            self._watch.begin(library, self.identity)
            stack.enter_context(self._watch.naming_refusals(library))
        self._progress.enter(Phase.CONNECTING)
        backend = NcclBackend(self._own, device, library, self._options.allocator, self._progress)
        self._progress.let_abort(backend.trouble, backend.abort)
        return backend

    def _host(self) -> host.HostBackend:
        agree(self._group, self._check_types)
        return host.HostBackend(self._own, self._node_by_rank.count(self.identity.node), progress=self._progress)

    def _check_types(self) -> None:
        host.check_types(self._options.dtypes, self._options.ops if self._options.collective.reduces else None)

    def _described(
        self,
        backend: Backend,
        request: SweepRequest,
        identities: Sequence[RankIdentity],
        dropped: Sequence[DroppedSize],
    ) -> RecordedCollective:
        """What is to be measured and by whom."""
        options = self._options
        return RecordedCollective(
            schema_version=VERSION,
            collective=request.collective.name,
            backend=backend.name,
            origin=Origin.MEASURED,
            asked=request.asked,
            options=RunOptions(
                allocator=options.allocator.value,
                timeout_s=options.timeout_s,
                evidence=options.evidence,
                strict=options.strict,
                settings=tuple(options.ways.names(backend.name)),
                split=options.split,
            ),
            ranks=tuple(identities),
            parts=tuple(self._parts),
            dropped_sizes=tuple(dropped),
            libraries={**backend.libraries(), "MPI": mpi.library_version()},
            environment=self._settings,
            unwatched="" if self._watch is not None else self._why_unwatched(backend),
        )


def open_gpu(
    group: Group, identity: RankIdentity, ranks_on_node: int, driver: Driver
) -> tuple[cuda.CudaDevice, RankIdentity]:
    """The GPU for this rank, and the rank with it, once every rank has one of its own.

    Raises:
        AgreedError: a rank gets no GPU, or two the same.
    """
    device = agree(
        group,
        lambda: cuda.open_device(identity.local_rank, ranks_on_node, identity.host, driver),
        place=str(identity),
    )
    driving = identify(identity, device.identity)
    agree(group, lambda: check_one_rank_a_gpu(group.gather(driving), driver.gpus))
    return device, driving


def identify(identity: RankIdentity, gpu: cuda.GpuIdentity) -> RankIdentity:
    """A rank with the GPU it drives."""
    return RankIdentity(
        rank=identity.rank,
        host=identity.host,
        node=identity.node,
        local_rank=identity.local_rank,
        pid=identity.pid,
        gpu=gpu.name,
        gpu_index=gpu.index,
        gpu_bus_id=gpu.bus_id,
        gpu_uuid=gpu.uuid,
    )


def check_one_rank_a_gpu(identities: Sequence[RankIdentity], gpus_on_host: int) -> None:
    """Raise UsageError where two ranks drive the same GPU, or a host has more ranks than GPUs."""
    owners: dict[tuple[int, str | None], RankIdentity] = {}
    for identity in identities:
        owner = owners.setdefault((identity.node, identity.gpu_uuid), identity)
        if owner is identity:
            continue
        ranks = sum(each.node == identity.node for each in identities)
        if ranks > gpus_on_host:
            raise more_ranks_than_gpus(ranks, gpus_on_host, identity.host)
        raise shared_gpu(f"rank {owner.rank}", f"rank {identity.rank} on {identity.host}", str(identity.gpu_bus_id))

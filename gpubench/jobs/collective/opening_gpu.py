"""Open the backend of a collective on a rank with a GPU, and observe NCCL's log and the GPU's counters."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Protocol, Self

from gpubench.backends.nccl.debug_log import NcclLog, ResettableLog, SilentLog
from gpubench.backends.nccl.library import NcclLibrary, check_variables, start_asking
from gpubench.backends.registry import BackendKind
from gpubench.collectives.record import SweepRequest
from gpubench.conditions.circumstances import Circumstances, user_settings
from gpubench.errors import CouldNotMeasureError, GpubenchError, no_path
from gpubench.jobs.collective.opened import Opened, Rank, open_kind, read_machines
from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.jobs.collective.variants import NcclErrors
from gpubench.jobs.machines import Machines
from gpubench.jobs.rank import agree, check_nccl_of_ranks, open_gpu
from gpubench.jobs.sources import SECONDS_TO_READ_A_NODE, own_process
from gpubench.machine.environment import nccl_settings
from gpubench.machine.host import RunDelay, run_delay, waited_share
from gpubench.machine.nvml import Driver, NvmlCounters
from gpubench.machine.probe import Probe
from gpubench.machine.process import read_plugins
from gpubench.machine.traffic import NvmlCondition, NvmlUse
from gpubench.measure.collective.recording import RecordedLog
from gpubench.measure.collective.sweep import ObservationSources, PathObserver
from gpubench.measure.paths import IdleWindow, first_cause
from gpubench.model.facts.process import MpiSupport, RankFacts
from gpubench.model.facts.traffic import describe_holders
from gpubench.model.paths.nccl_log import RemarkKind
from gpubench.model.paths.nodes import rename_duplicates
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.transport import EvidenceUse
from gpubench.model.paths.wiring import Wiring
from gpubench.model.terms.operation import MPI, TORCH
from gpubench.model.terms.ranks import Phase, RankIdentity
from gpubench.model.terms.units import format_memory
from gpubench.ports.group import Group
from gpubench.readers.nccl_log.notes import parse_remark

_OUT_OF_MEMORY = "cudaErrorMemoryAllocation"


def open_on_gpu(
    kinds: Sequence[BackendKind],
    rank: Rank,
    plan: CollectivePlan,
    driver: Driver,
    use: NvmlUse | None,
    stack: ExitStack,
) -> Opened:
    """Read the nodes, capture NCCL's log, load all backends, and open the first backend on this rank's GPU."""
    group, kind = rank.group, kinds[0]
    support = mpi_support(rank, plan) if any(each.name == MPI for each in kinds) else None
    path_watch, machines = None, None
    if plan.evidence is EvidenceUse.OFF:
        machines = read_machines(rank, plan)
    else:
        keeps_log = plan.recording.record is not None
        watch = PathWatch(group, rank.identity, keeps_log=keeps_log, use=use)
        path_watch = stack.enter_context(watch)
    rank.progress.enter(Phase.OPENING)
    answer: Callable[[], str] = lambda: ""  # noqa: E731
    if group.rank == 0 and plan.nccl_library is None and any(each.name.startswith(TORCH) for each in kinds):
        answer = start_asking(dict(os.environ))
    if plan.nccl_library is None:
        agree(group, lambda: [each.load(driver.cuda) for each in _torch_first(kinds)], place=str(rank.identity))
    device, identity = open_gpu(group, rank.identity, rank.ranks_on_node, driver, shared=True)
    agree(group, lambda: plan.check_unset(nccl_settings(os.environ)))
    condition = NvmlCondition(str(identity.gpu_bus_id))
    stack.callback(condition.close)

    def memory_holders() -> str:
        return (
            "" if use is None else describe_holders(use.read(str(identity.gpu_bus_id), {identity.pid}), format_memory)
        )

    stack.enter_context(naming_holders(memory_holders))
    library = agree(group, lambda: _load(kinds, plan, driver), place=str(identity))
    if any(each.logs_to_nccl for each in kinds):
        check_nccl_of_ranks(group, identity, library, driver, plan.kernels_at_once)
    unverified = agree(group, lambda: _checked(plan, library) if group.rank == 0 else ())
    if path_watch is not None:
        path_watch.begin(library, identity, no_log=kind.no_log, by_design=kind.by_design)
        stack.enter_context(path_watch.naming_refusals(library))
    rank.progress.enter(Phase.CONNECTING)
    return Opened(
        kind=kind,
        backend=open_kind(kind, rank, plan, device, library),
        device=device,
        mpi_support=support,
        nccl_alone=group.broadcast(answer()),
        identity=identity,
        machines=path_watch.machines if path_watch is not None else lambda: machines,
        library=library,
        path_watch=path_watch,
        read_condition=condition.read,
        memory_holders=memory_holders,
        unverified_variables=unverified,
    )


def _checked(plan: CollectivePlan, library: NcclLibrary) -> tuple[str, ...]:
    """Return the variables of --set that NCCL may not read.

    Raises UsageError if NCCL does not have a variable, or does not support a requested setting.
    """
    if plan.requests:
        from gpubench.backends.nccl.communicator import check_requests

        check_requests(plan.settings, library.version_code)
    if not plan.checks_sets:
        return ()
    return check_variables(plan.variants.set_variables, library.path, tuple(nccl_settings(os.environ)))


def mpi_support(rank: Rank, plan: CollectivePlan) -> MpiSupport:
    """Try MPI on GPU memory before any rank opens a GPU. Raises AgreedError if there is no mpirun."""
    from gpubench.backends.mpi.backends import TrialCommand, read_support
    from gpubench.collectives.registry import SUMMARIES

    rank.progress.enter(Phase.SET_UP, "trying MPI on GPU memory", len(SUMMARIES))
    asked = plan.collective.name
    operations = [asked, *(summary for summary in SUMMARIES if summary != asked)]

    def tried() -> MpiSupport | None:
        if rank.group.rank:
            return None
        return read_support(operations, TrialCommand.of_launcher(), completed=lambda: rank.progress.completed(1))

    return rank.group.broadcast(agree(rank.group, tried))


def _load(kinds: Sequence[BackendKind], plan: CollectivePlan, driver: Driver) -> NcclLibrary:
    """Load the NCCL library that CuPy will use, from --nccl-library or from torch. Raises CouldNotMeasureError."""
    library = None if plan.nccl_library is None else NcclLibrary(plan.nccl_library)
    for kind in _torch_first(kinds):
        kind.load(driver.cuda)
    return library or NcclLibrary(plan.nccl_library)


def _torch_first(kinds: Sequence[BackendKind]) -> list[BackendKind]:
    return sorted(kinds, key=lambda kind: not kind.name.startswith(TORCH))


@contextmanager
def naming_holders(memory_holders: Callable[[], str]) -> Iterator[None]:
    """If CUDA runs out of memory, raise CouldNotMeasureError that names the processes that use GPU memory."""
    try:
        yield
    except Exception as error:
        held = memory_holders() if _OUT_OF_MEMORY in str(error) else ""
        if not held:
            raise
        raise CouldNotMeasureError(
            str(error),
            expected="memory for the largest of --sizes, and for NCCL",
            reason=f"other processes use memory of this GPU: {held}",
            next_step="end these processes, or use smaller --sizes",
        ) from error


# NCCL may reject several ranks. Later ranks wait, so that only the first one reports the error.
_SECONDS_BETWEEN_RANKS = 1.0

_MOST_SECONDS = 8.0


class LoggingLibrary(ResettableLog, NcclErrors, Protocol):
    """An NCCL library whose log and errors can be read."""


class _Known(NamedTuple):
    identity: RankIdentity
    facts: RankFacts
    settings: Mapping[str, str]


class PathWatch:
    """A context manager that reads NCCL's log and the GPU's counters on this rank."""

    def __init__(
        self,
        group: Group,
        identity: RankIdentity,
        *,
        keeps_log: bool = False,
        use: NvmlUse | None = None,
    ) -> None:
        self._group, self._keeps_log, self._use = group, keeps_log, use
        self._kept: RecordedLog | None = None
        self._settings = nccl_settings(os.environ)
        self._facts = own_process(identity)
        self._stack = ExitStack()
        self._probe = self._stack.enter_context(Probe(dict(os.environ))) if identity.local_rank == 0 else None
        self._known: list[_Known] = []
        self._delay_before: RunDelay | None = None
        self._waited: dict[int, float] = {}
        self._nodes: dict[int, Topology] | None = None
        self._log: NcclLog | None = None
        self._silent: SilentLog | None = None
        self._by_design = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def begin(self, library: LoggingLibrary, identity: RankIdentity, *, no_log: str = "", by_design: str = "") -> None:
        """Capture NCCL's log, starting with its first call.

        The report uses `no_log` as the reason for a backend without a log, and `by_design` as the reason for its paths.
        """
        self._known = self._group.gather(_Known(identity, self._facts, self._settings))
        ranks_on_node = sum(each.identity.node == identity.node for each in self._known)
        self._log = self._stack.enter_context(NcclLog(library, self._settings, ranks_on_node))
        self._silent, self._by_design = (SilentLog(no_log) if no_log else None), by_design

    def path_observer(self, request: SweepRequest) -> PathObserver:
        """Return the observer for the paths of a sweep. Raises ValueError if `begin` was not called."""
        if self._log is None:
            raise ValueError("nothing is recorded before NCCL starts")
        counters = NvmlCounters([str(self._known[self._group.rank].identity.gpu_bus_id)])
        self._stack.callback(counters.close)
        nodes = [each.identity.node for each in self._known]
        # Start to count when operations are issued, because NCCL's initialization and reading nodes also used CPUs
        # before.
        self._delay_before = run_delay()
        if self._keeps_log:
            self._kept = RecordedLog(self._log)
        sources = ObservationSources(
            log=self._silent or self._kept or self._log,
            counters=counters,
            read_circumstances=self.look_around,
            nodes=nodes,
            window=self._window(counters),
            by_design=self._by_design,
            read_waited=lambda: waited_share(self._delay_before, run_delay()),
        )
        return PathObserver.of(request, self._group, sources)

    def _window(self, counters: NvmlCounters) -> IdleWindow:
        own = self._known[self._group.rank].identity
        pids = {each.facts.pid for each in self._known if each.identity.node == own.node}
        users = None if self._use is None else self._use.other_users([str(own.gpu_bus_id)], pids)
        return IdleWindow(counters, users)

    def machines(self) -> Machines | None:
        """Return nodes and processes on the first rank, for a recording. They are read after each operation was
        tried once.
        """
        if self._nodes is None or self._group.rank != 0:
            return None
        nodes = [self._nodes[number] for number in sorted(self._nodes)]
        return Machines(nodes, [each.facts for each in self._known])

    def log_text(self) -> bytes:
        """Return NCCL's log of this rank up to the end of the trials. Empty if the log is not kept for a recording."""
        return b"" if self._kept is None else self._kept.text()

    @contextmanager
    def naming_refusals(self, library: LoggingLibrary) -> Iterator[None]:
        """If NCCL finds no transport, raise a GpubenchError that names both ranks and the cause."""
        try:
            yield
        except library.error as error:
            warnings = () if self._log is None else self._log.warnings()
            refusal = self._refusal((library.last_error(), *warnings))
            if refusal is None:
                raise
            time.sleep(min(self._group.rank * _SECONDS_BETWEEN_RANKS, _MOST_SECONDS))
            raise refusal from error

    def _refusal(self, texts: Iterable[str]) -> GpubenchError | None:
        remarks = (parse_remark(text.encode()) for text in texts)
        found = next(
            (remark for remark in remarks if remark is not None and remark.kind is RemarkKind.NO_TRANSPORT), None
        )
        if found is None or not all(found.about):
            return None
        pair = int(found.about[0]), int(found.about[1])
        cause = first_cause({pair: ()}, self._circumstances(self._nodes or {}))
        return no_path(" → ".join(f"rank {rank}" for rank in pair), found.text, cause.evidence, cause.cure.text)

    def look_around(self) -> Circumstances | None:
        """Return the circumstances on the first rank, and None on the others. All ranks must call it."""
        share = waited_share(self._delay_before, run_delay())
        later = self._group.collect((read_plugins(self._facts), share))
        if later is not None:
            ends = zip(self._known, later, strict=True)
            self._known = [known._replace(facts=facts) for known, (facts, _) in ends]
            self._waited = {rank: waited for rank, (_, waited) in enumerate(later) if waited is not None}
        if self._nodes is None:
            own = None if self._probe is None else self._probe.snapshot(SECONDS_TO_READ_A_NODE)
            snapshots = self._group.collect(own)
            if snapshots is None:
                return None
            firsts = {
                known.identity.node: snapshot
                for known, snapshot in zip(self._known, snapshots, strict=True)
                if snapshot is not None
            }
            self._nodes = dict(zip(firsts, map(Topology, rename_duplicates([*firsts.values()])), strict=True))
        return self._circumstances(self._nodes)

    def _circumstances(self, nodes: Mapping[int, Topology]) -> Circumstances:
        facts = [each.facts for each in self._known]
        settings = user_settings(facts, [each.settings for each in self._known])
        wiring = Wiring([each.identity for each in self._known], nodes)
        return Circumstances(wiring=wiring, facts=facts, settings=settings, waited=self._waited)

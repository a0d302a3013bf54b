"""Observation of NCCL's paths on one rank: NCCL's log, the GPU's link counters, facts of node and process."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Protocol, Self

from gpubench.collectives.record import SweepRequest
from gpubench.conditions.definition.circumstances import Circumstances, users_settings
from gpubench.errors import GpubenchError, no_direct_path, no_path
from gpubench.hardware.environment import nccl_settings, refusals
from gpubench.hardware.nccl.debug_log import NcclLog, ResettableLog, SilentLog
from gpubench.hardware.node.nvml import NvmlCounters
from gpubench.hardware.probe import Probe
from gpubench.hardware.process import RunDelay, read_again, run_delay, waited_share
from gpubench.hardware.traffic import NvmlUse
from gpubench.jobs.collective.variants import NcclErrors
from gpubench.jobs.machines import Machines
from gpubench.jobs.sources import SECONDS_TO_READ_A_NODE, own_process
from gpubench.measure.collective.recording import RecordedLog
from gpubench.measure.collective.sweep import ObservationSources, PathObserver
from gpubench.measure.paths import IdleWindow, first_cause
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.nccl_log import RemarkKind
from gpubench.model.paths.nodes import with_own_names
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.wiring import Wiring
from gpubench.model.terms.ranks import RankIdentity
from gpubench.ports.group import Group
from gpubench.readers.nccl_log.notes import parse_remark

_SECONDS_BETWEEN_RANKS = 1.0
_MOST_SECONDS = 8.0
"""A refusal is met by both ranks of a pair, and by all ranks where all are refused: one is enough to say so."""


class LoggingLibrary(ResettableLog, NcclErrors, Protocol):
    """An NCCL library whose log and errors are read."""


class _Known(NamedTuple):
    identity: RankIdentity
    facts: RankFacts
    settings: Mapping[str, str]


class PathWatch:
    """Watches NCCL on this rank; a context from before NCCL's first call until it is done.

    With `strict`, NCCL is told to refuse to go through host memory inside a node.
    """

    def __init__(
        self,
        group: Group,
        identity: RankIdentity,
        *,
        strict: bool,
        keeps_log: bool = False,
        use: NvmlUse | None = None,
    ) -> None:
        self._group, self._strict, self._keeps_log, self._use = group, strict, keeps_log, use
        self._kept: RecordedLog | None = None
        self._settings = nccl_settings(os.environ)
        self._facts = own_process(identity)
        self._stack = ExitStack()
        self._probe = self._stack.enter_context(Probe(dict(os.environ))) if identity.local_rank == 0 else None
        self._refusals = refusals(self._settings) if strict else {}
        self._known: list[_Known] = []
        self._delay_before: RunDelay | None = None
        self._waited: dict[int, float] = {}
        self._nodes: dict[int, Topology] | None = None
        self._log: NcclLog | None = None
        self._silent: SilentLog | None = None
        self._by_design = ""

    def __enter__(self) -> Self:
        """Nothing is changed yet: `begin` does that."""
        return self

    def __exit__(self, *_: object) -> None:
        """Everything as it was."""
        self._stack.close()
        for name in self._refusals:
            os.environ.pop(name, None)

    def begin(self, library: LoggingLibrary, identity: RankIdentity, *, no_log: str = "", by_design: str = "") -> None:
        """Have NCCL's log come here from its first call on; `identity` has the GPU now.

        `no_log`, `by_design`: why it names no paths, or why these go through host memory on any machine.
        """
        os.environ.update(self._refusals)
        self._known = self._group.gather(_Known(identity, self._facts, self._settings))
        if self._strict:
            self._nodes = self._topologies(self._group.gather(self._own_snapshot()))
        ranks_on_node = sum(each.identity.node == identity.node for each in self._known)
        self._log = self._stack.enter_context(NcclLog(library, self._settings, ranks_on_node))
        self._silent, self._by_design = (SilentLog(no_log) if no_log else None), by_design

    def path_observer(self, request: SweepRequest) -> PathObserver:
        """The observer of a sweep, once NCCL has begun."""
        if self._log is None:
            raise ValueError("nothing listens before NCCL begins")
        counters = NvmlCounters([str(self._known[self._group.rank].identity.gpu_bus_id)])
        self._stack.callback(counters.close)
        nodes = [each.identity.node for each in self._known]
        # From here on operations are issued: while NCCL starts, its threads and the reading of nodes need CPUs as well.
        self._delay_before = run_delay()
        if self._keeps_log:
            self._kept = RecordedLog(self._log)
        sources = ObservationSources(
            log=self._silent or self._kept or self._log,
            counters=counters,
            read_circumstances=self._look_around,
            nodes=nodes,
            window=self._window(counters),
            by_design=self._by_design,
            read_waited=lambda: waited_share(self._delay_before, run_delay()),
        )
        return PathObserver.of(request, self._group, sources)

    def _window(self, counters: NvmlCounters) -> IdleWindow:
        own = self._known[self._group.rank].identity
        pids = {each.facts.pid for each in self._known if each.identity.node == own.node}
        users = None if self._use is None else self._use.of([str(own.gpu_bus_id)], pids)
        return IdleWindow(counters, users)

    def machines(self) -> Machines | None:
        """Nodes and processes on the first rank, once the sweep was tried out; for a recording."""
        if self._nodes is None or self._group.rank != 0:
            return None
        nodes = [self._nodes[number] for number in sorted(self._nodes)]
        return Machines(nodes, [each.facts for each in self._known])

    def log_text(self) -> bytes:
        """NCCL's log of this rank until all was tried out, where that is kept."""
        return b"" if self._kept is None else self._kept.text()

    @contextmanager
    def naming_refusals(self, library: LoggingLibrary) -> Iterator[None]:
        """Turn NCCL's 'no transport found' into a GpubenchError that names the two ranks and the cause."""
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
        found = next((each for each in remarks if each is not None and each.kind is RemarkKind.NO_TRANSPORT), None)
        if found is None or not all(found.about):
            return None
        pair = int(found.about[0]), int(found.about[1])
        cause = first_cause({pair: ()}, self._circumstances(self._nodes or {}))
        error = no_direct_path if self._strict else no_path
        return error(" → ".join(f"rank {rank}" for rank in pair), found.text, cause.evidence, cause.advice)

    def _look_around(self) -> Circumstances | None:
        self._read_again()
        if self._nodes is None:
            collected = self._group.collect(self._own_snapshot())
            if collected is None:
                return None
            self._nodes = self._topologies(collected)
        return self._circumstances(self._nodes)

    def _read_again(self) -> None:
        share = waited_share(self._delay_before, run_delay())
        later = self._group.collect((read_again(self._facts), share))
        if later is not None:
            ends = zip(self._known, later, strict=True)
            self._known = [known._replace(facts=facts) for known, (facts, _) in ends]
            self._waited = {rank: waited for rank, (_, waited) in enumerate(later) if waited is not None}

    def _own_snapshot(self) -> Snapshot | None:
        return None if self._probe is None else self._probe.snapshot(SECONDS_TO_READ_A_NODE)

    def _topologies(self, snapshots: Sequence[Snapshot | None]) -> dict[int, Topology]:
        ends = zip(self._known, snapshots, strict=True)
        firsts = {known.identity.node: snapshot for known, snapshot in ends if snapshot is not None}
        return dict(zip(firsts, map(Topology, with_own_names([*firsts.values()])), strict=True))

    def _circumstances(self, nodes: Mapping[int, Topology]) -> Circumstances:
        facts = [each.facts for each in self._known]
        settings = users_settings(facts, [each.settings for each in self._known])
        wiring = Wiring([each.identity for each in self._known], nodes)
        return Circumstances(wiring=wiring, facts=facts, settings=settings, waited=self._waited)

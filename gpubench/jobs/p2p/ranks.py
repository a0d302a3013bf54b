"""Copies between ranks: one rank's part in measuring them, and the presentation on the first."""

import os
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace

from gpubench.formats.presenter import Presenter, rank_style
from gpubench.hardware.copies.between_ranks import CudaRankCopies, Network
from gpubench.hardware.cuda.device import CudaDevice
from gpubench.hardware.mpi import group as mpi
from gpubench.hardware.nccl.backend import NcclLibrary
from gpubench.hardware.nccl.debug_log import NcclLog
from gpubench.hardware.node.nvml.gpu_use import NvmlUse
from gpubench.hardware.node.nvml.link_counters import NvmlCounters
from gpubench.hardware.process.nccl_settings import nccl_settings
from gpubench.hardware.watchdog.rank import RankProgress
from gpubench.jobs.agreement import agree
from gpubench.jobs.gpus import open_gpu, usable_driver
from gpubench.jobs.listeners import NullListener
from gpubench.jobs.machines import Machines
from gpubench.jobs.outputs import check_writable
from gpubench.jobs.p2p.plan import NAME, P2pPlan
from gpubench.jobs.p2p.requests import pairs_of_ranks, request_for_ranks
from gpubench.jobs.p2p.setup import CopySetup
from gpubench.jobs.past import bandwidth_of, past_of
from gpubench.jobs.rank import own_identity
from gpubench.jobs.sources import gathered, own_process
from gpubench.measure.p2p.between_ranks import RankBench
from gpubench.measure.p2p.machine import machine_of_ranks
from gpubench.measure.p2p.request import P2pRequest
from gpubench.measure.p2p.run import P2pRun
from gpubench.measure.paths.idle_window import IdleWindow
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.results.ending import exit_code_of
from gpubench.model.results.report import PAIR_COLUMNS
from gpubench.model.terms.hang import Phase
from gpubench.model.terms.origin import Origin
from gpubench.profiles.matching import ProfileMatch
from gpubench.profiles.nodes import profile_for


class P2pRanksJob:
    """One rank's part in measuring copies between all of them."""

    def __init__(self, group: mpi.MpiGroup, progress: RankProgress, plan: P2pPlan, arguments: Sequence[str]) -> None:
        self._group = group
        self._progress = progress
        self._plan = plan
        self._arguments = arguments
        self._log: NcclLog | None = None
        self.identity, self._node_by_rank = own_identity(group)
        self._ranks_on_node = self._node_by_rank.count(self.identity.node)

    def run(self, channel: str | None) -> int:  # noqa: ARG002 - p2p never launches itself
        """Measure with the others, show it on the first rank, and return the exit code.

        Raises:
            AgreedError: the run cannot be, and every rank knows it.
        """
        group, plan = self._group, self._plan
        pairs = agree(group, lambda: pairs_of_ranks(plan, group.size))
        presenter = agree(group, self._presenter)
        driver = agree(group, lambda: usable_driver(NAME), place=str(self.identity))
        # Before any rank has a context: `gathered` makes sure of that.
        use = NvmlUse()
        # The first rank of a node reads it before any rank puts something on its GPUs.
        snapshots = agree(group, self._own_snapshots, place=str(self.identity))
        read = gathered(group, snapshots, own_process(self.identity))
        self._progress.enter(Phase.OPENING)
        device, self.identity = open_gpu(group, self.identity, self._ranks_on_node, driver)
        identities = group.gather(self.identity)
        self._progress.name_ranks(identities)
        # The profile of the first rank: by others, ranks would measure other pairs again than it, and wait for ever.
        machines, matched = group.broadcast(agree(group, lambda: _with_profile(read, plan)))
        machine = replace(
            machine_of_ranks(machines.nodes, identities, machines.processes, matched, Origin.MEASURED),
            profile_asked_for=plan.profile is not None,
            expected_gpus=plan.expected_gpus,
        )
        with ExitStack() as stack:
            request = request_for_ranks(plan, pairs, machine)
            copies = self._copies(device, request, stack)
            counters = NvmlCounters([machine.gpus[group.rank].bus_id])
            pids = {each.pid for each in identities if each.node == self.identity.node}
            window = IdleWindow(counters, use.of([machine.gpus[group.rank].bus_id], pids))
            bench = RankBench(request, group, copies, counters, self._log, self._progress, window)
            setup = CopySetup(
                plan=plan,
                machines=machines,
                machine=machine,
                request=request,
                bench=bench,
                libraries={**copies.libraries(), "MPI": mpi.library_version()},
                ranks=identities,
            )
            metadata = setup.metadata(self._arguments)
            listener = presenter or NullListener()
            if presenter is not None:
                presenter.begin(metadata, PAIR_COLUMNS)
            # Every rank judges, and measures again what is near a threshold: all have to know the same.
            own = past_of(plan.presentation.history, metadata) if group.rank == 0 else None
            (figures,) = group.broadcast((own,))
            past = bandwidth_of(figures)
            with setup.recorded_bench(metadata) if presenter is not None else nullcontext(bench) as recorded:
                report = P2pRun(request, recorded, machine, listener, past=past).run()
            bench.close()
            counters.close()
            use.close()
        self._progress.enter(Phase.OUTPUT)
        listener.end(report)
        code = listener.exit_code if isinstance(listener, Presenter) else exit_code_of(metadata, report)
        return group.broadcast(code)

    def _presenter(self) -> Presenter | None:
        """The presenter of the rows, on the first rank."""
        if self._group.rank != 0:
            return None
        shown = self._plan.presentation
        check_writable(shown.outputs, self._plan.recording.record)
        return Presenter(shown, rank_style(shown), progress=shown.show_progress, is_rank=True)

    def _own_snapshots(self) -> list[Snapshot]:
        return self._plan.source.machines().snapshots if self.identity.local_rank == 0 else []

    def _copies(self, device: CudaDevice, request: P2pRequest, stack: ExitStack) -> CudaRankCopies:
        """The copies of this rank, with NCCL where a pair is on two nodes: its log is read until `stack` ends."""
        group, place = self._group, str(self.identity)
        network = None
        if any(series.network for series in request.series):
            library = agree(group, NcclLibrary, place=place)
            self._log = stack.enter_context(NcclLog(library, nccl_settings(os.environ), self._ranks_on_node))
            self._progress.enter(Phase.CONNECTING, "by NCCL")
            network = Network(group, library)
            self._progress.answer_watchdog(network.trouble, network.abort)
        return agree(group, lambda: CudaRankCopies(device, network), place=place)


def _with_profile(machines: Machines | None, plan: P2pPlan) -> tuple[Machines, ProfileMatch | None] | None:
    return None if machines is None else (machines, profile_for(machines.nodes[0], os.environ, plan.profile))

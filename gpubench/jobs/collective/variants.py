"""The variants of a sweep on one rank: communicators under settings, hierarchical collectives, the host backend."""

import os
from functools import partial
from typing import TYPE_CHECKING, Protocol

from gpubench.collectives.hierarchical import Hierarchy
from gpubench.collectives.request import SweepRequest
from gpubench.hardware.process.nccl_settings import environment_set, nccl_settings
from gpubench.jobs.agreement import agree
from gpubench.jobs.collective.plan import AskedVariants
from gpubench.measure.collective.sweep import Issue
from gpubench.measure.collective.variants import SweepVariant
from gpubench.model.terms.hierarchy import TwoLevels
from gpubench.model.terms.nccl_choice import HIERARCHICAL, NcclChoice
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.ports.backend import MultiGroupBackend
from gpubench.ports.group import Group

if TYPE_CHECKING:
    from gpubench.ports.collective_calls import CollectiveCalls

_NODE_VARIABLE = "NCCL_HOSTID"
"""What NCCL takes for the node of a process, instead of asking the system."""


class NcclErrors(Protocol):
    """An NCCL library whose errors are read."""

    @property
    def error(self) -> type[Exception]:
        """The exception that a failed call of NCCL's raises."""
        ...

    def last_error(self) -> str:
        """The text of its last warning."""
        ...


class VariantMaker:
    """Makes the ways of one rank; every rank has to make the same ones."""

    def __init__(self, group: Group, identity: RankIdentity, request: SweepRequest) -> None:
        self._group = group
        self._identity = identity
        self._request = request

    def ways(
        self,
        asked: AskedVariants,
        backend: MultiGroupBackend,
        library: NcclErrors | None,
        host: MultiGroupBackend | None,
    ) -> list[SweepVariant]:
        """The own choice of the backend first; then settings, then what is made of smaller operations, then the host.

        Raises AgreedError: the ranks are not spread over nodes as a hierarchy needs it.
        """
        ways = [SweepVariant(setting=None, backend=backend)]
        if library is not None:
            ways += [self._setting(each, backend, library) for each in asked.settings]
        hosts = [] if host is None else [host]
        levels = self._levels() if asked.hierarchical else None
        if levels is not None:
            ways.append(self._hierarchical(backend, levels, library))
        for each in hosts:
            ways.append(SweepVariant(setting=None, backend=each))
            if levels is not None:
                ways.append(self._hierarchical(each, levels, None))
        return ways

    def _setting(self, setting: NcclChoice, backend: MultiGroupBackend, library: NcclErrors) -> SweepVariant:
        """All ranks on a communicator of their own, made while NCCL is told what to use."""
        opened: list[CollectiveCalls] = []

        def open_() -> Issue:
            with environment_set(setting.variables):
                opened.append(backend.open(self._group))
            return partial(self._request.collective.issue, opened[-1])

        return SweepVariant(
            setting=setting.name,
            backend=backend,
            open=open_,
            drop=lambda _issue: backend.drop(opened.pop()),
            refusals=(library.error,),
            explain=lambda error: library.last_error() or str(error),
            logs_choices=True,
        )

    def _hierarchical(self, backend: MultiGroupBackend, levels: TwoLevels, library: NcclErrors | None) -> SweepVariant:
        opened: list[CollectiveCalls] = []
        rank = self._group.rank
        node, place = levels.nodes[rank], levels.places[rank]

        def open_() -> Issue:
            inside, across = (backend.open(self._group.split(color, rank)) for color in (node, place))
            opened[:] = inside, across
            return Hierarchy(backend.calls, inside, across, place, levels.ranks_a_node, backend.in_order).all_reduce

        def drop(_issue: Issue) -> None:
            while opened:
                backend.drop(opened.pop())

        return SweepVariant(
            setting=HIERARCHICAL,
            backend=backend,
            open=open_,
            fits=lambda case: Hierarchy.fits(case.layout.count, case.dtype, levels.ranks_a_node),
            drop=drop,
            refusals=() if library is None else (library.error,),
            explain=lambda error: (library.last_error() if library else "") or str(error),
        )

    def _levels(self) -> TwoLevels:
        """By node as MPI sees it, and inside it by what NCCL is told to take for one."""
        own = self._identity.node, nccl_settings(os.environ).get(_NODE_VARIABLE, "")
        named = self._group.gather(own)

        def divide() -> TwoLevels:
            levels = TwoLevels.of(named)
            levels.check_averages(self._request.ops, self._request.dtypes)
            return levels

        return agree(self._group, divide)

"""The variants of a sweep on one rank: NCCL settings, hierarchical all-reduce, and additional backends."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from gpubench.backends.registry import BackendKind
from gpubench.collectives.record import Hierarchy, SweepRequest
from gpubench.errors import CouldNotMeasureError
from gpubench.jobs.rank import agree
from gpubench.machine.environment import set_environment
from gpubench.measure.collective.cases import Case
from gpubench.measure.collective.sweep import Issue
from gpubench.measure.collective.variants import NamedBackend, SweepVariant
from gpubench.model.terms.operation import KERNELS, TwoLevels, choose_kernel
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.settings import HIERARCHICAL, NcclSetting, Registration
from gpubench.ports.backend import MultiGroupBackend, SeveralKernels
from gpubench.ports.group import Group

if TYPE_CHECKING:
    from gpubench.ports.backend import CollectiveCalls


class NcclErrors(Protocol):
    """An NCCL library whose errors can be read."""

    @property
    def error(self) -> type[Exception]:
        """The exception type that a failed NCCL call raises."""

    def last_error(self) -> str:
        """Return the text of NCCL's last warning."""


class BesideBackend(Struct, frozen=True):
    """An additional backend to measure. `backend` is None if it cannot run, and `refused` is the reason."""

    kind: BackendKind
    backend: MultiGroupBackend | None
    refused: str = ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _takes_another(backend: str, kernel: str, case: Case) -> bool:
    return choose_kernel(backend, case.size_bytes) != kernel


class VariantMaker(Struct, frozen=True):
    """Makes the variants of one rank. Every rank must make the same variants."""

    group: Group
    identity: RankIdentity
    request: SweepRequest

    def variants(
        self,
        backend: MultiGroupBackend,
        library: NcclErrors | None = None,
        beside: Sequence[BesideBackend] = (),
        settings: Sequence[NcclSetting] = (),
        *,
        hierarchical: bool = False,
    ) -> list[SweepVariant]:
        """Return all variants, in this order: the backend's own choice, its kernels, settings, hierarchical
        all-reduce, and additional backends.

        Raises AgreedError for hierarchical all-reduce if the ranks are not spread evenly over nodes.
        """
        variants = [SweepVariant(setting=None, backend=backend), *self._kernels(backend)]
        if library is not None:
            variants += [self._setting(setting, backend, library) for setting in settings]
        levels = self._levels() if hierarchical else None
        if levels is not None:
            variants.append(self._hierarchical(backend, levels, library))
        for other in beside:
            variants.append(self._whole_backend(other))
            if other.backend is not None:
                variants += self._kernels(other.backend, other.kind.refusals)
            if levels is not None and other.backend is not None:
                variants.append(self._hierarchical(other.backend, levels, None, other.kind.refusals))
        return variants

    def _whole_backend(self, other: BesideBackend) -> SweepVariant:
        backend, refusals = other.backend, other.kind.refusals
        if backend is None:
            return SweepVariant(setting=None, backend=NamedBackend(other.kind.name), refused=other.refused)
        return SweepVariant(
            setting=None,
            backend=backend,
            open=(lambda: partial(self.request.collective.issue, backend.calls)) if refusals else None,
            refusals=(*refusals, CouldNotMeasureError) if refusals else (),
            explain=_first_line,
            logs_choices=other.kind.logs_to_nccl,
        )

    def _kernels(
        self, backend: MultiGroupBackend, refusals: tuple[type[Exception], ...] = ()
    ) -> Iterator[SweepVariant]:
        """Yield a variant for each kernel of a backend. It only runs at sizes for which the backend would choose
        another kernel.
        """
        if not isinstance(backend, SeveralKernels):
            return
        for kernel in KERNELS[backend.name]:
            yield SweepVariant(
                setting=kernel,
                backend=backend,
                open=partial(self._issue_kernel, backend, kernel),
                fits=partial(_takes_another, backend.name, kernel),
                refusals=refusals,
                explain=_first_line,
            )

    def _issue_kernel(self, backend: SeveralKernels, kernel: str) -> Issue:
        return partial(self.request.collective.issue, backend.select_kernel(kernel))

    def _setting(self, setting: NcclSetting, backend: MultiGroupBackend, library: NcclErrors) -> SweepVariant:
        opened: list[CollectiveCalls] = []
        registered: list[Registration] = []

        def open_() -> Issue:
            with set_environment(setting.variables):
                calls, how = self._open(setting, backend, library)
            opened.append(calls)
            registered[:] = [how]
            return partial(self.request.collective.issue, opened[-1])

        return SweepVariant(
            setting=setting.name,
            backend=backend,
            open=open_,
            drop=lambda _issue: backend.drop(opened.pop()),
            refusals=(library.error,),
            explain=lambda error: library.last_error() or str(error),
            logs_choices=True,
            registered=lambda: next((how.value for how in registered if how is not Registration.NONE), None),
        )

    def _open(
        self, setting: NcclSetting, backend: MultiGroupBackend, library: NcclErrors
    ) -> "tuple[CollectiveCalls, Registration]":
        if not setting.requests:
            return backend.open(self.group), Registration.NONE
        from gpubench.backends.nccl import communicator

        nccl: Any = library
        on_nccl: Any = backend
        return communicator.open_requested(on_nccl, nccl, self.group, setting.requests)

    def _hierarchical(
        self,
        backend: MultiGroupBackend,
        levels: TwoLevels,
        library: NcclErrors | None,
        refusals: tuple[type[Exception], ...] = (),
    ) -> SweepVariant:
        opened: list[CollectiveCalls] = []
        rank = self.group.rank
        node, place = levels.nodes[rank], levels.places[rank]

        def open_() -> Issue:
            inside, across = (backend.open(self.group.split(color, rank)) for color in (node, place))
            opened[:] = inside, across
            return Hierarchy(backend.calls, inside, across, place, levels.ranks_per_node, backend.chain).all_reduce

        def drop(_issue: Issue) -> None:
            while opened:
                backend.drop(opened.pop())

        return SweepVariant(
            setting=HIERARCHICAL,
            backend=backend,
            open=open_,
            fits=lambda case: Hierarchy.fits(case.layout.count, case.dtype, levels.ranks_per_node),
            drop=drop,
            refusals=refusals if library is None else (*refusals, library.error),
            explain=lambda error: (library.last_error() if library else "") or str(error),
        )

    def _levels(self) -> TwoLevels:
        own = self.identity.node, self.identity.nccl_host or ""
        named = self.group.gather(own)

        def divide() -> TwoLevels:
            levels = TwoLevels.of(named)
            levels.check_averages(self.request.ops, self.request.dtypes)
            return levels

        return agree(self.group, divide)

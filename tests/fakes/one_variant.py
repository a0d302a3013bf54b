"""A sweep with only the backend's own choice."""

from collections.abc import Sequence

from gpubench.collectives.record import SweepRequest
from gpubench.measure.collective.sweep import NO_OBSERVERS, Observers
from gpubench.measure.collective.variants import SweepVariant, measure_variants
from gpubench.model.results.report import CollectiveRow, Report
from gpubench.model.terms.ranks import RankIdentity
from gpubench.ports.backend import Backend
from gpubench.ports.group import Group, Listener


def measure(
    request: SweepRequest,
    group: Group,
    backend: Backend,
    identities: Sequence[RankIdentity],
    listener: Listener[CollectiveRow],
    observers: Observers = NO_OBSERVERS,
) -> Report:
    return measure_variants(
        request, group, [SweepVariant(setting=None, backend=backend)], identities, listener, observers
    )

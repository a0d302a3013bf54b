"""The paths that the traffic of watched jobs takes, for --require-path."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from gpubench.measure.watch.report import Course
from gpubench.measure.watch.signals import NetworkUse
from gpubench.model.paths.topology import Topology
from gpubench.model.results.required_path import TakenPath, rdma_kinds
from gpubench.model.results.watch import Way

_STAGED = {Way.DIRECT: False, Way.STAGED: True, Way.SOCKETS: True}
_NO_EXCHANGE = (Way.IDLE, Way.LOADING, Way.SAVING, Way.HOST_COPIES)
_NETWORKS = {
    NetworkUse.RDMA: ("RDMA",),  # Counters belong to the node, so its jobs' networks are not proven
    NetworkUse.SOCKETS: ("NET/Socket",),
    NetworkUse.ETHERNET: ("NET/Socket",),
    NetworkUse.UNKNOWN: (),
}


def taken_paths(course: Course, nodes: Sequence[Topology]) -> Iterator[TakenPath]:
    """Yield the path of each job inside each node, and the network that the node's NICs show.

    A direct path means that NVLinks carry the traffic. Counters do not show pairs, so a job counts as one.
    """
    kinds = rdma_kinds(nodes)
    for (host, name), job in course.jobs.items():
        main, last = job.main, job.main.last
        if last is None or main.way in _NO_EXCHANGE:
            continue
        path = TakenPath(name=f"{name} on {host}", ends=(host, name), is_inside=True)
        if len(last.job.gpus) > 1:
            staged = _STAGED.get(main.way)
            yield replace(path, path_class="NVLink" if staged is False else None, host_staged=staged)
        if last.seen.network in _NETWORKS:
            transports, networks = _NETWORKS[last.seen.network], kinds.get(host, frozenset())
            yield replace(path, is_inside=False, transports=transports, path_class="NET", networks=networks)

"""Measurements of a check on this host: gpubench's own commands, each a process of its own with a deadline.

A driver that hangs in a copy then costs that measurement and not the check: it is ERROR, not a stuck prolog.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpubench.collectives.record import Collective
from gpubench.conditions.definition.circumstances import Facts
from gpubench.conditions.measured import HOST_MEMORY_SLOW
from gpubench.errors import CouldNotMeasureError
from gpubench.hardware.launch.interpreter import module_command
from gpubench.hardware.mpi.one_process import AloneGroup as OneProcessGroup
from gpubench.hardware.timing.host_copy import copy_seconds
from gpubench.jobs.check.plan import LARGE_BYTES, Depth, sampling
from gpubench.jobs.child_process import run_child
from gpubench.measure.check.documents import of_collective, of_p2p, together
from gpubench.model.paths.topology import Topology
from gpubench.model.results.measured_copies import of_host_memory
from gpubench.model.results.measurements import Measurements, Need
from gpubench.model.terms.statistics.sampling import AUTO, Mode
from gpubench.model.terms.units import format_size
from gpubench.ports.group import Group

MEMORY_BYTES = 64 * 2**20
"""More than a core's caches, and where all of them together hold it, those of nodes with the same CPU do."""

_MEMORY_SAMPLES = 20
_MEMORY_ROUNDS = 3

_COPIES = {Depth.FULL: (), Depth.DEFAULT: ("--no-patterns",), Depth.BRIEF: ("--no-patterns",)}
_BRIEF_COPIES = ("--sizes", format_size(LARGE_BYTES))
"""One size, with peer access off and on: on eight H200s a quarter of what is copied by default."""

_MOST_WORDS = 300


class ChildCommands:
    """Measures one host by gpubench's own commands, each a process of its own that has `timeout_s` seconds.

    `profile` is the name or file of the one to judge by, None for a match; of collectives `ranks_per_gpu` share a GPU.
    """

    def __init__(
        self,
        nodes: Sequence[Topology],
        depth: Depth,
        timeout_s: float,
        profile: str | None = None,
        ranks_per_gpu: int = 1,
    ) -> None:
        self._nodes, self._depth, self._timeout_s = nodes, depth, timeout_s
        self._judged_by = () if profile is None else ("--profile", profile)
        self._gpus = _visible(nodes[0])
        self._sharing = () if ranks_per_gpu == 1 else ("--ranks-per-gpu", str(ranks_per_gpu))
        self.alone = "one GPU: it has nobody to talk to" if self._gpus == 1 and not self._sharing else ""

    def copies(self) -> Measurements:
        """By `gpubench p2p`; a host has no other to compare its memory with."""
        return together([measured_memory(OneProcessGroup(), self._nodes, 0), self.peer_and_host_copies()])

    def peer_and_host_copies(self) -> Measurements:
        """Copies between all GPUs of this host, and with host memory, by `gpubench p2p`."""
        needs = (Need.PEER_COPIES, Need.HOST_COPIES)
        gpus = self._gpus
        if not gpus:
            return Measurements(left_out=dict.fromkeys(needs, "no GPU"))
        brief = self._depth is Depth.BRIEF and gpus > 1
        arguments = ["p2p", "--strict", *self._judged_by, *(_BRIEF_COPIES if brief else _COPIES[self._depth])]
        try:
            found = of_p2p(_document(arguments, self._timeout_s))
        except CouldNotMeasureError as error:
            return Measurements(failed=dict.fromkeys(needs, str(error)))
        if gpus == 1:
            return replace(found, left_out={Need.PEER_COPIES: "one GPU: it has nobody to copy to"})
        return replace(found, left_out={Need.HOST_COPIES: "gpubench check measures them"} if brief else {})

    def collective(self, collective: Collective, sizes: Sequence[int]) -> Measurements:
        """By the command of that name, over all GPUs of this host, or two CPU ranks where there is none.

        Raises CouldNotMeasureError: it does not end in time, or without a whole report.
        """
        budget = sampling(on_gpus=self._gpus > 0).budget_seconds
        timed = ("--mode", Mode.THROUGHPUT, "--iters", AUTO, "--budget", f"{budget:g}")
        given = ["--sizes", ",".join(map(str, sizes)), "--out-of-place", *timed, *self._judged_by, *self._sharing]
        return of_collective(_document([collective.name, *given], self._timeout_s))


def _visible(node: Topology) -> int:
    """The GPUs that CUDA shows to this process; all of the node where CUDA does not say."""
    return sum(gpu.cuda_index is not None for gpu in node.gpus) or len(node.gpus)


def measured_memory(group: Group, nodes: Sequence[Topology], node: int | None) -> Measurements:
    """Copies by one thread of every node in its memory, all nodes at the same time; `node` is None on other ranks.

    The fastest copy of a node counts, as others can only make it slower; where a node falls behind, all copy again.
    """
    if len(nodes) == 1:
        return Measurements(left_out={Need.HOST_MEMORY: "one node: there is none to compare it with"})
    fastest = dict.fromkeys(range(len(nodes)), float("inf"))
    found = Measurements()
    for _ in range(_MEMORY_ROUNDS):
        own = None if node is None else (node, min(copy_seconds(MEMORY_BYTES, _MEMORY_SAMPLES)))
        for number, seconds in filter(None, group.gather(own)):
            fastest[number] = min(seconds, fastest[number])
        rows = [of_host_memory(nodes[each].snapshot.host, MEMORY_BYTES, fastest[each]) for each in fastest]
        found = Measurements(pairs=tuple(rows))
        if not any(HOST_MEMORY_SLOW.look(Facts(nodes, measurements=found).circumstances)):
            break
    return found


def _document(arguments: Sequence[str], timeout_s: float) -> Mapping[str, Any]:
    """The JSON document of a command of gpubench.

    Raises CouldNotMeasureError: it does not end in time, or ends without a whole report.
    """
    name = f"gpubench {arguments[0]}"
    ended = run_child(module_command("gpubench", *arguments, "--format", "json", "--no-progress"), timeout_s)
    if ended is None:
        raise CouldNotMeasureError(f"{name} did not end within {timeout_s:g} s")
    try:
        document: Mapping[str, Any] = json.loads(ended.output)
    except ValueError:
        document = {}
    if document.get("complete"):
        return document
    words = "; ".join(" ".join(line.split()) for line in ended.own_words.splitlines() if line.strip())
    if len(words) > _MOST_WORDS:  # gpubench says first what it saw, others last
        words = f"{words[:_MOST_WORDS]} ..." if ended.own_words != ended.said else f"... {words[-_MOST_WORDS:]}"
    raise CouldNotMeasureError(f"{name} ended with exit code {ended.code}: {words or 'it said nothing'}")

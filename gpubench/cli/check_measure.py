"""Measurements of a check on this host: gpubench's own commands, each a process of its own with a deadline.

A driver that hangs in a copy then costs that measurement and not the check: it is ERROR, not a stuck prolog.
"""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpubench.cli.check_plan import CheckPlan, measure_with_repeats
from gpubench.collectives.record import Collective
from gpubench.conditions.circumstances import Facts
from gpubench.conditions.measured import HOST_MEMORY_SLOW
from gpubench.errors import CouldNotMeasureError
from gpubench.hardware.launch.interpreter import module_command, with_package
from gpubench.hardware.launch.started_by import as_if_alone
from gpubench.hardware.timing.host_copy import copy_seconds
from gpubench.measure.check.documents import of_collective, of_p2p, together
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.profile import Profile
from gpubench.model.results.measured_copies import of_host_memory
from gpubench.model.results.measurements import Measurements, Need
from gpubench.model.results.report import CollectiveRow
from gpubench.ports.group import Group

MEMORY_BYTES = 64 * 2**20
"""More than a core's caches, and where all of them together hold it, those of nodes with the same CPU do."""

_MEMORY_SAMPLES = 20
_MEMORY_ROUNDS = 3

_OWN_ERROR = "gpubench: error: "
_MOST_WORDS = 300
_SECONDS_TO_END = 5.0


def measured_copies(plan: CheckPlan, timeout_s: float, node: Topology) -> Measurements:
    """Copies between all GPUs of this host, and with host memory, by `gpubench p2p`."""
    needs = (Need.PEER_COPIES, Need.HOST_COPIES)
    arguments = ["p2p", "--strict", *(() if plan.full else ("--no-patterns",))]
    try:
        measured = of_p2p(_document(arguments, timeout_s))
    except CouldNotMeasureError as error:
        return Measurements(failed=dict.fromkeys(needs, str(error)))
    alone = {Need.PEER_COPIES: "one GPU: it has nobody to copy to"} if len(node.gpus) == 1 else {}
    return replace(measured, left_out=alone)


def measured_collectives(
    plan: CheckPlan, timeout_s: float, nodes: Sequence[Topology], profile: Profile | None
) -> Measurements:
    """Collectives over all GPUs of this host, or two CPU ranks where there is none, by `gpubench allreduce`."""
    if len(nodes[0].gpus) == 1:
        return Measurements(left_out={Need.ALL_REDUCE: "one GPU: it has nobody to talk to"})
    limit = plan.limit_gb_s(nodes)
    sizes_of = plan.sizes if nodes[0].gpus else plan.host_sizes
    parts: list[Measurements] = []

    def rows(collective: Collective, sizes: Sequence[int], attempt: int) -> list[CollectiveRow]:
        given = ["--sizes", ",".join(map(str, sizes)), "--out-of-place"]
        document = _document([collective.name, *given], timeout_s)
        part = of_collective(document)
        if not attempt:
            parts.append(replace(part, collectives=()))
        return [replace(row, limit_gb_s=limit) for row in part.collectives]

    try:
        found = [row for each in plan.collectives for row in measure_with_repeats(each, sizes_of, rows, profile)]
    except CouldNotMeasureError as error:
        return together([*parts, Measurements(failed={Need.ALL_REDUCE: str(error)})])
    return together([*parts, Measurements(collectives=tuple(found))])


def measured_memory(group: Group, nodes: Sequence[Topology], node: int | None) -> Measurements:
    """What one thread of every node copies in its memory, all nodes at the same time; `node` is None on other ranks.

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
        if not any(HOST_MEMORY_SLOW.look(Facts(nodes, measurements=found).around)):
            break
    return found


def _document(arguments: Sequence[str], timeout_s: float) -> Mapping[str, Any]:
    """What a command of gpubench reports as JSON.

    Raises:
        CouldNotMeasureError: it does not end in time, or ends without a whole report.
    """
    name = f"gpubench {arguments[0]}"
    command = module_command("gpubench", *arguments, "--format", "json", "--no-progress")
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=with_package(as_if_alone(os.environ)),
        start_new_session=True,
    ) as child:
        try:
            output, said = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _end(child)
            raise CouldNotMeasureError(f"{name} did not end within {timeout_s:g} s") from None
        except BaseException:
            _end(child)
            raise
    try:
        document: Mapping[str, Any] = json.loads(output)
    except ValueError:
        document = {}
    if document.get("complete"):
        return document
    *_, own = said.decode(errors="replace").rpartition(_OWN_ERROR)
    words = "; ".join(" ".join(line.split()) for line in own.splitlines() if line.strip())[-_MOST_WORDS:]
    raise CouldNotMeasureError(f"{name} ended with exit code {child.returncode}: {words or 'it said nothing'}")


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End a command with all that it started: politely, then not."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, how)
            child.wait(_SECONDS_TO_END)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
        return

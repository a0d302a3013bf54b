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

from gpubench.cli.check_plan import CheckPlan, again
from gpubench.collectives.record import Collective
from gpubench.errors import CouldNotMeasureError
from gpubench.hardware.interpreter import module_command, with_package
from gpubench.measure.check_documents import of_collective, of_p2p, together
from gpubench.model.measurements import Measurements, Need
from gpubench.model.profile import Profile
from gpubench.model.report import CollectiveRow
from gpubench.model.topology import Topology

_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "SLURM_", "PBS_", "PALS_", "MPI_LOCAL", "HYDI_", "HYDRA_")
"""Variables by which a process knows that a launcher started it; a child that is to be alone has none of them."""

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
        found = [row for each in plan.collectives for row in again(each, sizes_of, rows, profile)]
    except CouldNotMeasureError as error:
        return together([*parts, Measurements(failed={Need.ALL_REDUCE: str(error)})])
    return together([*parts, Measurements(collectives=tuple(found))])


def _document(arguments: Sequence[str], timeout_s: float) -> Mapping[str, Any]:
    """What a command of gpubench reports as JSON.

    Raises:
        CouldNotMeasureError: it does not end in time, or ends without a whole report.
    """
    name = f"gpubench {arguments[0]}"
    command = module_command("gpubench", *arguments, "--format", "json", "--no-progress")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHERS)}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=with_package(environment),
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
    words = " ".join(said.decode(errors="replace").split())[-_MOST_WORDS:]
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

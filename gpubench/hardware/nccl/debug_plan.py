"""The way to read NCCL's log that leaves the user's own log as it is.

It follows from what is set in the environment or in one of NCCL's configuration files:

- NCCL_DEBUG unset, VERSION or WARN: a private file. Version and warnings, where asked for, are given to the user.
- INFO, ABORT or TRACE without a file: a private file with the user's subsystems, forwarded to stdout as it is written;
  no log of NCCL before 2.24.3, which could not go back to stdout.
- INFO, ABORT or TRACE with NCCL_DEBUG_FILE: the user's file is read, and nothing is changed. Not where it is one file
  for several ranks, which overwrite each other there.
- INFO, ABORT or TRACE with an NCCL_DEBUG_SUBSYS that leaves INIT out: no log.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpubench.hardware.process.nccl_settings import DEBUG, DEBUG_FILE, DEBUG_SUBSYSTEMS

INFO_LEVELS = ("INFO", "ABORT", "TRACE")
"""Levels of NCCL_DEBUG that show how ranks are connected: NCCL orders them NONE, VERSION, WARN, INFO, ABORT, TRACE."""

_DEFAULT_SUBSYSTEMS = "INIT,BOOTSTRAP,ENV"
_SUBSYSTEMS = "INIT,ENV,GRAPH,NET,TUNING"
"""Connections, variables, rings, networks, and a line an operation on rank 0."""

_QUIET_SUBSYSTEMS = "INIT,ENV"
"""For an NCCL whose log cannot be ended: these write nothing for an operation."""


class LogAccess(StrEnum):
    """The file through which NCCL's log is read."""

    PRIVATE = "in private"
    FORWARDED = "in private, and passed on"
    USERS_FILE = "in the user's file"
    NOT = "not at all"


@dataclass(frozen=True, slots=True)
class LogPlan:
    """The access to NCCL's log, and the variables to set for it beside its file; `why_not` where there is none.

    `no_tuning` is the reason for which the log will name no algorithm.
    """

    how: LogAccess
    variables: Mapping[str, str] = field(default_factory=dict)
    why_not: str = ""
    no_tuning: str = ""


def plan_log(settings: Mapping[str, str], ranks_on_node: int, *, can_reset: bool) -> LogPlan:
    """The plan where NCCL's variables, as the user left them, are `settings`."""
    if settings.get(DEBUG, "").upper() in INFO_LEVELS:
        return _plan_beside_user(settings, ranks_on_node, can_reset=can_reset)
    if can_reset:
        return LogPlan(LogAccess.PRIVATE, {DEBUG: "INFO", DEBUG_SUBSYSTEMS: _SUBSYSTEMS})
    reason = "an NCCL before 2.24.3 would say it all the time, not only while gpubench listens"
    return LogPlan(LogAccess.PRIVATE, {DEBUG: "INFO", DEBUG_SUBSYSTEMS: _QUIET_SUBSYSTEMS}, no_tuning=reason)


def _plan_beside_user(settings: Mapping[str, str], ranks_on_node: int, *, can_reset: bool) -> LogPlan:
    """The plan for a log that the user reads too: it has the lines that he asked for and no others."""
    level, file, subsystems = (settings.get(name, "") for name in (DEBUG, DEBUG_FILE, DEBUG_SUBSYSTEMS))
    if not shows(subsystems, "INIT"):
        why_not = f"{DEBUG_SUBSYSTEMS}={subsystems} leaves INIT out, which shows connections"
    elif file and "%p" not in file and ranks_on_node > 1:
        why_not = f"{DEBUG_FILE}={file} is one file for several ranks: it needs a %p"
    elif not file and not can_reset:
        why_not = f"{DEBUG}={level} sends the log of this NCCL to stdout, where gpubench cannot read it"
    else:
        no_tuning = "" if shows(subsystems, "TUNING") else f"TUNING is not among the {DEBUG_SUBSYSTEMS} that are set"
        if file:
            return LogPlan(LogAccess.USERS_FILE, no_tuning=no_tuning)
        # A level from a configuration file is set again: NCCL may open its log before it has read those files.
        again = {name: settings[name] for name in (DEBUG, DEBUG_SUBSYSTEMS) if name in settings}
        return LogPlan(LogAccess.FORWARDED, again, no_tuning=no_tuning)
    return LogPlan(LogAccess.NOT, why_not=why_not)


def shows(subsystems: str, name: str) -> bool:
    """True where a log with that NCCL_DEBUG_SUBSYS, '' where it is not set, has the lines of a subsystem."""
    words = (subsystems or _DEFAULT_SUBSYSTEMS).upper().removeprefix("^").split(",")
    return (name in words or "ALL" in words) != subsystems.startswith("^")

"""Every fault that can be planted × every command that simulates: it is judged or refused, and nothing breaks."""

from typing import Any

import pytest
from typer.testing import CliRunner

from gpubench.cli.app import app
from gpubench.errors import GpubenchError
from gpubench.model.profiles.fault import FAULT_KEYS
from tests.cli.test_plan_faults import SUBJECTS, value_of

COMMANDS = {
    "topo": (),
    "check": ("--quick",),
    "p2p": (),
    "allreduce": ("--sizes", "1M"),
    "watch": ("--for", "2s"),
    "overlap": ("--sizes", "1M"),
    "scan": ("--quick",),
}
MACHINES = {"scan": "hgx-h200-4*4"}


def cases() -> list[Any]:
    """All values of words, one of the others; what only one command knows, with that command."""
    found = []
    for key in FAULT_KEYS:
        for command in [key.command] if key.command else COMMANDS:
            for value in key.words or [value_of(key)]:
                text = f"{SUBJECTS[key.subject]}:{key.key}={value}"
                found.append(pytest.param(command, text, id=f"{command}-{text}"))
    return found


@pytest.mark.parametrize(("command", "fault"), cases())
def test_a_fault_is_judged_or_refused(command: str, fault: str) -> None:
    machine = MACHINES.get(command, "hgx-h200-4")
    ended = CliRunner().invoke(app, [command, "--simulate", machine, *COMMANDS[command], "--fault", fault, "--summary"])
    assert ended.exception is None or isinstance(ended.exception, (GpubenchError, SystemExit)), ended.exception
    if not isinstance(ended.exception, GpubenchError):
        assert ended.exit_code in (0, 1, 3)
        assert ended.stdout

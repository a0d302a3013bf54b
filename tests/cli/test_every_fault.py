"""Every fault that can be planted × every command that simulates: it is judged or refused, and nothing breaks."""

import shlex

import pytest
from typer.testing import CliRunner

from gpubench.cli.app import app
from gpubench.errors import GpubenchError, UsageError
from gpubench.model.profiles.fault import FAULT_KEYS, FaultKey
from tests.fakes.last_line import is_well_formed
from tests.training.test_plan_faults import SUBJECTS, value_of

COMMANDS = {
    "topo": (),
    "check": ("--quick",),
    "p2p": (),
    "kv": ("--blocks", "1"),
    "allreduce": ("--sizes", "1M"),
    "watch": ("--for", "2s"),
    "overlap": ("--sizes", "1M"),
    "scan": ("--quick",),
}
MACHINES = {"allreduce": "hgx-h200-4", "overlap": "hgx-h200-4", "scan": "hgx-h100-4*3"}
"""Those of more than two GPUs, which a command needs where one of them is lost."""

KEYS = [(key, value) for key in FAULT_KEYS for value in key.words or [value_of(key)]]
"""All values of words, one of the others."""

OF_ONE_VALUE = ("allreduce", "overlap", "scan", "p2p", "watch", "kv")
"""Commands that look at a machine as check and topo do: of words each of them tries one, not the same one."""


def is_tried(command: str, key: FaultKey, value: str) -> bool:
    if key.command:
        return key.command == command  # only that one knows it
    words = key.words or [value]
    return command not in OF_ONE_VALUE or value == words[OF_ONE_VALUE.index(command) % len(words)]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("key", "value"), KEYS)
def test_a_fault_is_judged_or_refused(command: str, key: FaultKey, value: str) -> None:
    if not is_tried(command, key, value):
        return
    fault = f"{SUBJECTS[key.subject]}:{key.key}={value}"
    machine = MACHINES.get(command, "hgx-h200-2")
    ended = CliRunner().invoke(app, [command, "--simulate", machine, *COMMANDS[command], "--fault", fault, "--summary"])
    assert ended.exception is None or isinstance(ended.exception, (GpubenchError, SystemExit)), ended.exception
    if not isinstance(ended.exception, GpubenchError):
        assert ended.exit_code in (0, 1, 3)
        assert is_well_formed(ended.stdout.rstrip("\n")), ended.stdout


@pytest.mark.parametrize("command", ["topo", "check"])
@pytest.mark.parametrize("key", [key for key in FAULT_KEYS if key.command], ids=lambda key: f"{key.subject}-{key.key}")
def test_the_cure_for_a_fault_of_another_command_works(command: str, key: FaultKey) -> None:
    fault = f"{SUBJECTS[key.subject]}:{key.key}={(key.words or [value_of(key)])[0]}"
    with pytest.raises(UsageError) as refused:
        CliRunner().invoke(app, [command, "--simulate", "hgx-h100-8", "--fault", fault], catch_exceptions=False)
    _, *cure = shlex.split(refused.value.next_step)
    ended = CliRunner().invoke(app, [*cure, "--no-progress", "--quick" if "scan" in cure else "--exit-zero"])
    assert not isinstance(ended.exception, GpubenchError), (cure, ended.exception)
    assert ended.exit_code != 2, (cure, ended.output)

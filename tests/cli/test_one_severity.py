"""A fault has one severity in every command, and FAIL has exit code 1 in all of them."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from gpubench.cli.app import app
from gpubench.model.terms.verdict import FIGURES

FAULTS = (
    *("link0-3:staged=yes", "link0-3:speed=0.4", "link3-0:speed=0.7", "link0-3:p2p=NS", "gpu2:p2p=NS"),
    *("gpu2:nvlink=12", "gpu2:nvlink=0", "gpu2:lost=yes", "gpu2:rows=pending", "gpu2:cuda_peer=no", "gpu2:speed=0.5"),
    *("gpu2:width=4", "gpu2:throttle=hw_slowdown", "gpu2:busy=8342", "gpu2:temperature=95", "gpu2:mig=on"),
)
COMMANDS = (("topo",), ("p2p",), ("check",), ("allreduce", "--sizes", "1G"))


REFUSED = {("p2p", "throttle"), ("allreduce", "throttle"), ("allreduce", "busy")}
"""Commands that model nothing of a fault refuse it."""


def document(command: tuple[str, ...], fault: str) -> tuple[dict[str, Any], int]:
    """What a command says of a fault, and its exit code."""
    arguments = [*command, "--simulate", "hgx-h200-4", "--fault", fault, "--format", "json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    return json.loads(result.stdout), result.exit_code


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_has_one_severity(fault: str) -> None:
    by_id: dict[str, set[str]] = {}
    key = fault.partition(":")[2].partition("=")[0]
    for command in COMMANDS:
        if (command[0], key) in REFUSED:
            continue
        report, code = document(command, fault)
        for each in report["findings"]:
            if each["id"] not in FIGURES:
                by_id.setdefault(each["id"], set()).add(each["severity"])
        assert (code == 1) == (report["verdict"] == "FAIL"), (command, report["sentence"])
        assert "exit code" not in report["sentence"]
    assert {id_: severities for id_, severities in by_id.items() if len(severities) > 1} == {}

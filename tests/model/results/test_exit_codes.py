"""Exit codes: the tables of docs/reference/exit-codes.md, and every command against them."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpubench.cli.process import COMMANDS
from gpubench.formats.registry import ExitStyle, Presentation
from gpubench.model.results.compare import MachineRow
from gpubench.model.results.ending import apply_gate, compute_exit_code
from gpubench.model.results.fallback import PATH_UNKNOWN
from gpubench.model.results.figures import SpeedFigures
from gpubench.model.results.report import Section, Table
from gpubench.model.results.topo import GpuRow
from gpubench.model.terms.verdict import Verdict
from tests.model.results.test_sentence import CHANNELS, METADATA, report

PAGE = Path(__file__).parents[3] / "docs/reference/exit-codes.md"
GATES = ("check", "scan", "run", "explain", "compare")
OPTIONS = ("no option", "gate", "`--strict`", "`--exit-zero`", "`--exit-style nagios`", "`--exit-style npd`, `slurm`")
PRESENTED = {
    "`--exit-zero`": Presentation(exit_zero=True),
    "`--exit-style nagios`": Presentation(exit_style=ExitStyle.NAGIOS),
    "`--exit-style npd`, `slurm`": Presentation(exit_style=ExitStyle.NPD),
}


def documented() -> dict[tuple[Verdict, str], int]:
    """The codes in the table of the page, by verdict and option."""
    table = PAGE.read_text().partition("\n| verdict ")[2].partition("\n\n")[0]
    found: dict[tuple[Verdict, str], int] = {}
    for verdict, *codes in (line.strip("| ").split(" | ") for line in table.splitlines()[2:]):
        name = Verdict(verdict.partition(":")[0])
        found |= {(name, option): int(code.split()[0]) for option, code in zip(OPTIONS, codes, strict=True)}
    return found


def code_of(
    command: str,
    verdict: Verdict,
    option: str = "",
    *,
    sections: Mapping[str, Section] | None = None,
    **options: object,
) -> int:
    metadata = replace(METADATA, subject=command, options={"strict": option == "`--strict`", **options})
    findings = [replace(CHANNELS, id="gpu-lost")] if verdict is Verdict.FAIL else []
    found = replace(report(verdict, *findings), sections=sections or {})
    return PRESENTED.get(option, Presentation()).exit_code(metadata, found)


@pytest.mark.parametrize("command", [each.name for each in COMMANDS if each.writes_reports])
def test_a_verdict_has_the_documented_code_in_every_command(command: str) -> None:
    codes = documented()
    assert len(codes) == len(Verdict) * len(OPTIONS)
    for (verdict, option), code in codes.items():
        judged = (command, verdict) != ("scan", Verdict.INCONCLUSIVE) or option not in ("gate", "`--strict`")
        if option not in ("no option", "gate") or (option == "gate") == (command in GATES):
            assert code_of(command, verdict, option) == (code if judged else 3), (verdict, option)


@pytest.mark.parametrize(("gpus", "strict", "code"), [(1, False, 3), (0, False, 0), (0, True, 3)])
def test_gpubench_without_a_command_is_a_gate_on_a_machine_with_gpus(gpus: int, code: int, *, strict: bool) -> None:
    row = GpuRow(**dict.fromkeys((name for name in GpuRow.__struct_fields__), None))  # type: ignore[arg-type]
    sections = {GpuRow.section: Table(GpuRow.columns(), lambda: [row] * gpus)}
    assert code_of("check", Verdict.SKIP, sections=sections, brief=True, strict=strict) == code
    assert code_of("check", Verdict.FAIL, sections=sections, brief=True) == 1


@pytest.mark.parametrize(("strict", "code"), [(False, 0), (True, 3)])
def test_a_table_of_two_machines_is_no_gate(code: int, *, strict: bool) -> None:
    sections = {MachineRow.section: Table(MachineRow.columns(), list)}
    assert code_of("compare", Verdict.SKIP, sections=sections, strict=strict) == code


@pytest.mark.parametrize(
    ("command", "others", "strict", "code"),
    [
        ("allreduce", (), False, 0),
        ("allreduce", (), True, 1),
        ("topo", (), False, 0),
        ("check", (), False, 3),
        ("explain", (), False, 3),
        ("explain", ("ecc-off",), False, 3),
        ("check", ("ecc-off",), False, 3),
        ("topo", ("ecc-off",), False, 0),
    ],
)
def test_an_unknown_path_is_a_doubt_and_no_gate_passes_it(
    command: str, others: tuple[str, ...], code: int, *, strict: bool
) -> None:
    doubts = [replace(CHANNELS, id=id_, severity=Verdict.WARN) for id_ in (PATH_UNKNOWN, *others)]
    metadata = replace(METADATA, subject=command, options={"strict": strict})
    told = apply_gate(metadata, report(Verdict.WARN, *doubts), SpeedFigures(), exit_style=False)
    assert compute_exit_code(metadata, told) == code

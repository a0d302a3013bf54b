"""Numbers are read, or refused with what was expected, and nothing loads pydantic."""

import subprocess
import sys

import pytest

from tests.cli.running import gpubench


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("-N", "x"), ("--cycles/-N x", "a whole number of 0 or more", "it contains characters", "--cycles 1")),
        (("--graph", "2.5"), ("--graph 2.5", "a whole number of 0 or more", "it has a fraction", "--graph 1")),
        (("--np", "0"), ("--np 0", "a whole number of 1 or more", "", "--np 1")),
        (("--timeout", "5s"), ("--timeout 5s", "a number from 1 to 86400", "it has a unit", "--timeout 60")),
        (("--seed", "1e1"), ("--seed 1e1", "a whole number", "", "--seed 1")),
        (("--timeout", "nan"), ("--timeout nan", "a number from 1", "it contains characters", "--timeout 60")),
        (("--timeout", "--strict"), ("--timeout --strict", "a number from 1", "the number is missing", "--timeout 60")),
        (("--budget", "fast"), ("--budget fast", "a number of 0 or more", "it contains characters", "--budget 1")),
    ],
)
def test_what_is_no_number_is_told_as_everything_else(given: tuple[str, str], said: tuple[str, ...]) -> None:
    result = gpubench("allreduce", *given)
    seen, expected, likely, next_step = said
    lines = [f"gpubench: error: {seen}", f"  expected: {expected}", f"  likely:   {likely}", f"  try:      {next_step}"]
    told = result.stderr.splitlines()
    assert (result.returncode, result.stdout, len(told)) == (2, "", 4 if likely else 3)
    for line in (each for each in lines if not each.endswith("likely:   ")):
        assert any(each.startswith(line) for each in told), result.stderr


def test_plain_options_load_no_pydantic() -> None:
    program = (
        "import sys; from gpubench.cli.app import main\n"
        "sys.argv = ['gpubench', 'topo', '--simulate', 'hgx-h100-4', '--timeout', '5', '--width', '90', '--summary']\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    print(ended.code, 'pydantic' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "0 False"

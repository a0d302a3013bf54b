"""A colour says how something fares: a fault is never green, and how things are wired has no colour."""

import re

import pytest

from tests.cli.running import environment, gpubench
from tests.fakes.last_line import is_command

RED, GREEN = "\x1b[1;31m", "\x1b[1;32m"
CODE = re.compile(r"\x1b\[[0-9;]*m")


def coloured(text: str, code: str) -> list[str]:
    """The words in one colour."""
    return re.findall(rf"{re.escape(code)}([^\x1b]*)\x1b\[0m", text)


def test_links_that_are_down_are_red_and_paths_have_no_colour() -> None:
    shown = gpubench("topo", "--simulate", "hgx-h100-8", "--fault", "gpu5:nvlink=12", "--color", "always").stdout
    assert coloured(shown, RED)[:1] == ["12 of 18"]
    assert "18 of 18" not in coloured(shown, GREEN) + coloured(shown, RED)
    assert not any(re.match(r"NV\d+|SYS|PIX|NODE", word) for word in coloured(shown, GREEN))


def test_a_pair_through_host_memory_is_red_in_its_matrix_and_others_are_green() -> None:
    arguments = ("--simulate", "hgx-h100-8", "--fault", "link0-3:staged=yes", "--color", "always")
    shown = gpubench("p2p", *arguments).stdout
    plain = CODE.sub("", shown)
    marked = {word for word in re.findall(r"\S+!", plain) if re.fullmatch(r"[\d.]+!", word)}
    assert marked
    assert marked <= set(coloured(shown, RED))
    assert not marked & set(coloured(shown, GREEN))
    assert any(re.fullmatch(r"37\d\.\d", word) for word in coloured(shown, GREEN))


def test_host_memory_that_is_not_used_is_no_fault() -> None:
    shown = gpubench("explain", "tests/logs/h200x4-normal", "--color", "always").stdout
    assert "no" not in coloured(shown, RED)
    assert "PASS" in coloured(shown, GREEN)


@pytest.mark.parametrize(
    ("variables", "arguments", "has_colours"),
    [
        ({}, (), False),
        ({"FORCE_COLOR": "1"}, (), True),
        ({"FORCE_COLOR": "0"}, (), False),
        ({"FORCE_COLOR": ""}, (), False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, (), False),
        ({"FORCE_COLOR": "1"}, ("--color", "never"), False),
        ({"NO_COLOR": "1"}, ("--color", "always"), True),
    ],
)
def test_colours_are_where_the_environment_wants_them(
    variables: dict[str, str], arguments: tuple[str, ...], *, has_colours: bool
) -> None:
    shown = gpubench("topo", "--simulate", "hgx-h200-2", *arguments, env=environment(**variables))
    assert ("\x1b[" in shown.stdout) is has_colours


def test_columns_of_the_environment_are_the_width() -> None:
    def widest(columns: str, *arguments: str) -> int:
        shown = gpubench("topo", "--simulate", "hgx-h100-8", *arguments, env=environment(COLUMNS=columns)).stdout
        return max(map(len, shown.splitlines()[:-1]))

    assert widest("60") <= 60 < widest("120") <= 120
    assert widest("7") <= 40
    assert widest("wide") <= 100
    assert widest("120", "--width", "60") <= 60


@pytest.mark.parametrize(
    "command",
    [
        "topo --simulate hgx-h100-8 --fault gpu5:nvlink=12",
        "p2p --simulate hgx-h100-8",
        "p2p --simulate hgx-h100-8 --pairs 0-1,1-0 --sizes 1M,64M",
        "allreduce --simulate hgx-h100-8 --evidence",
        "check --simulate hgx-h100-8 --fault gpu5:nvlink=12",
        "explain tests/logs/h200x4-p2p-disabled",
        "compare tests/results/h200x4/all_reduce.txt tests/results/h200x4/ar_NCCL_P2P_DISABLE_1.txt",
        "plan --parameters 7B --simulate hgx-h200-8",
        "plan --parameters 7B --simulate hgx-h100-8*4 --layout fsdp --layout ddp",
    ],
)
def test_no_table_is_wider_than_forty_columns(command: str) -> None:
    *lines, sentence = gpubench(*command.split(), "--width", "40").stdout.splitlines()
    assert re.match(r"[A-Z]+( \(simulated\))?: ", sentence)
    assert [line for line in lines if len(line) > 40 and not is_command(line)] == []

"""What a shell completes: commands, options, and the words that options take."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpubench.formats.registry import FORMATS
from gpubench.model.terms.operation import DataType
from gpubench.profiles import profile_names
from tests.cli.running import ROOT, environment

PROGRAM = r"""
import gc, json, os, sys
from gpubench.cli.app import main, typer_command
from gpubench.cli.process import COMMANDS
from tests.modules import load_all_modules
load_all_modules()
for command in COMMANDS:
    typer_command(command)
gc.freeze()
for folder, variables in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.chdir(folder)
        os.environ.update(variables)
        sys.argv = ["gpubench"]
        try:
            main()
        except SystemExit as ended:
            sys.stdout.flush()
            os._exit(ended.code or 0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    print("\0", end="", flush=True)
"""
"""Answers each of several requests in a child of its own, in which nothing has run before; the imports are shared."""


Request = tuple[str, dict[str, str]]
"""A folder and variables with which a shell's completion script calls gpubench there."""


def request(words: str, shell: str = "bash", folder: Path = ROOT, **variables: str) -> Request:
    variables |= {"_GPUBENCH_COMPLETE": f"complete_{shell}"}
    if shell == "bash":
        return str(folder), variables | {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    return str(folder), variables | {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}


def completions(asked: Sequence[Request]) -> list[list[str]]:
    """What gpubench answers the completion script of a shell, for each request."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(asked)],
        capture_output=True,
        text=True,
        check=True,
        env=environment(PYTHONPATH=str(ROOT)),
        cwd=ROOT,
    )
    assert result.stderr == ""
    return [each.split() for each in result.stdout.split("\0")[:-1]]


COMPLETED = {
    "gpubench topo --str": ["--strict"],
    "gpubench expl": ["explain"],
    "gpubench repo": ["report"],
    "gpubench topo --simulate hgx-h200-": ["hgx-h200-2", "hgx-h200-4", "hgx-h200-8"],
    "gpubench check --profile dgx": ["dgx-1-v100", "dgx-spark"],
    "gpubench p2p --profile hgx-b": ["hgx-b200-8", "hgx-b300-8"],
    "gpubench allreduce --dtype flo": ["float16", "float32", "float64"],
    "gpubench allreduce -d bf": ["bfloat16"],
    "gpubench allreduce --dtype float32,int": ["float32,int8", "float32,int32", "float32,int64"],
    "gpubench allreduce --dtype int8,int": ["int8,int32", "int8,int64"],
    "gpubench reduce --op m": ["max", "min"],
    "gpubench allgather --format js": ["json", "jsonl"],
    "gpubench report x.json --color a": ["auto", "always"],
    "gpubench topo --exit-style ": ["nagios", "npd", "slurm"],
    "gpubench allreduce --algo nvls": ["nvls", "nvlstree"],
    "gpubench allreduce --proto ll,s": ["ll,simple"],
    "gpubench allreduce --backend h": ["host"],
    "gpubench allreduce --mode l": ["latency"],
    "gpubench allreduce --allocator n": ["nccl"],
    "gpubench profiles show l40": ["l40s-8"],
    "gpubench allreduce --sizes 1": [],
    "gpubench topo --simulate no-such": [],
}


ALL_WORDS = {
    "--simulate": profile_names(),
    "--profile": profile_names(),
    "--dtype": tuple(DataType),
    "--format": tuple(each.name for each in FORMATS),
}


def test_words_are_completed(tmp_path: Path) -> None:
    """All in one process, whose imports are most of its time: other shells, own profiles, a broken file of defaults."""
    (tmp_path / "rack-7.toml").touch()
    (tmp_path / "gpubench.toml").write_text("timeout = ")
    exact = [
        *((request(words), answer) for words, answer in COMPLETED.items()),
        (request("gpubench check --profile rack", GPUBENCH_PROFILES=str(tmp_path)), ["rack-7"]),
        (request("gpubench check --simulate rack", GPUBENCH_PROFILES=str(tmp_path)), []),
        (request("gpubench topo --form", folder=tmp_path), ["--format"]),
    ]
    among_others = [
        (request(f"gpubench allreduce {option} ", shell), words)
        for shell in ("zsh", "fish")
        for option, words in ALL_WORDS.items()
    ]
    answers = completions([asked for asked, _ in (*exact, *among_others)])
    for (asked, expected), answer in zip(exact, answers, strict=False):
        assert answer == expected, asked
    for (asked, words), answer in zip(among_others, answers[len(exact) :], strict=True):
        said = " ".join(answer)
        assert [each for each in words if each not in said] == [], asked


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
def test_bash_itself_completes_a_value(tmp_path: Path) -> None:
    command = tmp_path / "gpubench"
    command.write_text(f"#!{sys.executable}\nfrom gpubench.cli.app import main\nmain()\n")
    command.chmod(0o755)
    script = """
        source <(_GPUBENCH_COMPLETE=source_bash gpubench)
        COMP_WORDS=(gpubench topo --simulate hgx-h100) COMP_CWORD=3
        "$(complete -p gpubench | sed 's/.*-F *//; s/ .*//')" gpubench
        echo "${COMPREPLY[@]}"
    """
    result = subprocess.run(
        ["bash", "--norc", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=environment(PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}"),
        cwd=ROOT,
    )
    assert result.stdout.split() == [each for each in profile_names() if each.startswith("hgx-h100")], result.stderr

"""Texts as people paste them, split into parts: any order, any prompt, nothing lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.readers.pasted import Kind, blank_commands_and_prose, may_hold_parts, split

LOG = ["node:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"]
RAS = [
    "NCCL version 2.28.9 compiled with CUDA 13.0",
    "CUDA runtime version 13000, driver version 13000",
    "",
    "Communicators... (0.00s)",
    "=============",
    "",
    "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors",
    "    #  in group  per comm  per node  per comm  in group",
    "    0         1         2         4         8         8   RUNNING  MISMATCH",
    "",
    "#0-0 (c0ffee00c0ffee00) MISMATCH",
    "  Communicator ranks have different status",
    "  7 ranks have status RUNNING",
    "  Rank 3 has status INIT -- GPU 3 managed by process 4711 on node 10.0.0.7",
]
STACK = ["Process 7: python train.py", "Python v3.11.4 (/usr/bin/python3)", "", 'Thread 7 (idle): "MainThread"']
STACK += ["    step (train.py:41)"]
LINE = ['{"header": {"rank": 0, "n_ranks": 8}, "coll_perf": {"coll": "AllReduce"}}']
PRETTY = ["{", '  "header": {', '    "rank": 0', "  },", '  "coll_perf": {', '    "coll": "AllReduce"', "  }", "}"]
ARRAY = ["[", *[f"  {line}" for line in PRETTY[:-1]], "  },", *[f"  {line}" for line in PRETTY], "]"]
SAMPLES = [(Kind.RAS, RAS), (Kind.STACK, STACK), (Kind.JSON, LINE), (Kind.JSON, PRETTY)]


def kinds(lines: list[str]) -> list[Kind]:
    return [part.kind for part in split(lines)]


@pytest.mark.parametrize(("kind", "lines"), SAMPLES)
def test_each_kind_is_found_before_and_behind_a_log(kind: Kind, lines: list[str]) -> None:
    assert kinds([*LOG, *lines, *LOG]) == [Kind.OUTPUT, kind, Kind.OUTPUT]
    assert kinds(lines) == [kind]
    assert may_hold_parts("\n".join([*LOG, *lines]).encode())


@pytest.mark.parametrize(
    "line",
    [
        "$ NCCL_P2P_DISABLE=1 ./all_reduce_perf -g 2",
        "root@box:~/nccl-tests# ./build/all_reduce_perf -b 1G -g 2",
        "[user@node01 build]$ ncclras -v",
        "(base) user@host:~/code$ NCCL_DEBUG=TRACE torchrun --nproc-per-node=2 test.py",
        "bash-5.1# mpirun -np 8 -x NCCL_DEBUG=INFO ./all_reduce_perf",
        "host:~ # srun -N 2 ./run.sh",
        "❯ python train.py",
        "+ mpirun -np 2 ./all_reduce_perf",
        "mpirun -np 8 --hostfile hosts ./all_reduce_perf -b 8 -e 8G",
        "NCCL_IB_DISABLE=1 NCCL_DEBUG=INFO ./build/all_reduce_perf -g 8",
        "export NCCL_P2P_DISABLE=1",
        "# export NCCL_P2P_DISABLE=1",
        "docker run --gpus all -e NCCL_DEBUG=INFO image",
    ],
)
def test_a_command_is_told_by_its_prompt_or_its_launcher(line: str) -> None:
    assert kinds([line]) == [Kind.COMMAND]
    assert kinds([*LOG, line, *LOG]) == [Kind.OUTPUT, Kind.COMMAND, Kind.OUTPUT]
    assert blank_commands_and_prose([line, *LOG]) == ["", *LOG]


@pytest.mark.parametrize(
    "line",
    [
        "# nThread 1 nGpus 2 minBytes 8 maxBytes 8 step: 2(factor) warmup iters: 5 iters: 20",
        "#  Rank  0 Group  0 Pid     11 on        box device  0 [0x59] NVIDIA H200",
        "# Using devices",
        "# Out of bounds values : 0 OK",
        "mpirun noticed that process rank 1 with PID 77 on node n1 exited on signal 9 (Killed).",
        "mpirun was unable to launch the specified application as it could not access",
        "srun: error: nid001: task 3: Exited with exit code 1",
        "python: can't open file 'train.py'",
        "run.sh: line 3:  1234 Killed                  python train.py",
        '{"level": "info", "msg": "hello"}',
        "Process 7 exited",
        "NCCL version 2.28.9+cuda13.0",
        "GPU0     X      NV6     NV6     NV6     PXB     SYS     0-31            0",
        "Rank 0 scheduler is dead. Please check if there are relevant logs.",
        "*** Aborted at 1700000000 (unix time)",
    ],
)
def test_what_a_program_prints_is_output(line: str) -> None:
    assert kinds([line]) == [Kind.OUTPUT]


def test_a_command_goes_on_behind_a_backslash() -> None:
    lines = ["$ mpirun -np 2 \\", "    -x NCCL_P2P_DISABLE=1 \\", "    ./all_reduce_perf", *LOG]
    assert kinds(lines) == [Kind.COMMAND, Kind.OUTPUT]


def test_objects_of_an_array_and_a_line_that_was_cut_off_are_parts() -> None:
    assert kinds(ARRAY).count(Kind.JSON) == 2
    assert kinds([LINE[0][:40], *LINE]) == [Kind.OUTPUT, Kind.JSON]
    assert kinds([LINE[0][:60], *LINE, *LOG]) == [Kind.JSON, Kind.JSON, Kind.OUTPUT]


def test_two_answers_of_ras_are_two_parts() -> None:
    assert kinds([*RAS, *RAS]) == [Kind.RAS, Kind.RAS]
    assert kinds(["$ ncclras", *RAS, "$ ncclras", *RAS]) == [Kind.COMMAND, Kind.RAS] * 2


MARKDOWN = [
    "# The job died",
    "",
    "It ends with exit code 1, see [the docs](https://example.org).",
    "```bash",
    "gpubench allreduce --strict   # exit code 1 if data takes host memory",
    "```",
    "```text",
    *LOG,
    "```",
    "srun: error: nid001: task 3: Exited with exit code 1",
]


def test_prose_and_code_of_markdown_are_no_output() -> None:
    found = [(part.kind, part.lines) for part in split(MARKDOWN)]
    assert [lines for kind, lines in found if kind is Kind.OUTPUT] == [LOG, MARKDOWN[-1:]]
    assert kinds([line for line in MARKDOWN if "```" not in line and "](" not in line])[-1] is Kind.OUTPUT


@given(st.lists(st.sampled_from([*LOG, *RAS, *STACK, *LINE, *PRETTY, *ARRAY, *MARKDOWN, "$ ls", ""]), max_size=40))
def test_every_line_is_in_exactly_one_part(lines: list[str]) -> None:
    parts = list(split(lines))
    assert [line for part in parts for line in part.lines] == lines
    assert [part.first_line for part in parts] == [
        1 + sum(len(before.lines) for before in parts[:number]) for number in range(len(parts))
    ]


@pytest.mark.parametrize("text", ["", "\n".join(LOG)])
def test_a_log_alone_is_not_split(text: str) -> None:
    assert not may_hold_parts(text.encode())

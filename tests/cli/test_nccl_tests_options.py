"""A command line of nccl-tests is understood, or answered with what to write."""

import json
from typing import Any

import pytest

from tests.cli.running import environment, gpubench

THEIRS = "-b 8 -e 64M -f 2 -n 30 -w 3 -g 4 -c 0 -d half"
RUN = ("allreduce", "--simulate", "hgx-h200-4", "--format", "json")
MPIRUN = environment(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="8")


def document(*arguments: str, **variables: str) -> Any:
    result = gpubench(*RUN, *arguments, env=environment(**variables) if variables else None)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def sizes(*arguments: str, **variables: str) -> list[int]:
    return list(dict.fromkeys(row["size_bytes"] for row in document(*arguments, **variables)["rows"]))


@pytest.mark.parametrize(
    ("theirs", "own"),
    [
        ("-b 8 -e 4G -f 2", "--sizes 8:4G:2"),
        ("-b 1K -e 1M -f 32", "--sizes 1K:1M:32"),
        ("-b 1M -e 8M -i 2M", "--sizes 1M:8M:+2M"),
        ("-b 1G -e 1G", "--sizes 1G"),
        ("-b8 -e128M -f2", "--sizes 8:128M:2"),
    ],
)
def test_sizes_are_those_of_our_own_option(theirs: str, own: str) -> None:
    assert sizes(*theirs.split()) == sizes(*own.split())


def test_the_usual_command_line_runs_as_in_nccl_tests() -> None:
    found = document(*THEIRS.split())
    assert list(dict.fromkeys(row["size_bytes"] for row in found["rows"])) == [2**power for power in range(3, 27)]
    assert found["metadata"]["options"]["dtypes"] == ["float16"]


@pytest.mark.parametrize(
    ("word", "name"),
    [
        *(("float", "float32"), ("half", "float16"), ("double", "float64"), ("bfloat16", "bfloat16")),
        *(("fp16", "float16"), ("fp32", "float32"), ("fp64", "float64"), ("bf16", "bfloat16"), ("BF16", "bfloat16")),
        *(("int", "int32"), ("char", "int8"), ("Float32", "float32"), ("int8,half", "int8,float16")),
    ],
)
def test_types_have_the_names_that_nccl_tests_and_frameworks_give_them(word: str, name: str) -> None:
    found = document("--dtype", word, "--sizes", "1K")["metadata"]["options"]["dtypes"]
    assert found == name.split(",")


@pytest.mark.parametrize(
    ("arguments", "said", "next_step"),
    [
        ("-b 8 -e 4G", "nccl-tests would measure 4,096 sizes, 1M apart", "-b 8 -e 4G -f 2, or -b 8 -e 4G -i 1M"),
        ("-b 8 -e 40G", "nccl-tests would measure 40,960 sizes", "try:      -b 8 -e 40G -f 2\n"),
        ("-b 8", "-b without -e", "try:      -b 8 -e 4G -f 2\n"),
        ("-e 1G -f 4", "-e and -f without -b", "try:      -b 8 -e 1G -f 4\n"),
        ("-f 2", "-f without -e", "try:      -b 8 -e 4G -f 2\n"),
        ("-b 8 -e 4G -f 2 --sizes 1K", "-b and --sizes exclude each other", "leave --sizes out"),
        ("-b 8 -e 4G -f 2 -i 1M", "-f and -i exclude each other", "leave -i out"),
        ("-b 4G -e 8", "in the wrong order", "--sizes 8:4G"),
        ("-b 8 -e 4G -f 1", "'1' is not a factor above one", "--sizes 1K:64M"),
        ("-b x -e 8", "'x' is not a size", "-b 8 -e 4G -f 2"),
        ("-c 5", "-c 5", "try:      -c 1\n"),
        ("-c 1 --no-check", "-c and --no-check exclude each other", "leave --no-check out"),
        ("-g 4 --np 3", "-g and --np exclude each other", "leave --np out"),
        ("-t 2 -g 4", "one process per GPU, without threads", "try:      --np 8\n"),
        ("-R 1", "--register user|symmetric, which is measured in addition", "try:      --register user\n"),
        ("-R 2", "--register user|symmetric", "try:      --register symmetric\n"),
        ("-x 1", "--cta-policy efficiency|zero", "try:      --cta-policy efficiency\n"),
        ("-x 2", "--cta-policy efficiency|zero", "try:      --cta-policy zero\n"),
        ("-u 1", "gpubench uses the addresses that the allocator returns", "try:      leave -u out\n"),
        ("-p 1", "gpubench always initializes all ranks at once", "try:      leave -p out\n"),
        ("-o sum", "in nccl-tests -o names the reduction, in gpubench it names a file", "try:      --op sum\n"),
        (
            "-o all",
            "in nccl-tests -o names the reduction, in gpubench it names a file",
            "try:      --op sum,prod,max,min,avg\n",
        ),
        ("-d uint32", "--dtype 'uint32' is not known", "--dtype int32"),
        ("--dtype fp8_e4m3", "--dtype 'fp8_e4m3' is not known", "expected: one of int8"),
        ("--sizes 1k-4g", "--sizes 1k-4g: a range has no -", "try:      --sizes 1K:4G\n"),
        ("--sizes 8..1g:4", "--sizes 8..1g:4: a range has no ..", "try:      --sizes 8:1G:4\n"),
        ("--sizes 1e-3", "'1e-3' is not a size", "--sizes 1K:64M"),
        ("--sizes -5", "'-5' is not a size", "--sizes 1K:64M"),
    ],
)
def test_what_means_something_else_is_answered_with_what_to_write(arguments: str, said: str, next_step: str) -> None:
    result = gpubench(*RUN, *arguments.split())
    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr
    assert next_step in result.stderr


def test_one_thread_and_no_parallel_init_are_what_gpubench_does() -> None:
    assert sizes("-t", "1", "-p", "0", "-b", "1K", "-e", "1K") == [1024]
    assert " -t" not in gpubench("allreduce", "--help-all").stdout


def test_a_rank_has_one_gpu() -> None:
    result = gpubench("allreduce", "-g", "2", env=MPIRUN)
    assert result.returncode == 2
    assert "-g 2 under Open MPI's mpirun" in result.stderr
    assert "start 16 ranks instead of 8, without -g" in result.stderr


def test_the_command_line_comes_before_defaults() -> None:
    assert sizes("-b", "1K", "-e", "1K", GPUBENCH_SIZES="4K") == [1024]
    assert document("-c", "1", "-g", "4", "--sizes", "1K", GPUBENCH_CHECK="0", GPUBENCH_NP="2")["rows"][0]["ranks"] == 4


def test_a_replay_names_the_option_that_does_not_fit() -> None:
    for given, named in (("-b 8", "-b"), ("-n 20", "--iters"), ("-c 0", "-c"), ("--no-check", "--no-check")):
        result = gpubench("allreduce", "--replay", "nowhere", *given.split())
        assert f"--replay and {named} exclude each other" in result.stderr


@pytest.mark.mpi
def test_data_are_not_verified_where_nccl_tests_would_not() -> None:
    run = "allreduce --backend host -b 1K -e 1K -n 3 -g 2 -c 0 --format json"
    found = json.loads(gpubench(*run.split()).stdout)
    assert {(row["wrong"], row["verified"]) for row in found["rows"]} == {(None, "no")}


@pytest.mark.slow
@pytest.mark.mpi
def test_ranks_are_started_by_their_option_too() -> None:
    run = "allreduce --backend host -b 1K -e 2K -f 2 -n 3 -w 1 -g 2 -c 1 -d double --format json"
    found = json.loads(gpubench(*run.split()).stdout)
    assert len(found["metadata"]["ranks"]) == 2
    assert found["metadata"]["options"]["warmup"] == 1
    assert {(row["size_bytes"], row["iterations"], row["dtype"], row["wrong"]) for row in found["rows"]} == {
        (1024, 3, "float64", 0),
        (2048, 3, "float64", 0),
    }

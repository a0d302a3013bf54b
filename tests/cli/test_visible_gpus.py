"""GPUs that CUDA_VISIBLE_DEVICES hides: one of two is judged, and nothing is promised of the other."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpubench.machine import recorded
from gpubench.model.facts.health import HIDDEN
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import GpuFacts, Snapshot
from tests.cli.running import gpubench

MACHINE = Path("tests/machines/h200x2-vm")


def recording(
    folder: Path, hidden: Sequence[int], ranks: Sequence[str | None] = ("0",), **of_hidden: object
) -> tuple[str, ...]:
    """The options that replay a machine of two GPUs with some of them hidden from ranks with these settings."""
    (node,), _ = recorded.read_recording(MACHINE)
    processes = [
        RankFacts(rank=rank, host=node.host, node=0, local_rank=rank, pid=rank, shm_device=1, visible_devices=setting)
        for rank, setting in enumerate(ranks)
    ]
    recorded.write_recording(folder, [with_hidden(node, hidden, **of_hidden)], processes)
    return "--quick", "--replay", str(folder)


def with_hidden(node: Snapshot, hidden: Sequence[int], **changes: object) -> Snapshot:
    def seen(gpu: GpuFacts) -> GpuFacts:
        if gpu.index not in hidden:
            return gpu
        without = replace(gpu, cuda_index=None, unknown={**gpu.unknown, "cuda_index": HIDDEN})
        return replace(without, **changes)

    names = {f"GPU{index}" for index in hidden}
    pairs = tuple(
        replace(pair, cuda=None, unknown={"cuda": HIDDEN}) if names & {pair.source, pair.destination} else pair
        for pair in node.pairs
    )
    return replace(node, gpus=tuple(map(seen, node.gpus)), pairs=pairs)


@pytest.mark.parametrize("command", [(), ("check",)])
def test_one_of_two_is_a_pass_that_says_so(command: tuple[str, ...], tmp_path: Path) -> None:
    result = gpubench(*command, *recording(tmp_path / "seen", [1]))
    assert (result.returncode, result.stderr) == (0, "")
    assert "not-looked-at" not in result.stdout
    assert result.stdout.splitlines()[-1].startswith("PASS: 1 of 2 × H200, speed not measured")


def test_the_first_screen_says_what_is_hidden(tmp_path: Path) -> None:
    result = gpubench(*recording(tmp_path / "seen", [1]))
    assert "1 of 2 × NVIDIA H200" in result.stdout
    assert "CUDA_VISIBLE_DEVICES hides 1" in result.stdout
    assert "1 GPU: 1 PASS" in result.stdout


def test_what_ails_a_hidden_gpu_is_no_finding_of_who_does_not_have_it(tmp_path: Path) -> None:
    hot = recording(tmp_path / "seen", [1], throttle_reasons=("hw_slowdown",))
    assert gpubench("check", *hot).returncode == 0
    shown = recording(tmp_path / "whole", [], throttle_reasons=())
    document = json.loads(gpubench("check", *shown, "--format", "json").stdout)
    assert [row["scope"] for row in document["verdicts"]].count("gpu") == 2


def test_with_all_of_them_hidden_there_is_no_gpu_to_check(tmp_path: Path) -> None:
    options = recording(tmp_path / "seen", [0, 1], [""])
    result = gpubench("check", *options)
    assert result.returncode == 3
    assert "CUDA_VISIBLE_DEVICES hides all 2 GPUs" in result.stderr
    look = gpubench(*options)
    assert (look.returncode, look.stdout.splitlines()[-1][:12]) == (0, "SKIP: no GPU")
    assert "no GPU; CUDA_VISIBLE_DEVICES hides 2" in look.stdout


def test_ranks_with_a_gpu_each_have_the_whole_node_checked(tmp_path: Path) -> None:
    """What the first of them saw of CUDA is not all of it: the others have the rest."""
    result = gpubench("check", *recording(tmp_path / "seen", [1], ["0", "1"]))
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "PASS: 2 × H200, speed not measured")
    told = " ".join(result.stdout.split())
    assert f"peer_access: not checked: peer access by CUDA could not be read ({HIDDEN})" in told


def test_fewer_than_were_asked_for_is_a_failure(tmp_path: Path) -> None:
    options = recording(tmp_path / "seen", [1])
    assert gpubench("check", *options, "--expect-gpus", "1").returncode == 0
    result = gpubench("check", *options, "--expect-gpus", "2")
    assert result.returncode == 1
    assert "2 GPUs, as --expect-gpus requires" in result.stdout


@pytest.mark.parametrize(
    ("settings", "promised"),
    [
        (["0"], "1 of 4 × H200,"),
        (["0", "1"], "2 of 4 × H200,"),
        (["0", "GPU"], "2 of 4 × H200,"),
        (["0", "9,3"], "1 of 4 × H200, GPU count not judged,"),
        (["0", None], "4 × H200, GPU count not judged,"),
    ],
)
def test_what_no_rank_names_is_promised_to_nobody(
    settings: Sequence[str | None], promised: str, tmp_path: Path
) -> None:
    """Of four GPUs: ranks with one each of two of them leave two that nobody saw."""
    (node,), _ = recorded.read_recording(Path("tests/machines/h200x4-vm"))
    processes = [
        RankFacts(
            rank=rank,
            host=node.host,
            node=0,
            local_rank=rank,
            pid=rank,
            visible_devices=node.gpus[2].uuid if each == "GPU" else each,
        )
        for rank, each in enumerate(settings)
    ]
    recorded.write_recording(tmp_path / "seen", [with_hidden(node, [1, 2, 3])], processes)
    options = ("check", "--quick", "--replay", str(tmp_path / "seen"))
    last = gpubench(*options).stdout.splitlines()[-1]
    assert last == f"PASS: {promised} speed not measured"
    code = gpubench(*options, "--expect-gpus", "4").returncode
    assert code == (0 if promised.startswith("4") else 1)

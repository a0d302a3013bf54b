"""--gpus: one meaning in every command, the numbers that topo prints."""

import json
import os
import sys
from collections.abc import Sequence

import pytest

from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.jobs import sources
from gpubench.machine import nvml
from tests.cli.running import gpubench
from tests.fakes.nvml import FakeNvml

BOARD = ("--simulate", "hgx-h100-8", "--gpus", "0,3,5")


@pytest.mark.parametrize(
    ("command", "section", "column", "seen"),
    [
        ("topo", "gpus", "gpu", {"GPU0", "GPU3", "GPU5"}),
        ("p2p --no-patterns --sizes 1M", "pairs", "source", {"GPU0", "GPU3", "GPU5"}),
        ("kv --sizes 1M --blocks 1 --no-host", "kv", "source", {"GPU0", "GPU3", "GPU5"}),
        ("allreduce --sizes 1M", "rows", "ranks", {3}),
        ("overlap --sizes 64M --ctas own", "overlap", "ranks", {3}),
        ("check --quick", "verdicts", "scope", {"node", "gpu", "nic"}),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_every_command_uses_the_chosen_gpus_of_a_simulated_node(
    command: str, section: str, column: str, seen: set[object]
) -> None:
    result = gpubench(*command.split(), *BOARD, "--format", "json")
    document = json.loads(result.stdout)
    assert {row[column] for row in document[section]} == seen
    assert document["metadata"]["source"] == " ".join(BOARD)
    assert (result.returncode, document["verdict"]) == (0, "PASS")


@pytest.mark.parametrize(("gpus", "verdict"), [("0,3", "PASS"), ("0,5", "FAIL")])
@pytest.mark.parametrize("command", ["check", "allreduce --sizes 1G", "p2p --pairs {pair}"], ids=str.split)
def test_a_broken_gpu_matters_only_if_it_is_chosen(command: str, gpus: str, verdict: str) -> None:
    words = command.format(pair=gpus.replace(",", "-")).split()
    machine = ("--simulate", "hgx-h100-8*2", "--gpus", gpus, "--fault", "gpu5:nvlink=9")
    assert json.loads(gpubench(*words, *machine, "--format", "json").stdout)["verdict"] == verdict


def test_every_tray_of_a_rack_uses_the_chosen_gpus() -> None:
    options = ("--simulate", "gb200-nvl72", "--gpus", "1,2", "--sizes", "1G", "--format", "json")
    document = json.loads(gpubench("allreduce", *options).stdout)
    assert {(row["ranks"], row["nodes"]) for row in document["rows"]} == {(36, 18)}
    assert {rank["gpu_index"] for rank in document["metadata"]["ranks"]} == {1, 2}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("p2p --simulate hgx-h100-8 --gpus 0,8", "there is no GPU8 on hgx-h100-8\n  expected: GPUs of hgx-h100-8: 0-7"),
        ("topo --simulate hgx-h100-8 --gpus 0,0", "--gpus '0,0' names GPU0 twice"),
        ("kv --simulate hgx-h100-8 --gpus GPU1", "is not a list of GPUs"),
        ("check --simulate hgx-h100-8 --gpus 3-1", "is not a list of GPUs"),
        ("topo --replay here --gpus 0", "--gpus and --replay exclude each other"),
        ("topo --from topo.xml --gpus 0", "--gpus and --from exclude each other"),
        ("p2p --simulate hgx-h100-8 --gpus 1,2 --pairs 0-1", "there is no GPU0\n  expected: GPUs from GPU1, GPU2"),
        ("allreduce --simulate hgx-h100-8 --gpus 1,2 --np 3", "--np 3 on hgx-h100-8"),
        (
            "topo --simulate hgx-h100-8 --gpus 1 --fault gpu0:missing=yes",
            "only one of these options, because both remove GPUs",
        ),
        ("allreduce --backend host --gpus 1", "--backend host uses no GPU"),
    ],
)
def test_gpus_that_cannot_be_chosen_are_refused(options: str, said: str) -> None:
    result = gpubench(*options.split())
    assert (result.returncode, said in result.stderr) == (2, True), result.stderr


def uuids(numbers: Sequence[int]) -> str:
    return ",".join(f"GPU-0{number + 6}" for number in numbers)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    library = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # So that it is restored after choose_gpus has changed it
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return library


@pytest.mark.parametrize(
    ("setting", "gpus", "visible"),
    [(None, (3, 0), (3, 0)), ("0,3", (3,), (3,)), (uuids([2, 1]), (1, 2), (1, 2)), ("GPU-08", (2,), (2,))],
)
def test_cuda_sees_the_chosen_gpus_in_the_order_of_the_option(
    setting: str | None,
    gpus: tuple[int, ...],
    visible: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    four_gpus: object,
) -> None:
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    sources.choose_gpus(gpus)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == uuids(visible)
    assert nvml.read_driver(os.environ).visible == len(gpus)


@pytest.mark.parametrize(
    ("setting", "gpu", "said"),
    [
        (None, 4, "there is no GPU4 on this host"),
        ("0,3", 1, "there is no GPU1 on this host with CUDA_VISIBLE_DEVICES=0,3"),
        ("MIG-7", 0, "there is no GPU0 on this host with CUDA_VISIBLE_DEVICES=MIG-7"),
    ],
)
def test_a_gpu_that_is_absent_or_hidden_is_refused(
    setting: str | None, gpu: int, said: str, monkeypatch: pytest.MonkeyPatch, four_gpus: object
) -> None:
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    with pytest.raises(UsageError) as refused:
        sources.choose_gpus([gpu])
    assert said in str(refused.value)


def test_a_lost_gpu_does_not_keep_the_others_from_being_chosen(
    monkeypatch: pytest.MonkeyPatch, four_gpus: FakeNvml
) -> None:
    four_gpus.gpus[1].handle_error = 15
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    sources.choose_gpus([2])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == uuids([2])
    monkeypatch.setattr(nvml, "open_library", lambda: None)
    with pytest.raises(CouldNotMeasureError, match="no usable GPU"):
        sources.choose_gpus([2])

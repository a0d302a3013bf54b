"""MPS as a process meets it: a server that listens or does not, and the variables of ranks that share a GPU."""

import os
import socket
from pathlib import Path

import pytest

from gpubench.machine.host import cost_of_turns, is_mps_running, sharing_settings, sm_percent


def test_a_server_is_one_that_listens(tmp_path: Path) -> None:
    """A socket that a server left behind when it was killed is still there, and nobody listens on it."""
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert not is_mps_running(environment)
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as server:
            server.bind(str(tmp_path / "control"))
            server.listen()
            assert is_mps_running(environment)
            assert server.gettimeout() is None
            server.setblocking(False)
            with pytest.raises(BlockingIOError):
                server.accept()  # the server heard nothing of it
        assert not is_mps_running(environment)
        (tmp_path / "control").unlink()


def test_a_pipe_has_a_server_while_it_is_read(tmp_path: Path) -> None:
    pipe, environment = tmp_path / "control", {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    os.mkfifo(pipe)
    assert not is_mps_running(environment)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert is_mps_running(environment)
    os.close(reader)
    assert not is_mps_running(environment)


def test_a_file_in_its_place_is_no_server(tmp_path: Path) -> None:
    (tmp_path / "control").write_text("")
    assert not is_mps_running({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})


@pytest.mark.parametrize(
    ("ranks", "kernels", "percent", "ctas"),
    [
        *((2, 1, "50", None), (3, 1, "33", None), (4, 1, "25", "16"), (8, 1, "12", "8"), (16, 1, "6", "4")),
        *((200, 1, "1", "1"), (2, 2, "25", None), (3, 2, "16", None), (4, 2, "12", "8")),
    ],
)
def test_ranks_of_a_gpu_fit_beside_each_other(ranks: int, kernels: int, percent: str, ctas: str | None) -> None:
    settings = sharing_settings(ranks, kernels)
    assert settings["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert (settings["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"], settings.get("NCCL_MAX_CTAS")) == (percent, ctas)


def test_a_rank_alone_on_its_gpu_needs_no_settings() -> None:
    assert sharing_settings(1) == sharing_settings(1, 2) == {}


@pytest.mark.parametrize(("text", "percent"), [(None, 100), ("25", 25), ("12.5", 12.5), ("much", 100), ("250", 100)])
def test_the_share_of_sms_is_what_the_environment_says(text: str | None, percent: float) -> None:
    assert sm_percent({} if text is None else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": text}) == percent


@pytest.mark.parametrize(
    ("ranks", "said"), [(2, "about 4.5 ms"), (3, "about 4.5 ms"), (4, "about 27 ms"), (20, "at least about 126 ms")]
)
def test_what_turns_cost_is_said_from_what_was_measured(ranks: int, said: str) -> None:
    assert said in cost_of_turns(ranks)
    assert f"{ranks} ranks of a GPU take turns" in cost_of_turns(ranks)

"""Who is named when a job stops moving."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench.errors import rows_kept
from gpubench.model.terms.ranks import (
    LostRank,
    Phase,
    RankState,
    first_lost,
    hang_error,
    is_suspended,
    killed_before,
    limit_seconds,
    not_started_error,
)


def state(rank: int, **changes: object) -> RankState:
    usual = RankState(
        rank=rank,
        place=f"rank {rank} on n{rank // 2} (GPU {rank % 2}, 0000:0{rank}:00.0)",
        pid=100 + rank,
        phase=Phase.OPERATION,
        label="64K out of place",
        step=40,
        done=12,
        total=20,
        idle_seconds=61.0,
        process="S",
    )
    return replace(usual, **changes)


def test_a_stopped_rank_is_who_all_wait_for() -> None:
    states = [state(0), state(1, process="T", done=11), state(2), state(3)]
    assert str(hang_error(states, {}, 61)).splitlines() == [
        "no progress for 61 s: the others wait for rank 1",
        (
            "  missing:  rank 1 on n0 (GPU 1, 0000:01:00.0) (pid 101), in operation 64K out of place, 11 of 20 done, "
            "for 61 s: its process is stopped"
        ),
        (
            "  arrived:  rank 0 on n0 (GPU 0, 0000:00:00.0), rank 2 on n1 (GPU 0, 0000:02:00.0), "
            "rank 3 on n1 (GPU 1, 0000:03:00.0): in operation 64K out of place, 12 of 20 done"
        ),
        "  expected: a completed operation or a new step within that time",
        "  likely:   SIGSTOP, Ctrl-Z in its shell, or a debugger",
        "  try:      run it again. If jobs are suspended on this system, set a longer --timeout.",
    ]


def test_without_a_reason_the_rank_that_is_behind_is_named() -> None:
    states = [state(0), state(1, step=39, phase=Phase.VERIFICATION, done=0, total=0, process="D"), state(2)]
    said = str(hang_error(states, {}, 60))
    assert "the others wait for rank 1" in said
    missing = next(line for line in said.splitlines() if "missing:" in line)
    assert "in verification 64K out of place, for 61 s, in a system call that does not return (state D" in missing
    assert "rank 0 on" not in missing


def test_ranks_that_do_not_answer_are_named_with_their_hosts() -> None:
    said = str(hang_error([state(0), state(1)], {2: "rank 2 on n1", 3: "rank 3 on n1"}, 60))
    assert "the others wait for rank 2-3" in said
    assert "  missing:  rank 2 on n1: neither it nor its watchdog answers" in said
    assert "unreachable" in said


def test_where_all_are_inside_the_same_operation_nobody_is_blamed() -> None:
    said = str(
        hang_error([state(0, trouble="NCCL's asynchronous error: x"), state(1)], {}, 60, ["  NCCL RAS: one line"])
    )
    assert "all ranks are inside the same operation" in said
    assert "missing:" not in said
    assert "  library:  rank 0 on n0 (GPU 0, 0000:00:00.0): NCCL's asynchronous error: x" in said
    assert "  NCCL RAS: one line" in said


def test_of_thousands_of_ranks_a_few_lines_are_said() -> None:
    states = [state(rank, done=11 if 100 <= rank < 200 else 12) for rank in range(4096)]
    lines = str(hang_error(states, {}, 60)).splitlines()
    assert len(lines) < 16
    assert any(line.endswith("and ranks 108-199") for line in lines)
    assert any("rank 0-99,200-4095: in operation" in line for line in lines)


def test_many_situations_are_cut_short() -> None:
    states = [state(rank, label=f"row {rank}", step=rank) for rank in range(30)]
    assert len(str(hang_error([*states, state(30, process="T")], {}, 60)).splitlines()) < 16


def test_a_suspended_job_is_no_hang() -> None:
    assert is_suspended([state(0, process="T"), state(1, process="t")])
    assert not is_suspended([state(0, process="T"), state(1)])
    assert not is_suspended([])


def test_what_starts_has_longer_but_a_stopped_process_has_not() -> None:
    assert limit_seconds(Phase.OPERATION, 60) == limit_seconds(Phase.MPI_FINALIZE, 60) == 60
    assert limit_seconds(Phase.MPI_INIT, 60) == limit_seconds(Phase.OUTPUT, 60) == 300
    assert (limit_seconds(Phase.MPI_INIT, 4), limit_seconds(Phase.OUTPUT, 4)) == (60, 300)
    assert limit_seconds(Phase.MPI_INIT, 600) == 1200
    assert state(0, phase=Phase.OUTPUT).seconds_left(60) == 300 - 61
    assert state(0, phase=Phase.OUTPUT, process="T").seconds_left(60) == -1
    assert state(1, phase=Phase.OUTPUT).seconds_left(60) == -1


def test_ranks_that_did_not_come_out_of_mpi_init() -> None:
    early = {"phase": Phase.MPI_INIT, "label": "", "done": 0, "total": 0}
    said = str(not_started_error([state(0, **early), state(1, **early, process="T")], 5, 300))
    assert "MPI_Init, or a step before it, did not finish within 300 s" in said
    assert "  missing:  rank 1 on n0 (GPU 1, 0000:01:00.0) (pid 101): its process is stopped" in said
    assert "  missing:  rank 2-4: never started, or on another host" in said
    assert "  arrived:  rank 0 on n0 (GPU 0, 0000:00:00.0): in MPI_Init" in said


def test_ranks_that_did_not_connect_where_torchrun_sent_them() -> None:
    early = {"phase": Phase.MPI_INIT, "label": "torch.distributed at n0:29500", "done": 0, "total": 0}
    said = str(not_started_error([state(0, **early), state(1, **early)], 2, 300))
    assert "ranks did not connect through torch.distributed at n0:29500 within 300 s" in said
    assert "Gloo cannot connect two hosts" in said
    assert "GLOO_SOCKET_IFNAME=lo for one host" in said
    assert "mpirun" not in said


def test_what_is_not_lost_of_a_run_that_broke() -> None:
    kept = [rows_kept(rows) for rows in (0, 1, 4)]
    assert kept == ["", ". The row measured before is kept", ". The 4 rows measured before are kept"]


@pytest.mark.parametrize(
    ("status", "how"),
    [
        (9, "was killed by SIGKILL"),
        (11 | 128, "was killed by SIGSEGV"),
        (63, "was killed by signal 63"),
        (256, "ended with exit code 1"),
        (0, "was killed or crashed"),
    ],
)
def test_how_a_rank_was_lost(status: int, how: str) -> None:
    lost = LostRank(state(1), 7.0, status)
    assert str(lost.error("; the 4 rows measured before are kept")).startswith(
        f"rank 1 on n0 (GPU 1, 0000:01:00.0) (pid 101) {how} in operation 64K out of place, 12 of 20 done; the 4 rows"
    )
    assert lost.exited == (status == 256)


def test_of_ranks_that_were_lost_the_first_counts_but_one_that_was_asked_to_end_only_alone() -> None:
    seen_late, asked, later = LostRank(state(2), 7.5, 9), LostRank(state(0), 7.0, 15), LostRank(state(1), 8.0, 0)
    assert asked.asked_to_end
    assert first_lost([asked, later, seen_late]) is seen_late
    assert first_lost([asked]) is asked
    assert first_lost([]) is None


def test_the_rank_that_mpirun_names_was_lost_first_whenever_its_watchdog_noticed() -> None:
    consequence, cause = LostRank(state(1), 7.0, 0), LostRank(state(0), 7.5, 0)
    assert first_lost([consequence, cause], ended_first=0) is cause
    assert first_lost([consequence, cause], ended_first=5) is consequence


def test_an_error_of_another_rank_came_of_a_death_before_it() -> None:
    """Under MPS the others on its GPU say that CUDA broke; after an error the launcher kills the others."""
    killed = LostRank(state(0), 7.0, 9)
    assert killed_before([LostRank(state(1), 6.9, 0x300), killed], 7.1) is None, "an exit was before"
    assert killed_before([killed], 7.1) is killed
    assert killed_before([killed], 6.9) is None
    assert killed_before([LostRank(state(0), 7.0, 15)], 7.1) is None
    assert killed_before([], 7.1) is None


@given(st.sampled_from(Phase), st.text(max_size=20), st.integers(0, 9), st.floats(0, 1e6), st.sampled_from("RSTD"))
def test_states_travel(phase: Phase, label: str, done: int, idle: float, process: str) -> None:
    sent = state(3, phase=phase, label=label, done=done, idle_seconds=idle, process=process)
    assert RankState.from_record(sent.to_record()) == sent


def test_eight_ranks_and_eight_situations_are_all_named() -> None:
    behind = [state(rank, done=11) for rank in range(8)]
    said = str(hang_error([*behind, *[state(rank) for rank in range(8, 16)]], {}, 60))
    assert said.count("missing:") == 8
    assert "and ranks" not in said
    assert "  arrived:  rank 8 on n4" in said
    assert "more groups" not in str(hang_error([state(rank, label=f"row {rank}") for rank in range(8)], {}, 60))
    assert "and 22 more groups" in str(hang_error([state(rank, label=f"row {rank}") for rank in range(30)], {}, 60))


@pytest.mark.parametrize(
    ("done", "total", "where"),
    [(0, 0, "operation 64K"), (3, 0, "operation 64K, 3 done"), (0, 20, "operation 64K, 0 of 20 done")],
)
def test_a_phase_has_its_operations_as_far_as_they_are_known(done: int, total: int, where: str) -> None:
    assert state(0, label="64K", done=done, total=total).where == where

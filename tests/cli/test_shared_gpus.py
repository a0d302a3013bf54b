"""Ranks that share a GPU: who may, what is refused and with which cure, and what is said of their figures."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.backends import cuda
from gpubench.collectives.registry import collective_named
from gpubench.conditions.circumstances import Facts
from gpubench.errors import CouldNotMeasureError, GpubenchError, UsageError
from gpubench.formats.text.collective import collective_lines
from gpubench.jobs import check
from gpubench.jobs import rank as gpus
from gpubench.jobs import scan as scan_job
from gpubench.jobs.collective import job as alone
from gpubench.jobs.collective.metadata import speed_judge_maker
from gpubench.jobs.plans import Depth
from gpubench.jobs.rank import RankNccl, check_one_rank_a_gpu, check_shared_gpus, check_versions
from gpubench.machine.host import sharing_settings
from gpubench.machine.nvml import Driver
from gpubench.measure.check.health import judge
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.transport import State
from gpubench.model.paths.wiring import Wiring
from gpubench.model.results.figures import SpeedFigures
from gpubench.model.results.report import CheckRow, Report
from gpubench.model.results.sentence import sentence
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.verdict import Verdict
from gpubench.ranks.launch import OWN_SETTINGS_VARIABLE, Flavour, Launcher
from gpubench.simulated.machine import parse_machine, snapshots
from gpubench.training.overlap_options import OverlapPlan
from tests.cli.running import gpubench
from tests.cli.test_commands import HAS_GPUS, options
from tests.fakes import cupy_on_numpy
from tests.formats.sample import METADATA, ROW

ONE = Driver(version="580", cuda=13000, gpus=1, visible=1)
PERCENT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def rank(number: int, gpu: int = 0, **changes: Any) -> RankIdentity:
    known = RankIdentity(
        rank=number,
        host="n0",
        node=0,
        local_rank=number,
        pid=number,
        gpu="NVIDIA H100 80GB HBM3",
        gpu_index=gpu,
        gpu_bus_id=f"0000:0{gpu}:00.0",
        gpu_uuid=f"GPU-{gpu}",
    )
    return replace(known, **changes)


def with_nccl(ranks: Sequence[RankIdentity], code: int = 23203, *, enabled: bool = True) -> list[RankNccl]:
    version = f"2.{code % 10000 // 100}.{code % 100}"
    return [RankNccl(each, version, code, "/lib/libnccl.so.2", enabled) for each in ranks]


def shared(count: int = 2, **changes: Any) -> list[RankIdentity]:
    return [rank(number, **changes) for number in range(count)]


SPLIT = [rank(number, nccl_host=f"h{number}") for number in range(4)]
HALVES = [rank(number, nccl_host=f"h{number // 2}") for number in range(4)]


@pytest.mark.parametrize(
    "ranks",
    [
        with_nccl(shared()),
        with_nccl(shared(4, sm_percent=25)),
        with_nccl(shared(3, sm_percent=33)),
        # Hosts by name are hosts to NCCL, to any: nobody shares a GPU with a rank of its own host.
        with_nccl(SPLIT, 22809, enabled=False),
        with_nccl(HALVES),
        # Two MIG instances are two devices: NCCL 2.32 documents them.
        with_nccl([rank(0, gpu_uuid="MIG-0"), rank(1, gpu_uuid="MIG-1")], enabled=False),
        with_nccl([rank(0), rank(1, 1)], 22809, enabled=False),
    ],
    ids=["turns", "quarters", "thirds", "hosts by name", "halves by name", "MIG", "own GPUs"],
)
def test_nccl_takes_ranks_that_it_lets_share_a_gpu(ranks: list[RankNccl]) -> None:
    check_shared_gpus(ranks, ONE)


@pytest.mark.parametrize(
    ("ranks", "driver", "seen", "cure"),
    [
        (
            with_nccl(shared(), 22809),
            ONE,
            "rank 0-1 on n0 share GPU 0000:00:00.0, and NCCL 2.28.9 from /lib/libnccl.so.2 refuses",
            "pip install 'nvidia-nccl-cu13>=2.30', or --nccl-library",
        ),
        (with_nccl(shared(), 22809), replace(ONE, cuda=12080), "refuses that", "nvidia-nccl-cu12>=2.30"),
        (
            with_nccl(shared(), enabled=False),
            ONE,
            "NCCL_MULTI_RANK_GPU_ENABLE is not 1",
            "mpirun -x NCCL_MULTI_RANK_GPU_ENABLE=1 ..., or without mpirun: --ranks-per-gpu 2",
        ),
        (with_nccl(HALVES, 22809), ONE, "rank 0-1 on n0 share GPU", "nvidia-nccl-cu13"),
        (
            with_nccl(shared(4, sm_percent=100)),
            ONE,
            "rank 0-3 on n0 share GPU 0000:00:00.0 under MPS, with 400 % of its SMs in total",
            f"mpirun -x {PERCENT}=25",
        ),
        # The kernels have to fit beside each other whatever NCCL takes for hosts.
        (with_nccl([replace(each, sm_percent=50) for each in SPLIT]), ONE, "with 200 % of its SMs", f"{PERCENT}=25"),
        # A host with a GPU for every rank: nobody meant to share one.
        (with_nccl(shared(), enabled=False), HAS_GPUS, "would both drive GPU", "let every rank see all GPUs"),
    ],
    ids=["old", "old, CUDA 12", "not enabled", "halves, old", "no percentage", "over all hosts", "by accident"],
)
def test_what_would_hang_or_fail_is_refused_with_what_helps(
    ranks: list[RankNccl], driver: Driver, seen: str, cure: str
) -> None:
    with pytest.raises(UsageError) as caught:
        check_shared_gpus(ranks, driver)
    assert seen in caught.value.seen
    assert cure in caught.value.next_step


def test_computation_beside_a_collective_needs_as_much_room_again() -> None:
    """Two ranks with half of an H100's SMs each hung in overlap; with a quarter each they ran."""
    check_shared_gpus(with_nccl(shared(2, sm_percent=25)), ONE, kernels_at_once=2)
    with pytest.raises(UsageError) as caught:
        check_shared_gpus(with_nccl(shared(2, sm_percent=50)), ONE, kernels_at_once=2)
    assert caught.value.expected == "at most 50 % in total"
    assert f"mpirun -x {PERCENT}=25" in caught.value.next_step
    assert OverlapPlan().collective_plan.kernels_at_once == 2
    assert options().kernels_at_once == 1


def test_ranks_of_different_libraries_are_named() -> None:
    mixed = [*with_nccl(shared(2), 22809), *with_nccl([rank(2), rank(3)], 23203)]
    with pytest.raises(UsageError) as caught:
        check_versions(mixed)
    assert "rank 0-1 2.28.9 from /lib/libnccl.so.2; rank 2-3 2.32.3" in caught.value.seen
    same = [*with_nccl(shared(2)), replace(with_nccl([rank(2)])[0], path="/other/libnccl.so.2")]
    check_versions(same)


@pytest.mark.parametrize(
    ("ranks", "driver", "seen"),
    [
        (shared(), ONE, "2 ranks on n0, which shows 1 GPU"),
        (shared(), HAS_GPUS, "rank 0 and rank 1 on n0 would both drive GPU 0000:00:00.0"),
        ([rank(0), rank(1, 1)], ONE, ""),
    ],
)
def test_copies_between_ranks_need_a_gpu_each(ranks: list[RankIdentity], driver: Driver, seen: str) -> None:
    if not seen:
        check_one_rank_a_gpu(ranks, driver.gpus)
        return
    with pytest.raises(UsageError, match=seen):
        check_one_rank_a_gpu(ranks, driver.gpus)


@pytest.mark.parametrize(
    ("given", "driver", "ranks"),
    [
        ({"ranks_per_gpu": 4}, ONE, 4),
        ({"ranks_per_gpu": 2}, HAS_GPUS, 8),
        ({"ranks_per_gpu": 4, "rank_counts": "3"}, ONE, 3),
        ({"ranks_per_gpu": 2, "rank_counts": "5"}, HAS_GPUS, 5),
    ],
)
def test_so_many_ranks_are_launched_on_each_gpu(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], driver: Driver, ranks: int
) -> None:
    monkeypatch.setattr("gpubench.backends.cuda.check_installed", lambda _driver: None)
    assert alone.choose_ranks(options(**given), driver) == ranks


@pytest.mark.parametrize(
    ("given", "driver", "said"),
    [
        ({"rank_counts": "4"}, ONE, "--ranks-per-gpu 4, --np 1, or --backend host"),
        ({"rank_counts": "5"}, HAS_GPUS, "--ranks-per-gpu 2, --np 4, or --backend host"),
        ({"rank_counts": "5", "ranks_per_gpu": 2}, ONE, "--ranks-per-gpu 5, --np 2"),
        ({"ranks_per_gpu": 2}, Driver(), "leave --ranks-per-gpu out"),
    ],
)
def test_more_ranks_than_asked_for_are_refused_with_the_number(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], driver: Driver, said: str
) -> None:
    monkeypatch.setattr("gpubench.backends.cuda.check_installed", lambda _driver: None)
    with pytest.raises(UsageError) as caught:
        alone.choose_ranks(options(**given), driver)
    assert said in caught.value.next_step


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("allreduce", "--ranks-per-gpu", "0"), "--ranks-per-gpu"),
        (("overlap", "--ranks-per-gpu", "-1"), "--ranks-per-gpu"),
        (("allreduce", "--ranks-per-gpu", "2", "--simulate", "hgx-h200-4"), "a simulated machine has no real GPUs"),
        (("overlap", "--ranks-per-gpu", "2", "--simulate", "hgx-h200-4"), "a simulated machine has no real GPUs"),
        (("allreduce", "--ranks-per-gpu", "2", "--backend", "host"), "--backend host uses none"),
        (("allreduce", "--ranks-per-gpu", "2", "--replay", "x"), "--ranks-per-gpu"),
        (("check", "--ranks-per-gpu", "2", "--simulate", "hgx-h200-4"), "--ranks-per-gpu and --simulate"),
        (("scan", "--ranks-per-gpu", "4", "--simulate", "hgx-h200-4"), "--ranks-per-gpu and --simulate"),
        (("scan", "--ranks-per-gpu", "4", "--backend", "host"), "--backend host and --ranks-per-gpu"),
        (("scan", "--ranks-per-gpu", "2"), "scan of two nodes"),
        (("check", "--ranks-per-gpu", "2", "--quick"), "--ranks-per-gpu and --quick"),
        (("check", "--ranks-per-gpu", "2", "--hosts", "hosts"), "--hosts and --ranks-per-gpu"),
    ],
)
def test_it_is_refused_where_there_is_no_gpu_to_share(arguments: Sequence[str], said: str) -> None:
    result = gpubench(*arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert result.stdout == ""


def test_the_launcher_sets_what_ranks_need_and_keeps_what_the_user_set() -> None:
    launcher = Launcher("mpirun", Flavour.OPEN_MPI)
    told = launcher.environment({"NCCL_MAX_CTAS": "4"}, "channel", sharing_settings(8))
    assert (told["NCCL_MULTI_RANK_GPU_ENABLE"], told[PERCENT], told["NCCL_MAX_CTAS"]) == ("1", "12", "4")
    own = told[OWN_SETTINGS_VARIABLE].split(",")
    assert {"NCCL_MULTI_RANK_GPU_ENABLE", PERCENT} <= set(own)
    assert "NCCL_MAX_CTAS" not in own
    assert PERCENT not in launcher.environment({}, "channel")


def header(ranks: Sequence[RankIdentity]) -> str:
    return "\n".join(collective_lines(replace(METADATA, ranks=tuple(ranks)), verbose=False))


@pytest.mark.parametrize(
    ("ranks", "lines"),
    [
        (shared(4, sm_percent=25), ["  4 ranks share GPU 0 (MPS, 25 % of its SMs each)", ": GPU 0, NVIDIA H100"]),
        (shared(2), ["  2 ranks share GPU 0 (taking turns)", "2 ranks on 1 host\n"]),
        ([rank(number, number % 2) for number in range(4)], ["  2 ranks share each of GPU 0-1 (taking turns)"]),
        (HALVES, ["4 ranks on 1 host, 2 hosts for NCCL, according to NCCL_HOSTID\n", "4 ranks share GPU 0"]),
    ],
)
def test_the_header_says_who_shares_what(ranks: Sequence[RankIdentity], lines: Sequence[str]) -> None:
    text = header(ranks)
    assert [line for line in lines if line not in text] == []


def test_the_header_of_ranks_with_a_gpu_each_says_nothing_of_it() -> None:
    assert "share" not in header([rank(0), rank(1, 1)])
    assert "for NCCL" not in header([rank(0), rank(1, 1)])


def test_the_last_line_counts_gpus_and_judges_no_speed() -> None:
    figures = SpeedFigures()
    figures.add(replace(ROW, expected_gb_s=None, expected_source=None, wrong=0, verdict="PASS", ranks_per_gpu=2))
    metadata = replace(METADATA, ranks=tuple(shared(2)), profile=None)
    said = sentence(metadata, Report(verdict=Verdict.PASS, complete=True), figures)
    assert said.startswith("PASS: 2 ranks on 1 × H100 80GB HBM3, all-reduce")
    assert said.endswith("speed not judged: ranks share a GPU")


@pytest.mark.parametrize("ranks", [shared(4), [rank(0, nccl_host="a"), rank(1, 1, nccl_host="b")]])
def test_nothing_is_expected_of_them(ranks: Sequence[RankIdentity]) -> None:
    """A profile of four H100s, and the limit of what joins them, are of ranks with a GPU each."""
    judge = speed_judge_maker(collective_named("allreduce"), ranks, "2.32.3", None)(None)
    alone_judge = speed_judge_maker(collective_named("allreduce"), [rank(0), rank(1, 1)], "2.32.3", None)(None)
    row = replace(ROW, ranks=len(ranks), limit_gb_s=10.0, size_bytes=2**26, time_us=800.0, verdict="PASS")
    assert judge.row(row).expected_source is None
    assert alone_judge.row(row).expected_source is not None


def test_ranks_of_one_gpu_have_no_link_between_them() -> None:
    node = snapshots(parse_machine("hgx-h100-8"), [])[0]
    places = [node.gpus[0], node.gpus[0], node.gpus[1]]
    ranks = [rank(number, gpu_bus_id=gpu.bus_id, gpu_uuid=gpu.uuid) for number, gpu in enumerate(places)]
    wires = Wiring(ranks, {0: Topology(node)})
    assert (wires.path((0, 1)), wires.limit((0, 1)).gb_s, wires.has_nvlinks((0, 1))) == ("X", None, False)
    assert wires.capability((0, 1)).state is State.PRESENT
    assert wires.capability((0, 1)).seen == "both ranks use the same GPU"
    assert wires.why_staged((0, 1)) == ""
    assert (wires.path((0, 2)), wires.limit((0, 2)).gb_s) == ("NV18", 450)
    assert wires.why_not_judged == "ranks share a GPU"


def test_a_rank_takes_its_share_of_gpus_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(2, free_bytes=40 * 2**30))
    opened = [cuda.open_device(number, 4, "n0", Driver(), shared=True) for number in range(4)]
    assert [each.identity.index for each in opened] == [0, 1, 0, 1]
    assert opened[0].free_bytes() == 38 * 2**30
    opened[0].sharing = 4
    assert opened[0].free_bytes() == 8 * 2**30


def test_a_mig_instance_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(1))
    opened = partial(cuda.open_device, 0, 1, "n0", Driver())
    assert opened().identity.uuid == "GPU-00000000-0000-0000-0000-000000000000"
    with monkeypatch.context() as patched:
        patched.setattr(cupy_on_numpy.CudaDriver, "instance", lambda _self, _device: b"\x07" * 16)
        assert opened().identity.uuid == "MIG-07070707-0707-0707-0707-070707070707"
    monkeypatch.delattr(cupy_on_numpy.CudaDriver, "cuDeviceGetUuid_v2")  # before CUDA 11.4
    assert opened().identity.uuid == "GPU-00000000-0000-0000-0000-000000000000"


@pytest.mark.parametrize(
    ("attributes", "serves", "percent"),
    [({133: 1}, False, 25), ({133: 0}, True, None), ({}, True, 25), ({}, False, None)],
    ids=["under MPS", "not", "an old driver, a server", "an old driver, none"],
)
def test_a_rank_knows_its_share_of_the_sms(
    monkeypatch: pytest.MonkeyPatch, attributes: dict[int, int], serves: bool, percent: float | None
) -> None:
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(1))
    monkeypatch.setattr(cupy_on_numpy.CudaDriver, "attributes", attributes)
    monkeypatch.setattr(cuda, "is_mps_running", lambda _environment: serves)
    monkeypatch.setenv(PERCENT, "25")
    device = cuda.open_device(0, 1, "n0", Driver())
    assert gpus.identify(rank(0), device.identity).sm_percent == percent


@pytest.mark.parametrize(
    ("serves", "seen"),
    [
        (True, "the MPS server refuses new clients: cudaErrorDevicesUnavailable"),
        (False, "no usable GPU: cudaErrorDevicesUnavailable"),
    ],
)
def test_a_server_that_refuses_clients_is_named(monkeypatch: pytest.MonkeyPatch, serves: bool, seen: str) -> None:
    runtime = cupy_on_numpy.Runtime(1)
    runtime.fail["setDevice 0"] = "cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable"
    cupy_on_numpy.install(monkeypatch, runtime)
    monkeypatch.setattr(cuda, "is_mps_running", lambda _environment: serves)
    with pytest.raises(CouldNotMeasureError, match=seen) as caught:
        cuda.open_device(0, 1, "n0", Driver())
    assert ("ten seconds" in caught.value.next_step) is serves


@pytest.mark.parametrize(
    ("error", "percent", "waits"),
    [
        (RuntimeError("NCCL_ERROR_UNHANDLED_CUDA_ERROR"), 50.0, True),
        (RuntimeError("NCCL_ERROR_UNHANDLED_CUDA_ERROR"), None, False),
        (CouldNotMeasureError("wrong values"), 50.0, False),
        (KeyboardInterrupt(), 50.0, False),
    ],
)
def test_an_error_of_cuda_under_mps_lets_the_watchdog_of_a_dead_rank_speak_first(
    error: BaseException, percent: float | None, waits: bool
) -> None:
    assert gpus.may_come_of_another_rank(error, rank(0, sm_percent=percent)) is waits


def test_every_refusal_can_travel_from_a_rank() -> None:
    with pytest.raises(UsageError) as caught:
        check_shared_gpus(with_nccl(shared(), enabled=False), ONE)
    assert GpubenchError.from_record(caught.value.to_record()).next_step == caught.value.next_step


def test_a_check_of_one_gpu_reduces_between_ranks_that_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All-reduce is left out of one GPU's check; with --ranks-per-gpu it runs, and its speed is not judged."""
    asked: list[Sequence[str]] = []

    def command(_module: str, *arguments: str) -> list[str]:
        asked.append(arguments)
        row = replace(ROW, ranks=2, ranks_per_gpu=2, expected_us=None, expected_gb_s=None, expected_source=None)
        document = {
            "complete": True,
            "verdict": "PASS",
            "rows": [row.to_record()],
            "metadata": {"ranks": []},
            "findings": [],
        }
        return ["printf", "%s", json.dumps(document)]

    monkeypatch.setattr(check, "module_command", command)
    node = Topology(snapshots(parse_machine("hgx-h100-8/1"), [])[0])
    by = check.ChildCommands([node], Depth.DEFAULT, 20.0, ranks_per_gpu=2)
    assert check.ChildCommands([node], Depth.DEFAULT, 20.0).why_alone
    assert not by.why_alone
    found = by.collective(collective_named("allreduce"), (1024,))
    assert "--ranks-per-gpu 2" in " ".join(asked[0])
    report = judge(Facts([node], measurements=found))
    (line,) = [each for each in report.rows(CheckRow) if each.check == "collective_bandwidth"]
    assert (line.verdict, line.note) == (Verdict.SKIP, "speed not judged: ranks share a GPU")


def test_a_scan_launches_ranks_that_are_nodes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any NCCL takes ranks with other host ids for ranks of other hosts, and lets them share a GPU."""
    started: list[tuple[Sequence[str], dict[str, str]]] = []
    monkeypatch.setattr("gpubench.jobs.scan.usable_driver", lambda _what: ONE)
    monkeypatch.setattr("os.execve", lambda _path, words, variables: started.append((words, variables)))
    scan_job._become_launcher(8, ["scan", "--ranks-per-gpu", "8"])
    ((words, variables),) = started
    assert " ".join(words).startswith(f"{words[0]} -n 8 ")
    assert list(words[-3:]) == ["scan", "--ranks-per-gpu", "8"]
    assert (variables[PERCENT], variables["NCCL_MAX_CTAS"]) == ("12", "8")
    assert PERCENT in variables[OWN_SETTINGS_VARIABLE]

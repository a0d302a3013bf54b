"""Causes that slow down a direct path: which values do, confidence, and order."""

import pytest
from msgspec.structs import replace

from gpubench.conditions.nccl_settings import chosen, nccl_number
from gpubench.conditions.policy import Slowed
from gpubench.conditions.ranking import Named
from gpubench.measure.paths import Explained
from gpubench.model.facts.process import CpuQuota, GpuCondition, RankFacts
from gpubench.model.facts.snapshot import GpuFacts, GpuLimits, NicKind
from gpubench.model.paths.transport import Confidence
from gpubench.model.paths.wiring import Wiring
from gpubench.model.results.report import Effect
from tests.fakes.planted import Job, simulated, with_nodes, with_ranks, with_ranks_on_all

PROVEN, LIKELY, WEAK = Confidence.PROVEN, Confidence.LIKELY, Confidence.WEAK


def board() -> Job:
    return with_ranks_on_all(simulated("hgx-h200-4"))


def pcie() -> Job:
    return with_ranks_on_all(simulated("rtx-pro-6000-8"))


def with_variables(job: Job, **values: str) -> Job:
    return with_ranks(job, lambda facts: replace(facts, environment={**facts.environment, **values}))


def slow(job: Job) -> list[Named]:
    return list(job.diagnosis().of_effect(Effect.SLOW))


def named(job: Job) -> dict[str, Confidence]:
    return {each.cause.id: each.confidence for each in slow(job)}


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"NCCL_MAX_NCHANNELS": "1"}, {"nccl-few-channels": PROVEN}),
        ({"NCCL_MAX_NCHANNELS": "8"}, {"nccl-few-channels": PROVEN}),
        ({"NCCL_MAX_NCHANNELS": "15"}, {"nccl-few-channels": LIKELY}),
        ({"NCCL_MAX_NCHANNELS": "16"}, {}),
        ({"NCCL_MAX_NCHANNELS": "0"}, {"nccl-few-channels": PROVEN}),
        ({"NCCL_MAX_NCHANNELS": ""}, {}),
        ({"NCCL_MAX_NCHANNELS": "1", "NCCL_MIN_NCHANNELS": "16"}, {}),
        ({"NCCL_MAX_NCHANNELS": "1", "NCCL_MIN_CTAS": "12"}, {"nccl-few-channels": LIKELY}),
        ({"NCCL_MIN_NCHANNELS": "4"}, {}),
        ({"NCCL_MAX_CTAS": "1"}, {"nccl-few-channels": PROVEN}),
        ({"NCCL_MAX_CTAS": "0"}, {}),
        ({"NCCL_MAX_NRINGS": "2"}, {"nccl-few-channels": PROVEN}),
        ({"NCCL_MAX_P2P_NCHANNELS": "1"}, {"nccl-few-channels": LIKELY}),
        ({"NCCL_NCHANNELS_PER_NET_PEER": "1"}, {"nccl-few-channels": WEAK}),
        ({"NCCL_NCHANNELS_PER_NET_PEER": "4"}, {}),
        ({"NCCL_BUFFSIZE": "32768"}, {"nccl-small-buffers": PROVEN}),
        ({"NCCL_BUFFSIZE": "2097152"}, {"nccl-small-buffers": LIKELY}),
        ({"NCCL_BUFFSIZE": "4194304"}, {}),
        ({"NCCL_BUFFSIZE": "4M"}, {"nccl-small-buffers": PROVEN}),
        ({"NCCL_BUFFSIZE": "-2"}, {}),
        ({"NCCL_LL128_BUFFSIZE": "65536"}, {"nccl-small-buffers": PROVEN}),
        ({"NCCL_NTHREADS": "64"}, {"nccl-few-threads": PROVEN}),
        ({"NCCL_NTHREADS": "256"}, {"nccl-few-threads": LIKELY}),
        ({"NCCL_NTHREADS": "512"}, {}),
        ({"NCCL_NTHREADS": "100"}, {}),
        ({"NCCL_LL128_NTHREADS": "160"}, {"nccl-few-threads": LIKELY}),
        ({"NCCL_PROTO": "LL"}, {"nccl-algorithm-forced": PROVEN}),
        ({"NCCL_PROTO": "Simple"}, {"nccl-algorithm-forced": LIKELY}),
        ({"NCCL_PROTO": "^LL128"}, {"nccl-algorithm-forced": LIKELY}),
        ({"NCCL_PROTO": "LL,LL128,Simple"}, {}),
        ({"NCCL_PROTO": "Simple;allreduce:LL"}, {"nccl-algorithm-forced": LIKELY}),
        ({"NCCL_ALGO": "Tree"}, {"nccl-algorithm-forced": LIKELY}),
        ({"NCCL_ALGO": "allreduce:tree"}, {"nccl-algorithm-forced": LIKELY}),
        ({"NCCL_ALGO": "^NVLS,NVLSTree"}, {"nccl-algorithm-forced": WEAK}),
        ({"NCCL_ALGO": "Ring,Tree"}, {"nccl-algorithm-forced": WEAK}),
        ({"NCCL_ALGO": "Ring"}, {"nccl-algorithm-forced": WEAK}),
        ({"NCCL_ALGO": "nonsense"}, {}),
        ({"NCCL_P2P_USE_CUDA_MEMCPY": "1"}, {"nccl-p2p-memcpy": PROVEN}),
        ({"NCCL_P2P_USE_CUDA_MEMCPY": "0"}, {}),
        ({"NCCL_P2P_DIRECT_DISABLE": "1"}, {"nccl-p2p-memcpy": WEAK}),
        ({"NCCL_TUNER_PLUGIN": "none"}, {}),
        ({"NCCL_TUNER_CONFIG_FILE": "/etc/tuner.csv"}, {"nccl-plugin": LIKELY}),
        ({"NCCL_NET_PLUGIN": "ofi"}, {}),
        ({"NCCL_NVLS_ENABLE": "0"}, {}),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, {"cuda-launch-blocking": PROVEN}),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, {}),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"cuda-max-connections": WEAK}),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, {}),
    ],
)
def test_a_variable_slows_down_or_does_not(variables: dict[str, str], found: dict[str, Confidence]) -> None:
    job = with_variables(board(), **variables)
    assert named(job) == found
    for each in slow(job):
        assert "in the environment" in each.seen
        assert "unset" in each.cure.commands[0]


def test_over_pcie_nccl_has_fewer_channels_and_threads_of_its_own() -> None:
    assert named(with_variables(pcie(), NCCL_MAX_NCHANNELS="2")) == {}
    assert named(with_variables(pcie(), NCCL_MAX_NCHANNELS="1")) == {"nccl-few-channels": PROVEN}
    assert named(with_variables(pcie(), NCCL_NTHREADS="256")) == {}


def test_where_cuda_copies_nccls_variables_mean_nothing() -> None:
    job = replace(with_variables(board(), NCCL_MAX_NCHANNELS="1", NCCL_PROTO="LL", CUDA_LAUNCH_BLOCKING="1"), copied={})
    assert named(job) == {"cuda-launch-blocking": PROVEN}


def test_a_file_is_named_with_what_it_sets() -> None:
    job = with_ranks(board(), lambda facts: replace(facts, nccl_files={"/etc/nccl.conf": {"NCCL_MAX_NCHANNELS": "1"}}))
    (cause,) = slow(job)
    assert (cause.seen, cause.cure.text) == (
        "NCCL_MAX_NCHANNELS=1 in /etc/nccl.conf",
        "grep -nE 'NCCL_MAX_NCHANNELS' /etc/nccl.conf. Remove NCCL_MAX_NCHANNELS from /etc/nccl.conf.",
    )


@pytest.mark.parametrize(
    ("ranks", "subject"),
    [((0, 1, 2, 3), "all nodes"), ((2, 3), "node1"), ((1,), "node0 rank 1"), ((1, 2, 3), "ranks 1, 2, 3")],
)
def test_it_is_said_where_a_variable_is_set(ranks: tuple[int, ...], subject: str) -> None:
    job = with_ranks(
        simulated("hgx-h100-8*2"),
        lambda facts: replace(facts, nccl_files={"/etc/nccl.conf": {"NCCL_MAX_NCHANNELS": "1"}}),
        *ranks,
    )
    (cause,) = slow(job)
    assert (cause.subject, cause.seen) == (subject, "NCCL_MAX_NCHANNELS=1 in /etc/nccl.conf")


def test_what_surely_explains_comes_first_and_multicast_that_is_off_last() -> None:
    job = with_nodes(board(), lambda node: replace(node, gpus=tuple(map(_can_multicast, node.gpus))))
    job = with_variables(job, NCCL_NVLS_ENABLE="0", CUDA_DEVICE_MAX_CONNECTIONS="1", NCCL_ALGO="Tree")
    job = with_ranks(with_variables(job, NCCL_MAX_CTAS="1"), lambda facts: replace(facts, affinity="0"))
    assert list(named(job)) == [
        "nccl-few-channels",
        "cores-shared",
        "nccl-algorithm-forced",
        "nccl-nvls-off",
        "cuda-max-connections",
    ]


def _can_multicast(gpu: GpuFacts) -> GpuFacts:
    return replace(gpu, cuda_features={"multicast": True})


def test_between_nodes_a_ring_alone_is_likely_to_be_slow() -> None:
    assert named(with_variables(simulated("hgx-h100-8*2"), NCCL_ALGO="Ring")) == {"nccl-algorithm-forced": LIKELY}


@pytest.mark.parametrize(
    ("machine", "small", "first"),
    [
        ("hgx-h200-4", False, "nccl-few-channels"),
        ("hgx-h200-4", True, "cuda-launch-blocking"),
        ("l40s-8", False, "nccl-few-channels"),
    ],
)
def test_the_links_of_the_machine_decide(machine: str, *, small: bool, first: str) -> None:
    job = with_ranks_on_all(simulated(machine, "gpu0:width=8"))
    job = with_variables(job, NCCL_ALGO="Tree", NCCL_MAX_CTAS="1", CUDA_LAUNCH_BLOCKING="1")
    found = [each.cause.id for each in Explained(job.circumstances()).slowing(small=small)]
    assert found[0] == first
    assert ("pcie-width" in found) == (machine == "l40s-8")


def test_of_machines_of_which_nothing_is_known_every_cause_may_be() -> None:
    unknown = replace(board().circumstances(), wiring=Wiring([], {}), settings={"NCCL_MAX_CTAS": ("1",)})
    assert [each.cause.id for each in Explained(unknown).slowing(small=True)] == ["nccl-few-channels"]


def test_a_plugin_of_the_network_is_weak_and_none_where_the_fabric_needs_one() -> None:
    job = with_variables(simulated("hgx-h100-8*2"), NCCL_NET_PLUGIN="mine")
    assert named(job) == {"nccl-plugin": WEAK}
    efa = with_nodes(job, lambda node: replace(node, nics=(replace(node.nics[0], kind=NicKind.EFA),)))
    assert "nccl-plugin" not in named(efa)


@pytest.mark.parametrize(
    ("affinities", "seen"),
    [
        (("0", "0", "0", "0"), "4 ranks may run only on CPU 0"),
        (("0-2", "0-2", "0-2", "0-2"), "4 ranks may run only on 3 CPUs (0-2)"),
        (("0-3", "0-3", "0-3", "0-3"), None),
        (("0", "1", "2", "3"), None),
        (("0", "0", "2", "3"), "2 ranks may run only on CPU 0"),
        (("0", "0-1", "1", "3"), "3 ranks may run only on 2 CPUs (0-1)"),
        ((None, None, "0", "0-63"), None),
    ],
)
def test_ranks_need_a_cpu_each(affinities: tuple[str | None, ...], seen: str | None) -> None:
    job = with_ranks(board(), lambda facts: replace(facts, affinity=affinities[facts.rank]))
    found = [each.seen for each in slow(job) if each.cause.id == "cores-shared"]
    assert found == ([] if seen is None else [seen])


def test_that_ranks_waited_follows_from_cores_that_they_share() -> None:
    job = replace(with_ranks(board(), lambda facts: replace(facts, affinity="0")), waited={0: 0.5, 1: 0.6, 3: 0.05})
    (cause,) = slow(job)
    assert [each.cause.id for each in cause.implied] == ["cpu-oversubscribed"]
    assert named(replace(board(), waited={2: 0.15})) == {"cpu-oversubscribed": LIKELY}
    (alone,) = slow(replace(board(), waited={2: 0.75}))
    assert (alone.subject, alone.seen) == ("rank 2", "waited for a CPU for 75% of their time")
    assert named(replace(board(), waited={0: 0.05})) == {}


def test_a_quota_counts_where_the_ranks_of_its_group_are_more() -> None:
    def quota(cpus: float, *, apart: bool = False) -> Job:
        def edit(each: RankFacts) -> RankFacts:
            namespaces = {"cgroup": each.rank if apart else 1}
            return replace(each, cpu_quota=CpuQuota(cpus=cpus, by="/sys/fs/cgroup/cpu.max"), namespaces=namespaces)

        return with_ranks(board(), edit)

    (cause,) = [each for each in slow(quota(1.5)) if each.cause.id == "cpu-quota"]
    assert cause.seen == "/sys/fs/cgroup/cpu.max grants 1.5 CPUs to 4 ranks"
    assert "cpu-quota" not in named(quota(4.0))
    assert "cpu-quota" not in named(quota(1.5, apart=True))


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        (GpuCondition(clock_mhz=600, most_clock_mhz=1980), {"clocks-held-down": PROVEN}),
        (GpuCondition(clock_mhz=1500, most_clock_mhz=1980), {"clocks-held-down": LIKELY}),
        (GpuCondition(clock_mhz=1900, most_clock_mhz=1980), {}),
        (GpuCondition(clock_mhz=1500, most_clock_mhz=1980, throttle_reasons=("sw_power_cap",)), {}),
        (
            GpuCondition(clock_mhz=600, most_clock_mhz=1980, throttle_reasons=("hw_slowdown",)),
            {"gpu-hw-slowdown": PROVEN},
        ),
    ],
)
def test_a_gpu_is_looked_at_as_it_was_at_work(condition: GpuCondition, found: dict[str, Confidence]) -> None:
    job = replace(board(), at_work={2: condition})
    assert named(job) == found
    assert all(each.subject == "GPU 2" or "GPU2" in each.subject for each in slow(job))


def test_a_power_limit_is_weak_unless_it_is_low() -> None:
    def limited(watts: float) -> Job:
        def edit(gpu: GpuFacts) -> GpuFacts:
            return replace(gpu, limits=GpuLimits(power_w=watts, default_power_w=700.0))

        return with_nodes(board(), lambda node: replace(node, gpus=tuple(map(edit, node.gpus))))

    assert named(limited(700.0)) == {}
    assert named(limited(650.0)) == {"power-limited": WEAK}
    assert named(limited(350.0)) == {"power-limited": LIKELY}


@pytest.mark.parametrize(
    ("text", "value"),
    [("", None), ("8", 8), ("-2", -2), ("4M", 4), ("0x10", 16), ("010", 8), ("all", 0), (" 3", 3), ("08", 0)],
)
def test_numbers_as_c_reads_them(text: str, value: int | None) -> None:
    assert nccl_number(text) == value


def test_lists_of_algorithms() -> None:
    known = frozenset(("ring", "tree"))
    assert chosen("Ring;allreduce:^ring;broadcast:x", known) == {"": {"ring"}, "allreduce": {"tree"}}


EVERYTHING = {
    "NCCL_ALGO": "Tree",
    "NCCL_MAX_CTAS": "12",
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}


@pytest.mark.parametrize(
    ("slowed", "order"),
    [
        (
            (Slowed.NVLINK, Slowed.LAUNCHES),
            ["nccl-few-channels", "nccl-algorithm-forced", "cuda-launch-blocking", "cuda-max-connections"],
        ),
        (
            (Slowed.LAUNCHES, Slowed.NVLINK),
            ["cuda-launch-blocking", "nccl-algorithm-forced", "nccl-few-channels", "cuda-max-connections"],
        ),
        ((Slowed.NVLINK,), ["nccl-few-channels", "nccl-algorithm-forced"]),
        ((Slowed.PCIE,), ["pcie-width", "nccl-few-channels", "nccl-algorithm-forced"]),
    ],
)
def test_slow_operations_have_the_causes_of_what_they_consist_of(slowed: tuple[Slowed, ...], order: list[str]) -> None:
    """Lost PCIe lanes do not slow down NVLink, and slow launches do not slow down large sizes."""
    job = with_variables(with_ranks_on_all(simulated("hgx-h200-4", "gpu0:width=8")), **EVERYTHING)
    assert [each.cause.id for each in job.diagnosis().slowing(*slowed)] == order

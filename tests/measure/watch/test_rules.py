"""The decision table of watch."""

from collections.abc import Collection
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.measure.watch.report import observe
from gpubench.measure.watch.signals import BUSY_GB_S, RULES, Members, NetworkUse, Nvlinks, Pcie, Signals, decide
from gpubench.model.facts.traffic import NicRates, NodeRates
from gpubench.model.results.watch import Way
from tests.measure.watch.traffic import BOTH, IN, KEY, NVLINK, OUT, STAGED, STILL, Ways, gpu, job, nic, node, task

MIXED: Ways = (30.0, 30.0, 30.0, 30.0)


def by_nvlink(*_: str) -> bool:
    return True


def by_pcie(*_: str) -> bool:
    return False


def unknown(*_: str) -> None:
    return None


def ways(rates: NodeRates, joined: Any = by_nvlink) -> list[Way]:
    return [each.way for each in observe(rates, joined)]


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (job(NVLINK, NVLINK), Way.DIRECT),
        (job(STAGED, STAGED), Way.STAGED),
        (job(STAGED, STAGED, STAGED, STAGED), Way.STAGED),
        (job(IN, IN), Way.LOADING),
        (job(OUT, OUT), Way.SAVING),
        (job(STILL, STILL), Way.IDLE),
        (job(MIXED, MIXED), Way.UNKNOWN),
        # Healthy training that also loads data and writes a checkpoint.
        (job((40.0, 40.0, 0.1, 20.0), (40.0, 40.0, 0.1, 20.0)), Way.DIRECT),
        (job((40.0, 40.0, 25.0, 2.0), (40.0, 40.0, 0.1, 2.0)), Way.DIRECT),
        # Unrelated processes, or processes without a communicator, that copy in both directions.
        (job(BOTH, BOTH, communicators=False), Way.HOST_COPIES),
        # A checkpoint while data are loaded: more enters than leaves.
        (job((0.0, 0.0, 50.0, 1.0), (0.0, 0.0, 50.0, 1.0)), Way.UNKNOWN),
        # Copy engines: kernels ran for 3 % of the time and cannot have sent this much.
        (job(BOTH, BOTH, kernels_percent=2.5), Way.UNKNOWN),
        # Kernels that run a thousandth of the time send at most 0.128 GB/s.
        (job((0.0, 0.0, BUSY_GB_S, 0.0), (0.0, 0.0, 0.0, BUSY_GB_S), kernels_percent=0.1), Way.UNKNOWN),
        (job((0.0, 0.0, BUSY_GB_S, 0.0), (0.0, 0.0, 0.0, BUSY_GB_S), kernels_percent=98.0), Way.STAGED),
        (job(STAGED, STAGED, kernels_percent=98.0), Way.STAGED),
        # PCIe or NVLink traffic is unknown.
        (job((40.0, 40.0, None, None), (40.0, 40.0, 0.1, 0.1)), Way.NOT_TOLD),
        (job((None, None, 33.0, 29.0), (None, None, 33.0, 29.0)), Way.NOT_TOLD),
        (job((None, None, 0.0, 0.0), (None, None, 0.0, 0.0)), Way.NOT_TOLD),
        # A single GPU has no peer on its node, whatever its NVLinks carry.
        (job((None, None, 33.0, 29.0)), Way.HOST_COPIES),
        (job((None, None, 33.0, 29.0), nics=[nic("mlx5_0", 30.0)]), Way.NOT_TOLD),
        # One GPU of four is staged, and NVLinks carry the hops between the others.
        (
            job((0.0, 0.0, 30.0, 29.0), (0.0, 30.0, 30.0, 0.1), (30.0, 0.0, 0.1, 29.0), (30.0, 30.0, 0.1, 0.1)),
            Way.STAGED,
        ),
        # NVLinks carry only barriers, and PCIe carries the data.
        (job((0.3, 0.3, 33.0, 29.0), (0.3, 0.3, 33.0, 29.0)), Way.STAGED),
    ],
)
def test_the_traffic_of_links_decides_the_path(rates: NodeRates, expected: Way) -> None:
    assert ways(rates) == [expected]


def ring(gpus: int, staged: Collection[int], rate: float = 33.0) -> NodeRates:
    """Return the traffic of a ring in which the hops from these GPUs to the next are host-staged."""
    rates = []
    for each in range(gpus):
        out, into = each in staged, (each - 1) % gpus in staged
        nvlink = [0.0 if way else rate for way in (out, into)]
        # A GPU that reads host memory sends requests over PCIe: 6 % of the bytes on H200s.
        pcie = (1.08 * rate * out + 0.06 * rate * into, 1.08 * rate * into)
        rates.append((nvlink[0], nvlink[1], *pcie))
    return job(*rates)


@pytest.mark.parametrize("gpus", [3, 4, 8])
def test_one_hop_of_a_ring_through_host_memory_is_named(gpus: int) -> None:
    for sender in range(gpus):
        (found,) = observe(ring(gpus, {sender}), by_nvlink)
        assert (found.way, found.seen.staged_hop) == (Way.STAGED, f"GPU{sender} → GPU{(sender + 1) % gpus}")
        assert found.seen.staged_hop in found.meaning
    (found,) = observe(ring(8, {2, 3, 6}), by_nvlink)
    assert (found.way, found.seen.staged_hop) == (Way.STAGED, "GPU2, GPU3, GPU6 → GPU3, GPU4, GPU7")
    # PCIe carries another amount than the NVLinks lack: a checkpoint, and loading.
    copies = job((33.0, 33.0, 20.0, 0.1), NVLINK, (33.0, 33.0, 0.1, 20.0))
    chain = job((20.0, 0.0, 0.1, 9.0), (20.0, 20.0, 0.1, 0.1), (0.0, 20.0, 9.0, 0.1))
    assert [observe(each, by_nvlink)[0].seen.staged_hop for each in (copies, chain)] == ["", ""]
    assert [ways(each) for each in (copies, chain)] == [[Way.UNKNOWN], [Way.UNKNOWN]]


def test_jobs_of_one_gpu_are_never_staged() -> None:
    assert ways(job(BOTH, BOTH, together=False)) == [Way.HOST_COPIES, Way.HOST_COPIES]


def test_a_pair_without_nvlinks_is_never_staged() -> None:
    assert ways(job(STAGED, STAGED), by_pcie) == [Way.NOT_TOLD]
    (found,) = observe(job(STAGED, STAGED), by_pcie)
    assert "PCIe carries both direct and host-staged traffic" in found.meaning
    assert ways(job(STAGED, STAGED), unknown) == [Way.NOT_TOLD]


def test_copies_of_another_process_do_not_belong_to_the_job() -> None:
    idle = [task(100, KEY), task(101, KEY)]
    served = node([gpu(0, BOTH, 100, 7), gpu(1, BOTH, 101, 8)], [*idle, task(7), task(8)])
    (found,) = observe(served, by_nvlink)
    assert found.way is Way.UNKNOWN
    assert found.seen.doubts == ("process 7 also uses GPU0",)
    loopback = nic("lo", 4.2, rdma=False)
    assert [each.way for each in observe(replace(served, nics=(loopback,)), by_nvlink)] == [Way.UNKNOWN]
    # A process on a shared GPU does not use sockets because the other process does.
    both = node([gpu(0, BOTH, 100, 7)], [task(100, KEY), task(7)], loopback)
    assert [each.way for each in observe(both, by_nvlink)] == [Way.UNKNOWN]
    # GPUs that only the job uses decide.
    three = node([gpu(0, BOTH, 100, 7), gpu(1, STAGED, 101), gpu(2, STAGED, 102)], [*idle, task(102, KEY), task(7)])
    assert ways(three) == [Way.STAGED]
    # They decide from 0.5 GB/s of data on, without read requests.
    for sent, is_doubted in ((0.275, False), (0.27, True)):
        little = [gpu(number, (0.0, 0.0, sent, 0.25), 100 + number) for number in (1, 2)]
        (found,) = observe(node([gpu(0, BOTH, 100, 7), *little], [*idle, task(102, KEY), task(7)]), by_nvlink)
        assert bool(found.seen.doubts) is is_doubted
    healthy = node([gpu(0, NVLINK, 100, 7), gpu(1, NVLINK, 101)], [*idle, task(7)])
    assert ways(healthy) == [Way.DIRECT]
    # A busy GPU may run kernels of another process.
    still = [gpu(0, STILL, 100, utilization_percent=0), gpu(1, STILL, 101, 8), gpu(2, STILL, 102)]
    assert ways(node(still, [*idle, task(102, KEY), task(8)])) == [Way.IDLE]


def test_unreadable_processes_are_unknown() -> None:
    hidden = [
        task(100 + n, KEY, communicators=None, facts=None, unread="process 100 belongs to user ann") for n in (0, 1)
    ]
    rates = replace(job(STAGED, STAGED), tasks=tuple(hidden))
    (found,) = observe(rates, by_nvlink)
    assert found.way is Way.UNKNOWN
    assert "belongs to user ann" in found.seen.doubts[0]
    (found,) = observe(replace(rates, tasks=(hidden[0], task(101, KEY, communicators=False))), by_nvlink)
    assert "belongs to user ann" in found.seen.doubts[0]


def test_unrelated_unreadable_processes_are_one_unknown_job() -> None:
    closed = [
        task(100 + n, communicators=None, facts=None, unread=f"process {100 + n} is not visible here") for n in (0, 1)
    ]
    rates = replace(job(STAGED, STAGED), tasks=tuple(closed))
    (found,) = observe(rates, by_nvlink)
    assert (found.way, found.job.name) == (Way.UNKNOWN, "2 processes that cannot be read")
    assert found.seen.doubts == ("process 100 is not visible here",)
    calm = replace(job(IN, IN), tasks=tuple(closed))
    assert ways(calm) == [Way.LOADING]
    assert ways(replace(rates, tasks=(closed[0], task(101)))) == [Way.HOST_COPIES, Way.HOST_COPIES]


def test_staged_traffic_of_hidden_processes_is_unknown() -> None:
    gpus = [replace(gpu(n, STAGED), processes=None, unknown={"processes": "Not Permitted"}) for n in (0, 1)]
    (found,) = observe(node(gpus, []), by_nvlink)
    assert (found.way, found.seen.doubts) == (Way.UNKNOWN, ("Not Permitted",))
    (found,) = observe(node([replace(each, pcie_sent=0.0, pcie_received=0.0) for each in gpus], []), by_nvlink)
    assert found.way is Way.IDLE


def test_sockets_on_one_host_and_next_to_active_rdma_ports() -> None:
    loopback = nic("lo", 4.2, rdma=False)
    ethernet, rdma = nic("eth0", 3.0, rdma=False), nic("mlx5_0", 0.0)
    assert ways(job(STAGED, STAGED, nics=[loopback])) == [Way.SOCKETS]
    assert ways(job(STAGED, STAGED, nics=[ethernet, rdma])) == [Way.SOCKETS]
    assert ways(job(BOTH, nics=[ethernet, rdma])) == [Way.SOCKETS]
    # Without active RDMA ports, Ethernet is the only network.
    assert ways(job(BOTH, nics=[ethernet, nic("mlx5_0", 0.0, up=False)])) == [Way.NOT_TOLD]
    assert ways(job(BOTH, nics=[ethernet])) == [Way.NOT_TOLD]
    # A server that answers over the loopback has no communicator.
    assert ways(job(BOTH, nics=[loopback], communicators=False)) == [Way.NOT_TOLD]
    # Files arrive in one direction.
    assert ways(job(IN, IN, nics=[nic("eth0", 0.01, 3.0, rdma=False), rdma])) == [Way.LOADING]


def test_a_rail_that_carries_less_than_its_siblings_is_named() -> None:
    nics = [nic(f"mlx5_{n}", 20.0) for n in range(3)]
    (found,) = observe(job(NVLINK, NVLINK, nics=[*nics, nic("mlx5_3", 13.0)]), by_nvlink)
    assert found.way is Way.UNBALANCED
    assert found.seen.odd_rails == ("mlx5_3 13.0 GB/s, its siblings 20.0",)
    assert ways(job(NVLINK, NVLINK, nics=[*nics, nic("mlx5_3", 15.0)])) == [Way.DIRECT]
    assert ways(job(NVLINK, NVLINK, nics=[nic("mlx5_0", 20.0), nic("mlx5_1", 2.0)])) == [Way.DIRECT]


def test_an_idle_gpu_whose_peers_wait_is_named() -> None:
    rates = job(STILL, STILL, STILL)
    gpus = (replace(rates.gpus[0], utilization_percent=0), *rates.gpus[1:])
    (found,) = observe(replace(rates, gpus=gpus), by_nvlink)
    assert (found.way, found.seen.idle_gpus) == (Way.WAITING, ("GPU0",))
    calm = tuple(replace(each, utilization_percent=0) for each in rates.gpus)
    assert ways(replace(rates, gpus=calm)) == [Way.IDLE]
    computing = job(STILL, STILL, together=False)
    gpus = (replace(computing.gpus[0], utilization_percent=0), computing.gpus[1])
    assert ways(replace(computing, gpus=gpus)) == [Way.IDLE, Way.IDLE]


def test_every_line_of_the_table_is_needed() -> None:
    every = [
        Signals(
            nvlinks=nvlinks,
            pcie=pcie,
            network=network,
            members=members,
            nvlink_gb_s=None,
            pcie_sent_gb_s=None,
            pcie_received_gb_s=None,
            network_gb_s=None,
        )
        for nvlinks in Nvlinks
        for pcie in Pcie
        for network in NetworkUse
        for members in Members
    ]
    of_busy = (Pcie.BESIDE, Pcie.NICS)
    possible = [seen for seen in every if seen.pcie not in of_busy or seen.nvlinks is Nvlinks.BUSY]
    first = {next(number for number, rule in enumerate(RULES) if rule.fits(seen)) for seen in possible}
    assert first == set(range(len(RULES)))
    passing = [seen for seen in every if decide(seen)[0] is Way.DIRECT]
    assert {seen.nvlinks for seen in passing} == {Nvlinks.BUSY}
    beside = {seen.pcie for seen in passing if seen.network is not NetworkUse.QUIET}
    assert beside == {Pcie.QUIET, Pcie.LITTLE, Pcie.NICS}


def test_possibly_staged_traffic_next_to_nvlinks_does_not_pass() -> None:
    # GPU2 and GPU3 stage between them while data are loaded.
    busy, apart = (40.0, 40.0, 0.1, 20.0), (40.0, 40.0, 10.0, 30.0)
    assert ways(job(busy, busy, apart, apart)) == [Way.UNKNOWN]
    # One process without NCCL: GPU0 and GPU1 have peer access, GPU2 and GPU3 copy through host memory.
    pairs = [gpu(n, NVLINK, 7) for n in (0, 1)] + [gpu(n, (0.0, 0.0, 20.0, 20.0), 7) for n in (2, 3)]
    assert ways(node(pairs, [task(7, communicators=False)])) == [Way.UNKNOWN]
    # One of the seven peers of GPU0 and GPU1 is staged.
    staged, loads = (60.0, 60.0, 10.0, 14.0), (70.0, 70.0, 0.1, 4.0)
    assert ways(job(staged, staged, *[loads] * 6)) == [Way.UNKNOWN]


@pytest.mark.parametrize("network", [nic("mlx5_0", 20.0), nic("eth0", 5.0, rdma=False), nic("mlx5_0", None)])
def test_more_pcie_than_nic_traffic_does_not_pass(network: NicRates) -> None:
    leaving = (40.0, 40.0, 20.0, 20.0)
    assert ways(job(leaving, leaving, nics=[network])) == [Way.UNKNOWN]
    out = (40.0, 40.0, 20.0, 0.2)
    assert ways(job(out, out, nics=[network])) == [Way.UNKNOWN]


@pytest.mark.parametrize("rdma", [True, False])
def test_a_job_is_direct_if_nics_carry_all_pcie_traffic(rdma: bool) -> None:
    """PCIe counts headers too: 1.09 bytes per byte on the NIC."""
    nics = [nic(f"nic{n}", 20.0, rdma=rdma) for n in range(4)]
    leaving, near, far = (40.0, 40.0, 21.9, 21.9), (40.0, 40.0, 43.8, 43.8), (40.0, 40.0, 0.2, 0.2)
    assert ways(job(*[leaving] * 4, nics=nics)) == [Way.DIRECT]
    # NCCL sends data that leaves the node through the GPU near the NIC.
    assert ways(job(near, far, near, far, nics=nics)) == [Way.DIRECT]
    # A host-staged hop from GPU0 to GPU1 adds to it.
    staged_out, staged_into = (20.0, 40.0, 45.0, 21.9), (40.0, 20.0, 21.9, 45.0)
    assert ways(job(staged_out, staged_into, leaving, leaving, nics=nics)) == [Way.UNKNOWN]
    without_nvlink = (0.0, 0.0, 21.9, 21.9)
    assert Way.DIRECT not in ways(job(without_nvlink, leaving, leaving, leaving, nics=nics))


def test_too_little_nvlink_traffic_does_not_pass() -> None:
    few = (0.06, 0.06, 0.01, 0.01)
    assert ways(job(few, few)) == [Way.IDLE]
    assert ways(job(*[(0.01, 0.01, 0.01, 0.01)] * 8)) == [Way.IDLE]
    assert ways(job((0.3, 0.3, 0.4, 0.4), (0.3, 0.3, 0.4, 0.4))) == [Way.IDLE]
    assert ways(job((0.3, 0.3, 1.0, 1.0), (0.3, 0.3, 1.0, 1.0))) == [Way.UNKNOWN]
    assert ways(job((0.3, 0.3, 0.1, 9.0), (0.3, 0.3, 0.1, 9.0))) == [Way.LOADING]

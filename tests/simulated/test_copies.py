"""Copies on machines that do not exist."""

from itertools import permutations

import pytest

from gpubench.model.profiles.fault import parse_fault
from gpubench.model.terms.operation import Block, DataPattern, DataType, Engine, Place
from gpubench.ports.backend import Region
from gpubench.ports.copies import CopyStream, LinkBytes
from gpubench.simulated.links import NoCounters, SimulatedCopies
from gpubench.simulated.machine import parse_machine
from tests.fakes.copies import FakeCopies

SIZE = 2**28


def copies(name: str, *faults: str, seed: int = 0) -> SimulatedCopies:
    return SimulatedCopies(parse_machine(name), [parse_fault(fault) for fault in faults], seed)


def stream(machine: SimulatedCopies, source: Place, destination: Place, **changes: object) -> CopyStream:
    by = changes.pop("by", source if isinstance(source, int) else destination)
    engine = changes.pop("engine", Engine.CE)
    size = changes.pop("size_bytes", SIZE)
    return CopyStream(
        by,  # type: ignore[arg-type]
        engine,  # type: ignore[arg-type]
        Region(machine.allocate(source, SIZE), 0),
        Region(machine.allocate(destination, SIZE), 0),
        size,  # type: ignore[arg-type]
    )


def gb_s(machine: SimulatedCopies, *streams: CopyStream) -> float:
    return sum(each.size_bytes for each in streams) / machine.seconds(streams, 10) * 10 / 1e9


def enabled(name: str, *faults: str) -> SimulatedCopies:
    machine = copies(name, *faults)
    for source in range(len(machine.gpus)):
        for destination in range(len(machine.gpus)):
            if source != destination and machine.can_reach(source, destination):
                machine.enable(source, destination)
    return machine


@pytest.mark.parametrize(
    ("fault", "share"),
    [("gpu1:nvlink=9", 0.5), ("gpu1:speed=0.25", 0.25), ("link0-1:speed=0.5", 0.5), ("link0-1:staged=yes", 38 / 396)],
)
def test_faults_slow_a_pair_down(fault: str, share: float) -> None:
    machine, faulty = enabled("hgx-h200-4"), enabled("hgx-h200-4", fault)
    ratio = gb_s(faulty, stream(faulty, 0, 1)) / gb_s(machine, stream(machine, 0, 1))
    assert ratio == pytest.approx(share, rel=0.02)


@pytest.mark.parametrize("name", ["hgx-h100-8", "dgx-1-v100", "l40s-8", "hgx-a100-4"])
def test_a_slow_pair_leaves_the_other_pairs_of_its_ends_as_they_are(name: str) -> None:
    """`link2-5:speed=0.5` slowed every pair of GPU2 and of GPU5."""
    healthy, faulty = enabled(name), enabled(name, "link2-3:speed=0.5")
    for source, destination in permutations(range(len(healthy.gpus)), 2):
        before, now = (gb_s(machine, stream(machine, source, destination)) for machine in (healthy, faulty))
        share = 0.5 if {source, destination} == {2, 3} else 1.0
        assert now / before == pytest.approx(share, rel=2e-3), (source, destination)


def test_what_cuda_refuses_cannot_be_reached() -> None:
    machine = copies("rtx-4090-2")
    assert not machine.can_reach(0, 1)
    assert gb_s(machine, stream(machine, 0, 1)) > 0


def test_what_a_fault_corrupts_arrives_wrong_over_the_direct_path_alone() -> None:
    machine = copies("hgx-h200-4", "link0-1:corrupts=yes")
    memory = machine.allocate(1, 64)
    data, block = DataPattern(DataType.INT64, None, 2), Block(0, 1, 8, 0, 8)
    assert machine.corrupts
    assert memory.count_wrong(data, [(block, 0)]) == 0, "through host memory everything arrives"
    machine.enable(0, 1)
    machine.enable(2, 1)
    assert memory.count_wrong(data, [(block, 0)]) == 8
    assert memory.count_wrong(data, [(block, 2)]) == 0
    assert not copies("hgx-h200-4").corrupts


def test_simulated_memory_holds_nothing_and_says_so() -> None:
    machine = copies("hgx-h200-2")
    memory = machine.allocate(0, 64)
    data, block = DataPattern(DataType.INT64, None, 2), Block(0, 1, 8, 0, 8)
    memory.fill_sent(data, block, 0)
    memory.fill_byte(64, 1)
    with pytest.raises(NotImplementedError, match="contains no data"):
        memory.count_wrong(data, [(block, 0)])
    with pytest.raises(NotImplementedError, match="contains no data"):
        memory.array(0, 8, "int64")
    assert NoCounters().read(0) == LinkBytes()
    machine.close()
    real = FakeCopies(2).allocate(0, 64)
    with pytest.raises(TypeError, match="simulated memory at both ends"):
        machine.seconds([CopyStream(0, Engine.CE, Region(real, 0), Region(memory, 0), 64)], 1)

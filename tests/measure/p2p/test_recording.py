"""Recording and replay of copies."""

import pytest
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.measure.p2p.request import (
    VERSION,
    Bench,
    Copy,
    HostCopy,
    Method,
    P2pRequest,
    PairCopy,
    RecordedCopy,
    RecordedP2p,
    RecordingBench,
    ReplayedBench,
    read_samples,
)
from gpubench.model.facts.traffic import IdleGpu, LinkRates
from gpubench.model.paths.p2p import Cell, Series
from gpubench.model.terms.operation import CopyGpu, Direction, Engine, HostMemory
from gpubench.model.terms.verdict import Origin
from gpubench.readers.documents import json_line

HOST = HostCopy(HostMemory.PINNED, 0, to_gpu=True)
PAIR = PairCopy(Series(Engine.CE, Direction.WRITE, peer=True, size_bytes=64), (1, 0))
REQUEST = P2pRequest(
    pairs=((0, 1), (1, 0)),
    series=(PAIR.series,),
    host_bytes=64,
    patterns=(),
    pattern_bytes=64,
    method=Method(),
    check=True,
)
RECORDED = RecordedP2p(
    schema_version=VERSION,
    origin=Origin.MEASURED,
    request=REQUEST,
    hosts=("node0",),
    gpus=tuple(CopyGpu(f"GPU{gpu}", gpu, "", "", "") for gpu in range(2)),
)


def replayed(*samples: tuple[object, Cell]) -> ReplayedBench:
    return ReplayedBench(RECORDED, [RecordedCopy(str(of), cell) for of, cell in samples])


def measured(bench: Bench, copy: Copy) -> Cell:
    (cell,) = bench.measure([copy])
    return cell


def test_recorded_samples_are_replayed_in_order() -> None:
    original = replayed(
        (PAIR, Cell((1.0,))), (PAIR, Cell((1.0, 2.0))), (HOST, Cell((3.0,))), ("enable 0-1", Cell(error="no"))
    )
    written: list[RecordedCopy] = []
    recording = RecordingBench(original, written.append)  # type: ignore[arg-type]

    def everything(bench: Bench) -> list[object]:
        first = measured(bench, PAIR)
        return [bench.enable_peer_access(), first, bench.measure_again(PAIR, first), measured(bench, HOST)]

    assert everything(recording) == [{(0, 1): "no"}, Cell((1.0,)), Cell((1.0, 2.0)), Cell((3.0,))]
    assert [each.of for each in written] == [
        "ce write 64 1-0",
        "enable 0-1",
        "ce write 64 1-0",
        "pinned host memory to 0",
    ]
    assert everything(ReplayedBench(RECORDED, written)) == [
        {(0, 1): "no"},
        Cell((1.0,)),
        Cell((1.0, 2.0)),
        Cell((3.0,)),
    ]


def test_idle_gpus_before_and_after_copies_are_replayed() -> None:
    busy, idle = IdleGpu(rates=LinkRates(nvlink_sent=371.0)), IdleGpu()
    samples = [RecordedCopy("idle GPUs", Cell(), each) for each in ((idle, idle), (busy, idle))]
    written: list[RecordedCopy] = []
    recording = RecordingBench(ReplayedBench(RECORDED, samples), written.append)  # type: ignore[arg-type]
    assert [recording.look_while_idle() for _ in range(3)] == [(idle, idle), (busy, idle), ()]
    lines = [(json_line(each), "") for each in (RECORDED, *written)]
    again = ReplayedBench(*read_samples(lines, "recorded"))
    assert [again.look_while_idle() for _ in range(3)] == [(idle, idle), (busy, idle), ()]
    with pytest.raises(UsageError, match="1 idle GPUs"):
        read_samples([*lines, (json_line(RecordedCopy("idle GPUs", Cell(), (idle,))), "")], "recorded")


def test_a_copy_without_another_sample_keeps_its_cell() -> None:
    bench = replayed((HOST, Cell((1.0,))))
    first = measured(bench, HOST)
    assert bench.measure_again(HOST, first) is first


def test_a_missing_sample_is_an_error() -> None:
    assert measured(replayed(), HOST).error == "not recorded: the run was cut short"


def test_older_recordings_of_host_memory_are_extended() -> None:
    bench = replayed((HOST, Cell((1.0,), 0)), (HOST, Cell((2.0,), 1)), (HOST, replace(Cell((9.0,)), error="gone")))
    first = measured(bench, HOST)
    second = bench.measure_again(HOST, first)
    assert second == Cell((1.0, 2.0), 1)
    assert bench.measure_again(HOST, second).error == "gone"

"""What is made of measured copies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.model.paths.p2p import (
    Carried,
    Cell,
    Pair,
    Series,
    find_oddities,
    looks_staged,
    pairing_rounds,
    parse_pairs,
    upper_quartile,
)
from gpubench.model.terms.operation import Direction, Engine


def matrix(gpus: int, slow: dict[Pair, float]) -> dict[Pair, float]:
    return {(a, b): 400.0 * slow.get((a, b), 1.0) for a in range(gpus) for b in range(gpus) if a != b}


@pytest.mark.parametrize(
    ("carried", "staged"),
    [
        (Carried(), None),
        (Carried(nvlink_share=1.0), False),
        (Carried(nvlink_share=0.0), True),
        (Carried(nvlink_share=0.0, pcie_share=0.0), True),
        (Carried(pcie_share=0.0), False),
        (Carried(pcie_share=1.09), None),
        (Carried(nvlink_share=0.5), False),
        (Carried(pcie_share=0.1), None),
        (Carried(nvlink_bytes=0, pcie_bytes=0), None),
    ],
)
def test_what_counters_say_of_staging(carried: Carried, staged: bool | None) -> None:
    assert Cell(carried=carried).is_staged is staged


@given(st.lists(st.floats(min_value=1, max_value=1000), min_size=1, max_size=56))
def test_what_is_usual_lies_among_the_figures(figures: list[float]) -> None:
    assert min(figures) <= upper_quartile(figures) <= max(figures)


@pytest.mark.parametrize("gpus", [3, 4, 8])
@pytest.mark.parametrize("role", ["both ways", "sending", "receiving"])
def test_a_bad_gpu_colours_a_row_or_a_column_or_both(gpus: int, role: str) -> None:
    bad = gpus - 2
    slow = {
        (a, b): 0.5
        for a in range(gpus)
        for b in range(gpus)
        if a != b and ((a == bad and role != "receiving") or (b == bad and role != "sending"))
    }
    (oddity,) = find_oddities(matrix(gpus, slow), gpus)
    assert (oddity.role, oddity.gpus, oddity.figure, oddity.usual) == (role, (bad,), 200, 400)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_rounds_have_every_pair_once_and_nobody_twice(ranks: int) -> None:
    played = pairing_rounds(ranks)
    assert len(played) == ranks - 1 + ranks % 2
    pairs = [pair for each in played for pair in each]
    assert sorted(pairs) == [(one, other) for one in range(ranks) for other in range(one + 1, ranks)]
    assert all(len({rank for pair in each for rank in pair}) == 2 * len(each) for each in played)


@given(st.integers(3, 8), st.data())
def test_every_slow_cell_is_explained(gpus: int, data: st.DataObject) -> None:
    pairs = list(matrix(gpus, {}))
    chosen = data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=len(pairs) // 5))
    found = find_oddities(matrix(gpus, dict.fromkeys(chosen, 0.5)), gpus)
    for pair in chosen:
        assert any(
            (each.role == "pair" and each.gpus == pair)
            or (each.role != "receiving" and each.gpus == pair[:1])
            or (each.role != "sending" and each.gpus == pair[1:])
            for each in found
        )


@pytest.mark.parametrize("outruns_host", [True, False])
def test_staging_shows_in_bandwidth_and_latency(outruns_host: bool) -> None:
    def looks(on: Cell, off: Cell, soon: Cell | None, late: Cell | None) -> bool:
        return looks_staged(on, off, soon, late, outruns_host=outruns_host)

    slow, fast = Cell(seconds=(10.0,)), Cell(seconds=(1.0,))
    late, soon = Cell(seconds=(15e-6,)), Cell(seconds=(2e-6,))
    assert looks(slow, slow, late, late)
    assert not looks(slow, slow, soon, late)
    assert not looks(fast, slow, late, late)
    assert not looks(Cell(error="x"), slow, late, late)
    assert not looks(slow, Cell(error="x"), late, late)
    assert looks(Cell(seconds=(1.0,)), Cell(seconds=(1.15,)), late, late)
    assert not looks(slow, slow, Cell(seconds=(1e-6,)), Cell(seconds=(2e-6,)))
    for unknown in (None, Cell(), Cell(error="x")):
        assert looks(slow, slow, unknown, late) == looks(slow, slow, late, unknown) == outruns_host


def test_pairs_are_parsed() -> None:
    assert parse_pairs(["0-1, 3-5", "0-1"]) == ((0, 1), (3, 5))
    for bad in ("0", "0-0", "a-b", "0-1-2", "-1-2", ""):
        with pytest.raises(ValueError, match=f"^{bad}$"):
            parse_pairs([bad])


def test_series_name_what_they_compare_with() -> None:
    assert Series(Engine.CE, Direction.BOTH, peer=True, size_bytes=1).quantity == "p2p.bidirectional_gb_s"
    assert Series(Engine.SM, Direction.WRITE, peer=True, size_bytes=1).quantity == "p2p.sm_write_gb_s"
    assert Series(Engine.SM, Direction.READ, peer=True, size_bytes=1).quantity is None
    assert Series(Engine.CE, Direction.WRITE, peer=False, size_bytes=1).quantity == "p2p.staged_gb_s"
    assert Series(Engine.CE, Direction.READ, peer=False, size_bytes=1).quantity is None


@pytest.mark.parametrize(
    ("before", "later", "together"), [(0, 0, 0), (2, 0, 2), (0, 3, 3), (1, 1, 2), (None, None, None)]
)
def test_a_copy_that_is_measured_again_keeps_its_samples_and_its_wrong_data(
    before: int | None, later: int | None, together: int | None
) -> None:
    again = Cell((1.0, 2.0), before).extended(Cell((3.0,), later, Carried(nvlink_bytes=7)))
    assert again == Cell((1.0, 2.0, 3.0), together, Carried(nvlink_bytes=7))

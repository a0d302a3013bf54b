from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.model.facts.snapshot import GpuFacts, NvLink, NvlinkPeer, PcieLink
from gpubench.model.paths.topology import (
    active_links,
    describe_pcie,
    leads_to_switches,
    nvlink_gb_s,
    pcie_gb_s,
)


@pytest.mark.parametrize(
    ("generation", "lane", "x8", "x16"),
    [
        (1, 0.250, 2.0, 4.0),
        (2, 0.500, 4.0, 8.0),
        (3, 0.985, 7.88, 15.75),
        (4, 1.969, 15.75, 31.5),
        (5, 3.938, 31.5, 63.0),
        (6, 7.56, 60.5, 121.0),
    ],
)
def test_pcie_figures_are_those_of_the_specification(generation: int, lane: float, x8: float, x16: float) -> None:
    assert pcie_gb_s(generation, 1) == pytest.approx(lane, abs=0.0006 if generation < 6 else 0.003)
    assert pcie_gb_s(generation, 8) == pytest.approx(x8, rel=0.001)
    assert pcie_gb_s(generation, 16) == pytest.approx(x16, rel=0.001)


@pytest.mark.parametrize(("generation", "width"), [(None, 16), (5, None), (0, 16), (5, 0), (7, 16), (None, None)])
def test_a_hidden_pcie_link_has_no_figure(generation: int | None, width: int | None) -> None:
    assert pcie_gb_s(generation, width) is None


@pytest.mark.parametrize(
    ("peers", "switched"),
    [
        ([], None),
        ([None], None),
        ([NvlinkPeer.CPU], None),
        ([NvlinkPeer.GPU, None], False),
        ([NvlinkPeer.GPU, NvlinkPeer.SWITCH], True),
    ],
)
def test_where_nvlinks_lead(peers: list[NvlinkPeer | None], switched: bool | None) -> None:
    held = tuple(NvLink(number=i, peer=peer) for i, peer in enumerate(peers))
    assert leads_to_switches([GpuFacts(index=0), GpuFacts(index=1, nvlinks=held)]) is switched


@pytest.mark.parametrize(("links", "count"), [(None, None), ((), 0), ((True, False, True), 2), ((True, None), None)])
def test_active_links_are_counted_where_all_states_are_known(links: Any, count: int | None) -> None:
    held = None if links is None else tuple(NvLink(number=i, active=state) for i, state in enumerate(links))
    assert active_links(GpuFacts(index=0, nvlinks=held)) == count


@pytest.mark.parametrize(
    ("version", "raw_gb_s", "usable"),
    [
        ("1.0", 20.0, 20.0),
        ("2.0", 25.781, 25.0),
        ("2.2", 25.781, 25.0),
        ("3.0", 25.0, 25.0),
        ("3.1", 14.0625, 14.0625),
        ("3.1", 14.062, 14.0625),
        ("4.0", 26.562, 25.0),
        ("5.0", 53.125, 50.0),
    ],
)
def test_line_rates_become_what_is_usable(version: str, raw_gb_s: float, usable: float) -> None:
    assert nvlink_gb_s(NvLink(number=0, version=version, raw_gb_s=raw_gb_s)) == usable


@pytest.mark.parametrize(
    ("version", "usable"),
    [("1.0", 20.0), ("2.0", 25.0), ("2.2", 25.0), ("4.0", 25.0), ("5.0", 50.0), ("3.0", None), ("6.0", None)],
)
def test_without_a_line_rate_the_version_tells_or_nothing_does(version: str, usable: float | None) -> None:
    assert nvlink_gb_s(NvLink(number=0, version=version)) == usable
    assert nvlink_gb_s(NvLink(number=0, version=version, raw_gb_s=0.0)) == usable
    assert nvlink_gb_s(NvLink(number=0)) is None


def test_a_line_rate_that_fits_nothing_leaves_it_to_the_version() -> None:
    assert nvlink_gb_s(NvLink(number=0, version="5.0", raw_gb_s=40.0)) == 50.0
    assert nvlink_gb_s(NvLink(number=0, version="3.0", raw_gb_s=40.0)) is None


@given(st.floats(min_value=1e-3, max_value=1e3), st.sampled_from([None, "3.0", "3.1"]))
def test_usable_is_never_above_the_line_rate_but_for_its_rounding(raw_gb_s: float, version: str | None) -> None:
    usable = nvlink_gb_s(NvLink(number=0, version=version, raw_gb_s=raw_gb_s))
    assert usable is None or usable * 0.9995 < raw_gb_s < usable * 1.07


@given(st.integers(1, 6), st.sampled_from([1, 2, 4, 8, 16]))
def test_pcie_doubles_with_width_and_rises_with_generation(generation: int, width: int) -> None:
    one, two = pcie_gb_s(generation, width), pcie_gb_s(generation, width * 2)
    assert one is not None
    assert two == pytest.approx(2 * one)
    slower = pcie_gb_s(generation - 1, width)
    assert slower is None or slower < one


@pytest.mark.parametrize(
    ("link", "idle", "text"),
    [
        (PcieLink(), None, None),
        (PcieLink(generation=4), None, None),
        (PcieLink(width=4), None, None),
        (PcieLink(max_generation=4), None, None),
        (PcieLink(max_generation=4, max_width=16), None, "at most 4 x16"),
        (PcieLink(width=16, max_generation=4, max_width=16), True, "at most 4 x16"),
        (PcieLink(generation=4, width=16), None, "4 x16"),
        (PcieLink(generation=4, width=16, max_generation=4, max_width=16), True, "4 x16"),
        (PcieLink(generation=1, width=16, max_generation=5, max_width=16), True, "1 x16 (idle; 5 x16)"),
        (PcieLink(generation=1, width=16, max_generation=5), True, "1 x16 (idle; 5 x16)"),
        (PcieLink(generation=1, width=16, max_generation=5, max_width=16), False, "1 x16 of 5 x16"),
        (PcieLink(generation=1, width=16, max_generation=5, max_width=16), None, "1 x16 of 5 x16"),
        (PcieLink(generation=5, width=8, max_generation=5, max_width=16), True, "5 x8 of 5 x16"),
    ],
)
def test_a_link_in_words(link: PcieLink, idle: bool | None, text: str | None) -> None:
    assert describe_pcie(link, idle=idle) == text

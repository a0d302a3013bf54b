"""Verdicts on rows of copies: one line per kind of copy, with what it is compared with."""

from itertools import permutations
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.model.facts.snapshot import GpuFacts, NvlinkPeer
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.copies import WRONG, CopyJudge, describe_slowness, is_slow_copy, judge_pattern
from gpubench.model.profiles.profile import Profile
from gpubench.model.results.report import SIBLINGS, PairRow, PatternRow
from gpubench.model.terms.operation import CopyPattern
from gpubench.model.terms.verdict import Verdict
from gpubench.profiles import load
from gpubench.simulated.node import healthy_node
from tests.fakes.measured_rows import pair

NODE = healthy_node(load("hgx-h100-8"))
GEN4 = 31.5
PAIRS = tuple(permutations(range(8), 2))


def rows(gb_s: float, slow: dict[tuple[int, int], float] | None = None, **changes: Any) -> list[PairRow]:
    """A copy of every pair of eight GPUs, with other bandwidths of some."""
    return [pair(NODE, *ends, (slow or {}).get(ends, gb_s), **changes) for ends in PAIRS]


def small(time_us: float, gb_s: float | None = None, size_bytes: int = 16, **changes: Any) -> PairRow:
    reached = gb_s or size_bytes / time_us / 1000
    return pair(NODE, 0, 1, reached, size_bytes=size_bytes, latency_us=time_us, **changes)


def verdict(row: PairRow, profile: Profile | None = None, *siblings: PairRow) -> str | None:
    return CopyJudge(profile).judge([row, *siblings])[0].verdict


@pytest.mark.parametrize(
    ("gb_s", "path", "limit", "verdict"),
    [
        (26.4, "PIX", GEN4, Verdict.PASS),
        (25.5, "PHB", GEN4, Verdict.PASS),
        (22.5, "NODE", GEN4, Verdict.PASS),
        (17.3, "NODE", GEN4, Verdict.PASS),
        (19.5, "SYS", GEN4, Verdict.PASS),
        (17.5, "SYS", GEN4, Verdict.PASS),
        (12.0, "SYS", GEN4, Verdict.PASS),
        (12.0, "SYS", 63.0, Verdict.PASS),
        (3.0, "SYS", GEN4, Verdict.FAIL),
        (13.2, "PIX", GEN4, Verdict.FAIL),
        (12.75, "PHB", GEN4, Verdict.WARN),
        (9.0, "NODE", GEN4, Verdict.FAIL),
    ],
)
@pytest.mark.parametrize("direction", ["write", "read"])
def test_without_a_profile_every_path_has_its_own_share_of_the_limit(
    gb_s: float, path: str, limit: float, verdict: Verdict, direction: str
) -> None:
    copies = rows(gb_s, path_class=path, limit_gb_s=limit, direction=direction)
    assert {row.verdict for row in CopyJudge(load("generic-pcie")).judge(copies)} == {verdict}


def test_paths_of_one_machine_are_not_compared_with_each_other() -> None:
    reached = {"PIX": 26.4, "PHB": 25.5, "NODE": 22.5, "SYS": 12.0}
    paths = [
        ("SYS" if (one < 4) != (other < 4) else "PIX" if one // 2 == other // 2 else "NODE") for one, other in PAIRS
    ]
    copies = [
        pair(NODE, *ends, reached[path], path_class=path, limit_gb_s=GEN4)
        for ends, path in zip(PAIRS, paths, strict=True)
    ]
    judge = CopyJudge(load("generic-pcie"))
    assert {row.verdict for row in judge.judge(copies)} == {Verdict.PASS}
    slow = replace(copies[6], bandwidth_gb_s=6.0)
    assert [row.verdict for row in judge.judge([*copies[:6], slow, *copies[7:]])].count(Verdict.FAIL) == 1


@pytest.mark.parametrize(
    ("gb_s", "profile", "verdict", "source"),
    [
        (396.0, "hgx-h200-8", Verdict.PASS, "profile hgx-h200-8"),
        (350.0, "hgx-h200-8", Verdict.WARN, "profile hgx-h200-8"),
        (200.0, "hgx-h200-8", Verdict.FAIL, "profile hgx-h200-8"),
        (390.0, None, Verdict.PASS, SIBLINGS),
        (260.0, None, Verdict.WARN, "60% of the limit"),
        (100.0, None, Verdict.FAIL, "60% of the limit"),
    ],
)
def test_what_is_slow_on_all_siblings_is_seen_if_a_profile_or_a_limit_is_known(
    gb_s: float, profile: str | None, verdict: Verdict, source: str
) -> None:
    judged = CopyJudge(None if profile is None else load(profile)).judge(rows(gb_s))
    assert {(row.verdict, row.expected_source) for row in judged} == {(verdict, source)}


@pytest.mark.parametrize(
    ("gb_s", "verdict"), [(396.0, "PASS"), (360.0, "PASS"), (355.0, "WARN"), (301.0, "WARN"), (290.0, "FAIL")]
)
def test_a_pair_is_compared_with_its_siblings(gb_s: float, verdict: str) -> None:
    judged = CopyJudge().judge(rows(396.0, {(0, 1): gb_s}))
    assert [row.verdict for row in judged] == [verdict, *["PASS"] * 55]


def test_a_gpu_that_lost_links_is_compared_with_intact_gpus() -> None:
    lost = tuple(replace(link, active=number < 12) for number, link in enumerate(NODE.gpus[5].nvlinks or ()))
    node = replace(NODE, gpus=tuple(replace(gpu, nvlinks=lost) if gpu.index == 5 else gpu for gpu in NODE.gpus))
    topology = Topology(node)
    copies = [
        pair(node, *ends, 250.0 if 5 in ends else 375.0, path_class=topology.matrix[f"GPU{ends[0]}"][f"GPU{ends[1]}"])
        for ends in PAIRS
    ]
    assert {row.path_class for row in copies} == {"NV12", "NV18"}
    judged = CopyJudge(nodes={node.host: topology}).judge(copies)
    assert [row.verdict for row in judged] == ["FAIL" if 5 in ends else "PASS" for ends in PAIRS]


def test_bridges_of_different_widths_are_not_compared_with_each_other() -> None:
    """Without NVSwitches, a pair with fewer NVLinks than another is no fault."""

    def bridged(gpu: GpuFacts) -> GpuFacts:
        peer, count = NODE.gpus[gpu.index ^ 1].bus_id, 12 if gpu.index < 2 else 4
        links = (gpu.nvlinks or ())[:count]
        return replace(
            gpu, nvlinks=tuple(replace(link, peer=NvlinkPeer.GPU, peer_bus_id=peer, active=True) for link in links)
        )

    node = replace(NODE, gpus=tuple(bridged(gpu) for gpu in NODE.gpus[:4]), pairs=())
    topology = Topology(node)
    ends = [(0, 1), (1, 0), (2, 3), (3, 2)]
    paths = [topology.matrix[f"GPU{one}"][f"GPU{other}"] for one, other in ends]
    assert paths == ["NV12", "NV12", "NV4", "NV4"]
    copies = [
        pair(node, *pair_, 250.0 if 0 in pair_ else 84.0, path_class=path, limit_gb_s=None)
        for pair_, path in zip(ends, paths, strict=True)
    ]
    judged = CopyJudge(nodes={node.host: topology}).judge(copies)
    assert {row.verdict for row in judged} <= {"PASS", "SKIP"}


@pytest.mark.parametrize(
    ("engine", "direction", "healthy", "slow"),
    [("ce", "read", 370.0, 190.0), ("sm", "write", 330.0, 190.0), ("ce", "both", 740.0, 380.0)],
)
def test_what_no_profile_knows_is_compared_with_the_writes_of_the_pair(
    engine: str, direction: str, healthy: float, slow: float
) -> None:
    writes, judge = rows(376.0), CopyJudge(load("hgx-h100-8"))
    limit = 900.0 if direction == "both" else 450.0
    for gb_s, expected in ((healthy, Verdict.PASS), (slow, Verdict.FAIL)):
        copies = rows(gb_s, engine=engine, direction=direction, limit_gb_s=limit)
        assert {row.verdict for row in judge.judge(copies, writes)} == {expected}


@pytest.mark.parametrize(
    ("size", "time_us", "profile", "verdict"),
    [
        (16, 2.2, "hgx-h200-8", "PASS"),
        (16, 3.5, "hgx-h200-8", "PASS"),
        (16, 4.6, "hgx-h200-8", "WARN"),
        (16, 22.0, "hgx-h200-8", "FAIL"),
        (2**20, 4.95, "hgx-h200-8", "PASS"),
        (2**20, 15.0, "hgx-h200-8", "FAIL"),
        (2**24, 44.5, "hgx-h200-8", "PASS"),
        (2**24, 133.0, "hgx-h200-8", "FAIL"),
        (16, 2.5, "hgx-h100-8", None),
        (16, 6.0, "hgx-h100-8", "WARN"),
        (16, 20.0, "hgx-h100-8", "FAIL"),
    ],
)
def test_a_small_copy_is_judged_by_its_time(size: int, time_us: float, profile: str, verdict: str | None) -> None:
    (row,) = CopyJudge(load(profile)).judge([small(time_us, size_bytes=size)])
    assert row.verdict == verdict


def host(gpu: int, gb_s: float, memory: str = "pinned", **changes: Any) -> PairRow:
    note = f"{memory} host memory"
    copied = pair(NODE, gpu, gpu, gb_s, peer=None, size_bytes=2**26, note=note, limit_gb_s=63.0, path_class=None)
    return replace(copied, destination="host", destination_bus_id=None, **changes)


@pytest.mark.parametrize(
    ("memory", "gb_s", "ci", "verdict"),
    [
        ("pinned", 49.0, None, "PASS"),
        ("pinned", 46.0, None, "PASS"),
        ("pinned", 41.0, None, "WARN"),
        ("pinned", 41.0, 8.0, "PASS"),
        ("pinned", 27.0, None, "FAIL"),
        ("pinned", 54.0, 120.0, "INCONCLUSIVE"),
        ("pageable", 40.0, None, "PASS"),
        ("pageable", 18.0, None, "FAIL"),
    ],
)
def test_copies_with_host_memory_vary_by_ten_percent(memory: str, gb_s: float, ci: float | None, verdict: str) -> None:
    copies = [host(0, gb_s, memory, ci95_percent=ci), *(host(gpu, 54.0, memory) for gpu in range(1, 8))]
    judged = CopyJudge(None, {NODE.host: Topology(NODE)}).judge(copies)
    assert [row.verdict for row in judged] == [verdict, *["PASS"] * 7]


@pytest.mark.parametrize(
    ("share", "ci", "verdict"),
    [
        (0.89, 0.5, "WARN"),
        (0.89, 4.0, "PASS"),
        (0.8, 15.0, "INCONCLUSIVE"),
        (0.7, 40.0, "INCONCLUSIVE"),
        (0.5, 10.0, "FAIL"),
        (1.0, 416.0, "INCONCLUSIVE"),
    ],
)
def test_a_figure_within_its_scatter_is_no_alarm(share: float, ci: float, verdict: str) -> None:
    slow = pair(NODE, 0, 1, 396.0 * share, ci95_percent=ci)
    judged = CopyJudge().judge([slow, *rows(396.0)[1:]])[0]
    assert judged.verdict == verdict
    if verdict == "FAIL":
        assert describe_slowness(judged) == f"198 GB/s (±10%), 50% of 396 ({SIBLINGS})"


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"verdict": "SKIP"}, "SKIP"),
        ({"verdict": "ERROR"}, "ERROR"),
        ({"verdict": "FAIL", "note": f"3 {WRONG}"}, "FAIL"),
        ({"engine": "prefetch"}, None),
        ({"peer": "off"}, None),
        ({"peer": "off", "verdict": "PASS", "limit_gb_s": None}, "SKIP"),
        ({"host_staged": True, "bandwidth_gb_s": 396.0}, "FAIL"),
        ({"scope": "network", "size_bytes": 16, "latency_us": 1e4}, None),
        ({"limit_gb_s": None, "path_class": "?"}, "SKIP"),
    ],
)
def test_rows_that_say_nothing_of_their_speed_keep_their_verdict(changes: dict[str, Any], verdict: str | None) -> None:
    (judged,) = CopyJudge().judge([pair(NODE, 0, 1, 10.0, **changes)])
    assert judged.verdict == verdict
    assert is_slow_copy(judged) == (bool(judged.host_staged))


def test_the_past_judges_where_nothing_else_does() -> None:
    judge = CopyJudge(past=lambda _: (400.0, "this machine's past"))
    assert [row.verdict for row in judge.judge([pair(NODE, 0, 1, 200.0)])] == [Verdict.FAIL]
    assert [row.expected_source for row in judge.judge([pair(NODE, 0, 1, 390.0)])] == ["this machine's past"]


@pytest.mark.parametrize(
    ("share", "ci", "wrong", "verdict"),
    [
        (1.0, None, 0, "PASS"),
        (1 / 1.2, None, 0, "WARN"),
        (0.5, None, 0, "FAIL"),
        (0.5, None, 3, None),
        (0.84, 5.0, 0, "INCONCLUSIVE"),
    ],
)
def test_a_pattern_is_compared_with_its_pairs_alone(
    share: float, ci: float | None, wrong: int, verdict: str | None
) -> None:
    row = PatternRow(
        pattern=CopyPattern.RING,
        direction="write",
        gpus=8,
        pairs=8,
        size_bytes=2**28,
        total_gb_s=3000.0 * share,
        parts_gb_s=3000.0,
        share_percent=100 * share,
        wrong=wrong,
        origin="measured",
        note=None,
        expected_gb_s=3000.0,
        ci95_percent=ci,
    )
    assert judge_pattern(row).verdict == verdict


@pytest.mark.parametrize(
    ("times", "verdict"), [(1.0, Verdict.PASS), (1.4, Verdict.PASS), (1.6, Verdict.SKIP), (0.5, Verdict.FAIL)]
)
def test_a_copy_far_above_what_its_profile_expects_is_not_judged(times: float, verdict: Verdict) -> None:
    copy = pair(NODE, 0, 1, times * 53.0, path_class="PIX", limit_gb_s=90.0)
    (row,) = CopyJudge(load("rtx-pro-6000-8")).judge([copy])
    assert row.verdict == verdict
    if verdict is Verdict.SKIP:
        assert row.note == "speed not judged: 1.6 times what profile rtx-pro-6000-8 expects"

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench import profiles
from gpubench.errors import UsageError
from gpubench.jobs.compare import learned
from gpubench.model.paths.p2p import JUDGED_FROM_BYTES
from gpubench.model.profiles.learning import (
    LearningKey,
    LearningSample,
    collect_samples,
    format_toml,
    learn,
    split_outliers,
)
from gpubench.model.results.report import CollectiveRow, PairRow
from gpubench.model.results.result_file import FileCircumstances, ResultFile
from gpubench.model.terms.plain import to_plain
from gpubench.readers.documents import json_line
from tests.conditions.test_checks import HEALTHY
from tests.fakes.measured_rows import pair, row

KEY = LearningKey("p2p.write_gb_s", 8)


def samples(*values: float) -> list[LearningSample]:
    return [LearningSample(KEY, value, f"GPU{number}", "a.json") for number, value in enumerate(values)]


@given(st.lists(st.floats(1.0, 1000.0), min_size=1, max_size=30))
def test_half_of_all_values_at_least_are_never_outliers(values: list[float]) -> None:
    kept, odd = split_outliers(samples(*values))
    assert len(kept) + len(odd) == len(values)
    assert 2 * len(kept) >= len(values)


PLAIN = st.recursive(
    st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(-1e6, 1e6)
    | st.text(st.characters(codec="ascii", exclude_categories=["Cc"])),
    lambda inner: (
        st.lists(st.integers(), max_size=3) | st.dictionaries(st.text("abc-_ ", min_size=1), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text("abc-_ ", min_size=1), PLAIN, max_size=4))
def test_what_is_written_is_what_is_read(plain: dict[str, Any]) -> None:
    assert tomllib.loads(format_toml(plain)) == plain


@pytest.mark.parametrize("name", profiles.profile_names())
def test_every_profile_can_be_written_again(name: str) -> None:
    profile = profiles.load(name)
    plain = {key: value for key, value in to_plain(profile).items() if key != "sha256"}
    again = profiles.read_profile(format_toml(plain).encode(), name)
    assert again.all_expected == profile.all_expected
    assert again.gpu == profile.gpu


def result(folder: Path, name: str, **changes: Any) -> Path:
    import json

    made = json.loads(json_line(row(2**28, 1357.0, 346.0)))
    full = dict.fromkeys(type(row(1, 1.0, 1.0)).columns()) | made
    ranks = [{"rank": n, "node": 0, "gpu": "NVIDIA H200"} for n in range(8)]
    metadata = {
        "gpubench_version": "0.1.0",
        "subject": "allreduce",
        "hosts": ["n1"],
        "environment": {},
        "topology": None,
        "profile": None,
        "started_at": "2026-11-20T17:00:00",
        "origin": "measured",
        "ranks": ranks,
        "libraries": {"NCCL": "2.28.9 from x"},
        "options": {},
    }
    document = {"schema_version": 1, "complete": True, "verdict": "PASS", "metadata": metadata, "rows": [full]}
    path = folder / name
    if "origin" in changes:
        changes = {"metadata": metadata | changes}
    path.write_text(json.dumps(document | changes))
    return path


def test_a_profile_is_learned_from_results(tmp_path: Path) -> None:
    text, notes = learned(
        [result(tmp_path, "a.json"), result(tmp_path, "b.json")], name="ours", like=None, environment={}
    )
    profile = profiles.read_profile(text.encode(), "ours.toml")
    assert (profile.name, profile.match.visible, profile.gpu.name) == ("ours", 8, "NVIDIA H200")
    (value,) = profile.expected
    assert (value.quantity, value.value, value.size_bytes, value.nccl) == (
        "allreduce.busbw_gb_s",
        346.0,
        2**28,
        "2.28.9",
    )
    assert notes == ["2 measurements from 2 results became 1 value"]


def test_a_figure_that_no_profile_may_have_is_left_out_and_told(tmp_path: Path) -> None:
    odd = result(tmp_path, "a.json")
    text = odd.read_text().replace('"busbw_gb_s": 346.0', '"busbw_gb_s": 81.4')
    odd.write_text(text)
    with pytest.raises(UsageError, match="all values in the results are implausible"):
        learned([odd], name="ours", like="hgx-h200-8", environment={})
    large = odd.read_text().replace("81.4", "346.0").replace("268435456", "1073741824")
    (tmp_path / "b.json").write_text(large)
    profile, notes = learned([odd, tmp_path / "b.json"], name="ours", like="hgx-h200-8", environment={})
    assert [each["value"] for each in tomllib.loads(profile)["expected"]] == [346.0]
    assert "81.4 GB/s, but expected at least 180 GB/s" in notes[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 2}, "has schema version 2"),
        ({"complete": False}, "was cut short"),
        ({"verdict": "FAIL"}, "ended with FAIL"),
        ({"origin": "simulated"}, "was simulated"),
        ({"metadata": None}, "has no metadata"),
        ({"rows": [{"collective": "allreduce"}]}, r"rows\[0\] has no field"),
        ({"rows": []}, "have no values"),
    ],
)
def test_what_is_no_result_of_a_healthy_machine_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        learned([result(tmp_path, "a.json", **changes)], name="ours", like=None, environment={})


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        learned([tmp_path / "none.json"], name="ours", like=None, environment={})
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="is not the start of a file"):
        learned([tmp_path / "rows.csv"], name="ours", like=None, environment={})
    text = Path("tests/results/h200x4/all_reduce.txt")
    with pytest.raises(UsageError, match="does not show whether the machine was healthy"):
        learned([text], name="ours", like=None, environment={})


def test_a_copy_without_peer_access_is_another_quantity() -> None:
    pairs = (pair(HEALTHY, 0, 1, 395.0), pair(HEALTHY, 1, 0, 37.0, peer="off"))
    found = collect_samples(
        ResultFile(name="a.json", kind="made", circumstances=FileCircumstances(tool=""), pairs=pairs)
    )
    assert [(each.key.quantity, each.value) for each in found] == [("p2p.write_gb_s", 395.0), ("p2p.staged_gb_s", 37.0)]


def quantities(*rows: PairRow | CollectiveRow) -> list[tuple[str, float, str | None]]:
    """The quantity, value and path of every sample of a result with these rows."""
    found = collect_samples(
        ResultFile(
            name="a.json",
            kind="made",
            circumstances=FileCircumstances(tool=""),
            rows=tuple(each for each in rows if isinstance(each, CollectiveRow)),
            pairs=tuple(each for each in rows if isinstance(each, PairRow)),
        )
    )
    return [(each.key.quantity, each.value, each.key.path) for each in found]


@pytest.mark.parametrize(
    ("changes", "is_learned"),
    [
        ({"ranks": 2}, True),
        ({"ranks": 1}, False),
        ({"nodes": 2}, True),
        ({"nodes": 3}, False),
        ({"placement": "in_place"}, False),
        ({"backend": "host"}, False),
    ],
)
def test_a_row_is_learned_of_gpus_out_of_place_and_of_equal_nodes(changes: dict[str, Any], is_learned: bool) -> None:
    assert bool(quantities(row(2**28, 1357.0, 346.0, **changes))) == is_learned


def test_a_copy_between_gpus_counts_from_the_size_on_that_pairs_are_judged_by() -> None:
    assert quantities(pair(HEALTHY, 0, 1, 395.0, size_bytes=JUDGED_FROM_BYTES)) == [("p2p.write_gb_s", 395.0, None)]
    assert quantities(pair(HEALTHY, 0, 1, 395.0, size_bytes=JUDGED_FROM_BYTES - 1)) == []


def test_copies_to_and_from_pinned_memory_of_the_host() -> None:
    pinned = "pinned host memory"
    assert quantities(
        pair(HEALTHY, 0, 1, 55.6, source_bus_id=None, note=pinned),
        pair(HEALTHY, 0, 1, 55.4, destination_bus_id=None, note=pinned, size_bytes=JUDGED_FROM_BYTES),
        pair(HEALTHY, 0, 1, 21.6, source_bus_id=None, note="pageable host memory"),
        pair(HEALTHY, 0, 1, 9.0, source_bus_id=None, note=pinned, size_bytes=JUDGED_FROM_BYTES - 1),
        pair(HEALTHY, 0, 1, None, source_bus_id=None, note=pinned),
    ) == [("host_to_device_gb_s", 55.6, None), ("device_to_host_gb_s", 55.4, None)]


@pytest.mark.parametrize(("value", "is_kept"), [(174.13, True), (174.14, False), (25.87, True), (25.86, False)])
def test_an_outlier_is_five_deviations_off(value: float, is_kept: bool) -> None:
    """Their median absolute deviation is 10, which is 14.826 of a normal distribution's."""
    kept, odd = split_outliers(samples(90.0, 90.0, 90.0, 100.0, 110.0, 110.0, 110.0, value, 200.0 - value))
    assert value in [each.value for each in (kept if is_kept else odd)]


@pytest.mark.parametrize(("value", "is_kept"), [(105.0, True), (105.01, False)])
def test_an_outlier_is_a_twentieth_off_at_least(value: float, is_kept: bool) -> None:
    assert (len(split_outliers(samples(100.0, 100.0, 100.0, value))[0]) == 4) == is_kept


def test_a_single_value_has_no_range() -> None:
    (expected,) = learn(samples(395.0), "ours").expected
    assert expected.note == "the median of 1 value of 1 result"
    (expected,) = learn(samples(395.0, 396.0), "ours").expected
    assert expected.note == "the median of 2 values of 1 result, 395 to 396"

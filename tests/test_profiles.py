import hashlib
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpubench import profiles
from gpubench.collectives.registry import COLLECTIVES
from gpubench.errors import UsageError
from gpubench.model.profiles.profile import (
    BUSBW,
    COPY_QUANTITIES,
    SHARE_QUANTITIES,
    TIME,
    ExpectedKind,
    Generic,
    Profile,
    ceiling_gb_s,
)
from gpubench.model.results.speed import LARGE_BYTES

SHIPPED = profiles.all_profiles()


def test_the_promised_profiles_are_there() -> None:
    assert [each.name for each in SHIPPED] == list(profiles.profile_names())
    assert set(profiles.profile_names()) >= {
        *("dgx-1-v100", "hgx-a100-4", "hgx-a100-4-40gb", "hgx-a100-8", "hgx-a100-8-40gb", "a100-pcie-2"),
        *("hgx-h100-4", "hgx-h100-8", "h100-pcie-2", "h100-nvl-2"),
        *("hgx-h200-2", "hgx-h200-4", "hgx-h200-8", "hgx-b200-8", "gb200-nvl-4", "gb300-nvl-4"),
        *("gb200-nvl72", "gb300-nvl72", "hgx-b300-8", "hgx-h20-8", "hgx-h800-8", "gh200-1", "gh200-4", "dgx-spark"),
        *("l4-8", "l40s-8", "a10-4", "rtx-4090-2", "rtx-5090-2", "rtx-pro-6000-8"),
        *("generic-nvlink", "generic-pcie", "host"),
    }


@pytest.mark.parametrize("name", profiles.profile_names())
def test_a_shipped_profile_is_named_like_its_file_and_hashed(name: str) -> None:
    data = (profiles.folder() / f"{name}.toml").read_bytes()
    profile = profiles.load(name)
    assert profile.name == name
    assert profile.sha256 == hashlib.sha256(data).hexdigest()[:12]
    assert profile is profiles.load(name)


@pytest.mark.parametrize("profile", SHIPPED, ids=lambda each: each.name)
def test_expected_values_name_collectives_that_exist_and_derivations(profile: Profile) -> None:
    known = {f"{each.name}.{quantity}" for each in COLLECTIVES for quantity in (TIME, BUSBW)} | set(COPY_QUANTITIES)
    known |= set(SHARE_QUANTITIES) if profile.match.generic else set()
    for each in profile.all_expected:
        assert each.quantity in known
        assert each.note or each.kind is not ExpectedKind.DERIVED
        ceiling = ceiling_gb_s(profile, each)
        # Nothing is expected that would be a scandal for the links: 40 % is what a host-staged collective reaches.
        large = each.size_bytes is None or each.size_bytes >= LARGE_BYTES
        exempt = each.quantity == "p2p.staged_gb_s" or each.nodes > 1 or not large
        # RCCL builds rings of all xGMI links for 2, 4 and 8 GPUs only.
        exempt |= profile.name.startswith("mi3") and each.gpus is not None
        assert ceiling is None or each.value >= 0.4 * ceiling or exempt


@pytest.mark.parametrize("profile", SHIPPED, ids=lambda each: each.name)
def test_times_rise_with_size_and_agree_with_the_links(profile: Profile) -> None:
    for collective in COLLECTIVES:
        points = sorted(
            (each.size_bytes or 0, each.value, each.gpus or profile.match.visible)
            for each in profile.find(f"{collective.name}.{TIME}")
        )
        assert [time for _, time, _ in points] == sorted(time for _, time, _ in points)
        for size, time, gpus in points:
            assert size * collective.busbw_factor(gpus) / time / 1e3 < profile.link_gb_s


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(UsageError, match="no profile is called 'hgx-h2000-8'") as caught:
        profiles.load("hgx-h2000-8")
    assert "hgx-h200-8" in caught.value.next_step
    with pytest.raises(UsageError) as caught:
        profiles.load("../pyproject")
    assert "gpubench profiles list" in caught.value.next_step


@pytest.mark.parametrize(
    ("name", "count", "found", "text"),
    [
        ("NVIDIA H200", 4, "hgx-h200-4", "hgx-h200-4 (4 of 8 GPUs: a slice of the board)"),
        ("NVIDIA H200", 3, "hgx-h200-4", "hgx-h200-4 (3 of 8 GPUs: a slice of the board)"),
        ("NVIDIA H200", 5, "hgx-h200-8", "hgx-h200-8 (5 of 8 GPUs: a slice of the board)"),
        ("NVIDIA H200", 8, "hgx-h200-8", "hgx-h200-8"),
        ("NVIDIA A100-SXM4-80GB", 5, "hgx-a100-8", "hgx-a100-8 (5 of 8 GPUs: a slice of the board)"),
        ("NVIDIA A100-SXM4-40GB", 8, "hgx-a100-8-40gb", "hgx-a100-8-40gb"),
        ("NVIDIA H100 NVL", 2, "h100-nvl-2", "h100-nvl-2"),
        ("NVIDIA L4", 1, "l4-8", "l4-8"),
        ("NVIDIA GeForce RTX 4090", 2, "rtx-4090-2", "rtx-4090-2"),
        ("NVIDIA GeForce RTX 4090", 1, "rtx-4090-2", "rtx-4090-2"),
        ("AMD Instinct MI300X", 8, "mi300x-8", "mi300x-8"),
        ("AMD Instinct MI300X OAM", 8, "mi300x-8", "mi300x-8"),
        ("AMD Instinct MI300X VF", 4, "mi300x-8", "mi300x-8"),
        ("AMD Instinct MI325X", 8, "mi325x-8", "mi325x-8"),
        ("AMD Instinct MI350X", 8, "mi355x-8", "mi355x-8"),
    ],
)
def test_a_machine_finds_its_profile(name: str, count: int, found: str, text: str) -> None:
    match = profiles.match_whole_machine([name] * count, count)
    assert match is not None
    assert (match.profile.name, str(match)) == (found, text)


@pytest.mark.parametrize(
    ("name", "direct", "switched"),
    [("NVIDIA A100-SXM4-80GB", "hgx-a100-4", "hgx-a100-8"), ("NVIDIA H100 80GB HBM3", "hgx-h100-4", "hgx-h100-8")],
)
def test_four_gpus_joined_directly_are_no_slice_of_a_board_with_switches(name: str, direct: str, switched: str) -> None:
    for is_switched, expected in ((False, direct), (True, switched)):
        match = profiles.match_whole_machine([name], 4, switched=is_switched)
        assert match is not None
        assert match.profile.name == expected


def test_cards_without_nvlink_match_whatever_is_told() -> None:
    assert profiles.match_whole_machine(["NVIDIA GeForce RTX 4090"], 2, switched=False) is not None


@pytest.mark.parametrize(
    ("names", "count"),
    [(["NVIDIA H200"], 9), (["NVIDIA H200"], 0), (["NVIDIA R100"], 8), ([], 0), (["NVIDIA H200", "NVIDIA A100"], 2)],
)
def test_other_machines_find_none(names: list[str], count: int) -> None:
    assert profiles.match_whole_machine(names, count) is None


def test_files_that_are_not_parsed_have_nothing_to_say() -> None:
    for models in {each.match.gpus[:1] for each in SHIPPED} | {("NVIDIA X900",)}:
        for count in (1, 2, 3, 8):
            assert profiles.match_whole_machine(models, count) == profiles.match_whole_machine(
                models, count, among=SHIPPED
            )
        assert profiles.find_domain(models) == profiles.find_domain(models, among=[e for e in SHIPPED if e.domain])
    for joined in (False, True):
        found = profiles.match_machine(["NVIDIA X900"], 2, switched=None, joined=joined)
        assert found is not None
        assert found.profile.match.generic is (Generic.NVLINK if joined else Generic.PCIE)


def test_profiles_are_found_in_a_checkout_and_in_a_wheel(tmp_path: Path) -> None:
    package = tmp_path / "site" / "gpubench"
    package.mkdir(parents=True)
    assert profiles.folder(package) == tmp_path / "site" / "profiles"
    (package / "_profiles").mkdir()
    assert profiles.folder(package) == package / "_profiles"


@pytest.mark.parametrize(
    "key", ["rate_gbit_s = 400.0", "raw_gb_s = 26.5625", "memory_bytes = 150_754_820_096", "value = 354.6"]
)
@pytest.mark.parametrize("number", ["nan", "-nan", "inf", "-inf"])
def test_every_number_of_a_profile_must_be_finite(key: str, number: str, tmp_path: Path) -> None:
    text = (profiles.folder() / "hgx-h200-8.toml").read_text()
    assert key in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(key, f"{key.partition(' ')[0]} = {number}", 1))
    with pytest.raises(UsageError, match=rf"line \d+: .*{key.partition(' ')[0]} is "):
        profiles.read_file(path)


def test_a_profile_of_ones_own_is_read_and_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        profiles.read_file(path)
    text = (profiles.folder() / "hgx-h200-4.toml").read_text()
    path.write_text(text)
    assert profiles.read_file(path).expected == profiles.load("hgx-h200-4").expected
    path.write_text(text.replace("multiprocessors", "multiprocesors"))
    with pytest.raises(UsageError, match=r"mine\.toml line 18: gpu has an unknown field 'multiprocesors'"):
        profiles.read_file(path)
    path.write_text(text.replace("value = 396.1", "value = 696.1"))
    with pytest.raises(UsageError, match=r"line \d+: expected\[\d+\] \(p2p\.write_gb_s\)\.value is 696\.1"):
        profiles.read_file(path)
    for point, message in (
        ("[1_024, 0.001]", r"curve\[0\] \(allreduce\), the point of 1024 bytes,\.value is 0\.001 µs"),
        ("[1_024, 463]", r"curve\[0\] \(allreduce\)\.points are not in ascending order"),
        ("[1_024]", r"curve\[0\] \(allreduce\)\.points are not valid"),
    ):
        path.write_text(text.replace("[1_024, 10.11]", point, 1))
        with pytest.raises(UsageError, match=message):
            profiles.read_file(path)


@pytest.mark.parametrize(
    ("sound", "value"),
    [
        *(("value = 354.6", each) for each in ("0", "-354.6", "nan", "inf", "480.0", "0.3546", "354_600", "'fast'")),
        *(("value = 16.84", each) for each in ("0.0", "-16.84", "nan", "0.01684", "16840.0", "1e-5")),
        *(("value = 213.1", each) for each in ("0.2131", "213_100.0", "-inf")),
    ],
)
def test_an_expectation_that_is_nonsense_is_refused_with_its_line(sound: str, value: str) -> None:
    text = (profiles.folder() / "hgx-h200-8.toml").read_text()
    assert f"{sound}\n" in text
    line = text[: text.index(f"{sound}\n")].count("\n") + 1
    with pytest.raises(UsageError) as refused:
        profiles.read_profile(text.replace(f"{sound}\n", f"value = {value}\n", 1).encode(), "mine.toml")
    assert re.match(rf"mine\.toml line {line}: expected\[\d+\]( \([a-z0-9_.]+\))?\.value is ", refused.value.seen)
    assert refused.value.expected
    assert str(refused.value).startswith(refused.value.seen)


@pytest.mark.parametrize("value", ["0.0022", "2200", "true"])
def test_a_latency_of_another_unit_is_refused(value: str) -> None:
    text = (profiles.folder() / "hgx-h200-4.toml").read_text()
    assert "value = 2.2\n" in text
    with pytest.raises(UsageError, match=r"mine\.toml line \d+: expected\[\d+\]( \(p2p\.latency_us\))?\.value is "):
        profiles.read_profile(text.replace("value = 2.2\n", f"value = {value}\n", 1).encode(), "mine.toml")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff", r"x\.toml is not TOML"),
        (b"a = ", r"x\.toml is not TOML"),
        (b"sha256 = 'a'", "unknown field 'sha256'"),
        (b"schema = 1", r"x\.toml has no field 'name'"),
    ],
)
def test_what_is_no_profile_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        profiles.read_profile(data, "x.toml")


def test_the_example_of_the_keys_has_no_unknown_one() -> None:
    text = (Path(__file__).parents[1] / "docs/reference/profiles.md").read_text(encoding="utf-8")
    example = text.partition("```toml\n")[2].partition("```")[0]
    assert example
    example = example.replace('above = "switch9"', "").replace('reason = "why', 'reason = "as why')
    example += '[[switch]]\nname = "switch1"\npcie_generation = 5\npcie_width = 16\n'
    assert profiles.read_profile(example.encode(), "README").name == "my-box-4"


def test_a_users_own_profile_comes_before_ours_and_a_generic_one_last() -> None:
    ours = profiles.match_machine(["NVIDIA H200"], 4, switched=True, joined=True)
    assert ours is not None
    assert ours.profile.match.generic is None
    own = replace(ours.profile, name="own")
    found = profiles.match_machine(["NVIDIA H200"], 4, switched=True, joined=True, own=[own])
    assert found is not None
    assert found.profile.name == "own"
    for joined, generic in ((True, Generic.NVLINK), (False, Generic.PCIE)):
        unknown = profiles.match_machine(["NVIDIA X999"], 4, switched=None, joined=joined, own=[own])
        assert unknown is not None
        assert (unknown.profile.match.generic, unknown.note) == (generic, "")
    assert profiles.match_machine([], 0, switched=None, joined=False) is None


def test_a_users_own_folder_and_files(tmp_path: Path) -> None:
    assert profiles.user_folder({"GPUBENCH_PROFILES": "/p", "XDG_CONFIG_HOME": "/x"}) == Path("/p")
    assert profiles.user_folder({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}) == Path("/x/gpubench/profiles")
    assert profiles.user_folder({}).is_absolute()
    assert profiles.user_folder({"HOME": "/h"}) == Path("/h/.config/gpubench/profiles")
    data = (profiles.folder() / "hgx-h200-4.toml").read_bytes()
    (tmp_path / "without-suffix").write_bytes(data)
    assert profiles.find(str(tmp_path / "without-suffix"), {}).name == "hgx-h200-4"
    (tmp_path / "mine.toml").write_bytes(data)
    environment = {"GPUBENCH_PROFILES": str(tmp_path)}
    assert profiles.find("mine", environment) == profiles.user_profiles(environment)[0]
    assert profiles.find("hgx-h100-8", environment).name == "hgx-h100-8"
    with pytest.raises(UsageError, match=r"mine\.toml cannot be read"):
        profiles.find("mine.toml", {})


@pytest.mark.parametrize("name", ["H100 80GB HBM3", "A100-SXM4-40GB", "GB200"])
def test_models_without_the_vendor_match_like_those_with_it(name: str) -> None:
    assert profiles.match_whole_machine([name], 4) == profiles.match_whole_machine([f"NVIDIA {name}"], 4) is not None

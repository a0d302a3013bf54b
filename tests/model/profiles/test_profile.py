from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.model.profiles.profile import Expected, ExpectedKind, Profile, ceiling_gb_s, check_profile
from gpubench.model.terms.plain import from_plain, to_plain

H200: dict[str, Any] = {
    "schema": 1,
    "name": "box",
    "title": "A box",
    "match": {"gpus": ["NVIDIA H200"], "visible": 8},
    "gpu": {
        "name": "NVIDIA H200",
        "compute_capability": "9.0",
        "multiprocessors": 132,
        "memory_bytes": 150754820096,
        "pcie_generation": 5,
        "pcie_width": 16,
    },
    "nvlink": {"version": "4.0", "raw_gb_s": 26.5625, "links": 18, "to": "switch", "switches": 4},
    "node": {"sockets": 2, "cpus": 224, "driver": "580.1", "cuda": "13.0", "numa_nodes": 2},
    "switch": [{"name": "s0", "pcie_generation": 5, "pcie_width": 16, "numa": 0}],
    "nic": [
        {"name": f"mlx5_{i}", "kind": "infiniband", "rate_gbit_s": 400.0, "pcie_generation": 5, "pcie_width": 16}
        for i in range(8)
    ],
    "sources": {"us": "our machine"},
    "facts": {"kind": "measured", "source": "us"},
    "expected": [
        {"quantity": "allreduce.busbw_gb_s", "value": 360.0, "kind": "measured", "source": "us", "size_bytes": 2**30}
    ],
}


def changed(path: str, value: object) -> Profile:
    """The profile with one key, dotted, set or, with None, taken away."""
    plain = to_plain(from_plain(Profile, H200))
    *outer, last = path.split(".")
    where = plain
    for key in outer:
        where = where[int(key) if key.isdecimal() else key]
    if value is None:
        del where[last]
    else:
        where[last] = value
    return from_plain(Profile, plain, "box.toml")


def expecting(quantity: str, value: float, **keys: Any) -> Profile:
    expected = Expected(quantity=quantity, value=value, kind=ExpectedKind.MEASURED, source="us", **keys)
    return replace(from_plain(Profile, H200), expected=(expected,))


PAIRED = {"version": "4.0", "raw_gb_s": 26.5625, "links": 6, "to": "gpu"}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", 2, r"box\.toml\.schema is 2"),
        ("match.visible", 0, r"box\.toml\.match\.visible is 0"),
        ("gpu.memory_bytes", 0, r"box\.toml\.gpu\.memory_bytes is 0"),
        ("match.gpus", ["NVIDIA H100"], r"gpu\.name 'NVIDIA H200' is not among"),
        ("match.board_gpus", 4, r"match\.board_gpus is 4"),
        ("gpu.pcie_generation", 9, "have no known bandwidth"),
        ("gpu.compute_capability", "sm_90", "compute_capability is 'sm_90'"),
        ("peer_access", {"status": "MAYBE"}, r"peer_access\.status is 'MAYBE'"),
        ("peer_access", {"status": "GNS"}, "peer_access has no reason"),
        ("nvlink.links", 0, "nvlink has no known bandwidth"),
        ("nvlink.switches", 0, "nvlink leads to switches"),
        ("nvlink.pairs", [[0, 1, 4]], "nvlink leads to switches"),
        ("nvlink", PAIRED, r"nvlink\.pairs uses"),
        ("nvlink", PAIRED | {"pairs": [[0, 1]]}, r"nvlink\.pairs has \[0, 1\]"),
        ("nvlink", PAIRED | {"pairs": [[0, 0, 4]]}, r"nvlink\.pairs has"),
        ("nvlink", PAIRED | {"pairs": [[0, 8, 4]]}, r"nvlink\.pairs has"),
        ("nvlink", PAIRED | {"pairs": [[0, 1, 4], [1, 2, 4]]}, r"nvlink\.pairs uses \[4, 8, 4"),
        ("switch.0.numa", 2, r"switch\[0\]\.numa is 2"),
        ("switch.0.above", "s7", r"switch\[0\]\.above is 's7'"),
        ("switch", [H200["switch"][0]] * 2, r"switch\[1\]\.name 's0' is duplicated"),
        ("gpu.places", ["s0"], r"gpu\.places has 1 entries"),
        ("gpu.places", ["s0"] * 7 + ["s9"], r"gpu\.places\[7\] is 's9'"),
        ("nic.3.place", "s9", r"nic\[3\]\.place is 's9'"),
        ("nic.3.name", "mlx5_0", "nic 'mlx5_0' is duplicated"),
        ("sources.nobody", "x", r"sources\.nobody is not used by any expected value"),
        ("expected.0.source", "them", r"expected\[0\].*source 'them' is not in"),
        ("expected.0.quantity", "speed", r"expected\[0\] \(speed\) is not a quantity"),
        ("expected.0.quantity", "p2p.write_mb_s", "is not a quantity"),
        ("expected.0.value", 0.0, "value is 0"),
        ("expected.0.value", float("nan"), "value is nan"),
        ("expected.0.value", float("inf"), "value is inf"),
        ("expected.0.gpus", 9, "is for 9 GPUs of 1 node"),
        ("expected.0.gpus", 0, "is for 0 GPUs of 1 node"),
        ("expected.0.gpus", 1, "is for one GPU"),
        ("expected.0.nodes", 0, "is for 8 GPUs of 0 nodes"),
        ("expected.0.size_bytes", 0, "size_bytes is 0"),
        ("expected.0.value", 450.1, "value is 450.1 GB/s"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(path: str, value: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_profile(changed(path, value), "box.toml")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("gpu.colour", "green", "unknown field 'colour'"),
        ("gpu.pcie_width", "16", r"gpu\.pcie_width is '16'"),
        ("nic.0.kind", "token ring", r"nic\[0\].kind is 'token ring'"),
        ("nvlink.to", "moon", r"nvlink\.to is 'moon'"),
        ("expected.0.kind", "guess", r"expected\[0\]\.kind is 'guess'"),
        ("expected.0.source", None, "no field 'source'"),
        ("node.driver", None, "no field 'driver'"),
    ],
)
def test_what_is_no_profile_is_refused_by_name(path: str, value: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        changed(path, value)


@pytest.mark.parametrize(
    ("quantity", "keys", "ceiling"),
    [
        ("allreduce.busbw_gb_s", {}, 450.0),
        ("allreduce.busbw_gb_s", {"algorithm": "NVLS"}, 450.0 * 14 / 9),
        ("allreduce.busbw_gb_s", {"nodes": 2}, 450.0),
        ("allreduce.busbw_gb_s", {"nodes": 2, "algorithm": "NVLSTree"}, 50.0 * 15),
        ("allreduce.busbw_gb_s", {"nodes": 64}, 50.0 * 511 / 63),
        ("p2p.write_gb_s", {}, 450.0),
        ("p2p.bidirectional_gb_s", {}, 900.0),
        ("p2p.staged_gb_s", {}, 63.01538),
        ("host_to_device_gb_s", {}, 63.01538),
    ],
)
def test_ceilings_know_links_nodes_and_algorithm(quantity: str, keys: dict[str, Any], ceiling: float) -> None:
    profile = expecting(quantity, 1.0, **keys)
    assert ceiling_gb_s(profile, profile.expected[0]) == pytest.approx(ceiling)
    check_profile(expecting(quantity, ceiling * 0.999, **keys), "box.toml")
    with pytest.raises(UsageError, match="GB/s"):
        check_profile(expecting(quantity, ceiling * 1.001, **keys), "box.toml")


def test_a_time_has_no_ceiling_but_a_least() -> None:
    profile = expecting("allgather.time_us", 2100.0, size_bytes=2**30)
    assert ceiling_gb_s(profile, profile.expected[0]) is None
    check_profile(profile, "box.toml")
    with pytest.raises(UsageError, match=r"at least 2087\.8 µs"):
        check_profile(expecting("allgather.time_us", 2080.0, size_bytes=2**30), "box.toml")
    with pytest.raises(UsageError, match="no size_bytes"):
        check_profile(expecting("allgather.time_us", 2100.0), "box.toml")
    with pytest.raises(UsageError, match="at least inf"):
        check_profile(replace(expecting("allgather.time_us", 9.0, size_bytes=8, nodes=2), nic=()), "box.toml")


def test_without_nvlink_pcie_is_the_ceiling_and_pairs_have_their_own() -> None:
    profile = expecting("p2p.write_gb_s", 60.0)
    check_profile(replace(profile, nvlink=None), "box.toml")
    paired = changed("nvlink", PAIRED | {"pairs": [[0, 1, 2], [2, 3, 6]]})
    check_profile(replace(paired, expected=profile.expected), "box.toml")
    assert ceiling_gb_s(paired, profile.expected[0]) == 150.0


@pytest.mark.parametrize(("links", "gpus"), [(1, 1), (12, 12)])
def test_pairs_may_have_as_many_links_as_a_gpu_has(links: int, gpus: int) -> None:
    nvlink = PAIRED | {"links": links, "pairs": [[0, 1, gpus]]}
    check_profile(replace(changed("nvlink", nvlink), expected=(), sources={}), "box.toml")


def test_an_endless_value_and_a_share_of_one_machine_type_are_refused() -> None:
    with pytest.raises(UsageError, match="value is inf"):
        check_profile(expecting("p2p.write_gb_s", float("inf")), "box.toml")
    with pytest.raises(UsageError, match="is not a quantity") as refused:
        check_profile(expecting("p2p.write_share", 0.8), "box.toml")
    assert refused.value.reason == "shares are for profiles with match.generic"
    with pytest.raises(UsageError, match="is not a quantity") as refused:
        check_profile(expecting("p2p.speed", 0.8), "box.toml")
    assert refused.value.reason == ""


def test_the_ceiling_of_a_path_is_that_of_its_links() -> None:
    profile = from_plain(Profile, H200)
    ceilings = [ceiling_gb_s(profile, *expecting("p2p.write_gb_s", 1.0, path=path).expected) for path in ("NV6", "PIX")]
    assert ceilings == [6 * 25.0, profile.gpu.pcie_gb_s]

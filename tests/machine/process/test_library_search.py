"""Where the dynamic loader would find libraries."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.machine.environment import find_libraries, verbs_providers, wanted_libraries
from gpubench.machine.host import UnknownFields
from tests.fakes.sysfs import Tree

VERBS = "libibverbs.so.1"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def found(tree: Tree, search_path: str = "", **loaded: str) -> str | None:
    return find_libraries([VERBS], loaded, search_path, tree.root)[VERBS]


def test_the_loaders_order(tree: Tree) -> None:
    assert found(tree) is None
    tree.write(f"usr/lib/{VERBS}", "")
    assert found(tree) == f"/usr/lib/{VERBS}"
    tree.write(f"opt/mlnx/{VERBS}", "")
    others = [tree.write(f"opt/{name}", "").name for name in (f"my-{VERBS}", f"{VERBS}.old")]
    paths = [*(f"/opt/{name}" for name in others), f"/gone/{VERBS}", f"/opt/mlnx/{VERBS}"]
    cache = "\0".join(("glibc-ld.so.cache1.1\x03", "", "", VERBS, *paths, "")).encode() + b"\xff"
    tree.write("etc/ld.so.cache", "").write_bytes(cache)
    assert found(tree) == f"/opt/mlnx/{VERBS}"
    tree.write(f"mine/{VERBS}", "")
    assert found(tree, "relative::/nowhere:/mine") == f"/mine/{VERBS}"
    assert found(tree, "/mine", libibverbs="/loaded/libibverbs.so.1") == "/loaded/libibverbs.so.1"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, ["libnccl-net.so"]),
        ("", ["libnccl-net.so"]),
        ("aws-ofi", ["libnccl-net-aws-ofi.so"]),
        ("libmine.so", ["libmine.so"]),
        ("ofi, spcx", ["libnccl-net-ofi.so", "libnccl-net-spcx.so"]),
        ("none", []),
        ("/opt/libnet.so", ["/opt/libnet.so"]),
        ("a/b", ["libnccl-net-a/b.so"]),
    ],
)
def test_network_plugins_as_nccl_names_their_files(setting: str | None, expected: list[str]) -> None:
    settings = {} if setting is None else {"NCCL_NET_PLUGIN": setting}
    plain = wanted_libraries({"NCCL_NET_PLUGIN": "none"})
    assert VERBS in plain
    assert list(wanted_libraries(settings)[len(plain) :]) == expected


def test_a_plugin_that_is_named_by_its_path(tree: Tree) -> None:
    names = ["/opt/libnet.so"]
    assert find_libraries(names, {}, "", tree.root) == {"/opt/libnet.so": None}
    tree.write("opt/libnet.so", "")
    assert find_libraries(names, {}, "", tree.root) == {"/opt/libnet.so": "/opt/libnet.so"}


def test_drivers_of_libibverbs(tree: Tree) -> None:
    unknown = UnknownFields()
    assert verbs_providers(tree.root, unknown) is None
    assert unknown.reasons == {"verbs_providers": "libibverbs.d: No such file or directory"}
    for name in ("mlx5.driver", "efa.driver", "readme"):
        tree.write(f"etc/libibverbs.d/{name}", "")
    assert verbs_providers(tree.root, UnknownFields()) == ("efa", "mlx5")


@given(st.binary(max_size=200), st.text(max_size=60))
def test_no_cache_and_no_search_path_is_an_error(
    tmp_path_factory: pytest.TempPathFactory, cache: bytes, search_path: str
) -> None:
    tree = Tree(tmp_path_factory.getbasetemp() / "loader")
    tree.write("etc/ld.so.cache", "").write_bytes(b"\0/" + cache + b"/libibverbs.so.1\0")
    assert found(tree, f"/{search_path}") is None

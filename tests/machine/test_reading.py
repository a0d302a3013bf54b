"""The whole reading of a machine: how much it opens, and what trees do to it that are damaged or closed to it."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubench.machine.process import read_rank_facts
from gpubench.machine.sysfs import SysfsFacts, read_sysfs
from gpubench.model.facts.process import RankFacts
from gpubench.model.terms.plain import from_plain, to_plain
from tests.examples import examples
from tests.fakes.large_machine import LargeMachine

SMALL = LargeMachine(gpus=2, pci_devices=16, cpus=4, processes=20)
NOBODY = 65534


class OpenedFiles:
    """An audit hook, which cannot be taken away again; it lives longer than the names of this module."""

    def __init__(self) -> None:
        self.counting = False
        self.count = 0

    def __call__(self, event: str, _arguments: tuple[object, ...]) -> None:
        self.count += self.counting and event == "open"


opened = OpenedFiles()
sys.addaudithook(opened)


def sent(facts: SysfsFacts) -> SysfsFacts:
    return from_plain(SysfsFacts, json.loads(json.dumps(to_plain(facts), allow_nan=False)))


MANGLED = st.one_of(
    st.binary(max_size=80),
    st.sampled_from([b"", b"\0", b"-1", b"0x", b"9" * 5000, b"\xff" * 200, b"Unknown", b"\n" * 50]),
    st.integers(1, 40),
    st.sampled_from(["gone", "folder", "loop"]),
)
"""What becomes of a file: other bytes, its first few, nothing, a folder, a link to itself."""


def mangle(path: Path, how: bytes | int | str) -> None:
    content = path.read_bytes()
    path.unlink()
    if isinstance(how, bytes):
        path.write_bytes(how)
    elif isinstance(how, int):
        path.write_bytes(content[:how])
    elif how == "folder":
        path.mkdir()
    elif how == "loop":
        path.symlink_to(path)


@contextmanager
def damaged(damage: Sequence[tuple[Path, bytes | int | str]]) -> Iterator[None]:
    """A tree with these files mangled, and whole again afterwards."""
    whole = {path: path.read_bytes() for path, _ in damage}
    for path, how in dict(damage).items():
        mangle(path, how)
    try:
        yield
    finally:
        for path, content in whole.items():
            if path.is_dir():
                path.rmdir()
            path.unlink(missing_ok=True)
            path.write_bytes(content)


def all_files(folder: Path) -> list[Path]:
    return sorted(Path(place) / name for place, _, names in os.walk(folder) for name in names)


def plain_files(folder: Path) -> list[Path]:
    return [path for path in all_files(folder) if not path.is_symlink()]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SMALL.build(tmp_path_factory.mktemp("small")).root


@pytest.fixture(scope="module")
def files(small: Path) -> list[Path]:
    return plain_files(small)


@pytest.fixture(scope="module")
def healthy(small: Path) -> SysfsFacts:
    return read_sysfs(small)


@settings(max_examples=examples(20))
@given(st.integers(5, 15), st.integers(0, 14), st.lists(MANGLED, min_size=1, max_size=12))
def test_no_damage_to_a_tree_is_an_error(
    small: Path, files: list[Path], apart: int, first: int, damage: list[bytes | int | str]
) -> None:
    with damaged(list(zip(files[first % apart :: apart], cycle(damage), strict=False))):
        facts, rank = read_sysfs(small), read_rank_facts(0, 0, 0, {}, small)
    assert sent(facts) == facts
    assert from_plain(RankFacts, json.loads(json.dumps(to_plain(rank), allow_nan=False))) == rank


@given(st.integers(0), st.lists(MANGLED, min_size=4, max_size=12))
def test_a_damaged_device_costs_no_other(
    small: Path, healthy: SysfsFacts, which: int, damage: list[bytes | int | str]
) -> None:
    victim = healthy.node.pci_devices[which % len(healthy.node.pci_devices)].bus_id
    folder = small / "sys/bus/pci/devices" / victim
    own = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name not in ("class", "vendor")]
    with damaged([(own[(which + position) % len(own)], how) for position, how in enumerate(damage)]):
        facts = read_sysfs(small).node
    others = [each for each in healthy.node.pci_devices if each.bus_id != victim]
    assert [each for each in facts.pci_devices if each.bus_id != victim] == others
    assert facts.rdma_ports == healthy.node.rdma_ports
    assert facts.driver_settings == healthy.node.driver_settings


@contextmanager
def as_nobody(root: Path) -> Iterator[None]:
    """Without any right: root takes another user's for the time, others take their own from the files."""
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)
        return
    folders = [Path(place) for place, _, _ in os.walk(root)]
    for folder in reversed(folders):
        folder.chmod(0)
    try:
        yield
    finally:
        for folder in folders:
            folder.chmod(0o700)


def test_where_nothing_may_be_read_all_is_unknown_with_its_reason(tmp_path: Path) -> None:
    root = SMALL.build(tmp_path / "closed").root
    root.chmod(0)
    with as_nobody(root):
        facts = read_sysfs(root).node
        rank = read_rank_facts(0, 0, 0, {}, root)
    root.chmod(0o700)
    assert (facts.gpus, facts.nics, facts.pci_devices, facts.rdma_ports) == ((), (), (), ())
    assert facts.kernel.unknown["options"] == "cmdline: Permission denied"
    assert facts.driver_settings.unknown["parameters"] == "params: Permission denied"
    assert facts.driver_settings.unknown["services.nv-fabricmanager.version"] == "needs root: fabricmanager.log"
    assert facts.driver_settings.services["nvlsm"].running is None
    assert (rank.capabilities, rank.imex_channels, rank.driver_gpus) == (None, None, None)
    assert rank.unknown["driver_gpus"] == "gpus: Permission denied"
    assert rank.unknown["nccl_files./etc/nccl.conf"] == "Permission denied"

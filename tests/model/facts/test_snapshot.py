import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.model.facts.snapshot import HostFacts, KernelSettings, NicFacts, NicKind, Snapshot, normalize_bus_id
from gpubench.model.terms.verdict import Origin


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("0000:1b:00.0", "0000:1b:00.0"),
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("1b:00.0", "0000:1b:00.0"),
        ("1B:00", "0000:1b:00.0"),
        ("00000001:0A:1F.7", "0001:0a:1f.7"),
        ("10000:e1:00.0", "10000:e1:00.0"),
        ("  0000:1b:00.0\n", "0000:1b:00.0"),
        ("N/A", "n/a"),
        ("0000:1b:00.8", "0000:1b:00.8"),
        ("", ""),
    ],
)
def test_a_bus_id_has_one_spelling(spelling: str, canonical: str) -> None:
    assert normalize_bus_id(spelling) == canonical


@given(
    st.integers(0, 2**32 - 1), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7), st.sampled_from(["x", "X"])
)
def test_every_spelling_of_an_address_is_the_same(
    domain: int, bus: int, device: int, function: int, letters: str
) -> None:
    spelled = f"{domain:08{letters}}:{bus:02{letters}}:{device:02{letters}}.{function}"
    assert normalize_bus_id(spelled) == f"{domain:04x}:{bus:02x}:{device:02x}.{function}"
    assert normalize_bus_id(normalize_bus_id(spelled)) == normalize_bus_id(spelled)


@given(st.text(max_size=16) | st.from_regex(r"[0-9A-F:. ]{0,16}", fullmatch=True))
def test_reading_a_bus_id_twice_changes_nothing(text: str) -> None:
    assert normalize_bus_id(normalize_bus_id(text)) == normalize_bus_id(text)


@pytest.mark.parametrize(
    ("kind", "rdma"), [(NicKind.INFINIBAND, True), (NicKind.ROCE, True), (NicKind.EFA, True), (NicKind.ETHERNET, False)]
)
def test_plain_ethernet_alone_has_no_rdma(kind: NicKind, rdma: bool) -> None:
    assert NicFacts(name="a", kind=kind).rdma is rdma


@pytest.mark.parametrize(
    ("machine", "wsl", "place"),
    [
        (HostFacts(), None, ""),
        (HostFacts(virtual_machine=False, container=""), False, ""),
        (HostFacts(virtual_machine=False, chassis="laptop", container=""), False, "laptop"),
        (HostFacts(virtual_machine=False, chassis="server"), False, "server"),
        (HostFacts(virtual_machine=True, chassis="server"), False, "virtual machine"),
        (HostFacts(virtual_machine=True, container="docker"), False, "Docker container in a virtual machine"),
        (HostFacts(virtual_machine=False, chassis="laptop", container="podman"), False, "Podman container on a laptop"),
        (HostFacts(container="kubernetes"), None, "Kubernetes pod"),
        (HostFacts(container="of another kind"), None, "container"),
        (HostFacts(virtual_machine=True, container=""), True, "WSL 2 (Linux inside Windows)"),
        (HostFacts(virtual_machine=True, container="docker"), True, "Docker container in WSL 2 (Linux inside Windows)"),
    ],
)
def test_the_kind_of_place_is_told_in_words(machine: HostFacts, wsl: bool | None, place: str) -> None:
    node = Snapshot(host="a", origin=Origin.MEASURED, source="", machine=machine, kernel=KernelSettings(wsl=wsl))
    assert node.place == place

"""What lies around the GPUs of simulated nodes: whole, consistent, and with the faults of the devices in it."""

import pytest

from gpubench import profiles
from gpubench.model.facts.snapshot import PciKind, Snapshot
from gpubench.model.profiles.fault import parse_fault
from gpubench.model.profiles.profile import Profile
from gpubench.model.terms.plain import from_plain, to_plain
from gpubench.simulated.machine import SimulatedMachine, snapshots

PROFILES = profiles.all_profiles()


def node(name: str, *faults: str) -> Snapshot:
    machine = SimulatedMachine(profiles.load(name))
    return snapshots(machine, [parse_fault(fault) for fault in faults])[0]


def chain(snapshot: Snapshot, bus_id: str | None) -> list[PciKind]:
    devices = {each.bus_id: each for each in snapshot.pci_devices}
    kinds = []
    while bus_id is not None:
        kinds.append(devices[bus_id].kind)
        bus_id = devices[bus_id].above
    return kinds


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_every_device_and_switch_is_among_the_hops(profile: Profile) -> None:
    (snapshot,) = snapshots(SimulatedMachine(profile))
    names = [each.bus_id for each in snapshot.pci_devices]
    assert names == sorted(set(names))
    devices = {gpu.bus_id for gpu in snapshot.gpus} | {nic.bus_id for nic in snapshot.nics}
    assert devices | {switch.bus_id for switch in snapshot.switches} <= set(names)
    assert not set(names) & set(snapshot.nvswitches)
    assert all(each.above is None or each.above in names for each in snapshot.pci_devices)
    assert [port.nic for port in snapshot.rdma_ports] == [nic.name for nic in snapshot.nics if nic.rdma]
    assert from_plain(Snapshot, to_plain(snapshot)) == snapshot


def test_a_gpu_below_a_switch_has_four_hops_and_one_on_a_flat_bus_none() -> None:
    hopper = node("hgx-h100-8")
    assert chain(hopper, hopper.gpus[5].bus_id) == [
        PciKind.GPU,
        PciKind.DOWNSTREAM_PORT,
        PciKind.UPSTREAM_PORT,
        PciKind.ROOT_PORT,
    ]
    ports = [each.above for each in hopper.pci_devices if each.kind in (PciKind.GPU, PciKind.NIC)]
    assert len(set(ports)) == len(ports)
    flat = node("hgx-h200-4")
    assert chain(flat, flat.gpus[0].bus_id) == [PciKind.GPU]


def test_the_fabric_manager_of_a_virtual_machine_is_its_hosts() -> None:
    hopper, flat = node("hgx-h100-8").driver_settings, node("hgx-h200-4").driver_settings
    assert hopper.services["nv-fabricmanager"].running is True
    assert flat.services["nv-fabricmanager"].running is None


def test_faults_of_devices_show_around_them() -> None:
    broken = node("hgx-h100-8", "gpu2:width=8", "nic1:state=down", "gpu7:missing=yes")
    narrow = next(each for each in broken.pci_devices if each.bus_id == broken.gpus[2].bus_id)
    assert (narrow.link.width, narrow.link.max_width) == (8, 16)
    assert broken.rdma_ports[1].physical_state == "polling"
    assert sum(each.kind is PciKind.GPU for each in broken.pci_devices) == 7

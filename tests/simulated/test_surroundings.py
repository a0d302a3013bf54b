"""What lies around the GPUs of simulated nodes: whole, consistent, and with the faults of the devices in it."""

import pytest

from gpubench import profiles
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.profiles.profile import Profile
from gpubench.model.terms.plain import from_plain, to_plain
from gpubench.simulated.machine import SimulatedMachine, snapshots

PROFILES = profiles.all_profiles()


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

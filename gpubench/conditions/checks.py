"""The checks of `gpubench check`. Each check groups conditions under the name that reports show, with the facts
that it needs.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from gpubench.conditions import subjects
from gpubench.conditions.circumstances import Circumstances, Facts, Sighting, Unread, joined
from gpubench.conditions.condition import fill_ids
from gpubench.conditions.kv import KV
from gpubench.conditions.process import MPI
from gpubench.conditions.profile import SURPLUS
from gpubench.conditions.ranking import SUREST_FIRST
from gpubench.conditions.registry import CAUSES, CONDITIONS
from gpubench.conditions.subjects import Lack
from gpubench.model.facts.snapshot import GpuFacts, Snapshot
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.ucx import Transfer
from gpubench.model.paths.wiring import Wiring
from gpubench.model.results.figures import Need
from gpubench.model.results.report import Effect
from gpubench.model.terms.verdict import WRONG_DATA, Finding, Origin, Verdict


class Check(Struct, frozen=True):
    """One check of `gpubench check`, which looks for a group of conditions."""

    name: str
    summary: str
    needs: Need = Need.FACTS  # What gpubench has to measure for this check
    #: Facts that the check needs, as scope.field with the scopes gpu, pair, nic, port, node and rank. If names are
    #: joined by |, any one of them is enough.
    reads: tuple[str, ...] = ()
    lack: Lack = subjects.always_something  # Returns the reason why the check does not apply to this machine
    in_part: Lack = subjects.always_something  # Returns a note on what a passed check did not cover
    without_gpus: bool = False  # Also applies to machines without GPUs
    of_wiring: bool = False  # Also run by `gpubench topo`


_wiring = partial(Check, of_wiring=True)

CHECKS: tuple[Check, ...] = (
    _wiring(
        "driver",
        "the driver answers and sees every GPU on the PCI bus",
        reads=("node.driver.version|driver.absent",),
        without_gpus=True,
    ),
    _wiring("gpu_present", "every GPU of the machine answers", reads=("gpu.bus_id",), in_part=subjects.count_of_gpus),
    _wiring(
        "nvlink_active",
        "as many NVLinks are active as on sibling GPUs",
        reads=("gpu.nvlinks.active",),
        lack=subjects.nvlinks,
        in_part=subjects.nvlink_mode,
    ),
    _wiring(
        "nvlink_errors",
        "NVLink error counters do not rise during the run, and were low before",
        reads=("gpu.nvlinks.errors",),
        lack=subjects.nvlinks,
        in_part=subjects.counts_during_a_run,
    ),
    _wiring(
        "fabric",
        "every GPU has joined its NVLink fabric, which is healthy",
        reads=("gpu.fabric.state",),
        lack=subjects.fabric,
        in_part=subjects.fabric_health,
    ),
    _wiring(
        "peer_access",
        "every GPU pair has peer access, and CUDA and NVML agree on it",
        reads=("pair.read", "pair.write", "pair.cuda"),
        lack=subjects.several_gpus,
    ),
    _wiring(
        "pcie_link",
        "PCIe links run at full width, and at full speed under load",
        reads=("gpu.pcie.generation", "gpu.pcie.width", "gpu.pcie.max_generation", "gpu.pcie.max_width", "gpu.idle"),
    ),
    _wiring(
        "profile",
        "links match healthy machines of this type, in number and speed",
        reads=("gpu.pcie.max_generation", "gpu.pcie.max_width", "gpu.nvlinks.active"),
        lack=subjects.a_profile,
    ),
    _wiring(
        "memory_rows",
        "no remapping of a memory row is pending or failed, and few rows were remapped",
        reads=("gpu.remapped_rows|retirement_pending",),
        in_part=subjects.remapped_rows,
    ),
    _wiring(
        "throttle",
        "no GPU is slowed down by heat or power supply",
        reads=("gpu.throttle_reasons",),
        in_part=subjects.power_caps,
    ),
    _wiring(
        "nic_state",
        "RDMA ports are active, at the rate of their siblings",
        reads=("nic.state", "nic.rate_gbit_s"),
        lack=subjects.rdma_nics,
        in_part=subjects.rates_of_cards,
        without_gpus=True,
    ),
    _wiring("gpudirect", "RDMA NICs can reach GPU memory", lack=subjects.rdma_nics, in_part=subjects.unknown_gpudirect),
    _wiring(
        "nodes_alike",
        "nodes of the same kind have the same hardware",
        lack=subjects.nodes_to_compare,
        without_gpus=True,
    ),
    _wiring(
        "ranks_alike",
        "ranks of a host share memory, and all ranks have the same settings",
        reads=("rank.shm_device",),
        lack=subjects.ranks_to_compare,
        without_gpus=True,
    ),
    Check(
        "gpu_model",
        "all GPUs are the same complete model, as in the profile",
        reads=("gpu.name", "gpu.memory_bytes"),
        in_part=subjects.left_out_gpus,
    ),
    _wiring("mig", "MIG splits no GPU that should be whole", reads=("gpu.mig",), in_part=subjects.split_gpus),
    Check(
        "ecc",
        "ECC is on and has found no uncorrectable error",
        reads=("gpu.ecc", "gpu.memory_errors"),
        in_part=subjects.ecc_off,
    ),
    Check(
        "clocks",
        "GPUs of one model have the same highest clock, and no low clock or power limit is set",
        reads=("gpu.most_clock_mhz",),
        in_part=subjects.power_limits,
    ),
    Check("temperature", "no GPU is near its slowdown temperature", reads=("gpu.temperature_c",)),
    Check(
        "gpu_free",
        "no other process uses the GPUs or their memory",
        reads=("gpu.processes", "gpu.memory_bytes", "gpu.memory_used_bytes"),
        in_part=subjects.memory_held,
    ),
    Check(
        "pcie_errors",
        "PCIe error counters do not rise during the run, and were low before",
        reads=("gpu.pcie_replays",),
        in_part=subjects.counts_during_a_run,
    ),
    Check(
        "nic_errors",
        "RDMA error counters do not rise during the run, and were low before",
        reads=("port.counters|hardware_counters",),
        lack=subjects.rdma_nics,
        in_part=subjects.counts_during_a_run,
        without_gpus=True,
    ),
    Check(
        "nic_profile",
        "the NICs match the requested profile, in number and speed",
        lack=subjects.a_profile_asked_for,
        without_gpus=True,
    ),
    Check(
        "redirection",
        "ACS and the IOMMU do not redirect traffic between GPUs and NICs",
        reads=("gpu.bus_id",),
        lack=subjects.traffic_over_pcie,
    ),
    Check(
        "versions",
        "drivers and libraries are alike on all nodes",
        reads=("node.driver.version|driver.absent", "rank.libraries"),
        lack=subjects.nodes_or_ranks,
        without_gpus=True,
    ),
    Check("paths", "no path that could be direct goes through host memory", Need.PEER_COPIES),
    Check("p2p_bandwidth", "copies are as fast as between other GPUs, and as expected", Need.PEER_COPIES),
    Check("p2p_symmetry", "copies are equally fast in both directions", Need.PEER_COPIES),
    Check("host_bandwidth", "copies to and from host memory are as fast as expected", Need.HOST_COPIES),
    Check(
        "host_memory",
        "all nodes copy in host memory equally fast",
        Need.HOST_MEMORY,
        lack=subjects.nodes_to_compare,
        without_gpus=True,
    ),
    Check("collective_bandwidth", "all-reduce is as fast as on healthy machines", Need.ALL_REDUCE, without_gpus=True),
    Check("data_correct", "all data arrive unchanged", Need.VERIFIED_DATA, without_gpus=True),
    Check(
        "stragglers",
        "no rank takes longer than the others",
        Need.ALL_REDUCE,
        lack=subjects.timed_ranks,
        without_gpus=True,
    ),
    Check("measured", "everything that should be measured was measured", lack=subjects.measurements, without_gpus=True),
)
"""All checks, in the order in which reports list them."""

WIRING = tuple(check for check in CHECKS if check.of_wiring)


_BY_CHECK = {check.name: [condition for condition in CONDITIONS if condition.check == check.name] for check in CHECKS}


class Looked(Struct, frozen=True):
    """The findings of a check, and its conditions that could not be checked, with the reasons."""

    findings: tuple[Finding, ...]
    unread: tuple[Unread, ...]


def look(check: Check, facts: Facts) -> Looked:
    """Run a check. Findings from measurements come before findings from its conditions."""
    findings = [finding for finding in facts.measurements.findings if _check_name(finding) == check.name]
    unread: list[Unread] = []
    for condition in _BY_CHECK[check.name]:
        found = tuple(condition.look(facts.circumstances))
        findings += condition.to_findings(found)
        unread += (result for result in found if isinstance(result, Unread))
    return Looked(tuple(findings), tuple(unread))


def check_findings(check: Check, facts: Facts) -> tuple[Finding, ...]:
    return look(check, facts).findings


_PRESENT, _NVLINKS, *_COPIES = (
    next(check for check in CHECKS if check.name == name)
    for name in ("gpu_present", "nvlink_active", "p2p_bandwidth", "p2p_symmetry", "host_bandwidth")
)
_IN_USE = next(condition for condition in CONDITIONS if condition.id == "gpu-in-use")


def presence_findings(facts: Facts) -> tuple[Finding, ...]:
    """Return findings about lost, missing or surplus GPUs. Every command reports them."""
    return merged((*check_findings(_PRESENT, facts), *SURPLUS.findings(facts.circumstances)))


def machine_findings(facts: Facts) -> tuple[Finding, ...]:
    """Return failures that `gpubench topo` also reports, for every command that measures.

    Also return every finding of the nvlink_active check, even if it is no failure. If there is only one node, ignore
    its NICs, which carry no traffic.
    """
    if len(facts.nodes) == 1:
        facts = replace(facts, nodes=[Topology(replace(facts.nodes[0].snapshot, nics=()))])
    in_doubt = {condition.id for condition in _BY_CHECK[_NVLINKS.name]}
    failed = [finding for finding in run(WIRING, facts) if finding.severity is Verdict.FAIL or finding.id in in_doubt]
    presence = presence_findings(facts)
    return (*presence, *(finding for finding in failed if finding not in presence))


def copy_findings(facts: Facts) -> tuple[Finding, ...]:
    """Return findings about the machine, GPUs that other processes use, and slow copies."""
    return (*machine_findings(facts), *merged(_IN_USE.findings(facts.circumstances)), *run(_COPIES, facts))


def fact_findings(facts: Facts) -> tuple[Finding, ...]:
    """Return the findings of all checks that need no measurement. They may explain a slow result."""
    return run([check for check in CHECKS if check.needs is Need.FACTS], facts)


_OF_TRANSFERS = (*KV.conditions, *(condition for condition in MPI.conditions if condition.id.startswith("ucx-")))


def transfer_findings(transfers: Sequence[Transfer]) -> tuple[Finding, ...]:
    """Return the most certain finding per transfer of GPU memory. Transfers with equal findings are merged."""
    found: list[Finding] = []
    for transfer in transfers:
        run = Circumstances(wiring=Wiring([], {}), transfers=(transfer,))
        causes = [
            (condition, sighting)
            for condition in _OF_TRANSFERS
            for sighting in condition.look(run)
            if isinstance(sighting, Sighting)
        ]
        if causes:
            condition, sighting = min(causes, key=lambda cause: SUREST_FIRST.index(cause[1].confidence))
            found += condition.to_findings([sighting], condition.severity or Verdict.FAIL)
    return merged(found)


def gpu_count_findings(hosts: Mapping[str, int], expected_gpus: int | None) -> tuple[Finding, ...]:
    """Return findings about missing or surplus GPUs when only the GPU count per host is known."""
    snapshots = [
        Snapshot(host=host, origin=Origin.MEASURED, source="", gpus=tuple(GpuFacts(index=gpu) for gpu in range(gpus)))
        for host, gpus in hosts.items()
    ]
    return presence_findings(Facts([*map(Topology, snapshots)], expected_gpus=expected_gpus))


def _check_name(finding: Finding) -> str:
    if finding.severity is Verdict.ERROR:
        return "measured"
    if finding.id == WRONG_DATA:
        return "data_correct"
    effects = next((cause.effects for cause in CAUSES if cause.id == finding.id), ())
    return "collective_bandwidth" if effects == (Effect.SLOW,) else "paths"


def run(checks: Sequence[Check], facts: Facts) -> tuple[Finding, ...]:
    """Run several checks and merge their findings."""
    return merged(finding for check in checks for finding in check_findings(check, facts))


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Merge findings that differ only in their subjects."""
    same: dict[Finding, list[Finding]] = {}
    for finding in findings:
        same.setdefault(replace(finding, subject="", subjects=(), places=()), []).append(finding)
    return tuple(_merge_same(found) for found in same.values())


def _merge_same(same: Sequence[Finding]) -> Finding:
    subjects = tuple(subject for finding in same for subject in finding.subjects or (finding.subject,))
    places = tuple(dict.fromkeys(place for finding in same for place in finding.places))
    return replace(
        same[0],
        subject=joined(finding.subject for finding in same),
        subjects=subjects,
        places=places,
        cure=fill_ids(same[0].cure, places),
    )

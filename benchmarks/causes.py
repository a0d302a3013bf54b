"""Measure how often the right cause is named: random variations of healthy machines, and with one or two causes
planted.

    python -m benchmarks.causes [--variations 1000] [--seed 0] [--table]

Run at the root of a checkout. Each variation picks at random a machine of `profiles/`, its number of nodes, harmless
settings, and facts that could not be read. Two in three then get a planted cause (`tests/fakes/planted.py`), one in six
a second one. The result counts hits (the planted cause is named first; of two, both are named), misses, false alarms (a
cause is named that was not planted and does not follow from one), and causes that are called unknown because a fact is
missing. `--table` first prints what each plant alone is taken for. The exit code is 1 after a miss or a false alarm.

Everything is simulated. It shows that the rules separate causes as designed, not that real machines behave so.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from gpubench.conditions.ranking import Diagnosis
from gpubench.conditions.registry import CAUSES
from gpubench.model.facts.health import REPLAYS
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import KernelSettings, PcieErrors, Snapshot
from gpubench.profiles import all_profiles
from tests.fakes.planted import PLANTS, Job, Plant, simulated, with_nodes, with_ranks

_HARMLESS = (
    {"NCCL_DEBUG": "INFO"},
    {"NCCL_P2P_DISABLE": "0"},
    {"NCCL_P2P_LEVEL": "PXB"},
    {"NCCL_SOCKET_IFNAME": "eth0"},
    {"NCCL_IB_HCA": "mlx5"},
    {"NCCL_NET_GDR_LEVEL": "PHB"},
    {"UCX_TLS": "all"},
    {"NCCL_HOSTID": ""},
    {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    {"OMPI_MCA_pml": "ob1"},
)
_SETTINGS = {
    "nccl-p2p-disabled": {"NCCL_P2P_DISABLE": "1"},
    "nccl-shm-disabled": {"NCCL_SHM_DISABLE": "1"},
    "nccl-algorithm-forced": {"NCCL_ALGO": "Tree"},
    "mpi-cuda-off": {"MPICH_GPU_SUPPORT_ENABLED": "0"},
    "ucx-tls": {"UCX_TLS": "rc,sm"},
}
"""Second causes: variables that can be combined with anything."""

_NOT_FOR_NCCL = {
    *("nccl-default-level", "vm-flat-topology", "gpu-without-pcie-p2p", "nvlink-disabled", "nvlinks-all-down"),
    "acs-nic-redirect",
}
"""Plants with which a variable that disables peer access in NCCL changes nothing: no peer access, or a single GPU."""

_UNREADABLE = "Permission denied"
_ENUMERATED = {"nonfatal.UnsupReq": 9}
_BY_TOTALS = ("pcie-errors", "nvlink-errors", "rdma-port-errors")
"""Planted as totals too, which are ignored when there are two readings."""


@dataclass
class Tally:
    healthy: int = 0
    faulty: int = 0
    hits: int = 0
    unknown: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    false_alarms: Counter[str] = field(default_factory=Counter)


def varied(job: Job, dice: random.Random) -> Job:
    """Return the job with harmless settings, load and unreadable facts; none of it explains anything."""
    settings = dice.choice(_HARMLESS)
    if any(set(settings) & set(file) for rank in job.ranks for file in rank.nccl_files.values()):
        settings = {}  # The environment would override a file's setting.
    job = with_ranks(job, lambda facts: replace(facts, environment={**settings, **facts.environment}))
    changes: Sequence[Callable[[Snapshot], Snapshot]] = (
        _idle,
        lambda node: _old(node, dice),
        lambda node: replace(_old(node, dice), errors_grown=node.errors_grown or _few(node, dice)),
        lambda node: replace(node, machine=replace(node.machine, kernel=f"6.{dice.randrange(20)}.0")),
        lambda node: replace(node, kernel=KernelSettings(unknown={"wsl": _UNREADABLE, "options": _UNREADABLE})),
        lambda node: node,
    )
    gaps: Sequence[Callable[[RankFacts], RankFacts]] = (
        lambda facts: replace(facts, affinity=None, unknown={**facts.unknown, "affinity": _UNREADABLE}),
        lambda facts: replace(facts, verbs_providers=None, unknown={**facts.unknown, "verbs_providers": _UNREADABLE}),
        lambda facts: replace(facts, pid=dice.randrange(1, 4_000_000)),
        lambda facts: facts,
    )
    return with_ranks(with_nodes(job, dice.choice(changes)), dice.choice(gaps))


def _idle(node: Snapshot) -> Snapshot:
    """Idle GPUs train their links down."""
    gpus = (
        replace(gpu, idle=True, pcie=replace(gpu.pcie, generation=1 if gpu.pcie.generation else None))
        for gpu in node.gpus
    )
    return replace(node, gpus=tuple(gpus))


def _old(node: Snapshot, dice: random.Random) -> Snapshot:
    """A machine with a long uptime: every counter has some errors, of unknown age."""
    gpus = (
        replace(
            gpu,
            pcie_replays=(gpu.pcie_replays or 0) + dice.randrange(80),
            nvlinks=tuple(
                replace(link, errors={name: count + dice.randrange(3) for name, count in link.errors.items()})
                for link in gpu.nvlinks or ()
            )
            if gpu.nvlinks is not None
            else None,
        )
        for gpu in node.gpus
    )
    devices = (
        device
        if device.errors is None or device.errors.fatal
        else replace(device, errors=PcieErrors(correctable=dice.randrange(900), nonfatal=9, fatal=0, named=_ENUMERATED))
        for device in node.pci_devices
    )
    ports = (
        replace(port, counters={name: count + dice.randrange(3) for name, count in (port.counters or {}).items()})
        for port in node.rdma_ports
    )
    return replace(node, gpus=tuple(gpus), pci_devices=tuple(devices), rdma_ports=tuple(ports))


def _few(node: Snapshot, dice: random.Random) -> dict[str, dict[str, int]]:
    """A few corrected errors during a run, as on healthy links."""
    return {gpu.device: {REPLAYS: dice.randrange(5)} for gpu in node.gpus}


def judge(tally: Tally, found: Diagnosis, expected: Sequence[str], beside: Sequence[str]) -> None:
    """Compare the named causes with the planted ones, and count."""
    follows = {below for cause in CAUSES if cause.id in (*expected, *beside) for below in cause.implies}
    ids = [ranked.cause.id for ranked in found.named]
    everything = {*ids, *(below.cause.id for ranked in found.named for below in ranked.implied)}
    alarms = [
        ranked.cause.id
        for ranked in found.named
        if ranked.cause.id not in {*expected, *beside, *follows} and not ranked.cause.by_design
    ]
    missing = [id_ for id_ in expected if id_ not in everything]
    if missing and all(id_ in found.unread for id_ in missing):
        tally.unknown += 1
        return
    first = [id_ for id_ in ids if id_ not in beside][:1]
    if not missing and len(expected) == 1 and first != list(expected):
        missing = list(expected)
    tally.misses.update(missing)
    tally.false_alarms.update(alarms)
    tally.hits += bool(expected) and not missing


def run(variations: int, seed: int) -> Tally:
    dice = random.Random(seed)
    tally = Tally()
    plants = [plant for plant in PLANTS if plant.id != "ptrace-blocked"]
    profiles = [profile.name for profile in all_profiles()]
    for _ in range(variations):
        if dice.random() < 1 / 3:
            tally.healthy += 1
            job = varied(simulated(f"{dice.choice(profiles)}*{dice.randrange(1, 4)}"), dice)
            judge(tally, job.diagnosis(), [], [])
            continue
        tally.faulty += 1
        plant: Plant = dice.choice(plants)
        job, expected = plant.make(), [plant.id]
        second = dice.choice([id_ for id_ in _SETTINGS if id_ != plant.id])
        if dice.random() < 1 / 4 and _can_have(plant, job, second):
            settings = _SETTINGS[second]
            job = with_ranks(job, lambda facts, settings=settings: _with_settings(facts, settings))  # type: ignore[misc]
            expected.append(second)
        if plant.id not in ("pcie-generation", *_BY_TOTALS):
            job = varied(job, dice)
        judge(tally, job.diagnosis(), expected, plant.beside)
    return tally


def _with_settings(facts: RankFacts, settings: dict[str, str]) -> RankFacts:
    return replace(facts, environment={**facts.environment, **settings})


def _can_have(plant: Plant, job: Job, second: str) -> bool:
    """Return False for an NCCL variable that cannot matter, as for copies that CUDA makes itself."""
    return not second.startswith("nccl") or (job.staged is None and plant.id not in _NOT_FOR_NCCL)


def table() -> str:
    """Return a table of every plant alone: the cause that is named first, its confidence, and what follows from it."""
    rows = [("planted", "named first", "confidence", "implied", "")]
    for plant in PLANTS:
        found = [ranked for ranked in plant.make().diagnosis().named if ranked.cause.id not in plant.beside]
        first = found[0] if found else None
        implied = ", ".join(below.cause.id for below in first.implied) if first else ""
        named, sure = (first.cause.id, str(first.confidence)) if first else ("nothing", "")
        rows.append((plant.id, named, sure, implied, "hit" if named == plant.id else "MISS"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        print(table())
    start = time.perf_counter()
    tally = run(arguments.variations, arguments.seed)
    print(f"{arguments.variations} variations, seed {arguments.seed}, {time.perf_counter() - start:.1f} s (simulated)")
    print(f"healthy {tally.healthy}, with causes planted {tally.faulty}")
    print(f"hits {tally.hits}, said to be not known {tally.unknown}", end=", ")
    print(f"misses {tally.misses.total()}, false alarms {tally.false_alarms.total()}")
    for what, counts in (("missed", tally.misses), ("false alarm", tally.false_alarms)):
        for id_, count in counts.most_common():
            print(f"  {what}: {id_} {count}")
    return int(bool(tally.misses or tally.false_alarms))


if __name__ == "__main__":
    sys.exit(main())

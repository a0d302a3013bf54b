"""Ranks of one host that cannot share memory, and ranks with different settings."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from gpubench.conditions.checks.check import Check, Facts, join_subjects
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """A warning for ranks of one host with different /dev/shm, and for NCCL settings that not all ranks have.

    The hosts of ranks with another setting than most are named; between two as frequent ones, unset is usual.
    """
    for _, members in groupby(sorted(facts.ranks, key=lambda rank: rank.node), key=lambda rank: rank.node):
        yield from _shared_memory(list(members))
    yield from _settings(facts.ranks)


def _shared_memory(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    devices = {rank.shm_device for rank in ranks if rank.shm_device is not None}
    if len(devices) > 1:
        yield Finding(
            id="shm-not-shared",
            severity=Verdict.WARN,
            subject=f"ranks {', '.join(str(rank.rank) for rank in ranks)} on {ranks[0].host}",
            seen=f"{len(devices)} different /dev/shm among {len(ranks)} ranks of one host",
            expected="one /dev/shm for all ranks of a host",
            cause="a container of its own for each rank: NCCL then uses the network inside the host",
            next_command="run the ranks in one container, or share it: docker run --ipc=host",
        )


def _settings(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    names = sorted({name for rank in ranks for name in rank.environment if name.startswith("NCCL_")})
    for name in names:
        values: dict[str | None, list[RankFacts]] = {}
        for rank in ranks:
            values.setdefault(rank.environment.get(name), []).append(rank)
        if len(values) > 1:
            usual = max(values, key=lambda value: (len(values[value]), value is None))
            shown = "; ".join(f"{value or 'unset'} on {join_subjects(_names(who))}" for value, who in values.items())
            yield Finding(
                id="settings-differ",
                severity=Verdict.WARN,
                subject=name,
                seen=shown,
                expected="the same on every rank",
                cause="the launcher does not pass it on, or a host's profile sets it",
                next_command=f"mpirun -x {name} ..., or srun --export=ALL",
                subjects=tuple(dict.fromkeys(rank.host for rank in ranks if rank.environment.get(name) != usual)),
            )


def _names(ranks: Sequence[RankFacts]) -> list[str]:
    return [f"rank {rank.rank} on {rank.host}" for rank in ranks]


RANKS_ALIKE = Check(
    "ranks_alike", "ranks of a host share memory, and all ranks their settings", find, without_gpus=True
)

"""The groups of ranks, where the same collective runs in several at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpubench.errors import UsageError
from gpubench.model.terms.grouping import grouped
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.model.terms.units import spans

_Key = Callable[[RankIdentity], tuple[int, str]]
"""The number that ranks of one group share, and the group's name where its ranks do not name it."""

_KEYS: Mapping[str, _Key] = {
    "node": lambda rank: (rank.node, f"node {rank.host}"),
    "rail": lambda rank: (rank.local_rank, f"rail {rank.local_rank}"),
    "pairs": lambda rank: (rank.rank // 2, ""),
}

_WHY_ALONE = {
    "node": "there is one rank on its node",
    "rail": "no other node has a rank with its place: rails need several nodes",
    "pairs": "the number of ranks is odd",
}

SPLITS = (*_KEYS, "N")
"""Words that `--split` takes; N is a number of neighbouring ranks."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Some ranks of a job, ascending, and what they are called."""

    name: str
    ranks: tuple[int, ...]


def check_split(text: str) -> None:
    """Raise UsageError where `--split` can mean nothing."""
    if text not in _KEYS and not (text.isdecimal() and int(text) > 1):
        raise UsageError(
            f"--split {text}",
            expected=f"one of {', '.join(_KEYS)}, or the number of ranks a group, from 2 on",
            next_step="--split node",
        )


def groups_of(text: str, identities: Sequence[RankIdentity]) -> tuple[RankGroup, ...]:
    """The groups that a split makes of ranks, by their first rank; UsageError where a rank would be alone."""
    key = _KEYS.get(text) or (lambda rank: (rank.rank // int(text), ""))
    members = grouped(identities, lambda identity: key(identity)[0])
    groups = []
    for ranks in members.values():
        numbers = tuple(each.rank for each in ranks)
        if len(numbers) < 2:
            raise UsageError(
                f"--split {text} leaves {ranks[0]} alone",
                expected="at least two ranks in every group",
                reason=_WHY_ALONE.get(text, "the number of ranks is no multiple of that of a group"),
                next_step=f"another number of ranks than {len(identities)}, or another split",
            )
        groups.append(RankGroup(key(ranks[0])[1] or f"ranks {spans(list(numbers))}", numbers))
    return tuple(groups)

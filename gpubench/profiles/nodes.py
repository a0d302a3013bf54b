"""The profile of a node: the one that was asked for, else a user's own, one of gpubench's, or that of any machine."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpubench.model.paths.links import leads_to_switches
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.profile import Profile
from gpubench.profiles.files import find, own_profiles
from gpubench.profiles.matching import ProfileMatch, match_any


def profile_for(node: Topology, environment: Mapping[str, str], asked: str | None = None) -> ProfileMatch | None:
    """The profile that a node is judged by; None where it has no GPUs and nobody asked for one.

    Raises:
        UsageError: there is none of the name asked for, or it or one of the user's own is broken.
    """
    return profiles_for([node], environment, asked)[0]


def profiles_for(
    nodes: Sequence[Topology], environment: Mapping[str, str], asked: str | None = None
) -> list[ProfileMatch | None]:
    """`profile_for` of every node: of thousands, most are alike, and looked up once.

    Raises:
        UsageError: as there.
    """
    if asked is not None:
        profile = find(asked, environment)
        return [ProfileMatch(profile)] * len(nodes)
    own = own_profiles(environment)
    traits = [_traits(node) for node in nodes]
    known = {
        each: match_any(each.models, each.gpus, switched=each.switched, joined=each.joined, own=own)
        for each in dict.fromkeys(traits)
    }
    return [known[each] for each in traits]


def matched_profiles(nodes: Sequence[Topology], environment: Mapping[str, str]) -> list[Profile | None]:
    """The profile of every node, None where none is known.

    Raises:
        UsageError: as there.
    """
    return [None if found is None else found.profile for found in profiles_for(nodes, environment)]


def profile_of_gpus(
    models: Sequence[str], count: int, node: Topology | None, environment: Mapping[str, str], asked: str | None
) -> Profile | None:
    """The profile for so many GPUs of a node, which may have more; without `node` by the names of their models alone.

    Raises:
        UsageError: as there.
    """
    if asked is not None:
        return find(asked, environment)
    switched = None if node is None else leads_to_switches(node.gpus)
    joined = node is None or _traits(node).joined
    found = match_any(models, count, switched=switched, joined=joined, own=own_profiles(environment))
    return None if found is None else found.profile


class _Traits(NamedTuple):
    """The traits by which a profile is chosen."""

    models: tuple[str, ...]
    gpus: int
    switched: bool | None
    joined: bool


def _traits(node: Topology) -> _Traits:
    return _Traits(
        models=tuple(sorted({gpu.name for gpu in node.gpus if gpu.name})),
        gpus=len(node.gpus),
        switched=leads_to_switches(node.gpus),
        joined=any(link.active for gpu in node.gpus for link in gpu.nvlinks or ()),
    )

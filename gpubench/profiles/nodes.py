"""Which profile the machines of `gpubench check` are judged by."""

from collections.abc import Mapping, Sequence

from gpubench.model.paths.links import leads_to_switches
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.profile import Profile
from gpubench.profiles.files import find, own_profiles
from gpubench.profiles.matching import ProfileMatch, match_any


def matched(
    node: Topology, environment: Mapping[str, str], own: Sequence[Profile] | None = None
) -> ProfileMatch | None:
    """The profile of a node: a user's own first, one of gpubench's, one for any machine; None without GPUs.

    Raises:
        UsageError: one of the user's own is no profile.
    """
    names = sorted({gpu.name for gpu in node.gpus if gpu.name})
    joined = any(link.active for gpu in node.gpus for link in gpu.nvlinks or ())
    candidates = own_profiles(environment) if own is None else own
    return match_any(names, len(node.gpus), switched=leads_to_switches(node.gpus), joined=joined, own=candidates)


def profiles_of(
    nodes: Sequence[Topology], asked: str | None, environment: Mapping[str, str]
) -> list[ProfileMatch | None]:
    """The profile of each node: the one that was asked for, else the one that it matches.

    Raises:
        UsageError: there is none of that name, or it is broken.
    """
    if asked is not None:
        profile = find(asked, environment)
        return [ProfileMatch(profile, len(node.gpus)) for node in nodes]
    own = own_profiles(environment)
    known: dict[tuple[object, ...], ProfileMatch | None] = {}
    found = []
    for node in nodes:
        key = (tuple(sorted({gpu.name or "" for gpu in node.gpus})), len(node.gpus), leads_to_switches(node.gpus))
        if key not in known:
            known[key] = matched(node, environment, own)
        found.append(known[key])
    return found

"""The profile of a machine: by its GPU models, their number, and where their NVLinks lead."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpubench.model.facts.snapshot import NvlinkPeer
from gpubench.model.profiles.profile import Generic, Profile
from gpubench.profiles.files import all_profiles


@dataclass(frozen=True, slots=True)
class ProfileMatch:
    """The profile for a machine, and what part of the board the machine is; `note` is empty where it is a whole one."""

    profile: Profile
    note: str = ""

    def __str__(self) -> str:
        return f"{self.profile.name} ({self.note})" if self.note else self.profile.name


def match_any(
    gpu_names: Sequence[str], count: int, *, switched: bool | None, joined: bool, own: Sequence[Profile] = ()
) -> ProfileMatch | None:
    """As `match`, a user's own first, and where nothing fits the one for any machine, with or without NVLink.

    `joined` says whether NVLinks join its GPUs. None where there are no GPUs, or their names are unknown.
    """
    found = match(gpu_names, count, switched=switched, among=own) or match(gpu_names, count, switched=switched)
    bare = found is not None and count > 1 and not joined and found.profile.nvlink is not None and _has_bridges(found)
    if not count or (found is not None and not bare):
        return found
    generic = Generic.NVLINK if joined else Generic.PCIE
    note = "" if found is None else f"without the NVLink bridges of {found.profile.name}"
    return next((ProfileMatch(each, note) for each in all_profiles() if each.match.generic is generic), None)


def _has_bridges(found: ProfileMatch) -> bool:
    """True where bridges join cards in pairs: a healthy machine may have such cards without any."""
    nvlink = found.profile.nvlink
    joined = [gpu for pair in nvlink.pairs for gpu in pair[:2]] if nvlink is not None else []
    return len(joined) == len(set(joined)) > 0


def match(
    gpu_names: Sequence[str], count: int, *, switched: bool | None = None, among: Sequence[Profile] | None = None
) -> ProfileMatch | None:
    """The profile for `count` visible GPUs of these NVML names, None where there is none; `among` these, or ours.

    One for this very number comes first, then the part of the next larger one that so many GPUs are. GPUs of several
    models match nothing. `switched` says, where it is known, whether NVLinks lead to NVSwitches or from GPU
    to GPU: a board of four whose GPUs are joined directly is no slice of one with NVSwitches. A profile of an NVLink
    domain is for its nodes together, and no node's.
    """
    models = set(gpu_names)
    fitting = [
        each
        for each in (all_profiles() if among is None else among)
        if each.match.generic is None
        and each.domain is None
        and models <= set(each.match.gpus)
        and 1 <= count <= each.match.visible
        and (switched is None or _is_switched(each) in (None, switched))
    ]
    if not models or not fitting:
        return None
    whole = min(fitting, key=lambda each: each.match.visible)
    return ProfileMatch(whole.part(count), _part_of_board(whole, count))


def _part_of_board(profile: Profile, count: int) -> str:
    """'3 of 8 GPUs: a slice of the board'; cards in slots of their own have no board."""
    board, has_switches = profile.match.board, _is_switched(profile) is True
    if count == 1 and profile.nvlink is not None and not has_switches and profile.match.board_gpus is None:
        return "one GPU of it"
    has_board = profile.match.board_gpus is not None or has_switches
    return f"{count} of {board} GPUs: a slice of the board" if has_board and count < board else ""


def domain_of(gpu_names: Sequence[str], among: Sequence[Profile] = ()) -> Profile | None:
    """The profile of an NVLink domain of several nodes with these GPUs; `among` are looked at before ours."""
    models = set(gpu_names)
    found = (each for each in (*among, *all_profiles()) if each.domain is not None and models <= set(each.match.gpus))
    return next(found, None) if models else None


def _is_switched(profile: Profile) -> bool | None:
    """True where its NVLinks lead to NVSwitches; None where it has none."""
    return None if profile.nvlink is None else profile.nvlink.to is NvlinkPeer.SWITCH

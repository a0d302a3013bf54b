"""A profile from results of healthy machines."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gpubench.errors import UsageError
from gpubench.model.profiles.learning import learn, samples_of
from gpubench.model.profiles.profile import Expected, Profile
from gpubench.model.profiles.rules import check_expected
from gpubench.model.profiles.toml_text import toml_text
from gpubench.model.results.result_file import ResultFile
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.plain import to_plain
from gpubench.model.terms.units import counted, format_size
from gpubench.model.terms.verdict import Verdict
from gpubench.profiles.files import find, own_profiles, read_profile
from gpubench.profiles.matching import match
from gpubench.readers.results.registry import read_results

_SOURCE = "learned"
_EXPECTED = "what gpubench allreduce, p2p, check and the like write with --output FILE.json on a healthy machine"


def learned(
    results: Sequence[Path], *, name: str, like: str | None, environment: Mapping[str, str]
) -> tuple[str, list[str]]:
    """The text of the profile, and what a person should know of it: outliers, how much was used.

    Raises UsageError: a file that is no whole result of a healthy, measured machine; machines of several kinds; a
    profile that cannot be right.
    """
    files = [_healthy(path) for path in dict.fromkeys(results)]
    samples = [sample for file in files for sample in samples_of(file)]
    if not samples:
        raise UsageError(
            "the results hold no figure that a profile could",
            expected=_EXPECTED,
            reason="they are of CPU buffers, of one GPU, or of facts alone",
            next_step="gpubench p2p --output p2p.json and gpubench allreduce --output allreduce.json, on that machine",
        )
    machine = find(like, environment) if like is not None else _matching(files, environment)
    found = learn(samples, _SOURCE)
    started = sorted((file.circumstances.started_at or "")[:10] for file in files)
    text = f"{files[0].circumstances.tool}, {counted(len(files), 'result')}, {started[0]} to {started[-1]}"
    bare = replace(machine, name=name, title=f"{machine.title}, learned", sources={_SOURCE: text}, curve=(), sha256="")
    # All GPUs of the machine are what a value is for where it says nothing.
    visible = machine.match.visible
    values = [replace(each, gpus=None) if each.gpus == visible else each for each in found.expected]
    expected, refused = _believable(bare, values)
    if not expected:
        raise UsageError(
            "no figure of the results can be right",
            expected="figures that the links of the machine can carry, and that a bad one would miss",
            reason="; ".join(refused),
        )
    profile = replace(bare, expected=tuple(expected))
    written = toml_text(to_plain(profile))
    read_profile(written.encode(), f"{name}.toml")
    notes = [
        f"{counted(len(samples), 'figure')} of {counted(len(files), 'result')} became {counted(len(expected), 'value')}"
    ]
    far = (
        f"left out: {each.key.quantity} {each.value:.4g}, {each.subject} of {each.file}: far from the median"
        for each in found.outliers
    )
    return written, [*notes, *far, *refused]


def _believable(profile: Profile, expected: Sequence[Expected]) -> tuple[list[Expected], list[str]]:
    """The values that a profile may have, and why not the others: a result can be odd on a healthy machine."""
    kept, refused = [], []
    for each in expected:
        size = "" if each.size_bytes is None else f" of {format_size(each.size_bytes)}"
        try:
            check_expected(profile, each, f"{each.quantity}{size}")
        except UsageError as error:
            refused.append(f"left out: {error.seen}, and not {error.expected}")
        else:
            kept.append(each)
    return kept, refused


def _healthy(path: Path) -> ResultFile:
    """A result of gpubench.

    Raises UsageError: it cannot be read, is another's, not whole, not measured, not healthy, or of a newer version.
    """
    file = read_results(path)
    if file.verdict is None:
        raise UsageError(
            f"{path} is {file.kind}, which does not say whether the machine was healthy",
            expected=_EXPECTED,
            next_step="the same run with --output FILE.json",
        )
    if not file.complete or file.verdict in (Verdict.FAIL, Verdict.ERROR):
        how = f"ended with {file.verdict}" if file.complete else "was cut short"
        raise UsageError(
            f"{path} is the result of a run that {how}",
            expected="whole results of healthy machines",
            next_step="gpubench check says what is wrong with that machine; leave this result out",
        )
    origin = file.circumstances.origin
    if origin != Origin.MEASURED:
        raise UsageError(
            f"{path} was {origin}", expected="measured results: a model is no evidence", next_step="leave it out"
        )
    return file


def _matching(files: Sequence[ResultFile], environment: Mapping[str, str]) -> Profile:
    """The profile whose machine the results are of.

    Raises UsageError: none is, or they are of machines of several kinds.
    """
    kinds = {_gpus(file) for file in files}
    if len(kinds) > 1:
        shown = "; ".join(f"{count} of {', '.join(names)}" for names, count in sorted(kinds))
        raise UsageError(
            f"the results are of several kinds of machine: {shown}",
            expected="one kind for a profile",
            next_step="learn one profile of each kind; --like NAME where they are one kind",
        )
    names, count = kinds.pop()
    found = match(names, count, among=own_profiles(environment)) or match(names, count)
    if found is None:
        raise UsageError(
            f"no profile has {counted(count, 'GPU')} of {', '.join(names) or 'a name'}",
            expected="a profile whose machine the new one can have",
            next_step="--like NAME, or --like FILE with the machine and no values",
        )
    return found.profile


def _gpus(file: ResultFile) -> tuple[tuple[str, ...], int]:
    """The GPU models of a result, and how many GPUs a node has."""
    told = file.circumstances
    names = tuple(sorted(set(told.gpus or told.models)))
    if file.rows:
        return names, max(row.ranks // row.nodes for row in file.rows)
    ends = {end for pair in file.pairs for end in (pair.source_bus_id, pair.destination_bus_id) if end}
    return names, len(told.gpus) or len(ends)

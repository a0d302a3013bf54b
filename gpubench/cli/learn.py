"""A profile from results of healthy machines."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpubench.errors import UsageError
from gpubench.model.learning import Sample, learn, samples_of
from gpubench.model.plain import to_plain
from gpubench.model.profile import Expected, Profile
from gpubench.model.profile_rules import check_expected
from gpubench.model.report import SCHEMA_VERSION, Origin
from gpubench.model.toml_text import toml_text
from gpubench.model.units import format_size
from gpubench.model.verdict import Verdict
from gpubench.profiles import find, match, own_profiles, read_profile
from gpubench.readers.json_lines import load_json

_SOURCE = "learned"
_EXPECTED = "what gpubench allreduce, p2p and the like write with --output FILE.json on a healthy machine"


def learned(
    results: Sequence[Path], *, name: str, like: str | None, environment: Mapping[str, str]
) -> tuple[str, list[str]]:
    """The text of the profile, and what a person should know of it: outliers, how much was used.

    Raises:
        UsageError: a file that is no whole result of a healthy, measured machine; machines of several kinds; a profile
            that cannot be right.
    """
    documents = {str(path): _document(path) for path in results}
    samples = [sample for file, document in documents.items() for sample in samples_of(document, file)]
    if not samples:
        raise UsageError("the results hold no figure that a profile could", expected=_EXPECTED)
    machine = find(like, environment) if like is not None else _matching(documents, environment)
    found = learn(samples, _SOURCE)
    first = next(iter(documents.values()))["metadata"]
    started = sorted(str(each["metadata"]["started_at"])[:10] for each in documents.values())
    text = f"gpubench {first['gpubench_version']}, {len(documents)} results, {started[0]} to {started[-1]}"
    bare = replace(machine, name=name, title=f"{machine.title}, learned", sources={_SOURCE: text}, sha256="")
    expected, refused = _believable(bare, [_shortened(each, machine.match.visible) for each in found.expected])
    if not expected:
        raise UsageError(
            "no figure of the results can be right",
            expected="figures that the links of the machine can carry, and that a bad one would miss",
            reason="; ".join(refused),
        )
    profile = replace(bare, expected=tuple(expected))
    written = toml_text(to_plain(profile))
    read_profile(written.encode(), f"{name}.toml")
    notes = [f"{len(samples)} figures of {len(documents)} results became {len(expected)} values"]
    return written, [*notes, *(_outlier(each) for each in found.outliers), *refused]


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


def _shortened(expected: Expected, visible: int) -> Expected:
    """All GPUs of the machine are what a value is for where it says nothing."""
    return replace(expected, gpus=None) if expected.gpus == visible else expected


def _outlier(sample: Sample) -> str:
    return f"left out: {sample.key.quantity} {sample.value:.4g}, {sample.subject} of {sample.file}: far from the median"


def _document(path: Path) -> Mapping[str, Any]:
    """A result of gpubench.

    Raises:
        UsageError: it cannot be read, is another's, not whole, not measured, not healthy, or of a newer version.
    """
    try:
        document = load_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", expected=_EXPECTED) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}", expected=_EXPECTED) from None
    if not isinstance(document, dict) or not isinstance(document.get("metadata"), dict):
        raise UsageError(f"{path} is no result of gpubench", expected=_EXPECTED)
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"{path} has schema version {version}",
            expected=f"version {SCHEMA_VERSION}",
            reason="a newer gpubench wrote it, or somebody edited it",
        )
    if not document.get("complete") or document.get("verdict") in (Verdict.FAIL, Verdict.ERROR):
        raise UsageError(
            f"{path} is the result of a run that ended with {document.get('verdict')}",
            expected="whole results of healthy machines",
        )
    origin = document["metadata"].get("origin")
    if origin != Origin.MEASURED:
        raise UsageError(f"{path} was {origin}", expected="measured results: a model is no evidence")
    return document


def _matching(documents: Mapping[str, Mapping[str, Any]], environment: Mapping[str, str]) -> Profile:
    """The profile whose machine the results are of.

    Raises:
        UsageError: none is, or they are of machines of several kinds.
    """
    kinds = {_gpus(document["metadata"]) for document in documents.values()}
    if len(kinds) > 1:
        shown = "; ".join(f"{count} of {', '.join(names)}" for names, count in sorted(kinds))
        raise UsageError(f"the results are of several kinds of machine: {shown}", expected="one kind for a profile")
    names, count = kinds.pop()
    found = match(names, count, among=own_profiles(environment)) or match(names, count)
    if found is None:
        raise UsageError(
            f"no profile has {count} GPUs of {', '.join(names) or 'a name'}",
            expected="a profile whose machine the new one can have",
            next_step="--like NAME, or --like FILE with the machine and no values",
        )
    return found.profile


def _gpus(metadata: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """The GPU models of a result, and how many GPUs a node has."""
    ranks = metadata.get("ranks") or ()
    if ranks:
        per_node = max(sum(other["node"] == rank["node"] for other in ranks) for rank in ranks)
        return tuple(sorted({rank["gpu"] or "" for rank in ranks})), per_node
    described = metadata["options"].get("gpus", {}).values()
    return tuple(sorted({text.partition(" ")[2] for text in described})), len(described)

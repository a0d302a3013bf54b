"""Circumstances of a comparison: the machines of both sides, and what else changed between them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from gpubench.errors import UsageError
from gpubench.model.results.compare import CircumstanceRow
from gpubench.model.results.result_file import FileCircumstances, ResultFile
from gpubench.model.terms.verdict import Origin

TOPOLOGY = "topology"

_MOST_HOSTS = 2

Texts = Mapping[str, str | None]
"""Circumstances of one file, by name."""


def check_same_machine(base: Sequence[ResultFile], new: Sequence[ResultFile], option: str) -> None:
    """Raise UsageError where files are of machines with other GPUs, or a model stands against a measurement.

    What a file does not tell cannot differ. `option` is what asks for the comparison anyway.
    """
    first = base[0]
    for other in (*base[1:], *new):
        differences = list(_differences(first, other))
        if differences:
            raise UsageError(
                f"{other.name} is of another machine than {first.name}: {'; '.join(differences)}",
                expected="results of the same kind of machine",
                reason="differences between machines are no regression",
                next_step=f"{option} compares them all the same",
            )


def have_other_gpus(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> bool:
    """True where the sides have other GPU models, or another number of them."""
    return any(True for _ in _other_gpus(base[0], new[0]))


def _differences(one: ResultFile, other: ResultFile) -> Iterator[str]:
    yield from _other_gpus(one, other)
    simulated = [_simulated(file) for file in (one, other)]
    if None not in simulated and simulated[0] != simulated[1]:
        yield "simulated, and not measured" if simulated[1] else "measured, and not simulated"


def _other_gpus(one: ResultFile, other: ResultFile) -> Iterator[str]:
    before, after = one.circumstances.gpus, other.circumstances.gpus
    if before and after and Counter(before) != Counter(after):
        yield f"{_counted(after)}, and not {_counted(before)}"
    models = [file.circumstances.models for file in (one, other)]
    if all(models) and set(models[0]) != set(models[1]):
        yield f"{' and '.join(models[1])}, and not {' and '.join(models[0])}"


def _counted(models: Sequence[str]) -> str:
    return " and ".join(f"{count} × {model}" for model, count in Counter(models).items())


def _simulated(file: ResultFile) -> bool | None:
    origins = file.origins
    if not origins and file.circumstances.origin is not None:
        origins = {file.circumstances.origin}
    return Origin.SIMULATED in origins if origins else None


def are_other_hosts(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> bool:
    """True where both sides name their hosts, and these are not the same: what lies between them may differ."""
    before, after = ({host for file in side for host in file.circumstances.hosts} for side in (base, new))
    return bool(before) and bool(after) and before != after


def describe_file(file: ResultFile) -> str:
    """A file in words: the tool that wrote it, NCCL's version, GPUs and hosts, or that these are not known."""
    known = file.circumstances
    nccl = known.libraries.get("NCCL")
    gpus = _counted(known.gpus) or " and ".join(known.models)
    machine = f"{gpus} on {', '.join(known.hosts[:_MOST_HOSTS])}" if gpus else ""
    more = f" and {len(known.hosts) - _MOST_HOSTS} hosts more" if len(known.hosts) > _MOST_HOSTS else ""
    parts = (known.tool, f"NCCL {nccl.partition(' from ')[0]}" if nccl else "", machine + more)
    return ", ".join(filter(None, parts)) + ("" if machine else "; does not say of which GPUs")


def circumstance_rows(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> list[CircumstanceRow]:
    """Every circumstance that a file tells of, those that changed first."""
    parts: tuple[Callable[[FileCircumstances], Texts], ...] = (_single, _libraries, lambda each: each.options)
    rows: list[CircumstanceRow] = []
    for texts_of in parts:
        before, after = ([texts_of(file.circumstances) for file in files] for files in (base, new))
        rows += _rows(before, after, None)
    before_set, after_set = ([file.circumstances.environment for file in files] for files in (base, new))
    rows += _rows(before_set, after_set, "not set")
    return sorted(rows, key=lambda row: not row.changed)


def _rows(
    before: Sequence[Texts | None], after: Sequence[Texts | None], absent: str | None
) -> Iterator[CircumstanceRow]:
    """A row a name. `absent` is what it means that a file which tells of such things does not tell of this one."""
    for name in dict.fromkeys(name for each in (*before, *after) for name in each or ()):
        base, new = (_joined(name, [each for each in side if each is not None], absent) for side in (before, after))
        yield CircumstanceRow(name=name, base=base, new=new, changed=None not in (base, new) and base != new)


def _joined(name: str, texts: Sequence[Texts], absent: str | None) -> str | None:
    found = dict.fromkeys(text for each in texts if (text := each.get(name, absent)) is not None)
    return " or ".join(found) or None


def _single(each: FileCircumstances) -> Texts:
    return {
        "GPUs": _counted(each.gpus) or None,
        "hosts": ", ".join(each.hosts) or None,
        TOPOLOGY: each.topology,
        "tool": each.tool if " " in each.tool else None,
        "profile": each.profile,
    }


def _libraries(each: FileCircumstances) -> Texts:
    """Without the file that a library was loaded from: two environments with the same version are alike."""
    return {name: text.partition(" from ")[0] for name, text in each.libraries.items()}

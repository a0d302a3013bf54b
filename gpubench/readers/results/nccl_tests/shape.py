"""The collective of rows that do not name theirs: what their shape leaves, or what a person says, where that fits."""

from collections.abc import Mapping, Sequence

from gpubench.errors import UsageError
from gpubench.readers.results.nccl_tests.names import ELEMENT_TYPES, OutputLine

_SHAPES: Mapping[str, tuple[bool | None, bool, bool | None]] = {
    "allreduce": (True, False, False),
    "reducescatter": (True, False, True),
    "reduce": (True, True, False),
    "broadcast": (False, True, False),
    "allgather": (False, False, True),
    "alltoall": (False, False, True),
    "gather": (False, True, True),
    "scatter": (False, True, True),
    "sendrecv": (None, False, False),
    "alltoallv": (False, False, None),
    "hypercube": (False, False, True),
}
"""Whether rows name a reduction and a root, and count the elements of one rank's block; None is either. sendrecv names
the first reduction, which it does not use."""

_FACTOR_OF_THREE_RANKS = 1.2
"""allreduce's busbw is 4/3 of algbw with three ranks and more with others; sendrecv's is algbw."""


def collective_of(lines: Sequence[OutputLine], ranks: int, told: str | None, where: str) -> str:
    """The collective of rows that do not name it; `told` is what a person says, `where` names the file.

    Raises UsageError where several have such rows and nobody says which, or where none with that name has.
    """
    possible = _possible(max(lines, key=lambda each: each.size_bytes), ranks)
    if told is None and len(possible) == 1:
        return possible[0]
    if told is None:
        raise UsageError(
            f"{where}: nothing says which collective this is",
            expected="a line such as '# Collective test starting: all_gather_perf', the command, or --collective",
            reason=f"nccl-tests before 2.17 does not say it, and rows like these are of {', '.join(possible)}",
            next_step=f"the same command with --collective {possible[0]}, if that is what ran",
        )
    if told not in possible:
        raise UsageError(
            f"{where}: its rows are not of {told}, as --collective says",
            expected=f"one that has such rows: {', '.join(possible)}",
            reason="another collective ran",
            next_step=f"the same command with --collective {possible[0]}, if that is what ran",
        )
    return told


def _possible(line: OutputLine, ranks: int) -> list[str]:
    """The collectives that have a row like this one."""
    blocks = None if ranks == 1 else line.size_bytes == line.count * ELEMENT_TYPES[line.element_type][1] * ranks
    seen = line.reduction != "none", line.root >= 0, blocks
    possible = [
        name
        for name, shape in _SHAPES.items()
        if all(None in (one, other) or one == other for one, other in zip(shape, seen, strict=True))
    ]
    if not (line.names_reduction and line.names_root):
        possible = [name for name in possible if name in _before_2_11(line)]
    figures = line.placed[0]
    if {"allreduce", "sendrecv"} <= set(possible) and ranks > 2 and figures.algbw_gb_s > 0:
        possible.remove("sendrecv" if figures.busbw_gb_s > _FACTOR_OF_THREE_RANKS * figures.algbw_gb_s else "allreduce")
    return possible


def _before_2_11(line: OutputLine) -> tuple[str, ...]:
    """The collectives whose programs printed these columns: alltoall's redop was blank, and sendrecv had none."""
    if line.names_root:
        return ("reduce",) if line.names_reduction else ("broadcast", "gather", "scatter")
    if line.names_reduction:
        return ("alltoall",) if line.reduction == "none" else ("allreduce", "reducescatter")
    return "allgather", "sendrecv", "hypercube"

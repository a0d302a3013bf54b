"""Matrices of short words between devices."""

from collections.abc import Iterator, Mapping, Sequence

_GAP = 2


def matrix_lines(
    title: str, cells: Mapping[str, Mapping[str, str]], rows: Sequence[str], columns: Sequence[str], width: int
) -> Iterator[str]:
    """A matrix with its title in the corner, in as many blocks of columns as the width asks for."""
    lead = max(map(len, (title, *rows)))
    cell = max(len(word) for word in (*columns, *(cells[row].get(column, "X") for row in rows for column in columns)))
    per_block = max(1, (width - lead) // (cell + _GAP))
    for start in range(0, len(columns), per_block):
        block = columns[start : start + per_block]
        yield title.ljust(lead) + "".join(column.rjust(cell + _GAP) for column in block)
        for row in rows:
            words = (cells[row].get(column, "X") for column in block)
            yield row.ljust(lead) + "".join(word.rjust(cell + _GAP) for word in words)

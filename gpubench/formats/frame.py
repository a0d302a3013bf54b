"""Convert results to pandas data frames."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args, get_type_hints

from gpubench.errors import UsageError
from gpubench.model.results.report import CollectiveRow, Matrix, Record
from gpubench.model.results.result_file import unmark_text
from gpubench.model.terms.verdict import Finding

if TYPE_CHECKING:
    import pandas
    from pandas import DataFrame as DataFrame


def read_frame(path: str | Path) -> "pandas.DataFrame":
    """Read the rows of a .csv, .json or .jsonl result into a data frame with nullable pandas types.

    Raises: UsageError for any other suffix.
    """
    import pandas

    path = Path(path)
    if path.suffix == ".csv":
        # Read text columns as strings. Otherwise pandas converts 'NA' to a missing value and '007' to 7.
        texts = {
            name: "string" for name, kind in get_type_hints(CollectiveRow).items() if str in (kind, *get_args(kind))
        }
        frame = pandas.read_csv(path, dtype=texts, keep_default_na=False, na_values=[""]).convert_dtypes()
        marked = [str(name) for name in frame.columns if isinstance(frame[name].dtype, pandas.StringDtype)]
        return frame.assign(**{name: frame[name].map(unmark_text, na_action="ignore") for name in marked})
    if path.suffix == ".json":
        return pandas.DataFrame(json.loads(path.read_text())[CollectiveRow.section]).convert_dtypes()
    if path.suffix == ".jsonl":
        records = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [record for record in records if record.pop("kind") == "row"]
        return pandas.DataFrame(rows).convert_dtypes()
    raise UsageError(f"{path} has no readable rows", expected="a .csv, .json or .jsonl file that gpubench wrote")


def make_frame(section: Matrix | Sequence[Record | Finding]) -> "pandas.DataFrame":
    """Convert rows of one type, or a matrix, to a data frame with nullable pandas types."""
    import pandas

    if isinstance(section, Matrix):
        return pandas.DataFrame.from_dict(dict(section.cells), orient="index").convert_dtypes()
    return pandas.DataFrame([row.to_record() for row in section]).convert_dtypes()

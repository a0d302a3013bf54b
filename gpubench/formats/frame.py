"""Results as pandas data frames."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from gpubench.errors import UsageError
from gpubench.model.results.report import ROWS_SECTION

if TYPE_CHECKING:
    import pandas


def read_frame(path: str | Path) -> "pandas.DataFrame":
    """The rows of a .csv, .json or .jsonl result, one a line, with pandas' nullable types; UsageError for others."""
    import pandas

    path = Path(path)
    if path.suffix == ".csv":
        return pandas.read_csv(path).convert_dtypes()
    if path.suffix == ".json":
        return pandas.DataFrame(json.loads(path.read_text())[ROWS_SECTION]).convert_dtypes()
    if path.suffix == ".jsonl":
        records = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [record for record in records if record.pop("kind") == "row"]
        return pandas.DataFrame(rows).convert_dtypes()
    raise UsageError(
        f"{path} has no rows that can be read", expected="a .csv, .json or .jsonl file that gpubench wrote"
    )

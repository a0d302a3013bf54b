"""The options that write down what was found, and show it again."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gpubench.errors import exclusive
from gpubench.jobs.recording import Recording


@dataclass(frozen=True, kw_only=True)
class RecordingOptions:
    """The folder to show instead of a machine, and the one to write to."""

    replay: Annotated[str | None, typer.Option("--replay", metavar="DIR", help="Show what --record wrote.")] = None
    record: Annotated[
        str | None,
        typer.Option(
            "--record", metavar="DIR", help="Also write there the facts of every node and rank, and raw samples."
        ),
    ] = None

    def parse(self, excluded: Mapping[str, object]) -> Recording:
        """The folders that were named. `excluded` are other options that say what to show, with their values.

        Raises:
            UsageError: --replay beside one of these.
        """
        beside = [option for option, value in excluded.items() if value is not None]
        if self.replay is not None and beside:
            raise exclusive(["--replay", *beside], "--replay alone: it shows what was recorded")
        return Recording(
            record=None if self.record is None else Path(self.record),
            replay=None if self.replay is None else Path(self.replay),
        )

"""The options that write down what was found, and show it again."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gpubench.cli.plain_values import SIMULATE
from gpubench.cli.signature import option
from gpubench.errors import exclusive
from gpubench.jobs.recording import Recording


@dataclass(frozen=True, kw_only=True)
class RecordingOptions:
    """The folder to show instead of a machine, and the one to write to."""

    help_group: ClassVar = SIMULATE

    replay: str | None = option("DIR", "Show what --record wrote.")
    record: str | None = option("DIR", "Also write there the facts of every node and rank, and raw samples.")

    def parse(self, excluded: Mapping[str, object]) -> Recording:
        """The folders that were named; UsageError for --replay beside any option that is given of `excluded`."""
        beside = [option for option, value in excluded.items() if value is not None]
        if self.replay is not None and beside:
            raise exclusive(["--replay", *beside], "--replay alone: it shows what was recorded")
        return Recording(
            record=None if self.record is None else Path(self.record),
            replay=None if self.replay is None else Path(self.replay),
        )

"""`gpubench libraries`: its options, and the report."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpubench.cli.options import PresentationOptions, RecordingOptions
from gpubench.cli.signature import app_of, flag, option

if TYPE_CHECKING:
    from gpubench.jobs.libraries import LibrariesPlan

HELP = """
NCCL, MPI, UCX, NVSHMEM, MSCCL++, PyTorch, CuPy, and the kernel's ways for a NIC into GPU memory: which are here, in
which version, from where, and who would load which. Two NCCLs of different versions in one environment are a finding.
Nothing is loaded into this process, and nothing is measured: a library is asked in a process of its own, PyTorch's
files are read.

  gpubench libraries

  gpubench libraries --format json

  gpubench libraries --replay node7/

  mpirun -n 16 gpubench libraries --strict
"""


@dataclass(frozen=True, kw_only=True)
class LibrariesOptions:
    """The environment to look at, and how to show it."""

    recording: RecordingOptions
    strict: bool = flag("Exit 1 for what is not PASS, 3 where a host has no NCCL: for gates.")
    timeout: float = option("S", "Seconds in which every part has to answer.", default=30.0, min=0.1, max=86400)
    presentation: PresentationOptions

    def plan(self) -> "LibrariesPlan":
        """The plan that these options ask for; UsageError for --replay beside --record."""
        from gpubench.jobs.libraries import SECTIONS, LibrariesPlan
        from gpubench.jobs.sources import Here, Replayed

        recording = self.recording.parse({"--record": self.recording.record})
        source = Here(self.timeout) if recording.replay is None else Replayed(recording.replay)
        return LibrariesPlan(
            source=source,
            recording=recording,
            strict=self.strict,
            timeout_s=self.timeout,
            presentation=self.presentation.parse(SECTIONS),
        )


def _run(options: LibrariesOptions) -> int:
    from gpubench.jobs import libraries

    return libraries.run(options.plan(), sys.argv[1:])


app = app_of(HELP, LibrariesOptions, _run)

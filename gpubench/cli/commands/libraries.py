"""`gpubench libraries`: its options, and the report."""

import sys
from typing import TYPE_CHECKING

from gpubench.cli.options import PresentationOptions, RecordingOptions
from gpubench.cli.signature import JUDGE, HelpPage, app_of, flag, step_timeout
from gpubench.records import dataclass

if TYPE_CHECKING:
    from gpubench.jobs.libraries import LibrariesPlan

HELP = HelpPage(
    (
        ("List the libraries of this environment", "gpubench libraries"),
        ("Check all nodes of a job, and fail unless the verdict is PASS", "mpirun -n 16 gpubench libraries --strict"),
        ("Write JSON", "gpubench libraries --format json"),
        ("Show what --record wrote", "gpubench libraries --replay node7/"),
    ),
    """
Libraries are NCCL, MPI, UCX, NVSHMEM, MSCCL++, PyTorch, nccl4py, CuPy, and the kernel modules that let a NIC reach GPU
memory. The report has the version and place of each, and which program would load which. Two NCCLs of different
versions in one environment are a finding. Nothing is measured, and each library is loaded in a process of its own;
PyTorch is not loaded, its files are read.

Exit codes: 0 done; 1 with --strict, the verdict is not PASS; 2 wrong usage; 3 with --strict, a host has no NCCL.
""",
)


@dataclass(frozen=True, kw_only=True)
class LibrariesOptions:
    """The environment to look at, and how to show it."""

    recording: RecordingOptions
    strict: bool = flag("Exit 1 unless the verdict is PASS, 3 if a host has no NCCL.", common=True, group=JUDGE)
    timeout: float = step_timeout("the answer of one library", default=30.0)
    presentation: PresentationOptions

    def plan(self) -> "LibrariesPlan":
        """The plan of these options. Raises UsageError for --replay beside --record."""
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

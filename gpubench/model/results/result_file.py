"""The contents of a file of results, whoever wrote it: rows, and the circumstances of the measurement."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpubench.model.results.latencies import LatencyRow
from gpubench.model.results.report import CollectiveRow, PairRow
from gpubench.model.results.rows.checks import VerdictRow
from gpubench.model.results.rows.evidence import EvidenceRow
from gpubench.model.terms.verdict import Finding

MODELS = "gpu_models"
"""The option in the metadata of a check that tells the models of its GPUs."""

CPU_TIME = "time of the CPU alone (-C)"
"""The note on a row of nccl-tests' whose bandwidths are by another time."""

SHOWN_BY_ROWS = ("sizes", "dtypes", "ops", "placements", "pairs", "gpus", "seed", "root", MODELS)
"""Options that every row or device shows by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a person says of rows that do not say it themselves: the collective, by gpubench's name, ranks and nodes."""

    collective: str | None = None
    ranks: int | None = None
    nodes: int = 1


NOTHING_TOLD = Told()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCircumstances:
    """The circumstances that numbers depend on. What a file does not tell is empty, or None for `environment`.

    `gpus` are the models, one a GPU; `models` are those of a check, which may have lost some of them.
    `wrong_elements` is what the run as a whole says of its data, None where it says nothing.
    """

    tool: str
    hosts: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    origin: str | None = None
    started_at: str | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    topology: str | None = None
    profile: str | None = None
    wrong_elements: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFile:
    """Rows of one file; `latencies` are of collectives, too, and lack something that `rows` have.

    `kind` says who wrote it; `remarks` are what a reader had to leave out, in sentences. `verdict` is that of the run,
    None where the file does not tell. `evidence` is None of files that hold none. `findings` are those of commands that
    judge a machine, None of others; of a check, `checks` are the verdicts by check, and `devices` its GPUs and NICs.
    """

    name: str
    kind: str
    circumstances: FileCircumstances
    rows: tuple[CollectiveRow, ...] = ()
    latencies: tuple[LatencyRow, ...] = ()
    pairs: tuple[PairRow, ...] = ()
    evidence: tuple[EvidenceRow, ...] | None = None
    findings: tuple[Finding, ...] | None = None
    checks: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[VerdictRow, ...] = ()
    complete: bool = True
    verdict: str | None = None
    remarks: tuple[str, ...] = ()

    @property
    def measured(self) -> tuple[CollectiveRow | LatencyRow | PairRow, ...]:
        """All its rows."""
        return (*self.rows, *self.latencies, *self.pairs)

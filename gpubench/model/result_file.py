"""What a file of results holds, whoever wrote it: rows, and the circumstances under which they were measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpubench.model.evidence_rows import EvidenceRow
from gpubench.model.report import CollectiveRow, PairRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What numbers depend on. Empty is what a file does not tell; of `environment` that is None.

    `gpus` are the models, one a GPU; `wrong_elements` is what the run as a whole says of its data, None where it says
    nothing.
    """

    tool: str
    hosts: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    topology: str | None = None
    profile: str | None = None
    wrong_elements: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFile:
    """Rows of one file. `kind` says who wrote it; `remarks` are what a reader had to leave out, in sentences."""

    name: str
    kind: str
    circumstances: Circumstances
    rows: tuple[CollectiveRow, ...] = ()
    pairs: tuple[PairRow, ...] = ()
    evidence: tuple[EvidenceRow, ...] = ()
    complete: bool = True
    remarks: tuple[str, ...] = ()

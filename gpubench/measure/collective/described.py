"""A run of a collective in words: what its metadata are made of, and its recording begins with."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpubench.collectives.request import Asked
from gpubench.model.paths.evidence import EvidenceUse
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.model.terms.split import RankGroup
from gpubench.model.terms.sweep import DroppedSize

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options in a run's metadata beside those of its sweep. `settings` are the names of its variants."""

    allocator: str
    timeout_s: float
    evidence: EvidenceUse
    strict: bool
    settings: tuple[str, ...] = ()
    split: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The origin of a simulated run's times, and the pairs that its faults make go through host memory.

    `profile` is as the metadata have it.
    """

    source: str
    seed: int
    profile: Mapping[str, str]
    staged: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedCollective:
    """A run before it is observed: the request, the ranks, and how they were asked to measure.

    `hosts` are the nodes in their order, by the names that a recording gives them. `unwatched` is the reason why paths
    are not observed, empty where there is none. `parts` are the groups that measured at once, none where all ranks did
    together.
    """

    schema_version: int
    collective: str
    backend: str
    origin: Origin
    asked: Asked
    options: RunOptions
    ranks: tuple[RankIdentity, ...]
    hosts: tuple[str, ...] = ()
    parts: tuple[RankGroup, ...] = ()
    dropped_sizes: tuple[DroppedSize, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    unwatched: str = ""
    model: Model | None = None

    @property
    def groups(self) -> tuple[RankGroup | None, ...]:
        """The groups that measured rows, else None for all ranks together."""
        return self.parts or (None,)

    def ranks_of(self, part: RankGroup | None) -> tuple[RankIdentity, ...]:
        """The ranks of a group, or all."""
        return self.ranks if part is None else tuple(self.ranks[rank] for rank in part.ranks)

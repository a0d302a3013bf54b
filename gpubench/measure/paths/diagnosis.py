"""The causes that explain the paths of a run, for the verdict on fallback and as rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice

from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.conditions.definition.condition import BESIDE
from gpubench.conditions.definition.policy import BYTES, Slowed
from gpubench.conditions.ranking import UNKNOWN, Diagnosis, Named, diagnose, path_kinds
from gpubench.conditions.registry import CAUSES
from gpubench.model.paths.transport import Pair, Transport
from gpubench.model.results.fallback import Explanation
from gpubench.model.results.report import (
    CauseRow,
    CollectiveRow,
    Effect,
    UnreadRow,
)

_MOST_ASKED = 2000
"""Of pairs that fare alike, so many are asked what explains them: a job of a thousand ranks has a million."""


class Explained:
    """The causes of a run, looked for once, and asked for pairs that fare alike."""

    def __init__(self, circumstances: Circumstances) -> None:
        self.circumstances = circumstances

    def with_slow(self, rows: Sequence[CollectiveRow]) -> "Explained":
        """The same with what these slow rows show; itself where they show nothing more."""
        several = [row for row in rows if row.nodes > 1]
        return Explained(replace(self.circumstances, slow=tuple(several))) if several else self

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """All causes that hold."""
        return diagnose(CAUSES, self.circumstances)

    def explaining(self, staged: Mapping[Pair, Sequence[Transport]]) -> tuple[Named, ...]:
        """The causes that explain why these pairs go through host memory, the likeliest first."""
        asked = dict(islice(staged.items(), _MOST_ASKED))
        return self.diagnosis.explaining(path_kinds(self.circumstances.wiring, asked))

    def first(self, staged: Mapping[Pair, Sequence[Transport]]) -> Explanation:
        """The likeliest of them; without evidence none is named."""
        return next((self.diagnosis.with_ids(named.explanation) for named in self.explaining(staged)), UNKNOWN)

    def slowing(self, *, small: bool) -> tuple[Named, ...]:
        """The causes of slow operations, the likeliest first: small ones consist of launches, large ones of bytes."""
        links = self._links()
        return self.diagnosis.slowing(*((Slowed.LAUNCHES, *links) if small else (*links, Slowed.LAUNCHES)))

    def _links(self) -> tuple[Slowed, ...]:
        """What carries the bytes, the slowest first; where no GPU is known, all that may."""
        run = self.circumstances
        gpus = [gpu for _, _, gpu in run.gpus()]
        if not gpus:
            return tuple(reversed(BYTES))
        nvlinks = all(any(link.active for link in gpu.nvlinks or ()) for gpu in gpus)
        used = {
            Slowed.NETWORK: len(run.nodes) > 1,
            Slowed.PCIE: (self._between_gpus and not nvlinks) or bool(run.staged),
            Slowed.NVLINK: self._between_gpus and nvlinks,
        }
        return tuple(each for each, holds in used.items() if holds)

    @property
    def _between_gpus(self) -> bool:
        """True if bytes may pass from GPU to GPU: ranks that share one GPU use no link."""
        wiring = self.circumstances.wiring
        return len(wiring.gpus) < 2 or any(not wiring.one_gpu((0, other)) for other in range(1, len(wiring.gpus)))

    def rows(self, *, of_programs: bool = False) -> list[CauseRow]:
        """Causes of paths that were seen, then of those that may be slow; `of_programs`: MPI or others move bytes."""
        staged = self.circumstances.staged or {}
        explaining = self.explaining(staged)
        ids = {named.cause.id for named in explaining}
        effects = BESIDE if of_programs else (Effect.SLOW, Effect.WRONG)
        beside = [
            each for each in self.diagnosis.of_effect(*effects) if each.cause.id not in ids and self._matters(each)
        ]
        rows = [row for named in explaining for row in self._rows(named, staged)]
        return rows + [row for named in beside for row in self._rows(named, {})]

    def _matters(self, named: Named) -> bool:
        """True if a cause of slow paths slows anything that ranks use: those of one GPU have no links between them."""
        slows = named.cause.explains.slows
        return self._between_gpus or not slows or not set(slows).isdisjoint((Slowed.LAUNCHES, *self._links()))

    def conditions(self) -> list[CauseRow]:
        """All that holds, of machines that nothing was sent between: what takes direct paths away, then the rest."""
        ordered = sorted(self.diagnosis.named, key=lambda named: set(named.effects) <= set(BESIDE))
        return [row for named in ordered for row in self._rows(named, {})]

    def unread(self) -> list[UnreadRow]:
        """The reason why it is not known whether other causes hold; of machines without GPUs nobody asks."""
        if not self.circumstances.wiring.gpus:
            return []
        titles = {cause.id: cause.title for cause in CAUSES}
        found = [(id_, each) for id_, unread in self.diagnosis.unread.items() for each in unread]
        return [UnreadRow(id=id_, title=titles[id_], subject=each.subject, reason=each.reason) for id_, each in found]

    def _rows(self, named: Named, staged: Mapping[Pair, object]) -> Iterator[CauseRow]:
        yield self._row(named, staged)
        for below in named.implied:
            yield replace(self._row(below, staged), verdict=named.gravity, implied_by=named.cause.id)

    def _row(self, named: Named, staged: Mapping[Pair, object]) -> CauseRow:
        cause = named.cause
        return CauseRow(
            id=cause.id,
            evidence=named.seen,
            advice=named.with_ids(named.cure),
            paths=sum(any(each.touches(pair) for each in named.sightings) for pair in staged),
            verdict=named.gravity,
            hosts=self._hosts(named),
            title=cause.title,
            confidence=named.confidence,
            effects=named.effects,
            subject=named.subject,
            implied_by=None,
            settles=named.with_ids(cause.settles),
            link=cause.link,
        )

    def _hosts(self, named: Named) -> tuple[str, ...]:
        wiring = self.circumstances.wiring
        found: dict[str, None] = {}
        for sighting in named.sightings:
            pairs = {gpu for pair in sighting.pairs or () for gpu in pair}
            gpus = pairs or (range(len(wiring.gpus)) if sighting.gpus is None else sighting.gpus)
            found.update(dict.fromkeys(wiring.host(gpu) for gpu in sorted(gpus)))
        return tuple(found)


def first_cause(staged: Mapping[Pair, Sequence[Transport]], circumstances: Circumstances) -> Explanation:
    """The likeliest cause of what some pairs do."""
    return Explained(replace(circumstances, staged=staged)).first(staged)

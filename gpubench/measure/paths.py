"""Observe the paths between ranks, and find the causes of host-staged paths.

The sources are link counters, traffic on idle links, and NCCL's log.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from time import perf_counter, sleep
from typing import NamedTuple

from msgspec.structs import replace

from gpubench.conditions.circumstances import Circumstances
from gpubench.conditions.condition import BESIDE
from gpubench.conditions.policy import BYTES, Slowed
from gpubench.conditions.ranking import UNKNOWN, Diagnosis, Named, diagnose, path_kinds
from gpubench.conditions.registry import CAUSES
from gpubench.model.facts.traffic import IdleGpu, LinkRates
from gpubench.model.paths.p2p import MOVED_SHARE, Carried
from gpubench.model.paths.transport import Conclusion, Edge, LoggedChannels, Pair, RankSelection, Transport, Tuning
from gpubench.model.results import report
from gpubench.model.results.fallback import Explanation, KnownPath, cure_columns
from gpubench.model.terms.units import BYTES_PER_GB
from gpubench.ports.backend import LibraryLog
from gpubench.ports.copies import LinkBytes, LinkCounters
from gpubench.ports.traffic import GpuUsers, NoUsers
from gpubench.readers.nccl_log.lines import INFO, parse_channel, parse_connection, parse_tuning, ring_pairs, tree_pairs

_COUNTED_FROM_BYTES = 2**20  # NVLink counters have a resolution of 1 KiB, and other traffic increases them too
PCIE_COUNTS_TO = 2**32  # NVML's PCIe byte counters wrap around to 0 at this value
_MOST_PCIE_BYTES = PCIE_COUNTS_TO / 2.5
"""A transfer of more expected bytes might wrap the counter. A collective may move twice the expected bytes. With
headers, an H200 counts 1.09 bytes per byte sent and 1.08 per byte received.
"""

# No PCIe link wraps the counter faster, because PCIe 6 x16 reaches 121 GB/s
_LEAST_WRAP_SECONDS = PCIE_COUNTS_TO / 128e9


class CounterReading(NamedTuple):
    """The link counters of a GPU, and the clock time in seconds just before they were read."""

    gpu: int
    seconds: float
    counted: LinkBytes


class Meter:
    """Reads a GPU's link counters before and after copies, to measure how many bytes each link moved."""

    def __init__(self, counters: LinkCounters, clock: Callable[[], float] = perf_counter) -> None:
        self._counters = counters
        self._clock = clock
        self._seen: set[tuple[int, str]] = set()

    def read(self, gpu: int) -> CounterReading:
        return CounterReading(gpu, self._clock(), self._counters.read(gpu))

    def since(self, reading: CounterReading, expected_bytes: int, *, receives: bool = False) -> Carried:
        """Return the bytes that the GPU sent since a reading, or received if `receives` is set."""
        gpu, since, before = reading
        after = self._counters.read(gpu)
        if receives:
            nvlink = _moved(before.nvlink_received, after.nvlink_received)
            pcie = _moved(before.pcie_received, after.pcie_received)
        else:
            nvlink = _moved(before.nvlink_sent, after.nvlink_sent)
            pcie = _moved(before.pcie_sent, after.pcie_sent)
        if pcie is not None:
            is_unique = expected_bytes <= _MOST_PCIE_BYTES or self._clock() - since < _LEAST_WRAP_SECONDS
            pcie = pcie % PCIE_COUNTS_TO if is_unique else None
        return Carried(
            nvlink_bytes=nvlink,
            nvlink_share=self._share((gpu, "nvlink"), nvlink, expected_bytes),
            pcie_bytes=pcie,
            pcie_share=self._share((gpu, "pcie"), pcie, expected_bytes),
        )

    def _share(self, counter: tuple[int, str], moved: int | None, expected_bytes: int) -> float | None:
        if moved is None or expected_bytes < _COUNTED_FROM_BYTES:
            return None
        share = moved / expected_bytes
        if share >= MOVED_SHARE:
            self._seen.add(counter)
        return share if counter in self._seen else None


def _moved(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


WINDOW_SECONDS = 0.02  # Long enough for counters that update slowly, too short to wrap NVML's PCIe counter
_MOST_SETTLING_SECONDS = 2.0
_SECONDS_BETWEEN_LOOKS = 0.1
"""NVML averages utilization over the last 1/6 to 1 s. Wait until only the load from other processes remains."""


class IdleWindow:
    """Reads the traffic and load of GPUs that this job leaves idle, to detect other users.

    The caller keeps the job idle.
    """

    def __init__(
        self,
        counters: LinkCounters,
        users: GpuUsers | None = None,
        clock: Callable[[], float] = perf_counter,
        wait: Callable[[float], object] = sleep,
    ) -> None:
        self._counters, self._users = counters, users or NoUsers()
        self._clock, self._wait = clock, wait

    def look(self, gpus: Sequence[int]) -> tuple[IdleGpu, ...]:
        """Read the link counters of these GPUs over 20 ms. Wait up to 2 s more if one of the GPUs is busy."""
        before = [(self._clock(), self._counters.read(gpu)) for gpu in gpus]
        self._wait(WINDOW_SECONDS)
        rates = []
        for gpu, (since, counted) in zip(gpus, before, strict=True):
            after = self._counters.read(gpu)
            rates.append(_rates(counted, after, self._clock() - since))
        start = self._clock()
        uses = [self._users.read(gpu) for gpu in gpus]
        while any(use.is_busy for use in uses) and self._clock() - start < _MOST_SETTLING_SECONDS:
            self._wait(_SECONDS_BETWEEN_LOOKS)
            uses = [self._users.read(gpu) for gpu in gpus]
        return tuple(IdleGpu(rates=rate, use=use) for rate, use in zip(rates, uses, strict=True))


def _rates(before: LinkBytes, after: LinkBytes, seconds: float) -> LinkRates:
    return LinkRates(
        nvlink_sent=_rate(before.nvlink_sent, after.nvlink_sent, seconds),
        nvlink_received=_rate(before.nvlink_received, after.nvlink_received, seconds),
        pcie_sent=_rate(before.pcie_sent, after.pcie_sent, seconds, PCIE_COUNTS_TO),
        pcie_received=_rate(before.pcie_received, after.pcie_received, seconds, PCIE_COUNTS_TO),
    )


def _rate(before: int | None, after: int | None, seconds: float, counts_to: int | None = None) -> float | None:
    if before is None or after is None or seconds <= 0:
        return None
    moved = after - before if counts_to is None else (after - before) % counts_to
    return moved / seconds / BYTES_PER_GB


class NcclLogListener:
    """Parses this rank's NCCL log while NCCL writes it."""

    def __init__(self, log: LibraryLog) -> None:
        self._log = log
        self._channel_bits: dict[tuple[int, int, Transport, bool, bool], int] = {}
        self._ring: set[tuple[int, int]] = set()
        self._tree: set[tuple[int, int]] = set()
        self._is_readable = log.is_readable()

    def listen(self) -> Tuning | None:
        """Read the new lines, and return the last algorithm and protocol that they name."""
        tuning = None
        for line in self._log.lines() if self._is_readable else ():
            message = line.partition(INFO)[2]
            head, _, text = message.partition(b" : ")
            place = parse_channel(head)
            found = None if place is None else parse_connection(text)
            if place is not None and found is not None:
                channel, connection = place
                key = found.src, found.dst, found.transport, connection == 1, found.received
                self._channel_bits[key] = self._channel_bits.get(key, 0) | 1 << channel
            self._ring.update(ring_pairs(line))
            self._tree.update(tree_pairs(line))
            tuning = parse_tuning(message) or tuning
        return tuning

    def selection(self) -> RankSelection:
        edges = (
            Edge(src, dst, LoggedChannels(transport, bits, peer_to_peer, received))
            for (src, dst, transport, peer_to_peer, received), bits in self._channel_bits.items()
        )
        return RankSelection(
            no_log=self._log.no_log, edges=tuple(edges), ring=frozenset(self._ring), tree=frozenset(self._tree)
        )


_MOST_EXPLAINED = 2000  # Limit on pairs whose cause is looked up, because a thousand ranks have a million pairs


class Explained:
    """The causes of slow or host-staged paths in a run. They are diagnosed once and then matched to pairs of ranks."""

    def __init__(self, circumstances: Circumstances) -> None:
        self.circumstances = circumstances

    def add_slow_rows(self, rows: Sequence[report.CollectiveRow]) -> "Explained":
        """Return a diagnosis that also considers the slow rows that were measured across nodes."""
        several = [row for row in rows if row.nodes > 1]
        return Explained(replace(self.circumstances, slow=tuple(several))) if several else self

    @cached_property
    def diagnosis(self) -> Diagnosis:
        return diagnose(CAUSES, self.circumstances)

    def explaining(self, staged: Mapping[Pair, Sequence[Transport]]) -> tuple[Named, ...]:
        """Return the causes that make these pairs host-staged, most likely first."""
        pairs = dict(islice(staged.items(), _MOST_EXPLAINED))
        return self.diagnosis.explaining(path_kinds(self.circumstances.wiring, pairs))

    def add_causes(self, paths: Sequence[KnownPath], find_pair: Callable[[KnownPath], Pair]) -> list[KnownPath]:
        """Add the most likely cause to every host-staged path. If there are more than 2,000 such paths, add none."""
        staged = {find_pair(path): path.transports for path in paths if path.judgement.conclusion is Conclusion.STAGED}
        if len(staged) > _MOST_EXPLAINED:
            return list(paths)
        causes = self.diagnosis.by_cause(path_kinds(self.circumstances.wiring, staged))
        return [replace(path, cause=causes.get(find_pair(path), "")) for path in paths]

    def first(self, staged: Mapping[Pair, Sequence[Transport]]) -> Explanation:
        """Return the most likely cause that makes these pairs host-staged, or UNKNOWN."""
        return next((self.diagnosis.fill_ids(named.explanation) for named in self.explaining(staged)), UNKNOWN)

    def slowing(self, *, small: bool, percent: float | None = None) -> tuple[Named, ...]:
        """Return the causes of operations that reach `percent` of the expected speed, most likely first.

        Small operations are limited by launches, large operations by bandwidth.
        """
        links = self._links()
        parts = (Slowed.LAUNCHES, *links) if small else (*links, Slowed.LAUNCHES)
        return self.diagnosis.slowing(*parts, percent=None if small else percent)

    def _links(self) -> tuple[Slowed, ...]:
        """Return the kinds of links in use, slowest first. Return all kinds if no GPU is known."""
        run = self.circumstances
        gpus = [gpu for _, _, gpu in run.gpus()]
        if not gpus:
            return tuple(reversed(BYTES))
        nvlinks = all(any(link.active for link in gpu.nvlinks or ()) for gpu in gpus)
        used = {
            Slowed.NETWORK: len(run.nodes) > 1,
            Slowed.PCIE: (self._uses_gpu_links and not nvlinks) or bool(run.staged),
            Slowed.NVLINK: self._uses_gpu_links and nvlinks,
        }
        return tuple(link for link, is_used in used.items() if is_used)

    @property
    def _uses_gpu_links(self) -> bool:
        """True unless all ranks share one GPU."""
        wiring = self.circumstances.wiring
        return len(wiring.gpus) < 2 or any(not wiring.share_gpu((0, other)) for other in range(1, len(wiring.gpus)))

    def rows(self, *, of_programs: bool = False) -> list[report.CauseRow]:
        """Return the causes of host-staged paths, then causes of slow or wrong operations on the links in use.

        Set `of_programs` if a library without a log, such as MPI, moves the data.
        """
        staged = self.circumstances.staged or {}
        explaining = self.explaining(staged)
        ids = {named.cause.id for named in explaining}
        effects = BESIDE if of_programs else (report.Effect.SLOW, report.Effect.WRONG)
        rows = [row for named in explaining for row in self._rows(named, staged)]
        used = {Slowed.LAUNCHES, *self._links()}
        for named in self.diagnosis.of_effect(*effects):
            slowed = named.cause.explains.slows
            if named.cause.id not in ids and (self._uses_gpu_links or not slowed or not used.isdisjoint(slowed)):
                rows += self._rows(named, {})
        return rows

    def conditions(self) -> list[report.CauseRow]:
        """Return all conditions found on the machines, starting with those that prevent direct paths."""
        ordered = sorted(self.diagnosis.named, key=lambda named: set(named.effects) <= set(BESIDE))
        return [row for named in ordered for row in self._rows(named, {})]

    def unread(self) -> list[report.UnreadRow]:
        """Return the causes that could not be checked, with the reason. Return none on machines without GPUs."""
        if not self.circumstances.wiring.gpus:
            return []
        titles = {cause.id: cause.title for cause in CAUSES}
        return [
            report.UnreadRow(id=id_, title=titles[id_], subject=fact.subject, reason=fact.reason)
            for id_, facts in self.diagnosis.unread.items()
            for fact in facts
        ]

    def _rows(self, named: Named, staged: Mapping[Pair, object]) -> Iterator[report.CauseRow]:
        yield self._cause_row(named, staged)
        for below in named.implied:
            yield replace(self._cause_row(below, staged), verdict=named.gravity, implied_by=named.cause.id)

    def _cause_row(self, named: Named, staged: Mapping[Pair, object]) -> report.CauseRow:
        cause = named.cause
        return report.CauseRow(
            id=cause.id,
            evidence=named.seen,
            **cure_columns(named.cure),
            paths=sum(any(sighting.touches(pair) for sighting in named.sightings) for pair in staged),
            verdict=named.gravity,
            hosts=self._hosts(named),
            title=cause.title,
            confidence=named.confidence,
            effects=named.effects,
            subject=named.subject,
            implied_by=None,
            settles=named.settles,
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
    """Return the most likely cause that makes these pairs host-staged."""
    return Explained(replace(circumstances, staged=staged)).first(staged)

"""The course of a watch: interval after interval, what each job does, and for how long."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gpubench.measure.watch.explanation import explain
from gpubench.measure.watch.jobs import RunningJob, running_jobs
from gpubench.measure.watch.rules import decide
from gpubench.measure.watch.signals import Joined, Members, Pcie, Signals, signals
from gpubench.model.facts.traffic_rates import NodeRates
from gpubench.model.paths.topology import Topology
from gpubench.model.results.explanation import Explanation
from gpubench.model.results.rows.watch import Way
from gpubench.model.terms.verdict import Verdict

STEADY_INTERVALS: Mapping[Way, int] = {Way.STAGED: 2, Way.SOCKETS: 2, Way.UNBALANCED: 3, Way.WAITING: 3}
"""So many intervals in a row make an alarm of what one may show by chance, as between two phases of a job."""

SILENT_INTERVALS = 2
"""A driver that does not answer for so many in a row is worth a finding, also where it comes back."""

ALARMS = tuple(STEADY_INTERVALS)
"""Gravest first."""

MOST_DOUBT = 0.1
"""Of the time on the direct way: a job passes with so much beside it that nobody knows, or that looks staged and is not
so for long enough. One interval is always allowed, between two phases."""

_QUIET = (Way.IDLE,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A job in one interval: what its links show, which way its bytes go, and what that means, in words."""

    job: RunningJob
    seen: Signals
    way: Way
    meaning: str


def observe(rates: NodeRates, joined: Joined) -> tuple[Observed, ...]:
    """The jobs of a node over one interval."""
    found = []
    for job in running_jobs(rates):
        seen = signals(job, rates.nics, joined)
        way, meaning = decide(seen)
        found.append(Observed(job=job, seen=seen, way=way, meaning=meaning))
    return tuple(found)


def needs_closer_look(observed: Sequence[Observed]) -> frozenset[int]:
    """The processes of jobs whose traffic may be staged, and of which it is not known what NCCL does in them."""
    suspects = (each for each in observed if each.seen.pcie in (Pcie.ACROSS, Pcie.BOTH) or each.seen.idle_gpus)
    several = (each for each in suspects if each.seen.members is not Members.ONE or each.seen.network != "quiet")
    return frozenset(task.pid for each in several for task in each.job.tasks if task.communicators is not True)


@dataclass(slots=True)
class TimeOnWay:
    """All intervals in which a job went one way; sums are GB, and how many intervals came in a row at most."""

    way: Way
    first_seconds: float
    seconds: float = 0.0
    intervals: int = 0
    in_a_row: int = 0
    most_in_a_row: int = 0
    moved: dict[str, float] = field(default_factory=dict)
    known_seconds: dict[str, float] = field(default_factory=dict)
    last: Observed | None = None

    @property
    def is_steady(self) -> bool:
        """True where that is enough for an alarm."""
        return self.most_in_a_row >= STEADY_INTERVALS.get(self.way, 1)

    def add(self, observed: Observed, seconds: float) -> None:
        """One interval more."""
        self.seconds += seconds
        self.intervals += 1
        self.in_a_row += 1
        self.most_in_a_row = max(self.most_in_a_row, self.in_a_row)
        self.last = observed
        for name in ("nvlink_gb_s", "pcie_sent_gb_s", "pcie_received_gb_s", "network_gb_s"):
            rate = getattr(observed.seen, name)
            if rate is not None:
                self.moved[name] = self.moved.get(name, 0.0) + rate * seconds
                self.known_seconds[name] = self.known_seconds.get(name, 0.0) + seconds

    def rate(self, name: str) -> float | None:
        """The mean rate of one kind, GB/s; None where it was never known."""
        return self.moved[name] / self.known_seconds[name] if self.known_seconds.get(name) else None


@dataclass(slots=True)
class JobCourse:
    """A job on a node from its first interval on."""

    node: str
    name: str
    stretches: dict[Way, TimeOnWay] = field(default_factory=dict)
    explanation: Explanation | None = None
    explained: Way | None = None

    def add(self, observed: Observed, seconds: float, now: float) -> None:
        """One interval more, which ended `now`."""
        for way, stretch in self.stretches.items():
            stretch.in_a_row = stretch.in_a_row if way is observed.way else 0
        self.stretches.setdefault(observed.way, TimeOnWay(observed.way, now)).add(observed, seconds)

    @property
    def main(self) -> TimeOnWay:
        """What the job is said to do: the gravest alarm that was steady, else what it did longest while it was busy.

        Beside the direct way it is what is in doubt, where that is more than a passing interval.
        """
        alarm = next((each for way in ALARMS if (each := self.stretches.get(way)) and each.is_steady), None)
        if alarm is not None:
            return alarm
        calm = [each for each in self.stretches.values() if each.way not in (*_QUIET, *ALARMS)]
        quiet = [each for each in self.stretches.values() if each.way in _QUIET]
        passing = list(self.stretches.values())
        longest = max(calm or quiet or passing, key=lambda each: each.seconds)
        if longest.way is not Way.DIRECT:
            return longest
        doubts = [each for each in passing if each.way in (Way.UNKNOWN, Way.NOT_TOLD, *ALARMS)]
        lasting = sum(each.intervals for each in doubts) > 1
        if lasting and sum(each.seconds for each in doubts) > MOST_DOUBT * longest.seconds:
            return max(doubts, key=lambda each: each.seconds)
        return longest

    @property
    def verdict(self) -> Verdict:
        """What is to be said of it: only what went directly passes."""
        return verdict_of(self.main, self.explanation)


def verdict_of(stretch: TimeOnWay, explanation: Explanation | None) -> Verdict:
    """The verdict on one way of a job; a staged path that somebody may want, or that has no better, is no failure."""
    way = stretch.way
    if way in (Way.STAGED, Way.SOCKETS) and stretch.is_steady:
        if explanation is not None and explanation.by_design:
            return Verdict.SKIP
        observed = stretch.last
        wanted = observed is not None and observed.job.one_process and not observed.job.by_nccl
        return Verdict.WARN if wanted else Verdict.FAIL
    if way in ALARMS:
        return Verdict.WARN if stretch.is_steady else Verdict.ERROR
    return {Way.DIRECT: Verdict.PASS, Way.UNKNOWN: Verdict.ERROR}.get(way, Verdict.SKIP)


class Course:
    """Everything that was seen of some nodes. `topology` finds the node of a host; None: nothing is known of it.

    `lost` are the GPUs that fell off the bus, by host and name, with what the driver says.
    """

    def __init__(self, topology: Callable[[str], Topology | None]) -> None:
        self.jobs: dict[tuple[str, str], JobCourse] = {}
        self._silent: dict[str, tuple[str, int]] = {}
        self.lost: dict[tuple[str, str], str] = {}
        self.seconds = 0.0
        self.traffic_seen = False
        self._topology = topology
        self._joined: dict[str, Joined] = {}

    def observe(self, rates: NodeRates) -> tuple[Observed, ...]:
        """The jobs of a node over one interval, before it counts."""
        return observe(rates, self._joined_of(rates.host))

    def add(self, rates: NodeRates, observed: Sequence[Observed], now: float) -> None:
        """Count an interval of a node, which ended `now`, in seconds since the watch began."""
        self.seconds = max(self.seconds, now)
        if rates.driver_silent is not None:
            self.silent(rates.host, rates.driver_silent)
            return
        if self._silent.get(rates.host, ("", 0))[1] < SILENT_INTERVALS:
            self._silent.pop(rates.host, None)  # one answer that came late is no driver that hangs
        self.lost |= {(rates.host, gpu.device): gpu.lost for gpu in rates.gpus if gpu.lost is not None}
        for each in observed:
            key = rates.host, each.job.name
            course = self.jobs.setdefault(key, JobCourse(*key))
            course.add(each, rates.end - rates.begin, now)
            self.traffic_seen = self.traffic_seen or each.way not in _QUIET
            self._explain(course, each, rates.host)

    def silent(self, host: str, reason: str) -> None:
        """Count an interval in which the driver of a node did not answer."""
        self._silent[host] = reason, self._silent.get(host, ("", 0))[1] + 1

    @property
    def silences(self) -> dict[str, str]:
        """The nodes whose driver did not answer for several intervals in a row, or at the end, with the reason."""
        return {host: reason for host, (reason, _) in self._silent.items()}

    def _explain(self, course: JobCourse, observed: Observed, host: str) -> None:
        """Once, when it is sure that there is something to explain."""
        way = observed.way
        if way not in (Way.STAGED, Way.SOCKETS) or course.explained is way or not course.stretches[way].is_steady:
            return
        node = self._topology(host)
        if node is not None:
            course.explanation, course.explained = explain(observed.job, way, node, observed.seen.staged_ends), way

    def _joined_of(self, host: str) -> Joined:
        if host not in self._joined:
            node = self._topology(host)
            self._joined[host] = joined_by(node)
        return self._joined[host]


def joined_by(node: Topology | None) -> Joined:
    """Whether NVLinks join two GPUs of a node, each found once."""
    gpus = {} if node is None else {gpu.bus_id: gpu for gpu in node.gpus}
    known: dict[tuple[str, str], bool | None] = {}

    def joined(one: str, other: str) -> bool | None:
        if (one, other) not in known:
            ends = gpus.get(one), gpus.get(other)
            links = None if node is None or ends[0] is None or ends[1] is None else node.nvlinks(ends[0], ends[1])
            known[one, other] = None if links is None else links > 0
        return known[one, other]

    return joined

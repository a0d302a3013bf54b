"""Classify a job's traffic on NVLink, PCIe and the network, and derive its path with a decision table."""

from collections.abc import Callable, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from gpubench.measure.watch.jobs import RunningJob
from gpubench.model.facts.traffic import FOREIGN_GB_S, LOOPBACK, GpuRates, NicRates, sum_rates
from gpubench.model.results.watch import Way

# A PCIe link or NIC at this rate carries data. A job's kernel launches and polling stay below it
BUSY_GB_S = FOREIGN_GB_S
QUIET_GB_S = 0.05  # Idle PCIe links of H200s carry up to 0.02 GB/s. Rates up to here are too low to judge
NVLINK_QUIET_SHARE = 0.05  # NVLinks below this share of the PCIe traffic carry only control traffic such as barriers
BESIDE_SHARE = 0.05
"""PCIe traffic up to this share of a GPU's NVLink traffic is control traffic, not a staged peer. If one of seven
peers were staged, the share would be a sixth.
"""

REQUESTS_SHARE = 0.1
"""When a GPU reads over PCIe, its read requests count as sent bytes. They are ignored up to this share of the
received bytes. On H200s the share was 0.06 during copies into a GPU by a copy engine. It depends on the request
size.
"""

SOCKETS_SHARE = 0.25  # GPUs whose PCIe links send at most this share of the traffic on sockets do not cause it

MATCHING = 1.3
"""Staged traffic leaves some GPUs for host memory and enters other GPUs, so sent and received bytes agree within
this factor. Staged copies on H200s sent 1.094 bytes per 1.079 bytes received.
"""

UNBALANCED_SHARE = 0.3  # A rail is unbalanced if its traffic is this share below or above the median rail
PCIE_MOST_GB_S = 128
"""No PCIe link of a GPU carries more per direction, because PCIe 6 x16 reaches 121 GB/s. Kernels cannot have sent
more than this rate times their run time. Copy engines, which NCCL's kernels do not use, must have sent the rest.
"""

AT_WORK_PERCENT, IDLE_PERCENT = 90, 5  # GPUs that wait inside NCCL run its kernel all the time


class Nvlinks(StrEnum):
    """How a job uses the NVLinks between its GPUs.

    PARTLY means that NVLinks carry some pairs and PCIe carries others. LITTLE is too little traffic to judge.
    """

    BUSY = "busy"
    LITTLE = "little"
    QUIET = "quiet"
    PARTLY = "partly"
    NONE = "none"
    UNKNOWN = "unknown"


class Pcie(StrEnum):
    """How a job's GPUs use PCIe.

    IN, OUT  traffic only into or only out of GPUs
    ACROSS   some GPUs send what others receive
    BOTH     both directions, but not clearly from GPU to GPU
    BESIDE   traffic in addition to busy NVLinks, and not between GPUs
    NICS     as much traffic as the NICs carry
    LITTLE   too little traffic to judge
    """

    QUIET = "quiet"
    LITTLE = "little"
    IN = "in"
    OUT = "out"
    BOTH = "both ways"
    BESIDE = "beside"
    NICS = "nics"
    ACROSS = "across"
    UNKNOWN = "unknown"


class NetworkUse(StrEnum):
    """How the node uses the network. SOCKETS is the loopback, or Ethernet while RDMA ports are up and idle."""

    QUIET = "quiet"
    RDMA = "RDMA"
    ETHERNET = "Ethernet"
    SOCKETS = "sockets"
    UNKNOWN = "unknown"


class Members(StrEnum):
    """Whether a job's GPUs on this node exchange data, judging by the job's processes."""

    EXCHANGE = "exchange"
    SEVERAL = "several"
    ONE = "one"
    UNKNOWN = "unknown"


class Signals(Struct, frozen=True, kw_only=True):
    """The classified traffic of a job during an interval. `doubts` are the reasons why something is unknown."""

    nvlinks: Nvlinks
    pcie: Pcie
    network: NetworkUse
    members: Members
    nvlink_gb_s: float | None
    pcie_sent_gb_s: float | None
    pcie_received_gb_s: float | None
    network_gb_s: float | None
    staged_ends: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    odd_rails: tuple[str, ...] = ()
    idle_gpus: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def staged_hop(self) -> str:
        """The host-staged hop of a job whose other hops use NVLinks, for example 'GPU3 → GPU0', or empty if unknown."""
        return " → ".join(map(", ".join, self.staged_ends)) if all(self.staged_ends) else ""


Joined = Callable[[str, str], bool | None]  # Whether NVLinks connect two GPUs, by bus ID. None if unknown


def signals(job: RunningJob, nics: Sequence[NicRates], joined: Joined) -> Signals:
    """Classify a job's traffic by its rates on GPUs and NICs."""
    sent, received = (sum_rates([getattr(gpu, f"pcie_{name}") for gpu in job.gpus]) for name in ("sent", "received"))
    nvlink = sum_rates(
        [
            None
            if gpu.nvlink_sent is None or gpu.nvlink_received is None
            else max(gpu.nvlink_sent, gpu.nvlink_received)
            for gpu in job.gpus
        ]
    )
    pcie = _pcie(job, sent, received)
    network, network_gb_s = _network(job, nics)
    if network is NetworkUse.SOCKETS and _sends_nothing(job, sent, network_gb_s):
        network = NetworkUse.QUIET
    nvlinks = _nvlinks(job, nvlink, sent, joined)
    ends = _staged_ends(job)
    if pcie is Pcie.ACROSS and not _are_joined(job, joined):
        nvlinks = Nvlinks.NONE if nvlinks is Nvlinks.QUIET else nvlinks
    elif nvlinks is Nvlinks.BUSY and pcie is Pcie.ACROSS and (all(ends) or _has_idle_nvlinks(job)):
        nvlinks = Nvlinks.PARTLY
    # Network traffic also passes a GPU's PCIe link, whether it is staged or not.
    if pcie is Pcie.ACROSS and (network_gb_s or 0.0) > (sent or 0.0) / 2 and network is not NetworkUse.SOCKETS:
        pcie = Pcie.BOTH
    if nvlinks in (Nvlinks.BUSY, Nvlinks.PARTLY) and job.shared_with:
        nvlinks = Nvlinks.UNKNOWN  # The NVLinks may carry the data of another job
    others = _other_source(job, nvlinks)
    if nvlinks is Nvlinks.BUSY and pcie is Pcie.BOTH and not _may_be_between_gpus(job):
        pcie = Pcie.BESIDE
    if nvlinks is Nvlinks.BUSY and pcie in (Pcie.BOTH, Pcie.BESIDE) and _is_network_traffic(job, nics, network):
        pcie = Pcie.NICS
    return Signals(
        nvlinks=nvlinks,
        pcie=pcie,
        network=network,
        members=Members.UNKNOWN if others else _members(job),
        nvlink_gb_s=nvlink,
        pcie_sent_gb_s=sent,
        pcie_received_gb_s=received,
        network_gb_s=network_gb_s,
        staged_ends=ends if nvlinks is Nvlinks.PARTLY else ((), ()),
        odd_rails=_odd_rails(nics),
        idle_gpus=_idle_gpus(job, nvlink, pcie),
        doubts=tuple(_doubts(job, nvlinks, pcie, others)),
    )


def _sends_nothing(job: RunningJob, sent: float | None, network_gb_s: float | None) -> bool:
    """True if sockets carry data of the CPUs, for example of Gloo, because almost nothing leaves the GPUs over PCIe."""
    is_little = sent is not None and sent <= SOCKETS_SHARE * (network_gb_s or 0.0)
    return is_little and sum(map(data_sent, job.gpus)) <= QUIET_GB_S


def _members(job: RunningJob) -> Members:
    if len(job.gpus) < 2:
        return Members.ONE
    if job.exchanges is None:
        return Members.UNKNOWN
    return Members.EXCHANGE if job.exchanges else Members.SEVERAL


def _nvlinks(job: RunningJob, nvlink: float | None, pcie_sent: float | None, joined: Joined) -> Nvlinks:
    pairs = [(one.bus_id, other.bus_id) for one in job.gpus for other in job.gpus if one.index < other.index]
    join = [joined(*pair) for pair in pairs]
    if pairs and not any(is_joined is not False for is_joined in join):
        return Nvlinks.NONE
    if nvlink is None and not pairs:
        return Nvlinks.NONE  # A single GPU has no peer on its node, whatever its NVLinks carry
    if nvlink is None or (pairs and True not in join):
        return Nvlinks.UNKNOWN
    if nvlink <= max(QUIET_GB_S, NVLINK_QUIET_SHARE * (pcie_sent or 0.0)):
        return Nvlinks.QUIET
    return Nvlinks.BUSY if any(nvlink_rate(gpu) >= BUSY_GB_S for gpu in job.gpus) else Nvlinks.LITTLE


def _pcie(job: RunningJob, sent: float | None, received: float | None) -> Pcie:
    if sent is None or received is None:
        return Pcie.UNKNOWN
    out, into = _senders(job), _receivers(job)
    if not out and not into:
        most = max((rate or 0.0 for gpu in job.gpus for rate in (gpu.pcie_sent, gpu.pcie_received)), default=0.0)
        return Pcie.LITTLE if most > QUIET_GB_S else Pcie.QUIET
    if not out:
        return Pcie.IN
    if not into:
        return Pcie.OUT
    if not any(one != other for one in out for other in into):
        return Pcie.BOTH
    # A process without NCCL that copies between host memory and every GPU looks the same. Without NCCL, a single
    # process certainly copies between GPUs only if some GPUs only send and others only receive.
    is_certain = out.isdisjoint(into) or job.by_nccl or not job.one_process
    do_match = _match(sum(map(data_sent, job.gpus)), received)
    return Pcie.ACROSS if is_certain and do_match and not _uses_copy_engines(job) else Pcie.BOTH


def _senders(job: RunningJob) -> set[str]:
    return {gpu.bus_id for gpu in job.gpus if data_sent(gpu) >= BUSY_GB_S}


def _receivers(job: RunningJob) -> set[str]:
    return {gpu.bus_id for gpu in job.gpus if (gpu.pcie_received or 0.0) >= BUSY_GB_S}


def _are_joined(job: RunningJob, joined: Joined) -> bool:
    """True if NVLinks connect every GPU that sends over PCIe with every other GPU that receives.

    With NCCL, NVLinks through a third GPU count too, because NCCL prefers PATH_NVB to PATH_PIX.
    """
    between = [gpu.bus_id for gpu in job.gpus] if job.by_nccl else []
    return all(
        joined(one, other) or any(joined(one, gpu) and joined(gpu, other) for gpu in between)
        for one in _senders(job)
        for other in _receivers(job)
        if one != other
    )


def _other_source(job: RunningJob, nvlinks: Nvlinks) -> str:
    """Return a text if another process may cause the staged traffic, or an empty string.

    The text is, for example, 'process 7 (python) uses GPU0 as well'. The other process is not the cause if GPUs that
    only this job uses show the same traffic.
    """
    if not job.others or nvlinks not in (Nvlinks.QUIET, Nvlinks.NONE, Nvlinks.PARTLY):
        return ""
    unshared = replace(job, gpus=tuple(gpu for gpu in job.gpus if gpu.bus_id not in job.others))
    sent, received = sum(map(data_sent, unshared.gpus)), sum(gpu.pcie_received or 0.0 for gpu in unshared.gpus)
    exchanged = job.by_nccl and min(sent, received) >= BUSY_GB_S and _match(sent, received)
    shown = (exchanged and not _uses_copy_engines(unshared)) or _pcie(unshared, sent, received) is Pcie.ACROSS
    return "" if shown else next(iter(job.others.values()))


def data_sent(gpu: GpuRates) -> float:
    """Return what a GPU sends over PCIe without its read requests, in GB/s."""
    return max((gpu.pcie_sent or 0.0) - REQUESTS_SHARE * (gpu.pcie_received or 0.0), 0.0)


def _uses_copy_engines(job: RunningJob) -> bool:
    """True if an NCCL job's kernels ran too briefly to have sent the PCIe traffic of its GPUs."""
    if not job.by_nccl:
        return False
    senders = [gpu for gpu in job.gpus if (gpu.pcie_sent or 0.0) >= BUSY_GB_S]
    known = [gpu.kernels_percent / 100 * PCIE_MOST_GB_S for gpu in senders if gpu.kernels_percent is not None]
    return len(known) == len(senders) > 0 and sum(gpu.pcie_sent or 0.0 for gpu in senders) > sum(known)


def _has_idle_nvlinks(job: RunningJob) -> bool:
    """True if some GPU has idle NVLinks, and sends as much over PCIe as it receives."""
    return any(
        nvlink_rate(gpu) <= QUIET_GB_S and min(sent, received) >= BUSY_GB_S and _match(sent, received)
        for gpu in job.gpus
        for sent, received in [(data_sent(gpu), gpu.pcie_received or 0.0)]
    )


def _staged_ends(job: RunningJob) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the GPUs that send, and the GPUs that receive, over PCIe what is missing on their NVLinks.

    In a ring, all hops carry the same traffic. If one hop is host-staged, its source sends less over NVLinks, and its
    destination receives less. Return nothing if a GPU does both while its NVLinks are busy, because it may copy to host
    memory and back.
    """
    usual = {way: max((getattr(gpu, way) or 0.0 for gpu in job.gpus), default=0.0) for way in _NVLINK_RATES}
    moved = {gpu.bus_id: (data_sent(gpu), gpu.pcie_received or 0.0) for gpu in job.gpus}
    ends: list[list[str]] = [[], []]
    for gpu in job.gpus:
        busy = [rate >= BUSY_GB_S for rate in moved[gpu.bus_id]]
        lacks = [usual[way] - (getattr(gpu, way) or 0.0) for way in _NVLINK_RATES]
        if all(busy) and nvlink_rate(gpu) > QUIET_GB_S:
            return (), ()
        for side, rate in enumerate(moved[gpu.bus_id]):
            if busy[side] and not _match(rate, lacks[side]):
                return (), ()
            ends[side] += [gpu.device] if busy[side] else []
    return tuple(ends[0]), tuple(ends[1])


_NVLINK_RATES = ("nvlink_sent", "nvlink_received")


def _may_be_between_gpus(job: RunningJob) -> bool:
    """True if one GPU's PCIe traffic may go to another GPU, in addition to the NVLink traffic."""
    least = {gpu.index: max(BUSY_GB_S, BESIDE_SHARE * nvlink_rate(gpu)) for gpu in job.gpus}
    out = [gpu.index for gpu in job.gpus if data_sent(gpu) > least[gpu.index]]
    into = [gpu.index for gpu in job.gpus if (gpu.pcie_received or 0.0) > least[gpu.index]]
    return any(one != other for one in out for other in into)


def _is_network_traffic(job: RunningJob, nics: Sequence[NicRates], network: NetworkUse) -> bool:
    """True if the PCIe traffic comes from the network.

    NICs then carry as much as PCIe in both directions, and every GPU carries an equal share or almost nothing. NCCL
    sends data out of a node through GPUs near a NIC (PXN). A host-staged hop would show on its two GPUs only.
    """
    if network not in (NetworkUse.RDMA, NetworkUse.ETHERNET) or not all(
        nvlink_rate(gpu) >= BUSY_GB_S for gpu in job.gpus
    ):
        return False
    used = [nic for nic in nics if nic.rdma is (network is NetworkUse.RDMA) and nic.name != LOOPBACK]
    for way in ("sent", "received"):
        carried = [getattr(gpu, f"pcie_{way}") or 0.0 for gpu in job.gpus]
        most = max(carried)
        alike = all(rate <= REQUESTS_SHARE * most or _match(rate, most) for rate in carried)
        if not alike or not _match(sum(carried), sum(getattr(nic, way) or 0.0 for nic in used)):
            return False
    return True


def nvlink_rate(gpu: GpuRates) -> float:
    """Return the rate of a GPU's NVLinks in their busier direction, in GB/s."""
    return max(gpu.nvlink_sent or 0.0, gpu.nvlink_received or 0.0)


def _match(one: float, other: float) -> bool:
    return max(one, other) <= MATCHING * min(one, other)


def _network(job: RunningJob, nics: Sequence[NicRates]) -> tuple[NetworkUse, float | None]:
    """Return the network that the processes use, and the total rate in GB/s at which all NICs send.

    Only a job with NCCL can have SOCKETS as its network.
    """
    rdma = [nic for nic in nics if nic.rdma and nic.active is not False]
    others = [nic for nic in nics if not nic.rdma]
    sent = sum_rates([nic.sent for nic in (*rdma, *others)])
    busy_rdma = any(_is_busy(nic) for nic in rdma)
    busy_others = [nic.name for nic in others if _is_busy(nic)]
    by_nccl = any(task.communicators is not False for task in job.tasks)
    if busy_others and by_nccl and not busy_rdma and (rdma or LOOPBACK in busy_others):
        unread = any(nic.sent is None or nic.received is None for nic in rdma)
        return (NetworkUse.UNKNOWN if unread else NetworkUse.SOCKETS), sent
    if busy_rdma:
        return NetworkUse.RDMA, sent
    if busy_others:
        return NetworkUse.ETHERNET, sent
    return (NetworkUse.QUIET if sent is not None or not nics else NetworkUse.UNKNOWN), sent


def _is_busy(nic: NicRates) -> bool:
    less, more = sorted((nic.sent or 0.0, nic.received or 0.0))
    return more >= BUSY_GB_S and less >= BUSY_GB_S / 5


def _odd_rails(nics: Sequence[NicRates]) -> tuple[str, ...]:
    rails = [nic for nic in nics if nic.rdma and nic.active is not False and nic.sent is not None]
    carried = {nic.name: max(nic.sent or 0.0, nic.received or 0.0) for nic in rails}
    usual = sorted(carried.values())[len(carried) // 2] if len(carried) > 2 else 0.0
    if usual < BUSY_GB_S:
        return ()
    return tuple(
        f"{name} {value:.1f} GB/s, its siblings {usual:.1f}"
        for name, value in carried.items()
        if abs(value - usual) > UNBALANCED_SHARE * usual
    )


def _idle_gpus(job: RunningJob, nvlink: float | None, pcie: Pcie) -> tuple[str, ...]:
    """Return the idle GPUs of a job without traffic, while kernels on all its other GPUs wait for them."""
    if job.others or nvlink is None or nvlink > QUIET_GB_S * len(job.gpus) or pcie not in (Pcie.QUIET, Pcie.LITTLE):
        return ()
    percents = {
        gpu.device: gpu.utilization_percent if gpu.kernels_percent is None else gpu.kernels_percent for gpu in job.gpus
    }
    idle = tuple(name for name, percent in percents.items() if percent is not None and percent <= IDLE_PERCENT)
    others = [percent for name, percent in percents.items() if name not in idle]
    waiting = others and all(percent is not None and percent >= AT_WORK_PERCENT for percent in others)
    return idle if idle and waiting and len(idle) <= len(others) else ()


def _doubts(job: RunningJob, nvlinks: Nvlinks, pcie: Pcie, others: str) -> list[str]:
    found = [reason for reason in (job.doubt, job.shared_with or others) if reason]
    if job.shared_with and nvlinks is Nvlinks.UNKNOWN:
        return found
    for unknown, names in ((nvlinks is Nvlinks.UNKNOWN, "nvlink"), (pcie is Pcie.UNKNOWN, "pcie")):
        if unknown:
            reasons = (
                f"{gpu.device} {name.replace('_', ' ')}: {reason}"
                for gpu in job.gpus
                for name, reason in gpu.unknown.items()
                if name.startswith(names)
            )
            found.append(next(reasons, f"{names} counters of {job.devices} are unknown"))
    return found


class PathRule(Struct, frozen=True):
    """One line of the decision table: the accepted values of each signal. An empty tuple accepts every value."""

    nvlinks: tuple[Nvlinks, ...]
    pcie: tuple[Pcie, ...]
    network: tuple[NetworkUse, ...]
    members: tuple[Members, ...]
    way: Way
    meaning: str

    def fits(self, seen: Signals) -> bool:
        """True if the line accepts the value of every signal."""
        return (
            (not self.nvlinks or seen.nvlinks in self.nvlinks)
            and (not self.pcie or seen.pcie in self.pcie)
            and (not self.network or seen.network in self.network)
            and (not self.members or seen.members in self.members)
        )


_CALM = (Pcie.QUIET, Pcie.LITTLE)
_EXCHANGE, _NOT = (Members.EXCHANGE,), (Members.ONE, Members.SEVERAL)
_NO_SOCKETS = (NetworkUse.QUIET, NetworkUse.RDMA, NetworkUse.ETHERNET)
_BOTH_WAYS = (Pcie.ACROSS, Pcie.BOTH)

RULES: tuple[PathRule, ...] = (
    PathRule((), (Pcie.UNKNOWN,), (), (), Way.NOT_TOLD, "PCIe traffic is unknown"),
    PathRule(
        (Nvlinks.QUIET, Nvlinks.NONE),
        _BOTH_WAYS,
        (NetworkUse.SOCKETS,),
        (Members.EXCHANGE, Members.ONE),
        Way.SOCKETS,
        "GPU data leaves over the loopback, or over Ethernet while RDMA ports are up and idle",
    ),
    PathRule(
        (Nvlinks.QUIET,),
        (Pcie.ACROSS,),
        _NO_SOCKETS,
        _EXCHANGE,
        Way.STAGED,
        "some GPUs send over PCIe what others receive, while the NVLinks between them are idle",
    ),
    PathRule(
        (Nvlinks.PARTLY,),
        (Pcie.ACROSS,),
        _NO_SOCKETS,
        _EXCHANGE,
        Way.STAGED,
        "the NVLinks of some GPUs carry less than those of their peers; PCIe carries the rest",
    ),
    PathRule(
        (Nvlinks.QUIET, Nvlinks.PARTLY),
        (Pcie.ACROSS,),
        (),
        (Members.UNKNOWN,),
        Way.UNKNOWN,
        "host-staged jobs look like this, but the traffic may come from several jobs",
    ),
    PathRule(
        (Nvlinks.NONE,),
        _BOTH_WAYS,
        _NO_SOCKETS,
        _EXCHANGE,
        Way.NOT_TOLD,
        "without NVLinks, PCIe carries both direct and host-staged traffic",
    ),
    PathRule((Nvlinks.UNKNOWN,), _BOTH_WAYS, (), (), Way.NOT_TOLD, "NVLink traffic is unknown"),
    PathRule(
        (Nvlinks.BUSY,),
        _CALM,
        (NetworkUse.QUIET, NetworkUse.RDMA, NetworkUse.ETHERNET, NetworkUse.UNKNOWN),
        (),
        Way.DIRECT,
        "NVLinks carry the traffic",
    ),
    PathRule(
        (Nvlinks.BUSY,),
        (Pcie.IN, Pcie.OUT, Pcie.BESIDE),
        (NetworkUse.QUIET,),
        (),
        Way.DIRECT,
        "NVLinks carry the traffic; the PCIe traffic is not between GPUs",
    ),
    PathRule(
        (Nvlinks.BUSY,),
        (Pcie.NICS,),
        (NetworkUse.RDMA, NetworkUse.ETHERNET),
        (),
        Way.DIRECT,
        "NVLinks carry the traffic inside the node, and NICs the rest (counters do not show whether through host "
        "memory)",
    ),
    PathRule(
        (Nvlinks.BUSY,),
        (),
        (NetworkUse.RDMA, NetworkUse.ETHERNET),
        (),
        Way.UNKNOWN,
        "NVLinks carry a part, and a part leaves the node (counters do not show whether through host memory)",
    ),
    PathRule(
        (Nvlinks.BUSY, Nvlinks.PARTLY),
        (),
        (),
        (),
        Way.UNKNOWN,
        "NVLinks carry a part; PCIe or sockets may carry the rest",
    ),
    PathRule((Nvlinks.LITTLE,), _BOTH_WAYS, (), (), Way.UNKNOWN, "NVLinks carry little; PCIe may carry the rest"),
    PathRule(
        (),
        _BOTH_WAYS,
        (NetworkUse.RDMA,),
        (),
        Way.NOT_TOLD,
        "RDMA carries the traffic (counters do not show whether through host memory)",
    ),
    PathRule(
        (),
        _BOTH_WAYS,
        (NetworkUse.ETHERNET,),
        (),
        Way.NOT_TOLD,
        "Ethernet carries traffic in both directions, and no RDMA port is up",
    ),
    PathRule(
        (),
        _BOTH_WAYS,
        (),
        _NOT,
        Way.HOST_COPIES,
        "copies to and from host memory, by GPUs without traffic between them",
    ),
    PathRule((), _BOTH_WAYS, (), (), Way.UNKNOWN, "PCIe traffic in both directions, perhaps between GPUs"),
    PathRule((), (Pcie.IN,), (), (), Way.LOADING, "PCIe carries data only into GPUs"),
    PathRule((), (Pcie.OUT,), (), (), Way.SAVING, "PCIe carries data only out of GPUs"),
    PathRule((Nvlinks.UNKNOWN,), (), (), (), Way.NOT_TOLD, "NVLink traffic is unknown"),
    PathRule(
        (), _CALM, (NetworkUse.SOCKETS,), (), Way.IDLE, "sockets carry traffic that does not come from these GPUs"
    ),
    PathRule((Nvlinks.LITTLE,), (Pcie.QUIET,), (), (), Way.IDLE, "too little NVLink traffic to judge"),
    PathRule((), (Pcie.LITTLE,), (), (), Way.IDLE, "too little traffic to judge"),
    PathRule((), (Pcie.QUIET,), (), (), Way.IDLE, "no traffic"),
)


def decide(seen: Signals) -> tuple[Way, str]:
    """Return the path of a job's traffic, and its meaning as text. The first rule that fits is used."""
    rule = next((rule for rule in RULES if rule.fits(seen)), _NO_RULE)
    may_be_uneven = (Way.DIRECT, Way.NOT_TOLD, Way.UNKNOWN, Way.HOST_COPIES)
    if rule.way in may_be_uneven and seen.odd_rails and seen.network is NetworkUse.RDMA:
        return Way.UNBALANCED, "a rail carries at least 30 % less or more than its siblings"
    if rule.way in (Way.IDLE, Way.UNKNOWN) and seen.idle_gpus and seen.members is Members.EXCHANGE:
        return Way.WAITING, "some GPUs are idle while all others of the job run kernels without traffic"
    if rule.way is Way.STAGED and seen.staged_hop:
        return rule.way, f"PCIe carries {seen.staged_hop}, at the rate of the NVLinks between the other GPUs"
    return rule.way, rule.meaning


_NO_RULE = PathRule((), (), (), (), Way.UNKNOWN, "the counters do not show it")

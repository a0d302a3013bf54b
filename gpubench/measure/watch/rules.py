"""The decision table of `gpubench watch`: what the links of a job show, and the way that its bytes take."""

from dataclasses import dataclass
from functools import cache

from gpubench.measure.watch.signals import Members, NetworkUse, Nvlinks, Pcie, Signals
from gpubench.model.results.rows.watch import Way


@dataclass(frozen=True, slots=True)
class WayRule:
    """One line of the table: words of each signal, none for any of them; the first line that fits counts."""

    nvlinks: tuple[Nvlinks, ...]
    pcie: tuple[Pcie, ...]
    network: tuple[NetworkUse, ...]
    members: tuple[Members, ...]
    way: Way
    meaning: str

    def fits(self, seen: Signals) -> bool:
        """True if every signal is one of the line's words."""
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

RULES: tuple[WayRule, ...] = (
    WayRule((), (Pcie.UNKNOWN,), (), (), Way.NOT_TOLD, "what PCIe carries is not known"),
    WayRule(
        (Nvlinks.QUIET, Nvlinks.NONE),
        _BOTH_WAYS,
        (NetworkUse.SOCKETS,),
        (Members.EXCHANGE, Members.ONE),
        Way.SOCKETS,
        "bytes of GPUs leave by the loopback, or by Ethernet beside RDMA ports that are up and carry none",
    ),
    WayRule(
        (Nvlinks.QUIET,),
        (Pcie.ACROSS,),
        _NO_SOCKETS,
        _EXCHANGE,
        Way.STAGED,
        "as much leaves some GPUs as enters others, over PCIe, and NVLinks that join them carry about nothing",
    ),
    WayRule(
        (Nvlinks.PARTLY,),
        (Pcie.ACROSS,),
        _NO_SOCKETS,
        _EXCHANGE,
        Way.STAGED,
        "NVLinks of some GPUs carry less than those of their peers, and PCIe carries the rest",
    ),
    WayRule(
        (Nvlinks.QUIET, Nvlinks.PARTLY),
        (Pcie.ACROSS,),
        (),
        (Members.UNKNOWN,),
        Way.UNKNOWN,
        "this is what staged jobs show; whether one job alone sends it is not known",
    ),
    WayRule(
        (Nvlinks.NONE,),
        _BOTH_WAYS,
        _NO_SOCKETS,
        _EXCHANGE,
        Way.NOT_TOLD,
        "PCIe is both the direct way and that through host memory between GPUs that no NVLinks join",
    ),
    WayRule((Nvlinks.UNKNOWN,), _BOTH_WAYS, (), (), Way.NOT_TOLD, "what NVLinks carry is not known"),
    WayRule(
        (Nvlinks.BUSY,),
        _CALM,
        (NetworkUse.QUIET, NetworkUse.RDMA, NetworkUse.ETHERNET, NetworkUse.UNKNOWN),
        (),
        Way.DIRECT,
        "NVLinks carry it",
    ),
    WayRule(
        (Nvlinks.BUSY,),
        (Pcie.IN, Pcie.OUT, Pcie.BESIDE),
        (NetworkUse.QUIET,),
        (),
        Way.DIRECT,
        "NVLinks carry it; what PCIe carries beside is not from GPU to GPU",
    ),
    WayRule(
        (Nvlinks.BUSY,),
        (Pcie.NICS,),
        (NetworkUse.RDMA, NetworkUse.ETHERNET),
        (),
        Way.DIRECT,
        "NVLinks carry it inside the node, and NICs the rest: whether by way of host memory, counters do not tell",
    ),
    WayRule(
        (Nvlinks.BUSY,),
        (),
        (NetworkUse.RDMA, NetworkUse.ETHERNET),
        (),
        Way.UNKNOWN,
        "NVLinks carry a part, and another leaves the node: whether by host memory is not known",
    ),
    WayRule(
        (Nvlinks.BUSY, Nvlinks.PARTLY),
        (),
        (),
        (),
        Way.UNKNOWN,
        "NVLinks carry a part, and PCIe or sockets may carry another",
    ),
    WayRule((Nvlinks.LITTLE,), _BOTH_WAYS, (), (), Way.UNKNOWN, "NVLinks carry little, and PCIe may carry the rest"),
    WayRule(
        (),
        _BOTH_WAYS,
        (NetworkUse.RDMA,),
        (),
        Way.NOT_TOLD,
        "RDMA carries it; whether by way of host memory, counters do not tell",
    ),
    WayRule(
        (),
        _BOTH_WAYS,
        (NetworkUse.ETHERNET,),
        (),
        Way.NOT_TOLD,
        "Ethernet carries bytes both ways, and no RDMA port is up",
    ),
    WayRule(
        (), _BOTH_WAYS, (), _NOT, Way.HOST_COPIES, "to host memory and from it, by GPUs that send each other nothing"
    ),
    WayRule((), _BOTH_WAYS, (), (), Way.UNKNOWN, "both ways, and nothing tells whether from GPU to GPU"),
    WayRule((), (Pcie.IN,), (), (), Way.LOADING, "PCIe carries data into GPUs alone"),
    WayRule((), (Pcie.OUT,), (), (), Way.SAVING, "PCIe carries data out of GPUs alone"),
    WayRule((Nvlinks.UNKNOWN,), (), (), (), Way.NOT_TOLD, "what NVLinks carry is not known"),
    WayRule((), _CALM, (NetworkUse.SOCKETS,), (), Way.IDLE, "sockets carry bytes that do not come from these GPUs"),
    WayRule((Nvlinks.LITTLE,), (Pcie.QUIET,), (), (), Way.IDLE, "NVLinks carry too little to judge by"),
    WayRule((), (Pcie.LITTLE,), (), (), Way.IDLE, "too little to judge by"),
    WayRule((), (Pcie.QUIET,), (), (), Way.IDLE, "nothing is sent"),
)


def decide(seen: Signals) -> tuple[Way, str]:
    """The way that the bytes of a job take, and what it means, in words.

    Rails that differ are worth more than that the rest is direct, and so is a GPU that its peers wait for than nothing.
    """
    rule = _rule(seen)
    may_be_uneven = (Way.DIRECT, Way.NOT_TOLD, Way.UNKNOWN, Way.HOST_COPIES)
    if rule.way in may_be_uneven and seen.odd_rails and seen.network is NetworkUse.RDMA:
        return Way.UNBALANCED, "a rail carries over 30 % less or more than its siblings"
    if rule.way in (Way.IDLE, Way.UNKNOWN) and seen.idle_gpus and seen.members is Members.EXCHANGE:
        return Way.WAITING, "GPUs that run nothing, while all others of the job run something and nothing is sent"
    if rule.way is Way.STAGED and seen.staged_hop:
        return rule.way, f"PCIe carries {seen.staged_hop}, as much as NVLinks carry between the other GPUs"
    return rule.way, rule.meaning


@cache
def _none() -> WayRule:
    return WayRule((), (), (), (), Way.UNKNOWN, "nothing here tells")


def _rule(seen: Signals) -> WayRule:
    return next((rule for rule in RULES if rule.fits(seen)), _none())

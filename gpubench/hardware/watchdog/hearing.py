"""Whether watchdogs hear each other, which a firewall between hosts may prevent without anybody noticing."""

from collections.abc import Sequence

from gpubench.hardware.watchdog.addresses import WatchdogAddress
from gpubench.hardware.watchdog.peers import Peers
from gpubench.model.terms.hang import Phase, limit_seconds
from gpubench.model.terms.units import spans

SECONDS_TO_HEAR = 5.0
"""On a busy machine a watchdog may answer so late."""

_MOST_HOSTS = 8


class HearingCheck:
    """The first rank's look, once the ranks have met, whether the watchdogs of all others answer."""

    def __init__(self, peers: Peers, watchdogs: Sequence[WatchdogAddress], timeout_s: float, now: float) -> None:
        self._peers = peers
        self._watchdogs = watchdogs
        self._timeout_s = timeout_s
        self._until = now + SECONDS_TO_HEAR

    def complaint(self, now: float) -> str | None:
        """What to say of those that do not answer, empty where all do; None while that is open, and they are asked."""
        deaf = sorted(set(range(1, len(self._watchdogs))) - self._peers.reached)
        if not deaf:
            return ""
        if now < self._until:
            self._peers.probe(deaf)
            return None
        hosts = list(dict.fromkeys(self._watchdogs[rank].host for rank in deaf))
        where = ", ".join(hosts[:_MOST_HOSTS]) + (f" and {len(hosts) - _MOST_HOSTS} more" * (len(hosts) > _MOST_HOSTS))
        late = limit_seconds(Phase.LAUNCH, self._timeout_s)
        return (
            f"the watchdogs of rank {spans(deaf)} on {where} do not answer that of rank 0: a firewall drops UDP "
            f"between hosts, or they are dead; a hang is noticed after {late:g} s, not after {self._timeout_s:g} s. "
            "Let UDP pass between the addresses of these hosts, at all ports that programs may take"
        )

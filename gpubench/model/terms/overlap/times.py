"""The times of communication beside computation, and what follows from them."""

import math
from dataclasses import dataclass

_COMPUTE_OF_COMMUNICATION = 2
"""A step computes that many times as long as its collective takes alone, with NCCL's own CTAs, and one operation more:
the one that the collective waits for. Where computation is shorter nothing could be hidden behind it."""

_LEAST_PROGRESS = 0.05
"""Of the time in flight: where computation got on by less than that, the ratio of the two says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapTimes:
    """Seconds of a step: a collective, and so many operations of a partner, started together.

    `communication_first` is the collective beside the partner where it had its SMs before the partner began, None where
    it was too short to be met. `in_flight` is the part of the partner's time in which the collective was not done.
    """

    partner_alone: float
    communication_alone: float
    communication_first: float | None
    partner_together: float
    communication_together: float
    together: float
    step: float
    in_flight: float

    @property
    def compute_slowdown(self) -> float | None:
        """κ_c: time of computation while the collective is in flight, over what the same work takes alone.

        In flight the partner did what takes `in_flight` less all that it lost. None where it lost nearly all of that.
        """
        work = self.in_flight - (self.partner_together - self.partner_alone)
        return self.in_flight / work if work > _LEAST_PROGRESS * self.in_flight else None

    @property
    def communication_slowdown(self) -> float:
        """κ_m: time of the collective from the moment at which it could begin, over its time alone."""
        return self.communication_together / self.communication_alone

    @property
    def waiting_slowdown(self) -> float | None:
        """The part of κ_m - 1 that the collective waited for SMs: what it saves to have them before."""
        first = self.communication_first
        return None if first is None else (self.communication_together - first) / self.communication_alone

    @property
    def sharing_slowdown(self) -> float | None:
        """The rest of κ_m - 1: memory, caches, links, power and clocks that it shares while it runs."""
        first = self.communication_first
        return None if first is None else first / self.communication_alone - 1

    @property
    def hidden_share(self) -> float:
        """The part of the collective's time alone that running both together saves; negative where it costs time."""
        one_after_the_other = self.partner_alone + self.communication_alone
        return (one_after_the_other - self.together) / self.communication_alone


def partner_operations(communication_seconds: float, operation_seconds: float) -> int:
    """The operations of a partner in a step whose collective takes that long alone, with NCCL's own CTAs."""
    return 1 + math.ceil(_COMPUTE_OF_COMMUNICATION * communication_seconds / operation_seconds)

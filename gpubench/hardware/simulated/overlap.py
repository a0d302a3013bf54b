"""Times of a collective beside computation on a simulated machine: a model, never a measurement.

The collective alone takes what the profile says (`simulated.times`). What a cap on its CTAs makes of that was fitted by
hand to one series on 4 H200s (NCCL 2.28.9, 2026-11-22): 256 MiB with NCCL's own 24 CTAs, 16, 8, 4 and 2 took 1.233,
1.471, 2.533, 4.404 and 8.275 ms. Waiting and sharing are those that docs/overlap.md has of 2 H200s. Of other machines
all this is a guess.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from gpubench.collectives.registry import collective_named
from gpubench.hardware.simulated.machine import SimulatedMachine
from gpubench.hardware.simulated.times import CollectiveTimes
from gpubench.model.profiles.fault import Fault
from gpubench.model.terms.overlap.asked import Partner
from gpubench.model.terms.overlap.partners import CHAIN_KERNELS, COPY_BYTES
from gpubench.model.terms.overlap.times import OverlapTimes, partner_operations
from gpubench.model.terms.units import BYTES_PER_GB

_CTA_GB_S = 24.4
"""busbw that one CTA carries; from 2 CTAs on 4 H200s."""

_ROUNDNESS = 2.5
"""How softly the rate of few CTAs passes over into that of the links."""

_OWN_CTAS_A_LINK = 4 / 3
_FEWEST_OWN_CTAS = 8
"""NCCL's own number: 24 of 18 links of an H200, and of 12 links of an A100."""

_PEAK_TFLOPS_AN_SM: Mapping[str, float] = {"7": 0.98, "8": 2.89, "9": 7.49, "10": 15.2, "12": 2.5}
_GEMM_EFFICIENCY = 0.77
"""Dense 16-bit Tensor-Core peak by compute capability, from NVIDIA's data sheets of V100, A100, H100, B200 and
RTX 6000 Blackwell, over their SMs; an H200 reached 764 of 989 TFLOP/s."""

_COPY_GB_S: Mapping[str, float] = {"7": 800.0, "8": 1700.0, "9": 3900.0, "10": 7000.0, "12": 1500.0}
_KERNEL_SECONDS = 1.6e-6

_WAITS: Mapping[Partner, float] = {Partner.GEMM: 0.95, Partner.COPY: 1.0, Partner.CHAIN: 0.0}
"""Operations of the partner that the collective waits for: one, where they fill all SMs."""

_SHARING: Mapping[Partner, float] = {Partner.GEMM: 1.08, Partner.COPY: 1.56, Partner.CHAIN: 1.0}
_CHAIN_LOSES = 0.7
"""Of the time beside a collective: kernels of 1.6 µs one after another suffer more than from the SMs that are gone."""

_SPREAD = 0.003
_STEPS = 100


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """The times of a step, and how many operations of the partner are in it."""

    times: OverlapTimes
    partner_count: int
    steps: int = _STEPS
    step_ci95_percent: float = 100 * 1.96 * _SPREAD  # steps of a row share their noise


class OverlapModel:
    """Steps on a simulated machine; equal arguments give equal times. Raises as `CollectiveTimes`."""

    def __init__(
        self, machine: SimulatedMachine, faults: tuple[Fault, ...], seed: int, ranks_per_node: int | None = None
    ) -> None:
        self._times = CollectiveTimes(machine, faults, seed)
        self._machine, self._seed = machine, seed
        self._per_node = self._times.gpus if ranks_per_node is None else ranks_per_node

    @property
    def own_ctas(self) -> int:
        """NCCL's own number of CTAs."""
        nvlink = self._machine.profile.nvlink
        return max(_FEWEST_OWN_CTAS, round((nvlink.links if nvlink else 0) * _OWN_CTAS_A_LINK))

    def operation_seconds(self, partner: Partner, gemm_side: int) -> float:
        """One operation of a partner, with nothing beside."""
        gpu = self._machine.profile.gpu
        generation = gpu.compute_capability.partition(".")[0]
        if partner is Partner.GEMM:
            peak = _PEAK_TFLOPS_AN_SM.get(generation, _PEAK_TFLOPS_AN_SM["8"]) * gpu.multiprocessors
            return 2 * gemm_side**3 / (peak * _GEMM_EFFICIENCY * 1e12)
        if partner is Partner.COPY:
            return 2 * COPY_BYTES / (_COPY_GB_S.get(generation, _COPY_GB_S["8"]) * BYTES_PER_GB)
        return CHAIN_KERNELS * _KERNEL_SECONDS

    def step(
        self, name: str, size_bytes: int, ctas: int | None, partner: Partner, *, gemm_side: int, count: int | None
    ) -> SimulatedStep:
        """A step of one collective and `count` operations, as many as a real one has where that is None."""
        source = random.Random(f"{self._seed}/overlap/{name}/{size_bytes}/{ctas}/{partner}")
        own = max(self._times.seconds(name, size_bytes, row=0, ranks_per_node=self._per_node))
        operation = self.operation_seconds(partner, gemm_side)
        operations = partner_operations(own, operation) if count is None else count
        alone = self._capped(name, size_bytes, own, ctas) * _noise(source)
        partner_alone = operations * operation * _noise(source)  # of both: a GPU's clock is what varies
        waiting = min(partner_alone, _WAITS[partner] * operation)
        first = alone * _SHARING[partner] * _noise(source)
        taken = min(self.own_ctas, ctas or self.own_ctas) / self._machine.profile.gpu.multiprocessors
        if partner is Partner.CHAIN:
            taken = _CHAIN_LOSES
        # While it runs the partner has the other SMs; it is done first where the collective takes longer.
        ends_first = waiting + (partner_alone - waiting) / (1 - taken) <= waiting + first
        extra = (partner_alone - waiting) * taken / (1 - taken) if ends_first else first * taken
        partner_together = partner_alone + extra * _noise(source)
        communication_together = waiting + first
        together = max(partner_together, communication_together)
        return SimulatedStep(
            OverlapTimes(
                partner_alone=partner_alone,
                communication_alone=alone,
                communication_first=first,
                partner_together=partner_together,
                communication_together=communication_together,
                together=together,
                step=together * (1 + abs(source.gauss(0.0, _SPREAD))),
                in_flight=min(communication_together, partner_together),
            ),
            operations,
        )

    def _capped(self, name: str, size_bytes: int, own_seconds: float, ctas: int | None) -> float:
        """Seconds of the collective alone under a cap."""
        if ctas is None or ctas >= self.own_ctas:
            return own_seconds
        ranks = self._per_node * self._machine.nodes
        moved = size_bytes * collective_named(name).busbw_factor(ranks)
        by_ctas = moved / (ctas * _CTA_GB_S * BYTES_PER_GB)
        total: float = (own_seconds**_ROUNDNESS + by_ctas**_ROUNDNESS) ** (1 / _ROUNDNESS)
        return total


def _noise(source: random.Random) -> float:
    return math.exp(source.gauss(0.0, _SPREAD))

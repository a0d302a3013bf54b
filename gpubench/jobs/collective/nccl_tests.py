"""Options of nccl-tests that gpubench accepts for collectives."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gpubench.errors import UsageError, add_advice
from gpubench.model.facts.environment import detect_launcher
from gpubench.model.terms.options import NCCL, option, options_of, plan_from
from gpubench.model.terms.units import MOST_SIZES, parse_size

_STEP = 2**20
"""Default step between sizes in nccl-tests, in bytes. Source: `stepBytes` in common.cu."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclTestsOptions:
    """The options of nccl-tests for sizes, GPUs and verification."""

    help_group: ClassVar = NCCL

    smallest: str | None = option("SIZE", "Smallest size, as in nccl-tests: -b 8 -e 4G -f 2.", name="-b")
    largest: str | None = option("SIZE", "Largest size, as in nccl-tests.", name="-e")
    factor: str | None = option("FACTOR", "Factor between sizes, as in nccl-tests.", name="-f")
    step: str | None = option("BYTES", "Step between sizes, as in nccl-tests: -i 1M.", name="-i", hidden=True)
    gpu_count: int | None = option("N", "Same as --np. Under mpirun or srun only -g 1 is allowed.", name="-g", min=1)
    verified: int | None = option("0|1", "-c 0 is --no-check, -c 1 is --check.", name="-c", min=0, hidden=True)
    threads: str | None = option("N", "", name="-t", hidden=True)
    parallel_init: str | None = option("0|1", "", name="-p", hidden=True)
    registered: str | None = option("0|1|2", "", name="-R", hidden=True)
    policy: str | None = option("0|1|2", "", name="-x", hidden=True)
    unaligned: str | None = option("N", "", name="-u", hidden=True)

    def refuse_foreign(self) -> None:
        """Raise UsageError for options of nccl-tests that gpubench does not have, or has under another name."""
        renamed = (
            ("-R", self.registered, "--register", {"1": "user", "2": "symmetric"}),
            ("-x", self.policy, "--cta-policy", {"1": "efficiency", "2": "zero"}),
        )
        for short, value, own, words in renamed:
            if value not in (None, "0"):
                raise UsageError(
                    f"{short} {value}",
                    expected=f"{own} {'|'.join(words.values())}, which is measured in addition to NCCL's own choice",
                    next_step=f"{own} {words.get(value or '', next(iter(words.values())))}",
                )
        if self.unaligned not in (None, "0"):
            raise UsageError(
                f"-u {self.unaligned}",
                expected="no -u, because gpubench uses the addresses that the allocator returns",
                next_step="leave -u out",
            )
        if self.threads not in (None, "1"):
            raise UsageError(
                f"-t {self.threads}",
                expected="no -t, because gpubench starts one process per GPU, without threads",
                next_step=f"--np {int(self.threads) * (self.gpu_count or 1) if self.threads.isdecimal() else 'N'}",
            )
        if self.parallel_init not in (None, "0"):
            raise UsageError(
                f"-p {self.parallel_init}",
                expected="no -p, because gpubench always initializes all ranks at once, each in a separate process",
                next_step="leave -p out",
            )

    def sizes(self, own: str | None) -> str | None:
        """Return the sizes in the format of --sizes. `own` is the value of --sizes.

        Raises UsageError if a required option is missing.
        """
        words = {"-b": self.smallest, "-e": self.largest, "-f": self.factor, "-i": self.step}
        typed = [name for name, value in words.items() if value is not None]
        if not typed:
            return own
        if self.smallest is None or self.largest is None:
            raise UsageError(
                f"{' and '.join(typed)} without {'-e' if self.largest is None else '-b'}",
                expected="the smallest size (-b) and the largest (-e)",
                reason="nccl-tests would use 32M for the missing one",
                next_step=f"-b {self.smallest or 8} -e {self.largest or '4G'} -f {self.factor or 2}",
            )
        with add_advice(next_step="-b 8 -e 4G -f 2"):
            first, last = parse_size(self.smallest), parse_size(self.largest)
        how = self.factor if self.step is None else f"+{self.step}"
        if how is None and first < last:
            raise self._no_step(first, last)
        return f"{self.smallest}:{self.largest}:{how or 2}"

    def _no_step(self, first: int, last: int) -> UsageError:
        of_theirs = (last - first) // _STEP + 1
        asked = f"-b {self.smallest} -e {self.largest}"
        also = f", or {asked} -i 1M for nccl-tests' sizes" if of_theirs <= MOST_SIZES else ""
        return UsageError(
            f"{asked} without -f or -i: nccl-tests would measure {of_theirs:,} sizes, 1M apart",
            expected="a factor between sizes (-f), or a step (-i)",
            next_step=f"{asked} -f 2{also}",
        )

    def ranks(self, own: str | None) -> str | None:
        """Return the value for --np. `own` is its value so far. Raises UsageError for several GPUs per rank."""
        if self.gpu_count is None:
            return own
        launch = detect_launcher(os.environ)
        if launch is not None and self.gpu_count > 1:
            raise UsageError(
                f"-g {self.gpu_count} under {launch.launcher}",
                expected="-g 1, because each gpubench rank uses one GPU",
                next_step=f"start {launch.size * self.gpu_count} ranks instead of {launch.size}, without -g",
            )
        return str(self.gpu_count) if launch is None else own

    def check(self, *, own: bool) -> bool:
        """Return whether to verify data. `own` is the value of --check."""
        if self.verified is None:
            return own
        if self.verified > 1:
            raise UsageError(
                f"-c {self.verified}",
                expected="0 or 1",
                reason="nccl-tests checks N extra operations, but gpubench checks those that it times",
                next_step="-c 1",
            )
        return bool(self.verified)


def settle_nccl_tests(typed: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the options of nccl-tests in the typed values with sizes, ranks and verification.

    Raises UsageError for an option without a counterpart in gpubench.
    """
    theirs = plan_from(NcclTestsOptions, typed)
    theirs.refuse_foreign()
    if typed.get("replay") is not None:  # With --replay, each of these options is rejected later, by its own name
        return dict(typed)
    return {
        **typed,
        **{option.field: None for option in options_of(NcclTestsOptions)},
        "sizes": theirs.sizes(typed.get("sizes")),
        "rank_counts": theirs.ranks(typed.get("rank_counts")),
        "check": theirs.check(own=typed.get("check", True)),
    }

"""The options of nccl-tests that say otherwise what gpubench has an option for: -b -e -f -i, -g and -c.

Those that mean the same are short forms of gpubench's own: -n of --iters, -w of --warmup, -d of --dtype, -r of --root.
"""

import os
from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar

from gpubench.cli.options.choices import parse_choices
from gpubench.cli.plain_values import NCCL
from gpubench.cli.signature import option
from gpubench.errors import UsageError, advising, exclusive
from gpubench.model.facts.launched_by import launched_by
from gpubench.model.terms.operation import DataType
from gpubench.model.terms.sweep import MOST_SIZES
from gpubench.model.terms.units import parse_size

_FRAMEWORKS_NAMES = {"fp16": "float16", "fp32": "float32", "fp64": "float64", "bf16": "bfloat16"}
_STEP = 2**20
"""Bytes that nccl-tests goes on by where nobody says otherwise (common.cu, `stepBytes`)."""


@dataclass(frozen=True, kw_only=True)
class NcclTestsOptions:
    """Sizes, GPUs and verification in nccl-tests' words."""

    help_group: ClassVar = NCCL

    smallest: str | None = option("SIZE", "As in nccl-tests: -b 8 -e 4G -f 2 is --sizes 8:4G:2.", name="-b")
    largest: str | None = option("SIZE", "Up to this size, with -b.", name="-e")
    factor: str | None = option("FACTOR", "Times so much, with -b and -e.", name="-f")
    step: str | None = option("BYTES", "So much more, with -b and -e: -i 1M.", name="-i")
    gpus: int | None = option("N", "As --np. Under mpirun or srun, -g 1 alone: a rank has one GPU.", name="-g", min=1)
    verified: int | None = option("0|1", "-c 0 as --no-check, -c 1 as --check.", name="-c", min=0)

    def sizes(self, own: str | None, by_default: Container[str]) -> str | None:
        """What --sizes would be; `own` is what it is. UsageError where sizes are said twice, or by halves."""
        words = {"-b": self.smallest, "-e": self.largest, "-f": self.factor, "-i": self.step}
        given = [name for name, value in words.items() if value is not None]
        if not given:
            return own
        if own is not None and "--sizes" not in by_default:
            raise exclusive((" ".join(given), "--sizes"), "sizes in one way: -b 8 -e 4G -f 2, or --sizes 8:4G:2")
        if self.factor is not None and self.step is not None:
            raise exclusive(("-f", "-i"), "sizes that are multiplied, or that have so much added")
        if self.smallest is None or self.largest is None:
            raise UsageError(
                f"{' and '.join(given)} without {'-e' if self.largest is None else '-b'}",
                expected="the smallest size and the largest",
                reason="nccl-tests takes 32M for the one that is missing, which few want",
                next_step=f"-b {self.smallest or 8} -e {self.largest or '4G'} -f {self.factor or 2}",
            )
        with advising(next_step="-b 8 -e 4G -f 2"):
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
            f"{asked} without -f or -i: nccl-tests would visit {of_theirs:,} sizes, 1M apart",
            expected="the factor or the step between sizes",
            next_step=f"{asked} -f 2{also}",
        )

    def ranks(self, own: int | None, by_default: Container[str]) -> int | None:
        """What --np would be; `own` is what it is. UsageError for another number, or several GPUs a rank."""
        if self.gpus is None:
            return own
        launch = launched_by(os.environ)
        if launch is not None and self.gpus > 1:
            raise UsageError(
                f"-g {self.gpus} under {launch.launcher}",
                expected="-g 1: in gpubench a rank has one GPU",
                next_step=f"{launch.size * self.gpus} ranks without -g, in the place of {launch.size}",
            )
        if launch is not None:
            return own
        if own not in (None, self.gpus) and "--np" not in by_default:
            raise exclusive((f"-g {self.gpus}", f"--np {own}"), "one of them: both are the number of ranks")
        return self.gpus

    def check(self, *, own: bool, by_default: Container[str]) -> bool:
        """Whether data are verified; `own` is what --check says. UsageError for both ways, or several checks."""
        if self.verified is None:
            return own
        if self.verified > 1:
            raise UsageError(
                f"-c {self.verified}",
                expected="0 or 1",
                reason="nccl-tests checks so many operations apart from those it times; gpubench those that it timed",
                next_step="-c 1",
            )
        if self.verified and not own and "--check" not in by_default:
            raise exclusive(("-c 1", "--no-check"), "one of them")
        return bool(self.verified)


def parse_dtypes(texts: list[str] | None) -> tuple[DataType, ...]:
    """The types of --dtype, by NCCL's names, nccl-tests' or frameworks': float is float32, bf16 bfloat16."""
    words = [word.strip() for text in texts or ["float32"] for word in text.split(",")]
    return parse_choices("--dtype", [_own_name(word) for word in words], DataType)


def _own_name(word: str) -> str:
    if word.lower() in tuple(DataType):
        return word.lower()
    from gpubench.readers.results.nccl_tests.names import ELEMENT_TYPES

    name = _FRAMEWORKS_NAMES.get(word.lower()) or ELEMENT_TYPES.get(word.lower(), (word, 0))[0]
    return name if name in tuple(DataType) else word


def check_outputs(paths: list[str] | None, reductions: Container[str]) -> None:
    """Raise UsageError for `-o sum`: of nccl-tests that is the reduction, here a file."""
    for each in paths or ():
        if each in reductions or each == "all":
            raise UsageError(
                f"-o {each}",
                expected="-o FILE",
                reason="nccl-tests' -o is the reduction",
                next_step=f"--op {each if each != 'all' else ','.join(('sum', 'prod', 'max', 'min', 'avg'))}",
            )

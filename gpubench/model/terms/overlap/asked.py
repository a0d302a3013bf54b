"""The request for communication beside computation: partners, and caps on NCCL's CTAs."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpubench.errors import UsageError

OVERLAP = "overlap"
"""The name of the command, and of the section that its rows are in."""

OWN_CTAS = "own"
"""The word of --ctas for NCCL's own number."""

DEFAULT_CTAS: tuple[int | None, ...] = (None, 16, 8, 4, 2)
MOST_CTAS = 64
"""NCCL has no more channels than that (MAXCHANNELS), and a CTA serves one."""

DEFAULT_SIZES = "1M:1G:4"
DEFAULT_GEMM_SIDE = 8192
DEFAULT_SECONDS = 0.25


class Partner(StrEnum):
    """The computation beside the communication."""

    GEMM = "gemm"
    COPY = "copy"
    CHAIN = "chain"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapAsked:
    """The request for an overlap beside sizes and type, as plain data.

    `ctas` are caps, None for NCCL's own number; `gemm_side` is n of the n × n × n GEMM; `seconds` is how long each
    phase is measured; `partner_count` of None follows from the collective's time.
    """

    partners: tuple[Partner, ...] = (Partner.GEMM,)
    ctas: tuple[int | None, ...] = DEFAULT_CTAS
    gemm_side: int = DEFAULT_GEMM_SIDE
    seconds: float = DEFAULT_SECONDS
    partner_count: int | None = None


def parse_ctas(texts: Sequence[str]) -> tuple[int | None, ...]:
    """Caps of --ctas, each once, in their order: 'own,16,8'. UsageError for what is no number of CTAs."""
    words = list(dict.fromkeys(word.strip().lower() for text in texts for word in text.split(",")))
    for word in words:
        if word != OWN_CTAS and not (word.isascii() and word.isdecimal() and 1 <= int(word) <= MOST_CTAS):
            raise UsageError(
                f"--ctas {word or repr(word)}",
                expected=f"numbers from 1 to {MOST_CTAS}, and {OWN_CTAS} for NCCL's own",
                next_step="--ctas own,16,8,4,2",
            )
    return tuple(None if word == OWN_CTAS else int(word) for word in words)


def cap_name(ctas: int | None) -> str:
    """'8 CTAs', and of None NCCL's own."""
    return "NCCL's own" if ctas is None else f"{ctas} CTA{'' if ctas == 1 else 's'}"

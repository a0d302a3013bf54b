"""The explanation of a fallback to host memory, in few words."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Explanation:
    """The cause's id, what shows it, what to do; `by_design` where there is nothing to repair."""

    id: str
    evidence: str
    advice: str
    by_design: bool = False

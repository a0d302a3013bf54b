"""The explanation of a fallback to host memory, in few words."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Explanation:
    """The cause's id, what shows it, what to do; `by_design` where there is nothing to repair.

    `in_doubt` where there is nothing to repair if the machine is what it seems to be, and what was seen is no proof.
    """

    id: str
    evidence: str
    advice: str
    by_design: bool = False
    in_doubt: bool = False

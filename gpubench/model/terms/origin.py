"""Where figures and machines come from."""

from enum import StrEnum


class Origin(StrEnum):
    """Where numbers come from."""

    MEASURED = "measured"
    SIMULATED = "simulated"
    RECORDED = "recorded"

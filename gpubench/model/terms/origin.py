"""The origin of figures and machines."""

from enum import StrEnum


class Origin(StrEnum):
    """The origin of a figure or a machine."""

    MEASURED = "measured"
    SIMULATED = "simulated"
    RECORDED = "recorded"

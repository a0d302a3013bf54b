"""Options of the commands that judge machines: the profile to judge by, and how many GPUs every node should have."""

import os
from typing import Any

from gpubench.cli.signature import option

PROFILE = "Judge by this profile. Default: one of your own that matches, else one of gpubench's."


def check_profile(name: str | None) -> None:
    """Raise UsageError, before anything is measured, where the profile is not there or broken."""
    if name is not None:
        from gpubench.profiles.files import find

        find(name, os.environ)


def expected_gpus() -> Any:
    """The field of a dataclass that is `--expect-gpus`."""
    return option(
        "N", "GPUs that every node should have: fewer or more is a FAIL, none anywhere exit code 3.", min=1, max=1024
    )

"""The option that names the profile to judge by, of the commands that judge machines."""

import os

PROFILE = "Judge by this profile. Default: one of your own that matches, else one of gpubench's."


def check_profile(name: str | None) -> None:
    """Raise UsageError, before anything is measured, where the profile is not there or broken."""
    if name is not None:
        from gpubench.profiles.files import find

        find(name, os.environ)

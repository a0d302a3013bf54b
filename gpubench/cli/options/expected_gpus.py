"""The option that says how many GPUs every node should have, of the commands that judge machines."""

from typing import Any

from gpubench.cli.signature import option


def expected_gpus() -> Any:
    """The field of a dataclass that is `--expect-gpus`."""
    return option(
        "N", "GPUs that every node should have: fewer or more is a FAIL, none anywhere exit code 3.", min=1, max=1024
    )

"""The programs that a fabric is written for. A new one is one file and one line here."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpubench.formats.networks.fabric import ExportedFabric

NETWORKS = {"calculon": "calculon", "astra-sim": "astra_sim", "simai": "simai"}
"""The module of each, by the name that --export takes."""

SUFFIXES = {"calculon": ".json", "astra-sim": ".yml", "simai": ".yaml"}


def network_text(name: str, fabric: "ExportedFabric") -> str:
    """The file for that program."""
    write: Callable[[ExportedFabric], str] = import_module(f"gpubench.formats.networks.{NETWORKS[name]}").text
    return write(fabric)

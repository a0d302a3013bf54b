"""NCCL's algorithm and protocol, which it chooses by itself where NCCL_ALGO and NCCL_PROTO are not set."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

ALGORITHM_VARIABLE, PROTOCOL_VARIABLE = "NCCL_ALGO", "NCCL_PROTO"

HIERARCHICAL = "hierarchical"
"""The setting of rows whose operations are made of smaller ones: in the node, across nodes, in the node."""

AGAIN = "again"
"""The setting of rows that measure the first way of all once more, when all others had their turn."""

OWN_CHOICE = "own choice"


def nccl_version(code: int) -> str:
    """22809 → '2.28.9', and before NCCL 2.9 2708 → '2.7.8', as NCCL_VERSION_CODE encodes it."""
    thousand = 10_000 if code >= 10_000 else 1_000
    return f"{code // thousand}.{code % thousand // 100}.{code % 100}"


class Algorithm(StrEnum):
    """NCCL's algorithms, by the names that NCCL_ALGO takes in any case."""

    RING = "ring"
    TREE = "tree"
    COLLNET_DIRECT = "collnetdirect"
    COLLNET_CHAIN = "collnetchain"
    NVLS = "nvls"
    NVLS_TREE = "nvlstree"
    PAT = "pat"


class Protocol(StrEnum):
    """NCCL's protocols, by the names that NCCL_PROTO takes in any case."""

    LL = "ll"
    LL128 = "ll128"
    SIMPLE = "simple"


@dataclass(frozen=True, slots=True)
class NcclChoice:
    """An algorithm, a protocol or both; None is left to NCCL."""

    algorithm: Algorithm | None = None
    protocol: Protocol | None = None

    @property
    def name(self) -> str:
        """'ring/ll128', 'ring', 'll128'."""
        return taken_name(self.algorithm, self.protocol) or OWN_CHOICE

    @property
    def variables(self) -> Mapping[str, str]:
        """The variables that have to be set when a communicator is made."""
        asked = {ALGORITHM_VARIABLE: self.algorithm, PROTOCOL_VARIABLE: self.protocol}
        return {name: value.value for name, value in asked.items() if value is not None}

    @classmethod
    def of(cls, name: str | None) -> "NcclChoice":
        """The setting that a row is named after; nothing is asked for in any other row."""
        words = (name or "").split("/")
        return cls(
            next((each for each in Algorithm if each in words), None),
            next((each for each in Protocol if each in words), None),
        )

    def differs(self, algorithm: str | None, protocol: str | None) -> bool:
        """True where NCCL's log names something else than was asked for; what it does not name does not differ."""
        pairs = ((self.algorithm, algorithm), (self.protocol, protocol))
        return any(asked and heard and asked != _plain(heard) for asked, heard in pairs)


def settings_of(algorithms: Sequence[Algorithm], protocols: Sequence[Protocol]) -> Iterator[NcclChoice]:
    """Every combination; none where nothing is asked for."""
    if algorithms or protocols:
        for algorithm, protocol in product(algorithms or (None,), protocols or (None,)):
            yield NcclChoice(algorithm, protocol)


def taken_name(algorithm: str | None, protocol: str | None) -> str | None:
    """The names in NCCL's log as a setting: RING and LL are 'ring/ll'."""
    return "/".join(_plain(each) for each in (algorithm, protocol) if each) or None


def _plain(heard: str) -> str:
    return heard.lower().replace("_", "")

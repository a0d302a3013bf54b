"""NCCL settings to measure side by side: variables with values, and the names of their rows."""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import product

from msgspec import Struct

from gpubench.errors import UsageError

ALGORITHM_VARIABLE, PROTOCOL_VARIABLE = "NCCL_ALGO", "NCCL_PROTO"

PER_COMMUNICATOR = (ALGORITHM_VARIABLE, PROTOCOL_VARIABLE)
"""Variables that NCCL reads for every communicator. It reads most others once per process."""

REGISTER, CTA_POLICY, MAX_CTAS = "register", "cta-policy", "max-ctas"
REQUESTS = (REGISTER, CTA_POLICY, MAX_CTAS)
"""Options that change a communicator by a call, not by a variable."""

_OF_COMMUNICATOR = (*PER_COMMUNICATOR, *REQUESTS)

HIERARCHICAL = "hierarchical"
"""The setting of rows that reduce in two levels: in the node, across nodes, in the node."""

AGAIN = "again"
"""The setting of rows that repeat the first setting after all others.

A setting with its own jobs is repeated too. The rows of its second job end with this word.
"""

OWN_CHOICE = "own choice"


class Algorithm(StrEnum):
    """NCCL's algorithms, as NCCL_ALGO names them in any case."""

    RING = "ring"
    TREE = "tree"
    COLLNET_DIRECT = "collnetdirect"
    COLLNET_CHAIN = "collnetchain"
    NVLS = "nvls"
    NVLS_TREE = "nvlstree"
    PAT = "pat"


class Registration(StrEnum):
    """How buffers are registered with a communicator: ncclCommRegister, or windows of symmetric memory."""

    NONE = "none"
    USER = "user"
    SYMMETRIC = "symmetric"


class CtaPolicy(StrEnum):
    """NCCL's policies for SMs: fewer of them if NVLS reduces, or none if copy engines move the data."""

    DEFAULT = "default"
    EFFICIENCY = "efficiency"
    ZERO = "zero"


class Protocol(StrEnum):
    """NCCL's protocols, as NCCL_PROTO names them in any case."""

    LL = "ll"
    LL128 = "ll128"
    SIMPLE = "simple"


class NcclSetting(Struct, frozen=True):
    """Variables and requests for NCCL. Without any, NCCL chooses."""

    values: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Its name: 'ring/ll128', 'll', 'NCCL_MAX_NCHANNELS=8', 'ring NCCL_MAX_NCHANNELS=8'."""
        plain = format_choice(self.algorithm, self.protocol)
        known = {ALGORITHM_VARIABLE: self.algorithm, PROTOCOL_VARIABLE: self.protocol}
        ordered = (*self.communicator_part.values, *self.process_part.values)
        others = [f"{name}={value}" for name, value in ordered if not known.get(name)]
        return " ".join(filter(None, (plain, *others))) or OWN_CHOICE

    @property
    def variables(self) -> Mapping[str, str]:
        return {name: value for name, value in self.values if name not in REQUESTS}

    @property
    def requests(self) -> Mapping[str, str]:
        """The requests to the communicator by option name."""
        return {name: value for name, value in self.values if name in REQUESTS}

    @property
    def algorithm(self) -> Algorithm | None:
        """The only algorithm that it allows, or None if it allows several or does not restrict them."""
        value = self.variables.get(ALGORITHM_VARIABLE, "").lower()
        return Algorithm(value) if value in tuple(Algorithm) else None

    @property
    def protocol(self) -> Protocol | None:
        """The only protocol that it allows, or None if it allows several or does not restrict them."""
        value = self.variables.get(PROTOCOL_VARIABLE, "").lower()
        return Protocol(value) if value in tuple(Protocol) else None

    @property
    def communicator_part(self) -> "NcclSetting":
        """The values that apply to one communicator of a process with several."""
        return NcclSetting(tuple(value for value in self.values if value[0] in _OF_COMMUNICATOR))

    @property
    def process_part(self) -> "NcclSetting":
        """The variables that NCCL reads once per process."""
        return NcclSetting(tuple(value for value in self.values if value[0] not in _OF_COMMUNICATOR))

    @classmethod
    def parse(cls, name: str | None) -> "NcclSetting":
        """Parse the setting in a row's name. Other names set nothing."""
        found: dict[str, str] = {}
        for word in (name or "").split(" "):
            variable, equals, value = word.partition("=")
            if equals:
                found[variable] = value
                continue
            for part in word.split("/"):
                if part in tuple(Algorithm):
                    found[ALGORITHM_VARIABLE] = part
                elif part in tuple(Protocol):
                    found[PROTOCOL_VARIABLE] = part
        return cls(tuple(found.items()))

    def differs(self, algorithm: str | None, protocol: str | None) -> bool:
        """True if NCCL's log names another choice than requested. A choice that it does not name does not differ."""
        pairs = ((self.algorithm, algorithm), (self.protocol, protocol))
        return any(asked and heard and asked != _plain(heard) for asked, heard in pairs)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Warnings about variables that change the path or the work, so that times do not compare."""
        return tuple(f"{name}={value} {what}" for name, value in self.values if (what := _describe_side_effect(name)))


def combine_values(asked: Mapping[str, Sequence[str]]) -> Iterator[NcclSetting]:
    """Yield a setting per combination of values, or nothing without values."""
    if asked:
        for values in product(*asked.values()):
            yield NcclSetting(tuple(zip(asked, values, strict=True)))


def format_choice(algorithm: str | None, protocol: str | None) -> str | None:
    """Return the setting that NCCL's log names: RING and LL are 'ring/ll'."""
    return "/".join(_plain(name) for name in (algorithm, protocol) if name) or None


def repeated_name(name: str | None) -> str:
    """Return the name of the rows that repeat a setting."""
    return AGAIN if name is None else f"{name} {AGAIN}"


def original_name(name: str | None) -> str | None:
    """Return the name of the rows that measured the same setting first."""
    return None if name == AGAIN else (name or "").removesuffix(f" {AGAIN}") or None


def _plain(heard: str) -> str:
    return heard.lower().replace("_", "")


_DIAGNOSTIC = re.compile(r"NCCL_(DEBUG|CHECK_|RUN_|PROFILER_|PARAM_DUMP|TOPO_DUMP|GRAPH_DUMP|RAS_|REPORT_)")
_PATH = re.compile(
    r"NCCL_(P2P_(DISABLE|LEVEL|DIRECT_DISABLE)|SHM_DISABLE|IB_(DISABLE|HCA)|NET|NET_(PLUGIN|DISABLE_INTRA|GDR_LEVEL|"
    r"GDR_READ)|SOCKET_IFNAME|HOSTID|TOPO_FILE|GRAPH_FILE|IGNORE_DISABLED_P2P|MNNVL_ENABLE|CUMEM_ENABLE|NVB_DISABLE)"
)


def _describe_side_effect(variable: str) -> str:
    """Describe what a variable changes besides NCCL's choice, or '' if it only tunes.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html and the variables in the library.
    """
    if _DIAGNOSTIC.match(variable):
        return "makes NCCL log or check while it is timed"
    if _PATH.fullmatch(variable):
        return "changes the path that data takes"
    if variable.endswith(("_DISABLE", "_ENABLE")):
        return "switches a part of NCCL off or on"
    return ""


SET_OPTION = "--set"
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{1,100}", re.ASCII)
_OWN = "GPUBENCH_"
_LOGGING = ("NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")


def parse_set_options(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse texts like NAME=a,b as values by variable. A value in double quotes may contain commas.

    Raises UsageError if a variable or a value is missing, a variable is repeated, or gpubench needs it itself.
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        values = next(csv.reader([rest]), [])
        if not (equals and _VARIABLE.fullmatch(name) and all(values) and values):
            raise UsageError(
                f"{SET_OPTION} {text}",
                expected="a variable of NCCL's with values: NAME=a,b",
                reason="a name has capitals, digits and underscores, and no value is empty",
                next_step=f"{SET_OPTION} NCCL_MAX_NCHANNELS=4,8,16",
            )
        if any(map(str.isspace, rest)):
            raise UsageError(f"{SET_OPTION} {text}", expected="values without blanks, with commas between them")
        if name in found:
            raise UsageError(
                f"{SET_OPTION} {name} is given twice",
                expected="all values of a variable in one option",
                next_step=f"{SET_OPTION} {name}={','.join(dict.fromkeys((*found[name], *values)))}",
            )
        if name.startswith(_OWN) or name in _LOGGING:
            raise UsageError(
                f"{SET_OPTION} {name}",
                expected="a variable that gpubench does not use itself",
                reason="gpubench reads NCCL's log while ranks connect" if name in _LOGGING else "it sets gpubench up",
                next_step=f"{SET_OPTION} NCCL_MAX_NCHANNELS=4,8,16",
            )
        found[name] = tuple(dict.fromkeys(values))
    return found

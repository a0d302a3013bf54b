"""NCCL settings to compare: variables with their values, and names for the rows of each setting."""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import product

from msgspec import Struct

from gpubench.errors import UsageError

ALGORITHM_VARIABLE, PROTOCOL_VARIABLE = "NCCL_ALGO", "NCCL_PROTO"

PER_COMMUNICATOR = (ALGORITHM_VARIABLE, PROTOCOL_VARIABLE)
"""Variables that NCCL reads for every communicator. NCCL reads most other variables once per process."""

REGISTER, CTA_POLICY, MAX_CTAS = "register", "cta-policy", "max-ctas"
REQUESTS = (REGISTER, CTA_POLICY, MAX_CTAS)
"""Options that gpubench applies through NCCL calls, not through variables."""

_OF_COMMUNICATOR = (*PER_COMMUNICATOR, *REQUESTS)

HIERARCHICAL = "hierarchical"
"""The setting name for allreduces in three steps: within each node, across nodes, and within each node again."""

AGAIN = "again"
"""The setting name for rows that repeat the first setting after all other settings.

A setting that needs its own job is also repeated in a second job. The setting names of that job's rows end with this
word.
"""

OWN_CHOICE = "own choice"


class Algorithm(StrEnum):
    """NCCL's algorithms. NCCL_ALGO accepts these names in upper or lower case."""

    RING = "ring"
    TREE = "tree"
    COLLNET_DIRECT = "collnetdirect"
    COLLNET_CHAIN = "collnetchain"
    NVLS = "nvls"
    NVLS_TREE = "nvlstree"
    PAT = "pat"


class Registration(StrEnum):
    """How buffers are registered with a communicator: not at all, with ncclCommRegister, or as symmetric memory
    windows.
    """

    NONE = "none"
    USER = "user"
    SYMMETRIC = "symmetric"


class CtaPolicy(StrEnum):
    """NCCL's policies for the use of SMs. EFFICIENCY uses fewer SMs if NVLS reduces. ZERO uses none if copy engines
    move data.
    """

    DEFAULT = "default"
    EFFICIENCY = "efficiency"
    ZERO = "zero"


class Protocol(StrEnum):
    """NCCL's protocols. NCCL_PROTO accepts these names in upper or lower case."""

    LL = "ll"
    LL128 = "ll128"
    SIMPLE = "simple"


class NcclSetting(Struct, frozen=True):
    """NCCL variables and communicator options for a measurement. An empty setting leaves every choice to NCCL."""

    values: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """The setting's name in rows: 'ring/ll128', 'll', 'NCCL_MAX_NCHANNELS=8', 'ring NCCL_MAX_NCHANNELS=8'."""
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
        """The options to apply through NCCL calls, by option name."""
        return {name: value for name, value in self.values if name in REQUESTS}

    @property
    def algorithm(self) -> Algorithm | None:
        """The algorithm that the setting forces. None if it allows several algorithms or does not restrict them."""
        value = self.variables.get(ALGORITHM_VARIABLE, "").lower()
        return Algorithm(value) if value in tuple(Algorithm) else None

    @property
    def protocol(self) -> Protocol | None:
        """The protocol that the setting forces. None if it allows several protocols or does not restrict them."""
        value = self.variables.get(PROTOCOL_VARIABLE, "").lower()
        return Protocol(value) if value in tuple(Protocol) else None

    @property
    def communicator_part(self) -> "NcclSetting":
        """The values that can differ between communicators of one process."""
        return NcclSetting(tuple(value for value in self.values if value[0] in _OF_COMMUNICATOR))

    @property
    def process_part(self) -> "NcclSetting":
        """The variables that NCCL reads only once per process."""
        return NcclSetting(tuple(value for value in self.values if value[0] not in _OF_COMMUNICATOR))

    @classmethod
    def parse(cls, name: str | None) -> "NcclSetting":
        """Parse the setting from its name in a row. Return an empty setting for unknown names."""
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
        """True if NCCL's log shows another algorithm or protocol than the requested one. A choice missing from the
        log is ignored.
        """
        pairs = ((self.algorithm, algorithm), (self.protocol, protocol))
        return any(asked and heard and asked != _plain(heard) for asked, heard in pairs)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Warnings about variables that change the path or add work, so that times are not comparable."""
        return tuple(f"{name}={value} {what}" for name, value in self.values if (what := _describe_side_effect(name)))


def combine_values(asked: Mapping[str, Sequence[str]]) -> Iterator[NcclSetting]:
    """Yield one setting per combination of values. Yield nothing if there are no variables."""
    if asked:
        for values in product(*asked.values()):
            yield NcclSetting(tuple(zip(asked, values, strict=True)))


def format_choice(algorithm: str | None, protocol: str | None) -> str | None:
    """Return the name of the setting for an algorithm and a protocol from NCCL's log: RING and LL → 'ring/ll'."""
    return "/".join(_plain(name) for name in (algorithm, protocol) if name) or None


def repeated_name(name: str | None) -> str:
    """Return the setting name for rows that repeat the setting `name`."""
    return AGAIN if name is None else f"{name} {AGAIN}"


def original_name(name: str | None) -> str | None:
    """Return the name that a repeated setting had in its first rows. None if it had no name."""
    return None if name == AGAIN else (name or "").removesuffix(f" {AGAIN}") or None


def _plain(heard: str) -> str:
    return heard.lower().replace("_", "")


_DIAGNOSTIC = re.compile(r"NCCL_(DEBUG|CHECK_|RUN_|PROFILER_|PARAM_DUMP|TOPO_DUMP|GRAPH_DUMP|RAS_|REPORT_)")
_PATH = re.compile(
    r"NCCL_(P2P_(DISABLE|LEVEL|DIRECT_DISABLE)|SHM_DISABLE|IB_(DISABLE|HCA)|NET|NET_(PLUGIN|DISABLE_INTRA|GDR_LEVEL|"
    r"GDR_READ)|SOCKET_IFNAME|HOSTID|TOPO_FILE|GRAPH_FILE|IGNORE_DISABLED_P2P|MNNVL_ENABLE|CUMEM_ENABLE|NVB_DISABLE)"
)


def _describe_side_effect(variable: str) -> str:
    """Describe what a variable changes besides NCCL's tuning choices. Return '' for variables that only tune.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html and the variables in the library.
    """
    if _DIAGNOSTIC.match(variable):
        return "makes NCCL log or check during the measurement"
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
    """Parse texts such as NAME=a,b into values by variable. A value in double quotes may contain commas.

    Raises UsageError if a variable or value is missing, a variable is repeated, or gpubench uses the variable itself.
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        values = next(csv.reader([rest]), [])
        if not (equals and _VARIABLE.fullmatch(name) and all(values) and values):
            raise UsageError(
                f"{SET_OPTION} {text}",
                expected="an NCCL variable with values: NAME=a,b",
                reason="a name consists of capitals, digits and underscores, and no value may be empty",
                next_step=f"{SET_OPTION} NCCL_MAX_NCHANNELS=4,8,16",
            )
        if any(map(str.isspace, rest)):
            raise UsageError(f"{SET_OPTION} {text}", expected="values without spaces, separated by commas")
        if name in found:
            raise UsageError(
                f"{SET_OPTION} {name} is set twice",
                expected="all values of a variable in one option",
                next_step=f"{SET_OPTION} {name}={','.join(dict.fromkeys((*found[name], *values)))}",
            )
        if name.startswith(_OWN) or name in _LOGGING:
            raise UsageError(
                f"{SET_OPTION} {name}",
                expected="a variable that gpubench does not use itself",
                reason="gpubench needs this variable to read NCCL's log while ranks connect"
                if name in _LOGGING
                else "it configures gpubench",
                next_step=f"{SET_OPTION} NCCL_MAX_NCHANNELS=4,8,16",
            )
        found[name] = tuple(dict.fromkeys(values))
    return found

"""Settings of NCCL that are measured side by side: variables with their values, and what a row is called after them."""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import product

from msgspec import Struct

from gpubench.errors import UsageError

ALGORITHM_VARIABLE, PROTOCOL_VARIABLE = "NCCL_ALGO", "NCCL_PROTO"

PER_COMMUNICATOR = (ALGORITHM_VARIABLE, PROTOCOL_VARIABLE)
"""Variables that NCCL reads whenever a communicator is made; it reads most others once a process."""

REGISTER, CTA_POLICY, MAX_CTAS = "register", "cta-policy", "max-ctas"
REQUESTS = (REGISTER, CTA_POLICY, MAX_CTAS)
"""What is asked of a communicator by calls, not by variables; by the options that ask for it."""

_OF_COMMUNICATOR = (*PER_COMMUNICATOR, *REQUESTS)

HIERARCHICAL = "hierarchical"
"""The setting of rows whose operations are made of smaller ones: in the node, across nodes, in the node."""

AGAIN = "again"
"""The setting of rows that measure the first way of all once more, when all others had their turn.

A setting that had jobs of its own is measured again too: the rows of its second job end in this word.
"""

OWN_CHOICE = "own choice"


class Algorithm(StrEnum):
    """NCCL's algorithms, by the names that NCCL_ALGO takes in any case."""

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
    """NCCL's policies for SMs: fewer of them where NVLS reduces, or none where copy engines move the data."""

    DEFAULT = "default"
    EFFICIENCY = "efficiency"
    ZERO = "zero"


class Protocol(StrEnum):
    """NCCL's protocols, by the names that NCCL_PROTO takes in any case."""

    LL = "ll"
    LL128 = "ll128"
    SIMPLE = "simple"


class NcclSetting(Struct, frozen=True):
    """What NCCL is told: variables and requests with their values; without any, NCCL chooses."""

    values: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """'ring/ll128', 'll', 'NCCL_MAX_NCHANNELS=8', 'ring NCCL_MAX_NCHANNELS=8'."""
        plain = taken_name(self.algorithm, self.protocol)
        known = {ALGORITHM_VARIABLE: self.algorithm, PROTOCOL_VARIABLE: self.protocol}
        in_order = (*self.communicator_part.values, *self.process_part.values)
        others = [f"{name}={value}" for name, value in in_order if not known.get(name)]
        return " ".join(filter(None, (plain, *others))) or OWN_CHOICE

    @property
    def variables(self) -> Mapping[str, str]:
        """The variables by name."""
        return {name: value for name, value in self.values if name not in REQUESTS}

    @property
    def requests(self) -> Mapping[str, str]:
        """What is asked of the communicator by calls, by the names of the options."""
        return {name: value for name, value in self.values if name in REQUESTS}

    @property
    def algorithm(self) -> Algorithm | None:
        """The one algorithm that it leaves NCCL; None where it leaves several, or says nothing of them."""
        value = self.variables.get(ALGORITHM_VARIABLE, "").lower()
        return Algorithm(value) if value in tuple(Algorithm) else None

    @property
    def protocol(self) -> Protocol | None:
        """The one protocol that it leaves NCCL; None where it leaves several, or says nothing of them."""
        value = self.variables.get(PROTOCOL_VARIABLE, "").lower()
        return Protocol(value) if value in tuple(Protocol) else None

    @property
    def communicator_part(self) -> "NcclSetting":
        """Those of its variables that a communicator can be made under in a process that has others."""
        return NcclSetting(tuple(value for value in self.values if value[0] in _OF_COMMUNICATOR))

    @property
    def process_part(self) -> "NcclSetting":
        """Those of its variables that need a process of their own."""
        return NcclSetting(tuple(value for value in self.values if value[0] not in _OF_COMMUNICATOR))

    @classmethod
    def of(cls, name: str | None) -> "NcclSetting":
        """The setting that a row is named after; nothing is set in any other row."""
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
        """True where NCCL's log names something else than was asked for; what it does not name does not differ."""
        pairs = ((self.algorithm, algorithm), (self.protocol, protocol))
        return any(asked and heard and asked != _plain(heard) for asked, heard in pairs)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What it changes beside the choice of a way: where the path or the work is another, times do not compare."""
        return tuple(f"{name}={value} {what}" for name, value in self.values if (what := _changes(name)))


def every_combination(asked: Mapping[str, Sequence[str]]) -> Iterator[NcclSetting]:
    """A setting for every combination of values; none where nothing is asked for."""
    if asked:
        for values in product(*asked.values()):
            yield NcclSetting(tuple(zip(asked, values, strict=True)))


def taken_name(algorithm: str | None, protocol: str | None) -> str | None:
    """The names in NCCL's log as a setting: RING and LL are 'ring/ll'."""
    return "/".join(_plain(each) for each in (algorithm, protocol) if each) or None


def repeated_name(name: str | None) -> str:
    """The name of the rows that measure a way for the second time."""
    return AGAIN if name is None else f"{name} {AGAIN}"


def first_time(name: str | None) -> str | None:
    """The name of the rows that measured the same way for the first time."""
    return None if name == AGAIN else (name or "").removesuffix(f" {AGAIN}") or None


def _plain(heard: str) -> str:
    return heard.lower().replace("_", "")


_DIAGNOSTIC = re.compile(r"NCCL_(DEBUG|CHECK_|RUN_|PROFILER_|PARAM_DUMP|TOPO_DUMP|GRAPH_DUMP|RAS_|REPORT_)")
_PATH = re.compile(
    r"NCCL_(P2P_(DISABLE|LEVEL|DIRECT_DISABLE)|SHM_DISABLE|IB_(DISABLE|HCA)|NET|NET_(PLUGIN|DISABLE_INTRA|GDR_LEVEL|"
    r"GDR_READ)|SOCKET_IFNAME|HOSTID|TOPO_FILE|GRAPH_FILE|IGNORE_DISABLED_P2P|MNNVL_ENABLE|CUMEM_ENABLE|NVB_DISABLE)"
)


def _changes(variable: str) -> str:
    """What a variable changes beside NCCL's choice, in words; empty where it only tunes it.

    The variables are those of https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, and of the library's
    own list where that has more.
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


def parse_sets(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The values of each variable in texts of the form NAME=a,b; a value in double quotes may have commas in it.

    Raises UsageError: no variable, no value, a variable that stands in two texts, or one that gpubench needs itself.
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

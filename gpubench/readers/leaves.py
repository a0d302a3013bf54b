"""Reads the leaf switch of each node from Slurm's topology.conf, ibnetdiscover's output, or a table of nodes and
leaves.

In ibnetdiscover's output, a port belongs to the host in its description, which rdma-ndd sets to "HOST DEVICE" (`%h
%d`). In a rail-optimized fabric, a node is connected to one switch per rail. There, nodes that share at least half of
their switches count as one leaf, so that a missing cable does not matter.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from gpubench.errors import UsageError
from gpubench.model.terms.units import plural, shorten
from gpubench.readers.documents import Wanted, read_text

_SWITCH = re.compile(r'Switch\s+\d+\s+"(S-[0-9a-fA-F]+)"\s*(?:#\s*"([^"]*)")?')
_PORT = re.compile(r'\[\d+\](?:\[[^\]]*\])*\s+"H-[0-9a-fA-F]+"\[\d+\]\S*\s*#\s*"(\S+)\s+(\S+)"')
# For example 'MF0;leaf1:MQM8700/U1' for a managed switch that is called leaf1
_OF_MELLANOX = re.compile(r"MF\d+;(.+):[^:]*")
_SHARED = 0.5


def _leaves_of_discovery(text: str) -> dict[str, str]:
    """Return the leaf of every host that is connected to a switch. A leaf has the name of its first switch."""
    switches: dict[str, dict[str, str]] = {}
    for host, device, switch in _ports(text):
        switches.setdefault(host, {})[device] = switch
    leaves: list[tuple[str, frozenset[str]]] = []
    by_switch: dict[str, list[int]] = {}
    found: dict[str, str] = {}
    for host, by_device in sorted(switches.items(), key=lambda item: (-len(item[1]), item[0])):
        own = frozenset(by_device.values())
        near = (leaves[place] for place in sorted({place for switch in own for place in by_switch.get(switch, ())}))
        known = (name for name, members in near if len(own & members) >= _SHARED * max(len(own), len(members)))
        leaf = next(known, None)
        if leaf is None:
            leaf = by_device[min(by_device)]
            for switch in own:
                by_switch.setdefault(switch, []).append(len(leaves))
            leaves.append((leaf, own))
        found[host] = leaf
    return found


def _ports(text: str) -> Iterator[tuple[str, str, str]]:
    switch = None
    for line in text.splitlines():
        header = _SWITCH.match(line)
        if header is not None:
            named = header[2] and _OF_MELLANOX.fullmatch(header[2])
            # Unmanaged switches all have the name of their model, so use the GUID.
            switch = named[1] if named else header[1]
        elif not line.strip() or not line.startswith("["):
            switch = None
        elif switch is not None and (port := _PORT.match(line)) is not None:
            yield port[1], port[2], switch


MOST_BYTES = 16 * 2**20
MOST_HOSTS = 2**17  # Hosts in one bracketed list. No cluster has more
_WANTED = Wanted(
    "Slurm's topology.conf, the output of ibnetdiscover, or lines with a node and its leaf",
    "scontrol show topology, or a file with lines like: node17 leaf4",
    MOST_BYTES,
    "leaves.txt",
)
_SETTING = re.compile(r"(\w+)=(\S+)", re.ASCII)
_BRACKETS = re.compile(r"\[([0-9,\-]+)\]", re.ASCII)


def read_leaves(path: Path) -> dict[str, str]:
    """Return the leaf switch of every host in a file.

    Raises UsageError if the file cannot be read, has an unknown format, or assigns a host to two leaves.
    """
    text = read_text(path, _WANTED)
    if any(_SWITCH.match(line) for line in text.splitlines()):
        discovered = _leaves_of_discovery(text)
        if not discovered:
            raise _WANTED.unfit(f"{path} has no host names", reason="rdma-ndd, which names the ports, is not running")
        return discovered
    found: dict[str, str] = {}
    for number, line in _lines(text):
        where = f"{path}, line {number}"
        for host, leaf in _read_line(line, where):
            if found.setdefault(host, leaf) != leaf:
                raise UsageError(
                    f"{where}: {host} is connected to {found[host]} and to {leaf}", expected="one leaf for every node"
                )
    if not found:
        raise _WANTED.unfit(f"{path} has no leaf", reason="it has only switches without nodes, or only comments")
    return found


def find_leaves(hosts: Sequence[str], by_host: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return the leaf switch of each host. The file may contain host names with or without their domain.

    Raises UsageError if a host is not in the file.
    """
    short = {host.partition(".")[0]: leaf for host, leaf in by_host.items()}
    found = [by_host.get(host) or short.get(host.partition(".")[0]) for host in hosts]
    missing = [host for host, leaf in zip(hosts, found, strict=True) if leaf is None]
    if missing:
        wanted = set(hosts)
        unknown = [host for host in by_host if host not in wanted]
        raise UsageError(
            f"{name} has no leaf for {shorten(missing)}: {len(missing):,} of {plural(len(hosts), 'node')}",
            expected="a leaf for every node of the job",
            reason=f"it has other names: {shorten(unknown)}" if unknown else "it is from another cluster",
            next_step="scontrol show topology shows the names in Slurm. Without --leaves, no leaves are assumed",
        )
    return tuple(leaf for leaf in found if leaf is not None)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    kept, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].rstrip()
        first = first or number
        if words.endswith("\\"):
            kept += words[:-1] + " "
            continue
        whole = (kept + words).strip()
        if whole:
            yield first, whole
        kept, first = "", 0


def _read_line(line: str, where: str) -> Iterator[tuple[str, str]]:
    settings = {key.lower(): value for key, value in _SETTING.findall(line)}
    if "switchname" in settings:
        for host in expand_hostlist(settings.get("nodes", ""), where):
            yield host, settings["switchname"]
        return
    words = re.split(r"[\s,;]+", line)
    if "=" in line or len(words) != 2:
        raise UsageError(
            f"{where}: {line[:60]!r} has no leaf",
            expected="'SwitchName=LEAF Nodes=node[0-31]', or two columns: node, leaf",
        )
    for host in expand_hostlist(words[0], where):
        yield host, words[1]


def expand_hostlist(text: str, where: str) -> list[str]:
    """Expand a Slurm host list such as 'node[0-3,07],login'. Raises UsageError if it is malformed or too long."""
    hosts: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        if not part:
            continue
        pieces = _BRACKETS.split(part)
        if any(sign in piece for piece in pieces[::2] for sign in "[]"):
            raise UsageError(
                f"{where}: {part[:60]!r} is not a list of nodes", expected="node[0-31], or names with commas"
            )
        choices = [_numbers(piece, where) if place % 2 else [piece] for place, piece in enumerate(pieces)]
        count = 1
        for choice in choices:
            count *= len(choice)
        if count + len(hosts) > MOST_HOSTS:
            raise UsageError(f"{where}: more than {MOST_HOSTS} nodes", expected="the nodes of one cluster")
        hosts += ["".join(choice) for choice in product(*choices)]
    return hosts


def _numbers(text: str, where: str) -> list[str]:
    found: list[str] = []
    for span in text.split(","):
        first, dash, last = span.partition("-")
        is_span = first.isdecimal() and (last.isdecimal() or not dash) and len(span) <= 40
        if not is_span or (dash and not 0 <= int(last) - int(first) < MOST_HOSTS):
            raise UsageError(f"{where}: {span[:40]!r} is not a range of nodes", expected="like 0-31 or 07")
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last if dash else first) + 1)]
        if len(found) > MOST_HOSTS:
            raise UsageError(f"{where}: more than {MOST_HOSTS} nodes", expected="the nodes of one cluster")
    return found

"""The leaves of an InfiniBand fabric, as `ibnetdiscover` writes it: which host's ports are on which switches.

A host's ports go by the description that rdma-ndd gives them, "HOST DEVICE" (its default, `%h %d`). In fabrics of rails
a node has a switch a rail: a leaf is then all nodes that share most of theirs, though a cable of one is out.
"""

import re
from collections.abc import Iterator

_SWITCH = re.compile(r'Switch\s+\d+\s+"(S-[0-9a-fA-F]+)"\s*(?:#\s*"([^"]*)")?')
_PORT = re.compile(r'\[\d+\](?:\[[^\]]*\])*\s+"H-[0-9a-fA-F]+"\[\d+\]\S*\s*#\s*"(\S+)\s+(\S+)"')
_OF_MELLANOX = re.compile(r"MF\d+;(.+):[^:]*")
"""'MF0;leaf1:MQM8700/U1': a managed switch, by its own name."""

_SHARED = 0.5


def is_discovery(text: str) -> bool:
    """True for what ibnetdiscover wrote."""
    return any(_SWITCH.match(line) for line in text.splitlines())


def leaves_of_discovery(text: str) -> dict[str, str]:
    """The leaf of every host that is named on a switch's port: the first switch of those of the leaf."""
    switches: dict[str, dict[str, str]] = {}
    for host, device, switch in _ports(text):
        switches.setdefault(host, {})[device] = switch
    leaves: list[tuple[str, frozenset[str]]] = []
    found: dict[str, str] = {}
    for host, by_device in sorted(switches.items(), key=lambda each: (-len(each[1]), each[0])):
        own = frozenset(by_device.values())
        known = (name for name, members in leaves if len(own & members) >= _SHARED * max(len(own), len(members)))
        leaf = next(known, None)
        if leaf is None:
            leaf = by_device[min(by_device)]
            leaves.append((leaf, own))
        found[host] = leaf
    return found


def _ports(text: str) -> Iterator[tuple[str, str, str]]:
    """Host, device and switch of every port of a host."""
    switch = None
    for line in text.splitlines():
        header = _SWITCH.match(line)
        if header is not None:
            named = header[2] and _OF_MELLANOX.fullmatch(header[2])
            # Switches that nobody named all have the name of their model.
            switch = named[1] if named else header[1]
        elif not line.strip() or not line.startswith("["):
            switch = None
        elif switch is not None and (port := _PORT.match(line)) is not None:
            yield port[1], port[2], switch

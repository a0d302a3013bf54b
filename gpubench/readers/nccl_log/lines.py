"""Parse log lines about communicators, connections and algorithms from NCCL 2.4 to 2.32, as bytes.

A line is `host:pid:tid [cudaDev] NCCL INFO message`. A launcher, a clock or a log collector may add a prefix. Logs that
users post may lack the thread, the host name, or everything before the level (INFO or WARN).
"""

import re
from functools import lru_cache
from typing import NamedTuple

from gpubench.model.paths.nccl_log import MOST_CHANNELS, ReachedLimit
from gpubench.model.paths.transport import Transport, TransportKind, Tuning, may_begin_transport, parse_transport
from gpubench.readers import limits


class ReachedLimits:
    """The limits that a log exceeded, each with the first excess and the number of excesses.

    `ends_reading` is true if the reader must stop.
    """

    def __init__(self) -> None:
        self.ends_reading = False
        self._seen: dict[str, tuple[str, int]] = {}

    def pass_over(self, seen: str, most: str) -> None:
        """Record that the reader skipped something. `most` names the exceeded limit."""
        first, times = self._seen.get(most, (seen, 0))
        self._seen[most] = first, times + 1

    def end(self, seen: str, most: str) -> None:
        """Record an exceeded limit that stops the reader."""
        self.ends_reading = True
        self.pass_over(seen, most)

    def found(self) -> tuple[ReachedLimit, ...]:
        """Return the exceeded limits in order of their first excess."""
        return tuple(ReachedLimit(seen, most, times) for most, (seen, times) in self._seen.items())


_COLOR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_LOST_COLOR = re.compile(rb"\[(?:\d{1,3}(?:;\d{1,3})*)?m")
"""A color code whose escape character was lost."""

_STAMP = re.compile(rb"^\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,:+-]{0,20}Z?\]? ", re.M)
_BARE = re.compile(rb"^(?=NCCL (?:INFO|WARN) )", re.M)
"""The start of a line that lost everything before its level."""


_STRIPPED = re.compile(
    rb"^\s*(?:\[(-?\d{1,3})\] ?)?(?:INFO )?(?=(?:Channel|CollNet|Coll) \d{1,4}(?:/\d)? : \d{1,7}(?:\[\w{1,12}\])? -> \d"
    rb"|Connected all |Using network |NCCL_\w{1,60} set (?:by environment )?to |NET/(?:IB|Socket|Plugin|OFI) ?: "
    rb"|(?:ncclCommInitRank\w* )?comm 0x[0-9a-f]+ rank |Bootstrap ?: Using |GPU Direct RDMA |P2P is disabled "
    rb"|[\w/-]+\.cc:\d+ (?:\(\w+\) )?-> \d)",
    re.M,
)
_STRIPPED_WORDS = (
    b"Channel ",
    b"Connected all ",
    b"Using network ",
    b".cc:",
    b"comm 0x",
    b"NET/",
    b" set by env",
    b" P2P is",
)
"""Words from NCCL messages that identify lines without host, process and level."""

_CHARACTERS = ((b"&gt;", b">"), (b"&lt;", b"<"), (b"&quot;", b'"'), (b"&#39;", b"'"), (b"&amp;", b"&"))


def clean_block(block: bytes) -> bytes:
    """Remove carriage returns, colors, timestamps and HTML escapes. Restore the level if it was cut off."""
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if b"\x1b" in block:
        block = _COLOR.sub(b"", block)
    if b"-&gt;" in block:  # The arrow of a connection, as copied from the source of a web page
        for escaped, character in _CHARACTERS:
            block = block.replace(escaped, character)
    if _STAMP.search(block, 0, 4096):
        block = _STAMP.sub(b"", block)
    is_stripped = any(b"\n" + word in block or block.startswith(word) for word in _STRIPPED_WORDS)
    if is_stripped or block.count(b"Channel ") > block.count(b"NCCL INFO Channel "):
        block = _STRIPPED.sub(lambda found: (b"[" + found[1] + b"]" if found[1] else b"") + INFO, block)
    return _BARE.sub(b" ", block) if block.startswith(b"NCCL ") or b"\nNCCL " in block else block


def strip_colors(line: bytes) -> bytes:
    """Remove color codes from a line, including codes whose escape character was lost."""
    return _LOST_COLOR.sub(b"", _COLOR.sub(b"", line))


INFO, WARN = b" NCCL INFO ", b" NCCL WARN "

_MOST_CACHED = 4096
_MOST_MESSAGES = 2**13
_LONGEST_HEAD = 512
_LONGEST_NAME = 60

_PLACE = rb"(?: (?:\w{1,80}\(\), )?[^ ]+:\d{1,9}(?: \([^()]*\))?| [\w:]{1,40} [^\n]{1,400}\)[^\n]{0,40}:\d{1,9})?$"
"""The source location in a warning. It follows the device, and the function name precedes it or follows in
parentheses.

C++ plugins print the whole signature of the function.
"""

_HOST = rb"([\w.-]{1,255}|<[^<>:]{1,255}>|\[[\w.-]{1,255}\])"
"""A host name, a placeholder, or a Kubernetes tag."""

_NAME_CHARACTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"
_LONGEST_HOST = 255
_BEHIND_HOST = re.compile(rb":(\d{1,10}):(\d{1,10}) \[-?\d{1,9}\]" + _PLACE)
_NO_NAME = re.compile(rb"(?:<[^<>:]{1,255}>|\[[\w.-]{1,255}\])$")
"""A placeholder instead of a host name."""

_HEADS = (
    re.compile(rb"(?:^|(?<= ))" + _HOST + rb":(\d{1,10})() \[-?\d{1,9}\]" + _PLACE),
    re.compile(rb"(?:^|(?<= ))():(\d{1,10}):(\d{1,10}) \[-?\d{1,9}\]" + _PLACE),
)
"""Patterns for host, process and thread in lines that lack the thread or the host."""

_NAMELESS_HEAD = re.compile(
    rb"(?:\(\w{1,60} (?:pid|rank)=[^()]{1,60}\) )?(?:\[[\d :T.+-]{8,40}\] )?(?:\[(-?\d{1,9})\])?" + _PLACE
)
"""A line without host and process starts with the device at most, after a timestamp or a tag from Ray."""

NAMELESS = "anonymous"
"""The host name that stands for lines without a host and a process."""

_ENDS = (
    rb"(?P<src>\d{1,7})(?:\[(?P<src_device>-?[0-9a-f]{1,12})\])? -> "
    rb"(?P<dst>\d{1,7})(?:\[(?P<dst_device>-?[0-9a-f]{1,12})\])?"
)
_CONNECTION = re.compile(
    rb"(?:" + _ENDS + rb"|(?P<rank>\d{1,7}))(?: \[(?P<end>send|receive)\])? +via (?P<via>.*?)"
    rb"(?: comm (?P<handle>0x[0-9a-f]{1,16}) nRanks (?P<size>\d{1,7}))?",
    re.S,
)
"""RCCL prints the communicator after the transport. Between nodes, NCCL 2.4 prints no devices in brackets."""

_HIDDEN_COMM = re.compile(rb" comm 0x\.{2,3} nRanks \d{1,7}$")
_CHANNEL = re.compile(rb"(?:Channel|CollNet|Coll|Ring) (\d{1,4})(?:/([01]))?")
_CUT_OFF = re.compile(r"P2P/(?:direct pointer|IPC|CUMEM|MNNVL)|SHM/direct|direct shared memory|NET/[^/]+/\d+/GDRDMA")
_COMMUNICATOR = re.compile(
    rb"comm (?P<handle>0x[0-9a-f]{1,16}) rank (?P<rank>\d{1,7}) n[Rr]anks (?P<size>\d{1,7})"
    rb"(?: nNodes (?P<nodes>\d{1,7}) localRanks \d{1,7} localRank (?P<local_rank>\d{1,7})(?: MNNVL \d)?)?"
    rb"(?: cudaDev -?\d{1,6})?(?: nvmlDev (?P<nvml>-?\d{1,6}))?(?: busId (?P<bus>[0-9a-f]{1,12}))?(?: used \d+ bytes)?"
    rb"(?: parent (?P<parent>0x[0-9a-f]{1,16})(?: (?:split|child)Count (?P<split>\d{1,9}))? color (?P<color>-?\d{1,10})"
    rb" key -?\d{1,10})?(?: commId (?P<id>0x[0-9a-f]{1,16}))?(?: ?- (?P<event>[A-Z][\w ]{1,40}))?"
)
_CLAIMED_RANKS = re.compile(rb"comm 0x[0-9a-f]{1,16} rank \d{1,30} n[Rr]anks (\d{1,30})\b")
_TUNING = re.compile(
    rb"(?:(?P<function>\w{1,40})(?: \[(?P<kind>[\w ]{1,30})\])?: )?(?P<size>\d{1,18}) Bytes -> "
    rb"(?:Algo (?P<algorithm>\w{1,30}) proto (?P<protocol>\w{1,30})(?: channel\{Lo\.\.Hi\}=\{(?P<low>\d{1,5})\.\."
    rb"(?P<high>\d{1,5})\}| time .*)|Kernel (?P<kernel>[\w-]{1,60}) nchannels (?P<channels>\d{1,5}) .*|cudaMemcpy.*"
    rb"|RMA proxy.*)"
)
_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
_PROTOCOLS = ("LL", "LL128", "SIMPLE")
"""Protocols by number. NCCL 2.20 to 2.23 print the number instead of the name."""

_WITHOUT_CHANNELS = {b"Symmetric": "SYMMETRIC", b"Copy Engine": "COPY_ENGINE", b"Hierarchical CE": "HIERARCHICAL_CE"}


class LineSource(NamedTuple):
    """The host, process and thread that wrote a line."""

    host: str
    pid: int
    tid: int


class Connection(NamedTuple):
    """A log line about a connection, written by one of its two ranks.

    Devices are NVML indices, or PCI bus ids up to NCCL 2.17. `handle` and `size` describe the communicator, and only
    RCCL prints them.
    """

    src: int
    dst: int
    received: bool
    transport: Transport
    device: str
    peer_device: str
    handle: bytes | None = None
    size: int | None = None

    @property
    def rank(self) -> int:
        """The rank that wrote the line."""
        return self.dst if self.received else self.src

    @property
    def peer(self) -> int:
        """The other rank of the connection."""
        return self.src if self.received else self.dst


class CommunicatorLine(NamedTuple):
    """A line that contains the address of a communicator (`handle`). Values that the line lacks are None."""

    handle: bytes
    rank: int
    size: int
    nodes: int | None
    local_rank: int | None
    nvml_index: int | None
    bus: int | None
    parent: bytes | None
    split: int | None
    color: int | None
    id: str | None
    event: str


def parse_head(head: bytes) -> LineSource | None:
    """Parse the host, process and thread from the text before ` NCCL INFO ` or ` NCCL WARN `.

    Lines without host and process are assigned to one anonymous process, with one thread per device.
    """
    end = head[-_LONGEST_HEAD:]
    if found := _BEHIND_HOST.search(end):
        before = end[: found.start()]
        # Cut off the name from the right. A regular expression would retry at every letter of a long word.
        name = before[len(before.rstrip(_NAME_CHARACTERS)) :][-_LONGEST_HOST:]
        placeholder = None if name else _NO_NAME.search(before)
        name = placeholder[0] if placeholder else name
        if name:
            return LineSource(name.decode("ascii", "replace").strip("<>[]"), int(found[1]), int(found[2]))
    for form in _HEADS:
        if found := form.search(end):
            host = found[1].decode("ascii", "replace").strip("<>[]") or NAMELESS
            return LineSource(host, int(found[2]), int(found[3] or found[2]))
    if found := _NAMELESS_HEAD.fullmatch(head):
        return LineSource(NAMELESS, 0, int(found[1] or -1))
    return None


@lru_cache(_MOST_CACHED)
def parse_channel(text: bytes) -> tuple[int, int] | None:
    """Parse 'Channel 03/1' into channel 3 and connection 1.

    None for any other text, including 'Channel 03/24' from a line about a ring.
    """
    found = _CHANNEL.fullmatch(text)
    if found is None or int(found[1]) >= MOST_CHANNELS:
        return None
    return int(found[1]), int(found[2] or 0)


@lru_cache(_MOST_MESSAGES)
def parse_connection(text: bytes, *, cut: bool = False) -> Connection | None:
    """Parse '0[0] -> 1[1] via P2P/CUMEM'. None if the text is garbled or truncated. `cut` means that it may be
    truncated.
    """
    found = _CONNECTION.fullmatch(_HIDDEN_COMM.sub(b"", text))
    if found is None or bool(found["rank"]) != (b"COLLNET/" in found["via"]):
        return None
    transport = _transport(found["via"], cut=cut)
    if transport is None:
        return None
    rank = found["rank"]
    src, dst = (int(rank), int(rank)) if rank else (int(found["src"]), int(found["dst"]))
    if max(src, dst) >= limits.MOST_LOG_RANKS:
        return None
    received = found["end"] == b"receive"
    devices = [(found[name] or b"").decode() for name in ("src_device", "dst_device")]
    return Connection(
        src,
        dst,
        received,
        transport,
        devices[received],
        devices[not received],
        found["handle"],
        _number(found["size"]),
    )


@lru_cache(_MOST_CACHED)
def _transport(via: bytes, *, cut: bool) -> Transport | None:
    """Parse a transport. A log collector's quotes or another line may follow it in the text."""
    text = via.decode("ascii", "replace").partition('\\n"')[0].rstrip()
    transport = parse_transport(text)
    if cut or " NCCL " in text:
        whole = _CUT_OFF.match(text)
        return parse_transport(whole[0]) if whole else None
    if transport.kind is not TransportKind.UNKNOWN:
        return transport
    if may_begin_transport(text) or not text.isprintable() or "\ufffd" in text:
        return None
    return Transport(text[:_LONGEST_NAME], TransportKind.UNKNOWN)


@lru_cache(_MOST_MESSAGES)
def parse_communicator(message: bytes) -> CommunicatorLine | None:
    """Parse a line about the start, the properties or the end of a communicator."""
    found = _COMMUNICATOR.search(message)
    if found is None:
        return None
    rank, size = int(found["rank"]), int(found["size"])
    if not rank < size <= limits.MOST_LOG_RANKS:
        return None
    return CommunicatorLine(
        handle=found["handle"],
        rank=rank,
        size=size,
        nodes=_number(found["nodes"]),
        local_rank=_number(found["local_rank"]),
        nvml_index=_number(found["nvml"]),
        bus=None if found["bus"] is None else int(found["bus"], 16),
        parent=found["parent"],
        split=_number(found["split"]),
        color=_number(found["color"]),
        id=None if found["id"] in (None, b"0x0") else found["id"].decode(),
        event=(found["event"] or b"").decode(),
    )


def parse_claimed_ranks(message: bytes) -> int | None:
    """Parse the number of ranks from a line about a communicator, even if the number is implausible."""
    found = _CLAIMED_RANKS.search(message)
    return None if found is None else int(found[1])


def _number(text: bytes | None) -> int | None:
    return None if text is None else int(text)


@lru_cache(_MOST_MESSAGES)
def parse_tuning(message: bytes) -> Tuning | None:
    """Parse 'AllReduce: 1024 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}' and other forms since NCCL 2.20.

    `function` is '' for NCCL 2.20 to 2.22, which do not print it.
    """
    found = _TUNING.match(message)
    if found is None:
        return None
    without_channels = _WITHOUT_CHANNELS.get(found["kind"])
    if (without_channels is None) == (found["algorithm"] is None):
        return None
    low, high, channels = found["low"], found["high"], found["channels"]
    return Tuning(
        function=(found["function"] or b"").decode(),
        size_bytes=int(found["size"]),
        algorithm=without_channels or _named(found["algorithm"], _ALGORITHMS),
        protocol=_named(found["protocol"], _PROTOCOLS) or (found["kernel"] or b"").decode() or None,
        channels=_number(channels) if low is None else int(high) - int(low) + 1,
    )


def _named(value: bytes | None, names: tuple[str, ...]) -> str | None:
    """Return the name for a value. If NCCL printed a number, look up its name."""
    if value is None or not value.isdigit():
        return None if value is None else value.decode()
    return names[int(value)] if int(value) < len(names) else None


def format_bus_id(number: int) -> str:
    """Format a bus id that NCCL prints as a number: 0x1a000 → '0000:1a:00.0'."""
    return f"{number >> 20:04x}:{number >> 12 & 0xFF:02x}:{number >> 4 & 0xFF:02x}.{number & 0xF:x}"


Pair = tuple[int, int]

_RING = re.compile(rb" NCCL INFO Ring \d{1,4} : (\d{1,7}) -> (\d{1,7}) -> (\d{1,7})$")
_TREES = re.compile(rb" NCCL INFO Trees((?: \[\d{1,4}\] -?\d+/-?\d+/-?\d+->\d+->-?\d+)+)")
_TREE = re.compile(rb"\[\d+\] (-?\d+)/(-?\d+)/(-?\d+)->(\d+)->(-?\d+)(?= |$)")
_LONGEST_LINE = 1000  # NCCL truncates lines at 1,023 characters, possibly within a number.


def ring_pairs(line: bytes) -> tuple[Pair, ...]:
    """Parse 'Ring 00 : 3 -> 0 -> 1' (from the GRAPH subsystem) into the pairs (3, 0) and (0, 1)."""
    found = _RING.search(line)
    if found is None:
        return ()
    before, rank, after = map(int, found.groups())
    return tuple(pair for pair in ((before, rank), (rank, after)) if pair[0] != pair[1])


def tree_pairs(line: bytes) -> tuple[Pair, ...]:
    """Parse 'Trees [0] 2/-1/-1->1->0 [1] …' (children->rank->parent per channel) into pairs, in both directions."""
    found = _TREES.search(line)
    if found is None:
        return ()
    trees = [tuple(map(int, groups)) for groups in _TREE.findall(found[1])]
    if len(line) >= _LONGEST_LINE:
        trees.pop()
    peers = {(rank, peer) for *children, rank, parent in trees for peer in (*children, parent) if peer >= 0}
    return tuple(sorted(peers | {(peer, rank) for rank, peer in peers}))

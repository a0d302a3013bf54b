"""Reads the matrices of `nvidia-smi topo -m` and `topo -p2p` from saved or pasted text, and from logs.

A matrix does not name its command, but its words show it. NV18, PIX and SYS are paths, and OK, GNS and NS are results
of `topo -p2p`. Other nvidia-smi output in the same text (the table, -L, -q, nvlink -s and -R) adds names, UUIDs,
NVLinks and the driver version. All other lines, legends and line prefixes are ignored.

Paths are the same in both directions. So a matrix of `topo -m` may lack the rows of NICs and the row of one GPU, and
its last row may be truncated. The missing cells are copied from the columns, and `Snapshot.completed` names these rows.

If a text lost its tabs, adjacent columns are joined. They are split where known words make this unambiguous: GPU0GPU1
is two devices, NV12PIX is two cells, and SYS0-15 is a cell and a CPU range. NV120-15 can only be NV12 and 0-15, because
20-15 is not a range.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import takewhile

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.model.facts import snapshot
from gpubench.model.terms.plain import from_plain
from gpubench.model.terms.units import plural
from gpubench.model.terms.verdict import Origin
from gpubench.readers import limits
from gpubench.readers.documents import remove_quotes

PATH_WORDS = r"NV\d{1,2}|PIX|PXB|PHB|NODE|SYS|SOC"
P2P_WORDS = r"OK|CNS|GNS|TNS|DR|NS|U"
SELF = "X"

_WORD = re.compile(rf"(?:{PATH_WORDS}|{P2P_WORDS}|{SELF})", re.ASCII)
_BEFORE_A_COLUMN = re.compile(
    r"(?<=[0-9])(?=(?:GPU|NIC)[0-9]|CPU Affinity|GPU NUMA|(?:mlx[0-9]_|bnxt_re|irdma|hfi1_|efa_|rocep|rdmap|ibp))"
    r"|(?<=[0-9y])(?=NUMA Affinity|GPU NUMA)"
)
_JOINED_GPUS = re.compile(r"(?<!\w)GPU[0-9]{1,4}(?:GPU|NIC)[0-9]\S{0,200}", re.ASCII)
_LONGEST_WORD = 400  # Longest word that is split, in characters. A row of 64 GPUs and 32 NICs has fewer
_PROCESSORS = re.compile(r"(\d{1,5})-(\d{1,5})(?:,\d{1,5}(?:-\d{1,5})?)*(?:N/A)*|(?:N/A)+", re.ASCII)
"""CPU ranges. A single CPU number does not match, because NV12 could then be NV1 and CPU 2."""


def header_apart(line: str) -> str:
    """Insert spaces between joined column names in a header line."""
    return _BEFORE_A_COLUMN.sub(" ", line)


def joined_in(line: str) -> str | None:
    """Return the first joined device names in a line, such as 'GPU0GPU1'. None if there are none."""
    found = _JOINED_GPUS.search(line)
    return found[0] if found else None


def _begins_with_cells(word: str) -> bool:
    """Return True if a word consists of a cell and more text, even if it cannot be split."""
    return re.match(rf"{_WORD.pattern}(?:{_WORD.pattern}|[0-9]|N/A)", word, re.ASCII) is not None


def cells_apart(words: Sequence[str]) -> list[str]:
    """Split words of a row that are several joined cells, or a cell joined with a column after the matrix."""
    return [part for word in words for part in _split_cells(word)]


def row_apart(words: Sequence[str], columns: Collection[str]) -> list[str]:
    """Split a row whose first word is a device name joined with cells."""
    for device in sorted(columns, key=len, reverse=True):
        cells = words[0].removeprefix(device) if words else ""
        if words and cells != words[0] and cells and _WORD.fullmatch(_split_cells(cells)[0]):
            return [device, *cells_apart([cells, *words[1:]])]
    return list(words)


def _split_cells(word: str) -> list[str]:
    if _WORD.fullmatch(word) or len(word) > _LONGEST_WORD:
        return [word]
    ways = [way for way in _ways(word) if len(way) > 1]
    return ways[0] if len(ways) == 1 else [word]


def _ways(word: str) -> Iterator[list[str]]:
    """Yield every way to split a word into cells and CPU ranges. The number after NV has one or two digits."""
    if not word:
        yield []
        return
    processors = _PROCESSORS.fullmatch(word)
    if processors is not None and (processors[1] is None or int(processors[1]) <= int(processors[2])):
        yield [word]
        return
    found = _WORD.match(word)
    ends = {found.end()} if found else set()
    if found and found[0].startswith("NV"):
        ends |= {3, 4} & set(range(3, found.end() + 1))
    for end in ends:
        for rest in _ways(word[end:]):
            yield [word[:end], *rest]


_GPU_LINE = re.compile(r"\bGPU (\d{1,4}): (\S.{0,100}?) \(UUID: (GPU-[0-9a-fA-F-]+)\)", re.ASCII)
_LINK_LINE = re.compile(
    r"\bLink (\d{1,2}): (?:(?P<rate>\d{1,6}(?:\.\d{1,6})?) GB/s|(?P<down><inactive>)|"
    r"Remote Device (?P<peer>[0-9a-fA-F:.]+): )",
    re.ASCII,
)
_TABLE_ROW = re.compile(
    r"\|\s+(\d{1,4})\s+(\S.{0,100}?)\s+(?:On|Off|N/A)\s*\|\s+([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])\s",
    re.ASCII,
)
_HIDDEN_BUS_ID = re.compile(r"f{4,8}:ff:ff\.[0-9a-f]")


def _gpus_in_lines(lines: Sequence[str]) -> dict[int, snapshot.GpuFacts]:
    gpus: dict[int, snapshot.GpuFacts] = {}
    links: dict[int, dict[int, snapshot.NvLink]] = {}
    current: int | None = None
    for line in lines:
        if found := _GPU_LINE.search(line):
            current = int(found[1])
            before = gpus.get(current) or snapshot.GpuFacts(index=current)
            if before.uuid not in (None, found[3]):
                # The text continues with another boot or machine, so the previous links belong to a different GPU.
                links.pop(current, None)
            gpus[current] = replace(before, name=found[2], uuid=found[3])
        elif current is not None and (found := _LINK_LINE.search(line)):
            held = links.setdefault(current, {})
            number = int(found[1])
            held[number] = _link(held.get(number) or snapshot.NvLink(number=number), found)
        elif found := _TABLE_ROW.search(line):
            index = int(found[1])
            before = gpus.get(index) or snapshot.GpuFacts(index=index)
            full_name = None if found[2].endswith("...") else found[2]
            gpus[index] = replace(before, bus_id=snapshot.normalize_bus_id(found[3]), name=before.name or full_name)
    own = {gpu.bus_id for gpu in gpus.values()} - {None}
    for index, held in links.items():
        facing = (
            replace(held[i], peer=snapshot.NvlinkPeer.GPU) if held[i].peer_bus_id in own else held[i]
            for i in sorted(held)
        )
        gpus[index] = replace(gpus[index], nvlinks=tuple(facing))
    return gpus


def _link(link: snapshot.NvLink, found: "re.Match[str]") -> snapshot.NvLink:
    if found["rate"]:
        return replace(link, active=True, raw_gb_s=float(found["rate"]))
    if found["down"]:
        return replace(link, active=False, raw_gb_s=None)
    peer = snapshot.normalize_bus_id(found["peer"])
    return replace(link, peer_bus_id=None if _HIDDEN_BUS_ID.fullmatch(peer) else peer)


_EXPECTED = "a complete matrix of nvidia-smi topo -m or topo -p2p, with a row for each device in its header"
_NEXT_STEP = "nvidia-smi topo -m > topo.txt writes a matrix that is not wrapped or cut"

_MOST_PREFIX_WORDS = 10  # More words than the prefixes of a launcher, a log collector and a clock have together
_DECORATION = re.compile(r"(?:\x1b|\^\[|␛)?\[[0-9;]*m|[\r\xa0\ufeff]")
"""Escape sequences. nvidia-smi underlines the header, and in copies the escape character is often missing."""

_PATH_WORD = re.compile(PATH_WORDS, re.ASCII)
_P2P_WORD = re.compile(P2P_WORDS)
_OLD_WORDS = {"SOC": "SYS"}  # Old drivers print SOC for a path between sockets
_GPU = re.compile(r"GPU(\d{1,4})", re.ASCII)
_NIC = re.compile(
    r"(?=[\w.-]{1,64}\Z)(?:NIC\d{1,4}|[A-Za-z]\w*_[\w.-]*\d\w*|(?:ib|roce|rdmap|hfi|eth|en|bond)\w*\d\w*)", re.ASCII
)
_KINDS = {
    ("rdmap", "efa"): snapshot.NicKind.EFA,
    ("roce", "bnxt_re", "irdma"): snapshot.NicKind.ROCE,
    ("eth", "en"): snapshot.NicKind.ETHERNET,
}
_AFTER_MATRIX = re.compile(r"CPU Affinity|NUMA Affinity|GPU NUMA ID")
_LEGEND = re.compile(r"\b(NIC\d{1,4}):\s+(\S+)\s*$", re.ASCII)
_COMMAND = re.compile(r"\btopo\s+(?:(-mp?)\b|--?p2p\w*[ =]([rwnap]{1,5})\b)", re.ASCII)
_FIELDS = {"-m": "path", "-mp": "pcie_path", "r": "read", "w": "write", "n": "nvlink", "a": "atomics", "p": "pci"}
_PATH_FIELDS = ("path", "pcie_path")
_P2P_FIELDS = ("read", "write", "nvlink", "atomics", "pci")

_VERSION = re.compile(r"\b(Driver|CUDA) Version\s*:\s*(\d[\d.]*)", re.ASCII)


def recognises(text: str) -> bool:
    """Return True if a text contains GPU names as nvidia-smi prints them."""
    return re.search(r"\bGPU ?\d|nvidia-smi|NVIDIA-SMI", text) is not None


def read(text: str, name: str) -> snapshot.Snapshot:
    """Read the node in the text of the file `name`. Its `host` stays empty, because nvidia-smi does not print it.

    The matrices of `topo -p2p r|w|n|a|p` look alike. If the command line is above a matrix, it decides. Other matrices
    are assigned in the order of nvidia-smi's help (`read`, `write`, `nvlink`), without those that a command line names.
    If a matrix is repeated, the last one counts. The same holds for the driver, and for the UUID and NVLinks of each
    GPU.

    Raises UsageError with the line if there is no matrix, or if a matrix is truncated or contradicts itself.
    """
    lines = [_DECORATION.sub(" ", line) if len(line) <= limits.LONGEST_LINE else "" for line in text.split("\n")]
    fields = _matrices_by_field(_matrices(lines, name))
    if not fields:
        raise _no_matrix(lines, text, name)
    nic_names = {found[1]: found[2] for line in lines if (found := _LEGEND.search(line))}
    devices = dict.fromkeys(device for matrix in fields.values() for device in matrix.columns)
    nics = [nic_names.get(device, device) for device in devices if not _GPU.fullmatch(device)]
    versions = {found[1]: found[2].rstrip(".") for line in lines for found in _VERSION.finditer(line)}
    return snapshot.Snapshot(
        host="",
        origin=Origin.RECORDED,
        source=f"nvidia-smi text {name}",
        driver=snapshot.DriverFacts(version=versions.get("Driver"), cuda=versions.get("CUDA")),
        gpus=_gpus(fields, _gpus_in_lines(lines)),
        nics=tuple(map(_nic, nics)),
        pairs=_pairs(fields, nic_names),
        completed=", ".join(dict.fromkeys(matrix.completed for matrix in fields.values() if matrix.completed)),
    )


def _no_matrix(lines: Sequence[str], text: str, name: str) -> UsageError:
    longest = max(text.split("\n"), key=len)
    if len(longest) > limits.LONGEST_LINE:
        number = text.count("\n", 0, text.index(longest)) + 1
        return UsageError(
            f"{name}, line {number}: {len(longest)} characters, but gpubench reads at most {limits.LONGEST_LINE}",
            expected=_EXPECTED,
            reason="it is not output of nvidia-smi, or the text lost its line ends",
            next_step=_NEXT_STEP,
        )
    for number, line in enumerate(lines, 1):
        if (joined := joined_in(line)) is not None:
            return UsageError(
                f"{name}, line {number}: columns run together: {joined[:80]!r}",
                expected=_EXPECTED,
                reason="the text lost its tabs, for example when it was pasted, so the ends of the names are unknown",
                next_step=_NEXT_STEP,
            )
    return UsageError(
        f"{name}, line {len(lines)}: the text has no matrix",
        expected=_EXPECTED,
        reason="it is the output of another nvidia-smi command, or nvidia-smi failed",
        next_step=_NEXT_STEP,
    )


class _Row(Struct, frozen=True):
    line: int
    cells: tuple[str, ...]
    after: tuple[str, ...]


class _Matrix(Struct):
    file: str
    line: int
    columns: tuple[str, ...]
    after: tuple[str, ...]
    commands: tuple[str, ...]
    rows: dict[str, _Row] = field(default_factory=dict)
    cut: tuple[int, str, list[str]] | None = None
    completed: str = ""

    @property
    def is_path(self) -> bool:
        return not any(_P2P_WORD.fullmatch(cell) for row in self.rows.values() for cell in row.cells)

    def add(self, number: int, device: str, words: Sequence[str]) -> None:
        """Add a row for a device. Raises UsageError if the row does not fit, except for the last row, which may be
        truncated.
        """
        if self.cut is not None:
            raise self._wrong_length(*self.cut)
        cells = tuple(takewhile(_is_cell, words))
        if len(cells) != len(self.columns):
            words = cells_apart(words)
            cells = tuple(takewhile(_is_cell, words))
        if len(cells) < len(self.columns) and len(words) <= len(cells) + 1:
            self.cut = number, device, list(words)
            return
        if len(cells) != len(self.columns):
            raise self._wrong_length(number, device, words)
        for column, cell in zip(self.columns, cells, strict=True):
            if (cell == SELF) != (column == device):
                raise self.wrong(
                    number, f"the row of {device} has {cell} under {column}, but X means the device itself"
                )
        if device in self.rows and self.rows[device].cells != cells:
            raise self.wrong(number, f"this row of {device} contradicts the one on line {self.rows[device].line}")
        self.rows[device] = _Row(number, cells, tuple(words[len(cells) :]))

    def _wrong_length(self, number: int, device: str, words: Sequence[str]) -> UsageError:
        cells = list(takewhile(_is_cell, words))
        odd = f", then {words[len(cells)]!r}" if len(words) > len(cells) else ""
        return self.wrong(
            number,
            f"the row of {device} has {plural(len(cells), 'cell')}{odd}, but the header on line {self.line} has "
            f"{plural(len(self.columns), 'device')}",
        )

    def complete(self) -> None:
        """Fill in missing rows of a path matrix, or its truncated last row, from the columns of the other rows."""
        missing = [device for device in self.columns if device not in self.rows]
        lost_gpus = [device for device in missing if _GPU.fullmatch(device)]
        if not self.rows or not self.is_path or len(lost_gpus) > 1 or (self.cut and missing[:1] != [self.cut[1]]):
            return
        added: dict[str, _Row] = {}
        for device in missing:
            place = self.columns.index(device)
            cells = [self.rows[other].cells[place] if other in self.rows else "" for other in self.columns]
            cells[place] = SELF
            if self.cut is not None and device == self.cut[1] and not _fill(cells, self.cut[2]):
                return
            added[device] = _Row(self.line, tuple(cells), ())
        self.rows |= added
        self.completed, self.cut = ", ".join(added), None

    def check(self) -> None:
        self.complete()
        if self.cut is not None:
            raise self._wrong_length(*self.cut)
        gpus = sum(_GPU.fullmatch(device) is not None for device in self.columns)
        if gpus > limits.MOST_GPUS or len(self.columns) - gpus > limits.MOST_NICS:
            raise self.wrong(
                self.line,
                f"the header names {gpus} GPUs and {len(self.columns) - gpus} other devices, but one node may have "
                f"at most {limits.MOST_GPUS} and {limits.MOST_NICS}",
            )
        missing = [device for device in self.columns if device not in self.rows]
        if missing:
            raise self.wrong(
                self.line,
                f"the header names {plural(len(self.columns), 'device')}, {self.columns[0]} to {self.columns[-1]}, "
                f"but there is no row of {', '.join(missing[:8])}",
            )
        for row in () if self.is_path else self.rows.values():
            for cell in filter(_PATH_WORD.fullmatch, row.cells):
                raise self.wrong(row.line, f"{cell} of topo -m is among the words of topo -p2p")

    def wrong(self, line: int, what: str) -> UsageError:
        return UsageError(
            f"{self.file}, line {line}: {what}",
            expected=_EXPECTED,
            reason="the text was cut off, wrapped by a terminal, or mixed with another process's output",
            next_step=_NEXT_STEP,
        )


def _fill(cells: list[str], words: Sequence[str]) -> bool:
    """Fill empty cells with the words of a truncated row, whose last word may be incomplete. Return False on a
    contradiction.
    """
    for place, word in enumerate(words):
        is_last = place == len(words) - 1
        if cells[place] and not (cells[place].startswith(word) if is_last else cells[place] == word):
            return False
        if not cells[place] and not is_last:
            cells[place] = word
    return True


def _is_cell(word: str) -> bool:
    return word == SELF or bool(_PATH_WORD.fullmatch(word) or _P2P_WORD.fullmatch(word))


def _bare(word: str) -> str:
    """Remove a launcher's prefix from a word, so that '[1,0]<stdout>:GPU0' becomes 'GPU0'."""
    return re.split(r"[:>|\]]", word)[-1]


def _matrices(lines: Sequence[str], name: str) -> list[_Matrix]:
    found: list[_Matrix] = []
    commands: tuple[str, ...] = ()
    current: _Matrix | None = None
    for number, line in enumerate(map(remove_quotes, lines), 1):
        words = line.split()
        named = tuple(command[1] or command[2] for command in _COMMAND.finditer(line))
        if named:
            commands, current = named, None
        elif current is not None and (row := _row(words, current.columns)):
            current.add(number, *row)
        elif header := _header(words) or _header(header_apart(line).split()):
            current = _Matrix(name, number, *header, commands)
            # Several commands in one line (`topo -m; nvidia-smi topo -p2p r`) print their matrices one after the other.
            commands = commands[1:]
            found.append(current)
        elif "Legend:" in line:
            current = None
    # The single word GPU0 is a header only if rows follow.
    found = [matrix for matrix in found if matrix.rows or len(matrix.columns) > 1 or matrix.after]
    for matrix in found:
        matrix.check()
    return found


def _header(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    start = next((i for i, word in enumerate(words) if _GPU.fullmatch(_bare(word))), None)
    if start is None:
        return None
    bare = [_bare(words[start]), *words[start + 1 :]]
    devices = tuple(takewhile(lambda word: _GPU.fullmatch(word) or _NIC.fullmatch(word), bare))
    rest = " ".join(bare[len(devices) :])
    if len(set(devices)) < len(devices) or (rest and not _AFTER_MATRIX.match(rest)):
        return None
    return devices, tuple(_AFTER_MATRIX.findall(rest))


def _row(words: Sequence[str], columns: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    start = next((i for i, word in enumerate(words[:_MOST_PREFIX_WORDS]) if _bare(word) in columns), None)
    if start is None:
        words, start = row_apart(words, columns), 0
        if not words or words[0] not in columns:
            return None
    device, behind = _bare(words[start]), words[start + 1 :]
    cut_off = not behind and len(columns) > 1
    return (device, behind) if cut_off or (behind and (_is_cell(behind[0]) or _begins_with_cells(behind[0]))) else None


def _matrices_by_field(matrices: Sequence[_Matrix]) -> dict[str, _Matrix]:
    fields: dict[str, _Matrix] = {}
    named = [(matrix, _named_fields(matrix)) for matrix in matrices]
    taken = {name for _, names in named for name in names}
    free = [name for name in _P2P_FIELDS if name not in taken]
    for matrix, names in named:
        if names:
            fields |= dict.fromkeys(names, matrix)
        elif matrix.is_path:
            fields["path"] = matrix
        elif free:
            fields[free.pop(0)] = matrix
    return fields


def _named_fields(matrix: _Matrix) -> tuple[str, ...]:
    """Return the snapshot fields for the command above a matrix. Empty if the command prints another kind of matrix."""
    command = matrix.commands[0] if matrix.commands else ""
    keys = [command] if command.startswith("-") else list(command)
    fields = tuple(_FIELDS[key] for key in keys)
    return fields if set(fields) <= set(_PATH_FIELDS if matrix.is_path else _P2P_FIELDS) else ()


def _pairs(fields: Mapping[str, _Matrix], nic_names: Mapping[str, str]) -> tuple[snapshot.PairFacts, ...]:
    pairs: dict[tuple[str, str], dict[str, str]] = {}
    for name, matrix in fields.items():
        for device in matrix.columns:
            for other, cell in zip(matrix.columns, matrix.rows[device].cells, strict=True):
                if other != device and cell:
                    source, destination = nic_names.get(device, device), nic_names.get(other, other)
                    words = pairs.setdefault((source, destination), {"source": source, "destination": destination})
                    words[name] = _OLD_WORDS.get(cell, cell)
    return tuple(from_plain(snapshot.PairFacts, words) for words in pairs.values())


def _gpus(fields: Mapping[str, _Matrix], known: Mapping[int, snapshot.GpuFacts]) -> tuple[snapshot.GpuFacts, ...]:
    gpus: dict[int, snapshot.GpuFacts] = {}
    for matrix in fields.values():
        for device, row in matrix.rows.items():
            if not (number := _GPU.fullmatch(device)):
                continue
            index = int(number[1])
            facts = gpus.get(index) or known.get(index) or snapshot.GpuFacts(index=index)
            # In the row of a GPU, these columns always have a value, but they are separated by more than a tab.
            after = dict(zip(matrix.after, row.after, strict=False)) if len(row.after) == len(matrix.after) else {}
            affinity, node = after.get("CPU Affinity", "N/A"), after.get("NUMA Affinity", "")
            if affinity != "N/A":
                facts = replace(facts, cpu_affinity=affinity)
            if re.fullmatch(r"\d{1,4}", node, re.ASCII):
                facts = replace(facts, place=snapshot.PciPlace(numa_node=int(node)))
            gpus[index] = facts
    return tuple(_add_reasons(gpus[index]) for index in sorted(gpus))


def _add_reasons(gpu: snapshot.GpuFacts) -> snapshot.GpuFacts:
    missing = {"nvlinks": "output of nvidia-smi nvlink -s", "bus_id": "table of nvidia-smi"}
    unknown = {name: f"the text has no {what}" for name, what in missing.items() if getattr(gpu, name) is None}
    return replace(gpu, unknown=unknown)


def _nic(name: str) -> snapshot.NicFacts:
    """Return a NIC with only its name and kind, because nvidia-smi prints nothing else about RDMA devices."""
    unknown = {"rate_gbit_s": "nvidia-smi topo does not show it"}
    kind = next((kind for beginnings, kind in _KINDS.items() if name.startswith(beginnings)), None)
    if kind is None:
        unknown["kind"] = "the text does not mention InfiniBand or RoCE"
    return snapshot.NicFacts(name=name, kind=kind or snapshot.NicKind.INFINIBAND, unknown=unknown)

"""Reads the text output of the OSU micro-benchmarks: collectives (osu_allreduce and others), osu_bw and osu_bibw.

Supported are MPI on CPU or device buffers, and NCCL or RCCL (osu_xccl_*), in versions 3 to 7. Latencies in µs are means
over ranks, and each operation is timed separately. Bandwidths of a pair are in MB/s (1e6 bytes). The number of ranks is
not in the output, but may be in a launcher's command line above it. The formats are in util/osu_util_mpi.c and in each
program.
"""

import re
from collections.abc import Callable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.model.results import result_file
from gpubench.model.results.report import PairRow, Verified
from gpubench.model.terms import operation
from gpubench.model.terms.verdict import Verdict
from gpubench.readers.documents import prefix_shape, split_by_tag, split_lines, strip_prefix
from gpubench.readers.transfers import damaged, name_end, text_result, transfer_row


class _Program(Struct, frozen=True):
    name: str
    factor: Callable[[int], float]
    a_block: bool = False
    reduces: bool = False
    rooted: bool = False


_COLLECTIVES: Mapping[str, _Program] = {
    "Allreduce": _Program("allreduce", operation.ring_allreduce_factor, reduces=True),
    "Reduce": _Program("reduce", operation.whole_factor, reduces=True, rooted=True),
    "Broadcast": _Program("broadcast", operation.whole_factor, rooted=True),
    "Reduce_scatter": _Program("reducescatter", operation.all_but_own_factor, reduces=True),
    "Reduce_scatter_block": _Program("reducescatter", operation.all_but_own_factor, reduces=True),
    "Allgather": _Program("allgather", operation.all_but_own_factor, a_block=True),
    "All-to-All Personalized Exchange": _Program("alltoall", operation.all_but_own_factor, a_block=True),
    "Gather": _Program("gather", operation.all_but_own_factor, a_block=True, rooted=True),
    "Scatter": _Program("scatter", operation.all_but_own_factor, a_block=True, rooted=True),
}
# The direction of pairs, by the name of OSU's test
_BANDWIDTHS = {"Bandwidth": None, "Bi-Directional Bandwidth": "both"}
_TYPES = {
    **{f"MPI_{name}": kind for name, kind in (("CHAR", "int8"), ("INT", "int32"), ("FLOAT", "float32"))},
    "MPI_DOUBLE": "float64",
}
_BACKENDS = {"MPI": "host", "NCCL": "nccl", "RCCL": "rccl"}
_HEADER = re.compile(
    r"# OSU (?P<library>MPI|NCCL|RCCL)(?P<device>-[A-Z]+)? (?P<name>\S.{0,60}?) (?:Latency )?Test"
    r"(?: v(?P<version>\S{1,20}))?\s*$"
)
_COLUMNS = re.compile(r"# Size\s+(?P<names>(?:Avg )?(?:Latency|Bandwidth) ?\(\S+.*)")
_DATATYPE = re.compile(r"# Datatype: (?P<name>MPI_\w{1,40})")
_BUFFERS = re.compile(
    r"# Send Buffer on (?P<send>HOST|DEVICE|MANAGED)\b.{0,80} Receive Buffer on (?P<receive>HOST|DEVICE|MANAGED)\b"
)
_COMMAND = re.compile(r"\bosu_(?:xccl_)?\w+(?P<options>(?:\s.*)?$)")
_RANKS = re.compile(r"\s(?:-np?|--np|--n|--ntasks)[ =]?(?P<ranks>\d{1,7})(?!\S)")
_ENDS = re.compile(r"\s(?P<send>[DHM]) (?P<receive>[DHM])\s*$")
_MEMORY = {"D": "device", "H": "host", "M": "managed"}
_WHOLE, _FIGURE, _CHECKED = re.compile(r"\d{1,18}"), re.compile(r"\d{1,15}\.\d\d"), re.compile(r"Pass|Fail")
_LIKE_A_CELL = re.compile(r"-?[\d.]+|[-+]?(?:nan|inf)|Pass|Fail", re.IGNORECASE)
_MB_PER_GB = 1e3


def recognises(text: str) -> bool:
    """Return True if a text contains the first line of an OSU program's output."""
    return re.search(r"# OSU (?:MPI|NCCL|RCCL)\S* ", text) is not None


def read(text: str, name: str, user_facts: result_file.UserFacts = result_file.NO_USER_FACTS) -> result_file.ResultFile:
    """Read the rows of all runs in a text. `user_facts` supplies facts that the runs lack.

    Raises UsageError if the text has no rows, or only runs of unsupported programs.
    """
    parser = _OsuText(user_facts.ranks)
    for number, line in enumerate(split_lines(text, name), 1):
        for tag, piece in split_by_tag(line):
            parser.line(piece, tag, number)
    rows, pairs = parser.latencies, parser.pairs
    if parser.others and not (rows or pairs):
        raise UsageError(
            f"{name} is of OSU's {', '.join(dict.fromkeys(parser.others))} test",
            expected=f"one of {', '.join((*_COLLECTIVES, *_BANDWIDTHS))}",
            reason="its values cannot be compared with those of other files",
            next_step="osu_allreduce or osu_bw instead",
        )
    failed = sum(row.wrong or 0 for row in rows) + sum(row.verdict == Verdict.FAIL for row in pairs)
    remarks = [f"left out: {', '.join(dict.fromkeys(parser.others))}"] if parser.others else []
    if any(row.ranks is None for row in rows):
        remarks.append("the number of ranks is unknown, so bus bandwidths are too")
    return text_result(
        name,
        "OSU",
        parser.left_out,
        "rows of an OSU micro-benchmark: size, latency or bandwidth, with a value for each column",
        circumstances=result_file.FileCircumstances(tool=parser.tool, wrong_elements=failed or None),
        remarks=remarks,
        latencies=rows,
        pairs=pairs,
    )


class _OsuRun(Struct):
    program: str = ""
    backend: str = "host"
    dtype: str | None = None
    columns: tuple[str, ...] = ()
    prefix: str = ""
    tag: str = ""
    ranks: int | None = None
    ends: tuple[str, str] | None = None


class _OsuText(Struct):
    users_ranks: int | None = None
    tool: str = "OSU"
    latencies: list[result_file.LatencyRow] = field(default_factory=list)
    pairs: list[PairRow] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    _run: _OsuRun = field(default_factory=_OsuRun)
    _ranks: int | None = None
    _ends: tuple[str, str] | None = None

    def line(self, text: str, tag: str, number: int) -> None:
        run = self._run
        if found := _HEADER.search(text):
            self._begin(found)
        elif found := _COLUMNS.search(text):
            run.columns = tuple(re.split(r"\s{2,}", found["names"].strip()))
            run.prefix, run.tag = prefix_shape(text[: found.start()]), tag
        elif found := _DATATYPE.search(text):
            run.dtype = _TYPES.get(found["name"], found["name"])  # Before or after the line of columns, by version
        elif found := _BUFFERS.search(text):
            run.ends = found["send"].lower(), found["receive"].lower()
        elif found := _COMMAND.search(text):
            ranks, ends = _RANKS.search(text[: found.start()]), _ENDS.search(found["options"])
            self._ranks = int(ranks["ranks"]) if ranks else None
            self._ends = (_MEMORY[ends["send"]], _MEMORY[ends["receive"]]) if ends else None
        elif run.columns and tag == run.tag:
            self._values(strip_prefix(text, run.prefix) or [], number)

    def _begin(self, found: re.Match[str]) -> None:
        backend = _BACKENDS[found["library"]]
        if backend == "host" and found["device"]:
            backend = "mpi"
        self._run = _OsuRun(found["name"], backend, ranks=self._ranks or self.users_ranks, ends=self._ends)
        self._ranks = self._ends = None
        if found["version"]:
            self.tool = f"OSU {found['version']}"
        if found["name"] not in (*_COLLECTIVES, *_BANDWIDTHS):
            self.others.append(found["name"])

    def _values(self, words: list[str], number: int) -> None:
        run = self._run
        is_row = bool(words) and bool(_WHOLE.fullmatch(words[0])) and all(map(_LIKE_A_CELL.fullmatch, words))
        kind = "Bandwidth" if run.program in _BANDWIDTHS else "Latency" if run.program in _COLLECTIVES else None
        if not is_row or kind is None or kind not in run.columns[0]:
            return
        cells = dict(zip(run.columns, words[1:], strict=False))
        fits = len(words) == 1 + len(run.columns) and all(_fits(name, cell) for name, cell in cells.items())
        size, value = int(words[0]), cells.get(run.columns[0], "")
        if not fits or not float(value) > 0:
            self.left_out.append(damaged(number, " ".join(words)))
        elif size > 0 and run.program in _BANDWIDTHS:
            self.pairs.append(_pair(run, size, float(value) / _MB_PER_GB, cells))
        elif size > 0:
            self.latencies.append(_latency(run, _COLLECTIVES[run.program], size, cells))


def _fits(column: str, cell: str) -> bool:
    kinds = {"Validation": _CHECKED, "Iterations": _WHOLE, "Transmit Size": _WHOLE}
    return kinds.get(column, _FIGURE).fullmatch(cell) is not None


def _latency(run: _OsuRun, program: _Program, size: int, cells: Mapping[str, str]) -> result_file.LatencyRow:
    time_us, ranks = float(cells[run.columns[0]]), run.ranks
    whole = size if not program.a_block else size * ranks if ranks else size
    busbw = None
    if ranks:
        busbw = operation.algbw_gb_s(whole, time_us / 1e6) * program.factor(ranks)
    checked = cells.get("Validation")
    notes = (
        "its type is OSU's default, because the output does not name it" if run.dtype is None else "",
        "size of one rank's block, because the number of ranks is unknown" if program.a_block and not ranks else "",
        "validation failed (OSU does not show the number of elements)" if checked == "Fail" else "",
    )
    fastest, slowest = (cells.get(f"{which} Latency(us)") for which in ("Min", "Max"))
    return result_file.LatencyRow(
        collective=program.name,
        backend=run.backend,
        ranks=ranks,
        size_bytes=whole,
        dtype=run.dtype or (operation.DataType.FLOAT32 if program.reduces else operation.DataType.INT8),
        op="sum" if program.reduces else None,
        root=0 if program.rooted else None,
        placement=operation.Placement.OUT_OF_PLACE,
        iterations=int(cells["Iterations"]) if "Iterations" in cells else None,
        time_us=time_us,
        time_us_fastest_rank=float(fastest) if fastest else None,
        time_us_slowest_rank=float(slowest) if slowest else None,
        busbw_gb_s=busbw,
        wrong=None if checked is None else int(checked == "Fail"),
        verified=Verified.NO if checked is None else Verified.LAST,
        note="; ".join(filter(None, notes)) or None,
    )


def _pair(run: _OsuRun, size: int, gb_s: float, cells: Mapping[str, str]) -> PairRow:
    checked = cells.get("Validation")
    failed = checked == "Fail"
    send, receive = (name_end(f"rank {rank}", run.ends[rank] if run.ends else None) for rank in range(2))
    row = transfer_row((send, receive), "mpi", size, gb_s, direction=_BANDWIDTHS[run.program])
    return replace(
        row,
        bandwidth_gb_s=None if failed else gb_s,
        verified=Verified.NO if checked is None else Verified.LAST,
        verdict=Verdict.FAIL if failed else None,
        note=f"validation failed at {gb_s:.4g} GB/s" if failed else None,
    )

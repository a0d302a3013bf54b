"""What other programs print between the lines of NCCL: launchers, frameworks, nccl-tests, the kernel."""

import re

from gpubench.readers.results.nccl_tests.names import ELEMENT_TYPES
from gpubench.readers.results.nccl_tests.table import HEADER, wrong_data_in

_LONGEST = 300

_TYPES = (
    *(b" float ", b" bfloat16 ", b" half ", b" double ", b" char ", b" int ", b"int8 ", b"int32 ", b"int64 "),
    *(b"e4m3 ", b"e5m2 "),
)
"""Of nccl-tests' rows of every type, which have no other word."""

_OF_TESTS = (b"nThread ", b"busbw", b"Out of bounds", b"bus bandwidth")
_OF_ERRORS = (
    *(b"NVIDIA ", b"Tesla ", b"GeForce ", b"Quadro ", b"NCCL", b"Watchdog", b"Test ", b"rror", b"Exception", b"xit"),
    *(b"tation fault", b"illed", b"borted", b"oom", b"Xid (", b"off the bus", b"terminate called", b"ignal"),
    *(b"noticed that", b"detected that", b"MPI_", b"lost communication", b"BAD TERMINATION", b"*** ", b"CANCELLED"),
    *(b"died", b"FAILED", b"Got completion", b"Primary job", b"(): ", b"double free", b"retry", b"Failed status"),
    *(b"Assertion ", b"WARN: Function: ", b"Link down", b"Link is Down", b"DPC: "),
)
_OF_TRACEBACKS = (b"Traceback (most recent", b"Exception ignored in")
WORDS_OF_OTHERS = (*_OF_ERRORS, *_OF_TESTS, *_OF_TRACEBACKS, *_TYPES)
"""Words of which each line of another program has one that may say something here; each costs a pass over the text."""

says_something = re.compile(b"|".join(map(re.escape, WORDS_OF_OTHERS))).search
"""Finds one of these words in a line, in a quarter of the time that it takes to look for each."""

_says_errors = re.compile(b"|".join(map(re.escape, _OF_ERRORS))).search
_says_tests = re.compile(b"|".join(map(re.escape, _OF_TESTS))).search

_ROW = re.compile(rb"\d\s+\d{1,18}\s+(?:" + "|".join(sorted(ELEMENT_TYPES, key=len, reverse=True)).encode() + rb")\s")
"""The beginning of a row, told quickly."""

_DIAGNOSTIC = re.compile(rb"(?:([\w.-]{1,255}:\d{1,10}) )?(NCCL DIAG \[INFO\] .*)", re.ASCII)
_MODELS = (
    re.compile(rb"(?:^|[#\s])Rank\s+\d+ .{1,300}\bdevice\s+\d+ \[[\w:.]+\] ([\w][\w .+-]{3,80})"),
    re.compile(rb"\bGPU \d+: ((?:NVIDIA|Tesla|GeForce|Quadro) [\w .+-]{3,80}?)(?: \(|\s*$)"),
)
"""GPUs in nccl-tests' header, and as nvidia-smi -L lists them."""

_EXCEPTION = rb"(?:^|[\s:>\]])(?:[\w.]+\.)?\w*(?:Error|Exception)\w*: "
_says_exception = re.compile(_EXCEPTION).search
_PROGRAM_ERROR = re.compile(
    _EXCEPTION + rb".*|\bTest (?:NCCL |CUDA )?failure [\w./-]+:\d+.*|Failed: (?:NCCL|Cuda) error .*"
    rb"|ProcessGroupNCCL.*(?:caught collective operation timeout|Terminating the process|watchdog got stuck"
    rb"|taking the entire process down|terminated with exception|detected by watchdog).*"
    rb"|Some NCCL operations have failed or timed out.*|\bNCCL (?:[Ee]rror|[Ff]ailure)(?: \d+)?: .*"
    rb"|\bNCCL: (?:unhandled|internal|invalid|remote) .*|NET/\w+ ?: ?Got completion .*(?:error|status).*"
    rb"|WARN: Function: \w+ Line: \d+: NET/OFI .*"
    rb"|\*\*\* SIG[A-Z]+ received.*|Signal: (?:Segmentation fault|Aborted|Bus error|Killed).*|Fatal error in P?MPI_.*"
    rb"|An error occurred in MPI_.*|MPI_ERRORS_ARE_FATAL.*|Caught signal \d+ \(.*|Assertion [`'].*' failed.*"
    rb"|^(?:free|malloc|realloc)\(\): .*|double free or corruption.*|Transport retry count\w* exceeded.*"
    rb"|\bFailed status \d+: wr_id .*"
    rb"|Watchdog caught collective operation timeout.*|terminate called after throwing.*|Fatal Python error: .*"
    rb"|ChildFailedError.*|\(exitcode: -?[1-9]\d*\) .*local_rank.*|Received Signals?\.?\w* death signal.*"
    rb"|noticed that process rank \d+ .*|detected that one or more processes exited with non-zero status.*"
    rb"|MPI_ABORT was invoked.*|has lost communication with a remote daemon.*|BAD TERMINATION.*|\*\*\* Process received"
    rb"|error: .*task \d+.*: (?:Killed|Aborted|Terminated|Segmentation fault|Bus error|Out Of Memory"
    rb"|Exited with exit code [1-9]).*|CANCELLED AT .*|Detected \d+ oom[_-]kill.*|Job step aborted.*"
    rb"|command terminated with exit code [1-9].*|OOMKilled|[Ww]orker (?:proc )?.*died.*|\bproc \S+ died.*"
    rb"|Primary job +terminated normally, but .*"
    rb"|^(?:\S+: line \d+: +\d+ )?(?:Killed|Aborted|Segmentation fault|Bus error)(?: +\(core dumped\))?(?: .*)?$"
    rb"|NVRM: Xid .*|NVRM: .*fallen off the bus.*|\bSXid \(PCI.*"
    rb"|\bPCIe Bus Error: severity=.*|\bAER: (?:Multiple )?(?:Unc|C)orrect\w+ .*error .*|\bDPC: containment event.*"
    rb"|\bmlx5_core .*(?:Link down|Port module event\[error\].*)|\b[Nn]\w* Link is Down.*"
    rb"|\bCUDA (?:driver )?error(?: \d+)?: (?!no error).*|Out of bounds values : [1-9]\d* FAILED.*"
)
"""What nccl-tests, PyTorch and launchers print where a call returned an error, or did not return, or a rank died."""


_BEGIN_OF_TESTS = (re.compile(r"\bnThread \d+ nGpus \d+ minBytes "), HEADER)
_END_OF_TESTS = (re.compile(r"Out of bounds values :"), re.compile(r"Avg bus bandwidth +:"))


class TestRuns:
    """Counts runs of nccl-tests that began, by their two headers, and that ended, by their two last lines."""

    def __init__(self) -> None:
        self._begun, self._ended = [0, 0], [0, 0]
        self._most_at_once = 0

    def add(self, line: bytes) -> None:
        """Count a line."""
        if not _says_tests(line):
            return
        text = line.decode("utf-8", "replace")
        for counts, forms in ((self._begun, _BEGIN_OF_TESTS), (self._ended, _END_OF_TESTS)):
            for place, form in enumerate(forms):
                counts[place] += form.search(text) is not None
        self._most_at_once = max(self._most_at_once, self.unfinished)

    @property
    def unfinished(self) -> int:
        """Those that did not end in the text."""
        return max(0, max(self._begun) - max(self._ended))

    def complaint(self) -> tuple[str, int] | None:
        """What is wrong with them, and how often; of several at once only where all of them ended."""
        if self.unfinished:
            return "no line of Avg bus bandwidth behind the header of a run", self.unfinished
        if self._most_at_once > 1:
            return f"{self._most_at_once} runs of nccl-tests at once, each by itself", 1
        return None


class Tracebacks:
    """Counts what Python printed of exceptions; not those that a destructor raised, which end nothing."""

    def __init__(self) -> None:
        self._count = self._ignored = 0
        self._exceptions = False

    def add(self, line: bytes) -> None:
        """Count a line."""
        self._ignored += b"Exception ignored in" in line
        if b"Traceback (most recent" in line:
            # Python prints it below the line that says so.
            follows = self._ignored > 0
            self._ignored -= follows
            self._count += not follows
        self._exceptions = self._exceptions or _says_exception(line) is not None

    def complaint(self) -> tuple[str, int] | None:
        """What is wrong where none of them says its exception, and how many there are."""
        if self._exceptions or not self._count:
            return None
        return "a Traceback of Python without its exception", self._count


def parse_program_error(line: bytes) -> str | None:
    """What a program that calls NCCL reports of a call that failed, or of data that arrived wrong."""
    if _ROW.search(line) and (row := wrong_data_in(line.decode("utf-8", "replace").rstrip())):
        return f"wrong data in a row of nccl-tests: {row[:_LONGEST]}"
    found = _PROGRAM_ERROR.search(line) if _says_errors(line) else None
    return None if found is None else found[0][:_LONGEST].decode("utf-8", "replace").strip(" :>]\t")


def parse_diagnostic(line: bytes) -> tuple[str, str] | None:
    """What NCCL 2.31 and later report of their own checks where one did not go well: the process, and the text.

    `host:pid NCCL DIAG [INFO] check: …`; `[OK]` says nothing that is worth keeping.
    """
    found = _DIAGNOSTIC.search(line) if b"NCCL DIAG" in line else None
    if found is None:
        return None
    return (found[1] or b"").decode("ascii", "replace"), found[2][:_LONGEST].decode("utf-8", "replace").strip()


def parse_gpu_model(line: bytes) -> tuple[str, bool] | None:
    """The model of a GPU in a line of another program, and whether it is a rank's, as in nccl-tests' header."""
    for form in _MODELS if b"GPU " in line or b"Rank " in line else ():
        if found := form.search(line):
            return found[1].decode("ascii", "replace").strip(), form is _MODELS[0]
    return None

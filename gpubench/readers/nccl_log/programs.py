"""What other programs print between the lines of NCCL: launchers, frameworks, nccl-tests, the kernel."""

import re

from gpubench.readers.results.nccl_tests.names import ELEMENT_TYPES
from gpubench.readers.results.nccl_tests.table import HEADER, wrong_data_in

_LONGEST = 300

WORDS_OF_OTHERS = (
    *(f" {each} ".encode() for each in ELEMENT_TYPES),
    *(b"nThread ", b" type ", b"Out of bounds", b"Avg bus", b"Last error:", b"WARN: Function: "),
    *(b"An error occurred", b"MPI_ERRORS", b"Caught signal", b"Assertion ", b"free(): ", b"lloc(): "),
    *(b"double free", b"Transport retry", b"Failed status"),
    *(b"NVIDIA ", b"Tesla ", b"GeForce ", b"Quadro ", b"NCCL", b"Watchdog caught", b"Test ", b"Error", b"Exception"),
    *(
        b"xited ",
        b"exitcode",
        b"exit code",
        b"fault",
        b"Bus error",
        b"Killed",
        b"Aborted",
        b"error: ",
        b"rror ",
        b" Xid ",
        b" SXid ",
        b"off the bus",
    ),
    *(b"terminate called", b"death signal", b"noticed that", b"detected that", b"MPI_ABORT", b"lost communication"),
    *(
        b"Got completion",
        b"*** SIG",
        b"Signal: ",
        b"Primary job",
        b"BAD TERMINATION",
        b"*** Process",
        b"CANCELLED",
        b"oom_kill",
        b"oom-kill",
        b"step aborted",
        b"died",
        b"FAILED",
    ),
)
"""Words of which each line of another program has one that may say something here."""

_DIAGNOSTIC = re.compile(rb"(?:([\w.-]{1,255}:\d{1,10}) )?(NCCL DIAG \[INFO\] .*)", re.ASCII)
_MODELS = (
    re.compile(rb"(?:^|[#\s])Rank\s+\d+ .{1,300}\bdevice\s+\d+ \[[\w:.]+\] ([\w][\w .+-]{3,80})"),
    re.compile(rb"\bGPU \d+: ((?:NVIDIA|Tesla|GeForce|Quadro) [\w .+-]{3,80}?)(?: \(|\s*$)"),
)
"""GPUs in nccl-tests' header, and as nvidia-smi -L lists them."""

_EXCEPTION = rb"(?:^|[\s:>\]])(?:[\w.]+\.)?\w*(?:Error|Exception)\w*: "
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


def parse_program_error(line: bytes) -> str | None:
    """What a program that calls NCCL reports of a call that failed, or of data that arrived wrong."""
    if row := wrong_data_in(line.decode("utf-8", "replace").rstrip()):
        return f"wrong data in a row of nccl-tests: {row[:_LONGEST]}"
    found = _PROGRAM_ERROR.search(line)
    return None if found is None else found[0][:_LONGEST].decode("utf-8", "replace").strip(" :>]\t")


def parse_diagnostic(line: bytes) -> tuple[str, str] | None:
    """What NCCL 2.31 and later report of their own checks where one did not go well: the process, and the text.

    `host:pid NCCL DIAG [INFO] check: …`; `[OK]` says nothing that is worth keeping.
    """
    found = _DIAGNOSTIC.search(line)
    if found is None:
        return None
    return (found[1] or b"").decode("ascii", "replace"), found[2][:_LONGEST].decode("utf-8", "replace").strip()


def parse_gpu_model(line: bytes) -> tuple[str, bool] | None:
    """The model of a GPU in a line of another program, and whether it is a rank's, as in nccl-tests' header."""
    for form in _MODELS:
        if found := form.search(line):
            return found[1].decode("ascii", "replace").strip(), form is _MODELS[0]
    return None

"""Parse what launchers, frameworks, the kernel and nccl-tests print when a job ends or fails."""

import re

from gpubench.readers.pasted import is_sentence
from gpubench.readers.results.nccl_tests.table import ELEMENT_TYPES
from gpubench.readers.results.nccl_tests.text import HEADER, wrong_data_in

_LONGEST = 300

_TYPES = (
    *(b" float ", b" bfloat16 ", b" half ", b" double ", b" char ", b" int ", b"int8 ", b"int32 ", b"int64 "),
    *(b"e4m3 ", b"e5m2 "),
)
"""Element types. Rows of nccl-tests contain no other words."""

_TEST_WORDS = (b"nThread ", b"busbw", b"Out of bounds", b"bus bandwidth")
_ERROR_WORDS = (
    *(b"NVIDIA ", b"Tesla ", b"GeForce ", b"Quadro ", b"NCCL", b"Watchdog", b"Test ", b"rror", b"xception", b"xit"),
    *(b"tation fault", b"illed", b"borted", b"oom", b"Xid (", b"off the bus", b"terminate called", b"ignal"),
    *(b"noticed that", b"detected that", b"MPI_", b"lost communication", b"BAD TERMINATION", b"*** ", b"CANCELLED"),
    *(b"died", b"FAILED", b"Got completion", b"Primary job", b"(): ", b"double free", b"retry", b"Failed status"),
    *(b"Assertion ", b"WARN: Function: ", b"Link down", b"Link is Down", b"DPC: "),
    *(
        b"EXIT",
        b"ERROR",
        b"KILLED",
        b"erminat",
        b"sigquit",
        b"SIGQUIT",
        b"unable to ",
        b"ailed",
        b"dump signal",
        b"victed",
    ),
    *(b"HW Excep", b"access fault", b"HSA_STATUS", b" dead", b"crashed", b"illing", b"TERM_", b"low on re"),
    *(b"CRITICAL", b"FATAL", b"xternal/xla", b"xla/", b"imeout", b"on-zero status", b"NVSHMEM", b"nvshmem", b"DeepEP"),
    *(b"stack smashing", b"munmap_chunk", b"corrupted ", b"(core dumped)", b"Parent process exited", b"CUDA_ERROR_"),
    *(
        b"symbol lookup",
        b"NIXL_ERR_",
        b"memory broadcast",
        b"Link DOWN",
        b"Cable unplugged",
        b"raised from ",
        b"WorkNCCL::",
        b"ink is down",
    ),
    b"Default process group",
    *(b"DeadlineExceeded", b"BackoffLimit", b"not enough slots", b"Node failure", b"MPI_Abort", b"Abort(", b"abort"),
    *(
        b"assert (",
        b"atchdog timeout",
        b"eartbeat",
        b"imed out",
        b"nexpected",
        b"SIG",
        b"CrashLoop",
        b"amdgpu: ",
        b"segfault",
        b"general protection",
    ),
)
_TRACEBACK_WORDS = (
    b"Traceback (most recent",
    b"Exception ignored in",
    b'distributed_c10d.py", line',
    b"failed collective",
)
WORDS_OF_OTHERS = (*_ERROR_WORDS, *_TEST_WORDS, *_TRACEBACK_WORDS, *_TYPES, b"lacks GPU P2P")
"""Words that identify relevant lines of other programs. Each word costs one pass over the text."""

says_something = re.compile(b"|".join(map(re.escape, WORDS_OF_OTHERS))).search
"""One search for all words is four times as fast as one search per word."""

_says_errors = re.compile(b"|".join(map(re.escape, _ERROR_WORDS))).search
_says_tests = re.compile(b"|".join(map(re.escape, _TEST_WORDS))).search

_ROW = re.compile(rb"\d\s+\d{1,18}\s+(?:" + "|".join(sorted(ELEMENT_TYPES, key=len, reverse=True)).encode() + rb")\s")
"""The start of a row of nccl-tests, for a fast check."""

_DIAGNOSTIC = re.compile(rb"(?:([\w.-]{1,255}:\d{1,10}) )?(NCCL DIAG \[INFO\] .*)", re.ASCII)
_MODELS = (
    re.compile(rb"(?:^|[#\s])Rank\s+\d+ .{1,300}\bdevice\s+\d+ \[[\w:.]+\] ([\w][\w .+-]{3,80})"),
    re.compile(rb"\bGPU \d+: ((?:NVIDIA|Tesla|GeForce|Quadro) [\w .+-]{3,80}?)(?: \(|\s*$)"),
)
"""GPU models in the header of nccl-tests, and in the output of nvidia-smi -L."""

_EXCEPTION = rb"(?:^|[\s:>\]])(?:[\w.]+\.)?\w*(?:Error|Exception)\w*: "
_says_exception = re.compile(_EXCEPTION).search
_PROGRAM_ERROR = re.compile(
    _EXCEPTION + rb".*|\bTest (?:NCCL |CUDA )?failure [\w./-]+:\d+.*|Failed: (?:NCCL|Cuda|CUDA|Assertion) error .*"
    rb"|\bNCCL operation \S.* failed: .*|\bExecution of replica \d+ failed: .*"
    rb"|Exception raised from \w+ at \S*ProcessGroupNCCL.*|frame #\d+: .*WorkNCCL::(?:checkTimeout|handleException).*"
    rb"|\bDeepEP (?:error|timeout)\b.*|\bDeepEP (?:\w+ ){1,6}timeout\b.*channel.*|"
    rb"\bnvshmem\w*\b(?!.*init failed for transport).*failed.*"
    rb"|\bUCX +DIAG .* will not be handled since no error.*|Unexpected UCX error: .*|\bError: ucx send failed.*"
    rb"|\bnon-?zero status: -?[1-9]\d*.*|aborting due to error in nvshmem.*|NVSHMEM API called before .*"
    rb"|\bNVSHMEM (?:ERROR|FATAL) .*|\bUCX +(?:ERROR|FATAL) .*|\bNIXL_ERR_\w+.*|\[TensorRT-LLM\]\[ERROR\] .*"
    rb"|\b(?:mlx\d|bnxt_re|irdma)_?\w*:? Port:? \d+:? Link DOWN.*|\bib\w*\d\w*: [Ll]ink (?:is )?[Dd]own.*"
    rb"|\bmlx\d_core .*Cable unplugged.*|No available shared memory broadcast block .*"
    rb"|ProcessGroupNCCL.*(?:caught collective operation timeout|Terminating the process|watchdog got stuck"
    rb"|taking the entire process down|terminated with exception|detected by watchdog).*"
    rb"|Some NCCL operations have failed or timed out.*|\bNCCL (?:[Ee]rror|[Ff]ailure)(?: \d+| in| detected)?: (?!\{).*"
    rb"|\bNCCL: (?:unhandled|internal|invalid|remote) .*|NET/\w+ ?: ?Got completion .*(?:error|status).*"
    rb"|WARN: Function: \w+ Line: \d+: NET/OFI .*"
    rb"|\*\*\* SIG[A-Z]+ received.*|Signal: (?:Segmentation fault|Aborted|Bus error|Killed).*|Fatal error in P?MPI_.*"
    rb"|An error occurred in MPI_.*|MPI_ERRORS_ARE_FATAL.*|Caught signal \d+ \(.*|Assertion [`'].*' failed.*"
    rb"|^(?:free|malloc|realloc)\(\): .*|double free or corruption.*|Transport retry count\w* exceeded.*"
    rb"|\bFailed status \d+: wr_id .*"
    rb"|Watchdog caught collective operation timeout.*|terminate called after throwing.*|Fatal Python error: .*"
    rb"|ChildFailedError.*|\(exitcode: -?[1-9]\d*\) .*local_rank.*|Received Signals?\.?\w* death signal.*"
    rb"|munmap_chunk\(\): .*|\*\*\* stack smashing detected .*|corrupted (?:size vs\. prev_size|double-linked list).*"
    rb"|(?:Floating point exception|Illegal instruction|Trace/breakpoint trap|Bad system call)(?: \(core|$).*"
    rb"|symbol lookup error: .*"
    rb"|Default process group has not been initialized.*"
    rb"|MPI_ABORT was invoked.*|\*\*\* Process received"
    rb"|^(?:\S+: line \d+: +\d+ )?(?:Killed|Aborted|Segmentation fault|Bus error)(?: (?! *\w+: *\d).*)?$"
    rb"|NVRM: Xid .*|NVRM: .*fallen off the bus.*|\bSXid \(PCI.*"
    rb"|\bPCIe Bus Error: severity=.*|\bAER: (?:Multiple )?(?:Unc|C)orrect\w+ .*error .*|\bDPC: containment event.*"
    rb"|\bmlx5_core .*(?:Link down|Port module event\[error\].*)|\b[Nn]\w* Link is Down.*"
    rb"|\bCUDA (?:driver )?error(?: \d+)?: (?!no error).*|Out of bounds values : [1-9]\d* FAILED.*"
)
"""Messages from nccl-tests, PyTorch and the kernel about calls that failed or hang."""

_IN_SOURCE = re.compile(
    rb"(?<=NCCL error) in: \S+(?=, )|^Execution of replica \d+ failed: .*?(?=NCCL operation)"
    rb"| \(run with NCCL_DEBUG=\w+ for details\)"
)
"""The source location that PyTorch and XLA print before NCCL's error."""

_PROCESS = (
    rb"\b(?:ranks?|tasks?|proc(?:ess)?(?:es)?|(?:sub|child )process(?:es)?|workers?|workerproc|actors?|child(?:ren)?"
    rb"|pods?|containers?|jobs?|steps?|executors?|engine\w*|schedulers?|applications?|programs?|raylet|daemons?|nodes?)\b"
)
_NOT_ZERO = rb"(?:-?0*[1-9]\d*|0x0*[1-9a-f]|<?\w*SIG[A-Z]|non-?zero)"
_TOLD = (
    _PROCESS + rb".{0,160}?\b(?:died\b|crashed\b|killed (?:by\b|due to\b|\()|\d+\]? aborted\b|dumped core"
    rb"|failed to start\b|(?:launch|initiali[sz]ation|startup|group) failed\b"
    rb"|(?:is|are|was|were|been|being|got|gets)(?: \w+)? (?:killed|dead|evicted)\b"
    rb"|terminated (?:abruptly|abnormally|unexpectedly|badly)"
    rb"|exit(?:ed|ing) (?:abnormally|unexpectedly|early|improperly))",
    rb"\b(?:(?:exit|return)[ _-]?(?:code|status)|exit[ _-]?(?:value|signal))s?(?: code)?(?: (?:is|was|of))?[ :=(]{0,12}"
    + _NOT_ZERO,
    rb"\bexit(?:s|ed|ing)? (?:with|on|due to|by) (?:\w+ ){0,2}?(?:code|status|signal)\w*[ :=(]{0,3}" + _NOT_ZERO,
    rb"\b(?:died|terminated|killed|aborted) (?:with|from|by|on) (?:\w+ )?(?:code|signal|status|<Signals)s?[ :.=(]{0,3}"
    + _NOT_ZERO,
    rb"\b(?:with|returned) (?:a )?non-?zero (?:exit )?(?:status|code)",
    rb"\bexit signals?:? [A-Z][a-z]|\bexited \(" + _NOT_ZERO,
    rb"\b(?:received|got|caught)(?: signal)? SIG(?:SEGV|ABRT|BUS|FPE|ILL|KILL|TERM|QUIT)\b|\bSIG[A-Z]+ \(@0x",
)
"""Messages from any program that a process died, was killed, or exited with a code other than 0."""

_OF_LAUNCHERS = (
    rb"\btasks? [\d,-]+(?: [^:]{1,60})?: (?:Killed|Aborted|Terminated|Segmentation fault|Bus error|Out Of Memory)",
    rb"CANCELLED AT |Detected [1-9]\d* oom[_-]kill|step aborted|Node failure on |exceeded (?:\w+ )?memory limit",
    rb"waiting for job step|launch timed out|A process or daemon was unable to|\bHYD\w+ \(.*\): .*(?:error|fail|badly)",
    rb"First task exited \d+s ago|(?:Terminating|Force Terminated) (?:StepId|job)|job killed",
    rb"task exit notification .*status=0x0*[1-9a-f]|\bassert \([^)]{1,60}\) failed",
    rb"TERM_(?:MEM|RUN|CPU|SWAP)LIMIT|noticed that process rank \d|detected that one or more processes",
    rb"Primary job +terminated normally, but |has lost communication with a remote daemon|BAD TERMINATION",
    rb"TERMINATED WITH THE EXIT STRING|KILLED BY SIGNAL|has unexpectedly failed|not enough slots available",
    rb"unable to (?:launch the specified|find the specified exec|reliably start one or more)",
    rb"application called MPI_Abort|\bAbort\(\d+\) on node|abort(?:ing)? job\b|initiated application termination",
    rb"sending process \d+ closing signal|terminating process \d+ via signal",
    rb"signal \d+ \(SIG\w+\) received by PID|Killing subprocess \d",
    rb"forcefully terminating|terminating remaining workers|job\.exception type=exec",
    rb"\bmpi\w+ has exited due to process",
)
_OF_FRAMEWORKS = (
    rb"The actor (?:is dead|died) because",
    rb"received sigquit|sigquit received|EngineCore (?:failed|encountered)|Engine core initialization failed",
    rb"EngineDeadError|Scheduler hit an exception|JAX distributed service detected fatal",
    rb"Terminating process because the|received a dump signal due to|Timeout at NCCL work",
    rb"\bwatchdog timeout \(|marked dead\b|(?:missing|missed|stopped sending|too many) (?:\w+ )?heartbeats",
    rb"(?-i:\bCRITICAL\b[ :\]]|(?:^|[\s\[])FATAL[\]: ]|(?:^|[\s\]])F\d{4} \d\d:\d\d:\d\d|: F (?:external|xla)/)",
    rb"LLM\w* (?:output_handler )?(?:has )?(?:failed|errored|died)|LLM\w* is (?:already )?dead",
    rb"Parent process exited|Dumping input data for V1 LLM engine",
    rb"Termination timeout for .* exceeded|Exiting to ensure a consistent program state|Watchdog: .*timeout",
    rb"CUDA_ERROR_(?:ILLEGAL_ADDRESS|LAUNCH_FAILED|LAUNCH_TIMEOUT|ECC_UNCORRECTABLE|MISALIGNED_ADDRESS|ASSERT)",
    rb"\bheartbeat time-?out|polled an error from (?:the )?coordination|termination is unexpected",
)
_OF_MACHINES = (
    rb"OOMKilled|(?:reason|status)\W{1,40}Evicted|(?-i:\bEvicted) +(?:(?:\d+ +)?\d+[smhd]|the node|kubelet)",
    rb"was low on resource|CrashLoopBackOff|\b\d+/\d+ +(?:Error|Failed|Unknown|NodeLost|\w+Error)\b",
    rb"BackoffLimitExceeded|DeadlineExceeded\b.*\bjob|job\b.*\bDeadlineExceeded|Killed process \d|oom-kill:",
    rb"HW Exception by GPU|Memory access fault by GPU|HSA_STATUS_ERROR|amdgpu: (?:GPU reset begin|ring \w+ timeout)",
    rb"amdgpu: .*page fault|\*\*\* Aborted at \d|\w\[\d+\]:? (?:segfault at |general protection fault)",
    rb"process exited, code=(?!exited, status=0)",
)
_ENDING = re.compile(
    rb"(?P<told>" + b"|".join(_TOLD) + rb")|" + b"|".join((*_OF_LAUNCHERS, *_OF_FRAMEWORKS, *_OF_MACHINES)),
    re.IGNORECASE,
)

_SPECIAL_ENDING = re.compile(b"|".join((*_OF_LAUNCHERS, *_OF_FRAMEWORKS, *_OF_MACHINES)), re.IGNORECASE)
_ENDED = "a process ended: "

_SUPPOSED = re.compile(
    rb"\b(?:if|unless|in case|would|whenever|(?:will|may|might|can|could|should|to) (?:be|get|have))\b"
    rb"|\b(?:no|zero|(?<![a-z] )0|none of the|without(?: any| a)?) (?:\w+ )?"
    + _PROCESS
    + rb"|\b(?:not|never|n't|before (?:it|they)) (?:\w+ )?(?:killed|died|dead|crashed)|\blikely:",
    re.IGNORECASE,
)
"""Words that show that a process may end, or did not end."""

_COUNTED_NONE = re.compile(rb"(?:(?!code|status|signal)[\w ]){0,40}[:=] ?0(?![\w.])", re.IGNORECASE)
"""Text after the verb that gives the number of such processes as 0."""

_LONGEST_ENDING, _BEFORE_ENDING, _BEHIND_ENDING = 120, 60, 40


_TEST_HEADERS = (re.compile(r"\bnThread \d+ nGpus \d+ minBytes "), HEADER)
_TEST_ENDS = (re.compile(r"Out of bounds values :"), re.compile(r"Avg bus bandwidth +:"))


class TestRuns:
    """Counts how many runs of nccl-tests started and ended, from two header lines and two final lines."""

    def __init__(self) -> None:
        self._begun, self._ended = [0, 0], [0, 0]
        self._most_at_once = 0

    def add(self, line: bytes) -> None:
        if not _says_tests(line):
            return
        text = line.decode("utf-8", "replace")
        for counts, forms in ((self._begun, _TEST_HEADERS), (self._ended, _TEST_ENDS)):
            for place, form in enumerate(forms):
                counts[place] += form.search(text) is not None
        self._most_at_once = max(self._most_at_once, self.unfinished)

    @property
    def unfinished(self) -> int:
        """The number of runs that have started but not ended."""
        return max(0, max(self._begun) - max(self._ended))

    def complaint(self) -> tuple[str, int] | None:
        """Return a problem with the runs and its number of occurrences, or None."""
        if self.unfinished:
            return "no line of Avg bus bandwidth after the header of a run", self.unfinished
        if self._most_at_once > 1:
            return f"{self._most_at_once} runs of nccl-tests at once, each alone", 1
        return None


class FailedCollectives:
    """Summarizes the stack that PyTorch prints for a failed collective.

    The summary has the operation and the innermost line of the user's program.
    """

    def __init__(self) -> None:
        self._open: list[str] | None = None
        self._head = ""

    def add(self, line: bytes) -> str | None:
        """Add a line. If it ends a stack, return the summary of that failure."""
        if b"Stack trace of the failed collective" in line:
            done = self.end()
            rank = _RANK.search(line)
            self._head = f"rank {rank[1].decode()}: failed collective" if rank else "failed collective"
            self._open = []
            return done
        if self._open is None:
            return None
        if frame := _TORCH_FRAME.search(line):
            self._open.append(" ".join(group.decode("utf-8", "replace") for group in frame.groups()))
            return None
        return self.end()

    def end(self) -> str | None:
        """End an open stack, and return the summary of its failure."""
        frames, self._open = self._open, None
        if frames is None:
            return None
        operation = frames[0].partition(" ")[0] if frames else ""
        own = next((frame for frame in frames if not _OF_LIBRARY.search(frame)), "")
        function, _, place = own.partition(" ")
        return f"{self._head} {operation}".rstrip() + (f", called at {place} ({function})" if own else "")


_RANK = re.compile(rb"\[?[Rr]ank ?(\d{1,7})\]")
_TORCH_FRAME = re.compile(rb"#\d{1,3} (\S{1,200}) from (\S{1,400}:\d{1,7})\s*$")
_OF_LIBRARY = re.compile(r"(?:site|dist)-packages/|/torch/|/lib/python")


class Tracebacks:
    """Counts Python tracebacks. It skips tracebacks from destructors, whose exceptions Python ignores."""

    def __init__(self) -> None:
        self._count = self._ignored = self._frames = 0
        self._exceptions = False

    def add(self, line: bytes) -> None:
        self._ignored += b"Exception ignored in" in line
        self._frames += b'distributed_c10d.py", line' in line
        if b"Traceback (most recent" in line:
            # Python prints the ignored traceback after this line.
            follows = self._ignored > 0
            self._ignored -= follows
            self._count += not follows
        self._exceptions = self._exceptions or _says_exception(line) is not None

    def complaint(self) -> tuple[str, int] | None:
        """Return a complaint and its number of occurrences if tracebacks appear without their exception. None
        otherwise.
        """
        if self._exceptions or not (self._count or self._frames):
            return None
        return "a Traceback of Python without its exception", self._count or 1


def parse_program_error(line: bytes) -> str | None:
    """Parse a line in which another program reports a failure or wrong data. None for other lines."""
    if _ROW.search(line) and (row := wrong_data_in(line.decode("utf-8", "replace").rstrip())):
        return f"wrong data in a row of nccl-tests: {row[:_LONGEST]}"
    found = _PROGRAM_ERROR.search(line) if _says_errors(line) else None
    if (found is None or _says_exception(found[0])) and (ending := _parse_ending(line)):
        return ending
    if found is None:
        return None
    text = _IN_SOURCE.sub(b"", found[0]).replace(b"NCCL error, ", b"NCCL error: ")[:_LONGEST]
    return text.decode("utf-8", "replace").strip(" :>]\t")


def _parse_ending(line: bytes) -> str | None:
    """Parse a line about a process that ended with an error. None for other lines."""
    found = _ENDING.search(line) if _says_errors(line) else None
    if found is None:
        return None
    start = max(0, found.start() - _BEFORE_ENDING)
    if found["told"] and (_SUPPOSED.search(line, start, found.end()) or _COUNTED_NONE.match(line, found.end())):
        return None
    if len(line) > _LONGEST_ENDING:  # Long lines show a command with all its arguments, followed by the exit code.
        start, end = max(0, found.start() - _BEFORE_ENDING), found.end() + _BEHIND_ENDING
        cut = line[:end].rpartition(b" ")[0] if end < len(line) else line
        line = cut[start:].partition(b" ")[2] if start else cut
    return f"{_ENDED}{line[:_LONGEST].decode('utf-8', 'replace').strip()}"


def may_be_of_any_job(complaint: str) -> bool:
    """True for a general statement, which may be about any job: 'A command that fails ends with exit code 1.'"""
    line = complaint.removeprefix(_ENDED)
    return line != complaint and is_sentence(line) and _SPECIAL_ENDING.search(line.encode()) is None


_LISTED_RANK = re.compile(rb"\bRank +(\d{1,7}) .{0,40}\bPid +(\d{1,10}) on +([\w.-]{1,255}) +device ", re.ASCII)


def parse_listed_rank(line: bytes) -> tuple[int, str, int] | None:
    """Parse the rank, the host and the process id from a line of the device list in nccl-tests."""
    found = _LISTED_RANK.search(line)
    return None if found is None else (int(found[1]), found[3].decode(), int(found[2]))


def parse_diagnostic(line: bytes) -> tuple[str, str] | None:
    """Parse a failed self-check of NCCL 2.31 and later, 'host:pid NCCL DIAG [INFO] check: …'. Return process and
    text.
    """
    found = _DIAGNOSTIC.search(line) if b"NCCL DIAG" in line else None
    if found is None:
        return None
    return (found[1] or b"").decode("ascii", "replace"), found[2][:_LONGEST].decode("utf-8", "replace").strip()


def parse_gpu_model(line: bytes) -> tuple[str, bool] | None:
    """Parse the GPU model from a line of another program. The second value is true if a rank uses the GPU."""
    for form in _MODELS if b"GPU " in line or b"Rank " in line else ():
        if found := form.search(line):
            return found[1].decode("ascii", "replace").strip(), form is _MODELS[0]
    return None

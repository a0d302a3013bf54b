"""Run gpubench commands in child processes, for other commands and for Python programs that import gpubench."""

import difflib
import math
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

from msgspec import Struct

from gpubench.errors import WRONG_USAGE, CouldNotMeasureError, GpubenchError, UsageError
from gpubench.machine.children import module_command, package_environment
from gpubench.model.facts.environment import DEFAULTS_VARIABLE, NO_DEFAULTS_TO_READ, detect_launcher, strip_launcher
from gpubench.model.results.report import (
    FINDINGS_SECTION,
    CollectiveRow,
    Matrix,
    Metadata,
    PairRow,
    Record,
    Report,
)
from gpubench.model.results.result_file import MATRICES, TABLES
from gpubench.model.terms.units import plural
from gpubench.model.terms.verdict import Finding, Origin, Verdict

if TYPE_CHECKING:
    from gpubench.formats.frame import DataFrame
    from gpubench.readers.results.gpubench_json import StoredRun

_OWN_ERROR = "gpubench: error: "
_SECONDS_TO_END = 5.0


class Ended(NamedTuple):
    """Exit code, stdout (`output`) and stderr (`said`) of a child process that has ended."""

    code: int
    output: bytes
    said: str

    @property
    def own_words(self) -> str:
        """The last error message of gpubench on stderr. Without such a message, all of stderr."""
        return self.said.rpartition(_OWN_ERROR)[2]


def run_child(
    command: Sequence[str], timeout_s: float | None, environment: Mapping[str, str] = os.environ
) -> Ended | None:
    """Run a command that ignores default options from the environment or a file. Return None if it exceeds
    `timeout_s`.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=package_environment(strip_launcher(environment) | {DEFAULTS_VARIABLE: NO_DEFAULTS_TO_READ}),
        start_new_session=True,
    ) as child:
        try:
            output, said = child.communicate(timeout=timeout_s)
        except BaseException as broken:
            _end(child)
            if isinstance(broken, subprocess.TimeoutExpired):
                return None
            raise
        return Ended(child.returncode, output, said.decode(errors="replace"))


def _end(child: "subprocess.Popen[bytes]") -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, how)
            child.wait(_SECONDS_TO_END)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
        return


def run_command(arguments: Sequence[str], timeout_s: float) -> None:
    """Run a gpubench command. Raises CouldNotMeasureError if the command fails or exceeds `timeout_s`."""
    name = f"gpubench {arguments[0]}"
    environment = package_environment(strip_launcher(os.environ) | {DEFAULTS_VARIABLE: NO_DEFAULTS_TO_READ})
    try:
        done = subprocess.run(
            module_command("gpubench", *arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CouldNotMeasureError(
            f"{name} did not end within {timeout_s:g} s", next_step=f"gpubench {' '.join(arguments[:1])}"
        ) from None
    if done.returncode not in (0, 1):
        said = " ".join(done.stderr.decode(errors="replace").split())[-300:]
        raise CouldNotMeasureError(
            f"{name} ended with exit code {done.returncode}: {said or 'without output'}",
            next_step=f"gpubench {arguments[0]} shows the whole error",
        )


R = TypeVar("R", bound=Record | Finding)
Row = TypeVar("Row", bound=Record)
FileName = str | os.PathLike[str]
One = str | float | os.PathLike[str]
Value = One | bool | Iterable[One] | None  # None leaves the option out, False uses its `--no-` form


class RunResult(Struct, frozen=True):
    """The result of a command, and its exit code. A notebook displays it as the HTML report."""

    stored: "StoredRun"
    exit_code: int

    @property
    def metadata(self) -> Metadata:
        """Time, hosts, libraries, settings and profile of the run."""
        return self.stored.metadata

    @property
    def report(self) -> Report:
        """Verdict, findings and all sections of the run."""
        return self.stored.report

    @property
    def verdict(self) -> Verdict:
        """PASS, WARN, FAIL, SKIP, ERROR or INCONCLUSIVE."""
        return self.report.verdict

    @property
    def sentence(self) -> str:
        """The last line of the report, with the verdict and the worst root cause. Without findings, it has the best
        values.
        """
        return self.report.sentence

    @property
    def findings(self) -> Sequence[Finding]:
        """The root causes of problems, each with the findings that it explains."""
        return self.report.findings

    @property
    def rows(self) -> list[CollectiveRow]:
        """The rows of a collective, with size, time, bus bandwidth (busbw) and expected bandwidth."""
        return self._rows(CollectiveRow)

    @property
    def pairs(self) -> list[PairRow]:
        """The pairs of devices, with wiring and bandwidth limit. All commands except `topo` also report copies."""
        return self._rows(PairRow)

    @property
    def sections(self) -> tuple[str, ...]:
        """The names of all sections, for `section` and `to_frame`."""
        return self.stored.sections

    @overload
    def section(self, name: str) -> list[Record | Finding]: ...
    @overload
    def section(self, name: str, kind: type[R]) -> list[R]: ...
    def section(self, name: str, kind: type[Any] = object) -> list[Any]:
        """Return the rows of a section, for example `section("gpus", GpuRow)`.

        Raises UsageError for an unknown section name, or if a row has another type.
        """
        section = self._find_section(name)
        if isinstance(section, Matrix):
            raise UsageError(f"section {name!r} is a matrix", next_step=f"to_frame({name!r})")
        other = next((row for row in section if not isinstance(row, kind)), None)
        if other is not None:
            raise UsageError(f"section {name!r} has {type(other).__name__}, not {kind.__name__}")
        return list(section)

    def to_frame(self, section: str | None = None) -> "DataFrame":
        """Return a section as a pandas data frame. The default is the rows of collectives, else pairs, else the
        main section.
        """
        from gpubench.formats.frame import make_frame

        if section is None:
            return make_frame(self._streamed() or self.rows or self.pairs or self._find_section(self.report.main))
        return make_frame(self._find_section(section))

    def __repr__(self) -> str:
        """Return a summary such as `<allreduce: FAIL, 12 rows, 1 finding: host-staged ranks 0 → 6 (simulated)>`."""
        first = "".join(f": {finding.id} {finding.subject}" for finding in self.findings[:1]) + ", …" * (
            len(self.findings) > 1
        )
        rows = len(self._streamed() or self.rows or self.pairs)
        counts = [plural(rows, "row")] * bool(rows) + [plural(len(self.findings), "finding")] * bool(self.findings)
        source = "" if self.metadata.origin == Origin.MEASURED else f" ({self.metadata.origin})"
        return f"<{', '.join([f'{self.metadata.subject}: {self.verdict}', *counts])}{first}{source}>"

    def _repr_html_(self) -> str:
        import html
        import io

        from gpubench.formats.registry import FORMATS, Presentation, Target

        stream = io.StringIO()
        (page,) = (each for each in FORMATS if each.name == "html")
        writer = page.writer(Target(stream=stream), Presentation())
        writer.begin(self.metadata, self.stored.columns)
        for row in self.stored.rows:
            writer.row(row)
        writer.end(self.report)
        return (
            f'<iframe style="width: 100%; height: 40em; border: 0" srcdoc="{html.escape(stream.getvalue())}"></iframe>'
        )

    def _rows(self, kind: type[Row]) -> list[Row]:
        return [row for row in self.stored.rows if isinstance(row, kind)] or self.report.rows(kind)

    def _streamed(self) -> list[Record]:
        return [row for row in self.stored.rows if isinstance(row, Record)]

    def _find_section(self, name: str) -> Matrix | Sequence[Record | Finding]:
        """Return the rows or cells of a section. They are empty if this result lacks the section.

        Raises UsageError for an unknown section name.
        """
        if name not in TABLES and name not in MATRICES:
            error = UsageError(f"no section {name!r}", expected=f"one of {', '.join(self.sections)}")
            nearest = difflib.get_close_matches(name, self.sections, n=1)
            error.next_step = f"section {nearest[0]!r}" if nearest else ""
            raise error
        if name == FINDINGS_SECTION:
            return self.findings
        section = self.report.sections.get(name)
        if isinstance(section, Matrix):
            return section
        streamed = self._streamed() if name == self.metadata.rows_section else []
        return streamed or self.report.rows(Record, section=name)


def load(path: FileName) -> RunResult:
    """Load a file that `gpubench report` can read: a stored .json or .jsonl result, or a table or log of another
    program.

    Raises GpubenchError if the file cannot be read. If a table does not name its machine, use `gpubench.report(path,
    machine="hgx-h100-8")`.
    """
    from gpubench.model.results.ending import compute_exit_code
    from gpubench.readers.documents import read_text
    from gpubench.readers.registry import WANTED
    from gpubench.readers.results.gpubench_json import is_stored, parse_stored

    text = read_text(Path(path), WANTED)
    if not is_stored(text):
        return run("report", str(path))
    stored = parse_stored(text, str(path))
    return RunResult(stored, compute_exit_code(stored.metadata, stored.report))


def run(command: str, *arguments: str, deadline_s: float | None = None, **options: Value) -> RunResult:
    """Run any command that writes a report, for example `run("allgather", sizes="1M")`. Raises GpubenchError like
    `check`.
    """
    from gpubench.readers.results.gpubench_json import read_stored

    if deadline_s is not None and not 0 < deadline_s < math.inf:
        raise UsageError(f"deadline_s={deadline_s}", expected="seconds above 0, or None for no limit")
    launch = detect_launcher(os.environ)
    if launch is not None and launch.size > 1:
        raise UsageError(
            f"gpubench as a library under {launch.launcher}",
            expected="one process, because it starts its own ranks",
            next_step=f"start gpubench {command} itself with {launch.launcher}",
        )
    with tempfile.TemporaryDirectory(prefix="gpubench-") as folder:
        path = Path(folder) / "result.json"
        words = [*_words(options), "--output", str(path), "--quiet", *arguments]
        ended = run_child(module_command("gpubench", command, *words), deadline_s)
        if ended is None:
            raise CouldNotMeasureError(f"gpubench {command} did not end within {deadline_s:g} s")
        if ended.code == WRONG_USAGE or not path.exists():
            raise _error(command, ended)
        stored = read_stored(path)
        if not stored.report.complete:
            raise _error(command, ended)
        return RunResult(stored, ended.code)


def _words(options: dict[str, Value]) -> Iterable[str]:
    for name, value in options.items():
        option = f"--{name.strip('_').replace('_', '-')}"
        if value is None:
            continue
        if isinstance(value, bool):
            yield option if value else option.replace("--", "--no-", 1)
        else:
            several = isinstance(value, Iterable) and not isinstance(value, (str, os.PathLike))
            for each in value if several else [value]:  # type: ignore[union-attr]
                yield from (option, str(each))


def _error(command: str, ended: Ended) -> GpubenchError:
    first, *more = ended.own_words.strip().splitlines() or [f"gpubench {command} ended with exit code {ended.code}"]
    error = UsageError(first) if ended.code == WRONG_USAGE else CouldNotMeasureError(first)
    error.details = tuple(more)
    return error

"""Measure how long a command takes to its first line, its first row and its end, and what it does until then.

    python -m benchmarks.start_up --runs 9 --beside OLD/.venv/bin/python -- allreduce --backend host

Run it with a Python whose environment has gpubench; --beside is another one, such as with an older version, which takes
turns with it. Its modules should be compiled (`python -m compileall`), as after pip: with PYTHONDONTWRITEBYTECODE every
process compiles a checkout again. It prints the fastest run and the median, in seconds. The first row is the first line
of stdout that begins with a number, as in the table of a collective.

`--steps` runs each Python once more and shows when its processes begin, import, connect and start others. It uses
Python's audit events, which cost about a tenth of the time.
"""

import argparse
import os
import re
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROW = re.compile(rb"^ +\d+[KMG]? +\d", re.MULTILINE)
MOMENTS = ("first line", "first row", "end")

HOOK = """
import os, sys, time

def look():
    begun, shown = float(os.environ["START_UP_BEGUN"]), set(os.environ["START_UP_MODULES"].split())
    file = open(os.path.join(os.environ["START_UP_FOLDER"], f"{time.time():.6f}-{os.getpid()}"), "w", buffering=1)

    def note(text):
        file.write(f"{time.time() - begun:7.3f}  {text}\\n")

    def hook(event, values):
        if event == "import" and values[0] in shown:
            shown.discard(values[0])
            note(f"imports {values[0]}")
        elif event == "subprocess.Popen":
            note(f"starts {' '.join(str(word) for word in values[1][:5])}"[:100])
        elif event == "socket.connect" and isinstance(values[1], str):
            note("tells who launched it that it is there")

    note(f"begins: {' '.join(sys.orig_argv[1:5])}"[:100])
    sys.addaudithook(hook)

look()
"""

MODULES = (
    "typer gpubench.jobs.collective.job gpubench.formats.presenter rich.console "
    "gpubench.jobs.collective.rank_job gpubench.conditions.registry pydantic pynvml mpi4py.MPI numpy "
    "gpubench.measure.topo gpubench.machine.probe"
)


def main() -> None:
    arguments = parse()
    pythons = [sys.executable, *arguments.beside]
    found: dict[str, list[dict[str, float]]] = {python: [] for python in pythons}
    for number in range(arguments.runs):
        for python in pythons if number % 2 else reversed(pythons):
            found[python].append(moments(python, arguments.command))
    print(f"{'':<40}{'fastest':>9}{'median':>9}  s, of {arguments.runs} runs")
    for python, runs in found.items():
        print(python)
        for name in MOMENTS:
            times = [run[name] for run in runs if name in run]
            if times:
                print(f"  {name:<38}{min(times):>9.3f}{statistics.median(times):>9.3f}")
    for python in pythons if arguments.steps else ():
        print(f"\n{python}")
        print(*steps(python, arguments.command), sep="\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--beside", action="append", default=[], metavar="PYTHON")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("command", nargs="*", default=["allreduce", "--backend", "host"])
    return parser.parse_args()


def moments(python: str, command: list[str]) -> dict[str, float]:
    """Return the seconds from the start of a run to each of its moments."""
    found: dict[str, float] = {}
    begun, text = time.perf_counter(), b""
    # In another folder: Python would prefer a checkout in the working directory to the installed package.
    with (
        tempfile.TemporaryDirectory() as folder,
        selectors.DefaultSelector() as selector,
        subprocess.Popen(
            [python, "-m", "gpubench", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder
        ) as job,
    ):
        for stream in (job.stdout, job.stderr):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                    continue
                found.setdefault("first line", time.perf_counter() - begun)
                text += data if key.fileobj is job.stdout else b""
                if "first row" not in found and ROW.search(text):
                    found["first row"] = time.perf_counter() - begun
        if job.wait() not in (0, 1):
            sys.exit(f"{python} -m gpubench {' '.join(command)} ended with exit code {job.returncode}")
    return {**found, "end": time.perf_counter() - begun}


def steps(python: str, command: list[str]) -> Iterator[str]:
    """Yield the steps of each process of a run, a block per process, in the order of their starts."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as hooks:
        Path(hooks, "sitecustomize.py").write_text(HOOK)
        environment = {"PYTHONPATH": hooks, "START_UP_BEGUN": repr(time.time()), "START_UP_FOLDER": folder}
        subprocess.run(
            [python, "-m", "gpubench", *command],
            env={**os.environ, **environment, "START_UP_MODULES": MODULES},
            cwd=folder,
            capture_output=True,
            check=False,
        )
        for path in sorted(Path(folder).iterdir()):
            yield from ("", path.read_text().rstrip())


if __name__ == "__main__":
    main()

"""Read the libraries of this environment: children look and ask, each with a deadline, and this process loads none."""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpubench.errors import UsageError
from gpubench.hardware.launch.interpreter import module_command, with_package
from gpubench.hardware.libraries import stage
from gpubench.hardware.libraries.stage import CUPY, MPI4PY, SEARCH, VERSION
from gpubench.hardware.node.stages import StageResult, run_stages
from gpubench.model.facts.libraries import LOADER, MPI, KernelModule, LibrariesFacts, LibraryFile, LibraryUser
from gpubench.model.terms.plain import from_plain

Run = Mapping[str, StageResult]

_ORDER = ("CuPy", "torch", "mpi4py", LOADER)


def read_libraries(timeout_s: float, environment: Mapping[str, str]) -> LibrariesFacts:
    """The libraries of this host as processes with this environment find them, read in about `timeout_s` at most.

    What did not answer is in `failures`.
    """
    inner = with_package(environment)
    first = run_stages({task: _command(task) for task in (SEARCH, CUPY, MPI4PY)}, inner, timeout_s)
    failures = {task: result.error for task, result in first.items() if result.document is None}
    try:
        files, users, modules = _put_together(first)
    except UsageError as error:
        return _facts(failures={**failures, SEARCH: f"an answer that is none: {error.seen}"})
    asked = {each.path: _command(VERSION, each.library, each.path) for each in files if each.version is None}
    answers = run_stages(asked, inner, timeout_s) if asked else {}
    files = [_with_version(each, answers[each.path]) if each.path in answers else each for each in files]
    return _facts(files=tuple(files), users=tuple(users), modules=tuple(modules), failures=failures)


def _facts(**values: Any) -> LibrariesFacts:
    return LibrariesFacts(host=socket.gethostname().split(".")[0], python=sys.executable, **values)


def _command(*arguments: str) -> list[str]:
    return module_command(stage.__name__, *arguments)


def _put_together(results: Run) -> tuple[list[LibraryFile], list[LibraryUser], Sequence[KernelModule]]:
    documents = {name: result.document or {} for name, result in results.items()}
    found = documents[SEARCH]
    users = [from_plain(LibraryUser, each) for each in found.get("users", ())]
    users += [
        from_plain(LibraryUser, user) for task in (CUPY, MPI4PY) if (user := documents[task].get("user")) is not None
    ]
    users.sort(key=lambda user: _ORDER.index(user.name))
    files = {
        os.path.realpath(file.path): file for file in (from_plain(LibraryFile, each) for each in found.get("files", ()))
    }
    mpi = documents[MPI4PY]
    for user in users:
        for library, path in user.loads.items():
            file = LibraryFile(library=library, path=path)
            if library == MPI and user.name == "mpi4py":
                file = replace(file, version=mpi.get("mpi"), cuda=mpi.get("cuda"))
            files.setdefault(os.path.realpath(path), file)
    modules = [from_plain(KernelModule, each) for each in found.get("modules", ())]
    return list(files.values()), users, modules


def _with_version(file: LibraryFile, result: StageResult) -> LibraryFile:
    """The file with its own word; else with what its package or its name says, and why it did not say so itself."""
    answer = result.document or {}
    version = answer.get("version")
    if version is not None:
        return replace(file, version=version)
    known = file.package.rpartition(" ")[2] if file.package else None
    named = Path(os.path.realpath(file.path)).name.partition(".so.")[2]
    said = known if known and known[0].isdigit() else named if named.count(".") > 1 else None
    return replace(file, version=said, unread=answer.get("unread") or result.error)

"""Files of users that decide about NCCL: its configuration, its topology file, the libraries that would be loaded.

They may lie on a file system of the network, which may never answer: they are read by a thread that is not waited for
longer than a moment.
"""

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from gpubench.hardware.process.library_search import can_look, find_libraries, wanted_libraries
from gpubench.hardware.process.nccl_settings import effective, read_nccl_files
from gpubench.hardware.process.topology_file import read_topology_file
from gpubench.model.facts.rank_facts import TopologyFile

SECONDS_TO_ANSWER = 2.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFiles:
    """The contents of those files; `unknown` has the reasons for what is missing."""

    nccl_files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    topology_file: TopologyFile | None = None
    loadable: Mapping[str, str | None] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)


def read_user_files(environment: Mapping[str, str], loaded: Mapping[str, str], root: Path) -> UserFiles:
    """The contents that can be read in time. `environment` is the allow-list, `loaded` has files by library name."""
    answer = in_time(lambda: _read(environment, loaded, root))
    if answer is not None:
        return answer
    return UserFiles(unknown=dict.fromkeys(("nccl_files", "topology_file", "loadable"), no_answer()))


def no_answer() -> str:
    """The reason for what was not read in time."""
    return f"no answer within {SECONDS_TO_ANSWER:g} s: a file system does not respond"


def in_time(read: Callable[[], T]) -> T | None:
    """What is read, by a thread; None where a file system does not answer in time."""
    answer: list[T] = []
    thread = threading.Thread(target=lambda: answer.append(read()), daemon=True)
    thread.start()
    thread.join(SECONDS_TO_ANSWER)
    return answer[0] if answer else None


def _read(environment: Mapping[str, str], loaded: Mapping[str, str], root: Path) -> UserFiles:
    nccl_files, unknown = read_nccl_files(environment, root)
    settings = effective(environment, nccl_files)
    search_path = os.environ.get("LD_LIBRARY_PATH", "")
    loadable = find_libraries(wanted_libraries(settings), loaded, search_path, root)
    if not can_look(root):
        loadable = {name: path for name, path in loadable.items() if path is not None}
        unknown = {**unknown, "loadable": "no folder of the dynamic loader's can be seen"}
    return UserFiles(
        nccl_files=nccl_files, topology_file=read_topology_file(settings, root), loadable=loadable, unknown=unknown
    )

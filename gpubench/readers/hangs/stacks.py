"""What py-spy dump prints of a process: where its main thread is."""

import re

from gpubench.model.paths.hang import ProcessStack

_HEADER = re.compile(rb"\s*Process (\d{1,10}): ")
_VERSION = b"Python v"
_THREAD = re.compile(r'^Thread \S+ \([^)]*\)(?:: "(?P<name>[^"]*)")?')
_FRAME = re.compile(r"^\s+(?P<function>.{1,200}) \((?P<place>[^()]{1,300}:\d+)\)$")
_RANK = re.compile(r"(\d{1,7})(?:\.\w+)*$")
_LIBRARIES = re.compile(
    r"(?:^|/)(?:torch|site-packages|dist-packages|lib/python[\d.]+|multiprocessing|concurrent|asyncio|importlib)/"
    r"|^(?:threading|selectors|socket|ssl|queue|subprocess|contextlib|runpy|\w*_bootstrap\w*)\.py:|^<"
)


def recognises(beginning: bytes) -> bool:
    """True if a file begins as py-spy's dump of a process does."""
    return _HEADER.match(beginning) is not None and _VERSION in beginning


def read(data: bytes, name: str) -> ProcessStack:
    """The innermost frame of the main thread, and the innermost that is no library's.

    Its rank is the number at the end of the name of the file, where there is one.
    """
    header = _HEADER.match(data)
    frames: list[str] = []
    is_main = False
    for line in data.decode("utf-8", "replace").splitlines():
        if thread := _THREAD.match(line):
            is_main = thread["name"] in ("MainThread", None)
        elif is_main and (frame := _FRAME.match(line)):
            frames.append(f"{frame['place']} ({frame['function']})")
    own = [each for each in frames if not _LIBRARIES.search(each)][:1]
    rank = _RANK.search(name)
    pid = int(header[1]) if header else 0
    return ProcessStack(pid, None if rank is None else int(rank[1]), tuple(dict.fromkeys([*frames[:1], *own])))

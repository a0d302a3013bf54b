"""Stand in for `gpubench` in a shell, or for mpirun: forking.py does it, in the folder and with the streams of this.

Where that process listens is the first argument. The second is a folder with the variables of ranks, a file each: so
many are forked, and this ends when they have, as mpirun does. Without a folder one command is forked, as which this
takes signals and ends. gpubench's arguments come after.
"""

import array
import json
import os
import signal
import socket
import sys
from contextlib import suppress

_path, _folder, *_arguments = sys.argv[1:]
_own = dict(os.environ)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


_streams = [each for each in (1, 2) if _is_open(each)]  # before anything else is opened in the place of a closed one


def _ask(variables: dict[str, str]) -> socket.socket:
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asking.connect(_path)
    request = {"arguments": _arguments, "environment": variables | _own, "cwd": os.getcwd()}  # noqa: PTH109
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", _streams))] if _streams else []
    asking.sendmsg([json.dumps(request | {"streams": _streams}).encode()], rights)
    return asking


def _variables(path: str) -> dict[str, str]:
    with open(path) as file:  # noqa: PTH123
        return dict(json.load(file))


_files = sorted(os.listdir(_folder)) if _folder else []  # noqa: PTH208
# Whoever ends this process ends those that it asked for: they are told apart by who waits for them.
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
_asked = [_ask(_variables(f"{_folder}/{each}")) for each in _files] or [_ask({})]
_pids = [int(each.recv(64)) for each in _asked]


def _pass_on(number: int, _: object) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(_pids[0], number)


if not _folder:
    for _number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(_number, _pass_on)
_code = next(filter(None, [int(each.recv(64)) for each in _asked]), 0)
if _code < 0 and not _folder:
    if -_code != signal.SIGKILL:
        signal.signal(-_code, signal.SIG_DFL)
    os.kill(os.getpid(), -_code)
sys.exit(_code if _code >= 0 else 128 - _code)

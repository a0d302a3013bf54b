"""The variables that a libnccl knows: their names stand in its file as whole strings."""

import difflib
import mmap
import re
from collections.abc import Sequence
from pathlib import Path

from gpubench.errors import UsageError
from gpubench.model.terms.verdict import Finding, Verdict

_KNOWN_TO_ALL = (b"NCCL_DEBUG", b"NCCL_ALGO")
"""A file in which these do not stand does not tell what it knows: it is packed, or no libnccl."""

_PREFIX = "NCCL_"
_NAME = re.compile(rb"\0(NCCL_[A-Z0-9_]{2,60})(?=\0)")
_PLUGINS = re.compile(r"NCCL_\w+_PLUGIN")


def check_variables(names: Sequence[str], path: str, settings: Sequence[str]) -> tuple[str, ...]:
    """The variables of which nobody can say whether anything reads them.

    `path` is the file of the NCCL that is used, `settings` are all of NCCL's variables that are set. Those of a name
    that is not NCCL's may be another library's, and where a plugin is loaded an unknown one may be the plugin's.

    Raises UsageError: NCCL does not know one, and no plugin does. To look for a name takes 0.3 s in a file of 300 MB.
    """
    try:
        with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            tells = all(_stands_in(content, name) for name in _KNOWN_TO_ALL)
            unknown = [name for name in names if not (tells and _stands_in(content, name.encode()))]
            refused = [name for name in unknown if name.startswith(_PREFIX) and tells]
            if refused and not any(map(_PLUGINS.fullmatch, settings)):
                raise _unknown(refused[0], path, {found.decode() for found in _NAME.findall(content)})
    except (OSError, ValueError):
        return tuple(names)
    return tuple(unknown)


def _stands_in(content: mmap.mmap, name: bytes) -> bool:
    return content.find(b"\0" + name + b"\0") >= 0


def _unknown(name: str, path: str, known: set[str]) -> UsageError:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return UsageError(
        f"--set {name}: this NCCL has no such variable",
        expected=f"one that {path} reads",
        reason="it is misspelt, or belongs to another version of NCCL",
        next_step=f"--set {nearest[0]}=..." if nearest else f"strings {path} | grep -x 'NCCL_[A-Z0-9_]*' lists its own",
    )


def unverified(names: Sequence[str]) -> tuple[Finding, ...]:
    """The finding on variables that may have had no reader; none without any."""
    if not names:
        return ()
    return (
        Finding(
            id="variable-not-verified",
            severity=Verdict.WARN,
            subject=f"--set {', '.join(names)}",
            seen="the loaded NCCL does not name it among its variables, or does not tell them",
            expected="a variable of which is known that something reads it",
            cause="it belongs to a plugin or another library, or is misspelt: equal times then mean nothing",
            next_command="NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=ENV shows the variables that NCCL reads",
        ),
    )

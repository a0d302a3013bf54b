"""The last line of a report, built within its length: `VERDICT: where, what, how much. Try: command`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpubench.model.terms.verdict import Origin, Verdict

MOST_CHARACTERS = 160
"""What a terminal, a chat and a monitoring system show of a line without cutting it."""

ALWAYS, SOON, LATER, LAST = range(4)
"""How important a part is: what is always said comes before the command, the rest after it."""


@dataclass(frozen=True, slots=True)
class LinePart:
    """A part of the line: its wordings, the fullest first, and how important it is."""

    wordings: tuple[str, ...]
    importance: int = ALWAYS


def part(*wordings: str, importance: int = ALWAYS) -> LinePart:
    """A part with these wordings; those that are empty count for nothing."""
    clean = (" ".join(each.replace("; ", ", ").split()).rstrip(".,:; ") for each in wordings)
    return LinePart(tuple(filter(None, clean)), importance)


def last_line(verdict: Verdict, origin: str, parts: Sequence[LinePart], command: str = "") -> str:
    """The line of these parts, in their order.

    A part has its fullest wording that fits, the most important part first. What does not fit is left out: no part and
    no command is cut, except a first part that is too long by itself, which ends after a word.
    """
    word = f"{verdict} (simulated)" if origin == Origin.SIMULATED else str(verdict)
    parts = [each for each in parts if each.wordings]
    chosen = {index: each.wordings[-1] for index, each in enumerate(parts) if each.importance == ALWAYS}

    def line(chosen: dict[int, str]) -> str:
        said = ", ".join(chosen[index] for index in sorted(chosen))
        return f"{word}: {said}" + (f". Try: {command}" if command else "") if said else word

    if len(line(chosen)) > MOST_CHARACTERS:
        command = ""
    for index in sorted(range(len(parts)), key=lambda each: parts[each].importance):
        for wording in parts[index].wordings:
            if len(line({**chosen, index: wording})) <= MOST_CHARACTERS:
                chosen[index] = wording
                break
    return _shortened(line(chosen))


def _shortened(line: str) -> str:
    if len(line) <= MOST_CHARACTERS:
        return line
    return line[: MOST_CHARACTERS - 1].rpartition(" ")[0].rstrip(",:") + " …"


_PROGRAMS = {
    "nvidia-smi": "nvlink topo r",
    "gpubench": "topo p2p allreduce allgather reducescatter broadcast reduce alltoall gather scatter sendrecv check "
    "scan overlap plan watch explain compare report profiles libraries list match lint",
    "systemctl": "enable start restart status",
    "dmesg": "",
    "lspci": "",
    "setpci": "",
    "modprobe": "",
    "modinfo": "",
    "unset": "",
    "ulimit": "unlimited",
    "sysctl": "",
    "env": "",
    "grep": "nvlink",
    "ip": "link addr",
    "ibstat": "",
    "mlxlink": "",
    "perfquery": "",
    "show_gids": "",
    "fi_info": "",
    "nvidia-imex-ctl": "",
    "nvidia-modprobe": "",
    "ps": "",
    "pip": "list check",
    "python": "",
    "ldd": "",
    "ldconfig": "",
    "lscpu": "",
    "tail": "",
    "head": "",
    "ssh": "true",
    "ping": "",
}
"""Programs that advice begins with, and the plain words that they take: any other plain word belongs to the prose."""

_AFTER = (
    "-",
    "grep",
    "modprobe",
    "unset",
    "ping",
    "ssh",
    "tail",
    "ldd",
    "explain",
    "report",
    "restart",
    "start",
    "status",
    "--now",
)
"""What takes the next word as its own, however plain."""

_PROSE = re.compile(
    "a|after|again|alone|an|and|are|as|at|before|between|by|first|for|from|if|in|is|it|names|not|of|on|once|or|says|"
    "shows|so|that|the|then|there|to|until|was|what|when|where|which|while|who|why|with|without|unless"
)
"""Words that end a command where prose follows it."""

_PLACEHOLDER = re.compile(
    r"\b(PID|BUSID|BUS_ID|GPU|DEVICE|INTERFACE|DIR|DIRECTORY|FILE|HOST|NAME|RESULT|OLD|NEW|I-J\S*)(?![-\w])|\.\.\.|…"
)
_LABEL = re.compile(r"(?:on [\w.-]+|make [^:;]*|run|type): ?|[Rr]un (?=`)|`")
_SETTING = re.compile(r"[A-Z][A-Z0-9_]*=\S*")
_VENDOR_ID = re.compile(r"[0-9a-f]{4}:")
_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|[^\s'"])+""")


def first_command(advice: str) -> str:
    """The command that an advice begins with, whole; empty where it begins with something else to do.

    'nvidia-smi --gpu-reset -i 0000:1b:00.0, when nobody uses it' has one. 'take the key out of the file, then rmmod
    nvidia' has none: the command alone would not help.
    """
    label = _LABEL.match(advice)
    text = advice[label.end() :] if label else advice
    command = " ".join(_command_words(text.partition("`")[0] if label and label[0].endswith("`") else text))
    return "" if _PLACEHOLDER.search(command) else command


def _command_words(text: str) -> list[str]:
    """The words of the first command: settings before a program, the program, and what it takes, through pipes.

    None where a word follows that may or may not be the command's.
    """
    taken: list[str] = []
    held: list[str] = []
    program = before = ""
    for found in _WORD.finditer(text):
        word = found[0]
        bare = word.rstrip(",;.") if _VENDOR_ID.fullmatch(word.rstrip(",;.")) else word.rstrip(",;:.")
        if not program:
            if _SETTING.fullmatch(bare) and bare == word:
                held.append(word)
                continue
            if bare not in _PROGRAMS:
                return []
            program = bare
        elif bare in ("|", "&&"):
            held.append(bare)
            program = before = ""
            continue
        elif program == "ssh" and bare in _PROGRAMS:
            program = bare
        elif not _is_taken(program, before, bare):
            return taken if _PROSE.fullmatch(bare) or bare.startswith("(") else []
        taken += [*held, bare]
        held, before = [], bare
        if bare != word:
            return taken
    return taken


def _is_taken(program: str, before: str, word: str) -> bool:
    if _PROSE.fullmatch(word) or word.startswith("("):
        return False
    if word in _PROGRAMS[program].split() or before.startswith(_AFTER):
        return True
    is_plain = re.fullmatch(r"[A-Za-z]+(['’][a-z]+)?|[A-Za-z]+-[a-z-]+", word) is not None
    return not is_plain

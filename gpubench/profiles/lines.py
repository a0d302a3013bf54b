"""Lines of a TOML file by what stands there, which `tomllib` does not tell."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

Path = tuple[str | int, ...]
"""Keys and positions that lead to a value: ('expected', 4, 'value')."""

_TABLE = re.compile(r"\s*(?P<open>\[\[?)\s*(?P<name>[\w.-]+)\s*\]\]?\s*(#.*)?", re.ASCII)
_KEY = re.compile(r"\s*(?P<name>[\w.-]+)\s*=", re.ASCII)
_STEP = re.compile(r"\.(?P<key>[\w-]+)|\[(?P<position>\d+)\](?: \([^)]*\))?", re.ASCII)
_MULTI_LINE = ('"""', "'''")


def path_in(words: str) -> Path:
    """The path with which a message begins: '.expected[4] (p2p.write_gb_s).value is 0' → ('expected', 4, 'value')."""
    steps: list[str | int] = []
    end = 0
    while found := _STEP.match(words, end):
        steps.append(int(found["position"]) if found["key"] is None else found["key"])
        end = found.end()
    return tuple(steps)


def line_of(text: str, path: Sequence[str | int]) -> int | None:
    """The line, from 1 on, of a key or table, else of the nearest table around it; None where none of it is there."""
    lines = dict(_stated(text))
    return next((lines[key] for end in range(len(path), 0, -1) if (key := tuple(path[:end])) in lines), None)


def _stated(text: str) -> Iterator[tuple[Path, int]]:
    """Every table and key with its line."""
    table: Path = ()
    counts = Counter[Path]()
    within = ""
    for number, line in enumerate(text.splitlines(), 1):
        quotes = within or next((each for each in _MULTI_LINE if line.count(each) % 2), "")
        was_within, within = within, "" if within and within in line else quotes
        if was_within:
            continue
        if header := _TABLE.fullmatch(line):
            table = tuple(header["name"].split("."))
            if header["open"] == "[[":
                name, table = table, (*table, counts[table])
                counts[name] += 1
            yield table, number
        elif key := _KEY.match(line):
            yield (*table, *key["name"].split(".")), number

"""Lines of a TOML file by what stands there."""

import tomllib
from typing import Any

import pytest

from gpubench import profiles
from gpubench.profiles import find_line, parse_key_path

TEXT = '''schema = 1 # [not.a.table]
name = "mine"

[gpu]
note = """
[nvlink]
links = 18
"""
memory_bytes = 1
a.b = 2

[[nic]]
name = "mlx5_0"
[[ nic ]] # the second
rate_gbit_s = 400
pairs = [
  [0, 1, 1],
]
'''


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (".schema is 2", 1),
        (".name is 3", 2),
        (" has no field 'title'", None),
        (".gpu has no field 'name'", 4),
        (".gpu.memory_bytes is 0", 9),
        (".gpu.a.b is 0", 10),
        (".nvlink.links is 0", None),
        (".nic[0].name is 'a'", 13),
        (".nic[1] (mlx5_1).rate_gbit_s is 0", 15),
        (".nic[1].pairs[0] is 0", 16),
        (".nic[1].name is missing", 14),
        (".nic[2].name is 'a'", None),
    ],
)
def test_the_line_is_that_of_the_key_or_of_the_table_around_it(words: str, line: int | None) -> None:
    tomllib.loads(TEXT)
    assert find_line(TEXT, parse_key_path(words)) == line


@pytest.mark.parametrize("name", profiles.profile_names())
def test_every_value_of_our_profiles_is_found_on_its_line(name: str) -> None:
    text = (profiles.folder() / f"{name}.toml").read_text()
    lines = text.splitlines()
    plain: dict[str, Any] = tomllib.loads(text)
    for number, expected in enumerate(plain.get("expected", ())):
        for key, value in expected.items():
            line = find_line(text, ("expected", number, key))
            assert line is not None
            assert tomllib.loads(lines[line - 1]) == {key: value}

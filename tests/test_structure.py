"""The newcomer test: what lies in a plug folder is listed there, and modules stay small."""

import ast
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import gpubench
from gpubench.backends.mpi.group import AloneGroup
from gpubench.collectives.registry import COLLECTIVES
from gpubench.formats.registry import FORMATS
from gpubench.profiles import all_profiles, folder
from gpubench.readers.registry import READERS, RESULT_READERS

PACKAGE = Path(gpubench.__file__).parent
SUPPORT = {
    "conditions": {
        *("__init__", "checks", "circumstances", "condition", "folding", "logged", "policy", "ranking", "registry"),
        "subjects",
    },
    "collectives": {"__init__", "curve", "expected", "pattern", "record", "registry"},
    "formats": {
        "__init__",
        "blocks",
        "delivery",
        "frame",
        "layout",
        "machine_picture",
        "presenter",
        "registry",
        "status_line",
    },
    "readers/machines": {"__init__"},
    "readers/results": {"__init__", "history"},
}


def _modules_of_families() -> set[str]:
    """The modules that the registry of conditions imports families from."""
    tree = ast.parse((PACKAGE / "conditions" / "registry.py").read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[2] for name in imported if name.startswith("gpubench.conditions.")} - SUPPORT["conditions"]


@pytest.mark.parametrize(
    ("plugs", "names"),
    [
        ("conditions", _modules_of_families()),
        ("collectives", {each.name for each in COLLECTIVES}),
        ("formats", {each.name for each in FORMATS}),
        ("readers/machines", {each.module.split(".")[3] for each in READERS}),
        ("readers/results", {each.module.split(".")[3] for each in RESULT_READERS}),
    ],
)
def test_every_plug_is_listed(plugs: str, names: set[str]) -> None:
    here = PACKAGE / plugs
    packages = {path.parent.name for path in here.glob("*/__init__.py")} - {"text", "web"}
    modules = {path.stem for path in here.glob("*.py")} | packages
    modules -= SUPPORT[plugs]
    assert modules
    assert modules == names


def test_every_profile_is_found() -> None:
    assert {profile.name for profile in all_profiles()} == {path.stem for path in folder().glob("*.toml")}


class Source(NamedTuple):
    """What a module of the package has: lines in all and in each function, class names, roots of imports, ways out."""

    lines: int
    functions: Mapping[str, int]
    classes: Sequence[str]
    imports: Set[str]
    ways: Set[str]


@cache
def sources() -> Mapping[str, Source]:
    """By path in the package. Read once: it takes seconds."""
    return {str(path.relative_to(PACKAGE)): _source(path.read_text()) for path in PACKAGE.rglob("*.py")}


def _source(text: str) -> Source:
    tree = ast.parse(text)
    statements = list(_statements(tree))
    imports = [alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names]
    imports += [node.module or "" for node in statements if isinstance(node, ast.ImportFrom)]
    return Source(
        len(text.splitlines()),
        {
            f"{node.name} at {node.lineno}": (node.end_lineno or 0) - node.lineno
            for node in statements
            if isinstance(node, ast.FunctionDef)
        },
        [node.name for node in statements if isinstance(node, ast.ClassDef)],
        {name.split(".")[0] for name in imports},
        _ways(tree) if any(f"{name}(" in text for name in WAYS) else set(),
    )


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Every statement in a node; those in expressions, which have none, are not looked for."""
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        for each in getattr(node, name, ()):
            if isinstance(each, ast.stmt):
                yield each
            yield from _statements(each)


WAYS = {
    "print": {"formats/delivery.py", "cli/app.py"},
    "Text": {"formats/table.py"},
    "escape": {"formats/machine_picture.py"},
    "SubElement": {"formats/junit.py"},
    "writerows": {"formats/csv.py"},
}
"""What could send a terminal, a page or a document the text of others, and where that is made harmless."""


def _ways(tree: ast.Module) -> Set[str]:
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {each.id for each in called if isinstance(each, ast.Name)}
    methods = {each.attr for each in called if isinstance(each, ast.Attribute)} & {"writerows"}
    return WAYS.keys() & (names | methods)


def test_modules_and_functions_stay_small() -> None:
    assert len(sources()) > 40
    assert {path: source.lines for path, source in sources().items() if source.lines > 700} == {}
    long = [f"{path}: {name}" for path, source in sources().items() for name, n in source.functions.items() if n >= 60]
    assert long == []


def test_a_class_name_exists_once() -> None:
    homes: dict[str, list[str]] = {}
    for path, source in sources().items():
        for name in source.classes:
            homes.setdefault(name, []).append(path)
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_foreign_libraries_are_imported_in_their_own_file_alone() -> None:
    homes = {
        "pynvml": {"machine/nvml.py"},
        "cupy": {"backends/cuda.py"},
        "nccl": {"backends/nccl/library.py"},
        "mpi4py": {"backends/mpi/group.py"},
        "torch": {"backends/torch/distributed.py"},
        "pandas": {"formats/frame.py"},
    }
    assert {name: {path for path, source in sources().items() if name in source.imports} for name in homes} == homes


def test_text_has_one_way_into_each_output() -> None:
    assert {name: {path for path, source in sources().items() if name in source.ways} for name in WAYS} == WAYS


def test_a_group_of_one_needs_no_mpi() -> None:
    group = AloneGroup()
    assert group.gather("x") == ["x"]
    assert group.broadcast("x") == "x"
    assert group.split(0, 0) is group
    group.barrier()
    with pytest.raises(ValueError, match="has a value"):
        group.broadcast(None)

"""The newcomer test: what lies in a plug folder is listed there, and modules stay small."""

import ast
from pathlib import Path

import pytest

import gpubench
from gpubench.collectives.registry import COLLECTIVES
from gpubench.formats.registry import FORMATS
from gpubench.hardware.mpi.group import AloneGroup
from gpubench.profiles import all_profiles, folder
from gpubench.readers.registry import READERS, RESULT_READERS

PACKAGE = Path(gpubench.__file__).parent
SUPPORT = {
    "conditions": {"__init__", "catalogue", "checks", "ranking", "registry"},
    "collectives": {"__init__", "expected", "pattern", "record", "registry"},
    "formats": {
        "__init__",
        "blocks",
        "delivery",
        "frame",
        "lines",
        "machine_picture",
        "presentation",
        "presenter",
        "registry",
        "status_line",
        "tuner",
    },
    "readers/machines": {"__init__"},
    "readers/results": {"__init__", "history"},
}


def _modules_of_families() -> set[str]:
    """The modules that the registry of conditions imports families from."""
    tree = ast.parse((PACKAGE / "conditions" / "registry.py").read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[2] for name in imported if name.startswith("gpubench.conditions.")} - {"definition"}


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
    packages = {path.parent.name for path in here.glob("*/__init__.py")} - {
        "text",
        "web",
        "definition",
    }
    modules = {path.stem for path in here.glob("*.py")} | packages
    modules -= SUPPORT[plugs]
    assert modules
    assert modules == names


def test_every_profile_is_found() -> None:
    assert {profile.name for profile in all_profiles()} == {path.stem for path in folder().glob("*.toml")}


def test_modules_and_functions_stay_small() -> None:
    paths = list(PACKAGE.rglob("*.py"))
    assert len(paths) > 40
    for path in paths:
        text = path.read_text()
        assert len(text.splitlines()) <= 700, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{path}: {node.name}"


def test_a_class_name_exists_once() -> None:
    homes: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_foreign_libraries_are_imported_in_their_own_file_alone() -> None:
    homes = {
        "pynvml": {"hardware/node/nvml.py"},
        "cupy": {"hardware/cuda.py", "hardware/nccl/backend.py"},
        "mpi4py": {"hardware/mpi/group.py"},
        "torch": {"hardware/torch/distributed.py"},
        "pandas": {"formats/frame.py"},
    }
    found: dict[str, set[str]] = {name: set() for name in homes}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            roots = (
                [alias.name.split(".")[0] for alias in node.names]
                if isinstance(node, ast.Import)
                else [(node.module or "").split(".")[0]]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in set(roots) & set(homes):
                found[name].add(str(path.relative_to(PACKAGE)))
    assert found == homes


def test_text_has_one_way_into_each_output() -> None:
    """What could send a terminal, a page or a document the text of others is called where that is made harmless."""
    homes = {
        "print": {"formats/delivery.py", "cli/app.py"},
        "Text": {"formats/lines.py"},
        "escape": {"formats/machine_picture.py"},
        "SubElement": {"formats/junit.py"},
        "writerows": {"formats/csv.py"},
    }
    found: dict[str, list[str]] = {name: [] for name in homes}
    for path in PACKAGE.rglob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        own = {each.id for each in calls if isinstance(each, ast.Name)}
        own |= {each.attr for each in calls if isinstance(each, ast.Attribute) and each.attr == "writerows"}
        for name in own & set(homes):
            found[name].append(str(path.relative_to(PACKAGE)))
    assert {name: set(paths) for name, paths in found.items()} == homes


def test_a_group_of_one_needs_no_mpi() -> None:
    group = AloneGroup()
    assert group.gather("x") == ["x"]
    assert group.broadcast("x") == "x"
    assert group.split(0, 0) is group
    group.barrier()
    with pytest.raises(ValueError, match="has a value"):
        group.broadcast(None)


def test_two_mpi_jobs_at_most_run_beside_each_other(request: pytest.FixtureRequest) -> None:
    """pytest-xdist knows a group by the end of names; a pytest that does not keep that separates tests silently."""
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("one process runs all tests, or tests are spread without their groups")
    names = [item.nodeid for item in request.session.items if item.get_closest_marker("mpi")]
    assert [name for name in names if not name.endswith(("@mpi", "@mpi-with-time"))] == []

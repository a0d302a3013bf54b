import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpubench.backends.mpi.group import AloneGroup
from gpubench.backends.nccl import backend as nccl
from gpubench.backends.registry import BACKENDS, BackendSetup, backend_named, default_backend
from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.model.terms.operation import BACKEND_NAMES, Allocator, DataType


def setup(**given: Any) -> BackendSetup:
    return BackendSetup(group=cast("Any", AloneGroup()), ranks_on_node=2, **given)


def test_backends_are_found_by_name() -> None:
    assert [backend_named(each.name) for each in BACKENDS] == list(BACKENDS)
    assert {default_backend(gpus=True).name, default_backend(gpus=False).name} == {"nccl", "host"}
    assert default_backend(gpus=True).needs_gpus
    assert not default_backend(gpus=False).needs_gpus


def test_every_backend_has_a_name_for_rows_and_a_line_in_the_docs_in_the_same_order() -> None:
    names = [each.name for each in BACKENDS]
    assert names == list(BACKEND_NAMES)
    text = (Path(__file__).parents[2] / "docs/reference/backends.md").read_text()
    lines = text.partition("| backend | data | needs |")[2].partition("\n\n")[0]
    assert re.findall(r"`([\w:]+)`", "\n".join(line.split("|")[1] for line in lines.splitlines()[2:])) == names


def test_an_unknown_backend_is_refused_and_not_taken_for_another() -> None:
    with pytest.raises(UsageError, match="--backend 'ncl' is not known") as refused:
        backend_named("ncl")
    assert refused.value.expected.startswith("one of nccl, torch:nccl, ")


def test_the_nccl_backend_is_opened_on_its_gpu_and_can_be_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Opened:
        def __init__(self, *given: object) -> None:
            self.given = given

        def trouble(self) -> str:
            return "stuck"

        def abort(self) -> None:
            pass

    monkeypatch.setattr(nccl, "NcclBackend", Opened)
    answers: list[Any] = []
    progress = cast("Any", SimpleNamespace(answer_watchdog=lambda *given: answers.extend(given)))
    given = setup(progress=progress, device=cast("Any", 1), library=cast("Any", 2), allocator=Allocator.NCCL)
    opened = cast("Any", backend_named("nccl").open(given))
    assert opened.given == (given.group, 1, 2, Allocator.NCCL, progress)
    assert answers[0]() == "stuck"
    assert answers[1] == opened.abort


def test_the_nccl_backend_needs_a_gpu() -> None:
    with pytest.raises(CouldNotMeasureError, match="no usable GPU"):
        backend_named("nccl").open(setup(progress=cast("Any", None), library=cast("Any", 2)))


def test_types_are_checked_by_the_backend_that_reduces_them() -> None:
    backend_named("nccl").check_types([DataType.BFLOAT16], [])
    with pytest.raises(UsageError, match="--dtype bfloat16 with the host backend"):
        backend_named("host").check_types([DataType.BFLOAT16], [])
    backend_named("host").check_types([DataType.BFLOAT16], None)


def test_names_and_sizes_are_there_without_any_backend() -> None:
    seen = "import sys, gpubench.backends.registry; print([m for m in sys.modules if 'backends.' in m or 'numpy' in m])"
    printed = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True).stdout
    assert printed == "['gpubench.backends.registry']\n"

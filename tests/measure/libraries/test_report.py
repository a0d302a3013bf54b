"""The report of `gpubench topo --software`."""

from typing import Any

from msgspec.structs import replace

from gpubench.measure.libraries import HostLibraries, report_on_libraries
from gpubench.model.facts.process import (
    LOADER,
    MPI_LIB,
    NCCL_LIB,
    UCX_LIB,
    KernelModule,
    LibrariesFacts,
    LibraryFile,
    LibraryUser,
)
from gpubench.model.results.backends import LibraryRow
from gpubench.model.results.report import Report
from gpubench.model.terms.verdict import Finding, Origin, Verdict

WHEEL, SYSTEM = "/venv/nvidia/nccl/lib/libnccl.so.2", "/usr/lib/libnccl.so.2"
PIP = LibraryFile(library=NCCL_LIB, path=WHEEL, package="nvidia-nccl-cu13 2.28.9", version="2.28.9")
OLD = LibraryFile(library=NCCL_LIB, path=SYSTEM, version="2.28.3")
NCCL4PY = LibraryUser(name="nccl4py", version="0.6.0", purpose="gpubench --backend nccl", loads={NCCL_LIB: WHEEL})
TORCH = LibraryUser(name="torch", version="2.11.0", purpose="torch.distributed", loads={NCCL_LIB: WHEEL})
OTHERS = LibraryUser(name=LOADER, purpose="what the loader serves", loads={NCCL_LIB: SYSTEM})


def host(name: str = "node0", **values: Any) -> LibrariesFacts:
    return LibrariesFacts(host=name, python="/venv/bin/python", **values)


def report(*facts: LibrariesFacts, dma_buf: bool | None = None) -> Report:
    return report_on_libraries([HostLibraries(fact, dma_buf) for fact in facts], Origin.MEASURED)


def rows(found: Report) -> dict[str, LibraryRow]:
    return {row.library: row for row in found.rows(LibraryRow)}


def one(found: Report) -> Finding:
    (finding,) = found.findings
    return finding


def test_an_absent_library_has_a_row() -> None:
    found = rows(report(host(modules=(KernelModule(name="gdrdrv", loaded=False),))))
    absent = {name for name, row in found.items() if row.found is False}
    assert absent == {
        "NCCL",
        "MPI",
        "UCX",
        "NVSHMEM",
        "MSCCL++",
        "nccl4py",
        "CuPy",
        "torch",
        "mpi4py",
        "NIXL",
        "Mooncake",
        "gdrdrv",
    }
    assert found["dma-buf"].found is None
    assert found["dma-buf"].note == "CUDA did not report it"
    assert rows(report(host(), dma_buf=True))["dma-buf"].found is True


def test_two_nccl_versions_in_one_environment_warn() -> None:
    finding = one(report(host(files=(PIP, OLD), users=(NCCL4PY, TORCH, OTHERS))))
    assert (finding.id, finding.severity) == ("nccl-versions-differ", Verdict.WARN)
    assert finding.subject == "NCCL 2.28.3 and 2.28.9 on node0"
    assert finding.seen == "NCCL 2.28.9 for nccl4py 0.6.0, torch 2.11.0; 2.28.3 for other programs"
    assert finding.subjects == (WHEEL, SYSTEM)
    assert finding.next_command == f"gpubench allreduce --nccl-library {SYSTEM}"


def test_an_nccl_that_is_linked_into_torch_counts() -> None:
    torch = LibraryUser(name="torch", version="2.6.0", purpose="torch.distributed", inside={NCCL_LIB: "2.21.5"})
    found = report(host(files=(PIP,), users=(NCCL4PY, torch)))
    assert one(found).seen == "NCCL 2.28.9 for nccl4py 0.6.0; 2.21.5 for torch 2.6.0"
    assert "measurements with one do not apply to jobs with the other" in one(found).cause
    linked = [row for row in found.rows(LibraryRow) if row.note == "linked into torch"]
    assert [(row.library, row.version) for row in linked] == [(NCCL_LIB, "2.21.5")]


def test_hosts_of_a_job_that_load_other_versions_fail() -> None:
    older = LibraryFile(library=NCCL_LIB, path=WHEEL, version="2.27.3")
    nodes = [host(f"node{n}", files=(PIP,), users=(NCCL4PY,)) for n in range(3)]
    finding = one(report(*nodes, host("node3", files=(older,), users=(NCCL4PY,))))
    assert (finding.id, finding.severity) == ("nccl-versions-differ-between-hosts", Verdict.FAIL)
    assert finding.subjects == ("node3",)
    assert "nccl4py loads 2.27.3 on node3" in finding.seen


def test_mpi_reports_whether_it_was_built_for_gpus() -> None:
    for cuda, words in ((False, "not built for GPU memory"), (True, "built for GPU memory")):
        mpi = LibraryFile(library=MPI_LIB, path="/usr/lib/libmpi.so.40", version="Open MPI v4.1.6", cuda=cuda)
        row = rows(report(host(files=(mpi,))))[MPI_LIB]
        assert row.cuda is cuda
        assert (row.note or "").startswith(words)
        assert "--backend mpi tests each operation" in (row.note or "")


def test_a_library_that_does_not_load_warns_and_a_hanging_one_is_an_error() -> None:
    broken = LibraryFile(library=UCX_LIB, path="/opt/libucp.so.0", unread="libucs.so.0: cannot open shared object file")
    finding = one(report(host(files=(broken,))))
    assert (finding.id, finding.severity) == ("library-does-not-load", Verdict.WARN)
    assert finding.next_command == "ldd /opt/libucp.so.0"
    silent = report(host(failures={"nccl4py": "no answer within 30 s"}))
    assert (one(silent).id, silent.verdict) == ("libraries-unread", Verdict.ERROR)
    row = rows(silent)["nccl4py"]
    assert (row.found, row.note) == (None, "not read: no answer within 30 s")


def test_a_version_from_another_source_is_noted() -> None:
    named = LibraryFile(library=NCCL_LIB, path=WHEEL, package="nvidia-nccl-cu13 2.28.9", version="2.28.9", unread="no")
    assert rows(report(host(files=(named,))))[NCCL_LIB].note == "version from its package"


UCX = LibraryFile(library=UCX_LIB, path="/venv/libucx/lib/libucp.so.0", version="1.22.0", transports=("cma", "cuda"))


def test_two_ucx_versions_are_a_note_and_no_finding() -> None:
    other = LibraryFile(library=UCX_LIB, path="/usr/lib/libucp.so.0", version="1.20.1")
    unread = LibraryFile(library=UCX_LIB, path="/opt/libucp.so.0", version=None)
    found = report(host(files=(UCX, other, unread)))
    assert found.findings == ()
    notes = [row.note for row in found.rows(LibraryRow) if row.library == UCX_LIB]
    end = "a process that loads two may fail"
    assert notes == [f"also here: UCX 1.20.1; {end}", f"also here: UCX 1.22.0; {end}", None]
    assert rows(report(host(files=(UCX,))))[UCX_LIB].note is None


def test_a_ucx_without_modules_for_gpus_is_noted_if_its_modules_are_known() -> None:
    for file, note in (
        (replace(UCX, transports=("cma", "ib")), "no cuda module, which GPU memory needs"),
        (replace(UCX, transports=("rocm",)), None),
        (replace(UCX, transports=()), None),
    ):
        assert rows(report(host(files=(file,))))[UCX_LIB].note == note


def test_transfer_packages_have_a_row_with_their_plugins() -> None:
    nixl = LibraryUser(name="NIXL", version="1.5.1", note="nixl-cu13", transports=("GDS", "UCX"))
    found = rows(report(host(users=(nixl,))))
    assert (found["NIXL"].found, found["NIXL"].transports) == (True, ("GDS", "UCX"))
    assert (found["Mooncake"].found, found["Mooncake"].note) == (False, "not installed here")
    unread = rows(report(host(failures={"search": "no answer within 30 s"})))["NIXL"]
    assert (unread.found, unread.note) == (None, "not read: no answer within 30 s")


def test_several_variants_of_nixl_have_a_row_each() -> None:
    users = tuple(LibraryUser(name="NIXL", version="1.5.1", note=f"nixl-cu{cuda}") for cuda in (12, 13))
    found = report(host(users=users)).rows(LibraryRow)
    assert [row.note for row in found if row.library == "NIXL"] == ["nixl-cu12", "nixl-cu13"]


def test_the_folder_of_ucx_modules_is_named() -> None:
    ucx = LibraryFile(library=UCX_LIB, path="/opt/libucp.so.0", transports=("cuda",), modules="/opt/ucx")
    assert rows(report(host(files=(ucx,))))[UCX_LIB].note == "modules in /opt/ucx"

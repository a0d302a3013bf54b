"""Report the communication libraries on each host, and the Python packages that use them."""

from collections.abc import Iterator, Sequence

from msgspec import Struct, field

from gpubench.model.facts import process
from gpubench.model.results.backends import LibraryKind, LibraryRow
from gpubench.model.results.report import Report, Table
from gpubench.model.terms.ranks import DevicePlace
from gpubench.model.terms.units import group_by, shorten
from gpubench.model.terms.verdict import Cure, Finding, Origin, Verdict, worst_verdict

_FILES = (
    process.NCCL_LIB,
    process.RCCL_LIB,
    process.MPI_LIB,
    process.UCX_LIB,
    process.NVSHMEM_LIB,
    process.MSCCLPP_LIB,
)
_ALWAYS = (process.NCCL_LIB, process.MPI_LIB, process.UCX_LIB, process.NVSHMEM_LIB, process.MSCCLPP_LIB)
_PACKAGES = ("nccl4py", "CuPy", "torch", "mpi4py", process.NIXL, process.MOONCAKE)
_RDMA = "NCCL and UCX: RDMA into GPU memory"
_MODULE_USES = {
    "nvidia_peermem": f"{_RDMA}, if dma-buf is not available",
    "efa_nv_peermem": f"{_RDMA} by EFA, if dma-buf is not available",
    "gdrdrv": "GDRCopy: small messages of NCCL, UCX and NVSHMEM",
    "nvidia_fs": "GPUDirect Storage",
}
_NOT_FOUND = "no wheel of this environment contains it, and the dynamic loader does not find it"
_NOT_PROBED = "--backend mpi tests each operation"
_MOST_SUBJECTS = 4


class HostLibraries(Struct, frozen=True):
    """The libraries on one host. `dma_buf` is true if its kernel exports GPU memory as dma-buf, or None if unknown."""

    facts: process.LibrariesFacts
    dma_buf: bool | None = None


class _Copy(Struct, frozen=True):
    """One copy of NCCL on a host, and the programs that would load it."""

    version: str
    path: str
    users: Sequence[str] = field(default=())

    def __str__(self) -> str:
        return f"{self.version} for {', '.join(self.users) or 'none of the examined programs'}"


def report_on_libraries(hosts: Sequence[HostLibraries], origin: Origin) -> Report:
    """Report the libraries on every host, with findings if versions differ or a library could not be read.

    The verdict is SKIP at best if a host has neither NCCL nor RCCL.
    """
    rows = [row for host in hosts for row in _rows(host, origin)]
    findings = [
        finding
        for host in hosts
        for finding in (*_find_different_versions(host.facts), *_find_unread_libraries(host.facts))
    ]
    findings += _find_different_hosts([host.facts for host in hosts])
    complete = {row.node for row in rows if row.found and row.library in (process.NCCL_LIB, process.RCCL_LIB)}
    best = Verdict.PASS if {host.facts.host for host in hosts} <= complete else Verdict.SKIP
    verdict = worst_verdict([best, *(finding.severity for finding in findings)])
    sections = Table.group_by_section({LibraryRow: rows})
    return Report(verdict=verdict, complete=True, findings=tuple(findings), sections=sections, main=LibraryRow.section)


def _rows(host: HostLibraries, origin: Origin) -> Iterator[LibraryRow]:
    facts = host.facts
    by_library = group_by(facts.files, lambda file: file.library)
    for library in _FILES:
        for file in by_library.get(library, ()):
            yield _file_row(facts, file, origin)
        inside = [user for user in facts.users if library in user.inside]
        for user in inside:
            yield LibraryRow(
                node=facts.host,
                library=library,
                library_kind=LibraryKind.LIBRARY,
                found=True,
                version=user.inside[library] or None,
                path=user.path,
                used_by=[_user_text(user)],
                note=f"linked into {user.name}",
                origin=origin,
            )
        if library in _ALWAYS and not inside and library not in by_library:
            yield _absent_row(facts, library, LibraryKind.LIBRARY, origin)
    packages = group_by(facts.users, lambda user: user.name)
    for name in _PACKAGES:
        if name not in packages:
            yield _absent_row(facts, name, LibraryKind.PACKAGE, origin)
        for package in packages.get(name, ()):
            yield LibraryRow(
                node=facts.host,
                library=name,
                library_kind=LibraryKind.PACKAGE,
                found=True,
                version=package.version,
                path=package.path,
                used_by=[package.purpose],
                transports=package.transports,
                note="; ".join(filter(None, (package.note, package.unread))) or None,
                origin=origin,
            )
    yield from _kernel_rows(host, origin)


def _file_row(facts: process.LibrariesFacts, file: process.LibraryFile, origin: Origin) -> LibraryRow:
    notes = []
    if file.unread:
        notes.append(f"version from its {'package' if file.package else 'file name'}" if file.version else file.unread)
    if file.library == process.MPI_LIB and file.cuda is not None:
        notes.append(f"{'built' if file.cuda else 'not built'} for GPU memory; {_NOT_PROBED}")
    if file.library == process.UCX_LIB:
        notes += _ucx_notes(file, facts)
    return LibraryRow(
        node=facts.host,
        library=file.library,
        library_kind=LibraryKind.LIBRARY,
        found=True,
        version=file.version,
        path=file.path,
        package=file.package,
        used_by=[_user_text(user) for user in facts.users if user.loads.get(file.library) == file.path],
        cuda=file.cuda,
        transports=file.transports,
        note="; ".join(notes) or None,
        origin=origin,
    )


def _ucx_notes(file: process.LibraryFile, facts: process.LibrariesFacts) -> Iterator[str]:
    if file.modules:
        yield f"modules in {file.modules}"
    if file.transports and not {"cuda", "rocm", "ze"}.intersection(file.transports):
        yield "no cuda module, which GPU memory needs"
    versions = {other.version for other in facts.files if other.library == process.UCX_LIB and other.version}
    others = sorted(versions - {file.version})
    if file.version and others:
        yield f"also here: UCX {' and '.join(others)}; a process that loads two may fail"


def _kernel_rows(host: HostLibraries, origin: Origin) -> Iterator[LibraryRow]:
    yield LibraryRow(
        node=host.facts.host,
        library="dma-buf",
        library_kind=LibraryKind.KERNEL,
        found=host.dma_buf,
        used_by=[f"{_RDMA}, if a NIC's driver supports it"],
        note="CUDA did not report it" if host.dma_buf is None else None,
        origin=origin,
    )
    for module in host.facts.modules:
        yield LibraryRow(
            node=host.facts.host,
            library=module.name,
            library_kind=LibraryKind.KERNEL,
            found=module.loaded,
            version=module.version,
            used_by=[_MODULE_USES[module.name]] if module.name in _MODULE_USES else [],
            note=None if module.loaded else "not loaded",
            origin=origin,
        )


def _absent_row(facts: process.LibrariesFacts, name: str, kind: LibraryKind, origin: Origin) -> LibraryRow:
    failed = facts.failures.get(name.lower()) or facts.failures.get("search")
    note = f"not read: {failed}" if failed else _NOT_FOUND if kind is LibraryKind.LIBRARY else "not installed here"
    return LibraryRow(
        node=facts.host, library=name, library_kind=kind, found=None if failed else False, note=note, origin=origin
    )


def _user_text(user: process.LibraryUser) -> str:
    return f"{user.label} ({user.purpose})"


def _copies(facts: process.LibrariesFacts) -> Iterator[_Copy]:
    for file in facts.files:
        if file.library == process.NCCL_LIB and file.version is not None:
            users = [user.label for user in facts.users if user.loads.get(process.NCCL_LIB) == file.path]
            yield _Copy(file.version, file.path, users)
    for user in facts.users:
        if user.inside.get(process.NCCL_LIB):
            yield _Copy(user.inside[process.NCCL_LIB], f"linked into {user.name}", [user.label])


def _find_different_versions(facts: process.LibrariesFacts) -> Iterator[Finding]:
    copies = list(_copies(facts))
    versions = sorted({copy.version for copy in copies})
    if len(versions) < 2:
        return
    are_used = len({copy.version for copy in copies if copy.users}) > 1
    other = next((copy.path for copy in reversed(copies) if copy.path.startswith("/")), "")
    yield Finding(
        id="nccl-versions-differ",
        severity=Verdict.WARN,
        subject=f"NCCL {' and '.join(versions)} on {facts.host}",
        subjects=tuple(copy.path for copy in copies),
        places=(DevicePlace(facts.host),),
        seen=f"NCCL {'; '.join(map(str, copies))}",
        expected="one NCCL version",
        cause="a wheel, the system and a framework each install one: "
        + (
            "measurements with one do not apply to jobs with the other"
            if are_used
            else "the program decides which one is loaded"
        ),
        cure=Cure.of(f"gpubench allreduce --nccl-library {other}" if other else "pip list | grep -i nccl"),
    )


def _find_different_hosts(hosts: Sequence[process.LibrariesFacts]) -> Iterator[Finding]:
    by_user: dict[str, dict[str, list[str]]] = {}
    for facts in hosts:
        for copy in _copies(facts):
            for user in facts.users:
                if user.label in copy.users:
                    by_user.setdefault(user.name, {}).setdefault(copy.version, []).append(facts.host)
    for name, versions in by_user.items():
        if len(versions) > 1:
            few = min(versions.values(), key=len)
            yield Finding(
                id="nccl-versions-differ-between-hosts",
                severity=Verdict.FAIL,
                subject=shorten(few, _MOST_SUBJECTS),
                subjects=tuple(few),
                places=tuple(map(DevicePlace, few)),
                seen="; ".join(f"{name} loads {version} on {shorten(on, 4)}" for version, on in versions.items()),
                expected="the same version on every host, because two NCCL versions do not connect",
                cause="environments installed at different times, or different images",
                cure=Cure(comment="Use the same environment or image on every host."),
            )


def _find_unread_libraries(facts: process.LibrariesFacts) -> Iterator[Finding]:
    broken = [(file.path, file.unread) for file in facts.files if file.unread and file.version is None]
    broken += [(user.label, user.unread) for user in facts.users if user.unread]
    if broken:
        yield Finding(
            id="library-does-not-load",
            severity=Verdict.WARN,
            subject=shorten([name for name, _ in broken], _MOST_SUBJECTS),
            subjects=tuple(name for name, _ in broken),
            places=(DevicePlace(facts.host),),
            seen=broken[0][1],
            expected="a library that loads and reports its version",
            cause="a library that it needs is missing or has another version",
            cure=Cure.of(f"ldd {broken[0][0]}" if broken[0][0].startswith("/") else "pip check"),
        )
    if facts.failures:
        names = sorted(facts.failures)
        yield Finding(
            id="libraries-unread",
            severity=Verdict.ERROR,
            subject=f"{', '.join(names)} on {facts.host}",
            subjects=tuple(names),
            places=(DevicePlace(facts.host),),
            seen=facts.failures[names[0]],
            expected="an answer from every part within the time-out",
            cause="an import that hangs or crashes, or a file system that does not answer",
            cure=Cure.of(
                "python -X importtime -c 'import cupy'", comment="It shows where the import waits. Or use --timeout 60."
            ),
        )

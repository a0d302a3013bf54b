"""Which pairs fulfil --require-path, and which hardware makes it wrong usage."""

import pytest

from gpubench.model.facts.snapshot import NicKind
from gpubench.model.paths.transport import parse_transport
from gpubench.model.results.report import Report
from gpubench.model.results.required_path import ANY_RDMA, TakenPath, require_paths
from gpubench.model.terms.options import RequiredPath
from gpubench.model.terms.verdict import HOST_STAGED, Cure, Finding, Verdict

YES, NO, UNPROVEN, NOT_JUDGED = "yes", "no", "unproven", "not judged"
IB, ROCE, EFA = NicKind.INFINIBAND, NicKind.ROCE, NicKind.EFA


def inside(transport: str, path_class: str | None, staged: bool | None) -> TakenPath:
    return TakenPath("0 → 1", (0, 1), True, (transport,) if transport else (), path_class, staged)


def between(transport: str, *kinds: NicKind, path_class: str | None = "NET") -> TakenPath:
    transports = (transport,) if transport else ()
    return TakenPath("0 → 8", (0, 8), False, transports, path_class, networks=frozenset(kinds))


def judge(path: TakenPath, kind: str) -> str:
    required = RequiredPath(kind)
    if not path.is_judged_by(required):
        return NOT_JUDGED
    return {True: YES, False: NO, None: UNPROVEN}[path.fulfils(required)]


@pytest.mark.parametrize(
    ("transport", "path_class", "staged", "nvlink", "p2p"),
    [
        ("P2P/CUMEM", "NV18", False, YES, YES),
        ("P2P/CUMEM", "NVL", False, YES, YES),
        ("P2P/CUMEM", "PIX", False, NO, YES),
        ("P2P/CUMEM", None, False, UNPROVEN, YES),
        ("P2P/CUMEM", "?", False, UNPROVEN, YES),
        ("P2P/CUMEM", "NV18", None, UNPROVEN, UNPROVEN),
        ("P2P/indirect", "SYS", False, YES, YES),
        ("P2P/MNNVL", None, False, YES, YES),
        ("NVLS", None, False, YES, YES),
        ("symmetric memory", "NV18", False, YES, YES),
        ("SHM/direct", "NV18", True, NO, NO),
        ("NET/Socket/0", "NV18", True, NO, NO),
        ("NET/IB/0/GDRDMA", "NV18", False, NO, NO),
        ("cuda_ipc/cuda", "NV18", False, YES, YES),
        ("cuda_ipc/cuda", "PHB", False, NO, YES),
        ("rc_mlx5/mlx5_0:1", "NV18", False, NO, NO),
        ("tcp/lo", "NV18", True, NO, NO),
        ("", "NV4", False, YES, YES),
        ("", "PXB", False, NO, YES),
        ("", "NV4", True, NO, NO),
        ("", "NV4", None, UNPROVEN, UNPROVEN),
        ("a new transport", "NV4", None, UNPROVEN, UNPROVEN),
    ],
)
def test_a_pair_inside_a_node_fulfils_only_what_is_proven(
    transport: str,
    path_class: str | None,
    staged: bool | None,
    nvlink: str,
    p2p: str,
) -> None:
    path = inside(transport, path_class, staged)
    assert (judge(path, "nvlink"), judge(path, "p2p")) == (nvlink, p2p)
    assert {judge(path, kind) for kind in ("ib", "roce", "efa", "mnnvl")} == {NOT_JUDGED}


@pytest.mark.parametrize(
    ("path", "answers"),
    [
        (between("NET/IB/0/GDRDMA", IB), (YES, NO, NO)),
        (between("NET/IB/0", IB), (YES, NO, NO)),
        (between("NET/IB/0/GDRDMA", ROCE), (NO, YES, NO)),
        (between("NET/IB/0/GDRDMA", IB, ROCE), (UNPROVEN, UNPROVEN, NO)),
        (between("NET/IB/0/GDRDMA"), (UNPROVEN, UNPROVEN, NO)),
        (between("NET/IBext_v8/0/GDRDMA", IB), (YES, NO, NO)),
        (between("NET/gIB/0/GDRDMA", ROCE), (NO, YES, NO)),
        (between("COLLNET/SHARP/0/GDRDMA", IB), (YES, NO, NO)),
        (between("NET/AWS Libfabric/0/GDRDMA", EFA), (NO, NO, YES)),
        (between("NET/Libfabric/0/GDRDMA", EFA), (NO, NO, YES)),
        (between("NET/AWS Libfabric/0", EFA), (UNPROVEN, UNPROVEN, UNPROVEN)),
        (between("NET/Socket/0", IB), (NO, NO, NO)),
        (between("rc_mlx5/mlx5_0:1"), (UNPROVEN, UNPROVEN, NO)),
        (between("srd/rdmap0:1"), (NO, NO, YES)),
        (between("tcp/eth0"), (NO, NO, NO)),
        (between("cuda_ipc/cuda"), (NOT_JUDGED, NOT_JUDGED, NOT_JUDGED)),
        (between("NET/FasTrak/0", ROCE), (UNPROVEN, UNPROVEN, UNPROVEN)),
        (between(ANY_RDMA, IB), (YES, NO, NO)),
        (between("", IB), (UNPROVEN, UNPROVEN, UNPROVEN)),
        (between("P2P/MNNVL", IB, path_class="P2P/MNNVL"), (NOT_JUDGED, NOT_JUDGED, NOT_JUDGED)),
    ],
)
def test_a_pair_between_nodes_fulfils_only_its_own_network(path: TakenPath, answers: tuple[str, ...]) -> None:
    assert tuple(judge(path, kind) for kind in ("ib", "roce", "efa")) == answers
    assert judge(path, "nvlink") == judge(path, "p2p") == NOT_JUDGED


def test_only_pairs_in_one_nvlink_domain_owe_mnnvl() -> None:
    assert judge(between("P2P/MNNVL", path_class="P2P/MNNVL"), "mnnvl") == YES
    assert judge(between("NET/IB/0/GDRDMA", IB, path_class="P2P/MNNVL"), "mnnvl") == NO
    assert judge(between("NET/IB/0/GDRDMA", IB), "mnnvl") == NOT_JUDGED
    assert judge(between("NET/IB/0/GDRDMA", IB, path_class=None), "mnnvl") == UNPROVEN


def test_a_pair_whose_node_is_unknown_is_not_proven_to_be_inside() -> None:
    path = TakenPath("0 → 8", (0, 8), None, ("NET/Socket/0",), None, host_staged=True)
    assert judge(path, "nvlink") == UNPROVEN
    assert judge(path, "ib") == NO


def test_one_other_transport_of_a_pair_is_another_path() -> None:
    path = TakenPath("0 → 1", (0, 1), True, ("P2P/CUMEM", "SHM/direct"), "NV18", host_staged=True)
    assert judge(path, "nvlink") == NO


def findings(*paths: TakenPath, required: str = "nvlink", gap: str = "", known: tuple[Finding, ...] = ()) -> Report:
    report = Report(verdict=Verdict.PASS, complete=True, findings=known)
    return require_paths(report, tuple(map(RequiredPath, required.split(","))), paths, gap=gap)


DIRECT, STAGED, OPEN = (inside("P2P/CUMEM", "NV18", False), inside("SHM/direct", "NV18", True), inside("", None, None))


def test_the_finding_names_the_pairs_and_counts_each_once() -> None:
    other = TakenPath("1 → 0", (1, 0), True, ("P2P/CUMEM",), "NV18", host_staged=False)
    report = findings(DIRECT, STAGED, other)
    (found,) = report.findings
    assert (report.verdict, found.severity, found.id) == (Verdict.FAIL, Verdict.FAIL, "path-required")
    assert found.subject == "1 of 2 pairs used a path other than nvlink: 0 → 1 SHM/direct"


@pytest.mark.parametrize(
    ("paths", "gap", "text"),
    [
        ([OPEN], "", "1 of 1 pair not proven to use nvlink: 0 → 1 unknown path"),
        ([DIRECT], "the log is cut", "nvlink not proven: the log is cut"),
        ([], "", "nvlink not proven: no pair of this run can take that path"),
    ],
)
def test_missing_evidence_is_an_error_and_never_a_pass(paths: list[TakenPath], gap: str, text: str) -> None:
    report = findings(*paths, gap=gap)
    assert report.verdict is Verdict.ERROR
    assert report.findings[0].subject == text


def test_each_requirement_is_judged_for_its_own_pairs() -> None:
    assert findings(DIRECT, between("NET/IB/0/GDRDMA", IB), required="nvlink,ib").verdict is Verdict.PASS
    (found,) = findings(DIRECT, between("NET/Socket/0", IB), required="nvlink,ib").findings
    assert found.subject == "1 of 1 pair used a path other than ib: 0 → 8 NET/Socket/0"


def test_another_network_is_named_and_a_transport_of_both_ends_once() -> None:
    twice = TakenPath("1 → 2", (1, 2), False, ("NET/IB/GDRDMA", "NET/IB/GDRDMA"), "NET", networks=frozenset({ROCE}))
    (found,) = findings(twice, required="ib").findings
    assert found.subject == "1 of 1 pair used a path other than ib: 1 → 2 NET/IB/GDRDMA (RoCE)"


def test_the_cause_comes_from_the_finding_about_the_same_path() -> None:
    def staged(seen: str, cause: str) -> Finding:
        return Finding(HOST_STAGED, Verdict.FAIL, "pairs", seen, "", cause, Cure.of(f"unset {cause}"))

    known = staged("NET/Socket/0 through host memory", "NCCL_NET"), staged("SHM/direct through host memory", "P2P")
    (found, *_) = findings(STAGED, known=known).findings
    assert (found.cause, found.next_command) == ("P2P", "unset P2P")
    (found, *_) = findings(between("NET/IB/0", ROCE), required="ib", known=(staged("NET/IB/0", "GDR"),)).findings
    assert found.cause == ""  # A reason for host memory does not explain another link layer


def test_the_transports_of_the_table_are_names_that_nccl_logs() -> None:
    for name in ("P2P/CUMEM", "SHM/direct", "NET/IB/0/GDRDMA", "NET/AWS Libfabric/0", "COLLNET/SHARP/0/GDRDMA"):
        assert parse_transport(name).name == name

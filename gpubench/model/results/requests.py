"""Requests to NCCL that changed nothing: registered buffers, policies and caps, held against what its log names.

Which collectives take them is read in NCCL 2.30.7: ce_coll.cc (ncclCeImplemented), sym_kernels.cc and enqueue.cc
(ncclGetAlgoInfo).
"""

from collections.abc import Iterator, Mapping, Sequence

from gpubench.model.results.report import CollectiveRow
from gpubench.model.terms.settings import (
    AGAIN,
    CTA_POLICY,
    MAX_CTAS,
    REGISTER,
    CtaPolicy,
    NcclSetting,
    Registration,
    first_time,
    taken_name,
)
from gpubench.model.terms.units import counted, grouped
from gpubench.model.terms.verdict import Finding, Verdict

WITHOUT_EFFECT = "request-without-effect"
"""The finding on a request that NCCL took no notice of."""

_BY_COPY_ENGINE = ("COPY_ENGINE", "HIERARCHICAL_CE")
_IN_WINDOWS = ("SYMMETRIC", *_BY_COPY_ENGINE)
_NVLS = "NVLS"
_COPIED = ("allgather", "alltoall", "gather", "scatter")
_REDUCED_IN_WINDOWS = ("allreduce", "allgather", "reducescatter")
_EFFICIENT = ("allgather", "reducescatter")
_GAIN = 0.9  # Of the usual time: alltoall of 16 MiB on an H100 took 0.51 of it in windows, 1.00 repeated

_NO_WINDOW = (
    "NCCL gave no window: that takes cuMem (NCCL_CUMEM_ENABLE), NCCL_WIN_ENABLE, and memory that all ranks reach by "
    "load and store"
)


def without_effect(rows: Sequence[CollectiveRow]) -> tuple[Finding, ...]:
    """A finding for each request of a sweep that had no effect; none where NCCL's log was not heard."""
    own = [row for row in rows if row.setting is None]
    usual = [row for row in rows if row.setting in (None, AGAIN)]
    if not any(row.algorithm or row.transport for row in own):
        return ()
    found = []
    for name, way in grouped(rows, lambda row: first_time(row.setting)).items():
        for request, reason in _ineffective_requests(NcclSetting.of(name), own, usual, way):
            found.append(
                Finding(
                    id=WITHOUT_EFFECT,
                    severity=Verdict.WARN,
                    subject=f"--{request} in {own[0].collective}",
                    seen=f"{name}: NCCL took {_taken(way)}, by its own choice {_taken(own)}",
                    expected="another algorithm, kernel or number of channels at one size at least",
                    cause=reason,
                    next_command=f"leave --{request.partition(' ')[0]} out",
                )
            )
    return tuple(found)


def _ineffective_requests(
    setting: NcclSetting, own: Sequence[CollectiveRow], usual: Sequence[CollectiveRow], way: Sequence[CollectiveRow]
) -> Iterator[tuple[str, str]]:
    algorithms = {row.algorithm for row in way}
    collective = own[0].collective
    asked = setting.requests
    unnamed = algorithms.isdisjoint(_IN_WINDOWS) and not _is_faster(way, usual)
    if asked.get(REGISTER) == Registration.SYMMETRIC and unnamed:
        yield f"{REGISTER} {Registration.SYMMETRIC}", _why_no_windows(collective, way, asked)
    if asked.get(REGISTER) == Registration.USER and not any(row.registered for row in way):
        yield f"{REGISTER} {Registration.USER}", "NCCL gave no handle: NCCL_LOCAL_REGISTER is 0, or it copies by memcpy"
    if asked.get(CTA_POLICY) == CtaPolicy.ZERO and algorithms.isdisjoint(_BY_COPY_ENGINE):
        yield f"{CTA_POLICY} {CtaPolicy.ZERO}", _why_not_copied(collective, way, asked)
    efficient = collective in _EFFICIENT and _NVLS in algorithms and not _all_took(own, _NVLS)
    if asked.get(CTA_POLICY) == CtaPolicy.EFFICIENCY and not efficient:
        yield f"{CTA_POLICY} {CtaPolicy.EFFICIENCY}", _why_not_efficient(collective, own, asked)
    if MAX_CTAS in asked:
        most = max((row.channels for row in own if row.channels is not None), default=None)
        if most is not None and most <= int(asked[MAX_CTAS]):
            yield f"{MAX_CTAS} {asked[MAX_CTAS]}", f"NCCL uses {counted(most, 'channel')} at most by its own choice"


def _is_faster(way: Sequence[CollectiveRow], usual: Sequence[CollectiveRow]) -> bool:
    """True where the largest size gains: sends between windows skip a copy, and NCCL's log names no kernel for them."""
    largest = max((row.size_bytes for row in way), default=0)
    times = grouped([row for row in usual if row.size_bytes == largest], lambda row: row.placement)
    at_most = {placement: _GAIN * min(row.time_us for row in rows) for placement, rows in times.items()}
    return any(row.size_bytes == largest and row.time_us < at_most.get(row.placement, 0) for row in way)


def _why_no_windows(collective: str, way: Sequence[CollectiveRow], asked: Mapping[str, str]) -> str:
    if not any(row.registered for row in way):
        return _NO_WINDOW
    if asked.get(CTA_POLICY) == CtaPolicy.ZERO and collective in _COPIED:
        return "the driver is older than CUDA 12.5, or not all ranks reach each other by load and store"
    if collective not in _REDUCED_IN_WINDOWS:
        return f"NCCL has symmetric kernels for {', '.join(_REDUCED_IN_WINDOWS)} alone"
    return "NCCL has no symmetric kernel for this type and reduction, or expects it to be slower at these sizes"


def _why_not_copied(collective: str, way: Sequence[CollectiveRow], asked: Mapping[str, str]) -> str:
    if collective not in _COPIED:
        return f"copy engines move {', '.join(_COPIED)} alone: they cannot reduce, and NCCL has no other without SMs"
    if asked.get(REGISTER) != Registration.SYMMETRIC:
        return "copy engines need windows of symmetric memory: add --register symmetric"
    return _why_no_windows(collective, way, asked)


def _why_not_efficient(collective: str, own: Sequence[CollectiveRow], asked: Mapping[str, str]) -> str:
    if collective not in _EFFICIENT:
        return f"NCCL follows it in {' and '.join(_EFFICIENT)} alone"
    if asked.get(REGISTER) != Registration.USER:
        return "it needs registered buffers: add --register user"
    if _all_took(own, _NVLS):
        return "NCCL takes NVLS by its own choice"
    return "it needs NVLS, multicast by NVSwitch, between all ranks of a node"


def _all_took(rows: Sequence[CollectiveRow], algorithm: str) -> bool:
    return all(row.algorithm == algorithm for row in rows)


def _taken(rows: Sequence[CollectiveRow]) -> str:
    """'ring/ll and ring/simple', the names of its log in the order of sizes."""
    names = dict.fromkeys(taken_name(row.algorithm, row.protocol) or "none that it names" for row in rows)
    return " and ".join(names)

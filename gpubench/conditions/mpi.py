"""MPI and UCX that do not know GPUs: they crash on GPU memory, or copy it through the host."""

from collections.abc import Iterator

from gpubench.conditions.cause import Cause, Family, Sighting, Unread, joined
from gpubench.conditions.circumstances import Circumstances
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.paths.evidence import Confidence
from gpubench.model.results.rows.causes import Effect

_OFF_VALUES = ("0", "false", "no", "n", "off")
_SWITCHES = (
    *("OMPI_MCA_opal_cuda_support", "MPICH_GPU_SUPPORT_ENABLED", "MPIR_CVAR_ENABLE_GPU", "MV2_USE_CUDA"),
    *("MVP_USE_CUDA", "MPICH_RDMA_ENABLED_CUDA"),
)
_UCX_TLS, _UCX_RDMA = "UCX_TLS", "UCX_IB_GPU_DIRECT_RDMA"


def _of_rank(around: Circumstances, facts: RankFacts, seen: str, confidence: Confidence) -> Sighting:
    return Sighting(
        subject=around.on(facts.node, f"rank {facts.rank}"),
        seen=seen,
        confidence=confidence,
        gpus=around.gpus_of_rank(facts),
    )


def _switched_off(around: Circumstances) -> Iterator[Sighting | Unread]:
    for facts in around.facts:
        off = [name for name in _SWITCHES if facts.environment.get(name, "").lower() in _OFF_VALUES]
        if off:
            seen = joined([f"{name}={facts.environment[name]}" for name in off])
            yield _of_rank(around, facts, seen, Confidence.PROVEN)
        elif facts.mpi is not None and facts.mpi.cuda_built and facts.mpi.cuda_aware is False:
            seen = f"{facts.mpi.version or 'MPI'} was built for CUDA, and has it off in this run"
            yield _of_rank(around, facts, seen, Confidence.LIKELY)


def _not_aware(around: Circumstances) -> Iterator[Sighting | Unread]:
    """Only a program that hands GPU memory to MPI has to care, so it is never more than weak."""
    for facts in around.facts:
        if facts.mpi is None:
            continue
        if facts.mpi.cuda_aware is False:
            seen = f"{facts.mpi.version or 'MPI'} says that it takes no GPU memory"
            yield _of_rank(around, facts, seen, Confidence.WEAK)
        elif facts.mpi.cuda_aware is None and "cuda_aware" in facts.mpi.unknown:
            yield Unread(around.on(facts.node, f"rank {facts.rank}"), facts.mpi.unknown["cuda_aware"])


def _ucx_tls(around: Circumstances) -> Iterator[Sighting | Unread]:
    for facts in around.facts:
        listed = facts.environment.get(_UCX_TLS, "")
        names = [each.strip() for each in listed.split(",") if each.strip()]
        allowed = listed.startswith("^") or any(each == "all" or each.startswith("cuda") for each in names)
        if names and not allowed:
            yield _of_rank(around, facts, f"{_UCX_TLS}={listed} has no cuda_copy and no cuda_ipc", Confidence.LIKELY)
        if facts.environment.get(_UCX_RDMA, "").lower() in _OFF_VALUES:
            yield _of_rank(around, facts, f"{_UCX_RDMA}={facts.environment[_UCX_RDMA]}", Confidence.LIKELY)


def _ucx_cuda(around: Circumstances) -> Iterator[Sighting | Unread]:
    for facts in around.facts:
        if facts.ucx_cuda is False:
            seen = "beside the loaded UCX lies no libuct_cuda.so"
            yield _of_rank(around, facts, seen, Confidence.LIKELY)


_EFFECTS = (Effect.APPLICATION,)
_OPEN_MPI = "https://www.open-mpi.org/faq/?category=runcuda"

MPI = Family(
    "mpi",
    "MPI and UCX",
    (
        Cause(
            id="mpi-cuda-off",
            title="MPI's GPU support is built and switched off (opal_cuda_support, MPICH_GPU_SUPPORT_ENABLED=0)",
            effects=_EFFECTS,
            detection="the variables of every rank; what the loaded library says it was built with and does now",
            settles="ompi_info --parsable --all | grep mpi_built_with_cuda_support",
            cure="export OMPI_MCA_opal_cuda_support=true (conda), MPICH_GPU_SUPPORT_ENABLED=1 (Cray), MV2_USE_CUDA=1",
            link=_OPEN_MPI,
            look=_switched_off,
            implies=("mpi-not-cuda-aware",),
        ),
        Cause(
            id="ucx-tls",
            title="UCX_TLS leaves out cuda_copy and cuda_ipc: GPU memory is staged, or the program crashes",
            effects=_EFFECTS,
            detection="UCX_TLS and UCX_IB_GPU_DIRECT_RDMA of every rank",
            settles="UCX_PROTO_INFO=y prints the protocol that UCX chose",
            cure="unset UCX_TLS, or add cuda_copy,cuda_ipc; unset UCX_IB_GPU_DIRECT_RDMA",
            link="https://github.com/openucx/ucx/issues/10929",
            look=_ucx_tls,
        ),
        Cause(
            id="ucx-without-cuda",
            title="UCX was built without CUDA (ucx_info -d shows no cuda)",
            effects=_EFFECTS,
            detection="libuct_cuda.so beside the UCX that a rank has loaded",
            settles="ucx_info -v; ucx_info -d | grep cuda",
            cure="install UCX built --with-cuda, or the package ucx-cuda",
            link="https://github.com/openucx/ucx/issues/3156",
            look=_ucx_cuda,
        ),
        Cause(
            id="mpi-not-cuda-aware",
            title="MPI is not CUDA-aware: GPU buffers crash it, or are copied through the host",
            seen_as=("mpi_built_with_cuda_support:value:false", "Segmentation fault: address not mapped to object"),
            effects=_EFFECTS,
            detection="MPIX_Query_cuda_support or MPIX_GPU_query_support of the loaded library",
            settles="ompi_info --parsable --all | grep mpi_built_with_cuda_support; mpichversion",
            cure="an MPI built with CUDA, for programs that hand it GPU memory; NCCL needs none",
            link=_OPEN_MPI,
            look=_not_aware,
        ),
    ),
)

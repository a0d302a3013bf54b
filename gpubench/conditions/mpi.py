"""MPI, UCX and programs that copy GPU memory through the host, or crash on it."""

from itertools import permutations

from gpubench.conditions.definition.circumstances import VERIFIED_COPIES, Circumstances
from gpubench.conditions.definition.condition import (
    Condition,
    Family,
    Found,
    Sighting,
    joined,
    of_every_rank,
    of_ranks,
    unread,
)
from gpubench.model.facts.process import MpiSupport, RankFacts
from gpubench.model.paths.transport import Confidence
from gpubench.model.paths.wiring import Wiring
from gpubench.model.terms.units import counted
from gpubench.model.terms.verdict import Cure, Finding, Verdict

_OFF_VALUES = ("0", "false", "no", "n", "off")
_SWITCHES = (
    *("OMPI_MCA_opal_cuda_support", "MPICH_GPU_SUPPORT_ENABLED", "MPIR_CVAR_ENABLE_GPU", "MV2_USE_CUDA"),
    *("MVP_USE_CUDA", "MPICH_RDMA_ENABLED_CUDA"),
)
_LLAMA, _LLAMA_SWITCH = "GGML_CUDA_", "GGML_CUDA_P2P"
_UCX_TLS, _UCX_RDMA = "UCX_TLS", "UCX_IB_GPU_DIRECT_RDMA"


def _switched_off(run: Circumstances) -> Found:
    for facts in run.facts:
        off = [name for name in _SWITCHES if facts.environment.get(name, "").lower() in _OFF_VALUES]
        if off:
            yield of_ranks(run, [facts], joined(f"{name}={facts.environment[name]}" for name in off))
        elif facts.mpi is not None and facts.mpi.cuda_built and facts.mpi.cuda_aware is False:
            seen = f"{facts.mpi.version or 'MPI'} was built for CUDA, and has it off in this run"
            yield of_ranks(run, [facts], seen, Confidence.LIKELY)


def _not_aware(run: Circumstances) -> Found:
    """What operations on GPU memory did, else what the library says; weak, as few programs hand GPU memory to MPI."""
    if run.mpi_support is not None:
        yield from _tried(run.mpi_support)
        return
    for facts in run.facts:
        if facts.mpi is None:
            continue
        if facts.mpi.cuda_aware is False:
            seen = f"{facts.mpi.version or 'MPI'} says that it takes no GPU memory"
            yield of_ranks(run, [facts], seen, Confidence.WEAK)
        elif facts.mpi.cuda_aware is None:
            yield from unread(run.on(facts.node, f"rank {facts.rank}"), facts.mpi.unknown, "cuda_aware")


def _tried(support: MpiSupport) -> Found:
    failing, working = support.failing, support.working
    if not failing:
        return
    first = support.asked if support.asked in failing else failing[0]
    taken = f"; {', '.join(working)} {'work' if len(working) > 1 else 'works'}" if working else ""
    others = len(failing) - 1
    more = f"; {counted(others, 'other operation')} fail{'s' * (others == 1)} too" if others else ""
    yield Sighting(
        subject=support.library,
        seen=f"{support.why_not(first)}{more}{taken}",
        severity=Verdict.WARN if support.works(support.asked) else Verdict.FAIL,
        expected="GPU buffers sent and received like host buffers",
        likely=f"MPI, or the UCX it uses, was built without CUDA; the library reports: {_words(support)}",
    )


def _words(support: MpiSupport) -> str:
    return "; ".join(f"{name} {value}" for name, value in support.claims.items()) or "nothing"


def on_support(support: MpiSupport) -> tuple[Finding, ...]:
    """The finding on an MPI that was handed GPU memory, where it cannot take it in every operation."""
    return tuple(NOT_CUDA_AWARE.findings(Circumstances(wiring=Wiring([], {}), mpi_support=support)))


def _ucx_tls(run: Circumstances) -> Found:
    for facts in run.facts:
        listed = facts.environment.get(_UCX_TLS, "")
        names = [each.strip() for each in listed.split(",") if each.strip()]
        allowed = listed.startswith("^") or any(each == "all" or each.startswith("cuda") for each in names)
        if names and not allowed:
            yield of_ranks(
                run, [facts], f"{_UCX_TLS}={listed} includes neither cuda_copy nor cuda_ipc", Confidence.LIKELY
            )
        if facts.environment.get(_UCX_RDMA, "").lower() in _OFF_VALUES:
            yield of_ranks(run, [facts], f"{_UCX_RDMA}={facts.environment[_UCX_RDMA]}", Confidence.LIKELY)


def _ucx_cuda(facts: RankFacts) -> str:
    return "the loaded UCX has no libuct_cuda.so" if facts.ucx_cuda is False else ""


def _not_enabled(run: Circumstances) -> Found:
    """llama.cpp without its peer access, which newer versions leave off unless asked: weak, the version is unknown."""
    for facts in run.facts:
        set_up = [name for name in facts.environment if name.startswith(_LLAMA) and name != _LLAMA_SWITCH]
        if set_up and not facts.environment.get(_LLAMA_SWITCH) and _has_peer_access(run, facts.node):
            seen = f"{joined(set_up)} is set but {_LLAMA_SWITCH} is not, although peer access is possible"
            yield of_ranks(run, [facts], seen, Confidence.WEAK)


def _has_peer_access(run: Circumstances, node: int) -> bool:
    pairs = permutations(sorted(run.gpus_of(node)), 2)
    return any(run.wiring.peer_access(pair).possible for pair in pairs)


_OPEN_MPI = "https://www.open-mpi.org/faq/?category=runcuda"

NOT_CUDA_AWARE = Condition(
    id="mpi-not-cuda-aware",
    title="MPI is not CUDA-aware: GPU buffers crash it, or are copied through the host",
    settles="gpubench allreduce --backend mpi; "
    "ompi_info --parsable --all | grep mpi_built_with_cuda_support; mpichversion",
    cure=Cure.of(
        "ompi_info --parsable --all | grep mpi_built_with_cuda_support",
        comment="Use an MPI built with CUDA for programs that pass it GPU memory; NCCL does not need one.",
    ),
    link=_OPEN_MPI,
    look=_not_aware,
)

MPI = Family.of(
    "mpi",
    "MPI, UCX and other programs",
    Condition(
        id="mpi-cuda-off",
        title="MPI's GPU support is built in but switched off (opal_cuda_support, MPICH_GPU_SUPPORT_ENABLED=0)",
        settles="ompi_info --parsable --all | grep mpi_built_with_cuda_support",
        cure=Cure(
            comment="OMPI_MCA_opal_cuda_support=true gpubench allreduce --backend mpi. Keep the setting if "
            "the data are right. It is Open MPI's (conda); Cray: MPICH_GPU_SUPPORT_ENABLED=1, "
            "MVAPICH: MV2_USE_CUDA=1."
        ),
        link="https://github.com/conda-forge/openmpi-feedstock/issues/83",
        look=_switched_off,
        implies=("mpi-not-cuda-aware",),
    ),
    Condition(
        id="ucx-tls",
        title="UCX_TLS does not include cuda_copy and cuda_ipc: GPU memory is staged, or the program crashes",
        settles="UCX_PROTO_INFO=y prints the protocol that UCX chose",
        cure=Cure.of(
            f"{VERIFIED_COPIES} && unset UCX_TLS UCX_IB_GPU_DIRECT_RDMA",
            comment="Or add cuda_copy,cuda_ipc to UCX_TLS.",
        ),
        link="https://github.com/openucx/ucx/issues/10929",
        look=_ucx_tls,
    ),
    Condition(
        id="ucx-without-cuda",
        title="UCX was built without CUDA (ucx_info -d shows no cuda)",
        settles="ucx_info -v; ucx_info -d | grep cuda",
        cure=Cure.of("ucx_info -d | grep cuda", comment="Install UCX built --with-cuda, or the package ucx-cuda."),
        link="https://github.com/openucx/ucx/issues/3156",
        look=of_every_rank(_ucx_cuda, Confidence.LIKELY),
    ),
    NOT_CUDA_AWARE,
    Condition(
        id="peer-access-not-enabled",
        title="Peer access is possible but the program never enables it (cudaDeviceEnablePeerAccess; llama.cpp "
        "without GGML_CUDA_P2P=1): cudaMemcpyPeer goes through host memory",
        settles="gpubench p2p: the bandwidth with peer access on against off shows the possible gain; "
        "nsys profile: `[CUDA memcpy Peer-to-Peer]` against Device-to-Host and Host-to-Device",
        cure=Cure.of(
            f"{VERIFIED_COPIES} && export GGML_CUDA_P2P=1",
            comment="Set it only if the copies are verified: on some machines the driver grants peer access "
            "that corrupts data. It is llama.cpp's; your own program calls "
            "cudaDeviceEnablePeerAccess.",
        ),
        link="https://github.com/ggml-org/llama.cpp/issues/21910",
        look=_not_enabled,
    ),
)

"""Programs that leave a direct path unused: of other programs than gpubench, their settings are all there is to see."""

from collections.abc import Iterator
from itertools import permutations

from gpubench.conditions.cause import Cause, Family, Sighting, Unread, joined
from gpubench.conditions.circumstances import Circumstances
from gpubench.model.paths.evidence import Confidence
from gpubench.model.results.rows.causes import Effect

_LLAMA, _LLAMA_SWITCH = "GGML_CUDA_", "GGML_CUDA_P2P"


def _not_enabled(around: Circumstances) -> Iterator[Sighting | Unread]:
    """Where somebody has set up llama.cpp, whose peer access is off unless it is asked for, and there is some to have.

    Which version it is, and older ones enabled it by themselves, is not known: so it is weak.
    """
    for facts in around.facts:
        set_up = [name for name in facts.environment if name.startswith(_LLAMA) and name != _LLAMA_SWITCH]
        if set_up and not facts.environment.get(_LLAMA_SWITCH) and _has_peer_access(around, facts.node):
            yield Sighting(
                subject=around.on(facts.node, f"rank {facts.rank}"),
                seen=f"{joined(set_up)} set, {_LLAMA_SWITCH} not, and the GPUs could have peer access",
                confidence=Confidence.WEAK,
                gpus=around.gpus_of_rank(facts),
            )


def _has_peer_access(around: Circumstances, node: int) -> bool:
    pairs = permutations(sorted(around.gpus_of(node)), 2)
    return any(around.wiring.peer_access(pair).possible for pair in pairs)


PROGRAMS = Family(
    "programs",
    "Programs",
    (
        Cause(
            id="peer-access-not-enabled",
            title="Peer access is possible and the program never enables it (cudaDeviceEnablePeerAccess; llama.cpp "
            "without GGML_CUDA_P2P=1): cudaMemcpyPeer goes through host memory",
            effects=(Effect.APPLICATION,),
            detection="llama.cpp's variables (GGML_CUDA_...) without GGML_CUDA_P2P, where peer access is possible. "
            "What other programs enable, nobody but themselves can see",
            settles="gpubench p2p: bandwidth with peer access on over that with it off is what there is to gain; "
            "nsys profile: `[CUDA memcpy Peer-to-Peer]` against Device-to-Host and Host-to-Device",
            cure="GGML_CUDA_P2P=1 for llama.cpp; cudaDeviceEnablePeerAccess in a program of your own",
            link="https://github.com/ggml-org/llama.cpp/issues/21910",
            look=_not_enabled,
        ),
    ),
)

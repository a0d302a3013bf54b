"""NVLinks between nodes (MNNVL) that are there and not used."""

from collections.abc import Callable

from gpubench.conditions.definition.circumstances import Circumstances, places_of, removal
from gpubench.conditions.definition.complaints import doubted
from gpubench.conditions.definition.condition import Condition, Family, Found, Sighting, Slowed, joined
from gpubench.conditions.definition.log_evidence import remark_in_log
from gpubench.conditions.definition.sightings import of_node, unread
from gpubench.model.paths.evidence import Confidence
from gpubench.model.paths.nccl_log import RemarkKind
from gpubench.model.results.rows.causes import Effect

_IMEX = "nvidia-imex"


def _clusters(run: Circumstances) -> dict[str, dict[int, set[int | None]]]:
    """NVLink clusters of several nodes: by uuid the cliques of each node's GPUs."""
    found: dict[str, dict[int, set[int | None]]] = {}
    for number, node in run.nodes.items():
        for gpu in node.gpus:
            domain = None if gpu.fabric is None else gpu.fabric.domain
            if domain is not None:
                found.setdefault(domain[0], {}).setdefault(number, set()).add(domain[1])
    return {uuid: nodes for uuid, nodes in found.items() if len(nodes) > 1}


def _in_clusters(run: Circumstances) -> list[int]:
    return sorted({number for nodes in _clusters(run).values() for number in nodes})


def _imex_channel(run: Circumstances) -> Found:
    for number in _in_clusters(run):
        for rank in run.ranks_of(number):
            if rank.imex_channels == () or (rank.imex_channels is None and "imex_channels" in rank.unknown):
                seen = f"rank {rank.rank} has no channel below /dev/nvidia-caps-imex-channels"
                yield of_node(run, number, seen, Confidence.LIKELY)


def _imex_service(run: Circumstances) -> Found:
    for number in _in_clusters(run):
        settings = run.nodes[number].snapshot.driver_settings
        service = settings.services.get(_IMEX)
        if service is not None and service.running is False:
            yield of_node(run, number, "nvidia-imex does not run", Confidence.LIKELY)
        elif service is None or service.running is None:
            yield from unread(run.on(number), settings.unknown, f"services.{_IMEX}.running")


def _cliques(run: Circumstances) -> Found:
    for uuid, nodes in _clusters(run).items():
        cliques = {clique for found in nodes.values() for clique in found}
        if len(cliques) > 1:
            gpus = frozenset(gpu for number in nodes for gpu in run.gpus_of(number))
            shown = joined([f"{run.on(number)}: {sorted(map(str, found))}" for number, found in nodes.items()])
            yield Sighting(
                subject=f"cluster {uuid}", seen=f"cliques differ: {shown}", confidence=Confidence.LIKELY, gpus=gpus
            )


def _switched_off(variable: str) -> Callable[[Circumstances], Found]:
    """Nodes of an NVLink cluster on which a variable is 0."""

    def look(run: Circumstances) -> Found:
        if "0" not in run.values(variable):
            return
        places = places_of((variable,), run.facts)
        for number in _in_clusters(run):
            yield Sighting(
                subject=run.on(number),
                seen=f"{variable}=0 in {' and '.join(places)}",
                gpus=run.gpus_of(number),
                cure=removal((variable,), places),
            )

    return look


_log_mnnvl = remark_in_log(
    RemarkKind.MNNVL_BROKEN,
    "look at the IMEX service of every node: nvidia-imex-ctl -N",
    lambda staged: not staged.inside,
    "NCCL says: {.text}",
)


_AZURE = "https://github.com/Azure/azhpc-images/pull/506"


MNNVL = Family.of(
    "mnnvl",
    "NVLinks between nodes",
    Condition(
        id="imex-service-stopped",
        title="MNNVL is not used between nodes: the nvidia-imex service is down or not working",
        detection="no process nvidia-imex on a node of an NVLink cluster; `MNNVL ... is available but not working` "
        "in NCCL's log",
        settles="nvidia-imex-ctl -N",
        cure="systemctl enable --now nvidia-imex on every node, with all of them in nodes_config.cfg",
        link=_AZURE,
        look=_imex_service,
        in_log=_log_mnnvl,
        in_job=doubted(r"MNNVL .*is available but not working"),
        implies=("imex-channel-missing",),
    ),
    Condition(
        id="imex-channel-missing",
        title="No IMEX channel in the container: CUDA_ERROR_NOT_PERMITTED for fabric handles, MNNVL 0",
        detection="/dev/nvidia-caps-imex-channels of every rank on a node of an NVLink cluster",
        settles="ls /dev/nvidia-caps-imex-channels; grep imex /proc/devices",
        cure="nvidia-modprobe -c 0 -s, and give the container /dev/nvidia-caps-imex-channels/channel0",
        link="https://github.com/NVIDIA/nvbandwidth/issues/39",
        look=_imex_channel,
    ),
    Condition(
        id="mnnvl-clique-differs",
        title="Nodes of one NVLink cluster have different clique ids, so NCCL uses the network (MNNVL 0)",
        detection="cluster uuid and clique of every GPU's fabric, over all nodes",
        settles="nvidia-smi -q | grep -E 'CliqueId|ClusterUUID' on every node",
        cure="put the nodes into one partition (nvlsm, or the provider's), or run the job inside one clique",
        link=_AZURE,
        look=_cliques,
    ),
    Condition(
        id="nccl-mnnvl-disabled",
        title="NCCL_MNNVL_ENABLE=0 switches off NVLinks between nodes (MNNVL 0)",
        detection="the variable, of ranks on nodes of one NVLink cluster",
        settles="run with it unset: P2P/MNNVL in NCCL's log",
        cure="unset NCCL_MNNVL_ENABLE",
        link="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
        look=_switched_off("NCCL_MNNVL_ENABLE"),
    ),
    Condition(
        id="nccl-cumem-disabled",
        title="NCCL_CUMEM_ENABLE=0 switches off NVLinks between nodes (MNNVL 0)",
        detection="the variable, of ranks on nodes of one NVLink cluster",
        settles="run with it unset: P2P/MNNVL in NCCL's log",
        cure="unset NCCL_CUMEM_ENABLE",
        link="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
        look=_switched_off("NCCL_CUMEM_ENABLE"),
    ),
    effects=(Effect.SOCKETS, Effect.NO_GPUDIRECT, Effect.SLOW),
    slows=(Slowed.NETWORK,),
)

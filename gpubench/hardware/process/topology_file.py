"""Read the topology file that NCCL would take (NCCL_TOPO_FILE, or the one of NVIDIA's topology daemon)."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from gpubench.errors import UsageError
from gpubench.hardware.system_files import UnknownFields, below, printable
from gpubench.model.facts.rank_facts import TopologyFile
from gpubench.model.facts.snapshot import bus_id
from gpubench.readers.documents.xml_elements import Element, Parser

_SETTING = "NCCL_TOPO_FILE"
_DEFAULT = "/var/run/nvidia-topologyd/virtualTopology.xml"
"""NCCL reads it where it is there and nothing is set (src/graph/topo.cc)."""

_MOST_BYTES = 4 * 2**20
_MOST_DEVICES = 4096


def read_topology_file(settings: Mapping[str, str], root: Path) -> TopologyFile | None:
    """The file with what is in it; None where NCCL reads none. `settings` are NCCL's, of whatever origin."""
    named = settings.get(_SETTING)
    path, by = (named, _SETTING) if named else (_DEFAULT, "NCCL's default")
    unknown = UnknownFields()
    content = unknown.tail("file", below(root, Path(path)), _MOST_BYTES + 1)
    if content is None:
        return TopologyFile(path=printable(path), by=by, unusable=unknown.reasons["file"]) if named else None
    if len(content) > _MOST_BYTES:
        return TopologyFile(path=printable(path), by=by, unusable=f"it has more than {_MOST_BYTES // 2**20} MiB")
    try:
        system = Parser("the file").root_of(content.decode(errors="replace"))
    except (UsageError, RecursionError) as error:
        reason = error.seen if isinstance(error, UsageError) else "it is nested too deeply"
        return TopologyFile(path=printable(path), by=by, unusable=printable(reason))
    return TopologyFile(path=printable(path), by=by, links=_links(system), numa_nodes=_numa_nodes(system))


def _links(system: Element) -> dict[str, str]:
    found: dict[str, str] = {}
    for element in _all(system):
        address = element.text("busid") if element.tag == "pci" else None
        if address is not None and len(found) < _MOST_DEVICES:
            link = f"{element.text('link_speed') or '?'} x{element.text('link_width') or '?'}"
            found[printable(bus_id(address))] = printable(link)
    return found


def _numa_nodes(system: Element) -> tuple[int, ...]:
    numbers = []
    for cpu in system.named("cpu"):
        try:
            number = cpu.integer("numaid")
        except UsageError:
            continue
        numbers += [] if number is None else [number]
    return tuple(numbers)


def _all(element: Element) -> Iterator[Element]:
    yield element
    for child in element.children:
        yield from _all(child)

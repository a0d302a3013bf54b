"""Leaves out of what ibnetdiscover writes, in its manual's form: a switch a node, a switch a rail, a missing cable."""

import time
from pathlib import Path

import pytest

from gpubench.errors import UsageError
from gpubench.readers.leaves import find_leaves, read_leaves


def switch(number: int, *ports: str, name: str = "") -> str:
    """A switch with these ports, described by its model unless it has a name."""
    words = f"MF0;{name}:MQM8700/U1" if name else "Quantum Mellanox Technologies"
    head = f'Switch\t41 "S-{number:016x}"\t\t# "{words}" enhanced port 0 lid 3 lmc 0'
    lines = (f"[{place}]\t{port}" for place, port in enumerate(ports, 1))
    return "\n".join(("vendid=0x2c9", "devid=0xd2f0", f"switchguid=0x{number:x}({number:x})", head, *lines, ""))


def host(name: str, device: str, lid: int = 7) -> str:
    return f'"H-{lid:016x}"[1]({lid:x}) \t\t# "{name} {device}" lid {lid} 4xNDR'


UPLINK = '"S-00000000000000ff"[1]\t\t# "MF0;spine1:MQM8700/U1" lid 9 4xNDR'
HEADER = "#\n# Topology file: generated on Tue Jun  5 14:15:10 2026\n#\n# Initiated from node 1 port 2\n\n"


def of(*switches: str) -> str:
    adapter = (
        'vendid=0x2c9\ncaguid=0x7\nCa\t1 "H-0000000000000007"\t\t# "node0 mlx5_0"\n[1](7) \t"S-1"[1]\t\t# lid 7 lmc 0\n'
    )
    return HEADER + "\n".join((*switches, adapter))


def read(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "fabric.txt"
    path.write_text(text)
    return read_leaves(path)


def test_nodes_on_one_switch_are_on_its_leaf(tmp_path: Path) -> None:
    left = switch(1, host("node0", "mlx5_0"), host("node1", "mlx5_0"), UPLINK, name="left")
    found = read(tmp_path, of(left, switch(2, host("node2", "mlx5_0"), UPLINK), switch(255, UPLINK)))
    assert found == {"node0": "left", "node1": "left", "node2": "S-0000000000000002"}
    assert find_leaves(["node2.example", "node0"], found, "file") == ("S-0000000000000002", "left")


def test_with_a_switch_a_rail_a_leaf_is_all_that_share_most_of_theirs(tmp_path: Path) -> None:
    switches = [
        switch(
            10 * unit + rail,
            *(
                host(f"node{node}", f"mlx5_{rail}")
                for node in range(4 * unit, 4 * unit + 4)
                if (node, rail) != (2, 0)  # a cable that is out
            ),
            UPLINK,
            name=f"su{unit}-rail{rail}",
        )
        for unit in (0, 1)
        for rail in range(4)
    ]
    storage = switch(99, *(host(f"node{node}", "mlx5_9") for node in range(8)), name="storage")
    found = read(tmp_path, of(*switches, storage))
    assert found == {f"node{node}": f"su{node // 4}-rail0" for node in range(8)}


def test_ports_that_nobody_named_are_no_hosts_of_the_job(tmp_path: Path) -> None:
    unnamed = '"H-0008f10403961354"[1](8f10403961355) \t\t# "MT4129 ConnectX7 Mellanox Technologies" lid 4 4xNDR'
    for port in (unnamed, UPLINK):
        with pytest.raises(UsageError, match="has no host names"):
            read(tmp_path, of(switch(1, port)))


def test_the_time_of_reading_a_fabric_grows_with_its_nodes_and_not_with_their_square(tmp_path: Path) -> None:
    nodes = 6000
    path = tmp_path / "fabric.txt"
    path.write_text(
        "".join(
            f'Switch 40 "S-{n:016x}" # "leaf{n}"\n[1] "H-{n:016x}"[1](abc) # "node{n} mlx5_0"\n\n' for n in range(nodes)
        )
    )
    begun = time.process_time()
    found = read_leaves(path)
    with pytest.raises(UsageError, match="6,000 of 6,000 nodes"):
        find_leaves([f"other{n}" for n in range(nodes)], found, "fabric.txt")
    assert len(set(found.values())) == nodes
    assert time.process_time() - begun < 10  # 0.2 s, and 30 s where every node is compared with every leaf

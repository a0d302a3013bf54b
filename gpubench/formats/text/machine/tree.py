"""The PCI tree, drawn."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpubench.formats.text.line import line_text
from gpubench.model.results.topo.rows import TreeRow

if TYPE_CHECKING:
    from rich.tree import Tree


def is_worth_drawing(rows: Sequence[TreeRow]) -> bool:
    """True where the tree says more than the tables: there is a switch, or more than one host bridge."""
    return any(row.what == "PCIe switch" for row in rows) or sum(row.what == "host bridge" for row in rows) > 1


def draw(host: str, rows: Sequence[TreeRow]) -> "Tree":
    """Rows as a tree below the host, each with the rate of the link above it."""
    from rich.tree import Tree

    tree = Tree(line_text(host), guide_style="dim")
    branches = [tree]
    for row in rows:
        rate = None if row.gb_s is None else f"{row.gb_s:.4g} GB/s"
        link = ", ".join(filter(None, (row.link and f"PCIe {row.link}", rate)))
        text = "  ".join(filter(None, (row.element, row.what, f"[{link}]" if link else "")))
        del branches[row.depth + 1 :]
        line = line_text(text)
        line.overflow, line.no_wrap = "fold", False
        branches.append(branches[-1].add(line))
    return tree

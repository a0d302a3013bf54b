"""Sets of CPUs and memory nodes as Linux writes them."""

import re


def ranges_of(mask: int) -> str:
    """The set bits of a mask as a list of ranges: 0b100111 → '0-2,5'; empty for none."""
    runs = [(run.start(), run.end() - 1) for run in re.finditer("1+", f"{mask:b}"[::-1])]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)

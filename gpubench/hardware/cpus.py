"""Sets of CPUs as Linux writes them."""

from collections.abc import Iterable


def cpu_ranges(cpus: Iterable[int]) -> str:
    """CPU numbers as a list of ranges: {0, 1, 2, 5} → '0-2,5'; empty for none."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)

"""The record of limits that a log exceeded. Not in `readers.limits`, which nearly every start imports."""

from gpubench.model.paths.nccl_log import ReachedLimit


class ReachedLimits:
    """Keeps each limit once, with what was seen first beyond it and how often; `ends_reading` once one has to."""

    def __init__(self) -> None:
        self.ends_reading = False
        self._seen: dict[str, tuple[str, int]] = {}

    def pass_over(self, seen: str, most: str) -> None:
        """Say that something was left out; `most` says of what, and how many are read."""
        first, times = self._seen.get(most, (seen, 0))
        self._seen[most] = first, times + 1

    def end(self, seen: str, most: str) -> None:
        """Have reading end."""
        self.ends_reading = True
        self.pass_over(seen, most)

    def found(self) -> tuple[ReachedLimit, ...]:
        """The limits in order of appearance."""
        return tuple(ReachedLimit(seen, most, times) for most, (seen, times) in self._seen.items())

"""How often `gpubench compare` is right: results with noise and a slowdown of known size, many seeds.

    python -m benchmarks.compare_alarms --seeds 1000

The results are made (tests/fakes/noisy_results.py), not measured. A comparison of results between which nothing changed
is a false alarm where it fails; one with a planted slowdown is a miss where it does not.
"""

import argparse
import time

from gpubench.measure.compare.judge import Rules
from gpubench.measure.compare.report import compare
from gpubench.model.terms.verdict import Verdict
from tests.fakes.noisy_results import SCENARIOS, Scenario


def main() -> None:
    """Print a line a scenario."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--only", default="", help="scenarios whose name begins so")
    arguments = parser.parse_args()
    seeds, chosen = arguments.seeds, [each for each in SCENARIOS if each.name.startswith(arguments.only)]
    start = time.monotonic()
    print(f"{'planted, runs a side, noise':<66}  failed  of {seeds}")
    for scenario in chosen:
        print(f"{scenario.name:<66}  {failures(scenario, seeds):6}", flush=True)
    comparisons = seeds * len(chosen)
    print(f"{1e3 * (time.monotonic() - start) / comparisons:.1f} ms a comparison of 46 rows, data made included")


def failures(scenario: Scenario, seeds: int) -> int:
    """How many comparisons fail."""
    found = 0
    for seed in range(seeds):
        base, new = scenario.sides(seed)
        found += compare(base, new, Rules()).verdict is Verdict.FAIL
    return found


if __name__ == "__main__":
    main()

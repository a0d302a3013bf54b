"""Count false alarms of the verdict on speed: sweeps of every collective on this host's GPUs, which must be
healthy.

    python -m benchmarks.healthy_speed --ranks 1,2,4 --runs 2

Each run is `gpubench COLLECTIVE` with its default sizes and iterations. It prints a line per run, with the slowest row
against its expectation, and passes if every row of every run is PASS. On a machine that is not healthy, the alarms are
no false ones.
"""

import argparse
import json
import subprocess
import sys

from gpubench.collectives.registry import SUMMARIES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2", help="numbers of ranks, with commas")
    parser.add_argument("--runs", type=int, default=2)
    given = parser.parse_args()
    runs = alarms = rows = 0
    for number in range(given.runs):
        for ranks in given.ranks.split(","):
            for name in SUMMARIES:
                command = [sys.executable, "-m", "gpubench", name, "--np", ranks, "--format", "json", "--no-progress"]
                result = subprocess.run(command, capture_output=True, text=True, check=False)
                document = json.loads(result.stdout)
                judged = [row for row in document["rows"] if row["expected_us"] is not None]
                slow = [row for row in document["rows"] if row["verdict"] != "PASS"]
                runs, rows, alarms = runs + 1, rows + len(judged), alarms + bool(slow)
                least = min(judged, key=lambda row: float(row["expected_percent"]), default=None)
                near = f"least {least['expected_percent']:.0f} % at {least['size_bytes']}" if least else "not judged"
                print(f"{number} {ranks} {name:<14} {document['verdict']} {len(slow)} slow; {near}", flush=True)
    print(f"{alarms} alarms in {runs} runs, {rows} rows judged")
    sys.exit(1 if alarms else 0)


if __name__ == "__main__":
    main()

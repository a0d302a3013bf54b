"""The libnccl that a process without torch loads: beside torch every backend runs torch's."""

import json
import subprocess
from collections.abc import Callable, Sequence

from gpubench.hardware.launch import die_with_parent, module_command, with_package
from gpubench.hardware.nccl.library import NcclLibrary
from gpubench.model.facts.environment import as_if_alone

_MODULE = "gpubench.hardware.nccl.alone"
_SECONDS_TO_ANSWER = 30.0


def start_asking(
    environment: dict[str, str], command: Sequence[str] = tuple(module_command(_MODULE))
) -> Callable[[], str]:
    """Start a process that loads NCCL; what is returned waits for '2.28.9 from FILE', '' where none answers."""
    process = subprocess.Popen(
        command,
        env=with_package(as_if_alone(environment)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )

    def answer() -> str:
        try:
            printed, _ = process.communicate(timeout=_SECONDS_TO_ANSWER)
            return str(json.loads(printed)["nccl"])
        except (subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
            process.kill()
            process.communicate()
            return ""

    return answer


def main() -> None:
    """Print what was loaded, as JSON."""
    import sys

    library = NcclLibrary()
    sys.stdout.write(json.dumps({"nccl": f"{library.version} from {library.path}"}))


if __name__ == "__main__":
    main()

"""Options that exclude each other, and checks that several commands share."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpubench.errors import UsageError, exclusive
from gpubench.model.terms.commands import Command
from gpubench.model.terms.options import INPUT, REQUIRE_PATH, SIMULATE

if TYPE_CHECKING:
    from gpubench.model.terms.options import Option

_REAL_MACHINES = "both choose where ranks run, or how many (--hosts node1:2,node2:2 sets both)"
_OWN_GPUS = "--ranks-per-gpu starts ranks on this machine's GPUs"
_STDOUT = "both write to stdout"
_ONE_SOURCE = "computation time has one source"
_RECORDING = "--replay shows a recording"

_Excluded = Mapping[str, tuple[Sequence[str], str]]

_EVERYWHERE: _Excluded = {
    "--json": (("--format",), ""),
    "--quiet": (("--verbose",), ""),
    "--summary": (("--exit-style", "--format", "--json"), _STDOUT),
    "--exit-style": (("--format", "--json"), _STDOUT + " (--output FILE writes another format)"),
    "--hosts": (("--slurm", "--simulate", "--replay", "--from", "--np", "-g", "--ranks-per-gpu"), _REAL_MACHINES),
    "--slurm": (("--simulate", "--replay", "--from", "--np", "-g", "--ranks-per-gpu"), _REAL_MACHINES),
    "--gpus": (("--replay", "--from"), "a recording shows all its GPUs"),
    "--expect-gpus": (("--gpus",), "--expect-gpus counts all GPUs of a node"),
    "--exit-zero": (("--strict", "--exit-style"), "--exit-zero hides the exit codes of the other option"),
}
_BY_COMMAND: Mapping[str, _Excluded] = {
    "topo": {
        "--from": (("--replay", "--simulate"), "both name a machine"),
        "--replay": (("--simulate",), _RECORDING),
        "--software": (
            ("--from", "--simulate", "--causes", "--profile", "--expect-gpus", "--gpus"),
            "--software reads the libraries of this environment or of a recording",
        ),
    },
    "p2p": {
        "--replay": (("--simulate", "--record", "--sizes", "--pairs", "--as"), _RECORDING),
        "--as": (("--sizes", "--memory"), "nvbandwidth copies 512M of plain memory"),
        "--veto": (("--format", "--json"), _STDOUT),
    },
    "kv": {
        "--replay": (("--simulate", "--record", "--sizes", "--blocks", "--memory", "--pairs"), _RECORDING),
        "--isolate": (("--simulate", "--replay"), "--fault node0:kv=pid simulates two containers"),
        "--visible": (("--simulate", "--replay"), "only real processes can be limited to their own GPUs"),
        "--backend": (("--simulate", "--replay"), "only transfers by UCX are simulated"),
        "--pairs": (("--np",), "both select GPUs"),
    },
    "check": {
        "--replay": (("--simulate", "--record"), _RECORDING),
        "--quick": (("--full", "--kv", REQUIRE_PATH), "--quick measures nothing"),
        "--ranks-per-gpu": (("--simulate", "--replay", "--quick"), _OWN_GPUS),
    },
    "scan": {
        "--rounds": (
            ("--resume", "--replay"),
            "--rounds starts a scan, --resume continues one, and --replay judges one",
        ),
        "--resume": (("--replay",), "--resume continues a scan, and --replay judges one"),
        "--simulate": (("--replay",), ""),
        "--ranks-per-gpu": (("--replay", "--simulate"), _OWN_GPUS),
    },
    "watch": {
        "--replay": (("--simulate", "--record"), _RECORDING),
        "--gpus": (("--simulate", "--replay"), "all GPUs of a simulated or recorded machine are shown"),
        "--hang": (
            ("--until-traffic", "--pid", "--job", "--gpus", "--replay", REQUIRE_PATH),
            "--hang asks NCCL instead of reading counters (gpubench explain reads its recordings)",
        ),
    },
    "run": {"COMMAND": (("--exit-style",), "a failed job keeps its own exit code")},
    "compare": {
        "--last": (
            ("--base", "--new", "NEW", "--against", "--other-machine", "--collective"),
            "--last compares the newest results in a folder with those before them",
        )
    },
    "collective": {
        "--simulate": (("--skew", "--backend"), "profiles have no values for a skew or for other libraries"),
        "--percentiles": (("--mode", "--graph"), "--mode latency already has percentiles, and a graph runs as a whole"),
        "-b": (("--sizes",), "-b 8 -e 4G -f 2 means --sizes 8:4G:2"),
        "-f": (("-i",), "one is a factor between sizes, and the other is a step"),
        "-g": (("--np",), "both set the number of ranks"),
        "-c": (("--check",), "-c 0 is --no-check, -c 1 is --check"),
        "--in-place": (("--out-of-place",), "both are measured if neither is set"),
    },
    "plan": {
        "MODEL": (("--parameters",), "both describe the model"),
        "--measure": (("--tflops", "--step", "--tokens-per-second"), _ONE_SOURCE),
        "--tflops": (("--step", "--tokens-per-second"), _ONE_SOURCE),
        "--step": (("--tokens-per-second",), _ONE_SOURCE),
        "--simulate": (("--profile",), "both name a profile"),
        "--global-batch": (("--microbatches",), "each follows from the other"),
    },
}
"""By command (`collective` for every collective): each option, the options that it excludes, and the reason."""


def resolve_exclusions(
    command: Command, declared: Iterable["Option"], values: Mapping[str, Any], context: Any
) -> dict[str, Any]:
    """Reset defaults that exclude an option on the command line, and return all option values.

    Defaults come from the environment or a file. A default that selects the machine is never reset. `context` is the
    click context.

    Raises: UsageError if both options of any other exclusive pair are set.
    """

    def source(option: "Option") -> str:
        return str(context.get_parameter_source(option.field).name)

    options = {option.name: option for option in declared}
    settled = dict(values)
    group = "collective" if command.module == "collective" else command.name or "check"
    for name, (others, why) in {**_EVERYWHERE, **_BY_COMMAND.get(group, {})}.items():
        if name not in options:
            continue
        option, clashing = options[name], []
        for other in (options[known] for known in others if known in options):
            weaker = [either for either in (option, other) if source(either) == "DEFAULT_MAP"]
            is_typed = "COMMANDLINE" in (source(option), source(other))
            if len(weaker) == 1 and is_typed and weaker[0].group not in (INPUT, SIMULATE):
                settled[weaker[0].field] = weaker[0].default
            elif option.is_asked(settled) and other.is_asked(settled):
                clashing.append(other.name_when_off if settled.get(other.field) is False else other.name)
        if clashing:
            raise exclusive((name, *clashing), f"only one of them, because {why}" if why else "only one of them")
    return settled


def check_profile(name: str | None) -> None:
    """Raise UsageError if a profile is missing or invalid, so that the run fails before it measures anything."""
    if name is not None:
        from gpubench.profiles import find

        find(name, os.environ)


def check_evidence(shown: bool | None, *, strict: bool, required: bool = False) -> None:  # noqa: FBT001 - an option
    """Raise UsageError for an option that judges paths by evidence, together with --no-evidence."""
    option = "--strict" if strict else REQUIRE_PATH
    if shown is False and (strict or required):
        raise UsageError(
            f"{option} with --no-evidence",
            expected=f"only one of them, because {option} judges the paths that evidence shows",
            next_step="leave --no-evidence out",
        )

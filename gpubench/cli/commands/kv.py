"""`gpubench kv`: its help page and checks of its options."""

from gpubench.cli.signature import HelpPage, check_presentation, job_runner, make_app
from gpubench.jobs.kv_plan import KvPlan

_KV = HelpPage(
    (
        ("Measure a KV transfer between every pair of GPUs", "gpubench kv"),
        ("Measure with the memory of PyTorch's expandable segments", "gpubench kv --memory malloc,expandable"),
        ("Measure as if between two containers", "sudo -E gpubench kv --isolate pid"),
        ("Measure with NIXL, in the environment of vLLM", "gpubench kv --backend nixl"),
        ("Try it without a GPU", "gpubench kv --simulate hgx-h200-4 --fault node0:kv=expandable"),
    ),
    """
Disaggregated inference moves the KV cache between processes with NIXL, which uses UCX. For every pair of GPUs, kv
starts two processes as an inference engine does. It transfers one block and then many, verifies the data, and reads
which protocol UCX chose. A transfer through host memory is a FAIL, with its cause and cure.
docs/commands/kv.md explains the values.
""",
)


def checked(plan: KvPlan) -> KvPlan:
    """Return the plan with its presentation checked."""
    from gpubench.jobs.kv import SECTIONS

    return check_presentation(plan, SECTIONS)


app = make_app(_KV, KvPlan, job_runner("gpubench.jobs.kv", checked), without=("hosts", "slurm"))

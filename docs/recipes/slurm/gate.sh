#!/bin/bash
# One script for three lines of slurm.conf:
#   Prolog=/etc/slurm/gate.sh
#   Epilog=/etc/slurm/gate.sh
#   HealthCheckProgram=/etc/slurm/gate.sh    (with HealthCheckInterval=600 HealthCheckNodeState=IDLE,CYCLE)
# It drains a node whose own hardware or driver is at fault. A node that could not be judged stays in service: it may
# have no GPU, or gpubench is missing, broken or late. docs/how-to/gate-a-node.md has the whole policy.
set -u
# "yes" also drains nodes that could not be judged. A node without GPUs is one of these.
drain_unjudged=no
# Slurm sets no PATH. If slurm.conf is not in its usual place, health checks also need SLURM_CONF here.
export PATH=/opt/gpubench/bin:/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8
# In a prolog it names the GPUs of the job. The gate judges all GPUs.
unset CUDA_VISIBLE_DEVICES
node=${SLURMD_NODENAME:-$(hostname -s)}
context=${SLURM_SCRIPT_CONTEXT:-health check}

reason_now() {
    timeout 5 scontrol show node "$node" | sed -n 's/^ *Reason=\(.*\) \[[^[]*$/\1/p'
}
update() {
    local said
    said=$(timeout 5 scontrol update NodeName="$node" "$@" 2>&1) || logger -t gpubench "$context: not updated: $said"
}

# Slurm kills a health check after 60 seconds.
output=$(timeout --kill-after=2 40 gpubench check --quick --timeout 20 --exit-style slurm 2>&1)
code=$?
answer=$(grep --max-count=1 --extended-regexp '^(keep|drain|unknown): ' <<< "$output")
[[ -n $answer ]] || answer="unknown: exit code $code, $(tail -n 1 <<< "$output")"
[[ $answer == keep:* ]] || logger -t gpubench "$context: $answer"
if [[ $answer == unknown:* && $drain_unjudged == yes ]]; then
    answer="drain: could not be judged: ${answer#unknown: }"
fi

case $answer in
    drain:*)
        reason="gpubench: ${answer#drain: }"
        # slurmdbd keeps 255 bytes. A reason of somebody else stays.
        [[ -n $(reason_now) ]] || update State=DRAIN Reason="${reason:0:255}"
        # Slurm requeues the job of a failed prolog. It drains a node whose prolog or epilog fails, if scontrol did not.
        [[ $context == prolog_* || $context == epilog_* ]] && exit 1
        ;;
    keep:*)
        if [[ $context == "health check" && $(reason_now) == "gpubench: "* ]]; then
            update State=RESUME
        fi
        ;;
esac
exit 0

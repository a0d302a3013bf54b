#!/bin/bash
# HealthCheckProgram=/etc/slurm/healthcheck.sh with HealthCheckInterval=600 and HealthCheckNodeState=IDLE,CYCLE.
# Slurm runs it on every node and kills it after 60 seconds; draining is the program's own business. The reason begins
# with "gpubench:", so that only drains of its own are undone.
set -u
# Slurm hands on no PATH: where gpubench is, and the rest.
export PATH=/opt/gpubench/bin:/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8
node=${SLURMD_NODENAME:-$(hostname -s)}
answer=$(timeout --kill-after=5 45 gpubench check --quick --timeout 20 --exit-style npd 2> /dev/null)
code=$?
reason=$(scontrol show node "$node" | sed -n 's/^ *Reason=\(.*\) \[.*$/\1/p')
case $code in
    0)
        if [[ $reason == gpubench:* ]]; then
            scontrol update NodeName="$node" State=RESUME
        fi
        ;;
    1)
        if [[ -z $reason ]]; then
            scontrol update NodeName="$node" State=DRAIN Reason="gpubench: $answer"
        fi
        ;;
    *) logger -t gpubench "not known, exit code $code: $answer" ;;
esac
exit 0

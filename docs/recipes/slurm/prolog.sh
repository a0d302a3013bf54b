#!/bin/bash
# Prolog=/etc/slurm/prolog.sh: before every job, look whether the wiring of this node is what it was.
# A prolog that ends with anything but 0 drains the node and requeues the job, so it must be short, may call no Slurm
# command, and must not drain a whole cluster for a mistake of its own: only what failed (1), could not be asked (3) or
# hung (124) counts, and wrong usage (2) is logged. What fails, and what is a warning that keeps the node, is the table
# of severities in docs/conditions.md.
set -u
# Slurm hands on no PATH: where gpubench is, and the rest.
export PATH=/opt/gpubench/bin:/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8
answer=$(timeout --kill-after=5 40 gpubench check --quick --timeout 20 --format csv --section findings 2>&1)
code=$?
case $code in
    0) exit 0 ;;
    1 | 3 | 124 | 137)
        logger -t gpubench "exit code $code: $answer"
        exit 1
        ;;
    *)
        logger -t gpubench "the prolog itself is wrong, exit code $code: $answer"
        exit 0
        ;;
esac

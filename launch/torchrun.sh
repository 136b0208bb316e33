#!/usr/bin/env bash
# Train with torchrun, which restarts the ranks after a failure. Run the same command on each machine:
#
#   launch/torchrun.sh [torchrun options] [train.py arguments]
#   launch/torchrun.sh --nproc-per-node 8 --deepspeed ds_configs/zero2.json
#   launch/torchrun.sh --nnodes 3:4 --nproc-per-node 8 --max-restarts 5 --rdzv-endpoint worker-1:29400 \
#       --deepspeed ds_configs/zero3.json --config my.yaml batch.global_batch_size=384
#
# --nnodes MIN:MAX   number of machines. If a machine is lost, the others stop, connect again, and resume from the last
#                    checkpoint with the same global batch, which the number of remaining ranks must divide. The run
#                    directory must be on a file system that all machines share
# --max-restarts N   number of restarts (default: 3 with MIN:MAX, else 0)
# --rdzv-endpoint    HOST:PORT of one of the machines, to which all connect. The loss of this machine ends the run.
#                    A run on one machine needs no endpoint
#
# The arguments of train.py begin at --deepspeed, --config, a key=value, or after --. Write a torchrun option with an
# equals sign in its value as one word: --rdzv-conf=join_timeout=60. Without --nproc-per-node the script starts one
# rank for each GPU of the machine, or one rank if there is no GPU. Each rank has the environment of its own machine.
set -euo pipefail
root=$(unset CDPATH && cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}" && exit ;; esac
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m pipeline.distributed.launch.torchrun "$@"

#!/usr/bin/env bash
# Train through torchrun, which starts again by itself after a loss. On each machine the same command:
#
#   launch/torchrun.sh [torchrun options] [train.py arguments]
#   launch/torchrun.sh --nproc-per-node 8 --deepspeed ds_configs/zero2.json
#   launch/torchrun.sh --nnodes 3:4 --nproc-per-node 8 --max-restarts 5 --rdzv-endpoint worker-1:29400 \
#       --deepspeed ds_configs/zero3.json --config my.yaml batch.global_batch_size=384
#
# --nnodes MIN:MAX   machines to start with and to go on with: when one is lost, the others stop, meet again and go
#                    on from the last checkpoint with the same global batch, if it divides by the ranks left.
#                    That takes a run directory that all of them see (shared file system)
# --max-restarts N   how often (default here: 3 with a range, else 0)
# --rdzv-endpoint    HOST:PORT of the machine where they meet; lost, it ends the run. Of one machine: not needed
#
# train.py's arguments begin at --deepspeed, --config, a key=value, or after --. torchrun options that hold an
# equals sign are written as one word: --rdzv-conf=join_timeout=60. Without them: one rank for each GPU here, or one.
# Each machine's own environment is what its ranks get.
set -euo pipefail
root=$(unset CDPATH && cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}" && exit ;; esac
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m pipeline.distributed.launch.torchrun "$@"

#!/usr/bin/env bash
# Train on the GPUs of this machine:
#
#   launch/multi_gpu.sh [deepspeed options] [train.py arguments]
#   launch/multi_gpu.sh --deepspeed ds_configs/zero2.json
#   launch/multi_gpu.sh --num_gpus 2 --deepspeed ds_configs/zero3.json --config my.yaml model.num_layers=12
#   CUDA_VISIBLE_DEVICES=2,3 launch/multi_gpu.sh --config my.yaml
#
# All GPUs unless --num_gpus, --include localhost:0,2 or CUDA_VISIBLE_DEVICES says otherwise; on CPUs --num_gpus is
# the number of processes. train.py's arguments begin at --deepspeed, --config, a key=value, or after --. Without
# arguments the default recipe is trained.
#
# Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal reach every rank: a checkpoint, then the end.
#
# It is `deepspeed launch/train.py ...` on a free port, with an exit code that every rank has proven: 0 all
# finished; 2 bad input; 128 + n stopped by signal n; 124 hung; anything else: a rank failed.
set -euo pipefail
root=$(unset CDPATH && cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}" && exit ;; esac
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m pipeline.distributed.launch.multi_gpu "$@"

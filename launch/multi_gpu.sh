#!/usr/bin/env bash
# Train on the GPUs of this machine:
#
#   launch/multi_gpu.sh [deepspeed options] [train.py arguments]
#   launch/multi_gpu.sh --deepspeed ds_configs/zero2.json
#   launch/multi_gpu.sh --num_gpus 2 --deepspeed ds_configs/zero3.json --config my.yaml model.num_layers=12
#   CUDA_VISIBLE_DEVICES=2,3 launch/multi_gpu.sh --config my.yaml
#
# It uses all GPUs, unless --num_gpus, --include localhost:0,2 or CUDA_VISIBLE_DEVICES selects some. On CPUs --num_gpus
# is the number of processes. The arguments of train.py begin at --deepspeed, --config, a key=value, or after --.
# Without arguments it trains the default recipe.
#
# Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal reach every rank. Each rank saves a checkpoint and ends.
#
# It runs `deepspeed launch/train.py ...` on a free port, and checks every rank's exit code. Its own exit code is 0 if
# all ranks finished, 2 for bad input, 124 if a rank hung, 128 + n if signal n stopped the run, and another number if a
# rank failed.
set -euo pipefail
root=$(unset CDPATH && cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}" && exit ;; esac
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m pipeline.distributed.launch.multi_gpu "$@"

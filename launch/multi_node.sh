#!/usr/bin/env bash
# Train on several machines that ssh reaches without a password:
#
#   launch/multi_node.sh HOSTFILE [options] [launcher options] [train.py arguments]
#   launch/multi_node.sh hostfile --deepspeed ds_configs/zero3.json --config my.yaml model.num_layers=12
#   launch/multi_node.sh hostfile --include worker-1@worker-2:0,2 --deepspeed ds_configs/zero2.json
#
# HOSTFILE names the machines (launch/hostfile.example). The project and its .venv lie at the same place on each.
#
# Options:
#   --no-doctor      do not look at the machines first (python -m pipeline doctor)
#   --export NAME    send this variable to the nodes too; may be given several times. By themselves go WANDB_*,
#                    HF_*, NCCL_*, GLOO_*, TORCH_*, OMP_*, CUDA_* and the like (docs/multi_node.md)
# Launcher options, which are deepspeed's: --include --exclude --num_nodes --num_gpus --master_addr --master_port
#   --launcher pdsh|openmpi --launcher_args --bind_cores_to_rank --log_level
# train.py's arguments begin at --deepspeed, --config, a key=value, or after --.
#
# Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP reach every rank: a checkpoint, then the end. A third one ends all at once.
# Exit code: 0 every rank finished; 2 bad input, or a machine that cannot take part; 128 + n stopped by signal n;
# 124 hung; anything else: a rank or a node failed. Nothing of the run stays on any node.
set -euo pipefail
root=$(unset CDPATH && cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:---help} in -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}" && exit ;; esac
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m pipeline.distributed.launch.multi_node "$@"

#!/usr/bin/env bash
# Train on several machines that ssh reaches without a password:
#
#   launch/multi_node.sh HOSTFILE [options] [launcher options] [train.py arguments]
#   launch/multi_node.sh hostfile --deepspeed ds_configs/zero3.json --config my.yaml model.num_layers=12
#   launch/multi_node.sh hostfile --include worker-1@worker-2:0,2 --deepspeed ds_configs/zero2.json
#
# HOSTFILE lists the machines (example: launch/hostfile.example). The project and its .venv must have the same path on
# each machine.
#
# Options:
#   --no-doctor      skip the check of the machines before the run (python -m pipeline doctor)
#   --export NAME    send this environment variable to the machines, too; may be repeated. Variables such as WANDB_*,
#                    HF_*, NCCL_*, GLOO_*, TORCH_*, OMP_* and CUDA_* are always sent (full list:
#                    docs/how-to/many-machines.md)
# Options for the deepspeed launcher: --include --exclude --num_nodes --num_gpus --master_addr --master_port
#   --launcher pdsh|openmpi --launcher_args --bind_cores_to_rank --log_level
# The arguments of train.py begin at --deepspeed, --config, a key=value, or after --.
#
# Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP reach every rank. Each rank saves a checkpoint and ends. A third signal ends all
# ranks at once. The exit code is 0 if every rank finished, 2 for bad input or an unusable machine, 124 if a rank hung,
# 128 + n if signal n stopped the run, and another number if a rank or machine failed. At the end no process of the run
# is left on any machine.
set -euo pipefail
root=$(unset CDPATH && cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:---help} in -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}" && exit ;; esac
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m pipeline.distributed.launch.multi_node "$@"

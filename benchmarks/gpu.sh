#!/usr/bin/env bash
# What needs a CUDA machine. One subcommand a call, each under nine minutes: bash benchmarks/gpu.sh check
#   check  versions and ceilings, the tests marked gpu, waits and kernels a step of every engine
#   gpt2 | 1b | 8b   tokens/s, MFU, memory: ours, packed and not, beside its peers
#   8b-lora  the same of an adapter on all linear layers, without recomputation, beside peft's and Unsloth's
#   ops    attention, cross entropy and AdamW alone, each way to compute them
#   ckpt   what a save costs the training that goes on
#   overhead  what rows, sinks and clocks cost a step
# Results go to $OUT, else to benchmarks/results/, a line after every participant: a kill loses nothing.
# Without a GPU (or with TINY=1) it goes through the same motions with a tiny model.
#
# A machine without network needs the wheels in .whl/, which git ignores; made on one that has it by
#   pip wheel --no-deps --no-build-isolation "deepspeed>=0.19.8,<0.20" hjson -w .whl
#   there="--only-binary=:all: --python-version 3.12 --platform manylinux_2_17_x86_64 -d .whl"
#   pip download $there pydantic xxhash psutil rich filelock && pip download $there --no-deps liger-kernel
# which are 8 MB beside the torch, transformers, accelerate and numpy of that machine.
set -u
cd "$(dirname "$0")/.."
results=${OUT:-benchmarks/results} python=${PYTHON:-python3} minutes=${MINUTES:-8}
mkdir -p "$results"
if compgen -G ".whl/*.whl" >/dev/null && [ ! -d .site ]; then
  "$python" -m pip install -q --no-index --no-deps --target .site .whl/*.whl || exit 1
fi
export PYTHONPATH="$PWD:$PWD/.site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 WANDB_MODE=disabled
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF-expandable_segments:True}

case ${1:-} in check | gpt2 | 1b | 8b | 8b-lora | ops | ckpt | overhead) ;; *)
  echo "bash benchmarks/gpu.sh check|gpt2|1b|8b|8b-lora|ops|ckpt|overhead: which one? Given: ${1:-nothing}" >&2
  exit 2
  ;;
esac
tiny=${TINY:-$("$python" -c "import torch; print(int(not torch.cuda.is_available()))")} || exit 1
failed=0
measure() { # model, further options: a tiny one in its place, and nothing compiled, where there is no GPU
  local small=() model=$1 file=$results/${name:-$1}
  [ "$tiny" = 1 ] && model=tiny && small=(--sweep 1 2 --precision fp32 --warmup 2 --steps 2 --rounds 1 --peers trainer)
  "$python" benchmarks/throughput.py --model "$model" --precision bf16 --ranks 1 --minutes "$minutes" \
    --append "$file.jsonl" --output "$file.json" "${@:2}" ${small[@]+"${small[@]}"} || failed=1
}
run() { "$python" "$@" || failed=1; }
little=() census=(--model gpt2-124m)
[ "$tiny" = 1 ] && little=(--tiny) census=(--model tiny --precision fp32)
[ "$tiny" = 1 ] && [ -z "${SPLITS:-}" ] && SPLITS="plain 2"

case ${1:-} in
check)
  run benchmarks/gpu_facts.py ${little[@]+"${little[@]}"} --output "$results/facts.jsonl"
  if "$python" -c "import pytest" 2>/dev/null; then
    timeout 270 "$python" -m pytest tests/gpu -m gpu -q -k "not nvme and not compile" --durations=5 || failed=1
  fi
  # shellcheck disable=SC2086
  run benchmarks/gpu_census.py "${census[@]}" --engines ${SPLITS:-plain 0 1 2 3} --output "$results/census.jsonl"
  ;;
gpt2)
  # shellcheck disable=SC2086
  measure gpt2-124m --start-together --sweep 16 32 64 --rows packed unpacked --stages ${SPLITS:-plain 2} --steps 30 \
    --rounds 3 --peers pytorch-compiled deepspeed trainer trainer-liger
  ;;
1b)
  # shellcheck disable=SC2086
  measure llama-1b --one-at-a-time --sweep 2 4 8 --rows packed unpacked --stages ${SPLITS:-2 plain} --steps 8 --rounds 3 \
    --peers pytorch-compiled trainer trainer-liger
  ;;
8b)
  # shellcheck disable=SC2086
  measure llama-8b --one-at-a-time --sweep 1 2 --rows packed unpacked --stages ${SPLITS:-zero3_one_gpu.json plain} --steps 5 --rounds 2 \
    --peers deepspeed fsdp2-compiled
  ;;
8b-lora)
  # shellcheck disable=SC2086
  name=llama-8b-lora measure llama-8b --adapter --one-at-a-time --sweep 1 2 --stages ${SPLITS:-2 plain} --steps 8 --rounds 3 \
    --peers trainer trainer-unsloth
  ;;
ops) run benchmarks/gpu_ops.py ${little[@]+"${little[@]}"} --output "$results/ops.jsonl" ;;
ckpt)
  saved=(--model llama-1b --groups plain-1 2-1 --rounds 3)
  [ "$tiny" = 1 ] && saved=(--quick --groups 2-1)
  run benchmarks/checkpoint.py "${saved[@]}" --output "$results/checkpoint.json"
  ;;
overhead)
  measured=(--model gpt2-124m --precision bf16)
  [ "$tiny" = 1 ] && measured=(--model tiny --rounds 2 --most 10)
  run benchmarks/overhead.py "${measured[@]}" --stages plain 2 --output "$results/overhead.jsonl"
  ;;
esac
exit $failed

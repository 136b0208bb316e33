#!/usr/bin/env bash
# Runs the measurements that need a GPU, one part per call, each under ten minutes: bash benchmarks/gpu.sh first
#   first   550 s: versions and limits of the GPU, loss curves, the tests marked gpu, and tokens/s of GPT-2 124M and
#           a 1.2B Llama against compiled PyTorch, the Trainer and fp8. Call `second` within 30 s of its end.
#   second  110 s: kernels and host waits of a step of each engine
#   gpt2 | 1b | 8b   tokens/s, MFU and memory with and without packing, against the peers; 8b needs 130 GB
#   8b-lora  the same for an adapter on all linear layers, without recomputation, against peft
#   ckpt    cost of a save for the training that continues
# Results go to $OUT, or to benchmarks/results/. Each participant's line is written at once, so a kill loses no line.
# Without a GPU (or with TINY=1) every part runs with a tiny model.
#
# A machine without network needs wheels in .whl/, which git ignores. Make them on a machine with network:
#   pip wheel --no-deps --no-build-isolation "deepspeed==0.19.8" hjson -w .whl
#   there="--only-binary=:all: --python-version 3.12 --platform manylinux_2_17_x86_64 -d .whl"
#   pip download $there pydantic xxhash && pip download $there --no-deps liger-kernel "transformers>=5.23"
#   pip download $there --platform manylinux_2_28_x86_64 --no-deps "torchao>=0.18,<0.19"
# They have 20 MB. The machine without network must have torch, accelerate, peft, rich, psutil and numpy.
set -u
cd "$(dirname "$0")/.."
parts="first|second|gpt2|1b|8b|8b-lora|ckpt"
if [[ "|$parts|" != *"|${1:-none}|"* ]]; then
  echo "gpu.sh: got ${1:-no part}, expected one of $parts, such as: bash benchmarks/gpu.sh first" >&2
  exit 2
fi
results=${OUT:-benchmarks/results} python=${PYTHON:-python3} minutes=${MINUTES:-8}
mkdir -p "$results"
if compgen -G ".whl/*.whl" >/dev/null && [ ! .site -nt .whl ]; then
  rm -rf .site && "$python" -m pip install -q --no-index --no-deps --target .site .whl/*.whl && touch .site || exit 1
fi
export PYTHONPATH="$PWD:$PWD/.site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 WANDB_MODE=disabled
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF-expandable_segments:True}

tiny=${TINY:-$("$python" -c "import torch; print(int(not torch.cuda.is_available()))")} || exit 1
failed=0
seconds=$((60 * minutes))
# A program that takes longer is interrupted, so that it summarizes its results and the next program can run.
run() {
  local planned=$((seconds * (tiny ? 10 : 1))) begun=$SECONDS # CPUs are slower, so they get ten times as long
  timeout -s INT -k 15 "$planned" "$python" "$@" || failed=1
  echo "== $1 $2: $((SECONDS - begun)) s of $planned"
}
measure() { # MODEL OPTIONS...; without a GPU a tiny model, and without the compiled peers
  local small=() model=$1 file=$results/${name:-$1}
  [ "$tiny" = 1 ] && model=tiny && small=(--micro-batch-size 2 --precision fp32 --warmup 2 --steps 2 --rounds 1 --peers trainer)
  run benchmarks/throughput.py --model "$model" --precision bf16 --ranks 1 --append "$file.jsonl" \
    --logs "$results/logs.txt" "${@:2}" ${small[@]+"${small[@]}"}
}
little=() census=(--model gpt2-124m)
[ "$tiny" = 1 ] && little=(--tiny) census=(--model tiny --precision fp32)
[ "$tiny" = 1 ] && [ -z "${SPLITS:-}" ] && SPLITS="plain 2"

case $1 in
first)
  seconds=25 run benchmarks/gpu_facts.py ${little[@]+"${little[@]}"} --output "$results/facts.jsonl"
  # Curves and tests run together, because neither is timed.
  (seconds=${CURVE_SECONDS:-210} run benchmarks/gpu_curve.py ${little[@]+"${little[@]}"} --output "$results/curve.jsonl" &&
    exit $failed) &
  if "$python" -c "import pytest, xdist" 2>/dev/null; then
    seconds=${TEST_SECONDS:-210} run -m pytest tests/gpu -m gpu -q -n $((($(nproc) + 1) / 2)) -k "not nvme" --tb=short \
      --show-capture=no --durations=5
  fi
  wait $! || failed=1
  seconds=145 measure gpt2-124m --start-together --micro-batch-size 32 --stages plain --warmup 5 --steps 20 \
    --rounds 3 --peers pytorch-compiled trainer
  seconds=170 measure llama-1b --one-at-a-time --micro-batch-size 4 --stages plain --warmup 3 --steps 8 \
    --draw-on-device --rounds 2 --peers trainer-liger ours-fp8
  ;;
second)
  # shellcheck disable=SC2086
  seconds=110 run benchmarks/gpu_census.py "${census[@]}" --engines ${SPLITS:-plain 2 3} --output "$results/census.jsonl"
  ;;
gpt2)
  # shellcheck disable=SC2086
  measure gpt2-124m --start-together --micro-batch-size 32 --rows packed unpacked --stages ${SPLITS:-plain 2} --steps 30 \
    --rounds 3 --peers pytorch-compiled deepspeed trainer trainer-liger
  ;;
1b)
  # shellcheck disable=SC2086
  measure llama-1b --one-at-a-time --micro-batch-size 4 --rows packed unpacked --stages ${SPLITS:-plain 2} --steps 8 --rounds 3 \
    --peers pytorch-compiled trainer trainer-liger ours-fp8
  ;;
8b)
  if [ "$tiny" = 0 ] && ! "$python" -c "import sys, torch; sys.exit(torch.cuda.mem_get_info()[1] < 130e9)"; then
    echo "8b: training 8 billion weights takes 16 bytes for each, 130 GB; this GPU has less. Run: bash benchmarks/gpu.sh 8b-lora" >&2
    exit 2
  fi
  # shellcheck disable=SC2086
  measure llama-8b --one-at-a-time --draw-on-device --micro-batch-size 1 --rows packed unpacked \
    --stages ${SPLITS:-zero3_one_gpu.json plain} --steps 5 --rounds 2 --peers deepspeed fsdp2-compiled
  ;;
8b-lora)
  # shellcheck disable=SC2086
  name=llama-8b-lora measure llama-8b --adapter --one-at-a-time --draw-on-device --micro-batch-size 1 --stages ${SPLITS:-plain 2} \
    --steps 8 --rounds 3 --peers trainer
  ;;
ckpt)
  saved=(--model llama-1b --groups plain-1 2-1 --rounds 3)
  [ "$tiny" = 1 ] && saved=(--quick --groups 2-1)
  run benchmarks/checkpoint.py "${saved[@]}" --output "$results/checkpoint.json"
  ;;
esac
exit $failed

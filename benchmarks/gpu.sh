#!/usr/bin/env bash
# All that needs a CUDA machine, in one call of under ten minutes, without network and without compiled ops:
#   bash benchmarks/gpu.sh [--quick]
# Tests marked gpu, then GPT-2 124M and a 1B Llama against the peers, then saves of the former.
# Results go to $OUT, else to benchmarks/results/.
# Without a GPU it goes through the same motions with a tiny model.
set -u
cd "$(dirname "$0")/.."
results=${OUT:-benchmarks/results}
python=${PYTHON:-python3}
mkdir -p "$results"
failed=0
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 WANDB_MODE=disabled

measure() {
  "$python" benchmarks/throughput.py --ranks 1 --precision bf16 --start-together \
    --model "$1" --output "$results/$1.json" "${@:2}" || failed=1
}

has_gpu=$("$python" -c "import torch; print(int(torch.cuda.is_available()))") || exit 1
if [ "$has_gpu" = 0 ]; then
  echo "no CUDA device here: a tiny model on the CPU"
  measure tiny --stages plain 2 --steps 2 --rounds 2
  exit $failed
fi

export DS_ACCELERATOR=cuda
if "$python" -c "import pytest" 2>/dev/null; then
  timeout 120 "$python" -m pytest -m gpu tests -q
  code=$?
  [ $code = 0 ] || [ $code = 5 ] || failed=1 # 5: no such tests
fi

if [ "${1:-}" = --quick ]; then
  measure gpt2-124m --stages plain 2 --steps 10 --rounds 2 --minutes 2
  "$python" benchmarks/checkpoint.py --quick --groups 2-1 --output "$results/checkpoint-quick.json" || failed=1
else
  measure gpt2-124m --stages plain 0 1 2 3 --steps 20 --rounds 3 --minutes 3
  measure llama-1b --stages plain 2 3 0 1 --steps 10 --rounds 3 --minutes 2
  "$python" benchmarks/checkpoint.py --model gpt2-124m --groups plain-1 2-1 --rounds 3 --output "$results/checkpoint.json" ||
    failed=1
fi
exit $failed

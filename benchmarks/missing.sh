#!/usr/bin/env bash
# What only a GPU can show and is missing (docs/reproduction.md), the most wanted first.
#   bash benchmarks/missing.sh OUT              # all: tests fast tables wide bench
#   bash benchmarks/missing.sh OUT fast wide    # parts of it
# What is finished is not done again, so the same command goes on after an interruption;
# `timeout -s INT 580 bash benchmarks/missing.sh OUT wide` does ten minutes of it at a time.
# QUICK=1 tries it out on a CPU, with small networks on embedded digits: its numbers mean nothing.
set -uo pipefail
out=${1:?expected a folder for runs, logs and figures}
shift
parts=${*:-tests fast tables wide bench}
here=$(dirname "$0")
trap 'exit 130' INT TERM
mkdir -p "$out"
train=() attack=(--batch 1000 --precision tf32 --compile) steps=()
if [ -n "${QUICK:-}" ]; then
  export MORE=--quick SHARDS=2 BENCH="--width 2 --batch 8 --no-literal"
  train=(--data.name mnist-subset --data.held_out 5500 --data.crop 0 --data.flip false --batch 50 --epochs 2
    --model.options.width 2 --evaluate.images 50 --precision float32 --engine plain)
  attack=(--samples 8) steps=(--methods natural,yopo-5-3 --width 2 --batch 8)
fi

fast() { # a name, then settings: the recipe with these, and AutoAttack on its last weights
  local run=$out/fast/$1
  [ -f "$run/result.json" ] || python3 -m yopo train cifar10-fast "${@:2}" "${train[@]}" --out "$run" --resume
  [ -f "$run/eval.json" ] ||
    python3 -m yopo eval "$run" --attacks clean,pgd-20,autoattack --weights last "${attack[@]}"
}

rows() { # a table, then a row and options: alone on the GPU, so that its time counts
  python3 -m yopo reproduce "$1" --rows "${@:2}" ${MORE:-} --out "$out/$1"
}

for part in $parts; do
  case $part in
    tests) # one clean log: captured steps, an nccl group of one, the exchange inside the graph
      bash "$here/on_gpu.sh" "$out/tests" tests
      ;;
    fast)
      fast m-58 --epochs 58
      for radius in 1.0 1.25; do
        fast "last-70-$radius" --epochs 70 --method.grad_at last --train_eps $radius
      done
      for seed in 1 2; do # of the best so far
        fast "last-70-1.25-seed-$seed" --epochs 70 --method.grad_at last --train_eps 1.25 --seed $seed
      done
      ;;
    tables)
      rows table2 "PGD-10 40 epochs" --attacks autoattack
      printf '%s\n' 'table2 2 PGD-10' 'table2 0 YOPO-3-5 last --attacks autoattack' \
        'table4 2 TRADES-10' 'table4 1 TRADES-YOPO-3-4 --attacks autoattack' |
        bash "$here/side_by_side.sh" "$out" 3
      ;;
    wide)
      rows table3 YOPO-5-3
      rows table3 "PGD-10 40 epochs"
      ;;
    bench)
      bash "$here/on_gpu.sh" "$out/bench" bench
      python3 -m benchmarks.plain_steps "${steps[@]}" --json "$out/bench/plain-steps.json"
      ;;
    *)
      echo "no part $part; there are: tests fast tables wide bench" >&2
      exit 2
      ;;
  esac
done

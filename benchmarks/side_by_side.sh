#!/usr/bin/env bash
# Rows of the paper's tables, several at once on one GPU: their accuracies count, their times do not.
#   printf '%s\n' 'table4 1 TRADES-10' 'table2 2 YOPO-5-3 36 epochs' | bash benchmarks/side_by_side.sh runs 3
# Each line is a table, a seed and a row; each gets a log beside its run. ATTACKS='--attacks autoattack --samples 1000'
# attacks more, MORE=--quick tries it out on a CPU. What is finished is not done again.
set -uo pipefail
export out=${1:?expected a folder for the runs} jobs=${2:-3} ATTACKS=${ATTACKS:-} MORE=${MORE:-}
if command -v nvidia-cuda-mps-control >/dev/null; then # without it processes take turns on the GPU
  nvidia-cuda-mps-control -d && trap 'echo quit | nvidia-cuda-mps-control' EXIT
fi
row() {
  read -r table seed row <<<"$1"
  mkdir -p "$out/$table"
  python3 -m yopo reproduce "$table" --rows "$row" --seeds "$seed" --untimed $ATTACKS $MORE \
    --out "$out/$table" >"$out/$table/${row// /-}-seed-$seed.log" 2>&1
  echo "$1: exit status $?"
}
export -f row
xargs -d '\n' -P "$jobs" -I{} bash -c 'row "$1"' _ {}

#!/usr/bin/env bash
# Rows of the paper's tables, several at once on one GPU: their accuracies count, their times do not.
#   printf '%s\n' 'table4 1 TRADES-10' 'table2 2 YOPO-5-3 36 epochs --attacks autoattack --samples 1000' |
#     bash benchmarks/side_by_side.sh runs 3
# Each line is a table, a seed, a row and options of its own; each gets a log beside its run.
# MORE=--quick tries it out on a CPU. What is finished is not done again.
set -uo pipefail
export out=${1:?expected a folder for the runs} jobs=${2:-3} MORE=${MORE:-}
if command -v nvidia-cuda-mps-control >/dev/null; then # without it processes take turns on the GPU
  nvidia-cuda-mps-control -d && trap 'echo quit | nvidia-cuda-mps-control' EXIT
fi
row() {
  read -r table seed rest <<<"$1"
  row=${rest%% --*}
  mkdir -p "$out/$table"
  python3 -m yopo reproduce "$table" --rows "$row" --seeds "$seed" --untimed ${rest#"$row"} $MORE \
    --out "$out/$table" >"$out/$table/${row// /-}-seed-$seed.log" 2>&1
  echo "$1: exit status $?"
}
export -f row
xargs -d '\n' -P "$jobs" -I{} bash -c 'row "$1"' _ {}

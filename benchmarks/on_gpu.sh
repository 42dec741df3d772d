#!/usr/bin/env bash
# All that needs a GPU: its tests, several processes side by side, then `yopo bench` for each network.
#   bash benchmarks/on_gpu.sh FOLDER [tests|bench]
# BENCH="--width 2 --batch 8" tries the bench out on a CPU, where the tests of a GPU are skipped.
set -uo pipefail
out=${1:?expected a folder for logs and figures}
mkdir -p "$out"
shards=${SHARDS:-10}
if [ "${2:-tests}" = tests ]; then
  # what needs a package that is not there (foolbox) is left out
  python3 -m pytest tests -o addopts= --collect-only -q -m gpu -p no:cacheprovider \
    --continue-on-collection-errors | grep ^tests.*:: >"$out/gpu-tests.txt"
  for i in $(seq "$shards"); do
    awk -v i="$i" -v n="$shards" 'NR % n == i - 1' "$out/gpu-tests.txt" >"$out/shard-$i.txt"
    TORCHINDUCTOR_COMPILE_THREADS=2 xargs -d '\n' python3 -m pytest -vv --tb=short --no-header -p no:cacheprovider \
      <"$out/shard-$i.txt" >"$out/shard-$i.log" 2>&1 &
  done
  wait
  cat "$out"/shard-*.log >"$out/gpu-tests.log"
  rm "$out"/shard-*.txt "$out"/shard-*.log "$out/gpu-tests.txt"
  grep -hE "^(FAILED|ERROR)|passed|failed" "$out/gpu-tests.log"
fi
[ "${2:-bench}" = bench ] || exit 0
for model in preactresnet18 smallcnn wideresnet; do
  methods=natural,yopo-5-3-before,yopo-5-3,pgd-10
  if [ $model = smallcnn ]; then methods=natural,yopo-5-10-before,yopo-5-10,pgd-40; fi
  python3 -m yopo bench --model $model --methods $methods ${BENCH:-} --json "$out/bench-$model.json" 2>&1 |
    tee "$out/bench-$model.log"
done

#!/usr/bin/env bash
# All that needs a GPU: its tests, four groups at a time, then `yopo bench` for each network.
#   bash benchmarks/on_gpu.sh FOLDER
set -uo pipefail
out=${1:?expected a folder for logs and figures}
mkdir -p "$out"
test() { python3 -m pytest -q --no-header -p no:cacheprovider "${@:2}" >"$out/tests-$1.log" 2>&1; }
test small tests/test_engine.py -k "OnAGPU and small" &
test resnet tests/test_engine.py -k "OnAGPU and resnet" &
test others tests/test_engine.py -k "OnAGPU and (wide or own)" &
test more tests/test_engine.py tests/test_gpu.py tests/test_distributed.py -k "MoreOnAGPU or test_gpu or nccl" &
wait
tail -qn 3 "$out"/tests-*.log
for model in preactresnet18 smallcnn wideresnet; do
  methods=natural,yopo-5-3-before,yopo-5-3,pgd-10
  if [ $model = smallcnn ]; then methods=natural,yopo-5-10-before,yopo-5-10,pgd-40; fi
  python3 -m yopo bench --model $model --methods $methods --json "$out/bench-$model.json" 2>&1 |
    tee "$out/bench-$model.log"
done

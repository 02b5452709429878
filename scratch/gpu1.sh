export PYTHONUNBUFFERED=1 AUTOKERNEL_CACHE=/tmp/akcache
cd $(dirname $0)/..
nvidia-smi --query-gpu=name,driver_version,clocks.sm --format=csv,noheader
(timeout 60 python3 scratch/flush.py) 2>&1 | tail -8
(timeout 70 ncu --clock-control none --cache-control all --metrics gpu__time_duration.sum --csv python3 scratch/flush.py x > $OUT/ncu.csv 2>&1); grep -v "^==" $OUT/ncu.csv | python3 -c "
import csv,sys
for r in csv.DictReader(l for l in sys.stdin if l.startswith('\"')): print(r['Kernel Name'][:30], r['Metric Value'], r['Metric Unit'])" | grep -iE "softmax|matmul|gemm|nvjet|cunn" | tail -22
for k in matmul softmax flash_attention fused_mlp; do for t in cold warm; do s=$(date +%s.%N); timeout 150 python3 bench.py --kernel kernels/$k.py --traceback > $OUT/b_${k}_$t.txt 2>&1; echo "$k $t rc=$? wall $(echo "$(date +%s.%N) - $s" | bc)"; done; grep -E "^(smoke|shape_sw|numer|determ|edge|correctness|reason)" $OUT/b_${k}_warm.txt | cut -c1-250; tail -3 $OUT/b_${k}_warm.txt; done
cat $OUT/b_*_warm.txt > $OUT/bench_all.txt
(time timeout 60 python3 bench.py --calibrate) 2>&1 | tail -14
(timeout 160 python3 scratch/check_cuda_mm.py) > $OUT/check_cuda_mm.txt 2>&1; tail -45 $OUT/check_cuda_mm.txt

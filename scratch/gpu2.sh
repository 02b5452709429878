export PYTHONUNBUFFERED=1 AUTOKERNEL_CACHE=/tmp/akcache
cd $(dirname $0)/..
(timeout 60 python3 scratch/flush.py) 2>&1 | tail -8
timeout 60 python3 bench.py --calibrate > /dev/null
for k in ${KS:-matmul softmax flash_attention fused_mlp}; do for t in cold warm; do s=$(date +%s%N); timeout 150 python3 bench.py --kernel kernels/$k.py --traceback > $OUT/b_${k}_$t.txt 2>&1; echo "$k $t rc=$? wall $(( ($(date +%s%N) - s)/1000000 )) ms"; done; grep -E "^(smoke|shape_sw|numer|determ|edge|correctness|reason|launch|peak_v|compile_s|registers|spill|speedup)" $OUT/b_${k}_warm.txt | cut -c1-250; tail -3 $OUT/b_${k}_warm.txt; done

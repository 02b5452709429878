export PYTHONUNBUFFERED=1 AUTOKERNEL_CACHE=/tmp/akcache
cd $(dirname $0)/..
timeout 200 python3 scratch/tune_mem.py > $OUT/tune_mem.txt 2>&1; tail -60 $OUT/tune_mem.txt
timeout 60 python3 scratch/check_cuda_mem.py --no-sweep > $OUT/check_cuda_mem.txt 2>&1; tail -40 $OUT/check_cuda_mem.txt
timeout 120 python3 scratch/tune_mm.py --ops flash_attention > $OUT/tune_mm.txt 2>&1; tail -30 $OUT/tune_mm.txt
for k in cross_entropy cuda/flash_attention; do timeout 60 python3 bench.py --kernel kernels/$k.py > $OUT/b.txt 2>&1; grep -E "^(corr|reason|review|vendor|bench_time)" $OUT/b.txt; tail -3 $OUT/b.txt; done

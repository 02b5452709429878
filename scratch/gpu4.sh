export PYTHONUNBUFFERED=1 AUTOKERNEL_CACHE=/tmp/akcache
cd $(dirname $0)/..
timeout 70 python3 scratch/tune_mem.py > $OUT/tune_mem.txt 2>&1; tail -75 $OUT/tune_mem.txt | cut -c1-150
timeout 80 python3 scratch/check_cuda_mem.py > $OUT/check_cuda_mem.txt 2>&1; tail -44 $OUT/check_cuda_mem.txt | cut -c1-170

# Issue 9 on a GPU. Before: pip install --target .carry --python-version 3.12 --only-binary=:all: --no-deps kernels==0.17.2 tomlkit
# (8 MB; carry: [".carry"]; the machine has the rest). Then: bash scratch/gpu_export.sh      about 3 minutes on 16 cores
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD/.carry OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=1
OUT=${OUT:-/tmp/gpu_export}; D=/tmp/exports; mkdir -p $OUT $D; rm -rf $D/*
date +%T
# 1. Each of the 18: exported, built, and its tests run in a fresh process with get_local_kernel (values, compile, backward)
one() { k=$1; n=t-$(echo $k | tr '/_' '--'); s=$(date +%s)
  timeout 220 python3 export_hf.py --name $n --kernel kernels/$k.py --force --repo-id user/$n --output $D > $OUT/$n.txt 2>&1
  echo "$k rc=$? $(( $(date +%s) - s ))s $(head -1 $OUT/$n.txt | cut -c1-300)"; }
export -f one; export OUT D
for k in flash_attention fused_mlp matmul cross_entropy softmax reduce layernorm rmsnorm rotary_embedding; do echo cuda/$k; echo $k; done |
  xargs -P ${JOBS:-9} -I{} bash -c 'one {}'
date +%T
# 2. All of them together in one process, through LOCAL_KERNELS + get_kernel: values, compile, the pair of an operator apart
LOCAL_KERNELS=$(for d in $D/*/; do n=$(basename $d); printf "user/$n=$d:"; done | sed 's/:$//') \
  timeout 200 python3 scratch/gpu_export.py $D 2>&1 | tee $OUT/together.txt | tail -30
date +%T

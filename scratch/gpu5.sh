export PYTHONUNBUFFERED=1 AUTOKERNEL_CACHE=/tmp/akcache
cd $(dirname $0)/..
mkdir -p $OUT/r
timeout 60 python3 bench.py --calibrate | tr '\n' ' '; echo
cat > /tmp/show.py <<'PY'
import json,sys
try: v=json.load(open(sys.argv[1]))
except Exception as e: print(sys.argv[2:], 'no json', e, open(sys.argv[1].replace('.json','.err')).read()[-300:]); sys.exit()
laps=' '.join(f'{k}={x:.1f}' for k,x in (v.get('laps') or {}).items())
print(f"{sys.argv[2]:24s} rc={sys.argv[3]} wall={int(sys.argv[4])/1e3:.1f}s bench={v['bench_time_seconds']:.1f} {v['correctness']} {(v.get('reason') or '')[:260]} conf={v.get('confinement')} vendor={v.get('vendor_library')} regs={v.get('registers')} spill={v.get('spill_bytes')} {laps}")
for r in v.get('sizes') or []:
    f=lambda k: f"{r[k]:.1f}" if r.get(k) is not None else 'na'
    w=r['wall_us']; d=w['candidate']-w['baseline']-(r['latency_us']-r['pytorch_latency_us'])
    best=f" best x{r['speedup_vs_best']:.4f} +-{r['gain_spread_pct']:.2f}%" if r.get('speedup_vs_best') else ''
    print(f"    {r['size']:16s} {r['latency_us']:9.1f} us torch {r['pytorch_latency_us']:9.1f} x{r['speedup_vs_pytorch']:.3f} gb={f('bandwidth_gb_s')} %m={f('pct_measured_bandwidth')}/{f('pct_measured_compute')} %p={f('pct_peak_bandwidth')}/{f('pct_peak_compute')} noise={r['noise_pct']:.2f} launch={r['launch_us']:.0f} clock={d:.0f}{best}")
for k,x in (v.get('counters') or {}).items(): print('      ',k,x)
PY
run() { k=$1; t=$2; shift 2; s=$(date +%s%N); timeout 120 python3 bench.py --kernel kernels/$k.py "$@" --json > $OUT/r/$t.json 2> $OUT/r/$t.err; rc=$?; python3 /tmp/show.py $OUT/r/$t.json $k $rc $(( ($(date +%s%N) - s)/1000000 )); }
S_matmul=medium,large,xlarge S_softmax=large,vocab_50257,vocab_151936 S_layernorm=medium,large S_rmsnorm=medium,large
S_flash_attention=medium,large,xlarge S_fused_mlp=medium,large S_cross_entropy=medium,vocab_50257,large S_rotary_embedding=large,long S_reduce=large
OPS="matmul softmax layernorm rmsnorm flash_attention fused_mlp cross_entropy rotary_embedding reduce"
case $1 in
final)
timeout 60 python3 scratch/tune_mem.py softmax > $OUT/tune_mem.txt 2>&1; grep -vE "^ {15}" $OUT/tune_mem.txt | tail -12 | cut -c1-120; grep -A3 -E "50257|151936" $OUT/tune_mem.txt | cut -c1-140
timeout 75 python3 scratch/check_cuda_mem.py --only softmax,layernorm,rmsnorm,rotary_embedding > $OUT/check_cuda.txt 2>&1; tail -32 $OUT/check_cuda.txt | cut -c1-160
for k in $OPS; do v=S_$k; run $k t_$k --sizes ${!v}; done
for k in $OPS; do run $k w_$k --best kernels/$k.py; done ;;
esac
tar czf $OUT/$1.tgz -C $OUT r; rm -rf $OUT/r

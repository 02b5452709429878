export PYTHONUNBUFFERED=1 AUTOKERNEL_CACHE=/tmp/akcache
cd $(dirname $0)/..
timeout 60 python3 bench.py --calibrate | tr '\n' ' '; echo
mkdir -p $OUT/r; 
run() { s=$(date +%s%N); timeout 200 python3 bench.py --kernel kernels/$1.py $3 $4 --json > $OUT/r/$2.json 2> $OUT/r/$2.err; rc=$?; python3 - $OUT/r/$2.json $1 $rc $(( ($(date +%s%N) - s)/1000000 )) <<'PY'
import json,sys
try: v=json.load(open(sys.argv[1]))
except Exception as e: print(sys.argv[2:], 'no json', e); sys.exit()
print(f"{sys.argv[2]:24s} rc={sys.argv[3]} wall={int(sys.argv[4])/1e3:.1f}s bench={v['bench_time_seconds']:.1f} {v['correctness']} {(v.get('reason') or '')[:230]} regs={v.get('registers')} spill={v.get('spill_bytes')} launch={v.get('launch_us') and round(v['launch_us'],1)}")
for r in v.get('sizes') or []:
    f=lambda k: f"{r[k]:.1f}" if r.get(k) is not None else 'na'
    w=r['wall_us']; d=w['candidate']-w['baseline']-(r['latency_us']-r['pytorch_latency_us'])
    print(f"    {r['size']:16s} {r['latency_us']:9.1f} us torch {r['pytorch_latency_us']:9.1f} x{r['speedup_vs_pytorch']:.3f} +-{r['speedup_vs_pytorch_spread']:.3f} tf={f('throughput_tflops')} gb={f('bandwidth_gb_s')} %bw={f('pct_measured_bandwidth')} %fl={f('pct_measured_compute')} noise={r['noise_pct']:.2f} wall_minus_claim={d:.0f}")
PY
}
for k in $KS; do run $k $(echo $k | tr / _) --sizes ${SZ:-all}; done
tar czf $OUT/r.tgz -C $OUT r; rm -rf $OUT/r

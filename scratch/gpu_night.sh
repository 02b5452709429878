# Twenty real experiments on the rmsnorm starter, record included: at most 300 s in all, and what each cost.
# Then ten records of a kernel equal to the best: none may be kept. Needs git and python3 with torch, triton, filelock.
#   bash scratch/gpu_night.sh [python3]
py=${1:-python3}; command -v git > /dev/null || { echo "no git here: carry one, or put it on the PATH"; exit 1; }
out=${OUT:-/tmp/night-out}; mkdir -p $out; src=$(cd $(dirname $0)/.. && pwd); run=$(mktemp -d)/ak; mkdir -p $run
tar -C $src -cf - --exclude=.git --exclude=workspace --exclude=results.tsv --exclude=.venv . | tar -C $run -xf -
cd $run; export PYTHONUNBUFFERED=1 AUTOKERNEL_CACHE=${AUTOKERNEL_CACHE:-/tmp/akcache}
git init -q . && git config user.name night && git config user.email night@example.com && git add -A && git commit -qm all
timeout 60 $py bench.py --calibrate | tr '\n' ' '; echo
$py orchestrate.py start gpu > $out/log.txt; $py orchestrate.py next rmsnorm >> $out/log.txt
cat > edit.py <<'PY'
import re, sys
number, text = int(sys.argv[1]), open("kernels/rmsnorm.py").read()
ideas = [{}, {"ELEMENTS_PER_THREAD": 16}, {"ELEMENTS_PER_THREAD": 8}, {"ELEMENTS_PER_THREAD": 64}, {"TILE": 4096},
         {"TILE": 16384}, {"TILE": 2048}, {"PROGRAMS": 256}, {"PROGRAMS": 1024}, {"HOIST": False},
         {"LOAD_POLICY": "evict_first"}, {"STORE_POLICY": "evict_first"}, {"LOAD_POLICY": "evict_last"},
         {"MAX_BLOCK": 8192}, {"MAX_BLOCK": 4096}, {"TILE": 4096, "ELEMENTS_PER_THREAD": 16},
         {"TILE": 16384, "ELEMENTS_PER_THREAD": 16}, {"HOIST": False, "ELEMENTS_PER_THREAD": 16}, "wrong", "crash"]
idea = ideas[number]
if idea == "wrong":
    text = text.replace("+ eps", "+ 2 * eps + 0.01")
elif idea == "crash":
    text = text.replace("x = x.to(tl.float32)", "x = tl.load(x_ptr + (1 << 44) + column).to(tl.float32)", 1)
else:
    for name, value in idea.items():
        text = re.sub(rf'("{name}": )[^,]+,', lambda m: f"{m[1]}{value!r},", text, count=1)
open("kernel.py", "w").write(text)
print(idea or "the starter")
PY
begin=$(date +%s%N)
one() {  # number
  a=$(date +%s%N); timeout 120 $py bench.py > $out/bench-$1.txt 2>&1; b=$(date +%s%N)
  timeout 60 $py orchestrate.py record -m "$2" > $out/record.txt 2>&1; rc=$?; c=$(date +%s%N); cat $out/record.txt >> $out/log.txt
  printf '%3s bench %5.1f s record %4.2f s rc %s  %s\n' $1 $(( (b-a)/1000000 ))e-3 $(( (c-b)/1000000 ))e-3 $rc \
    "$(grep -hE '^(decision|reason|orchestrate.py)' $out/record.txt | tr -s ' ' | tr '\n' ' ' | cut -c1-150)"
}
for i in $(seq 0 19); do one $i "$($py edit.py $i)"; done
echo "twenty experiments: $(( ($(date +%s%N) - begin) / 1000000000 )) s (at most 300)"
best=$(cat workspace/best/rmsnorm.py)
for i in $(seq 20 29); do printf '%s\nEQUAL = %s\n' "$best" $i > kernel.py; one $i "equal to the best, $i"; done
$py orchestrate.py status; $py orchestrate.py history | head -60
$py orchestrate.py report > /dev/null 2>&1; cp results.tsv workspace/report.html workspace/report.md workspace/progress.png $out/
git log --oneline | head; rm -rf $out/bench-*.txt

#!/bin/sh
# The whole pipeline on a tiny model, in under five minutes, without a GPU: from a model to kernels, three experiments
# (one kept, one no better, one wrong), the model measured, a kernel exported. Works in a scratch clone: nothing of yours
# is touched. Triton runs in its interpreter on a CPU, so times mean nothing there.
#
#     sh examples/tour.sh               # or with a Python of your own: PYTHON=/path/to/python sh examples/tour.sh
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-uv run --quiet --project "$root" python}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
git clone --quiet "$root" "$scratch/autokernel"
cd "$scratch/autokernel"
git config user.name tour
git config user.email tour@localhost

step() {
    printf '\n$ uv run %s\n' "$*"
    $python "$@"
}
wrong() { # a command that must fail, as the tour shows
    printf '\n$ uv run %s\n' "$*"
    if $python "$@"; then echo "this should have failed" && exit 1; fi
}

printf '== 1. Where does the time of a model go? ==\n'
step profile.py --model models/tiny.py --class-name TinyLlama --input-shape 1,24
step extract.py --top 6

printf '\n== 2. The loop: next, edit, bench, record ==\n'
step orchestrate.py start tour
step orchestrate.py next
step bench.py
step orchestrate.py record -m "starter"

printf '\n-- an idea that changes nothing: it is reverted --\n'
echo '# a comment makes nothing faster' >> kernel.py
step bench.py
step orchestrate.py record -m "a comment"

printf '\n-- an idea that is wrong: it is refused, written down, and reverted --\n'
sed 's/return out/return out * 1.01/' kernel.py > edited && mv edited kernel.py
wrong bench.py
step orchestrate.py record -m "one per cent more of everything"
step orchestrate.py history
step orchestrate.py report

printf '\n== 3. Is the model right, and faster? ==\n'
printf '\n$ uv run verify.py\n'
$python verify.py || [ $? -eq 1 ] # 1: right, not faster, which is what a CPU can say

printf '\n== 4. Publish ==\n'
step export_hf.py --name tour-kernel --license mit --output export
ls export/*

printf '\nThat was the tour. Next: program.md for an agent, docs/getting-started.md for you.\n'

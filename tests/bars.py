"""The starters' times, measured on this GPU and held against the bars they must reach.

Per starter: a run with an empty compile cache, a run with a full one, and a run at the sizes of the bars in which the
kernel is also timed against itself. Records lie under --out, so the parts can be run apart; the table shows them all.

    python tests/bars.py triton                       # nine starters
    python tests/bars.py cuda --ops softmax,reduce
    python tests/bars.py show
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from autokernel.paths import cache_dir, workspace  # noqa: E402

# op: {size: least ratio to PyTorch's operator, (Triton, CUDA), 0: none asked}; the last size is the largest
RATIOS = {
    "matmul": {"medium": (0.80, 0.60), "large": (0.80, 0.60), "xlarge": (0.80, 0.60)},
    "softmax": {"large": (2.6, 2.6), "vocab_50257": (1.5, 1.5), "vocab_151936": (1.6, 1.6)},
    "layernorm": {"medium": (1.3, 1.3), "large": (1.65, 1.65)},
    "rmsnorm": {"medium": (1.2, 1.2), "large": (1.5, 1.5)},
    "flash_attention": {"medium": (0.75, 0.45), "large": (0.75, 0.45), "xlarge": (0.75, 0.45)},
    "fused_mlp": {"medium": (0.88, 0.60), "large": (0.88, 0.60)},
    "cross_entropy": {"medium": (2.1, 2.1), "vocab_50257": (2.3, 2.3), "large": (3.0, 3.0)},
    "rotary_embedding": {"large": (6.0, 6.0), "long": (0.0, 0.0)},
    "reduce": {"large": (1.3, 1.3)},
}
COMPUTE_BOUND = ("matmul", "flash_attention", "fused_mlp")
COPY_PERCENT = {"triton": 85, "cuda": 90}  # of the measured copy bandwidth, memory-bound operators at the last size
WALL = {"triton": {"cold": 20, "warm": 11}, "cuda": {"cold": 15, "warm": 11}}  # mean seconds over the nine


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["triton", "cuda", "show"], help="which starters to run, or only the table")
    p.add_argument("--ops", default=",".join(RATIOS), help="operators (default: all nine)")
    p.add_argument("--out", type=Path, default=workspace() / "bars", help="where the records are kept")
    p.add_argument("--without", default="", help="parts to leave out: cold,warm,bars")
    args = p.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.what != "show":
        for op in args.ops.split(","):
            measure(args.what, op, args.out, args.without.split(","))
    missed = [line for backend in ("triton", "cuda") for line in table(backend, args.out)]
    if not any(args.out.glob("*-bars.json")):
        missed.append(f"all: nothing was measured into {args.out} yet")
    print("\nmissed:", "; ".join(missed) or "none")
    return 1 if missed else 0


def measure(backend: str, op: str, out: Path, without: list[str]) -> None:
    path = f"kernels/{'cuda/' if backend == 'cuda' else ''}{op}.py"
    sizes = ["--sizes", ",".join(RATIOS[op]), "--best", path]
    with tempfile.TemporaryDirectory() as cache:
        for kept in ("calibration", "bytecode"):  # once a machine, not in every cold run: its ceilings, its libraries
            (cache_dir() / kept).mkdir(parents=True, exist_ok=True)
            (Path(cache) / kept).symlink_to(cache_dir() / kept)
        for part, options in {"cold": [], "warm": [], "bars": sizes}.items():
            if part in without:
                continue
            started = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "bench.py", "--kernel", path, "--json", *options],
                cwd=ROOT, env=os.environ | {"AUTOKERNEL_CACHE": cache}, capture_output=True, text=True,
            )  # fmt: skip
            wall = time.perf_counter() - started
            record = json.loads(done.stdout) if done.stdout.startswith("{") else {"reason": done.stderr[-300:]}
            (out / f"{backend}-{op}-{part}.json").write_text(json.dumps(record | {"wall": wall}))
            laps = " ".join(f"{name} {seconds:.1f}" for name, seconds in (record.get("laps") or {}).items())
            print(f"{path:32} {part:4} {wall:5.1f} s  {record.get('correctness')}  {laps}  {record.get('reason') or ''}"
                  [:240], flush=True)  # fmt: skip


def table(backend: str, out: Path) -> list[str]:
    """Print what was measured of one backend; returns the bars that were missed."""
    read = {p: {op: _read(out / f"{backend}-{op}-{p}.json") for op in RATIOS} for p in ("cold", "warm", "bars")}
    missed, drift, gains = [], [], []
    for op in RATIOS:
        record = read["bars"][op]
        if record is None:
            continue
        if record.get("correctness") != "PASS":
            missed.append(f"{backend} {op}: {record.get('correctness')} {record.get('reason')}")
            continue
        rows, again = _rows(record), _rows(read["warm"][op])
        missed += [f"{backend} {op} {size}: {fault}" for size in RATIOS[op] for fault in _size(backend, op, size, rows)]
        long = [row for row in rows.values() if row["latency_us"] > 30]
        gains += [row["paired_gain_pct"] for row in long]
        pairs = [(row["latency_us"], again[row["size"]]["latency_us"]) for row in long if row["size"] in again]
        drift += [100 * abs(first / second - 1) for first, second in pairs]
    missed += _walls(backend, read)
    if drift:
        print(f"{backend}: two runs differ by at most {max(drift):.2f} % (bar 2) over {len(drift)} timings above 30 us")
        missed += [f"{backend}: two runs differ by {max(drift):.2f} %"] if max(drift) > 2 else []
    if gains:
        within = sum(abs(gain) <= 1 for gain in gains)
        print(f"{backend}: against itself within 1 % in {within} of {len(gains)} (bar 19 of 20)")
        missed += [f"{backend}: itself within 1 % in {within} of {len(gains)}"] if within < 0.95 * len(gains) else []
    return missed


def _size(backend: str, op: str, size: str, rows: dict) -> list[str]:
    """Print one size's row; returns what it missed."""
    if size not in rows:
        return ["not timed"]
    row, floor = rows[size], RATIOS[op][size][backend == "cuda"]
    roofs = ("measured_bandwidth", "measured_compute", "peak_bandwidth", "peak_compute")
    shares = {name: row.get(f"pct_{name}") or 0.0 for name in roofs}
    print(f"{backend:6} {op:17} {size:13} {row['latency_us']:9.1f} us  PyTorch {row['pytorch_latency_us']:9.1f}"
          f"  x{row['speedup_vs_pytorch']:.3f} (bar {floor})  copy {shares['measured_bandwidth']:5.1f} %"
          f"  compute {shares['measured_compute']:5.1f} %  itself {row['paired_gain_pct']:+.2f}"
          f" +-{row['gain_spread_pct']:.2f} %")  # fmt: skip
    missed = [f"{row['speedup_vs_pytorch']:.3f} of {floor}"] if row["speedup_vs_pytorch"] < floor else []
    if max(shares.values()) > 100:
        missed.append(f"{max(shares.values()):.1f} % of what the GPU can do")
    least = 0 if op in COMPUTE_BOUND or size != list(RATIOS[op])[-1] else COPY_PERCENT[backend]
    if shares["measured_bandwidth"] < least:
        missed.append(f"{shares['measured_bandwidth']:.1f} % of copy, bar {least}")
    return missed


def _rows(record: dict | None) -> dict[str, dict]:
    return {row["size"]: row for row in (record or {}).get("sizes") or []}


def _walls(backend: str, records: dict) -> list[str]:
    missed = []
    for part, bar in WALL[backend].items():
        walls = [record["wall"] for record in records[part].values() if record]
        if walls:
            mean = statistics.mean(walls)
            print(f"{backend}: {part} run {mean:.1f} s mean of {len(walls)} (bar {bar})")
            missed += [f"{backend}: {part} run {mean:.1f} s of {bar} s"] if mean > bar else []
    return missed


def _read(path: Path) -> dict | None:
    return json.loads(path.read_text()) if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())

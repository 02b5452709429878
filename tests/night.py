"""Stand-ins for the tests of the night: a bench that takes no time, and an agent that plays a script.

    python night.py bench                 # writes workspace/last_run.json from SPEED and VERDICT in kernel.py
    python night.py agent SCRIPT BRIEF    # next, write a kernel, bench, record, until DONE; falls over now and then
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path.cwd()
sys.path.insert(0, str(ROOT))

KERNEL = '''"""Idea {note}."""
KERNEL_TYPE = "{op}"
BACKEND = "triton"
SPEED = {speed}
VERDICT = "{verdict}"
{filler}

def kernel_fn(x, weight, eps=1e-6):
    return x
'''


def kernel(op, speed, verdict="PASS", note="", lines=0):
    filler = "\n".join(f"line_{i} = {i}" for i in range(lines))
    return KERNEL.format(op=op, speed=speed, verdict=verdict, note=note, filler=filler)


def _constant(source, name, default=""):
    found = re.search(rf'^{name} = "?([\w.]+)"?$', source, re.MULTILINE)
    return found[1] if found else default


def bench(options=()):
    from autokernel.integrity import harness
    from autokernel.paths import best_kernel, workspace
    from autokernel.records import RunRecord

    data = (ROOT / "kernel.py").read_bytes()
    source, best = data.decode(), best_kernel(ROOT / "kernel.py")
    verdict, speed = _constant(source, "VERDICT", "PASS"), float(_constant(source, "SPEED", "1"))
    active = workspace() / "active"
    found = harness()
    values = {
        "kernel_type": _constant(source, "KERNEL_TYPE") or None, "backend": "triton", "quick": "--quick" in options,
        "target": active.read_text().strip() if active.exists() else None, "gpu_name": "Test GPU", "dtype": "float16",
        "gpu_memory_mb": 1000.0, "peak_vram_mb": 10.0, "harness": found.status, "harness_sha256": found.sha256,
        "bench_time_seconds": 0.1, "reason": None if verdict == "PASS" else f"scripted {verdict}", "size": "target",
    }  # fmt: skip
    if verdict == "PASS":
        values |= {
            "latency_us": 100 / speed, "throughput_tflops": speed, "bandwidth_gb_s": 1000 * speed,
            "bottleneck": "memory", "arithmetic_intensity": 1.0, "pct_peak_bandwidth": 20 * speed,
            "pct_peak_compute": speed,
            "pct_measured_bandwidth": 25 * speed, "speedup_vs_pytorch": speed, "noise_pct": 0.3,
        }  # fmt: skip
        if best:
            theirs = best.read_text()
            gain = 100 * (speed / float(_constant(theirs, "SPEED", "1")) - 1)
            values |= {"best_sha256": RunRecord.new(best.read_bytes(), "PASS").values["source_sha256"],
                       "paired_gain_pct": gain, "speedup_vs_best": 1 + gain / 100, "gain_spread_pct": 0.2}  # fmt: skip
    RunRecord.new(data, verdict, **values).write()
    return 0 if verdict == "PASS" else 1


def command(*arguments):
    line = [sys.executable, "-B", "orchestrate.py", *arguments]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def agent(script, brief):
    """Plays script[target][k] as the k-th experiment on a target, and knows nothing but what the commands say."""
    assert "program.md" in brief and "orchestrate.py record" in brief
    moves, said = json.loads(Path(script).read_text()), "next: uv run orchestrate.py next"
    for _ in range(9):
        if "next: uv run orchestrate.py next" in said:
            said = command("next")
            if said.startswith("DONE"):
                return 0
            target = said.split(":")[0].split()[1]
            number = sum("run_id" in row for row in json.loads(command("history", "--kernel", target, "--json")))
        speed, verdict = moves[target][number]
        (ROOT / "kernel.py").write_text(kernel("rmsnorm", speed, verdict, f"{target} {number}"))
        bench()
        said = command("record", "-m", f"idea {number}\tof {target}\nsecond line")
        number += 1
    raise SystemExit("out of quota")


if __name__ == "__main__":
    sys.exit(bench(sys.argv[2:]) if sys.argv[1] == "bench" else agent(*sys.argv[2:4]))

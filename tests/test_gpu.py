"""GPU names, the table, the roofline, the physical floor and the kept calibration; all but the last test on a CPU."""

import dataclasses
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from autokernel import calibrate as measuring
from autokernel import gpu, paths
from autokernel.gpu import Calibration, Device, GpuSpec, GpuTableError, floor_seconds, lookup, peak_tflops, roofline

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
H200 = GpuSpec("H200", bandwidth_gb_s=4800, l2_mb=60,
               tflops={"fp16": 989.4, "bf16": 989.4, "tf32": 494.7, "fp32": 66.9, "fp64": 66.9})


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("AUTOKERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("AUTOKERNEL_GPUS", raising=False)


# Names and sizes (MiB) as nvidia-smi, torch and rocm-smi report them; the size may be missing.
KNOWN = [
    ("NVIDIA H200", 143771, "H200 SXM"), ("NVIDIA H200 NVL", 143771, "H200 NVL"),
    ("NVIDIA H100 80GB HBM3", 81559, "H100 SXM"), ("NVIDIA H100 PCIe", 81559, "H100 PCIe"),
    ("NVIDIA H100 NVL", 95830, "H100 NVL"), ("NVIDIA GH200 480GB", 97871, "GH200 96 GB HBM3"),
    ("NVIDIA GH200 144G HBM3e", 153008209920 // MIB, "GH200 144 GB HBM3e"),
    ("NVIDIA B200", 183359, "B200"), ("NVIDIA GB200", 189471, "GB200"),
    ("NVIDIA A100-SXM4-80GB", 81920, "A100 SXM4 80 GB"), ("NVIDIA A100-SXM4-40GB", 40960, "A100 SXM4 40 GB"),
    ("NVIDIA A100-PCIE-40GB", 40960, "A100 PCIe 40 GB"), ("NVIDIA A100 80GB PCIe", 81920, "A100 PCIe 80 GB"),
    ("A100-SXM4-40GB", 40536, "A100 SXM4 40 GB"), ("NVIDIA A10", 23028, "A10"),
    ("NVIDIA L4", 23034, "L4"), ("NVIDIA L40", 46068, "L40"), ("NVIDIA L40S", 46068, "L40S"),
    ("Tesla T4", 15360, "T4"), ("NVIDIA T4", 14910, "T4"),
    ("Tesla V100-SXM2-16GB", 16160, "V100 SXM2 16 GB"), ("Tesla V100-PCIE-32GB", 32510, "V100 PCIe 32 GB"),
    ("NVIDIA GeForce RTX 3080", 10240, "RTX 3080 10 GB"), ("NVIDIA GeForce RTX 3080", 12288, "RTX 3080 12 GB"),
    ("GeForce RTX 3090", 24268, "RTX 3090"), ("NVIDIA GeForce RTX 4080", 16376, "RTX 4080"),
    ("NVIDIA GeForce RTX 4090", 24564, "RTX 4090"), ("NVIDIA GeForce RTX 5070 Ti", 16303, "RTX 5070 Ti"),
    ("NVIDIA GeForce RTX 5080", 16303, "RTX 5080"), ("NVIDIA GeForce RTX 5090", 32607, "RTX 5090"),
    ("NVIDIA RTX A6000", 49140, "RTX A6000"), ("RTX A6000", 45632, "RTX A6000"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "RTX PRO 6000 Blackwell Server"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, "RTX PRO 6000 Blackwell Workstation"),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887, "RTX PRO 6000 Blackwell Max-Q"),
    ("Orin", 62841, "Jetson AGX Orin 64 GB"), ("Orin", 30697, "Jetson AGX Orin 32 GB"),
    ("AMD Instinct MI300X", 196592, "MI300X"), ("AMD Instinct MI325X", 262128, "MI325X"),
    ("AMD Instinct MI350X", 294896, "MI350X"), ("AMD Instinct MI355X", 294896, "MI355X"),
    ("nvidia  h200", None, "H200 SXM"),
]
UNKNOWN = [
    ("NVIDIA H100", 97871), ("NVIDIA H100 80GB HBM2e", 81559), ("NVIDIA H100 64GB HBM2", 65536), ("NVIDIA H20", 97871),
    ("NVIDIA H20-3e", 143771), ("NVIDIA H800", 81559), ("NVIDIA H800 PCIe", 81559), ("NVIDIA GB300", 284208),
    ("NVIDIA B300 SXM6 AC", 275040), ("NVIDIA GB10", 122570), ("NVIDIA A10G", 23028), ("NVIDIA A10M", 23028),
    ("NVIDIA A16", 15356), ("NVIDIA A2", 15356), ("NVIDIA A30", 24576), ("NVIDIA A40", 46068),
    ("NVIDIA A800-SXM4-80GB", 81920),
    ("NVIDIA A100-SXM-64GB", 65536), ("NVIDIA L2", 23034), ("NVIDIA L20", 46068), ("NVIDIA RTX A1000", 8188),
    ("NVIDIA RTX A1000 Laptop GPU", 4096), ("NVIDIA RTX A4000", 16376), ("NVIDIA RTX 6000 Ada Generation", 49140),
    ("NVIDIA RTX 6000D", 86016), ("NVIDIA RTX PRO 5000 Blackwell", 48935), ("NVIDIA GeForce RTX 3080 Ti", 12288),
    ("NVIDIA GeForce RTX 3080 Laptop GPU", 16384), ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", 16384),
    ("NVIDIA GeForce RTX 3090 Ti", 24564), ("NVIDIA GeForce RTX 4080 SUPER", 16376),
    ("NVIDIA GeForce RTX 4090 D", 24564),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376), ("NVIDIA GeForce RTX 5090 D", 32607),
    ("NVIDIA GeForce RTX 5070", 12227),
    ("NVIDIA GeForce RTX 5090 Laptop GPU", 24463), ("NVIDIA GeForce RTX 5070 Ti Laptop GPU", 12227),
    ("Tesla V100S-PCIE-32GB", 32510), ("Tesla V100-SXM3-32GB", 32510), ("Tesla P100-PCIE-16GB", 16280),
    ("NVIDIA T400 4GB", 4096), ("NVIDIA T4G", 15360), ("Quadro RTX 6000", 24576), ("NVIDIA TITAN V", 12288),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864), ("NVIDIA H200 MIG 3g.71gb", 71424), ("GRID A100-10C", 10240),
    ("NVIDIA L40S-24Q", 24576), ("AMD Instinct MI300A", 131072), ("AMD Instinct MI308X", 196592),
    ("AMD Radeon RX 7900 XTX", 24560), ("AMD Instinct MI250X", 65520), ("H200x", 143771), ("", 0), ("cpu", None),
    # the right name, but not the whole card: a slice, or a card with other memory
    ("NVIDIA H200", 71424), ("NVIDIA A100-SXM4-40GB", 4864), ("NVIDIA GeForce RTX 3080", 20480), ("Orin", 15656),
    # two cards of one name and no size to tell them apart
    ("NVIDIA GeForce RTX 3080", None), ("Orin", None),
]


def size(mib):
    return None if mib is None else mib * MIB


@pytest.mark.parametrize("name, mib, expected", KNOWN)
def test_known_gpu(name, mib, expected):
    assert lookup(name, size(mib)).name == expected


@pytest.mark.parametrize("name, mib", UNKNOWN)
def test_unknown_gpu_is_none(name, mib):
    assert lookup(name, size(mib)) is None


def test_sm_count_and_architecture_must_agree():
    h200 = {"name": "NVIDIA H200", "memory_bytes": 143771 * MIB}
    assert lookup(**h200, sms=132, arch="9.0").name == "H200 SXM"
    assert lookup(**h200, sms=60) is None                       # a share of the card
    assert lookup(**h200, arch="10.0") is None


@pytest.mark.parametrize("arch, sms, mib, expected", [
    ("gfx942:sramecc+:xnack-", 304, 196592, "MI300X"), ("gfx942", 304, 262128, "MI325X"),
    ("gfx942", 228, 131072, None),                              # MI300A
    ("gfx950", 256, 294896, None),                              # MI350X or MI355X: no telling
    ("gfx1100", 48, 24560, None), (None, None, None, None)])
def test_amd_with_a_generic_name_goes_by_architecture(arch, sms, mib, expected):
    spec = lookup("AMD Radeon Graphics", size(mib), sms, arch)
    assert (spec and spec.name) == expected


def test_every_entry_is_complete_and_plausible():
    for spec in gpu.tables()[1]:
        assert spec.device_names and spec.arch and spec.memory_gb and spec.sms and spec.source, spec
        assert {"fp16", "fp32"} <= set(spec.tflops), spec
        # Dense tensor peaks at a clock that exists: FLOP per SM and clock are powers of two of the architecture.
        ghz = spec.tflops["fp32"] * 1e3 / spec.sms / {"7.0": 128, "7.5": 128, "8.0": 128}.get(spec.arch, 256)
        assert 0.9 < ghz < 2.7, (spec.name, ghz)
        assert 1.9 < spec.tflops["fp16"] / spec.tflops["fp32"] < 32.5, spec
        if "tf32" in spec.tflops:
            assert spec.tflops["fp16"] / spec.tflops["tf32"] == pytest.approx(2, rel=0.01), spec
        assert spec.tflops.get("bf16", spec.tflops["fp16"]) == spec.tflops["fp16"]


def test_figures_that_the_original_had_wrong():
    by_name = {spec.name: spec for spec in gpu.tables()[1]}
    assert by_name["H100 SXM"].tflops["fp16"] == 989.4 and by_name["H100 PCIe"].tflops["fp16"] == 756
    assert by_name["H200 SXM"].bandwidth_gb_s == 4800 and by_name["L40"].bandwidth_gb_s == 864
    assert by_name["RTX 4090"].tflops["fp16"] == 165.2          # not 330 (float16 accumulation), not 660 (sparsity)
    assert by_name["T4"].tflops.get("bf16") is None             # Turing has no bfloat16 tensor cores


# --- the user's own table -------------------------------------------------------------------------------------------

def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_user_adds_and_corrects_gpus():
    path = write(paths.config_dir() / "gpus.toml", """
["NVIDIA A10G"]
bandwidth_gb_s = 600
tflops = { fp16 = 70 }
["H200 SXM"]
bandwidth_gb_s = 4900
tflops = { fp16 = 1000 }
["my undervolted 4090"]
device_names = ["NVIDIA GeForce RTX 4090"]
""")
    assert gpu.user_table_path() == path
    a10g = lookup("NVIDIA A10G", 23028 * MIB)
    assert (a10g.bandwidth_gb_s, a10g.tflops, a10g.l2_mb) == (600, {"fp16": 70}, None)
    h200 = lookup("NVIDIA H200", 143771 * MIB)
    assert (h200.bandwidth_gb_s, h200.tflops["fp16"], h200.tflops["fp32"], h200.sms) == (4900, 1000, 66.9, 132)
    assert lookup("NVIDIA GeForce RTX 4090", 24564 * MIB).name == "my undervolted 4090"
    assert lookup("NVIDIA L4", 23034 * MIB).name == "L4"


@pytest.mark.parametrize("text, words", [
    ('["X"]\nbandwith_gb_s = 1', ['["X"] bandwith_gb_s: unknown key', "allowed are device_names, arch"]),
    ('["X"]\nbandwidth_gb_s = "fast"', ["""["X"] bandwidth_gb_s = 'fast'""", "a number above 0"]),
    ('["X"]\nbandwidth_gb_s = inf', ['["X"] bandwidth_gb_s = inf']),
    ('["X"]\nsms = -3', ['["X"] sms = -3', "whole number"]),
    ('["X"]\ntflops = { half = 3 }', ['["X"] tflops', "fp64, fp32, tf32, fp16, bf16, fp8"]),
    ('["X"]\ntflops = { fp16 = true }', ['["X"] tflops']),
    ('["X"]\ndevice_names = "X"', ["a list of names"]),
    ('["X"]\narch = "Hopper"', ['like "9.0" or "gfx942"']),
    ("bandwidth_gb_s = 3", ["bandwidth_gb_s stands outside an entry"]),
    ("[X\n", []),
    (b"\xff\xfe", []),
])
def test_bad_user_table_is_one_line_naming_file_entry_and_key(monkeypatch, tmp_path, text, words):
    path = tmp_path / "mine.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.setenv("AUTOKERNEL_GPUS", str(path))
    with pytest.raises(GpuTableError) as error:
        lookup("NVIDIA H200")
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in [str(path), *words]), str(error.value)


def test_named_table_that_does_not_exist_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOKERNEL_GPUS", str(tmp_path / "none.toml"))
    with pytest.raises(GpuTableError, match="none.toml"):
        gpu.tables()


# --- the roofline ---------------------------------------------------------------------------------------------------

def test_peak_follows_dtype_and_tf32():
    assert peak_tflops(H200, torch.float16) == peak_tflops(H200, "bfloat16") == peak_tflops(H200, "fp16") == 989.4
    assert peak_tflops(H200, torch.float32) == 66.9 and peak_tflops(H200, torch.float32, allow_tf32=True) == 494.7
    assert peak_tflops(H200, torch.int8) is None and peak_tflops(H200, torch.float8_e4m3fn) is None
    assert peak_tflops(None, torch.float16) is None
    assert roofline(1, 1, 1, "fp16", H200).ridge_point == pytest.approx(989.4e12 / 4800e9)


def test_roofline_of_a_matmul_and_of_a_norm():
    n, us = 4096, 194e-6
    gemm = roofline(2 * n**3, 6 * n * n, us, torch.float16, H200)
    assert gemm.bottleneck == "compute" and gemm.throughput_tflops == pytest.approx(708.4, rel=1e-3)
    assert gemm.pct_peak == gemm.pct_peak_compute == pytest.approx(71.6, rel=1e-2)
    assert gemm.pct_measured_compute is None
    norm = roofline(4 * n * n, 4 * n * n, 16e-6, torch.float16, H200, Calibration("k", "t", 4230.0, read_gb_s=4400.0))
    assert norm.bottleneck == "memory" and norm.arithmetic_intensity == 1
    assert norm.pct_peak == pytest.approx(87.4, rel=1e-2)
    assert norm.pct_measured_bandwidth == pytest.approx(95.3, rel=1e-2)


def test_unknown_gpu_gives_rates_but_no_percentages():
    run = roofline(1e12, 1e9, 1e-3, "float16")
    assert (run.throughput_tflops, run.bandwidth_gb_s, run.arithmetic_intensity) == (1000, 1000, 1000)
    assert [getattr(run, f.name) for f in dataclasses.fields(run)][3:] == [None] * 6
    assert run.pct_peak is None
    measured = Calibration("k", "t", 2000.0, tflops={"fp16": 500.0})
    known = roofline(1e12, 1e9, 4e-3, "float16", None, measured)
    assert known.bottleneck == "compute" and known.pct_peak is None and known.pct_measured_compute == 50


def test_fp32_through_tensor_cores_never_passes_100_percent():
    slow, fast = (roofline(t * 1e9, 1, 1e-3, torch.float32, H200).pct_peak_compute for t in (60, 160))
    assert slow == pytest.approx(100 * 60 / 66.9) and fast == pytest.approx(100 * 160 / (989.4 / 3))


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_no_time_no_roofline(seconds):
    with pytest.raises(ValueError, match="above 0"):
        roofline(1, 1, seconds, "fp16", H200)


# --- the floor ------------------------------------------------------------------------------------------------------

def test_floor_is_the_larger_of_compute_and_reads():
    n = 4096
    gemm = floor_seconds(2 * n**3, 4 * n * n, "fp16", H200)
    assert gemm == pytest.approx(2 * n**3 / (989.4e12 * gpu.CLOCK_HEADROOM))
    norm = floor_seconds(4 * n * n, 2 * n * n, "fp16", H200)
    assert norm == pytest.approx(2 * n * n / 4800e9)


def test_writes_count_beyond_the_l2_only():
    read, l2 = 1e9, 60 * MIB
    base = floor_seconds(0, read, "fp16", H200)
    assert floor_seconds(0, read, "fp16", H200, write_bytes=l2) == base
    assert floor_seconds(0, read, "fp16", H200, write_bytes=l2 + 4.8e9) == pytest.approx(base + 1e-3)
    unknown = dataclasses.replace(H200, l2_mb=None)
    assert floor_seconds(0, read, "fp16", unknown, write_bytes=1e12) == base


def test_floor_takes_the_higher_of_datasheet_and_measured():
    above = Calibration("k", "t", 5000.0, tflops={"fp16": 1500.0})
    below = Calibration("k", "t", 4000.0, tflops={"fp16": 700.0})
    assert floor_seconds(0, 5e9, "fp16", H200, above) == pytest.approx(1e-3)
    assert floor_seconds(0, 4.8e9, "fp16", H200, below) == pytest.approx(1e-3)
    assert floor_seconds(1.5e12, 0, "fp16", H200, above) == pytest.approx(1e-3)
    assert floor_seconds(0, 4e9 * gpu.MEASURED_HEADROOM["bandwidth"], "fp16", None, below) == pytest.approx(1e-3)
    assert floor_seconds(1e12, 1e9, "fp16") is None


def test_floor_leaves_room_for_honest_tricks():
    flops = 2 * 8192**3
    assert floor_seconds(flops, 0, "fp32", H200) < flops / 329e12           # three FP16 products
    assert floor_seconds(flops, 0, "fp32", H200, allow_tf32=True) < flops / 989e12
    assert floor_seconds(flops, 1, "fp64", H200) < 1e-9                     # only the bytes bind


@pytest.mark.parametrize("us, work", [
    (27.8, (2 * 2048**3, 4 * 2048**2, 2 * 2048**2)), (194, (2 * 4096**3, 4 * 4096**2, 2 * 4096**2)),
    (15.2, (8 * 4096 * 2048, 2 * 4096 * 2048, 2 * 4096 * 2048)), (16, (4 * 4096**2, 2 * 4096**2, 2 * 4096**2)),
    (62, (5 * 4096 * 32000, 2 * 4096 * 32000, 4)), (32, (8192**2, 2 * 8192**2, 2 * 8192))])
def test_no_time_measured_on_an_h200_is_below_the_floor(us, work):
    flops, read, write = work
    assert floor_seconds(flops, read, "fp16", H200, write_bytes=write) < us * 1e-6


# --- the device and its calibration ---------------------------------------------------------------------------------

DEVICE = Device("NVIDIA H200", 0, "9.0", 60, "GPU-1", "580.1", "2.11.0", H200)


def test_machine_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.detect.__wrapped__() is None


@pytest.mark.parametrize("hip, properties, expected", [
    (None, {"name": "NVIDIA H200", "major": 9, "minor": 0, "total_memory": 143771 * MIB, "multi_processor_count": 132,
            "L2_cache_size": 60 * MIB, "uuid": "u"}, ("9.0", "H200 SXM", 60)),
    (None, {"name": "NVIDIA H20", "major": 9, "minor": 0, "total_memory": 97871 * MIB, "multi_processor_count": 78,
            "L2_cache_size": 60 * MIB}, ("9.0", None, 60)),
    ("7.1", {"name": "AMD Radeon Graphics", "gcnArchName": "gfx942:sramecc+:xnack-", "total_memory": 196592 * MIB,
             "multi_processor_count": 304, "L2_cache_size": 4 * MIB}, ("gfx942", "MI300X", 256)),
])
def test_detect_reads_what_torch_reports(monkeypatch, hip, properties, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(**properties))
    monkeypatch.setattr(torch.version, "hip", hip)
    device = gpu.detect.__wrapped__()
    assert (device.arch, device.spec and device.spec.name, device.l2_mb) == expected
    assert device.driver


def test_calibration_is_kept_per_device_driver_and_torch():
    assert gpu.load_calibration(DEVICE) is None
    kept = Calibration(DEVICE.key, "2026-11-30", 4300.0, 4500.0, {"fp16": 8.0})
    path = gpu.save_calibration(kept)
    assert path.parent == paths.cache_dir() / "calibration" and gpu.load_calibration(DEVICE) == kept
    assert kept.bandwidth_gb_s == 4500
    for change in ({"uuid": "GPU-2"}, {"driver": "999"}, {"torch": "3.0"}):
        assert gpu.load_calibration(dataclasses.replace(DEVICE, **change)) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 1}', '{"schema": 99, "key": "x"}',
                                     json.dumps({"schema": 1, "key": DEVICE.key, "measured_at": "", "new_field": 1})])
def test_broken_calibration_counts_as_none(content):
    path = gpu.save_calibration(Calibration(DEVICE.key, "t"))
    path.write_text(content)
    assert gpu.load_calibration(DEVICE) is None


def test_calibration_arithmetic(monkeypatch):
    """Times are faked: 1, 2 and 3 ms; work and units must come out right."""
    runs = []

    def times(run, flush, repeats):
        runs.append(run)
        return [1e-3 * (1 + i) for i in range(repeats)]
    monkeypatch.setattr(measuring, "_cold_times", times)
    flush, free = torch.empty(0), 8 * 4 * 10**6
    moved = measuring._bandwidths(free, flush, 3)
    n = 10**6 // 32768 * 32768
    assert moved == pytest.approx({"copy_gb_s": 8e-6 * n, "read_gb_s": 4e-6 * n})
    assert len(runs) == 4
    before = torch.backends.cuda.matmul.fp32_precision
    rates = measuring._matmul_rates("9.0", free, flush, 3)
    assert list(rates) == ["fp16", "bf16", "tf32", "fp32"]
    assert rates["fp16"] == pytest.approx(2 * 4096**3 / 1e-3 / 1e12)
    assert list(measuring._matmul_rates("7.5", free, flush, 3)) == ["fp16", "fp32"]
    assert list(measuring._matmul_rates("gfx942", free, flush, 3)) == ["fp16", "bf16", "fp32"]
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_bandwidth_kernels_move_what_they_say():
    """In the Triton interpreter, in a process of its own: it must be chosen before the kernels are defined."""
    code = """
import torch
from autokernel import calibrate as c
src = torch.rand(2 * c.BLOCK * c.STEPS + 5)
dst, sums = torch.zeros_like(src), torch.zeros(3)
c._move(c._copy, src, dst)
c._move(c._read, src, sums)
assert torch.equal(src, dst)
torch.testing.assert_close(sums.sum(), src.sum(), rtol=1e-4, atol=0)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120,
                   env={**os.environ, "TRITON_INTERPRET": "1"})


@pytest.mark.gpu
def test_calibrate_a_real_gpu():
    device = gpu.detect()
    measured = measuring.calibrate(device)
    assert gpu.load_calibration(device) == measured
    assert measured.bandwidth_gb_s >= measured.copy_gb_s > 0
    if device.spec:
        assert 50 < 100 * measured.bandwidth_gb_s / device.spec.bandwidth_gb_s <= 102
        for name, rate in measured.tflops.items():
            assert 40 < 100 * rate / device.spec.tflops[name] <= 105, name

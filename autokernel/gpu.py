"""What a GPU can do: its datasheet, what it measured, and where a kernel stands between them (the roofline).

Nothing is ever invented: an unknown GPU has no spec, and whatever would need one is None, printed as `n/a`.
Units: FLOP/s in 1e12 (TFLOPS), bandwidth in 1e9 bytes/s, memory in GiB, caches in MiB, times in seconds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autokernel import paths

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
if TYPE_CHECKING:                                   # torch takes 3.5 s to import and only detect() needs it
    import torch

PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")
CALIBRATION_SCHEMA = 2
# The highest clock lies above the boost clock that the datasheet's peak is for: 1980 over 1830 MHz on an H200.
CLOCK_HEADROOM = 1.10
# A peak known from a measurement alone is what a library reached on one shape; an honest kernel may beat it so far.
MEASURED_HEADROOM = {"compute": 1.5, "bandwidth": 1.15}


class GpuTableError(Exception):
    """A bad gpus.toml. One line: file, entry, key, what is allowed."""


@dataclass(frozen=True)
class GpuSpec:
    """Datasheet figures of one GPU; fields as described at the top of gpus.toml. None is unknown."""

    name: str
    device_names: tuple[str, ...] = ()
    arch: str | None = None
    memory_gb: float | None = None
    sms: int | None = None
    bandwidth_gb_s: float | None = None
    l2_mb: float | None = None
    tflops: Mapping[str, float] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class Device:
    """The GPU present. `arch` is the compute capability ("9.0") or gfx name; `l2_mb` is what the driver reports."""

    name: str
    index: int
    arch: str
    l2_mb: float | None
    uuid: str
    driver: str
    torch: str
    spec: GpuSpec | None = None

    @property
    def key(self) -> str:
        """Identifies a calibration: the same card under another driver or torch is measured anew."""
        return "|".join((self.name, self.uuid, self.driver, self.torch))


@dataclass(frozen=True)
class Calibration:
    """What one GPU measured: the best of single cold-cache runs. Bytes count reads plus writes."""

    key: str
    measured_at: str
    copy_gb_s: float | None = None
    read_gb_s: float | None = None
    tflops: Mapping[str, float] = field(default_factory=dict)

    @property
    def bandwidth_gb_s(self) -> float | None:
        """The higher of copy and read-only: no mix of reads and writes should pass it."""
        return max((b for b in (self.copy_gb_s, self.read_gb_s) if b), default=None)


@dataclass(frozen=True)
class Roofline:
    """Where a run stands. Percentages are of the datasheet and of what this GPU measured; None is unknown."""

    throughput_tflops: float
    bandwidth_gb_s: float
    arithmetic_intensity: float | None              # FLOP/byte
    ridge_point: float | None                       # FLOP/byte where the two roofs meet
    bottleneck: str | None                          # "memory" or "compute"
    pct_peak_compute: float | None = None
    pct_peak_bandwidth: float | None = None
    pct_measured_compute: float | None = None
    pct_measured_bandwidth: float | None = None

    @property
    def pct_peak(self) -> float | None:
        """Of the datasheet peak of whatever bounds the kernel."""
        return self.pct_peak_compute if self.bottleneck == "compute" else self.pct_peak_bandwidth


# --- the table ------------------------------------------------------------------------------------------------------

def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


_KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "device_names": (lambda v: isinstance(v, list) and bool(v) and all(isinstance(n, str) and n for n in v),
                     "a list of names"),
    "arch": (lambda v: isinstance(v, str) and bool(re.fullmatch(r"\d+\.\d|gfx\w+", v)), 'like "9.0" or "gfx942"'),
    "memory_gb": (_number, "a number above 0"), "sms": (lambda v: _number(v) and isinstance(v, int), "a whole number"),
    "bandwidth_gb_s": (_number, "a number above 0"), "l2_mb": (_number, "a number above 0"),
    "tflops": (lambda v: isinstance(v, dict) and set(v) <= set(PRECISIONS) and all(map(_number, v.values())),
               f"a table of numbers above 0 by precision ({', '.join(PRECISIONS)})"),
    "source": (lambda v: isinstance(v, str), "text"),
}


def _load(path: Path) -> dict[str, dict[str, Any]]:
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:          # ValueError: bad TOML, bad UTF-8
        raise GpuTableError(f"{path}: {' '.join(str(error).split())}") from None
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            raise GpuTableError(f'{path}: {name} stands outside an entry; begin each GPU with a line like ["{name}"]')
        for key, value in entry.items():
            if key not in _KEYS:
                raise GpuTableError(f'{path}: ["{name}"] {key}: unknown key; allowed are {", ".join(_KEYS)}')
            ok, allowed = _KEYS[key]
            if not ok(value):
                raise GpuTableError(f'{path}: ["{name}"] {key} = {value!r}: must be {allowed}')
    return entries


def user_table_path() -> Path:
    """The user's own GPUs: the file AUTOKERNEL_GPUS names, else ~/.config/autokernel/gpus.toml (need not exist)."""
    return Path(os.environ.get("AUTOKERNEL_GPUS") or paths.config_dir() / "gpus.toml").expanduser()


def tables() -> tuple[list[GpuSpec], list[GpuSpec]]:
    """(the user's GPUs, the built-in ones). Raises GpuTableError for a bad file, or for AUTOKERNEL_GPUS without one."""
    built_in, user = _load(Path(__file__).with_name("gpus.toml")), user_table_path()
    own = _load(user) if user.exists() or os.environ.get("AUTOKERNEL_GPUS") else {}
    for name, entry in own.items():
        base = built_in.pop(name, {})
        own[name] = {**base, **entry, "tflops": {**base.get("tflops", {}), **entry.get("tflops", {})}}
    mine, theirs = ([GpuSpec(name=name, **{**entry, "device_names": tuple(entry.get("device_names", (name,)))})
                     for name, entry in entries.items()] for entries in (own, built_in))
    return mine, theirs


def _plain(name: str) -> str:
    """`NVIDIA Tesla V100-...` and `Tesla V100-...` are one card: drivers changed the prefix over the years."""
    return re.sub(r"^(nvidia )?(tesla )?", "", " ".join(name.casefold().split()))


def lookup(name: str, memory_bytes: int | None = None, sms: int | None = None,
           arch: str | None = None) -> GpuSpec | None:
    """The spec of a GPU by the name it reports, matched whole; None when unknown or when several would fit.

    What is given besides must agree: memory within -12 % / +3 % of nominal (ECC and firmware take some), SM count
    and architecture exactly. So a MIG slice, a vGPU share or another card of the same name is not taken for the whole.
    """
    def fits(spec: GpuSpec) -> bool:
        gib = memory_bytes / 2**30 / spec.memory_gb if memory_bytes and spec.memory_gb else 1.0
        return (_plain(name) in map(_plain, spec.device_names) and 0.88 <= gib <= 1.03
                and (not sms or not spec.sms or sms == spec.sms)
                and (not arch or not spec.arch or arch.split(":")[0] == spec.arch))

    for specs in tables():                          # the user's own come first
        if found := [spec for spec in specs if fits(spec)]:
            return found[0] if len(found) == 1 else None
    return None


# --- the device -----------------------------------------------------------------------------------------------------

def _driver_version() -> str:
    module = Path("/sys/module/amdgpu/version")
    try:
        import pynvml
    except ImportError:
        return module.read_text().strip() if module.exists() else "unknown"
    try:
        pynvml.nvmlInit()
        version = str(pynvml.nvmlSystemGetDriverVersion())
        pynvml.nvmlShutdown()
        return version
    except pynvml.NVMLError:                        # AMD, Jetson
        return module.read_text().strip() if module.exists() else "unknown"


@cache
def detect(index: int = 0) -> Device | None:
    """GPU `index` as torch sees it, with its spec where known; None on a machine without a GPU."""
    import torch
    if not torch.cuda.is_available():
        return None
    p = torch.cuda.get_device_properties(index)
    arch = p.gcnArchName.split(":")[0] if torch.version.hip else f"{p.major}.{p.minor}"
    spec = lookup(p.name, p.total_memory, p.multi_processor_count, arch)
    l2 = max(getattr(p, "L2_cache_size", 0) / 2**20, (spec.l2_mb or 0) if spec else 0)    # ROCm reports one die's L2
    return Device(name=p.name, index=index, arch=arch, l2_mb=l2 or None, uuid=str(getattr(p, "uuid", "")),
                  driver=_driver_version(), torch=str(torch.__version__), spec=spec)


# --- the roofline ---------------------------------------------------------------------------------------------------

def _precision(dtype: torch.dtype | str, allow_tf32: bool = False) -> str:
    """torch.float8_e4m3fn -> "fp8", torch.bfloat16 -> "bf16", "fp32" -> "fp32" or "tf32"."""
    name = str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp").partition("_")[0]
    return "tf32" if name == "fp32" and allow_tf32 else name


def peak_tflops(spec: GpuSpec | Calibration | None, dtype: torch.dtype | str, allow_tf32: bool = False) -> float | None:
    """Peak rate for `dtype` (torch.float16, "float16" or "fp16"); float32 is the FMA rate, or TF32 where allowed."""
    return spec.tflops.get(_precision(dtype, allow_tf32)) if spec else None


def _ceiling_tflops(spec: GpuSpec | Calibration | None, dtype: torch.dtype | str, allow_tf32: bool) -> float | None:
    """The highest rate that an honest kernel could reach.

    Float32 accuracy is also reached on tensor cores with three TF32 or FP16 products (Ootomo and Yokota 2022,
    arXiv 2203.03341), faster than FMA; with TF32 allowed one FP16 or BF16 product may do. Float64 has integer
    emulation whose rate depends on the data, so there is no such bound.
    """
    rates: Mapping[str, float] = spec.tflops if spec else {}
    name = _precision(dtype, allow_tf32)
    ways = {"fp32": {"fp32": 1, "tf32": 3, "fp16": 3}, "tf32": {"fp32": 1, "tf32": 1, "fp16": 1, "bf16": 1},
            "fp64": {}}.get(name, {name: 1})
    return max((rates[way] / products for way, products in ways.items() if way in rates), default=None)


def _ridge_point(spec: GpuSpec | Calibration | None, dtype: torch.dtype | str, allow_tf32: bool) -> float | None:
    """Arithmetic intensity (FLOP/byte) at which the compute and the memory roof meet."""
    peak = peak_tflops(spec, dtype, allow_tf32)
    return peak * 1e3 / spec.bandwidth_gb_s if spec and peak and spec.bandwidth_gb_s else None


def roofline(flops: float, bytes_moved: float, seconds: float, dtype: torch.dtype | str, spec: GpuSpec | None = None,
             measured: Calibration | None = None, allow_tf32: bool = False) -> Roofline:
    """Place a run of `seconds` that did `flops` and had to move `bytes_moved` (each input and output once).

    A float32 run above the FMA rate used tensor cores (see `_ceiling_tflops`); its percentage is then of that ceiling.
    Raises ValueError unless seconds > 0.
    """
    if not seconds > 0:
        raise ValueError(f"seconds = {seconds}: a measured time is above 0")
    tflops, gb_s = flops / seconds / 1e12, bytes_moved / seconds / 1e9
    intensity = flops / bytes_moved if bytes_moved else None
    ridge = _ridge_point(spec, dtype, allow_tf32) or _ridge_point(measured, dtype, allow_tf32)
    bottleneck = None if ridge is None or intensity is None else "compute" if intensity >= ridge else "memory"

    def percents(of: GpuSpec | Calibration | None) -> tuple[float | None, float | None]:
        peak, bandwidth = peak_tflops(of, dtype, allow_tf32), of.bandwidth_gb_s if of else None
        if peak and tflops > peak:
            peak = _ceiling_tflops(of, dtype, allow_tf32)
        return 100 * tflops / peak if peak else None, 100 * gb_s / bandwidth if bandwidth else None

    return Roofline(tflops, gb_s, intensity, ridge, bottleneck, *percents(spec), *percents(measured))


def floor_seconds(flops: float, read_bytes: float, dtype: torch.dtype | str, spec: GpuSpec | None = None,
                  measured: Calibration | None = None, *, write_bytes: float = 0,
                  allow_tf32: bool = False) -> float | None:
    """No honest kernel is faster than this from a cold cache; a shorter time is invalid. None where nothing is known.

    The larger of two bounds: `flops` at the highest rate the hardware could reach (`_ceiling_tflops`), and the
    compulsory traffic at full bandwidth. With a cold L2 every input byte comes from memory; an output may stay in L2
    when the kernel ends, so writes count only beyond its size (not at all where that is unknown). Rates are the higher
    of datasheet (times CLOCK_HEADROOM for compute) and measured; a measurement alone gets MEASURED_HEADROOM.
    """
    def rate(sheet: float | None, own: float | None, boost: float, headroom: float) -> float:
        return max(sheet * boost, own or 0) if sheet else (own or 0) * headroom

    compute = rate(_ceiling_tflops(spec, dtype, allow_tf32), _ceiling_tflops(measured, dtype, allow_tf32),
                   CLOCK_HEADROOM, MEASURED_HEADROOM["compute"]) * 1e12
    memory = rate(spec.bandwidth_gb_s if spec else None, measured.bandwidth_gb_s if measured else None,
                  1.0, MEASURED_HEADROOM["bandwidth"]) * 1e9
    traffic = read_bytes + (max(0.0, write_bytes - spec.l2_mb * 2**20) if spec and spec.l2_mb else 0)
    bounds = [work / peak for work, peak in ((flops, compute), (traffic, memory)) if peak]
    return max(bounds, default=None)


# --- the kept calibration -------------------------------------------------------------------------------------------

def _calibration_path(key: str) -> Path:
    return paths.cache_dir() / "calibration" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def load_calibration(device: Device) -> Calibration | None:
    """The kept calibration of this very GPU, driver and torch; None when there is none, or none that is readable."""
    try:
        values = json.loads(_calibration_path(device.key).read_bytes())
        if values.pop("schema") == CALIBRATION_SCHEMA and values["key"] == device.key:
            return Calibration(**values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):      # a broken cache entry is no entry
        pass
    return None


def save_calibration(calibration: Calibration) -> Path:
    """Keep it in the user's cache folder; replaces the file whole. Raises OSError."""
    path = _calibration_path(calibration.key)
    values = {"schema": CALIBRATION_SCHEMA, **dataclasses.asdict(calibration)}
    paths.atomic_write(path, (json.dumps(values, indent=1) + "\n").encode())
    return path

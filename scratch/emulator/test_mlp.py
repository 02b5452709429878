import sys, time, math, torch
import torch.nn.functional as F
from emulate import load
m = load("fused_mlp")
g = torch.Generator().manual_seed(1)
def rand(*s, dt, sc=1.): return (torch.randn(s, generator=g)*sc).to(dt)
bad = 0
acts = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"), "relu": F.relu}
for dt in (torch.float16, torch.bfloat16, torch.float32):
    for i,((M,D,H),lay) in enumerate([((1,1,1),"row"),((7,7,7),"linear"),((127,128,256),"row"),((130,127,255),"linear"),((130,127,255),"row"),((300,72,520),"linear"),((150,256,64),"fused"),((150,256,64),"mixed"),((33,200,136),"row")]):
        act=list(acts)[i%4]; f=acts[act]
        x=rand(M,D,dt=dt); wg,wu,wd=rand(D,H,dt=dt,sc=D**-.5),rand(D,H,dt=dt,sc=D**-.5),rand(H,D,dt=dt,sc=H**-.5)
        if lay in("linear","mixed"): wg,wd=rand(H,D,dt=dt,sc=D**-.5).t(),rand(D,H,dt=dt,sc=H**-.5).t()
        if lay=="linear": wu=rand(H,D,dt=dt,sc=D**-.5).t()
        if lay=="fused":
            both=rand(2*H,D,dt=dt,sc=D**-.5); wg,wu=both[:H].t(),both[H:].t()
        t = time.time()
        out = m.kernel_fn(x,wg,wu,wd,act)
        ref=(f(x.double()@wg.double())*(x.double()@wu.double()))@wd.double()
        err = ((out.double() - ref).abs().max() / ref.square().mean().sqrt()).item()
        tol = {torch.float16: 6e-3, torch.bfloat16: 4e-2, torch.float32: 1e-5}[dt]
        ok = err < tol
        bad += not ok
        print("ok " if ok else "BAD", str(dt)[6:], (M,D,H), lay, act, f"{err:.2e} {time.time()-t:.1f}s", flush=True)
print("bad", bad)

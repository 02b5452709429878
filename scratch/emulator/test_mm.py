import sys, time, torch
from emulate import load
m = load("matmul")
g = torch.Generator().manual_seed(1)
def rand(*s, dt): return torch.randn(s, generator=g).to(dt)
bad = 0
for dt in (torch.float16, torch.bfloat16, torch.float32):
    for (M, N, K), lay, bias in [((1,1,1),"row",1),((7,7,7),"linear",1),((128,256,64),"row",0),((130,270,72),"row",1),((130,270,72),"linear",1),((300,520,328),"row",0),((257,1000,136),"linear",0),((65,129,600),"row",0),((1,300,520),"linear",1), ((40,3,1),"row",1), ((3,1,40),"row",1),((200,100,50),"at",0),((200,100,50),"slice",0)]:
        A = rand(M, K, dt=dt) if lay != "at" else rand(K, M, dt=dt).t()
        if lay == "slice": A = rand(2*M, K+8, dt=dt)[::2, 8:]
        B = rand(K, N, dt=dt) if lay != "linear" else rand(N, K, dt=dt).t()
        b = rand(N, dt=dt) if bias else None
        t = time.time()
        out = m.kernel_fn(A, B, b)
        ref = A.double() @ B.double() + (b.double() if bias else 0)
        err = ((out.double() - ref).abs().max() / ref.square().mean().sqrt()).item()
        tol = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}[dt]
        bad += not err < tol
        print("ok " if err < tol else "BAD", str(dt)[6:], M, N, K, lay, f"{err:.2e} {time.time()-t:.1f}s", flush=True)
print("bad", bad)

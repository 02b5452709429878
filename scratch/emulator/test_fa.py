import sys, time, math, torch
from emulate import load
m = load("flash_attention")
g = torch.Generator().manual_seed(1)
def rand(*s, dt): return torch.randn(s, generator=g).to(dt)
bad = 0
for dt in (torch.float16, torch.bfloat16, torch.float32):
    for (b,h,hk,lq,lk,d,causal), lay in [((1,1,1,128,128,64,0),""),((1,1,1,128,128,64,1),""),((1,2,1,200,300,128,1),""),((2,4,2,300,300,64,1),"packed"),((1,1,1,1,1,64,1),""),((1,3,3,7,7,72,1),"t"),((1,2,1,127,400,80,1),""),((1,1,1,300,127,96,1),""),((1,2,1,1,500,128,1),""),((1,1,1,130,450,256,1),""),((1,1,1,64,200,192,0),""),((1,1,1,70,90,7,1),""),((1,1,1,520,520,128,0),""),((1,2,2,100,300,64,1),"neg"),((1,2,2,100,300,64,1),"zero"),((2,2,2,50,60,65,0),"t")]:
        q,k,v=rand(b,h,lq,d,dt=dt),rand(b,hk,lk,d,dt=dt),rand(b,hk,lk,d,dt=dt)
        if lay=="t": q,k,v=(x.transpose(1,2).contiguous().transpose(1,2) for x in (q,k,v))
        if lay=="packed":
            qkv=rand(b,lq,h+2*hk,d,dt=dt).transpose(1,2); q,k,v=qkv[:,:h],qkv[:,h:h+hk],qkv[:,h+hk:]
        sc={"neg":-0.2,"zero":0.0}.get(lay)
        t = time.time()
        out = m.kernel_fn(q,k,v,bool(causal),sc)
        K,V=(x.double().repeat_interleave(h//hk,1) for x in (k,v))
        s=q.double()@K.transpose(-1,-2)*(d**-.5 if sc is None else sc)
        if causal: s=s.masked_fill(~(torch.arange(lk)[None]<=torch.arange(lq)[:,None]+lk-lq),-math.inf)
        ref=torch.softmax(s,-1).nan_to_num(0.)@V
        err = ((out.double() - ref).abs().max() / ref.square().mean().sqrt()).item()
        tol = {torch.float16: 6e-3, torch.bfloat16: 4e-2, torch.float32: 1e-5}[dt]
        ok = err < tol and out.is_contiguous()
        bad += not ok
        print("ok " if ok else "BAD", str(dt)[6:], (b,h,hk,lq,lk,d,causal), lay, f"{err:.2e} {time.time()-t:.1f}s", flush=True)
print("bad", bad)

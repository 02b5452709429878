#pragma once
#include "cuda_emulator.h"
#include <cuda.h>
#include <map>
#include <deque>
#include <cstdio>
#include <type_traits>
#define __CUDA_ARCH_FEAT_SM90_ALL 1
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#undef __noinline__
inline void __trap() { abort(); }
#define __expf expf
namespace emu {
constexpr uint32_t DYN_AT = 1104, DYN_SIZE = 232448;
alignas(1024) thread_local char dyn_raw[DYN_SIZE + 2048];
// shared address a <-> dyn_raw + a - (DYN_AT - ...) : address 0 is dyn_raw, dynamic smem starts at DYN_AT
inline uint32_t smem_addr(const void* p) {
    long d = (const char*)p - dyn_raw;
    if (d >= 0 && d < long(sizeof dyn_raw)) return uint32_t(d);
    return uint32_t(0x80000000u + uint32_t((const char*)p - &anchor));
}
struct Bar { int count = 0, pending = 0; long tx = 0; int phase = 0; };
thread_local std::map<uint32_t, Bar> bars;
inline void flip(Bar& b) { if (b.pending == 0 && b.tx == 0) { b.phase ^= 1; b.pending = b.count; } }
inline void check(bool ok, const char* what) { if (!ok) { fprintf(stderr, "EMU: %s\n", what); abort(); } }
inline void mbar_init(uint32_t a, int n) { Bar b; b.count = b.pending = n; bars[a] = b; }
inline void mbar_arrive(uint32_t a) { check(bars.count(a), "arrive on unknown barrier"); Bar& b = bars[a]; check(b.pending > 0, "too many arrivals"); b.pending--; flip(b); }
inline void mbar_expect(uint32_t a, int bytes) { check(bars.count(a), "expect on unknown barrier"); Bar& b = bars[a]; b.tx += bytes; check(b.pending > 0, "too many arrivals"); b.pending--; flip(b); }
inline void mbar_tx(uint32_t a, int bytes) { check(bars.count(a), "tx on unknown barrier"); Bar& b = bars[a]; b.tx -= bytes; check(b.tx >= 0, "more bytes than expected"); flip(b); }
inline void mbar_wait(uint32_t a, int parity) {
    check(bars.count(a), "wait on unknown barrier");
    long spins = 0;
    while (bars[a].phase == parity) { yield(); if (++spins > 200000) { fprintf(stderr, "EMU: deadlock, thread %d block %d\n", threadIdx.x, blockIdx.x); abort(); } }
}
struct Map { const char* base; int rank; long dims[4], strides[4], box[4]; };
inline CUresult encode(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* base, const cuuint64_t* dims, const cuuint64_t* strides,
                const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle sw, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    Map* m = new Map{(const char*)base, int(rank)};
    check((uintptr_t)base % 16 == 0, "map base"); check(sw == CU_TENSOR_MAP_SWIZZLE_128B, "swizzle");
    for (unsigned i = 0; i < rank; ++i) {
        m->dims[i] = dims[i], m->box[i] = box[i], m->strides[i] = i ? strides[i - 1] : 2;
        check(steps[i] == 1 && dims[i] > 0 && dims[i] < (1ll << 32) && box[i] <= 256, "map dims");
        if (i) check(strides[i - 1] % 16 == 0 && strides[i - 1] < (1ll << 40), "map strides");
    }
    memcpy(map, &m, sizeof m);
    return CUDA_SUCCESS;
}
inline uint32_t swizzle(uint32_t a) { return a ^ (((a >> 7) & 7) << 4); }
inline void tma(uint32_t dst, const CUtensorMap* map, std::initializer_list<int> at, uint32_t bar) {
    Map* m; memcpy(&m, map, sizeof m);
    check(dst % 1024 == 0 && dst >= DYN_AT, "TMA destination");
    check(int(at.size()) == m->rank, "rank");
    long c[4] = {0, 0, 0, 0}; int i = 0; for (int x : at) c[i++] = x;
    long box[4] = {1, 1, 1, 1}; for (int d = 0; d < m->rank; ++d) box[d] = m->box[d];
    check(box[0] * 2 <= 128, "inner box");
    long n = 0;
    for (long w = 0; w < box[3]; ++w) for (long z = 0; z < box[2]; ++z) for (long y = 0; y < box[1]; ++y) for (long x = 0; x < box[0]; ++x, ++n) {
        long p[4] = {c[0] + x, c[1] + y, c[2] + z, c[3] + w}; bool in = true; const char* src = m->base;
        for (int d = 0; d < m->rank; ++d) { in &= p[d] >= 0 && p[d] < m->dims[d]; src += p[d] * m->strides[d]; }
        uint16_t v = 0; if (in) memcpy(&v, src, 2);
        uint32_t a = dst + uint32_t(n) * 2;
        check(a + 2 <= DYN_AT + DYN_SIZE, "TMA beyond shared memory");
        memcpy(dyn_raw + swizzle(a), &v, 2);
    }
    mbar_tx(bar, int(n * 2));
}
template <typename T> inline float to_float(uint16_t v) {
    if constexpr (std::is_same<T, __half>::value) { _Float16 h; memcpy(&h, &v, 2); return float(h); }
    uint32_t u = uint32_t(v) << 16; float f; memcpy(&f, &u, 4); return f;
}
struct Op { float* d; const uint32_t* areg; uint64_t a, b; int n, acc, bt; bool commit; void (*run)(const Op&, int); };
thread_local std::map<int, std::deque<Op>> queues;   // by thread
template <typename T> inline float operand(uint64_t desc, int mn, int k, bool mn_major) {
    uint32_t start = uint32_t(desc & 0x3fff) << 4, lbo = uint32_t(desc >> 16 & 0x3fff) << 4, sbo = uint32_t(desc >> 32 & 0x3fff) << 4;
    check((desc >> 62) == 1 && (desc >> 49 & 7) == 0, "descriptor");
    uint32_t a = mn_major ? start + mn / 64 * lbo + k / 8 * sbo + k % 8 * 128 + mn % 64 * 2 : start + mn / 8 * sbo + mn % 8 * 128 + k * 2;
    uint16_t v; memcpy(&v, dyn_raw + swizzle(a), 2); return to_float<T>(v);
}
template <typename T> void run_op(const Op& op, int index) {
    const int t = block.current, lane = t % 32, warp = t / 32 % 4;
    for (int h = 0; h < 2; ++h) {
        float a[16];
        for (int k = 0; k < 16; ++k)
            if (op.areg) {       // A fragment: lane (row % 8) * 4 + (k % 8) / 2, register (k / 8) * 2 + h, half k % 2
                const int peer = t / 32 * 32 + lane / 4 * 4 + k % 8 / 2;
                a[k] = to_float<T>(uint16_t(queues[peer][index].areg[k / 8 * 2 + h] >> (16 * (k % 2))));
            } else a[k] = operand<T>(op.a, warp * 16 + lane / 4 + 8 * h, k, false);
        for (int j = 0; j < op.n / 8; ++j) for (int e = 0; e < 2; ++e) {
            float s = 0; for (int k = 0; k < 16; ++k) s += a[k] * operand<T>(op.b, 8 * j + lane % 4 * 2 + e, k, op.bt);
            float& d = op.d[4 * j + 2 * h + e]; d = op.acc ? d + s : s;
        }
    }
}
template <typename T> inline void wgmma(float* d, int n, const uint32_t* areg, uint64_t a, uint64_t b, int acc, int bt) {
    queues[block.current].push_back({d, areg, a, b, n, acc, bt, false, run_op<T>});
}
inline void commit() { queues[block.current].push_back({nullptr, nullptr, 0, 0, 0, 0, 0, true, nullptr}); }
inline void wgmma_wait(int allowed) {       // as late as allowed: what is read or written too early shows
    sync_warp();
    auto& q = queues[block.current];
    int groups = 0; for (auto& op : q) groups += op.commit;
    size_t take = 0;
    for (int left = groups - allowed; left > 0 && take < q.size(); ++take) left -= q[take].commit;
    for (size_t i = 0; i < take; ++i) if (!q[i].commit) q[i].run(q[i], int(i));
    sync_warp();
    q.erase(q.begin(), q.begin() + take);
    sync_warp();
}
template <typename K> struct Launch { K kernel; dim3 grid, threads; size_t smem; };
template <typename... P> auto bind(void (*kernel)(P...), dim3 grid, dim3 threads, size_t smem = 0, cudaStream_t = 0) {
    return [=](auto&&... args) {
        check(smem <= DYN_SIZE, "dynamic shared memory");
        const long blocks = long(grid.x) * grid.y * grid.z;
        const std::function<void()> body = [&] { kernel(static_cast<P>(args)...); };
        std::atomic<long> next{0};
        auto worker = [&] {
            for (long b; (b = next++) < blocks;) {
                memset(dyn_raw, 0xff, sizeof dyn_raw); bars.clear(); queues.clear();
                for (int i = 0; i < int(threads.x); ++i) queues[i];
                Cluster cluster; cluster.threads = threads.x, cluster.anchors.resize(1);
                run_block(cluster, 0, grid, threads, {unsigned(b % grid.x), unsigned(b / grid.x % grid.y), unsigned(b / grid.x / grid.y)}, body);
                for (auto& [t, q] : queues) for (auto& op : q) check(op.commit, "wgmma never waited for");
            }
        };
        std::thread other(worker); worker(); other.join();
    };
}
inline cudaError_t entry_point(const char*, void** f, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* r) { *f = (void*)encode; *r = cudaDriverEntryPointSuccess; return cudaSuccess; }
inline cudaError_t get_device(int* d) { *d = 0; return cudaSuccess; }
inline cudaError_t attribute(int* v, cudaDeviceAttr, int) { *v = getenv("EMU_SMS") ? atoi(getenv("EMU_SMS")) : 3; return cudaSuccess; }
template <typename K> cudaError_t set_attribute(K, cudaFuncAttribute, int bytes) { check(bytes <= int(DYN_SIZE), "too much shared memory"); return cudaSuccess; }
}
#define cudaGetDriverEntryPointByVersion emu::entry_point
#define cudaGetDevice emu::get_device
#define cudaDeviceGetAttribute emu::attribute
#define cudaFuncSetAttribute emu::set_attribute
#define cudaGetLastError() cudaSuccess

// Runs CUDA kernels on a CPU, to check their logic where there is no GPU: index arithmetic, barriers, reductions, clusters.
// A thread is a fiber, a block an operating-system thread (so that `static thread_local` is its shared memory), and a
// cluster is a set of blocks that run at once; clusters run one after another. Included before a CUDA source whose inline PTX was replaced.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define __DEVICE_LAUNCH_PARAMETERS_H__      // ours follow
#include <cuda_runtime.h>
#define _CUDA_PIPELINE_PRIMITIVES_H_        // ours follow
#include <ucontext.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static thread_local
#define __launch_bounds__(...)
#define __CUDA_ARCH_LIST__ 900

thread_local dim3 blockDim, gridDim;
thread_local uint3 blockIdx, threadIdx;

namespace emu {

constexpr size_t STACK = 128 << 10;
struct Cluster { std::atomic<long> arrivals{0}; long threads; std::vector<char*> anchors; };
struct Copy { void* to; const void* from; size_t size; };
struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done;
    uint3 index;
    long arrived;
    std::vector<std::vector<Copy>> groups;   // asynchronous copies, committed but for the last group
};
struct Gate { int waiting = 0; long generation = 0; };
struct Block {
    std::vector<Fiber> fibers;
    std::vector<Gate> warp_gates;
    std::vector<uint64_t> warp_slots;        // one a thread, for shuffles
    Gate gate;
    ucontext_t scheduler;
    int current;
    unsigned rank;
    Cluster* cluster;
    const std::function<void()>* body;
};
thread_local Block block;
thread_local char anchor;

inline Fiber& self() { return block.fibers[block.current]; }
inline void yield() { swapcontext(&self().context, &block.scheduler); }
inline void pass(Gate& gate, int expected) {
    const long before = gate.generation;
    if (++gate.waiting == expected) { gate.waiting = 0; gate.generation++; return; }
    while (gate.generation == before) yield();
}
inline void sync_warp() {
    const int warp = block.current / 32, rest = int(block.fibers.size()) - warp * 32;
    pass(block.warp_gates[warp], rest < 32 ? rest : 32);
}
inline void entry() { (*block.body)(); self().done = true; yield(); }

inline void run_block(Cluster& cluster, unsigned rank, dim3 grid, dim3 threads, uint3 index, const std::function<void()>& body) {
    const int n = threads.x * threads.y * threads.z;
    if (int(block.fibers.size()) != n) block.fibers = std::vector<Fiber>(n);
    block.warp_gates.assign((n + 31) / 32, Gate());
    block.warp_slots.assign(n, 0);
    block.gate = Gate();
    block.rank = rank, block.cluster = &cluster, block.body = &body;
    blockDim = threads, gridDim = grid, blockIdx = index;
    cluster.anchors[rank] = &anchor;
    for (int i = 0; i < n; i++) {
        Fiber& f = block.fibers[i];
        if (!f.stack) f.stack.reset(new char[STACK]);
        f.done = false, f.arrived = 0, f.groups.assign(1, {});
        f.index = {i % threads.x, i / threads.x % threads.y, i / threads.x / threads.y};
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.get(), f.context.uc_stack.ss_size = STACK, f.context.uc_link = nullptr;
        makecontext(&f.context, entry, 0);
    }
    for (int left = n; left > 0;) {
        left = 0;
        for (block.current = 0; block.current < n; block.current++) {
            if (self().done) continue;
            threadIdx = self().index;
            swapcontext(&block.scheduler, &self().context);
            left += !self().done;
        }
        if (cluster.anchors.size() > 1) std::this_thread::yield();
    }
}

template <typename... P, typename... A>
cudaError_t launch(const cudaLaunchConfig_t* config, void (*kernel)(P...), A... args) {
    const dim3 grid = config->gridDim, threads = config->blockDim;
    const unsigned size = config->numAttrs ? config->attrs[0].val.clusterDim.x : 1, blocks = grid.x * grid.y * grid.z;
    if (grid.x % size || blocks == 0 || threads.x * threads.y * threads.z > 1024 || size > 8) return cudaErrorInvalidConfiguration;
    const std::function<void()> body = [&] { kernel(static_cast<P>(args)...); };
    for (unsigned first = 0; first < blocks; first += size) {
        Cluster cluster;
        cluster.threads = long(size) * threads.x * threads.y * threads.z, cluster.anchors.resize(size);
        auto one = [&](unsigned rank) {
            const unsigned b = first + rank;
            run_block(cluster, rank, grid, threads, {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y}, body);
        };
        std::vector<std::thread> others;
        for (unsigned rank = 1; rank < size; rank++) others.emplace_back(one, rank);
        one(0);
        for (auto& t : others) t.join();
    }
    return cudaSuccess;
}
}  // namespace emu

#define cudaLaunchKernelEx emu::launch
#define cudaFuncSetAttribute(...) cudaSuccess
#define cudaDeviceGetAttribute(value, ...) (*(value) = 227 << 10)
#define cudaOccupancyMaxActiveClusters(count, ...) (*(count) = 2, cudaSuccess)

inline void __syncthreads() { emu::pass(emu::block.gate, int(emu::block.fibers.size())); }
inline void __syncwarp(unsigned = ~0u) { emu::sync_warp(); }
template <typename V> V emu_shuffle(V value, int source) {
    static_assert(sizeof(V) <= 8);
    memcpy(&emu::block.warp_slots[emu::block.current], &value, sizeof(V));
    emu::sync_warp();
    memcpy(&value, &emu::block.warp_slots[emu::block.current / 32 * 32 + source], sizeof(V));
    emu::sync_warp();
    return value;
}
template <typename V> V __shfl_xor_sync(unsigned, V v, int mask) { return emu_shuffle(v, emu::block.current % 32 ^ mask); }
template <typename V> V __shfl_sync(unsigned, V v, int source) { return emu_shuffle(v, source); }

// A real block may start late: the emulator lets remote shared memory be touched only after the first cluster barrier.
inline void __cluster_barrier_arrive() { emu::self().arrived++; emu::block.cluster->arrivals++; }
inline void __cluster_barrier_arrive_relaxed() { __cluster_barrier_arrive(); }
inline void __cluster_barrier_wait() {
    while (emu::block.cluster->arrivals < emu::self().arrived * emu::block.cluster->threads) emu::yield();
}
inline unsigned __clusterRelativeBlockRank() { return emu::block.rank; }
inline unsigned __clusterSizeInBlocks() { return emu::block.cluster->anchors.size(); }
inline void* __cluster_map_shared_rank(const void* p, unsigned rank) {
    if (emu::self().arrived == 0) abort();
    return emu::block.cluster->anchors[rank] + (static_cast<const char*>(p) - &emu::anchor);
}

// Asynchronous copies happen as late as they may: when their group is waited for.
inline void __pipeline_memcpy_async(void* to, const void* from, size_t size) {
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % size) abort();
    emu::self().groups.back().push_back({to, from, size});
}
inline void __pipeline_commit() { emu::self().groups.emplace_back(); }
inline void __pipeline_wait_prior(size_t prior) {
    auto& groups = emu::self().groups;
    for (; groups.size() > prior + 1; groups.erase(groups.begin()))
        for (const emu::Copy& c : groups.front()) memcpy(c.to, c.from, c.size);
}
// An address in shared memory counts from the block's anchor.
inline uint32_t __cvta_generic_to_shared(const void* p) { return static_cast<const char*>(p) - &emu::anchor; }
namespace emu {
struct Mbarrier { int32_t bytes; int16_t arrivals, phase; };    // still to come; at 0 and 0 the next phase begins
inline std::mutex mbarriers;
inline char* shared(uint32_t address, unsigned rank) { return block.cluster->anchors[rank] + int32_t(address); }
inline Mbarrier* mbarrier(uint32_t address, unsigned rank) { return reinterpret_cast<Mbarrier*>(shared(address, rank)); }
inline void count(Mbarrier* b, int bytes, int arrivals) {
    const std::lock_guard lock(mbarriers);
    b->bytes += bytes, b->arrivals += arrivals;
    if (b->bytes == 0 && b->arrivals == 0) b->arrivals = 1, b->phase++;
}
inline void mbarrier_init(uint32_t address) { *mbarrier(address, block.rank) = {0, 1, 0}; }
inline void expect(uint32_t address, int bytes) { count(mbarrier(address, block.rank), bytes, -1); }
inline void try_wait(uint32_t& done, uint32_t address, int parity) {
    yield();
    const std::lock_guard lock(mbarriers);
    done = mbarrier(address, block.rank)->phase % 2 != parity;
}
inline void st_async(uint32_t to, uint32_t bar, unsigned rank, float x, float y) {
    const float values[2] = {x, y};
    memcpy(shared(to, rank), values, 8);
    count(mbarrier(bar, rank), -8, 0);
}
}  // namespace emu
template <typename V> V __ldg(const V* p) { return *p; }
template <typename V> V __ldcs(const V* p) { return *p; }
template <typename V> void __stwb(V* p, const V& v) { *p = v; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __fdividef(float a, float b) { return a / b; }
template <typename A, typename B> auto min(A a, B b) { return b < a ? b : a; }
template <typename A, typename B> auto max(A a, B b) { return a < b ? b : a; }

// Moving bytes: 16-byte vectors, cp.async, bulk copies that an mbarrier signals, and stores into a neighbour's shared
// memory.
//
// GUARANTEE. Plain loads and stores here are weak: they need the order of a barrier, of an mbarrier or of kernels around
// them. An mbarrier phase that completes (`wait`) makes visible: what the threads that arrived wrote before, and the bytes
// whose arrival it counts. Shared memory that ordinary stores or cp.async filled must pass `fence_proxy_async` in the
// writing threads before wgmma or a bulk copy reads it.
#pragma once

#include <cstdint>

#include "scoped.h"

namespace latent_moe::gpu {

LATENT_MOE_DEVICE uint4 load16(const void* from) {
    return *static_cast<const uint4*>(from);
}
LATENT_MOE_DEVICE void store16(void* to, uint4 v) {
    *static_cast<uint4*>(to) = v;
}

#ifdef __CUDACC__  // what follows is NVIDIA's alone

LATENT_MOE_DEVICE std::uint32_t shared_address(const void* p) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// Shared memory as the CTA's own threads read and write it.
template <class T>
LATENT_MOE_DEVICE T load_shared(std::uint32_t address) {
    T v;
    if constexpr (sizeof(T) == 16) {
        uint4 w;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                     : "r"(address)
                     : "memory");
        v = *reinterpret_cast<T*>(&w);
    } else {
        static_assert(sizeof(T) == 4);
        std::uint32_t w;
        asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(w) : "r"(address) : "memory");
        v = *reinterpret_cast<T*>(&w);
    }
    return v;
}
template <class T>
LATENT_MOE_DEVICE void store_shared(std::uint32_t address, T v) {
    if constexpr (sizeof(T) == 16) {
        const uint4 w = *reinterpret_cast<uint4*>(&v);
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
                     : "memory");
    } else {
        static_assert(sizeof(T) == 4);
        asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(address), "r"(*reinterpret_cast<std::uint32_t*>(&v))
                     : "memory");
    }
}

LATENT_MOE_DEVICE void store_shared8(std::uint32_t address, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

/// For data that is read once: leaves the caches to others. Never for memory that anybody writes during the kernel.
LATENT_MOE_DEVICE uint4 load16_once(const void* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

/// 16 bytes from global to shared memory; zeros instead where `valid` is false (`from` is not read then).
LATENT_MOE_DEVICE void copy16_async(std::uint32_t to, const void* from, bool valid = true) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
LATENT_MOE_DEVICE void copies_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int pending = 0>
LATENT_MOE_DEVICE void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

LATENT_MOE_DEVICE void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/// For global memory that ordinary stores filled and the copy engine reads: by the writer before its release, by the reader
/// after its acquire.
LATENT_MOE_DEVICE void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

/// As `fence_proxy_async`, for memory of any kind: between an acquire of what other CTAs wrote and bulk copies of it.
LATENT_MOE_DEVICE void fence_proxy_async_all() {
    asm volatile("fence.proxy.async;" ::: "memory");
}

/// An mbarrier in shared memory, by its address. Initialise them unrolled, with constant addresses (10 ns each; 100 in a
/// rolled loop).
namespace mbarrier {
LATENT_MOE_DEVICE void init(std::uint32_t bar, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
/// After the inits, before anybody else, bulk copies included, touches the barriers.
LATENT_MOE_DEVICE void publish_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
LATENT_MOE_DEVICE void expect(std::uint32_t bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
LATENT_MOE_DEVICE void arrive(std::uint32_t bar) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory");
}
LATENT_MOE_DEVICE bool test(std::uint32_t bar, int parity) {
    std::uint32_t done;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return done != 0;
}
/// Waits for this CTA's or its cluster's own copies, never for a peer. A bug would make it wait for ever: it traps instead.
LATENT_MOE_DEVICE void wait(std::uint32_t bar, int parity) {
    for (int tries = 0;; ++tries) {
        std::uint32_t done;
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(bar), "r"(parity)
                     : "memory");
        if (done) return;
        if (tries > 20'000'000) __trap();
    }
}
/// Where what is waited for waits for a peer itself, as long as that may take, and then comes whatever happened.
LATENT_MOE_DEVICE void wait_patiently(std::uint32_t bar, int parity) {
    std::uint32_t done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(bar), "r"(parity)
                     : "memory");
    } while (!done);
}
}  // namespace mbarrier

/// L2 policy of weights: read once a step, never again before they are evicted anyway.
inline constexpr std::uint64_t evict_first = 0x12F0000000000000;
inline constexpr std::uint64_t evict_normal = 0x1000000000000000;

/// `bytes` (a multiple of 16) from global to this CTA's shared memory; the barrier counts their arrival.
LATENT_MOE_DEVICE void bulk_copy(std::uint32_t to, const void* from, int bytes, std::uint32_t bar, std::uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            to),
        "l"(from), "r"(bytes), "r"(bar), "l"(policy)
        : "memory");
}
/// The same to the same place in several CTAs of the cluster (bit c of `ctas`: CTA c), each of whose barriers counts it.
LATENT_MOE_DEVICE void bulk_copy_to(std::uint16_t ctas, std::uint32_t to, const void* from, int bytes, std::uint32_t bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(bar), "h"(ctas)
        : "memory");
}
/// From this CTA's shared memory to global memory, a peer's too. `bulk_stores_commit` closes a group of them;
/// `bulk_stores_wait<n>` returns once all groups but the thread's last n are complete: what they wrote is then visible to
/// the thread, whose release at system scope hands it on.
LATENT_MOE_DEVICE void bulk_store(void* to, std::uint32_t from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
LATENT_MOE_DEVICE void bulk_stores_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int pending>
LATENT_MOE_DEVICE void bulk_stores_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}
/// Once all but the thread's last n groups have read their shared memory, which may then be written again.
template <int pending>
LATENT_MOE_DEVICE void bulk_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
LATENT_MOE_DEVICE void bulk_prefetch(const void* from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

/// The 128 bytes around an address, by the thread itself: a small bulk prefetch keeps the copy engine as long as a large
/// one.
LATENT_MOE_DEVICE void prefetch_l2(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}
LATENT_MOE_DEVICE void prefetch_l1(const void* from) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(from) : "memory");
}

/// A box of a 2-d tensor (tensor_map.h) at `column`, `row`, to this CTA's shared memory; the barrier counts the whole box,
/// what lies outside the tensor arrives as zeros.
LATENT_MOE_DEVICE void tensor_copy(std::uint32_t to, const void* map, int column, int row, std::uint32_t bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(bar)
        : "memory");
}
LATENT_MOE_DEVICE void prefetch_tensor_map(const void* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

namespace cluster {
LATENT_MOE_DEVICE std::uint32_t rank() {
    std::uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
/// The same shared-memory address in another CTA of the cluster.
LATENT_MOE_DEVICE std::uint32_t address_at(std::uint32_t own, int cta) {
    std::uint32_t a;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(own), "r"(cta));
    return a;
}
/// Arrives at the mbarrier at the same address in another CTA. Unqualified: a release at cluster scope in a product's main
/// loop costs a quarter of its speed, and what is handed over here is memory that `wgmma_wait` says has been read.
LATENT_MOE_DEVICE void arrive_at(std::uint32_t bar, int cta) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_at(bar, cta)) : "memory");
}
/// Orders nothing by itself: for barriers whose inits `publish_init` made visible.
LATENT_MOE_DEVICE void arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
LATENT_MOE_DEVICE void arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
LATENT_MOE_DEVICE void wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/// 16 bytes into another CTA's shared memory; the barrier there counts their arrival: data and signal in one.
LATENT_MOE_DEVICE void store_async(std::uint32_t remote, float4 v, std::uint32_t remote_bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
                 "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)), "r"(__float_as_uint(v.z)), "r"(__float_as_uint(v.w)),
                 "r"(remote_bar)
                 : "memory");
}
LATENT_MOE_DEVICE void store_async(std::uint32_t remote, float2 v, std::uint32_t remote_bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(remote),
                 "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)), "r"(remote_bar)
                 : "memory");
}
}  // namespace cluster

#endif

/// As `sync_threads_of`, without waiting.
LATENT_MOE_DEVICE void arrive_threads_of(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

#endif

}  // namespace latent_moe::gpu

// The weight warp: W's blocks from memory into a ring in shared memory, by bulk copies that land ready for wgmma. It starts before
// anything else and before the predecessor has ended, since nobody writes weights.
//
// The stream is throttled: at full rate its queues delay every latency-critical access (the latents above all) by microseconds.
// Blocks that the ring does not hold yet are prefetched into L2.
#pragma once

#include "gpu/kernels/fused_tail_params.cuh"
#include "gpu/primitives/bounded_wait.h"

namespace latent_moe::gpu::fused {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

/// Waits for what this GPU alone completes, or what hangs on a wait for a peer that is itself bounded. Only a bug could make it wait
/// for ever: it traps instead, long after every bounded wait.
template <class Ready>
LATENT_MOE_DEVICE void wait_locally(const Params& p, Ready ready) {
    std::uint64_t start = 0;
    for (std::uint32_t tries = 1; !ready(); ++tries) {
        if (tries % 1024 != 0) continue;
        const std::uint64_t now = clock_ns();
        if (start == 0) start = now;
        if (now - start > 4 * p.exchange.timeout_ns + 1'000'000'000) __trap();
    }
}
LATENT_MOE_DEVICE bool try_wait(std::uint32_t bar, int parity) {
    std::uint32_t done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return done != 0;
}
LATENT_MOE_DEVICE void wait_locally(const Params& p, std::uint32_t bar, int parity) {
    wait_locally(p, [&] { return try_wait(bar, parity); });
}

template <class Cta>
LATENT_MOE_DEVICE void stream_weights(const Cta& cta, int lane) {
    using Tile = typename Cta::Tile;
    constexpr int tiles_of_layout = PackedLayout::tile_rows / Tile::rows;
    const Params& p = cta.p;
    const int total = cta.tiles * cta.blocks;
    const auto source = [&](int tile, int block) {
        const std::int64_t first = std::int64_t{tile / tiles_of_layout} * p.blocks + cta.first_block + block;
        return p.weights + first * PackedLayout::block_bytes + tile % tiles_of_layout * Tile::weight_bytes;
    };
    int tile = cta.cluster, block = 0;
    const auto advance = [&] {
        if (++block == cta.blocks) block = 0, tile += p.clusters;
    };
    const auto issue = [&](int place) {
        mbarrier::expect(cta.bar(Barriers::full, place), Tile::weight_bytes);
        bulk_copy(cta.memory + place * Tile::weight_bytes, source(tile, block), Tile::weight_bytes,
                  cta.bar(Barriers::full, place), evict_first);
    };

    constexpr int at_once = 2;  // these leave before the other barriers are ready; a ring has at least two places
    if (lane == 0) {
        store_shared(cta.bar(Barriers::latent_ready), 0);
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            mbarrier::init(cta.bar(Barriers::full, i), 1);
            mbarrier::publish_init();
            if (i < total) issue(i), advance();
        }
#pragma unroll
        for (int i = at_once; i < max_ring; ++i) {
            if (i < p.ring) mbarrier::init(cta.bar(Barriers::full, i), 1);
        }
        mbarrier::publish_init();
    }
    __syncwarp();
    cluster::arrive_relaxed();
    if (lane == 0) {
#pragma unroll 1
        for (int i = at_once, place = at_once % p.ring, turn = at_once / p.ring; i < total; ++i) {
            if (i == p.ring) {
                // The rest goes to L2 already: as long as it is one piece of memory, and not too much of it.
                const int ahead = min(p.prefetch_blocks, cta.blocks - block);
                for (int k = 0; k < ahead; ++k) bulk_prefetch(source(tile, block + k), Tile::weight_bytes);
                // The barriers `empty` were made by another warp; its arrival is older than the first of these copies.
                asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
            }
            if (turn > 0) wait_locally(p, cta.bar(Barriers::empty, place), (turn - 1) & 1);
            wait_locally(p, [&] {
                const int in_flight = load_shared<int>(cta.bar(Barriers::latent_ready)) ? p.in_flight_late : p.in_flight_early;
                if (i < in_flight) return true;
                const int oldest = i - in_flight;
                return mbarrier::test(cta.bar(Barriers::full, oldest % p.ring), oldest / p.ring & 1);
            });
            issue(place), advance();
            if (++place == p.ring) place = 0, ++turn;
        }
    }
    // Whoever has not yet waited for the cluster, does: every thread waits once for each of its arrivals.
    if (lane != 0 || total <= p.ring) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

#endif

}  // namespace latent_moe::gpu::fused

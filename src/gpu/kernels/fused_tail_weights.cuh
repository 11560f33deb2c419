// The weight warp: W's blocks from memory into a ring in shared memory, by bulk copies that land ready for wgmma. It starts
// before anything else and before the predecessor has ended, since nobody writes weights.
//
// The stream is throttled: at full rate its queues delay every latency-critical access (the latents above all) by
// microseconds. Blocks that the ring does not hold yet are prefetched into L2.
#pragma once

#include "gpu/kernels/fused_tail_params.cuh"
#include "gpu/kernels/fused_tail_stamps.cuh"

namespace latent_moe::gpu::fused {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

LATENT_MOE_DEVICE bool try_wait(std::uint32_t bar, int parity) {
    std::uint32_t done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return done != 0;
}

/// Waits for what this GPU alone completes, or what hangs on a wait for a peer that is itself bounded. Only a bug could make
/// it wait for ever: after 2^32 looks (minutes) it traps. Small, because it is fetched on the hot path.
template <class Ready>
LATENT_MOE_DEVICE void wait_locally(Ready ready) {
    std::uint32_t looks = 0;
    while (!ready()) {
        if (++looks == 0) __trap();
    }
}
LATENT_MOE_DEVICE void wait_locally(std::uint32_t bar, int parity) {
    wait_locally([&] { return try_wait(bar, parity); });
}

template <class Cta>
LATENT_MOE_DEVICE void stream_weights(const Cta& cta, int lane) {
    using Tile = typename Cta::Tile;
    constexpr int tiles_of_layout = PackedLayout::tile_rows / Tile::rows;
    const Params& p = cta.p;
    const int total = cta.turns() * cta.blocks;
    const auto source = [&](int tile, int block) {
        const std::int64_t first = std::int64_t{tile / tiles_of_layout} * p.blocks + cta.first_block + block;
        return p.weights + first * Tile::packed_bytes + tile % tiles_of_layout * Tile::weight_bytes;
    };
    int tile = cta.cluster, block = 0;
    const auto advance = [&] {
        if (++block == cta.blocks) block = 0, tile += p.clusters;
    };
    const auto issue = [&](int place) {
        mbarrier::expect(cta.bar(Barriers::full, place), Tile::weight_bytes);
        bulk_copy(cta.ring(place), source(tile, block), Tile::weight_bytes, cta.bar(Barriers::full, place), evict_first);
    };

    constexpr int at_once = 2;  // these leave before the other barriers are ready; a ring has at least two places
    if (lane == 0) {
        store_shared(cta.bar(Barriers::latent_ready), 0);
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            mbarrier::init(cta.bar(Barriers::full, i), 1);
            mbarrier::publish_init();
            if (i < total) issue(i), advance();
            if (i == 0) stamp<Tile>(p, weights_begun, true);
        }
#pragma unroll
        for (int i = at_once; i < Tile::max_ring; ++i) {
            if (i < p.ring) mbarrier::init(cta.bar(Barriers::full, i), 1);
        }
        mbarrier::publish_init();
    }
    __syncwarp();
    cluster::arrive_relaxed();
    if (lane == 0) {
        int landed = 0, landed_place = 0, landed_turn = 0;  // blocks known to have come, in order
        int place = at_once % p.ring, turn = at_once / p.ring;
        // What the ring does not hold yet goes to L2 while it is full, a block at a time: a burst would delay the latents.
        int ahead = 0, last_ahead = 0, tile_ahead = 0, block_ahead = 0;
        long long paced = 0;
        const auto skip_ahead = [&] {
            ++ahead;
            if (++block_ahead == cta.blocks) block_ahead = 0, tile_ahead += p.clusters;
        };
        const auto prefetch = [&] {
            bulk_prefetch(source(tile_ahead, block_ahead), Tile::weight_bytes);
            paced = clock64(), skip_ahead();
        };
#pragma unroll 1
        for (int i = at_once; i < total; ++i) {
            if (i == p.ring) {
                // The barriers `empty` were made by another warp; its arrival is older than the first of these copies.
                asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
                ahead = i, last_ahead = min(total, i + p.prefetch_blocks);
                tile_ahead = tile, block_ahead = block;
                // The last few at once: nothing comes after them that they could delay.
                if (total - i <= p.prefetch_at_once) {
#pragma unroll 1
                    while (ahead < last_ahead) prefetch();
                }
            }
            if (turn > 0) {
                wait_locally([&] {
                    if (try_wait(cta.bar(Barriers::empty, place), (turn - 1) & 1)) return true;
                    if (ahead < last_ahead && clock64() - paced > p.prefetch_clocks) prefetch();
                    return false;
                });
                if (ahead <= i) skip_ahead();
            }
            wait_locally([&] {
                const int in_flight =
                    load_shared<int>(cta.bar(Barriers::latent_ready)) ? p.in_flight_late : p.in_flight_early;
                if (i - landed < in_flight) return true;
                if (!mbarrier::test(cta.bar(Barriers::full, landed_place), landed_turn & 1)) return false;
                ++landed;
                if (++landed_place == p.ring) landed_place = 0, ++landed_turn;
                return i - landed < in_flight;
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

// With many tokens, the latents of a GPU are summed once, into a pool, instead of once in every cluster.
//
//     an item is up to 256 columns of a row, inside one part of K; each warp that gathers takes some:
//         own row, the peers' from their mailboxes ─▶ Σ, rounded ─▶ · γ, rounded ─▶ pool, as wgmma reads it
//                                                               └─▶ Σ squares ───▶ pool        ─▶ count of the part
//     one lane of each CTA: its part is whole ─▶ bulk copies, block by block, into a ring in shared memory
//     one warp of each CTA: every part is whole ─▶ each row's squares, added up in the order of parts and items
//
// MEMORY ORDER, all of it inside one GPU. Stores to the pool → barrier of the warp → fence, add to the count; a load that
// sees the whole count, with acquire → proxy fence → bulk copies; or → barrier of the warp → loads. The counts lie in the
// head of the region, a set a slot; they are cleared together with the slot's mailboxes, a call later, when kernel order
// says that nobody looks at them. The pool itself is written again by the next call, after its `dependency_wait`.
//
// A count is waited for without bound: it depends on warps of this grid, which is resident as a whole, and their own waits
// for peers are bounded.
#pragma once

#include "gpu/kernels/fused_tail_mailboxes.cuh"
#include "gpu/kernels/fused_tail_stamps.cuh"
#include "gpu/kernels/fused_tail_weights.cuh"

namespace latent_moe::gpu::fused {

/// Where a row's columns lie in the pool: blocks as in shared memory, [block][token of the tile][64 columns, swizzled].
template <class Tile>
LATENT_MOE_DEVICE uint4* pool_at(const Params& p, int token, int unit) {
    const auto t = static_cast<std::uint32_t>(token), u = static_cast<std::uint32_t>(unit);
    return p.pool + ((u >> 3) * Tile::tokens + t) * 8 + ((u ^ t) & 7);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

/// One warp's item.
struct PoolItem {
    int token, part;
    int unit, end;  ///< this lane's unit of the row, and the end of the part
};
template <class Cta>
LATENT_MOE_DEVICE PoolItem pool_item(const Cta& cta, int item) {
    const Params& p = cta.p;
    const int of_row = cta.split() * p.pool_items, token = item / of_row, in_row = item - token * of_row;
    const int part = in_row / p.pool_items, first = in_row - part * p.pool_items;
    const int begin = p.blocks * part >> cta.split_log2(), end = p.blocks * (part + 1) >> cta.split_log2();
    return {token, part, begin * 8 + first * pool_item_units + static_cast<int>(threadIdx.x % 32), end * 8};
}

LATENT_MOE_DEVICE std::uint32_t* pool_count(const Params& p, const State& state, int part) {
    return &head(p).pooled[state.slot][part].items;
}

/// By one lane, before it reads what others put into this part.
template <class Cta>
LATENT_MOE_DEVICE void await_part(const Cta& cta, const State& state, int part) {
    const auto all = static_cast<std::uint32_t>(cta.p.tokens * cta.p.pool_items);
    const std::uint32_t* count = pool_count(cta.p, state, part);
    wait_locally([&] { return load_acquire<Scope::device>(count) == all; });
}

/// By one lane: this CTA's K, once it is whole, block by block into the ring; again for every tile of the cluster.
template <class Cta>
LATENT_MOE_DEVICE void stream_tokens(const Cta& cta, const State& state) {
    using Tile = typename Cta::Tile;
    const Params& p = cta.p;
    const char* from = reinterpret_cast<const char*>(p.pool) + std::int64_t{cta.first_block} * Tile::token_bytes;
    const int row_bytes = p.tokens * PackedLayout::row_bytes;
    await_part(cta, state, cta.part);
    fence_proxy_async_all();
    store_shared(cta.bar(Barriers::latent_ready), 1);
    stamp<Tile>(p, last_latents_done, true);
    int place = 0, round = 0, block = 0;
#pragma unroll 1
    for (int i = 0; i < cta.turns() * cta.blocks; ++i) {
        if (round > 0) wait_locally(cta.bar(Barriers::token_empty, place), (round - 1) & 1);
        const std::uint32_t bar = cta.bar(Barriers::token_full, place);
        mbarrier::expect(bar, row_bytes);
        bulk_copy(cta.memory + p.at.tokens + place * Tile::token_bytes, from + block * Tile::token_bytes, row_bytes, bar,
                  evict_normal);
        if (++block == cta.blocks) block = 0;
        if (++place == p.token_ring) place = 0, ++round;
    }
}

/// By one warp, once every part is whole: the rows' sums of squares, for this CTA's own columns.
template <class Cta>
LATENT_MOE_DEVICE void add_up_squares(const Cta& cta, int lane) {
    const Params& p = cta.p;
    const int of_row = cta.split() * p.pool_items;
#pragma unroll 1
    for (int m = lane; m < p.tokens; m += 32) {
        const float* from = p.pool_squares + m * of_row;
        float sum = 0;
#pragma unroll 8
        for (int i = 0; i < of_row; ++i) sum += from[i];
        store_shared(cta.memory + p.at.squares + m * 4, sum);
    }
}

#endif

}  // namespace latent_moe::gpu::fused

// With many tokens, the latents of a GPU are summed once, into a pool, instead of once in every cluster.
//
//     an item is up to 256 columns of a row, inside one part of K; each gathering warp takes some:
//         own row, the peers' from their mailboxes ─▶ Σ, rounded ─▶ · γ, rounded ─▶ pool, as wgmma reads it ─▶ count
//                                                               └─▶ Σ squares ───▶ pool
//     33 rows and more: one warp of each CTA: a count of its part of K is whole ─▶ bulk copies into a ring in shared memory
//     up to 32 rows:    the gathering warps poll their CTA's part of K, unit by unit, and store it in shared memory
//     gathering warps: each row's squares, added up in the order of parts and items
//
// Items, the sending of latents (fused_tail_publish.cuh) and the counts go through K in the same order, so that the product
// begins with the first columns while the last are still on the link.
//
// MEMORY ORDER, all of it inside one GPU. What is polled is a mailbox (mailbox.h): what is not the sentinel has come, and no
// order is needed. It saves the fence and the count, some 2 µs, and costs instructions, which with many rows are more. For
// bulk copies: each lane's stores to the pool, its proxy fence → barrier of the warp → one lane's
// fence, and its addition to the count → load of the count with acquire → barrier of the warp → bulk copies. PTX asks for a
// proxy fence on the way from ordinary stores to a bulk copy; at the reader's end it took a microsecond a count, behind
// copies under way. The squares are a mailbox too: no count covers them; what is not `no_square` has come. Latents, squares
// and counts have a slot for each slot of the mailboxes, and are re-armed with it, a call later; of latents the rows that
// may be polled. Others need not be: they are written again three calls later, and the kernels that read them have ended.
//
// A fence waits for all that its multiprocessor has under way, stores to peers too. So where there are fences, shared slices
// leave only when the CTA has filled its part of the pool.
//
// Here nobody waits with a bound: what is waited for depends on warps of this grid, which is resident as a whole, and their
// own waits for peers are bounded.
#pragma once

#include "gpu/kernels/fused_tail_mailboxes.cuh"
#include "gpu/kernels/fused_tail_stamps.cuh"
#include "gpu/kernels/fused_tail_weights.cuh"
#include "gpu/primitives/copy.h"

namespace latent_moe::gpu::fused {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

/// One warp's item. In their order all rows' first columns of each part come first, then all rows' next: the product begins
/// with what is there first.
struct PoolItem {
    int token, part, of_part;  ///< which row, which part of K, its number in the part
    int unit, end;             ///< this lane's unit of the row, and the end of the part
};
LATENT_MOE_DEVICE int round_up_to(int n, int multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

template <class Cta>
LATENT_MOE_DEVICE int pool_item_count(const Cta& cta) {
    return cta.p.tokens * cta.p.pool_items << cta.split_log2();
}
template <class Cta>
LATENT_MOE_DEVICE PoolItem pool_item(const Cta& cta, int item) {
    const Params& p = cta.p;
    const int columns = item / p.tokens, token = item - columns * p.tokens;
    const int part = columns & (cta.split() - 1), of_part = columns >> cta.split_log2();
    const int begin = p.blocks * part >> cta.split_log2(), end = p.blocks * (part + 1) >> cta.split_log2();
    return {token, part, of_part, begin * 8 + of_part * pool_item_units + static_cast<int>(threadIdx.x % 32), end * 8};
}

/// How much of a part of K is there: one count for some of its columns.
LATENT_MOE_DEVICE std::uint32_t* pool_count(const Params& p, const State& state, int part, int count) {
    return &head(p).pooled[state.slot][part][count].items;
}

/// One warp: this CTA's K, block by block into the ring; again for every tile of the cluster.
template <class Cta>
LATENT_MOE_DEVICE void stream_tokens(const Cta& cta, const State& state, int lane) {
    using Tile = typename Cta::Tile;
    const Params& p = cta.p;
    const auto* from =
        reinterpret_cast<const char*>(pool_of(p, state.slot)) + std::int64_t{cta.first_block} * pool_block_bytes;
    const int row_bytes = p.tokens * PackedLayout::row_bytes;
    const auto issue = [&](int place, int block) {
        const std::uint32_t bar = cta.bar(Barriers::token_full, place);
        mbarrier::expect(bar, row_bytes);
        bulk_copy(cta.memory + p.at.tokens + place * Tile::token_bytes, from + block * pool_block_bytes, row_bytes, bar,
                  evict_normal);
    };
    int place = 0, round = 0, block = 0;
    const auto issue_next = [&] {
        if (round > 0) wait_locally(cta.bar(Barriers::token_empty, place), (round - 1) & 1);
        issue(place, block);
        if (++block == cta.blocks) block = 0;
        if (++place == p.token_ring) place = 0, ++round;
    };
    // A lane looks at each count: one look takes a while.
    const int own_items = min(p.items_of_count, p.pool_items - lane * p.items_of_count);
    const auto all = static_cast<std::uint32_t>(p.tokens * max(own_items, 0));
    const auto look = [&] {
        bool there = false;
        if (lane < pool_counts) there = load_acquire<Scope::device>(pool_count(p, state, cta.part, lane)) == all;
        return __ballot_sync(0xffffffffu, there);
    };
    unsigned there = 0;  // bit c: what count c counts
    int next = 0;
#pragma unroll 1
    for (int count = 0; next < cta.blocks; ++count) {
        const int end = min(next + p.items_of_count * (pool_item_units / 8), cta.blocks);
        wait_locally([&] { return (there >> count & 1) != 0 || ((there = look()) >> count & 1) != 0; });
        __syncwarp();
        stamp<Tile>(p, last_latents_done, lane == 0);
        const int free = max(0, min(end, p.token_ring) - next);
        if (lane < free) issue(next + lane, next + lane);  // all at once: one after the other, each takes a while to leave
        next += free;
        if (free > 0) place = next % p.token_ring, round = next / p.token_ring, block = next % cta.blocks;
#pragma unroll 1
        for (; next < end; ++next) {
            if (lane == 0) issue_next();
        }
    }
    if (lane != 0) return;
#pragma unroll 1
    for (const int total = cta.turns() * cta.blocks; next < total; ++next) issue_next();
}

/// By `warps` warps: the rows' sums of squares, for this CTA's own columns. Some lanes share a row; a tree adds up what they
/// have, the same one always.
template <class Cta>
LATENT_MOE_DEVICE void add_up_squares(const Cta& cta, const State& state, int warp, int warps, int lane) {
    const Params& p = cta.p;
    constexpr int at_once = 4;
    const int of_row = cta.split() * p.pool_items;
    int lanes = 1;
    while (lanes < of_row && lanes < 32) lanes *= 2;
    const int rows = 32 / lanes, own = lane & (lanes - 1);
#pragma unroll 1
    for (int first = warp * rows * at_once + lane / lanes; __any_sync(0xffffffffu, first < p.tokens);
         first += warps * rows * at_once) {
        float sums[at_once] = {};
#pragma unroll 1
        for (int i = own; i < round_up_to(of_row, lanes); i += lanes) {
            std::uint32_t bits[at_once];
            wait_locally([&] {
                bool there = true;
#pragma unroll
                for (int k = 0; k < at_once; ++k) {
                    const int row = first + k * rows;
                    bits[k] = 0;
                    if (row < p.tokens && i < of_row)
                        bits[k] = load_relaxed<Scope::device>(pool_squares_of(p, state.slot) + row * p.pool_squares_row + i);
                    there &= bits[k] != no_square;
                }
                return there;
            });
            __syncwarp();
#pragma unroll
            for (int k = 0; k < at_once; ++k) {
                float sum = as_float(bits[k]);
#pragma unroll 1
                for (int other = 1; other < lanes; other *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
                sums[k] += sum;
            }
        }
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
            const int row = first + k * rows;
            if (own == 0 && row < p.tokens) store_shared(cta.memory + p.at.squares + row * 4, sums[k]);
        }
    }
}

#endif

}  // namespace latent_moe::gpu::fused

// What a CTA of the fused tail knows: the tile it was compiled for, the kernel's parameters, its place in the grid.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gpu/kernels/packed_float8.h"
#include "gpu/kernels/packed_layout.h"
#include "gpu/kernels/rows.h"
#include "gpu/primitives/copy.h"
#include "gpu/primitives/window.h"

namespace latent_moe::gpu::fused {

/// Of shared memory: leaves room for a neighbouring kernel's reserved kilobyte, so that both can be resident.
inline constexpr int max_shared_bytes = 231'424;
inline constexpr int max_split = 8;
inline constexpr int tick_log2_ns = 20;      ///< waits are timed in ticks of a millisecond
inline constexpr int fragment_rows = 16;     ///< of W: one warp's part of a wgmma
inline constexpr int most_polled_rows = 32;  ///< of the pool: see `Tile::streamed`

/// What a kernel is compiled for. A `known` of 0 is read at run time; knowing it makes the kernel smaller, and every
/// instruction that need not be fetched counts: most of the code runs once.
struct Known {
    int split = 0;        ///< CTAs of a cluster
    int world = 0;        ///< only 2 is of use
    int turns = 0;        ///< tiles of a cluster; only 1 is of use
    bool stamps = false;  ///< see fused_tail_stamps.cuh
    bool float8 = false;  ///< weights are e4m3 (packed_float8.h), multiplied from registers (fused_tail_float8.cuh)
};

/// Places of the ring of weight blocks, at most.
constexpr int max_ring_of(int block_bytes) {
    return std::min(24, max_shared_bytes / block_bytes);
}

/// Weights that a cluster multiplies at a time, and the warps that do it.
template <int tokens_, int rows_, Known known_ = Known{}>
struct Tile {
    static constexpr int tokens = tokens_;  ///< token columns of the product
    static constexpr int rows = rows_;      ///< of W
    static constexpr Known known = known_;

    /// Latents are summed once a GPU, into a pool (fused_tail_pool.cuh), not once a cluster;
    static constexpr bool pooled = tokens >= 32;
    /// and come from there by bulk copies, through a ring. Else the gathering warps poll the pool, as they poll mailboxes.
    static constexpr bool streamed = tokens > most_polled_rows;

    // Roles, in the order of the warps.
    static constexpr int math_warps = rows / fragment_rows;
    // With the others a multiple of 4, by which registers are shared out.
    static constexpr int gather_warps = !streamed ? 14 : (tokens <= 64 ? 21 : 17) - math_warps;
    static constexpr int weight_warp = math_warps + gather_warps;
    static constexpr int protocol_warp = weight_warp + 1;
    static constexpr int token_warp = protocol_warp + 1;  ///< if streamed
    static constexpr int math_threads = math_warps * 32;
    static constexpr int gather_threads = gather_warps * 32;
    static constexpr int threads = (protocol_warp + 1 + (streamed ? 1 : 0)) * 32;

    /// Items of the pool that a warp sums together, with one fence.
    static constexpr int items_at_once = tokens <= 64 ? 1 : rows == 64 ? 2 : 3;
    /// Whether CTAs without a tile may take the peers' columns, so that the others leave once their own are sent, and the
    /// next call's weights come that much sooner.
    static constexpr bool receives = !pooled && known.turns == 1 && known.world != 0;
    /// Rows that a thread polls together, if there is one peer.
    static constexpr int gather_at_once = tokens <= 8 ? 1 : tokens <= 32 ? 4 : 6;

    static constexpr int packed_bytes = known.float8 ? PackedFloat8Layout::block_bytes : PackedLayout::block_bytes;
    static constexpr int weight_bytes = packed_bytes / PackedLayout::tile_rows * rows;  ///< of one block of 64 columns
    static constexpr int max_ring = max_ring_of(weight_bytes);
    static constexpr int token_bytes = tokens * PackedLayout::row_bytes;  ///< of one block
    /// Of wgmma (mma.sync for e4m3), added at the end.
    static constexpr int chains = tokens == 16 && known.float8 ? 2 : tokens <= 16 ? 4 : tokens == 32 ? 2 : 1;

    // A fragment as its warp's lanes hold it: | tokens 0 … 7: lane 0: 4 floats, lane 1 … | tokens 8 … 15 | …. There are 16
    // bytes more after every 8 lanes and the size is an odd multiple of 64, so that a warp that reads 2 tokens × 32 rows, or
    // 8 tokens × 4 rows 8 apart, meets no bank twice.
    static constexpr int group_bytes = 512 + 64;  ///< of 8 tokens
    static constexpr int fragment_bytes = tokens / 8 * group_bytes + (tokens / 8 % 2 == 0 ? 64 : 0);
    static constexpr int fragment_data_bytes = fragment_rows * tokens * 4;
    LATENT_MOE_DEVICE static constexpr int lane_offset(int lane) { return lane * 16 + lane / 8 * 16; }
    /// Of (row, token) in a fragment: lane 4 (row mod 8) + token mod 8 / 2, float 2 (row / 8) + token mod 2.
    LATENT_MOE_DEVICE static constexpr int element_offset(int row, int token) {
        return token / 8 * group_bytes + lane_offset(row % 8 * 4 + token % 8 / 2) + (row / 8 * 2 + token % 2) * 4;
    }
    /// The parts of so many tokens are signalled together: the first are finished while the last still travel.
    static constexpr int tokens_of_signal = tokens > 32 ? 32 : tokens, signals = tokens / tokens_of_signal;
    static constexpr int parts_bytes = math_warps * fragment_bytes;  ///< what a CTA receives for a tile, whatever the split

    static_assert(tokens % 8 == 0 && tokens <= 128);
    static_assert(math_warps == 4 || math_warps == 8);
    static_assert(math_warps % 4 == 0, "wgmma is issued by whole warpgroups, the first warps of the CTA");
    static_assert(threads <= 1024);
};

/// Where things lie in shared memory, in bytes from its start: | barriers | ring of weights | tokens | parts | shared sums |
/// squares | block squares |. Ring and tokens are aligned to 1 KB for the swizzle.
inline constexpr int at_ring = 1024;
struct SharedLayout {
    int tokens;         ///< Σ routed · γ as wgmma reads it: blocks of [tokens, 64 columns], swizzled; if streamed, a ring
    int parts;          ///< fragments of the product from every CTA of the cluster
    int shared_sums;    ///< float32 Σ shared of this CTA's columns: [tile][token][rows / split]
    int squares;        ///< sums of squares: [part of K][token]
    int block_squares;  ///< this CTA's: [token][block]
    int bytes;
};

/// Places for blocks of streamed latents, at most.
inline constexpr int max_token_ring = 16;

/// mbarriers, then single words.
struct Barriers {
    static constexpr int full = 0;                     ///< [24] a block of weights has come
    static constexpr int empty = full + 8 * 24;        ///< [24] it has been multiplied
    static constexpr int received = empty + 8 * 24;    ///< [4] parts (and, for the first tile, squares) of the whole cluster
    static constexpr int may_send = received + 8 * 4;  ///< the cluster has read the parts of the tile before
    static constexpr int token_full = may_send + 8;    ///< [16] a block of streamed latents has come,
    static constexpr int token_empty = token_full + 8 * max_token_ring;  ///< [16] it has been multiplied
    static constexpr int epoch = token_empty + 8 * max_token_ring;       ///< word: this call's
    static constexpr int latent_ready = epoch + 4;                       ///< word, a hint for the weight warp
    static constexpr int bytes = latent_ready + 4;
};
static_assert(Barriers::bytes <= at_ring);

/// The latents are gathered in passes over K, each with a barrier of its own.
inline constexpr int max_passes = 8;
inline constexpr int most_blocks_of_pass = 6;  ///< where the pool is polled: four units a thread, which it polls together

/// Named barriers of a CTA; 0 is __syncthreads.
enum NamedBarrier : int {
    squares_ready = 1,
    shared_ready = 2,
    parts_read = 3,
    epoch_there = 4,
    tokens_ready = 5,                          ///< and the next ones
    state_loaded = tokens_ready + max_passes,  ///< by the protocol warp: nobody else waits for it
};

/// Of the pool (fused_tail_pool.cuh): units of columns that a warp sums at a time; rows of the largest tile, for which there
/// is room whatever the tile; a sum of squares that has not come (a NaN that no arithmetic gives).
inline constexpr int pool_item_units = 32;
inline constexpr int most_pooled_rows = 128;
inline constexpr int pool_counts = 8;  ///< of a part of K, at most
inline constexpr int pool_block_bytes = most_pooled_rows * PackedLayout::row_bytes;
inline constexpr std::uint32_t no_square = 0xffffffff;

/// In the order in which the kernel needs them: a line of the constant cache that is first touched late, behind the weight
/// stream, costs a microsecond: `touch`.
struct Params {
    const char* weights;
    int tokens;
    int blocks;  ///< of 64 columns of W
    int tiles, clusters, split_log2;
    int receivers;  ///< CTAs, the last of the grid, that only take the peers' columns
    int ring, token_ring, in_flight_early, in_flight_late, prefetch_blocks, prefetch_at_once, prefetch_clocks;
    int latent_units;    ///< L / 8
    int column_units;    ///< H / world / 8
    int block_stride;    ///< most blocks of a CTA
    int gather_columns;  ///< units of a row that the gathering threads take at once
    int gather_rows;     ///< rows that they take at once

    SharedLayout at;
    bool rms_norm, exchange_shared, release, digest;
    char* own_region;              ///< in this rank's window
    char* peer_region;             ///< in the peer's, if there is just one
    char* pool;                    ///< its slots
    std::int64_t pool_slot_bytes;  ///< latents, then squares
    int pool_items;                ///< of a row in a part of K
    int items_of_count;            ///< so many of these are counted together
    int pool_squares_row;          ///< floats of a row, at most
    std::int64_t slot_bytes;       ///< of the region's slots
    std::int64_t latent_box;       ///< bytes of one mailbox of latents
    std::int64_t column_box;       ///< bytes of one mailbox of columns

    UnitRows routed, shared, out, prefix;

    const char* gamma;
    const float* column_scales;
    float scale, epsilon, inverse_latent;
    std::uint32_t timeout_ticks;
    int rank;
    std::int64_t region;  ///< offset in every window
    long long* stamps;

    Exchange exchange;
};

#ifdef __CUDACC__
/// Brings the parameters near, while nothing is urgent yet.
LATENT_MOE_DEVICE void touch(const Params& p) {
    std::uint64_t at;
    asm("cvta.to.param.u64 %0, %1;" : "=l"(at) : "l"(&p));
#pragma unroll
    for (int line = 0; line < static_cast<int>(sizeof(Params)); line += 64) {
        [[maybe_unused]] std::uint32_t ignored;
        asm volatile("ld.param.u32 %0, [%1];" : "=r"(ignored) : "l"(at + line));
    }
}
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

template <class Tile_>
struct Cta {
    using Tile = Tile_;
    static constexpr Known known = Tile::known;
    static constexpr bool pair = known.world == 2;

    const Params& p;
    std::uint32_t memory;  ///< shared memory
    int part;              ///< which CTA of the cluster this is
    int cluster;
    int first_block, blocks;  ///< this CTA's part of K

    LATENT_MOE_DEVICE Cta(const Params& params, std::uint32_t shared_memory) : p(params), memory(shared_memory) {
        part = static_cast<int>(blockIdx.x) & (split() - 1);
        cluster = static_cast<int>(blockIdx.x) >> split_log2();
        first_block = p.blocks * part >> split_log2();
        blocks = (p.blocks * (part + 1) >> split_log2()) - first_block;
    }
    LATENT_MOE_DEVICE int split_log2() const {
        if constexpr (known.split != 0) return known.split == 8 ? 3 : known.split == 4 ? 2 : known.split == 2 ? 1 : 0;
        return p.split_log2;
    }
    LATENT_MOE_DEVICE int split() const { return 1 << split_log2(); }
    LATENT_MOE_DEVICE int world() const {
        if constexpr (known.world != 0) return known.world;
        return p.exchange.window.world;
    }
    /// Tiles that this cluster works on, and which they are.
    LATENT_MOE_DEVICE int turns() const {
        if constexpr (known.turns != 0) return known.turns;
        return (p.tiles - cluster + p.clusters - 1) / p.clusters;
    }
    LATENT_MOE_DEVICE int tile(int turn) const {
        if constexpr (known.turns == 1) return cluster;
        return cluster + turn * p.clusters;
    }

    LATENT_MOE_DEVICE std::uint32_t ring(int place) const { return memory + at_ring + place * Tile::weight_bytes; }
    LATENT_MOE_DEVICE std::uint32_t bar(int which, int index = 0) const { return memory + which + 8 * index; }

    /// What a CTA finishes of a tile: fragments, and units of 8 columns, two a fragment. Powers of two.
    LATENT_MOE_DEVICE int fragments_log2() const { return (Tile::math_warps == 8 ? 3 : 2) - split_log2(); }
    LATENT_MOE_DEVICE int units_log2() const { return fragments_log2() + 1; }
    LATENT_MOE_DEVICE int fragments() const { return 1 << fragments_log2(); }
    LATENT_MOE_DEVICE int units() const { return 1 << units_log2(); }
    /// Among this rank's units of columns, the first that this CTA finishes.
    LATENT_MOE_DEVICE int first_unit(int tile) const { return tile * (Tile::rows / 8) + part * units(); }

    /// How much of Σ shared is this CTA's: units of the rows that it finishes.
    LATENT_MOE_DEVICE int shared_items() const { return turns() * (p.tokens << units_log2()); }
    /// The gathering threads that the math warps wait for, the last ones: whoever has a part in Σ shared or, if pooled, in
    /// the squares. With few tokens the others have only latents, or nothing.
    LATENT_MOE_DEVICE int announcing_threads() const {
        return Tile::pooled ? Tile::gather_threads : min(Tile::gather_threads, (shared_items() + 31) / 32 * 32);
    }
};

#endif

}  // namespace latent_moe::gpu::fused

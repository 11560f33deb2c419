// What a CTA of the fused tail knows: the tile it was compiled for, the kernel's parameters, its place in the grid.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gpu/kernels/packed_layout.h"
#include "gpu/kernels/rows.h"
#include "gpu/primitives/copy.h"
#include "gpu/primitives/window.h"

namespace latent_moe::gpu::fused {

/// Of shared memory: leaves room for a neighbouring kernel's reserved kilobyte, so that both can be resident.
inline constexpr int max_shared_bytes = 231'424;
inline constexpr int max_ring = 24;
inline constexpr int max_split = 8;
inline constexpr int tick_log2_ns = 20;  ///< waits are timed in ticks of a millisecond
inline constexpr int fragment_rows = 16;  ///< of W: one warp's part of a wgmma

/// Weights that a cluster multiplies at a time, and the warps that do it.
template <int tokens_, int rows_, bool stamps_ = false>
struct Tile {
    static constexpr int tokens = tokens_;  ///< token columns of the product
    static constexpr int rows = rows_;      ///< of W
    static constexpr bool stamps = stamps_;  ///< see fused_tail_stamps.cuh

    // Roles, in the order of the warps.
    static constexpr int math_warps = rows / fragment_rows;
    static constexpr int gather_warps = tokens <= 64 ? 14 : 10;
    static constexpr int weight_warp = math_warps + gather_warps;
    static constexpr int protocol_warp = weight_warp + 1;
    static constexpr int math_threads = math_warps * 32;
    static constexpr int gather_threads = gather_warps * 32;
    static constexpr int threads = (protocol_warp + 1) * 32;

    static constexpr int weight_bytes = rows * PackedLayout::row_bytes;   ///< of one block of 64 columns
    static constexpr int token_bytes = tokens * PackedLayout::row_bytes;  ///< of one block
    static constexpr int chains = tokens <= 16 ? 4 : tokens == 32 ? 2 : 1;  ///< of wgmma, added at the end

    // A fragment as its warp's lanes hold it: | j = 0: lane 0: 4 floats, lane 1 … | j = 1 | …, j counting groups of 8 tokens. The
    // 64 bytes more shift the next fragment's banks, so that a warp that reads 8 tokens of two fragments meets no bank twice.
    static constexpr int fragment_data_bytes = fragment_rows * tokens * 4;
    static constexpr int fragment_bytes = fragment_data_bytes + 64;
    static constexpr int parts_bytes = math_warps * fragment_bytes;  ///< what a CTA receives for a tile, whatever the split

    static_assert(tokens % 8 == 0 && tokens <= 128);
    static_assert(math_warps == 4 || math_warps == 8);
    static_assert(math_warps % 4 == 0, "wgmma is issued by whole warpgroups, the first warps of the CTA");
    static_assert(threads <= 1024);
};

/// Where things lie in shared memory, in bytes from its start: | ring of weights | tokens | parts | shared sums | squares | block
/// squares | barriers |. The first two are aligned to 1 KB for the swizzle.
struct SharedLayout {
    int tokens;         ///< Σ routed · γ as wgmma reads it: blocks of [tokens, 64 columns], swizzled
    int parts;          ///< fragments of the product from every CTA of the cluster
    int shared_sums;    ///< float32 Σ shared of this CTA's columns: [tile][token][rows / split]
    int squares;        ///< sums of squares: [part of K][token]
    int block_squares;  ///< this CTA's: [token][block]
    int barriers;
    int bytes;
};

/// After `barriers`: mbarriers, then single words.
struct Barriers {
    static constexpr int full = 0;                           ///< [max_ring] a block of weights has come
    static constexpr int empty = full + 8 * max_ring;        ///< [max_ring] it has been multiplied
    static constexpr int received = empty + 8 * max_ring;    ///< parts (and, for the first tile, squares) of the whole cluster
    static constexpr int may_send = received + 8;            ///< the cluster has read the parts of the tile before
    static constexpr int epoch = may_send + 8;               ///< word: this call's
    static constexpr int latent_ready = epoch + 4;           ///< word, a hint for the weight warp
    static constexpr int bytes = latent_ready + 4;
};

/// Named barriers of a CTA; 0 is __syncthreads.
enum NamedBarrier : int { tokens_ready = 1, squares_ready = 2, shared_ready = 3, parts_read = 4 };

struct Params {
    Exchange exchange;
    UnitRows routed, shared, prefix, out;
    const char* weights;
    const char* gamma;
    const float* column_scales;
    std::int64_t region;      ///< offset in every window
    std::int64_t slot_bytes;  ///< of the region's slots
    std::int64_t latent_box;  ///< bytes of one mailbox of latents
    std::int64_t column_box;  ///< bytes of one mailbox of columns
    float scale, epsilon, inverse_latent;
    int tokens;
    int latent_units;  ///< L / 8
    int column_units;  ///< H / world / 8
    int blocks;        ///< of 64 columns of W
    int tiles, clusters, split_log2;
    int ring, in_flight_early, in_flight_late, prefetch_blocks;
    int block_stride;    ///< most blocks of a CTA
    int gather_columns;  ///< units of a row that the gathering threads take at once
    int gather_rows;     ///< rows that they take at once
    SharedLayout at;
    bool rms_norm, exchange_shared, release, digest;
    std::uint32_t timeout_ticks;
    long long* stamps;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

template <class Tile_>
struct Cta {
    using Tile = Tile_;
    const Params& p;
    std::uint32_t memory;  ///< shared memory
    int split, part;       ///< CTAs of the cluster, and which this is
    int cluster;
    int first_block, blocks;  ///< this CTA's part of K
    int tiles;                ///< that this cluster works on

    LATENT_MOE_DEVICE Cta(const Params& params, std::uint32_t shared_memory) : p(params), memory(shared_memory) {
        split = 1 << p.split_log2;
        part = static_cast<int>(blockIdx.x) & (split - 1);
        cluster = static_cast<int>(blockIdx.x) >> p.split_log2;
        first_block = p.blocks * part >> p.split_log2;
        blocks = (p.blocks * (part + 1) >> p.split_log2) - first_block;
        tiles = (p.tiles - cluster + p.clusters - 1) / p.clusters;
    }
    LATENT_MOE_DEVICE std::uint32_t bar(int which, int index = 0) const { return memory + p.at.barriers + which + 8 * index; }
    LATENT_MOE_DEVICE int tile(int i) const { return cluster + i * p.clusters; }
    /// What a CTA finishes of a tile: fragments, and units of 8 columns, two a fragment. Powers of two.
    LATENT_MOE_DEVICE int fragments_log2() const { return (Tile::math_warps == 8 ? 3 : 2) - p.split_log2; }
    LATENT_MOE_DEVICE int units_log2() const { return fragments_log2() + 1; }
    LATENT_MOE_DEVICE int fragments() const { return 1 << fragments_log2(); }
    LATENT_MOE_DEVICE int units() const { return 1 << units_log2(); }
    /// Among this rank's units of columns, the first that this CTA finishes.
    LATENT_MOE_DEVICE int first_unit(int tile) const { return tile * (Tile::rows / 8) + part * units(); }
};

#endif

/// Shared memory as the CTA's own threads read and write it.
template <class T>
LATENT_MOE_DEVICE T load_shared(std::uint32_t address) {
    T v;
    if constexpr (sizeof(T) == 16) {
        uint4 w;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "r"(address)
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
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w) : "memory");
    } else {
        static_assert(sizeof(T) == 4);
        asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(address), "r"(*reinterpret_cast<std::uint32_t*>(&v)) : "memory");
    }
}

}  // namespace latent_moe::gpu::fused

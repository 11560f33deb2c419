// The main loop of large products on Hopper: which warp of a cluster of two CTAs does what.
//
//     pair (two CTAs)     256 rows of A × `columns` rows of W, a tile; CTA r of the pair has rows 128 r … 128 r + 127
//     producer thread     A: its CTA's 128 rows, by tensor copy; W: half of the tile's rows, multicast to both CTAs
//     two warpgroups      rows 64 g … 64 g + 63 of the CTA × all columns: wgmma m64nXk16, float32 in registers
//
// A stage of the ring in shared memory is 64 of K. Its `full` barrier counts the bytes of A and of both halves of W; its
// `empty` barrier counts the warpgroups of both CTAs, since either CTA's copy of W lands in both. W is read packed
// (packed_layout.h): a block is 128 rows in the order in which they lie in shared memory, so half a tile is one plain bulk
// copy. K is summed in order by one warpgroup: the same bits on every run, whatever the grid.
#pragma once

#include <cstdint>

#include "gpu/kernels/packed_layout.h"
#include "gpu/primitives/copy.h"
#include "gpu/primitives/mma.h"

namespace latent_moe::gpu {

template <int tile_columns>
struct TileProduct {
    static_assert(tile_columns == 128 || tile_columns == 256);

    static constexpr int pair_rows = 256, cta_rows = 128, group_rows = 64;
    static constexpr int groups = 2, group_threads = 128, threads = groups * group_threads;  ///< the first of a CTA
    static constexpr int stage_k = PackedLayout::block_columns;
    static constexpr int stages = tile_columns == 256 ? 4 : 6;
    static constexpr int a_bytes = cta_rows * PackedLayout::row_bytes, w_bytes = tile_columns * PackedLayout::row_bytes;
    static constexpr int stage_bytes = a_bytes + w_bytes;
    static constexpr int shared_bytes = stages * stage_bytes + 16 * stages;  ///< from an address that is a multiple of 1 KB

    /// Of one thread's part of a tile: element 4j + i is row 16 w + l / 4 + 8 (i / 2), column 8j + 2 (l % 4) + i % 2.
    using Sums = float[tile_columns / 2];

    std::uint32_t base;  ///< shared memory

    LATENT_MOE_DEVICE std::uint32_t a_at(int stage) const { return base + stage * a_bytes; }
    LATENT_MOE_DEVICE std::uint32_t w_at(int stage) const { return base + stages * a_bytes + stage * w_bytes; }
    LATENT_MOE_DEVICE std::uint32_t full(int stage) const { return base + stages * stage_bytes + stage * 8; }
    LATENT_MOE_DEVICE std::uint32_t empty(int stage) const { return full(stage) + stages * 8; }

    /// By one thread; then `mbarrier::publish_init`, and a barrier of the cluster before anybody goes on.
    LATENT_MOE_DEVICE void init() const {
#pragma unroll
        for (int s = 0; s < stages; ++s) mbarrier::init(full(s), 1), mbarrier::init(empty(s), 2 * groups);
    }

    /// Where a thread is in the ring.
    struct Place {
        int stage = 0, parity = 0;
        LATENT_MOE_DEVICE void next() {
            if (++stage == stages) stage = 0, parity ^= 1;
        }
    };

    /// What a pair multiplies by.
    struct Weights {
        const char* packed;
        std::uint32_t tiles, blocks;  ///< of the packed layout

        /// This CTA's half of the rows of column tile c. Past the last packed tile the last one again: nobody stores that.
        LATENT_MOE_DEVICE const char* half(std::uint32_t c, int cta) const {
            if constexpr (tile_columns == 256) {
                const std::uint32_t tile = min(2 * c + cta, tiles - 1);
                return packed + std::int64_t{tile} * blocks * PackedLayout::block_bytes;
            }
            return packed + std::int64_t{c} * blocks * PackedLayout::block_bytes + cta * (w_bytes / 2);
        }
    };

    // ---- the producer thread

    LATENT_MOE_DEVICE void load_w(const Place& at, const char* half, std::uint32_t block, int cta) const {
        mbarrier::expect(full(at.stage), stage_bytes);
        bulk_copy_to(3, w_at(at.stage) + cta * (w_bytes / 2), half + std::int64_t{block} * PackedLayout::block_bytes,
                     w_bytes / 2, full(at.stage));
    }
    LATENT_MOE_DEVICE void load_a(const Place& at, const void* map, int row, std::uint32_t block) const {
        tensor_copy(a_at(at.stage), map, static_cast<int>(block) * stage_k, row, full(at.stage));
    }

    /// Loads a tile. `row()` says where its rows of A begin, once they are there. Of the thread's first tile the weights
    /// are asked for before the rows.
    template <class Row>
    LATENT_MOE_DEVICE void load(Place& at, bool first, const Weights& weights, std::uint32_t column_tile, int cta,
                                const void* map, Row row) const {
        const char* const half = weights.half(column_tile, cta);
        std::uint32_t block = 0;
        if (first) {
            Place early = at;
            const std::uint32_t fits = min(static_cast<std::uint32_t>(stages), weights.blocks);
            for (std::uint32_t b = 0; b < fits; ++b, early.next()) load_w(early, half, b, cta);
            const int from = row();
            for (; block < fits; ++block, at.next()) load_a(at, map, from, block);
            for (; block < weights.blocks; ++block, at.next()) {
                mbarrier::wait_patiently(empty(at.stage), at.parity ^ 1);
                load_w(at, half, block, cta), load_a(at, map, from, block);
            }
            return;
        }
        const int from = row();
        for (; block < weights.blocks; ++block, at.next()) {
            mbarrier::wait_patiently(empty(at.stage), at.parity ^ 1);
            load_w(at, half, block, cta), load_a(at, map, from, block);
        }
    }

    // ---- a warpgroup

    /// One thread of the group and CTA.
    LATENT_MOE_DEVICE void release(int stage, int thread) const {
        if (thread < 2) cluster::arrive_at(empty(stage), thread);
    }

    LATENT_MOE_DEVICE void multiply(Place& at, std::uint32_t blocks, int group, int thread, Sums& sums) const {
        const std::uint64_t a = swizzled_operand(a_at(0) + group * group_rows * PackedLayout::row_bytes);
        const std::uint64_t w = swizzled_operand(w_at(0));
        int previous = 0;
        std::uint32_t block = 0;
        do {
            mbarrier::wait_patiently(full(at.stage), at.parity);
            const std::uint64_t da = a + at.stage * (a_bytes >> 4), dw = w + at.stage * (w_bytes >> 4);
            wgmma_begin();
#pragma unroll
            for (int step = 0; step < stage_k / 16; ++step) {
                Wgmma<tile_columns>::multiply_bf16(sums, da + 2 * step, dw + 2 * step, (block | step) != 0);
            }
            wgmma_commit();
            wgmma_wait<1>();
            if (block > 0) release(previous, thread);
            previous = at.stage;
            at.next();
        } while (++block < blocks);
        wgmma_wait<0>();
        release(previous, thread);
    }
};

/// Four threads whose `v[j]` are columns 8j + 2q, 8j + 2q + 1 of a row (q = lane % 4) turn them: afterwards each has columns
/// 8q … 8q + 7. All lanes.
LATENT_MOE_DEVICE void gather_columns_of_quad(float (&v)[8], int lane) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        const bool odd = (lane & step) != 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (j & step) continue;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float &low = v[2 * j + i], &high = v[2 * (j | step) + i];
                const float got = shuffle_xor(odd ? low : high, static_cast<unsigned>(step));
                (odd ? low : high) = got;
            }
        }
    }
}

/// One thread's units (8 columns of a row) of 64 columns g and of rows 8h … of its warp's 16: `units[e]` is row
/// `row_of_unit(h, e)` at column `column_of_unit(g)` of the warpgroup's tile. Eight lanes have 128 bytes of a row. All
/// lanes.
template <int n>
LATENT_MOE_DEVICE void units_of(const float (&sums)[n], int g, int h, int lane, float (&units)[2][8]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int at = (8 * g + 4 * half + j) * 4 + 2 * h;
            units[half][2 * j] = sums[at], units[half][2 * j + 1] = sums[at + 1];
        }
        gather_columns_of_quad(units[half], lane);
    }
    // Neighbouring rows: the even one takes both left halves, the odd one both right ones.
    const bool odd_row = (lane & 4) != 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float got = shuffle_xor(odd_row ? units[0][i] : units[1][i], 4);
        (odd_row ? units[0][i] : units[1][i]) = got;
    }
}
LATENT_MOE_DEVICE int row_of_unit(int h, int e, int warp, int lane) {
    return warp * 16 + 8 * h + (lane >> 2 & ~1) + e;
}
LATENT_MOE_DEVICE int column_of_unit(int g, int lane) {
    return 64 * g + 32 * (lane >> 2 & 1) + 8 * (lane & 3);
}

/// Calls `finish(h, g, loaded, units)` for all of a thread's units (see `units_of`), with what `load(h, g, loaded)` fetched
/// `ahead` passes before, so that the latency of memory is not seen. More ahead takes registers that the sums leave few of.
template <int tile_columns, int ahead, class Loaded, class Load, class Finish>
LATENT_MOE_DEVICE void finish_in_passes(const float (&sums)[tile_columns / 2], int lane, Load load, Finish finish) {
    constexpr int groups = tile_columns / 64, passes = 2 * groups;
    Loaded loaded[ahead + 1];
#pragma unroll
    for (int i = 0; i < ahead; ++i) load(i / groups, i % groups, loaded[i]);
#pragma unroll
    for (int i = 0; i < passes; ++i) {
        if (i + ahead < passes) load((i + ahead) / groups, (i + ahead) % groups, loaded[(i + ahead) % (ahead + 1)]);
        float units[2][8];
        units_of(sums, i % groups, i / groups, lane, units);
        finish(i / groups, i % groups, loaded[i % (ahead + 1)], units);
    }
}

/// A CTA of three warpgroups starts with 168 registers a thread. The two that multiply take more, the third gives them. Each
/// role in one branch, and no calls (LATENT_MOE_NO_CALLS), or ptxas spills.
inline constexpr int tile_threads = 384;
LATENT_MOE_DEVICE void keep_few_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
}
LATENT_MOE_DEVICE void take_many_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
}

}  // namespace latent_moe::gpu

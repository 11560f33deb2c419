// The gathering warps: everything that comes from peers.
//
//     1. Σ routed: own rows by cp.async, the peers' from their mailboxes; · γ, rounded, into shared memory as wgmma reads it
//     2. the rows' sums of squares over this CTA's part of K, to every CTA of the cluster
//     3. Σ shared of the columns that this CTA finishes, float32, into shared memory
//     4. re-arm the slot of the call before
//     5. the peers' finished columns, as they come, into `out`
#pragma once

#include <cfloat>

#include <math_constants.h>

#include "gpu/kernels/fused_tail_mailboxes.cuh"
#include "gpu/kernels/fused_tail_stamps.cuh"
#include "gpu/kernels/fused_tail_weights.cuh"
#include "gpu/primitives/launch.h"

namespace latent_moe::gpu::fused {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

/// What stands for a unit's sum of squares that is not finite: +Inf if its elements are finite (the chain's factor is 0 then, and
/// so is the row's product), NaN if one of them is not, once rounded (then the chain's row is not either).
LATENT_MOE_DEVICE float squares_of_extremes(uint4 rounded) {
    float x[U::size];
    U::unpack(rounded, x);
    bool finite = true;
#pragma unroll
    for (const float e : x) finite = finite && fabsf(e) <= FLT_MAX;
    return finite ? CUDART_INF_F : CUDART_NAN_F;
}

template <class Cta>
struct Gather {
    using Tile = typename Cta::Tile;
    static constexpr int threads = Tile::gather_threads;

    const Cta& cta;
    const Params& p;
    const int thread;
    const int rank, world;
    PeerWait wait;

    LATENT_MOE_DEVICE Gather(const Cta& c, int t)
        : cta(c),
          p(c.p),
          thread(t),
          rank(c.p.exchange.window.rank),
          world(c.p.exchange.window.world),
          wait(c.p) {}

    // ---- 1. and 2.: latents. A thread has one unit of columns (rarely, several in turn) of every `gather_rows`-th row.

    LATENT_MOE_DEVICE std::uint32_t token_address(int token, int unit) const {
        return cta.memory + p.at.tokens + unit / 8 * Tile::token_bytes + PackedLayout::unit_in_block(token, unit % 8);
    }
    LATENT_MOE_DEVICE int column_unit(int unit) const { return cta.first_block * 8 + unit; }

    LATENT_MOE_DEVICE void copy_own_rows(const State& state, int first_row, int first_unit) const {
        // A slot is below 2^30, so this adds 0: own rows are asked for once the state is there, behind the loads to be published.
        const char* from = p.routed.data + (state.slot >> 30);
        for (int unit = first_unit; unit < cta.blocks * 8; unit += p.gather_columns) {
            if (column_unit(unit) >= p.latent_units) break;
            for (int m = first_row; m < p.tokens; m += p.gather_rows) {
                copy16_async(token_address(m, unit), from + m * p.routed.stride + column_unit(unit) * 16);
            }
        }
        copies_commit();
    }

    /// One row's unit: Σ routed → Σ routed · γ in shared memory. Returns the unit's sum of squares.
    LATENT_MOE_DEVICE float put(int token, int unit, const float (&sum)[U::size], uint4 gamma) const {
        float squares = 0, scaled[U::size], g[U::size];
        U::unpack(gamma, g);
#pragma unroll
        for (int e = 0; e < U::size; ++e) squares = fmaf(sum[e], sum[e], squares), scaled[e] = sum[e] * g[e];
        if (!(squares <= FLT_MAX)) squares = squares_of_extremes(U::pack(sum));
        store_shared(token_address(token, unit), U::pack(scaled));
        return squares;
    }

    /// Adds up the eight units of a block, which are eight neighbouring lanes.
    LATENT_MOE_DEVICE void keep_squares(int token, int unit, float squares) const {
        const unsigned lanes = 0xffu << (threadIdx.x & 24);
#pragma unroll
        for (int lane = 1; lane < 8; lane *= 2) squares += __shfl_xor_sync(lanes, squares, lane);
        if (unit % 8 == 0) {
            store_shared(cta.memory + p.at.block_squares + (token * p.block_stride + unit / 8) * 4, squares);
        }
    }

    /// Σ over ranks, in rank order, of one row's unit. `peers` mailboxes are polled together.
    template <int peers>
    LATENT_MOE_DEVICE void sum_row(const Slot& slot, int token, int unit, float (&sum)[U::size]) {
#pragma unroll
        for (float& e : sum) e = 0;
#pragma unroll 1
        for (int first = 0; first < world; first += peers) {
            uint4 v[peers];
            const auto source = [&](int i) { return first + i; };
            take<peers>(
                v, wait, Phase::gather,
                [&](int i) -> const uint4* {
                    if (source(i) >= world || source(i) == rank) return nullptr;
                    return slot.latents(source(i), rank) + token * p.latent_units + column_unit(unit);
                },
                source);
            copies_wait();
#pragma unroll
            for (int i = 0; i < peers; ++i) {
                if (source(i) >= world) continue;
                if (source(i) == rank) v[i] = load_shared<uint4>(token_address(token, unit));
                add(sum, v[i]);
            }
        }
    }
    LATENT_MOE_DEVICE static void add(float (&sum)[U::size], uint4 value) {
        float term[U::size];
        U::unpack(value, term);
#pragma unroll
        for (int e = 0; e < U::size; ++e) sum[e] += term[e];
    }

    /// One word of the last row first: while nothing has come, polling takes little of what the weights need too.
    LATENT_MOE_DEVICE void await_last_row(const uint4* box, int first_row) {
        if (first_row >= p.tokens) return;
        const int last = first_row + (p.tokens - 1 - first_row) / p.gather_rows * p.gather_rows;
        const std::uint32_t* word = &box[last * p.latent_units].w;
        while (load_relaxed(word) == Element<Dtype::bf16>::sentinel) {
            if (wait.over(1 - rank, Phase::gather)) break;
        }
    }

    /// With a single peer (`pair`) a thread polls up to `rows` rows together, else up to `peers` ranks of one row.
    template <bool pair, int rows, int peers>
    LATENT_MOE_DEVICE void gather_latents(const Slot& slot, int first_row, int first_unit) {
        const int step = p.gather_rows;
        // The squares of the last rows are kept once everybody else may go on.
        float squares[rows];
        int kept_row = -1, kept_unit = 0;
        const auto keep = [&] {
            if (!p.rms_norm || kept_row < 0) return;
#pragma unroll
            for (int i = 0; i < rows; ++i) {
                if (kept_row + i * step < p.tokens) keep_squares(kept_row + i * step, kept_unit, squares[i]);
            }
        };
#pragma unroll 1
        for (int unit = first_unit; unit < cta.blocks * 8; unit += p.gather_columns) {
            const bool inside = column_unit(unit) < p.latent_units;  // beyond K: zeros, as in W
            uint4 gamma = make_uint4(0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80);
            if (p.gamma && inside) gamma = load16(p.gamma + column_unit(unit) * 16);
            const uint4* box = pair ? slot.latents(1 - rank, rank) + column_unit(unit) : nullptr;
            if (pair && Tile::tokens >= 16 && inside) await_last_row(box, first_row);
#pragma unroll 1
            for (int m = first_row; m < p.tokens; m += rows * step) {
                uint4 theirs[rows];
                if (pair && inside) {
                    take<rows>(
                        theirs, wait, Phase::gather,
                        [&](int i) { return m + i * step < p.tokens ? box + (m + i * step) * p.latent_units : nullptr; },
                        [&](int) { return 1 - rank; });
                    copies_wait();
                }
                keep();
#pragma unroll
                for (int i = 0; i < rows; ++i) {
                    const int token = m + i * step;
                    if (token >= p.tokens) continue;
                    float sum[U::size] = {};
                    if (inside) {
                        if constexpr (pair) {  // two summands: the order does not matter
                            U::unpack(theirs[i], sum), add(sum, load_shared<uint4>(token_address(token, unit)));
                        } else {
                            sum_row<peers>(slot, token, unit, sum);
                        }
                    }
                    squares[i] = put(token, unit, sum, gamma);
                }
                kept_row = m, kept_unit = unit;
            }
        }
        stamp<Tile::stamps>(p, latents_done, thread == 0);
        stamp<Tile::stamps>(p, last_latents_done, thread == threads - 32);
        fence_proxy_async();  // ordinary stores, read by wgmma
        __syncwarp();
        arrive_threads_of(tokens_ready, Tile::math_threads + threads + 32);
        if (thread == 0) store_shared(cta.bar(Barriers::latent_ready), 1);
        keep();
    }

    /// The rows' sums over this CTA's part of K, in the order of the blocks, to every CTA of the cluster: two rows a thread.
    LATENT_MOE_DEVICE void send_squares() const {
        sync_threads_of(squares_ready, threads + 32);  // also: the epoch is there
        cluster::wait();                               // the others' barriers are there
        if (!p.rms_norm) return;
        for (int m = 2 * thread; m < p.tokens; m += 2 * threads) {
            float sums[2] = {};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const std::uint32_t from = cta.memory + p.at.block_squares + (m + i) * p.block_stride * 4;
                for (int b = 0; b < cta.blocks && m + i < p.tokens; ++b) sums[i] += load_shared<float>(from + b * 4);
            }
            const std::uint32_t to = cta.memory + p.at.squares + (cta.part * Tile::tokens + m) * 4;
            for (int c = 0; c < cta.split; ++c) {
                cluster::store_async(cluster::address_at(to, c), make_float2(sums[0], sums[1]),
                                     cluster::address_at(cta.bar(Barriers::received), c));
            }
        }
    }

    // ---- 3. Σ shared

    LATENT_MOE_DEVICE void gather_shared(const Slot& slot) {
        const int of_tile = p.tokens << cta.units_log2(), items = cta.tiles * of_tile;
        for (int i = thread; i < items; i += threads) {
            const int t = cta.tiles == 1 ? 0 : i / of_tile;
            const int token = (i - t * of_tile) >> cta.units_log2(), u = i & (cta.units() - 1);
            const int unit = cta.first_unit(cta.tile(t)) + u;
            if (unit >= p.column_units) continue;
            float sum[U::size] = {};
            uint4 own{};
            if (p.shared.data) own = load_relaxed<Scope::device>(p.shared.at(token, rank * p.column_units + unit));
            if (!p.exchange_shared) {
                U::unpack(own, sum);
            } else {
                constexpr int peers = 4;
                for (int first = 0; first < world; first += peers) {
                    uint4 v[peers];
                    const auto source = [&](int k) { return first + k; };
                    take<peers>(
                        v, wait, Phase::scatter,
                        [&](int k) -> const uint4* {
                            if (source(k) >= world || source(k) == rank) return nullptr;
                            return slot.shared(source(k), rank) + token * p.column_units + unit;
                        },
                        source);
#pragma unroll
                    for (int k = 0; k < peers; ++k) {
                        if (source(k) < world) add(sum, source(k) == rank ? own : v[k]);
                    }
                }
            }
            const std::uint32_t to = cta.memory + p.at.shared_sums + i * 32;
            store_shared(to, make_float4(sum[0], sum[1], sum[2], sum[3]));
            store_shared(to + 16, make_float4(sum[4], sum[5], sum[6], sum[7]));
        }
        __syncwarp();
        arrive_threads_of(shared_ready, Tile::math_threads + threads);
    }

    // ---- 5. finished columns. Each CTA takes a contiguous range of all peers' units.

    LATENT_MOE_DEVICE void gather_columns(const Slot& slot) {
        const std::uint32_t of_peer = p.tokens * p.column_units, all = of_peer * (world - 1);
        const std::uint32_t share = (all + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * share;
        const std::uint32_t end = min(begin + share, all);
        std::uint32_t digest = 0;
        for (std::uint32_t i = begin + thread; i < end; i += threads) {
            const int k = static_cast<int>(i / of_peer), source = k < rank ? k : k + 1;
            const std::uint32_t j = i % of_peer, token = j / p.column_units, unit = j % p.column_units;
            const uint4* from = slot.columns(source, rank) + j;
            const std::uint32_t to = source * p.column_units + unit;
            uint4 v[1];
            take<1>(
                v, wait, Phase::combine, [&](int) { return from; }, [&](int) { return source; });
            store16(p.out.at(token, to), v[0]);
            digest += digest_of(v[0], token * (p.column_units * world) + to);
        }
        if (p.digest && begin + (thread & ~31) < end) {
            __syncwarp();
            add_to_digest(p.exchange, Call{load_shared<std::uint32_t>(cta.bar(Barriers::epoch)), false}, digest);
        }
    }

    LATENT_MOE_DEVICE void run() {
        const int first_row = thread / p.gather_columns, first_unit = thread % p.gather_columns;
        const int skipped = first_row < p.gather_rows ? first_row : p.tokens;  // threads beyond the last whole row have none
        dependency_wait();
        stamp<Tile::stamps>(p, predecessor_over, thread == 0);
        const State state = load_state(p);
        if (p.release && thread == 0) release_dependents();
        const Slot slot(p, state.slot);
        copy_own_rows(state, skipped, first_unit);
        if (world == 2) {
            gather_latents<true, 4, 1>(slot, skipped, first_unit);
        } else {
            gather_latents<false, 1, 4>(slot, skipped, first_unit);
        }
        send_squares();
        gather_shared(slot);
        stamp<Tile::stamps>(p, shared_done, thread == 0);
        rearm(p, state, std::int64_t{blockIdx.x} * threads + thread, std::int64_t{gridDim.x} * threads);
        gather_columns(slot);
        stamp<Tile::stamps>(p, columns_came, thread == 0);
        wait.report(cta.bar(Barriers::epoch));
    }
};

#endif

}  // namespace latent_moe::gpu::fused

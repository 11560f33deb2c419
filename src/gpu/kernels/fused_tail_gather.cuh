// The gathering warps: everything that comes from peers.
//
//     1. Σ routed: own rows by cp.async, the peers' from their mailboxes; · γ, rounded, into shared memory as wgmma reads it
//     2. the rows' sums of squares over this CTA's part of K, to every CTA of the cluster
//        (with many tokens both through a pool: fused_tail_pool.cuh)
//     3. Σ shared of the columns that this CTA finishes, float32, into shared memory
//     4. re-arm the slot of the call before
//     5. the peers' finished columns, as they come, into `out`
#pragma once

#include <cfloat>

#include <math_constants.h>

#include "gpu/kernels/fused_tail_mailboxes.cuh"
#include "gpu/kernels/fused_tail_pool.cuh"
#include "gpu/kernels/fused_tail_publish.cuh"
#include "gpu/kernels/fused_tail_stamps.cuh"
#include "gpu/kernels/fused_tail_weights.cuh"
#include "gpu/primitives/launch.h"

namespace latent_moe::gpu::fused {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

/// Two bf16 at a time, each result rounded once.
LATENT_MOE_DEVICE uint4 add_bf16(uint4 a, uint4 b) {
    const auto word = [](std::uint32_t x, std::uint32_t y) {
        std::uint32_t r;
        asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
        return r;
    };
    return make_uint4(word(a.x, b.x), word(a.y, b.y), word(a.z, b.z), word(a.w, b.w));
}
LATENT_MOE_DEVICE uint4 multiply_bf16(uint4 a, uint4 b) {
    const auto word = [](std::uint32_t x, std::uint32_t y) {
        std::uint32_t r;
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
        return r;
    };
    return make_uint4(word(a.x, b.x), word(a.y, b.y), word(a.z, b.z), word(a.w, b.w));
}
LATENT_MOE_DEVICE bool finite_bf16(uint4 v) {
    const auto word = [](std::uint32_t w) { return (w & 0x7f80) != 0x7f80 && (w & 0x7f800000) != 0x7f800000; };
    return word(v.x) && word(v.y) && word(v.z) && word(v.w);
}

template <class Cta>
struct Gather {
    using Tile = typename Cta::Tile;
    static constexpr int threads = Tile::gather_threads;
    static constexpr bool pair = Cta::pair;

    const Cta& cta;
    const Params& p;
    const int thread;
    PeerWait wait;

    LATENT_MOE_DEVICE Gather(const Cta& c, int t) : cta(c), p(c.p), thread(t), wait(c.p) {}

    LATENT_MOE_DEVICE static void add(float (&sum)[U::size], uint4 value) {
        float term[U::size];
        U::unpack(value, term);
#pragma unroll
        for (int e = 0; e < U::size; ++e) sum[e] += term[e];
    }

    // ---- 1. and 2.: latents. A thread has one unit of columns (rarely, several in turn) of every `gather_rows`-th row.

    struct Place {
        int row, unit;  ///< the thread's first ones; a thread beyond the last whole row has no row
    };

    LATENT_MOE_DEVICE std::uint32_t token_address(int token, int unit) const {
        // PackedLayout::unit_in_block, without signs
        const auto t = static_cast<std::uint32_t>(token), u = static_cast<std::uint32_t>(unit);
        return cta.memory + p.at.tokens + (u >> 3) * Tile::token_bytes + t * PackedLayout::row_bytes + ((u ^ t) & 7) * 16;
    }
    LATENT_MOE_DEVICE int column_unit(int unit) const {
        return cta.first_block * 8 + unit;
    }
    LATENT_MOE_DEVICE bool inside(int unit) const {
        return column_unit(unit) < p.latent_units;
    }
    LATENT_MOE_DEVICE uint4 gamma_of(int unit) const {
        if (!p.gamma || unit >= cta.blocks * 8 || !inside(unit))
            return make_uint4(0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80);
        return load16(p.gamma + column_unit(unit) * 16);
    }

    LATENT_MOE_DEVICE void copy_own_rows(const State& state, const Place& first) const {
        const char* from = p.routed.data;
        // With many rows, behind the loads to be published: once the state is there. A slot is below 2^30, so this adds 0.
        if constexpr (Tile::tokens > 8) from += state.slot >> 30;
#pragma unroll 1
        for (int unit = first.unit; unit < cta.blocks * 8 && inside(unit); unit += p.gather_columns) {
#pragma unroll 1
            for (int m = first.row; m < p.tokens; m += p.gather_rows) {
                copy16_async(token_address(m, unit), from + m * p.routed.stride + column_unit(unit) * 16);
            }
        }
        copies_commit();
    }

    /// Of one unit of x = Σ routed, rounded as the chain rounds it: +Inf if it overflows (the chain's factor is 0 then, and
    /// so is the row's product), NaN if an element is not finite (then the chain's row is not either).
    LATENT_MOE_DEVICE static float squares_of(uint4 x) {
        float squares = 0, elements[U::size];
        U::unpack(x, elements);
#pragma unroll
        for (const float e : elements) squares = fmaf(e, e, squares);
        if (!(squares <= FLT_MAX) && !finite_bf16(x)) squares = CUDART_NAN_F;
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

    /// Adds up the ranks' summands of a unit, in rank order: `box(source)` is a peer's, `own()` this rank's. Some are polled
    /// together.
    template <class Box, class Own>
    LATENT_MOE_DEVICE void add_ranks(Phase phase, Box box, Own own, float (&sum)[U::size]) {
        constexpr int at_once = 4;
#pragma unroll 1
        for (int first = 0; first < cta.world(); first += at_once) {
            uint4 v[at_once];
            const auto source = [&](int i) { return first + i; };
            take<at_once>(
                v, wait, phase,
                [&](int i) -> const uint4* {
                    return source(i) < cta.world() && source(i) != p.rank ? box(source(i)) : nullptr;
                },
                source);
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                if (source(i) >= cta.world()) continue;
                if (source(i) == p.rank) v[i] = own();
                add(sum, v[i]);
            }
        }
    }
    /// Of one row's latents: a unit of all K.
    template <class Own>
    LATENT_MOE_DEVICE void sum_row(const Slot<Cta>& slot, int token, int unit, Own own, float (&sum)[U::size]) {
        const auto box = [&](int source) { return slot.latents_from(source) + token * p.latent_units + unit; };
        add_ranks(Phase::gather, box, own, sum);
    }

    /// One word of the last row first: while nothing has come, polling takes little of what the weights need too.
    LATENT_MOE_DEVICE void await_last_row(const uint4* box, int first_row) {
        const int last = first_row + (p.tokens - 1 - first_row) / p.gather_rows * p.gather_rows;
        const std::uint32_t* word = &box[last * p.latent_units].w;
        while (load_relaxed(word) == Element<Dtype::bf16>::sentinel) {
            if (wait.over(1 - p.rank, Phase::gather)) break;
        }
    }

    /// In passes over this CTA's K, so that the first blocks are multiplied while the last are still gathered. With a single
    /// peer a thread polls several rows together, else several ranks of one row.
    LATENT_MOE_DEVICE void gather_latents(const Slot<Cta>& slot, const Place& first, uint4 gamma) {
        constexpr int rows = pair ? Tile::gather_at_once : 1;
        const int step = p.gather_rows;
        float squares[rows];
        int kept_row = -1;  // the first of the rows whose squares are still to be kept
        const auto keep = [&](int unit) {
            if (!p.rms_norm || kept_row < 0) return;
#pragma unroll
            for (int i = 0; i < rows; ++i) {
                if (kept_row + i * step < p.tokens) keep_squares(kept_row + i * step, unit, squares[i]);
            }
            kept_row = -1;
        };
#pragma unroll 1
        for (int begin = 0, pass = 0; begin < cta.blocks * 8; begin += p.gather_columns, ++pass) {
            const int unit = begin + first.unit;
            const bool exists = unit < cta.blocks * 8, is_inside = exists && inside(unit);  // beyond K: zeros, as in W
            const uint4 next_gamma = gamma_of(unit + p.gather_columns);
            const uint4* box = pair ? slot.latents_from(1 - p.rank) + column_unit(unit) : nullptr;
            if (pair && Tile::tokens >= 16 && pass == 0 && is_inside && first.row < p.tokens) await_last_row(box, first.row);
#pragma unroll 1
            for (int m = exists ? first.row : p.tokens; m < p.tokens; m += rows * step) {
                uint4 theirs[rows];
                if (pair && is_inside) {
                    take<rows>(
                        theirs, wait, Phase::gather,
                        [&](int i) { return m + i * step < p.tokens ? box + (m + i * step) * p.latent_units : nullptr; },
                        [&](int) { return 1 - p.rank; });
                    stamp<Tile>(p, latents_came, thread == 0 && pass == 0);
                    copies_wait();
                }
                keep(unit);
#pragma unroll
                for (int i = 0; i < rows; ++i) {
                    const int token = m + i * step;
                    if (token >= p.tokens) continue;
                    uint4 x{};
                    if (is_inside) {
                        if constexpr (pair) {  // two summands: the order does not matter, and float32 would round to the
                                               // same
                            x = add_bf16(theirs[i], load_shared<uint4>(token_address(token, unit)));
                        } else {
                            float sum[U::size] = {};
                            const auto own = [&] {
                                copies_wait();
                                return load_shared<uint4>(token_address(token, unit));
                            };
                            sum_row(slot, token, column_unit(unit), own, sum);
                            x = U::pack(sum);
                        }
                    }
                    store_shared(token_address(token, unit), multiply_bf16(x, gamma));
                    squares[i] = squares_of(x);
                }
                kept_row = m;
            }
            stamp<Tile>(p, latents_done, thread == 0);
            stamp<Tile>(p, last_latents_done, thread == threads - 32);
            fence_proxy_async();  // ordinary stores, read by wgmma
            __syncwarp();
            arrive_threads_of(tokens_ready + pass, Tile::math_threads + threads);
            if (pass == 0 && thread == 0) store_shared(cta.bar(Barriers::latent_ready), 1);
            keep(unit);  // the last rows' only now that everybody else may go on
            gamma = next_gamma;
        }
    }

    /// By the first cluster, which has all of K: of the latents as they are multiplied. What ranks compute from what they
    /// received is that alone; a column has one owner.
    LATENT_MOE_DEVICE void digest_latents(const State& state, const Place& first) const {
        std::uint32_t digest = 0;
#pragma unroll 1
        for (int unit = first.unit; unit < cta.blocks * 8; unit += p.gather_columns) {
#pragma unroll 1
            for (int m = first.row; m < p.tokens; m += p.gather_rows) {
                digest += digest_of(load_shared<uint4>(token_address(m, unit)), m * p.latent_units + column_unit(unit));
            }
        }
        __syncwarp();
        add_digest(p, state, digest);
    }

    /// The rows' sums over this CTA's part of K, in the order of the blocks, to every CTA of the cluster: two rows a thread
    /// of the first warp. The others do not wait for it: shared slices lie on the path of small products.
    LATENT_MOE_DEVICE void send_squares() const {
        static_assert(Tile::pooled || Tile::tokens <= 64);
        sync_threads_of(squares_ready, threads);
#pragma unroll 1
        for (int m = 2 * thread; m < p.tokens; m += 64) {
            float sums[2] = {};
            const std::uint32_t from = cta.memory + p.at.block_squares + m * p.block_stride * 4;
#pragma unroll 4
            for (int b = 0; b < cta.blocks; ++b) {  // a second row beyond the last is garbage, and nobody reads its sum
                sums[0] += load_shared<float>(from + b * 4);
                sums[1] += load_shared<float>(from + (m + 1 < p.tokens ? p.block_stride + b : b) * 4);
            }
            const std::uint32_t to = cta.memory + p.at.squares + (cta.part * Tile::tokens + m) * 4;
#pragma unroll 1
            for (int c = 0; c < cta.split(); ++c) {
                cluster::store_async(cluster::address_at(to, c), make_float2(sums[0], sums[1]),
                                     cluster::address_at(cta.bar(Barriers::received), c));
            }
        }
    }

    // ---- 1. and 2. by way of the pool

    /// Its items, of which the first are known, and their γ there, before there is anything to sum.
    struct PoolFiller {
        int item, end;
        PoolItem items[Tile::items_at_once];
        uint4 gammas[Tile::items_at_once];
    };
    LATENT_MOE_DEVICE uint4 gamma_of(const PoolItem& item) const {
        if (!p.gamma || item.unit >= p.latent_units) return make_uint4(0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80);
        return load16(p.gamma + item.unit * 16);
    }
    LATENT_MOE_DEVICE void locate(PoolFiller& f) const {
#pragma unroll
        for (int k = 0; k < Tile::items_at_once; ++k) {
            const int item = f.item + k * static_cast<int>(gridDim.x);
            f.items[k].unit = f.items[k].end = 0;
            if (item < f.end) f.items[k] = pool_item(cta, item), f.gammas[k] = gamma_of(f.items[k]);
        }
    }
    LATENT_MOE_DEVICE PoolFiller filler() const {
        PoolFiller f;
        f.item = thread / 32 * Tile::items_at_once * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
        f.end = pool_item_count(cta);
        locate(f);
        return f;
    }

    /// One word first: while nothing has come, polling takes little of what the link and the weights need too.
    LATENT_MOE_DEVICE void await_item(const uint4* box, const PoolItem& item) {
        const int first = item.unit - thread % 32;
        if (first >= min(item.end, p.latent_units)) return;
        const std::uint32_t* word = &box[item.token * p.latent_units + first].x;
        while (load_relaxed(word) == Element<Dtype::bf16>::sentinel) {
            if (wait.over(1 - p.rank, Phase::gather)) break;
        }
    }

    LATENT_MOE_DEVICE std::uint32_t fill_pool(const State& state, const Slot<Cta>& slot, PoolFiller& filler) {
        constexpr int n = Tile::items_at_once;
        const int lane = thread % 32, grid = static_cast<int>(gridDim.x);
        uint4* const pool = pool_of(p, state.slot);
        std::uint32_t digest = 0;
#pragma unroll 1
        while (filler.item < filler.end) {
            const PoolItem(&items)[n] = filler.items;
            const auto exists = [&](int k) { return items[k].unit < items[k].end; };
            const auto is_inside = [&](int k) { return exists(k) && items[k].unit < p.latent_units; };
            uint4 own[n], x[n];
#pragma unroll
            for (int k = 0; k < n; ++k) {
                own[k] = x[k] = uint4{};
                if (is_inside(k)) own[k] = load_relaxed<Scope::device>(p.routed.at(items[k].token, items[k].unit));
            }
            if constexpr (pair) {
                const uint4* box = slot.latents_from(1 - p.rank);
                await_item(box, items[0]);
                take<n>(
                    x, wait, Phase::gather,
                    [&](int k) { return is_inside(k) ? box + items[k].token * p.latent_units + items[k].unit : nullptr; },
                    [&](int) { return 1 - p.rank; });
            }
            stamp<Tile>(p, latents_came, thread == 0);
#pragma unroll
            for (int k = 0; k < n; ++k) {
                if (!exists(k)) continue;
                if (is_inside(k)) {
                    if constexpr (pair) {
                        x[k] = add_bf16(x[k], own[k]);
                    } else {
                        float sum[U::size] = {};
                        sum_row(
                            slot, items[k].token, items[k].unit, [&] { return own[k]; }, sum);
                        x[k] = U::pack(sum);
                    }
                }
                uint4 product = multiply_bf16(x[k], filler.gammas[k]);
                if constexpr (!Tile::streamed) product = U::canonical(product);  // a word of a mailbox
                const auto t = static_cast<std::uint32_t>(items[k].token), u = static_cast<std::uint32_t>(items[k].unit);
                store_relaxed<Scope::device>(pool + (u >> 3) * (pool_block_bytes / 16) + t * 8 + ((u ^ t) & 7), product);
                if (p.digest && is_inside(k)) digest += digest_of(product, items[k].token * p.latent_units + items[k].unit);
            }
            if constexpr (Tile::streamed) {
                fence_proxy_async_global();
                __syncwarp();
                if (lane == 0) {
                    fence<Scope::device>();
#pragma unroll
                    for (int k = 0; k < n; ++k) {
                        if (filler.item + k * grid >= filler.end) continue;
                        add_relaxed<Scope::device>(pool_count(p, state, items[k].part, items[k].of_part / p.items_of_count),
                                                   1u);
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < n; ++k) {
                float squares = squares_of(x[k]);
#pragma unroll
                for (int other = 1; other < 32; other *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, other);
                if (lane == 0 && filler.item + k * grid < filler.end) {
                    const int of_row = items[k].part * p.pool_items + items[k].of_part;
                    store_relaxed<Scope::device>(
                        pool_squares_of(p, state.slot) + items[k].token * p.pool_squares_row + of_row, as_bits(squares));
                }
            }
            filler.item += threads / 32 * n * grid;
            locate(filler);
        }
        if (Tile::streamed && thread == 0) store_shared(cta.bar(Barriers::latent_ready), 1);
        stamp<Tile>(p, latents_done, thread == 0);
        return digest;
    }

    /// This CTA's K from the pool, in passes, as `gather_latents`.
    LATENT_MOE_DEVICE void gather_pool(const State& state) const {
        constexpr int at_once = 4, block_units = Tile::token_bytes / 16;  // of a block, also of rows that are not there
        const uint4* const from = pool_of(p, state.slot) + cta.first_block * (pool_block_bytes / 16);
        const int blocks_of_pass = static_cast<int>(static_cast<unsigned>(p.gather_columns) / 8);
#pragma unroll 1
        for (int begin = 0, barrier = tokens_ready; begin < cta.blocks; begin += blocks_of_pass, ++barrier) {
            const int end = min(begin + blocks_of_pass, cta.blocks) * block_units;
#pragma unroll 1
            for (int first = begin * block_units + thread; first < end; first += threads * at_once) {
                const auto source = [&](int k) -> const uint4* {
                    const int i = first + k * threads, of_block = i % block_units;
                    if (i >= end || of_block / 8 >= p.tokens) return nullptr;
                    return from + i / block_units * (pool_block_bytes / 16) + of_block;
                };
                uint4 v[at_once] = {};
                wait_locally([&] {  // all together, also those that have come: else one would be loaded after the other
                    bool there = true;
#pragma unroll
                    for (int k = 0; k < at_once; ++k) {
                        if (const uint4* unit = source(k)) v[k] = load_relaxed<Scope::device>(unit);
                    }
#pragma unroll
                    for (const uint4& each : v) there &= U::arrived(each);
                    return there;
                });
#pragma unroll
                for (int k = 0; k < at_once; ++k) {
                    if (source(k)) store_shared(cta.memory + p.at.tokens + (first + k * threads) * 16, v[k]);
                }
            }
            fence_proxy_async();  // ordinary stores, read by wgmma
            __syncwarp();
            arrive_threads_of(barrier, Tile::math_threads + threads);
            if (begin == 0 && thread == 0) store_shared(cta.bar(Barriers::latent_ready), 1);
        }
        stamp<Tile>(p, last_latents_done, thread == threads - 32);
    }

    /// Where the pool is filled with fences, only once all warps have: a fence waits for whatever its multiprocessor has on
    /// the link, and the latents of all need the link first.
    LATENT_MOE_DEVICE void publish_shared(const Slot<Cta>& slot) const {
        if constexpr (Tile::streamed) sync_threads_of(tokens_ready, threads);
        Publisher<Cta, 2> shared(cta, thread, threads, false);
        shared.load();
        shared.send_all(slot);
    }

    // ---- 3. Σ shared. An item is a token and 8 columns that this CTA finishes; the last warps begin, since the first ones
    // send squares and take columns.

    LATENT_MOE_DEVICE int first_shared_item() const {
        return threads - 32 - thread / 32 * 32 + thread % 32;
    }

    struct SharedItem {
        int token, unit;
    };
    LATENT_MOE_DEVICE SharedItem shared_item(int i) const {
        const int of_tile = p.tokens << cta.units_log2(), turn = Cta::known.turns == 1 ? 0 : i / of_tile;
        return {(i - turn * of_tile) >> cta.units_log2(), cta.first_unit(cta.tile(turn)) + (i & (cta.units() - 1))};
    }
    LATENT_MOE_DEVICE uint4 own_shared(const SharedItem& item) const {
        if (!p.shared.data) return {};
        return load_relaxed<Scope::device>(p.shared.at(item.token, p.rank * p.column_units + item.unit));
    }
    LATENT_MOE_DEVICE bool has_shared_item(int i) const {
        return i < cta.shared_items() && shared_item(i).unit < p.column_units;
    }
    LATENT_MOE_DEVICE uint4 first_own_shared() const {
        const int i = first_shared_item();
        return has_shared_item(i) ? own_shared(shared_item(i)) : uint4{};
    }

    /// Items that a thread takes together: all it has, if there is one peer.
    static constexpr int shared_at_once = pair && Cta::known.turns == 1 && Cta::known.split > 0 &&
                                                  Tile::tokens*(Tile::rows / 8 / std::max(1, Cta::known.split)) > threads
                                              ? 2
                                              : 1;

    LATENT_MOE_DEVICE void gather_shared(const Slot<Cta>& slot, uint4 first_own) {
        constexpr int n = shared_at_once;
#pragma unroll 1
        for (int first = first_shared_item(); first < cta.shared_items(); first += threads * n) {
            const auto exists = [&](int k) { return has_shared_item(first + k * threads); };
            const auto box = [&](int k, int source) {
                const SharedItem item = shared_item(first + k * threads);
                return slot.shared_from(source) + item.token * p.column_units + item.unit;
            };
            uint4 own[n], theirs[n] = {};
#pragma unroll
            for (int k = 0; k < n; ++k) {
                own[k] = first_own;
                if (exists(k) && (k > 0 || first != first_shared_item()))
                    own[k] = own_shared(shared_item(first + k * threads));
            }
            if (pair && p.exchange_shared) {
                take<n>(
                    theirs, wait, Phase::scatter,
                    [&](int k) -> const uint4* { return exists(k) ? box(k, 1 - p.rank) : nullptr; },
                    [&](int) { return 1 - p.rank; });
            }
#pragma unroll
            for (int k = 0; k < n; ++k) {
                if (!exists(k)) continue;
                float sum[U::size] = {};
                if (!pair && p.exchange_shared) {
                    add_ranks(
                        Phase::scatter, [&](int source) { return box(k, source); }, [&] { return own[k]; }, sum);
                } else {
                    U::unpack(own[k], sum);
                    if (p.exchange_shared) add(sum, theirs[k]);
                }
                const std::uint32_t to = cta.memory + p.at.shared_sums + (first + k * threads) * 32;
                store_shared(to, make_float4(sum[0], sum[1], sum[2], sum[3]));
                store_shared(to + 16, make_float4(sum[4], sum[5], sum[6], sum[7]));
            }
        }
    }

    /// `announce_and_finish` announces Σ shared and the squares; it may take part in what the math warps then do.
    template <class AnnounceAndFinish>
    LATENT_MOE_DEVICE void run(AnnounceAndFinish announce_and_finish) {
        if constexpr (Tile::pooled) {
            PoolFiller pool_filler = filler();
            dependency_wait();
            stamp<Tile>(p, predecessor_over, thread == 0);
            const State state = load_state(p);
            if (p.release && thread == 0) release_dependents();
            const Slot<Cta> slot(cta, state.slot);
            const uint4 own = first_own_shared();
            cluster::wait();  // the others' barriers are there; it invalidates a cache, so better while nothing is urgent
            const std::uint32_t digest = fill_pool(state, slot, pool_filler);
            publish_shared(slot);
            if constexpr (!Tile::streamed) gather_pool(state);
            if (p.rms_norm) add_up_squares(cta, state, thread / 32, threads / 32, thread % 32);
            gather_shared(slot, own);
            __syncwarp();
            stamp<Tile>(p, shared_done, thread == 0);
            announce_and_finish(slot);
            if (p.digest) add_digest(p, state, digest);
            finish_call(state, slot);
        } else {
            Place first{thread / p.gather_columns, thread % p.gather_columns};
            if (first.row >= p.gather_rows) first.row = p.tokens;
            const uint4 gamma = gamma_of(first.unit);
            dependency_wait();
            stamp<Tile>(p, predecessor_over, thread == 0);
            const State state = load_state(p);
            if (p.release && thread == 0) release_dependents();
            copy_own_rows(state, first);
            const Slot<Cta> slot(cta, state.slot);
            cluster::wait();  // as above
            gather_latents(slot, first, gamma);
            if (p.rms_norm) {
                if (thread < 32) {
                    send_squares();
                } else {
                    arrive_threads_of(squares_ready, threads);
                }
            }
            if (thread >= threads - cta.announcing_threads()) {
                gather_shared(slot, first_own_shared());
                __syncwarp();
                stamp<Tile>(p, shared_done, thread == threads - 32);
                announce_and_finish(slot);
            }
            finish_call(state, slot);
            if (p.digest && cta.cluster == 0) digest_latents(state, first);
        }
    }

    /// That this CTA's columns take, one unit each: whole warps, no more than half of them.
    LATENT_MOE_DEVICE int threads_for_columns() const {
        const std::uint32_t share = (p.tokens * p.column_units + gridDim.x - 1) / gridDim.x;
        return min(static_cast<int>(share + 31) / 32 * 32, threads / 64 * 32);
    }

    LATENT_MOE_DEVICE void finish_call(const State& state, const Slot<Cta>& slot) {
        const bool columns = !Tile::receives || p.receivers == 0;
        // With few tokens a few warps are enough for the columns, and the others re-arm; else all do both.
        const int takers = Tile::pooled || !columns ? 0 : threads_for_columns();
        if (thread >= takers) {
            const int last = threads - 1 - thread;  // others first than those that wait for columns
            if (p.pool) rearm_pool(p, state, last, threads - takers);
            rearm(cta, state, last, threads - takers);
        }
        if (columns && (takers == 0 || thread < takers)) {
            gather_columns(cta, slot, wait, thread, takers == 0 ? threads : takers, blockIdx.x, gridDim.x);
            stamp<Tile>(p, columns_came, thread == 0);
        }
        sync_threads_of(epoch_there, threads + 32);
        wait.report(cta.bar(Barriers::epoch));
    }
};

#endif

}  // namespace latent_moe::gpu::fused

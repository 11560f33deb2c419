// The math warps: publish this rank's partials, multiply, exchange the parts of K, finish the columns.
//
//     tile of W [rows, this CTA's K] × tokens ── wgmma, block by block as they land ──▶ fragments of 16 rows, float32
//     fragment ── st.async, data and signal in one ──▶ the CTA of the cluster that finishes these rows
//     Σ parts in the order of K · factor · scale + Σ shared, rounded; + prefix, rounded ──▶ out, and every peer's mailbox
#pragma once

#include <type_traits>

#include "gpu/kernels/fused_tail_float8.cuh"
#include "gpu/kernels/fused_tail_gather.cuh"
#include "gpu/kernels/fused_tail_mailboxes.cuh"
#include "gpu/kernels/fused_tail_stamps.cuh"
#include "gpu/kernels/fused_tail_weights.cuh"
#include "gpu/primitives/launch.h"
#include "gpu/primitives/mma.h"

namespace latent_moe::gpu::fused {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

/// Tells another CTA of the cluster, after everything that this thread has done and seen.
LATENT_MOE_DEVICE void arrive_at(std::uint32_t remote_bar) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote_bar) : "memory");
}
LATENT_MOE_DEVICE bool try_wait_cluster(std::uint32_t bar, int parity) {
    std::uint32_t done;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
    return done != 0;
}

template <class Cta>
struct Math {
    using Tile = typename Cta::Tile;
    static constexpr int threads = Tile::math_threads;

    const Cta& cta;
    const Params& p;
    const int thread, warp;  ///< warp: uniform

    LATENT_MOE_DEVICE Math(const Cta& c, int t, int w) : cta(c), p(c.p), thread(t), warp(w) {}

    /// By the first warp.
    LATENT_MOE_DEVICE void make_barriers(int lane) const {
        // Places of the ring that are used again; a lane each.
        if (lane < min(p.ring, cta.turns() * cta.blocks - p.ring))
            mbarrier::init(cta.bar(Barriers::empty, lane), Tile::math_warps);
        if (Tile::streamed && lane < min(p.token_ring, cta.turns() * cta.blocks - p.token_ring))
            mbarrier::init(cta.bar(Barriers::token_empty, lane), Tile::math_warps);
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < Tile::signals; ++i) mbarrier::init(cta.bar(Barriers::received, i), 1);
            if (cta.turns() > 1) mbarrier::init(cta.bar(Barriers::may_send), cta.split());
            if constexpr (Tile::streamed) {
#pragma unroll
                for (int i = 0; i < max_token_ring; ++i) {
                    mbarrier::init(cta.bar(Barriers::token_full, i), 1);
                }
            }
            const int squares = p.rms_norm && !Tile::pooled ? cta.split() * ((p.tokens + 1) / 2) * 8 : 0;
            mbarrier::expect(cta.bar(Barriers::received), parts_received() + squares);
#pragma unroll
            for (int i = 1; i < Tile::signals; ++i) mbarrier::expect(cta.bar(Barriers::received, i), parts_received());
        }
        mbarrier::publish_init();
    }
    LATENT_MOE_DEVICE static int parts_received() {
        return Tile::math_warps * Tile::fragment_data_bytes / Tile::signals;
    }

    /// Waits for the predecessor. Returns the state of the calls. With few tokens one half of the threads sends the latents
    /// and the other the shared slices; with many, all send latents, and the gathering warps the others, later.
    LATENT_MOE_DEVICE State publish() const {
        if constexpr (Tile::pooled) {
            constexpr int at_once = std::max(1, Tile::tokens / Tile::math_warps / 8);
            ItemPublisher<Cta, at_once> latents(cta, warp, Tile::math_warps);
            dependency_wait();
            latents.load();
            const State state = load_state(p);
            latents.send_all(Slot<Cta>(cta, state.slot));
            stamp<Tile>(p, published, thread == 0);
            return state;
        } else {
            Publisher<Cta, 1> half(cta, thread % (threads / 2), threads / 2, warp < Tile::math_warps / 2);
            dependency_wait();
            half.load();
            const State state = load_state(p);
            half.send_all(Slot<Cta>(cta, state.slot));
            stamp<Tile>(p, published, thread == 0);
            return state;
        }
    }

    // ---- the product

    struct Progress {
        int index = 0;                         ///< blocks multiplied, in all tiles
        int place = 0, round = 0;              ///< in the ring of weights
        int token_place = 0, token_round = 0;  ///< in the ring of streamed latents
    };

    /// This warp's fragment: 16 rows of the tile, all tokens. The first time, the tokens are still being gathered.
    LATENT_MOE_DEVICE void multiply(bool first_time, Progress& at, float (&sum)[Tile::tokens / 2]) const {
        if constexpr (Tile::known.float8) {
            multiply_float8(*this, first_time, at, sum);
        } else {
            multiply_bf16(first_time, at, sum);
        }
    }
    LATENT_MOE_DEVICE void multiply_bf16(bool first_time, Progress& at, float (&sum)[Tile::tokens / 2]) const {
        constexpr int width = Tile::tokens;
        float acc[Tile::chains][width / 2] = {};
        const int freed = cta.turns() * cta.blocks - p.ring;  // blocks whose place somebody waits for
        const std::uint32_t weights = cta.ring(0) + warp / 4 * 64 * PackedLayout::row_bytes,
                            tokens = cta.memory + p.at.tokens;
        const int blocks_of_pass =
            Tile::streamed ? cta.blocks : static_cast<int>(static_cast<unsigned>(p.gather_columns) / 8);
        const int freed_tokens = cta.turns() * cta.blocks - p.token_ring;
        int block = 0;
#pragma unroll 1
        for (int end = 0, barrier = tokens_ready; end < cta.blocks; ++barrier) {
            end = min(end + blocks_of_pass, cta.blocks);
            if (!Tile::streamed && first_time) sync_threads_of(barrier, threads + Tile::gather_threads);
#pragma unroll 1
            for (; block < end; ++block) {
                wait_locally(cta.bar(Barriers::full, at.place), at.round & 1);
                stamp<Tile>(p, last_weights, thread == 0);
                const std::uint64_t w = swizzled_operand(weights + at.place * Tile::weight_bytes);
                if constexpr (Tile::streamed) {
                    wait_locally(cta.bar(Barriers::token_full, at.token_place), at.token_round & 1);
                }
                const std::uint64_t t =
                    swizzled_operand(tokens + (Tile::streamed ? at.token_place : block) * Tile::token_bytes);
                wgmma_begin();
#pragma unroll
                for (int step = 0; step < 4; ++step) {
                    if constexpr (width == 128) {
                        Wgmma<width>::multiply_bf16(acc[step % Tile::chains], w + 2 * step, t + 2 * step, true);
                    } else {
                        Wgmma<width>::template multiply<Dtype::bf16>(acc[step % Tile::chains], w + 2 * step, t + 2 * step);
                    }
                }
                wgmma_commit();
                const bool frees_weights = at.index > 0 && at.index <= freed;
                const bool frees_tokens = Tile::streamed && at.index > 0 && at.index <= freed_tokens;
                if (Tile::streamed || frees_weights) wgmma_wait<1>();  // the block before this one
                if (frees_weights || frees_tokens) {
                    const int lane = thread % 32;
                    if (frees_weights && lane == 0)
                        mbarrier::arrive(cta.bar(Barriers::empty, at.place == 0 ? p.ring - 1 : at.place - 1));
                    if (frees_tokens && lane == 0)
                        mbarrier::arrive(
                            cta.bar(Barriers::token_empty, at.token_place == 0 ? p.token_ring - 1 : at.token_place - 1));
                }
                ++at.index;
                if (++at.place == p.ring) at.place = 0, ++at.round;
                if (Tile::streamed && ++at.token_place == p.token_ring) at.token_place = 0, ++at.token_round;
            }
        }
        wgmma_wait<0>();
        if constexpr (Tile::streamed) {
#pragma unroll
            for (auto& chain : acc) {
#pragma unroll
                for (float& value : chain) wgmma_result(value);
            }
        }
#pragma unroll
        for (int i = 0; i < Tile::tokens / 2; ++i) {
            const auto chain = [&](int c) { return acc[c][i]; };
            sum[i] = chain(0);
            if constexpr (Tile::chains == 2) sum[i] += chain(1);
            if constexpr (Tile::chains == 4) sum[i] = (chain(0) + chain(1)) + (chain(2) + chain(3));
        }
    }

    LATENT_MOE_DEVICE void send_fragment(const float (&sum)[Tile::tokens / 2]) const {
        const int fragments = cta.fragments(), owner = warp >> cta.fragments_log2(), mine = warp & (fragments - 1);
        const std::uint32_t at =
            cta.memory + p.at.parts + (cta.part * fragments + mine) * Tile::fragment_bytes + Tile::lane_offset(thread % 32);
        const std::uint32_t to = cluster::address_at(at, owner);
        const std::uint32_t signal = cluster::address_at(cta.bar(Barriers::received), owner);
#pragma unroll
        for (int j = 0; j < Tile::tokens / 8; ++j) {
            cluster::store_async(to + j * Tile::group_bytes,
                                 make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]),
                                 signal + j / (Tile::tokens_of_signal / 8) * 8);
        }
    }

    // ---- the columns. An item is a token and a few columns: with few tokens two, so that all threads have some.

    static constexpr int item_columns = Tile::tokens <= 16 ? 2 : 4;
    /// Whether no thread has more than one item, whatever the tokens.
    static constexpr bool one_item = Cta::known.turns == 1 && Cta::known.split > 0 &&
                                     Tile::tokens*(Tile::rows / std::max(1, Cta::known.split)) / item_columns <= threads;
    static_assert(!one_item || Tile::signals == 1, "`run` waits for one signal there");
    /// The gathering warps take some, too: where there are many, and one tile.
    static constexpr bool shared_out = Tile::pooled && Cta::known.turns == 1 && !one_item;
    static constexpr int finishing_threads = threads + (shared_out ? Tile::gather_threads : 0);
    static constexpr int item_words = item_columns / 2;
    static constexpr int items_of_unit = 8 / item_columns;

    struct Words {
        std::uint32_t at[item_words];
    };
    LATENT_MOE_DEVICE static Words load(const std::uint32_t* from) {
        if constexpr (item_words == 1) {
            return {load_relaxed<Scope::device>(from)};
        } else {
            const uint2 v = load_relaxed<Scope::device>(reinterpret_cast<const uint2*>(from));
            return {v.x, v.y};
        }
    }
    LATENT_MOE_DEVICE static void store(std::uint32_t* to, const Words& v) {  // maybe a peer's
        if constexpr (item_words == 1) {
            store_relaxed(to, v.at[0]);
        } else {
            store_relaxed(reinterpret_cast<uint2*>(to), make_uint2(v.at[0], v.at[1]));
        }
    }

    LATENT_MOE_DEVICE int items_log2() const {
        return cta.units_log2() + (items_of_unit == 4 ? 2 : 1);
    }  ///< of a token
    LATENT_MOE_DEVICE int item_count() const {
        return p.tokens << items_log2();
    }

    struct Item {
        int token;
        int column;  ///< among those that this CTA finishes of the tile
        int word;    ///< among this rank's columns: pairs
        bool exists;
    };
    LATENT_MOE_DEVICE Item item(int tile, int index) const {
        const int token = index >> items_log2(), column = (index & ((1 << items_log2()) - 1)) * item_columns;
        const int word = cta.first_unit(tile) * 4 + column / 2;
        return {token, column, word, token < p.tokens && word < p.column_units * 4};
    }
    LATENT_MOE_DEVICE std::uint32_t* word_of(const UnitRows& rows, const Item& i) const {
        return reinterpret_cast<std::uint32_t*>(rows.at(i.token, p.rank * p.column_units)) + i.word;
    }
    LATENT_MOE_DEVICE Words prefix_of(const Item& i) const {
        return p.prefix.data && i.exists ? load(word_of(p.prefix, i)) : Words{};
    }

    /// Of an item's columns: e4m3 has them always, and reads them early, because far memory is most of a microsecond away.
    struct EarlyScales {
        float at[item_columns];
    };
    struct NoScales {};
    using Scales = std::conditional_t<Tile::known.float8, EarlyScales, NoScales>;
    LATENT_MOE_DEVICE Scales scales_of([[maybe_unused]] const Item& i) const {
        if constexpr (Tile::known.float8) {
            Scales scales{};
#pragma unroll
            for (int e = 0; e < item_columns; ++e)
                if (i.exists) scales.at[e] = p.column_scales[2 * i.word + e];
            return scales;
        } else {
            return {};
        }
    }

    /// Σ over the parts of K, in their order, of an item's products; and the row's factor.
    LATENT_MOE_DEVICE void sum_parts(const Item& i, float (&sum)[item_columns], float& factor) const {
        const std::uint32_t stride = cta.fragments() * Tile::fragment_bytes;
        const std::uint32_t from = cta.memory + p.at.parts + i.column / fragment_rows * Tile::fragment_bytes;
        const std::uint32_t squares_at = cta.memory + p.at.squares + i.token * 4;
        constexpr int at_once = Cta::known.split == 2 ? 2 : 4;
        float squares = Tile::pooled ? load_shared<float>(squares_at) : 0;
#pragma unroll
        for (float& e : sum) e = 0;
#pragma unroll
        for (int first = 0; first < (Cta::known.split ? Cta::known.split : max_split); first += at_once) {
            if (first >= cta.split()) break;
            float term[at_once][item_columns], square[at_once];
#pragma unroll
            for (int k = 0; k < at_once; ++k) {
                if (first + k >= cta.split()) break;
#pragma unroll
                for (int e = 0; e < item_columns; ++e) {
                    const int offset = Tile::element_offset(i.column % fragment_rows + e, i.token);
                    term[k][e] = load_shared<float>(from + (first + k) * stride + offset);
                }
                square[k] = Tile::pooled ? 0 : load_shared<float>(squares_at + (first + k) * Tile::tokens * 4);
            }
#pragma unroll
            for (int k = 0; k < at_once; ++k) {
                if (first + k >= cta.split()) break;
#pragma unroll
                for (int e = 0; e < item_columns; ++e) sum[e] += term[k][e];
                squares += square[k];
            }
        }
        factor = p.rms_norm ? p.scale * rms_factor(squares, p.inverse_latent, p.epsilon) : p.scale;
    }

    /// What finishing an item needs that does not wait for the parts: gathered before they come.
    struct Prepared {
        Words prefix;
        float shared[item_columns];
        std::uint32_t *to_peer, *to_out;  ///< `to_peer`: of a single one
    };
    LATENT_MOE_DEVICE std::uint32_t* column_word(const Slot<Cta>& slot, int peer, const Item& i) const {
        return reinterpret_cast<std::uint32_t*>(slot.columns_to(peer)) + i.token * p.column_units * 4 + i.word;
    }
    /// After `shared_ready`.
    LATENT_MOE_DEVICE Prepared prepare(const Slot<Cta>& slot, int turn, const Item& i, int index,
                                       const Words& prefix) const {
        Prepared r;
        r.prefix = prefix;
        const std::uint32_t shared_at = cta.memory + p.at.shared_sums + (turn * item_count() + index) * (item_columns * 4);
#pragma unroll
        for (int e = 0; e < item_columns; ++e) r.shared[e] = load_shared<float>(shared_at + e * 4);
        r.to_peer = Cta::pair ? column_word(slot, 1 - p.rank, i) : nullptr;
        r.to_out = word_of(p.out, i);
        return r;
    }
    /// Once the parts are there. `get_prepared` gives what is prepared, or prepares it only now: where a thread has several
    /// items, it would be in the way of the sums.
    template <class GetPrepared>
    LATENT_MOE_DEVICE void finish_item(const Slot<Cta>& slot, const Item& i, GetPrepared get_prepared,
                                       [[maybe_unused]] const Scales& scales) const {
        using E = Element<Dtype::bf16>;
        float sum[item_columns], factor;
        sum_parts(i, sum, factor);
        const Prepared prepared = get_prepared();
        Words result;
#pragma unroll
        for (int w = 0; w < item_words; ++w) {
            float two[2], last[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                // A factor of 0 (the squares overflowed): the row's latents count as 0, however large they are.
                float product = p.rms_norm && factor == 0 ? 0 : factor * sum[2 * w + e];
                if constexpr (Tile::known.float8) {
                    product *= scales.at[2 * w + e];
                } else if (p.column_scales) {
                    product *= p.column_scales[2 * (i.word + w) + e];
                }
                two[e] = prepared.shared[2 * w + e] + product;
            }
            result.at[w] = E::pack(two);
            if (p.prefix.data) {
                E::unpack(result.at[w], two), E::unpack(prepared.prefix.at[w], last);
                two[0] += last[0], two[1] += last[1];
                result.at[w] = E::pack(two);
            }
            result.at[w] = E::canonical(result.at[w]);
        }
        if constexpr (Cta::pair) {
            store(prepared.to_peer, result);
        } else {
            for_each_peer(cta, [&](int peer) { store(column_word(slot, peer, i), result); });
        }
        store(prepared.to_out, result);
    }

    LATENT_MOE_DEVICE void finish(const Slot<Cta>& slot, int turn, const Item& first, const Words& first_prefix,
                                  const Scales& first_scales) const {
#pragma unroll 1
        for (int index = thread; index < item_count(); index += finishing_threads) {
            const Item i = index == thread ? first : item(cta.tile(turn), index);
            if (!i.exists) continue;
            const Words prefix = index == thread ? first_prefix : prefix_of(i);
            const Scales scales = index == thread ? first_scales : scales_of(i);
            if constexpr (Tile::signals > 1)
                wait_locally(cta.bar(Barriers::received, i.token / Tile::tokens_of_signal), turn & 1);
            finish_item(
                slot, i, [&] { return prepare(slot, turn, i, index, prefix); }, scales);
        }
    }

    /// By the gathering warps, which come after the first `threads`, once Σ shared and the squares are there.
    LATENT_MOE_DEVICE void help_to_finish(const Slot<Cta>& slot) const {
        const Item first = item(cta.tile(0), thread);
        const Words prefix = prefix_of(first);
        const Scales scales = scales_of(first);
        sync_threads_of(shared_ready, threads + Tile::gather_threads);
        if constexpr (Tile::signals == 1) wait_locally(cta.bar(Barriers::received), 0);
        finish(slot, 0, first, prefix, scales);
    }

    LATENT_MOE_DEVICE void run() {
        const State state = publish();
        const Slot<Cta> slot(cta, state.slot);
        __syncwarp();
        cluster::wait();
        Progress at;
#pragma unroll 1
        for (int turn = 0; turn < cta.turns(); ++turn) {
            const Item first = item(cta.tile(turn), thread);
            const Words prefix = prefix_of(first);
            const Scales scales = scales_of(first);
            float sum[Tile::tokens / 2];
            multiply(turn == 0, at, sum);
            stamp<Tile>(p, multiply_done, thread == 0);
            if (Cta::known.turns != 1 && turn > 0) {
                wait_locally([&] { return try_wait_cluster(cta.bar(Barriers::may_send), (turn - 1) & 1); });
            }
            send_fragment(sum);
            if (turn == 0) sync_threads_of(shared_ready, threads + cta.announcing_threads());
            if constexpr (one_item) {
                Prepared prepared{};
                if (first.exists) prepared = prepare(slot, 0, first, thread, prefix);
                wait_locally(cta.bar(Barriers::received), 0);
                stamp<Tile>(p, parts_there, thread == 0);
                if (first.exists)
                    finish_item(
                        slot, first, [&] { return prepared; }, scales);
            } else {
                if constexpr (Tile::signals == 1) wait_locally(cta.bar(Barriers::received), turn & 1);
                stamp<Tile>(p, parts_there, thread == 0);
                finish(slot, turn, first, prefix, scales);
            }
            if constexpr (Tile::signals > 1) {
                // Nobody leaves, and no phase is begun, before all has come, also what is of no token.
#pragma unroll 1
                for (int i = 0; i < Tile::signals; ++i) wait_locally(cta.bar(Barriers::received, i), turn & 1);
            }
            stamp<Tile>(p, columns_sent, thread == 0);
            if (Cta::known.turns != 1 && turn + 1 < cta.turns()) {
                sync_threads_of(parts_read, threads);
                if (thread < cta.split()) {
                    if (thread == 0) {
#pragma unroll
                        for (int i = 0; i < Tile::signals; ++i)
                            mbarrier::expect(cta.bar(Barriers::received, i), parts_received());
                    }
                    __syncwarp((1u << cta.split()) - 1);
                    arrive_at(cluster::address_at(cta.bar(Barriers::may_send), thread));
                }
            }
        }
        if (warp == 0) {
            // The gathering warps have loaded theirs: they announced something since. So has the token warp.
            sync_threads_of(state_loaded, 2 * 32);
            store_state(p, state, thread);
        }
    }
};

#endif

}  // namespace latent_moe::gpu::fused

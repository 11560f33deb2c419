// The math warps: publish this rank's partials, multiply, exchange the parts of K, finish the columns.
//
//     tile of W [rows, this CTA's K] × tokens ── wgmma, block by block as they land ──▶ fragments of 16 rows, float32
//     fragment ── st.async, data and signal in one ──▶ the CTA of the cluster that finishes these rows
//     Σ parts in the order of K · factor · scale + Σ shared, rounded; + prefix, rounded ──▶ out, and every peer's mailbox
#pragma once

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
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
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
    const int rank, world;

    LATENT_MOE_DEVICE Math(const Cta& c, int t, int w)
        : cta(c), p(c.p), thread(t), warp(w), rank(c.p.exchange.window.rank), world(c.p.exchange.window.world) {}

    LATENT_MOE_DEVICE void make_barriers() const {
        mbarrier::init(cta.bar(Barriers::received), 1);
        if (cta.tiles > 1) mbarrier::init(cta.bar(Barriers::may_send), cta.split);
        if (cta.tiles * cta.blocks > p.ring) {
#pragma unroll
            for (int i = 0; i < max_ring; ++i) {
                if (i < p.ring) mbarrier::init(cta.bar(Barriers::empty, i), Tile::math_warps);
            }
        }
        mbarrier::publish_init();
        const int squares = p.rms_norm ? cta.split * ((p.tokens + 1) / 2) * 8 : 0;
        mbarrier::expect(cta.bar(Barriers::received), parts_received() + squares);
    }
    LATENT_MOE_DEVICE static int parts_received() { return Tile::math_warps * Tile::fragment_data_bytes; }

    // ---- publishing: the first half of the threads the latents, the second half (a little less urgent) the shared slices. Each CTA
    // has a contiguous range of each.

    static constexpr int publish_at_once = Tile::tokens <= 32 ? 1 : Tile::tokens / 32;

    struct Parcel {
        const uint4* from;   ///< null: none
        std::int64_t place;  ///< unit in the box
        int peer;            ///< -1: all of them
    };
    LATENT_MOE_DEVICE bool publishes_latents() const { return thread < threads / 2; }

    LATENT_MOE_DEVICE Parcel parcel(std::uint32_t i, std::uint32_t end) const {
        if (i >= end) return {nullptr, 0, 0};
        if (publishes_latents()) {
            const std::uint32_t token = i / p.latent_units, unit = i % p.latent_units;
            return {p.routed.at(token, unit), i, -1};
        }
        const std::uint32_t of_peer = p.tokens * p.column_units, j = i % of_peer;
        const int k = static_cast<int>(i / of_peer) + rank + 1, peer = k < world ? k : k - world;
        const std::uint32_t token = j / p.column_units, unit = j % p.column_units;
        return {p.shared.at(token, peer * p.column_units + unit), j, peer};
    }
    LATENT_MOE_DEVICE void send(const Slot& slot, const Parcel& parcel, uint4 value) const {
        if (!parcel.from) return;
        value = U::canonical(value);
        if (parcel.peer >= 0) {
            store_relaxed(slot.shared(rank, parcel.peer) + parcel.place, value);
            return;
        }
        for (int k = 1, peer = rank; k < world; ++k) {
            peer = peer + 1 == world ? 0 : peer + 1;
            store_relaxed(slot.latents(rank, peer) + parcel.place, value);
        }
    }

    /// Waits for the predecessor. Returns the state of the calls.
    LATENT_MOE_DEVICE State publish() const {
        const std::uint32_t all = publishes_latents()  ? (world > 1 ? p.tokens * p.latent_units : 0)
                                  : p.exchange_shared ? p.tokens * p.column_units * (world - 1)
                                                      : 0;
        const std::uint32_t share = (all + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * share;
        const std::uint32_t end = min(begin + share, all);
        constexpr int half = threads / 2;
        std::uint32_t i = begin + thread % half;
        Parcel parcels[publish_at_once];
        uint4 values[publish_at_once];
        const auto locate = [&] {
#pragma unroll
            for (int k = 0; k < publish_at_once; ++k) parcels[k] = parcel(i + k * half, end);
        };
        const auto load = [&] {
#pragma unroll
            for (int k = 0; k < publish_at_once; ++k) {
                if (parcels[k].from) values[k] = load_relaxed<Scope::device>(parcels[k].from);
            }
        };
        locate();
        dependency_wait();
        load();
        const State state = load_state(p);
        const Slot slot(p, state.slot);
        while (true) {
#pragma unroll
            for (int k = 0; k < publish_at_once; ++k) send(slot, parcels[k], values[k]);
            i += half * publish_at_once;
            if (i >= end) break;
            locate(), load();
        }
        stamp<Tile::stamps>(p, published, thread == 0);
        return state;
    }

    // ---- the product

    struct Ring {
        int place = 0, turn = 0, index = 0;
    };

    /// This warp's fragment: 16 rows of the tile, all tokens.
    LATENT_MOE_DEVICE void multiply(Ring& ring, float (&sum)[Tile::tokens / 2]) const {
        constexpr int width = Tile::tokens < 64 ? Tile::tokens : 64, groups = Tile::tokens / width;  // of tokens: one wgmma
        float acc[Tile::chains][groups][width / 2] = {};
        const int total = cta.tiles * cta.blocks, lane = thread % 32;
        const std::uint64_t weights = swizzled_operand(cta.memory + warp / 4 * 64 * PackedLayout::row_bytes);
        const std::uint64_t tokens = swizzled_operand(cta.memory + p.at.tokens);
        int previous = ring.place == 0 ? p.ring - 1 : ring.place - 1;
#pragma unroll 1
        for (int block = 0; block < cta.blocks; ++block) {
            wait_locally(p, cta.bar(Barriers::full, ring.place), ring.turn & 1);
            stamp<Tile::stamps>(p, last_weights, thread == 0);
            const std::uint64_t w = weights + static_cast<std::uint32_t>(ring.place * Tile::weight_bytes >> 4);
            const std::uint64_t t = tokens + static_cast<std::uint32_t>(block * Tile::token_bytes >> 4);
            wgmma_begin();
#pragma unroll
            for (int step = 0; step < 4; ++step) {
#pragma unroll
                for (int g = 0; g < groups; ++g) {
                    Wgmma<width>::template multiply<Dtype::bf16>(acc[step % Tile::chains][g], w + 2 * step,
                                                                 t + 2 * step + g * (width * PackedLayout::row_bytes >> 4));
                }
            }
            wgmma_commit();
            if (ring.index > 0 && ring.index - 1 + p.ring < total) {  // somebody waits for the place of the block before
                wgmma_wait<1>();
                if (lane == 0) mbarrier::arrive(cta.bar(Barriers::empty, previous));
            }
            previous = ring.place;
            ++ring.index;
            if (++ring.place == p.ring) ring.place = 0, ++ring.turn;
        }
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < Tile::tokens / 2; ++i) {
            const auto chain = [&](int c) { return acc[c][i / (width / 2)][i % (width / 2)]; };
            sum[i] = chain(0);
            if constexpr (Tile::chains == 2) sum[i] += chain(1);
            if constexpr (Tile::chains == 4) sum[i] = (chain(0) + chain(1)) + (chain(2) + chain(3));
        }
    }

    LATENT_MOE_DEVICE void send_fragment(const float (&sum)[Tile::tokens / 2]) const {
        const int fragments = cta.fragments(), owner = warp >> cta.fragments_log2(), mine = warp & (fragments - 1);
        const std::uint32_t at = cta.memory + p.at.parts + (cta.part * fragments + mine) * Tile::fragment_bytes + thread % 32 * 16;
        const std::uint32_t to = cluster::address_at(at, owner);
        const std::uint32_t signal = cluster::address_at(cta.bar(Barriers::received), owner);
#pragma unroll
        for (int j = 0; j < Tile::tokens / 8; ++j) {
            cluster::store_async(to + j * 512, make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]), signal);
        }
    }

    // ---- the columns

    LATENT_MOE_DEVICE float factor_of(int token) const {
        if (!p.rms_norm) return p.scale;
        float squares = 0;
        for (int k = 0; k < cta.split; ++k) {
            squares += load_shared<float>(cta.memory + p.at.squares + (k * Tile::tokens + token) * 4);
        }
        return p.scale * rms_factor(squares, p.inverse_latent, p.epsilon);
    }

    /// An item is a token and 8 columns. Returns the digest of what this thread wrote.
    LATENT_MOE_DEVICE std::uint32_t finish(const Slot& slot, int i, uint4 first_prefix) const {
        const int fragments = cta.fragments(), items = p.tokens << cta.units_log2();
        std::uint32_t digest = 0;
#pragma unroll 1
        for (int item = thread; item < items; item += threads) {
            const int token = item >> cta.units_log2(), u = item & (cta.units() - 1);
            const int unit = cta.first_unit(cta.tile(i)) + u;
            if (unit >= p.column_units) continue;
            const int own_unit = rank * p.column_units + unit;
            uint4 prefix = first_prefix;
            if (item != thread && p.prefix.data) prefix = load_relaxed<Scope::device>(p.prefix.at(token, own_unit));

            // Element (row r, token) of a fragment: lane 4 (r mod 8) + token mod 8 / 2, float 2 (r / 8) + token mod 2.
            const std::uint32_t from = cta.memory + p.at.parts + u / 2 * Tile::fragment_bytes + token / 8 * 512 +
                                       (token % 8 / 2 * 4 + u % 2 * 2 + token % 2) * 4;
            float sum[U::size] = {}, term[U::size];
            for (int part = 0; part < cta.split; ++part) {
#pragma unroll
                for (int e = 0; e < U::size; ++e) {
                    sum[e] += load_shared<float>(from + part * fragments * Tile::fragment_bytes + e * 64);
                }
            }
            const std::uint32_t shared_at = cta.memory + p.at.shared_sums + (i * items + item) * 32;
            const auto low = load_shared<float4>(shared_at), high = load_shared<float4>(shared_at + 16);
            const float shared[U::size] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            const float factor = factor_of(token);
#pragma unroll
            for (int e = 0; e < U::size; ++e) {
                // A factor of 0 (the squares overflowed): the row's latents count as 0, however large they are.
                float product = p.rms_norm && factor == 0 ? 0 : factor * sum[e];
                if (p.column_scales) product *= p.column_scales[unit * U::size + e];
                sum[e] = shared[e] + product;
            }
            uint4 result = U::pack(sum);
            if (p.prefix.data) {
                U::unpack(result, sum), U::unpack(prefix, term);
#pragma unroll
                for (int e = 0; e < U::size; ++e) sum[e] += term[e];
                result = U::pack(sum);
            }
            result = U::canonical(result);
            for (int k = 1, peer = rank; k < world; ++k) {
                peer = peer + 1 == world ? 0 : peer + 1;
                store_relaxed(slot.columns(rank, peer) + token * p.column_units + unit, result);
            }
            store16(p.out.at(token, own_unit), result);
            digest += digest_of(result, token * (p.column_units * world) + own_unit);
        }
        return digest;
    }

    LATENT_MOE_DEVICE uint4 first_prefix(int i) const {
        const int token = thread >> cta.units_log2(), unit = cta.first_unit(cta.tile(i)) + (thread & (cta.units() - 1));
        if (!p.prefix.data || token >= p.tokens || unit >= p.column_units) return {};
        return load_relaxed<Scope::device>(p.prefix.at(token, rank * p.column_units + unit));
    }

    LATENT_MOE_DEVICE void run() {
        const State state = publish();
        const Slot slot(p, state.slot);
        __syncwarp();
        cluster::wait();
        Ring ring;
        std::uint32_t digest = 0;
#pragma unroll 1
        for (int i = 0; i < cta.tiles; ++i) {
            const uint4 prefix = first_prefix(i);
            if (i == 0) {
                sync_threads_of(tokens_ready, threads + Tile::gather_threads + 32);
                stamp<Tile::stamps>(p, multiply_began, thread == 0);
            }
            float sum[Tile::tokens / 2];
            multiply(ring, sum);
            stamp<Tile::stamps>(p, multiply_done, thread == 0);
            if (i > 0) wait_locally(p, [&] { return try_wait_cluster(cta.bar(Barriers::may_send), (i - 1) & 1); });
            send_fragment(sum);
            if (i == 0) sync_threads_of(shared_ready, threads + Tile::gather_threads);
            wait_locally(p, cta.bar(Barriers::received), i & 1);
            stamp<Tile::stamps>(p, parts_there, thread == 0);
            digest += finish(slot, i, prefix);
            stamp<Tile::stamps>(p, columns_sent, thread == 0);
            if (i + 1 < cta.tiles) {
                sync_threads_of(parts_read, threads);
                if (thread == 0) {
                    mbarrier::expect(cta.bar(Barriers::received), parts_received());
                    for (int c = 0; c < cta.split; ++c) arrive_at(cluster::address_at(cta.bar(Barriers::may_send), c));
                }
            }
        }
        if (warp == 0) store_state(p, state.slot, thread);
        __syncwarp();
        if (p.digest && (thread & ~31) < p.tokens << cta.units_log2()) {
            add_to_digest(p.exchange, Call{load_shared<std::uint32_t>(cta.bar(Barriers::epoch)), false}, digest);
        }
    }
};

#endif

}  // namespace latent_moe::gpu::fused

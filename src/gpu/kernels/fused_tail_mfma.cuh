// The fused decode tail where CTAs have no neighbours to talk to (no clusters): AMD GPUs, and threads of the host that play
// them.
//
// Rank a owns the columns a · H / R … of the output. CTA 0 exchanges the headers; in time, at every other CTA c of rank a:
//
//     weights of its first tile ── asked for, into registers
//     part c of routed_a ──▶ every b          part c of shared_a[columns of b] ──▶ b
//     part c of Σ routed: routed_b ─▶ round ─▶ · γ, Σ x² a block ─▶ workspace ──▶ "part c is there": counter of this GPU
//     wait for all parts; then for each of its tiles of 16 columns:
//         MFMA over all of K ─▶ Σ of the waves ─▶ · factor + Σ shared (shared_b ─▶) + prefix ──▶ out; columns_a ──▶ every b
//     part c of every peer's columns: columns_b ──▶ out
//
// Two hops across the link (partials, columns) and one hop between the CTAs of a GPU, in between.
//
// MEMORY ORDER. Between ranks: data and signal are one word, taken and re-armed by one thread (mailbox.h); slots are reused
// under the headers' order (header.h, epoch.h). Within the GPU: stores to the workspace → barrier of the CTA → fence of
// thread 0, device scope → add to the counter; load that sees the whole count → fence, device scope → barrier → loads of the
// workspace. The counter of a call lies in its slot; CTA 0 clears the next call's, which nobody else touches until then
// (kernel order).
//
// Sums are in a fixed order: ranks in rank order; a row's squares by block; the product by block and wave. The same bits on
// every run, and on every rank, because a column has one owner. All CTAs of a grid must be resident together.
#pragma once

#include "gpu/kernels/mfma_tile.cuh"
#include "gpu/kernels/rank_sum.h"
#include "gpu/kernels/rows.h"
#include "gpu/primitives/header.h"
#include "gpu/primitives/mailbox.h"

namespace latent_moe::gpu::fused_mfma {

/// The region before its slots: how many CTAs have gathered their part of the latents, by slot.
struct Head {
    struct alignas(128) Counter {
        std::uint32_t arrived;
    };
    Counter counters[slots];
};
inline constexpr std::int64_t head_bytes = sizeof(Head);

struct Params {
    Exchange exchange;
    std::int64_t region;      ///< offset in every window
    std::int64_t slot_bytes;  ///< of the region's slots
    std::int64_t latent_box;  ///< units of one mailbox of latents
    std::int64_t column_box;  ///< units of one mailbox of columns
    UnitRows routed, shared, prefix, out;
    const char* weights;
    const char* gamma;           ///< null: ones
    const float* column_scales;  ///< null: ones
    uint4* latents;              ///< workspace: Σ routed · γ, [tokens][latent_units]
    float* squares;              ///< workspace: of Σ routed, [tokens][blocks]
    PackedLayout layout;
    float scale, epsilon, inverse_latent;
    int tokens;
    int latent_units;  ///< L / 8
    int column_units;  ///< H / world / 8
    bool rms_norm, exchange_shared;
};

using U = Unit<Dtype::bf16>;
using E = Element<Dtype::bf16>;

LATENT_MOE_DEVICE uint4 times(uint4 x, uint4 gamma) {
    float a[U::size], g[U::size];
    U::unpack(x, a), U::unpack(gamma, g);
#pragma unroll
    for (int i = 0; i < U::size; ++i) a[i] *= g[i];
    return U::pack(a);
}

/// Of a unit: +Inf if it overflows (the chain's factor is 0 then, and so is the row's product), NaN if an element is not
/// finite (then the chain's row is not).
LATENT_MOE_DEVICE float squares_of(uint4 x) {
    constexpr float largest = 0x1.FFFFFEp+127F;
    float a[U::size], sum = 0;
    U::unpack(x, a);
    bool finite = true;
#pragma unroll
    for (const float e : a) sum = fmaf(e, e, sum), finite = finite && e >= -largest && e <= largest;
    return finite ? sum : as_float(0x7fc00000);
}

/// This CTA's part of `count` items.
struct Range {
    int begin, end;
};
LATENT_MOE_DEVICE Range part_of(int count) {
    const auto cut = [&](std::int64_t i) { return static_cast<int>(count * i / (gridDim.x - 1)); };
    return {cut(blockIdx.x - 1), cut(blockIdx.x)};
}

/// As `sum_over_ranks`, but the float32 sum, added to `sum`.
template <int batch>
LATENT_MOE_DEVICE void add_over_ranks(const Exchange& x, const Boxes& boxes, std::uint32_t unit, uint4 own, Wait& wait,
                                      Phase phase, float (&sum)[U::size]) {
    const int rank = x.window.rank, world = x.window.world;
    for (int first = 0; first < world; first += batch) {
        uint4* from[batch];
        int peers[batch];
        uint4 values[batch];
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            const int r = first + i;
            peers[i] = r;
            from[i] = r < world && r != rank ? boxes.from(r, rank) + unit : nullptr;
            values[i] = r == rank ? own : uint4{};
        }
        Mailbox<Dtype::bf16>::take(from, peers, values, wait, phase);
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            float term[U::size];
            U::unpack(values[i], term);
#pragma unroll
            for (int e = 0; e < U::size; ++e) sum[e] += term[e];
        }
    }
}

template <int tokens, int waves, int batch>
struct Cta {
    using Tile = MfmaTile<Dtype::bf16, tokens, waves>;
    static constexpr int threads = Tile::threads;
    static constexpr int tile_units = Tile::rows / U::size;
    static constexpr int resident = 8;  ///< blocks of weights that a wave asks for before anything else

    struct Shared {
        typename Tile::Parts parts;
        float factor[tokens];
        bool gave_up;
    };

    const Params& p;
    const Exchange& x;
    const Call& call;
    Shared& shared;
    Wait& wait;
    std::uint32_t digest = 0;

    LATENT_MOE_DEVICE static int thread() { return static_cast<int>(threadIdx.x); }
    LATENT_MOE_DEVICE int tiles() const { return (p.column_units + tile_units - 1) / tile_units; }
    LATENT_MOE_DEVICE int blocks() const { return static_cast<int>(p.layout.blocks()); }

    // ---- where things lie

    enum class Kind { latents, shared, columns };
    LATENT_MOE_DEVICE char* region(int rank) const { return static_cast<char*>(x.window.base[rank]) + p.region; }
    LATENT_MOE_DEVICE std::uint32_t* counter(int slot) const {
        return &reinterpret_cast<Head*>(region(x.window.rank))->counters[slot].arrived;
    }
    LATENT_MOE_DEVICE Boxes boxes_at(Kind kind, int receiver) const {
        auto* slot = reinterpret_cast<uint4*>(region(receiver) + head_bytes + call.slot() * p.slot_bytes);
        const std::int64_t peers = x.window.world - 1;
        if (kind == Kind::latents) return {slot, p.latent_box};
        slot += peers * (p.latent_box + (kind == Kind::columns ? p.column_box : 0));
        return {slot, p.column_box};
    }
    template <class Body>
    LATENT_MOE_DEVICE void for_each_peer(Body body) const {
        for (int k = 1, peer = x.window.rank; k < x.window.world; ++k) {  // the next rank first
            peer = peer + 1 == x.window.world ? 0 : peer + 1;
            body(peer);
        }
    }
    LATENT_MOE_DEVICE uint4 own(const UnitRows& rows, int token, int unit) const {
        return rows.data ? U::canonical(load16(rows.at(static_cast<std::uint32_t>(token), static_cast<std::uint32_t>(unit))))
                         : uint4{};
    }

    // ---- 1. what this rank tells the others

    LATENT_MOE_DEVICE void publish() const {
        const Range latents = part_of(p.tokens * p.latent_units);
        for (int i = latents.begin + thread(); i < latents.end; i += threads) {
            const uint4 value = own(p.routed, i / p.latent_units, i % p.latent_units);
            for_each_peer([&](int peer) {
                Mailbox<Dtype::bf16>::send(boxes_at(Kind::latents, peer).from(x.window.rank, peer) + i, value);
            });
        }
        if (!p.exchange_shared) return;
        const Range columns = part_of(p.tokens * p.column_units);
        for_each_peer([&](int peer) {
            uint4* const to = boxes_at(Kind::shared, peer).from(x.window.rank, peer);
            for (int i = columns.begin + thread(); i < columns.end; i += threads) {
                Mailbox<Dtype::bf16>::send(to + i,
                                           own(p.shared, i / p.column_units, peer * p.column_units + i % p.column_units));
            }
        });
    }

    // ---- 2. this CTA's part of Σ routed, a block of 64 columns of a row by 8 neighbouring lanes

    LATENT_MOE_DEVICE void gather_latents() const {
        const Boxes boxes = boxes_at(Kind::latents, x.window.rank);
        const Range items = part_of(p.tokens * blocks());
        // All lanes come along: the sums over 8 lanes need them.
        for (int first = items.begin * 8; first < items.end * 8; first += threads) {
            const int i = first + thread(), token = i / 8 / blocks(), block = i / 8 % blocks(), unit = block * 8 + i % 8;
            const bool exists = i < items.end * 8, inside = exists && unit < p.latent_units;
            float squares = 0;
            if (inside) {
                const auto at = static_cast<std::uint32_t>(token * p.latent_units + unit);
                const uint4 sum =
                    sum_over_ranks<Dtype::bf16, batch>(x, boxes, at, own(p.routed, token, unit), wait, Phase::gather);
                store16(p.latents + at, p.gamma ? times(sum, load16(p.gamma + unit * 16)) : sum);
                squares = squares_of(sum);
            }
            for (unsigned mask = 1; mask < 8; mask *= 2) squares += shuffle_xor(squares, mask);
            if (exists && i % 8 == 0) p.squares[token * blocks() + block] = squares;
        }
    }

    /// False: a peer did not come, and whoever waited for it has said so.
    LATENT_MOE_DEVICE bool await_all_parts() const {
        sync_cta();
        if (thread() == 0) {
            fence<Scope::device>();
            add_relaxed<Scope::device>(counter(call.slot()), 1u);
            // Other CTAs of this GPU wait for peers themselves, and raise the fault that ends this wait too. Should none do
            // so, something is wrong here.
            const std::uint64_t start = clock_ns();
            bool gave_up = wait.gave_up();
            while (!gave_up && load_relaxed<Scope::device>(counter(call.slot())) != gridDim.x - 1) {
                let_others_run();
                gave_up = faulted(x, load_relaxed(&control(x).fault), call.epoch);
                if (!gave_up && clock_ns() - start > 2 * x.timeout_ns) {
                    raise_fault(x, call.epoch, FaultCode::timeout, x.window.rank, Phase::gather, 0, 0);
                    gave_up = true;
                }
            }
            shared.gave_up = gave_up;
            fence<Scope::device>();
        }
        sync_cta();
        return !shared.gave_up;
    }

    // ---- 3. the columns that this rank owns

    /// A wave for each row: its blocks' squares, and the factor.
    LATENT_MOE_DEVICE void find_factors() const {
        for (int token = Tile::wave(); token < p.tokens; token += waves) {
            float sum = 0;
            for (int block = Tile::lane(); block < blocks(); block += static_cast<int>(wave_size))
                sum += p.squares[token * blocks() + block];
            for (unsigned mask = wave_size / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
            if (Tile::lane() == 0)
                shared.factor[token] = p.rms_norm ? p.scale * rms_factor(sum, p.inverse_latent, p.epsilon) : p.scale;
        }
    }

    LATENT_MOE_DEVICE void ask_for_weights(int tile, typename Tile::Weights (&w)[resident]) const {
#pragma unroll
        for (int i = 0; i < resident; ++i) w[i] = Tile::load(p.weights, p.layout, tile, Tile::wave() + i * waves);
    }

    LATENT_MOE_DEVICE void multiply(int index, const typename Tile::Weights (&w)[resident]) const {
        const auto token_unit = [&](int token, int unit) {
            return unit_or_zero(reinterpret_cast<const char*>(p.latents), p.latent_units * std::int64_t{16}, token, unit,
                                p.tokens, p.latent_units);
        };
        Tile tile;
#pragma unroll
        for (int i = 0; i < resident; ++i) {
            if (Tile::wave() + i * waves < blocks()) tile.multiply(w[i], Tile::wave() + i * waves, token_unit);
        }
        for (int block = Tile::wave() + resident * waves; block < blocks(); block += waves) {
            tile.multiply(Tile::load(p.weights, p.layout, index, block), block, token_unit);
        }
        tile.keep(shared.parts);
    }

    /// 8 columns of one token.
    LATENT_MOE_DEVICE void finish(int tile) {
        const int rank = x.window.rank;
        for (int i = thread(); i < p.tokens * tile_units; i += threads) {
            const int token = i / tile_units, unit = tile * tile_units + i % tile_units;
            if (unit >= p.column_units) continue;
            const int in_out = rank * p.column_units + unit;
            const auto in_box = static_cast<std::uint32_t>(token * p.column_units + unit);
            float sum[U::size] = {}, product[U::size];
            const uint4 mine = own(p.shared, token, in_out);
            if (p.exchange_shared) {
                add_over_ranks<batch>(x, boxes_at(Kind::shared, rank), in_box, mine, wait, Phase::scatter, sum);
                if (wait.gave_up()) return;
            } else {
                U::unpack(mine, sum);
            }
            Tile::total(shared.parts, token, i % tile_units * U::size, product);
            const float factor = shared.factor[token];
#pragma unroll
            for (int e = 0; e < U::size; ++e) {
                // A factor of 0 (the squares overflowed): the row's latents count as 0, however large they are.
                float term = p.rms_norm && factor == 0 ? 0 : factor * product[e];
                if (p.column_scales) term *= p.column_scales[unit * U::size + e];
                sum[e] += term;
            }
            uint4 value = U::pack(sum);
            if (p.prefix.data) {
                value = U::add(value,
                               load16(p.prefix.at(static_cast<std::uint32_t>(token), static_cast<std::uint32_t>(in_out))));
            }
            value = U::canonical(value);
            for_each_peer([&](int peer) {
                Mailbox<Dtype::bf16>::send(boxes_at(Kind::columns, peer).from(rank, peer) + in_box, value);
            });
            store(token, in_out, value);
        }
    }

    // ---- 4. what the others own

    LATENT_MOE_DEVICE void gather_columns() {
        const Range columns = part_of(p.tokens * p.column_units);
        for_each_peer([&](int source) {
            uint4* const box = boxes_at(Kind::columns, x.window.rank).from(source, x.window.rank);
            for (int i = columns.begin + thread(); i < columns.end && !wait.gave_up(); i += threads) {
                uint4* const from[1] = {box + i};
                const int peers[1] = {source};
                uint4 value[1];
                Mailbox<Dtype::bf16>::take(from, peers, value, wait, Phase::combine);
                if (!wait.gave_up()) store(i / p.column_units, source * p.column_units + i % p.column_units, value[0]);
            }
        });
    }

    LATENT_MOE_DEVICE void store(int token, int unit, uint4 value) {
        store16(p.out.at(static_cast<std::uint32_t>(token), static_cast<std::uint32_t>(unit)), value);
        digest += digest_of(value, static_cast<std::uint32_t>(token * x.window.world * p.column_units + unit));
    }

    LATENT_MOE_DEVICE void run() {
        const int first = static_cast<int>(blockIdx.x) - 1, step = static_cast<int>(gridDim.x) - 1;
        typename Tile::Weights w[resident];
        if (first < tiles()) ask_for_weights(first, w);
        publish();
        sync_cta();
        leave_call(x, call, thread(), threads);
        gather_latents();
        if (!await_all_parts()) return;
        find_factors();
        for (int tile = first; tile < tiles(); tile += step) {
            if (tile != first) {
                sync_cta();  // the parts of the tile before have been read
                ask_for_weights(tile, w);
            }
            multiply(tile, w);
            sync_cta();
            finish(tile);
        }
        gather_columns();
        sync_wave();
        add_to_digest(x, call, digest);
    }
};

/// By every thread of the grid.
template <int tokens, int waves, int batch>
LATENT_MOE_DEVICE void tail(const Params& p, typename Cta<tokens, waves, batch>::Shared& shared) {
    const Exchange& x = p.exchange;
    dependency_wait();
    const Call call = enter_call(x);
    if (call.leave) return;
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0) {
            auto* head = reinterpret_cast<Head*>(static_cast<char*>(x.window.base[x.window.rank]) + p.region);
            store_relaxed<Scope::device>(&head->counters[(call.slot() + 1) % slots].arrived, 0u);
        }
        return keep_protocol(x, call, static_cast<std::uint32_t>(p.tokens));
    }
    Wait wait(x, call.epoch);
    Cta<tokens, waves, batch> cta{.p = p, .x = x, .call = call, .shared = shared, .wait = wait};
    cta.run();
}

}  // namespace latent_moe::gpu::fused_mfma

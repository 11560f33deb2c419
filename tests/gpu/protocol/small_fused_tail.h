// The fused tail's exchange at a size that threads of this machine, or of a model checker, can play. The mailboxes, the
// state, the re-arming, the headers and the gathering of columns are the kernel's own (fused_tail_mailboxes.cuh); what it
// does between them with tensor cores, clusters and bulk copies is replaced by a sum:
//
//     out[m, unit u of r] = round(Σ_ranks latents[m, unit u mod L / 8] + Σ_ranks shared[m, unit u of r])
//
// Every CTA gathers all latents, as every cluster does; what is sent and finished is dealt to the CTAs. The roles of a CTA,
// and the two named barriers between them, are those of fused_tail.cu:
//
//     protocol   epoch, state ── squares_ready ──▶ headers
//     math       latents, shared slices ─▶ peers                          ── shared_ready ──▶ columns ─▶ peers; state
//     gather     Σ latents ── squares_ready ──▶ Σ shared ── shared_ready ──▶ re-arm; the peers' columns
#pragma once

#include <cstdint>

#include "gpu/kernels/fused_tail_mailboxes.cuh"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsign-conversion"  // as device code is written

namespace latent_moe::gpu::small_fused {

using fused::Params;
using fused::PeerWait;
using fused::Slot;
using fused::State;
using fused::U;

/// With two ranks the kernel knows its single peer at compile time.
template <int world>
using Cta = fused::Cta<fused::Tile<8, 64, fused::Known{.world = world == 2 ? 2 : 0}>>;

struct Shape {
    int world;
    int latent_units, column_units;  ///< of a row; the columns are one rank's
    int capacity;                    ///< rows

    [[nodiscard]] constexpr std::int64_t latent_box() const { return std::int64_t{16} * capacity * latent_units; }
    [[nodiscard]] constexpr std::int64_t column_box() const { return std::int64_t{16} * capacity * column_units; }
    [[nodiscard]] constexpr std::int64_t slot_bytes() const { return (world - 1) * (latent_box() + 2 * column_box()); }
    /// Of the region, which begins behind the window's control words.
    [[nodiscard]] constexpr std::int64_t region_bytes() const { return fused::state_bytes + slots * slot_bytes(); }
};

inline Params params(const Shape& s, const Exchange& x, int tokens, UnitRows routed, UnitRows shared, UnitRows out) {
    Params p{};
    p.tokens = tokens, p.latent_units = s.latent_units, p.column_units = s.column_units;
    p.slot_bytes = s.slot_bytes(), p.latent_box = s.latent_box(), p.column_box = s.column_box();
    p.rank = x.window.rank, p.region = control_bytes;
    p.own_region = static_cast<char*>(x.window.base[p.rank]) + p.region;
    if (s.world == 2) p.peer_region = static_cast<char*>(x.window.base[1 - p.rank]) + p.region;
    p.exchange_shared = p.digest = true;
    p.routed = routed, p.shared = shared, p.out = out;
    p.timeout_ticks = static_cast<std::uint32_t>(x.timeout_ns >> fused::tick_log2_ns);
    p.exchange = x;
    return p;
}

inline void add(float (&sum)[U::size], uint4 value) {
    float term[U::size];
    U::unpack(value, term);
    for (int e = 0; e < U::size; ++e) sum[e] += term[e];
}

/// Σ over ranks, in rank order, of the unit that `box(source)` holds; this rank's own is `own`.
template <class Cta, class Box>
void sum_of_ranks(const Cta& cta, PeerWait& wait, Phase phase, uint4 own, Box box, float (&sum)[U::size]) {
    constexpr int at_once = 4;
    static_assert(at_once >= 2);
    for (int first = 0; first < cta.world(); first += at_once) {
        uint4 v[at_once];
        const auto source = [&](int i) { return first + i; };
        fused::take<at_once>(
            v, wait, phase,
            [&](int i) -> const uint4* {
                return source(i) < cta.world() && source(i) != cta.p.rank ? box(source(i)) : nullptr;
            },
            source);
        for (int i = 0; i < at_once && source(i) < cta.world(); ++i) add(sum, source(i) == cta.p.rank ? own : v[i]);
    }
}

/// Calls `body(i)` for the units i of `count` that are this thread's, if the CTAs but those that only receive share them.
template <class Body>
void for_units_of_cta(const Params& p, int count, int thread, int threads, Body body) {
    const int sharers = static_cast<int>(gridDim.x) - p.receivers;
    for (int i = static_cast<int>(blockIdx.x) * threads + thread; i < count; i += sharers * threads) body(i);
}

/// `Shared` is what the roles of a CTA share: `latents[i]`, `columns[i]` (float[U::size], by unit), `squares_ready` and
/// `shared_ready` (barriers with `arrive()` and `sync()`).
template <class Cta, class Shared>
void protocol(const Cta& cta, Shared& shared, int lane) {
    dependency_wait();
    const auto epoch = load_relaxed<Scope::device>(&control(cta.p.exchange).epoch[blockIdx.x]);
    const State state = fused::load_state(cta.p);
    store_shared(fused::Barriers::epoch, epoch);
    sync_wave();
    shared.squares_ready.arrive();
    fused::keep_protocol(cta.p, epoch, state.rows & 1, lane);
}

template <class Cta, class Shared>
void math(const Cta& cta, Shared& shared, int thread, int threads) {
    const Params& p = cta.p;
    dependency_wait();
    const State state = fused::load_state(p);
    const Slot<Cta> slot(cta, state.slot);
    for_units_of_cta(p, p.tokens * p.latent_units, thread, threads, [&](int i) {
        const uint4 value = U::canonical(load16(p.routed.at(i / p.latent_units, i % p.latent_units)));
        fused::for_each_peer(cta, [&](int peer) { store_relaxed(slot.latents_to(peer) + i, value); });
    });
    fused::for_each_peer(cta, [&](int peer) {
        for_units_of_cta(p, p.tokens * p.column_units, thread, threads, [&](int i) {
            const uint4* from = p.shared.at(i / p.column_units, peer * p.column_units + i % p.column_units);
            store_relaxed(slot.shared_to(peer) + i, U::canonical(load16(from)));
        });
    });
    shared.shared_ready.sync();
    for_units_of_cta(p, p.tokens * p.column_units, thread, threads, [&](int i) {
        const int row = i / p.column_units, unit = i % p.column_units;
        float sum[U::size];
        for (int e = 0; e < U::size; ++e)
            sum[e] = shared.latents[row * p.latent_units + unit % p.latent_units][e] + shared.columns[i][e];
        const uint4 value = U::canonical(U::pack(sum));
        fused::for_each_peer(cta, [&](int peer) { store_relaxed(slot.columns_to(peer) + i, value); });
        store16(p.out.at(row, p.rank * p.column_units + unit), value);
    });
    if (thread < static_cast<int>(wave_size)) fused::store_state(p, state, thread);
}

template <class Cta, class Shared>
void gather(const Cta& cta, Shared& shared, int thread, int threads) {
    const Params& p = cta.p;
    PeerWait wait(p);
    dependency_wait();
    const State state = fused::load_state(p);
    const Slot<Cta> slot(cta, state.slot);
    std::uint32_t digest = 0;
    for (int i = thread; i < p.tokens * p.latent_units; i += threads) {
        const uint4 own = U::canonical(load16(p.routed.at(i / p.latent_units, i % p.latent_units)));
        float sum[U::size] = {};
        sum_of_ranks(
            cta, wait, Phase::gather, own, [&](int source) { return slot.latents_from(source) + i; }, sum);
        for (int e = 0; e < U::size; ++e) shared.latents[i][e] = sum[e];
        digest += digest_of(U::pack(sum), i);
    }
    if (blockIdx.x == 0) fused::add_digest(p, state, digest);
    shared.squares_ready.sync();
    for_units_of_cta(p, p.tokens * p.column_units, thread, threads, [&](int i) {
        const uint4 own =
            U::canonical(load16(p.shared.at(i / p.column_units, p.rank * p.column_units + i % p.column_units)));
        float sum[U::size] = {};
        sum_of_ranks(
            cta, wait, Phase::scatter, own, [&](int source) { return slot.shared_from(source) + i; }, sum);
        for (int e = 0; e < U::size; ++e) shared.columns[i][e] = sum[e];
    });
    shared.shared_ready.arrive();
    fused::rearm(cta, state, threads - 1 - thread, threads);
    if (p.receivers == 0) fused::gather_columns(cta, slot, wait, thread, threads, blockIdx.x, gridDim.x);
    wait.report(fused::Barriers::epoch);
}

}  // namespace latent_moe::gpu::small_fused

#pragma GCC diagnostic pop

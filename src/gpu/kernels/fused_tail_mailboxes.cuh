// The fused tail's mailboxes: where they lie, which slot a call uses, how they are waited for and re-armed.
//
//     region of one rank's window:  | head: state, an entry a CTA; digests | slot 0 | slot 1 | slot 2 |
//     slot:  | latents from each peer | slices of the shared partials from each peer | finished columns from each peer |
//     box:   `capacity` rows without gaps; a call of M rows uses the first M; a word that was not sent holds the sentinel
//
// WHO WRITES WHAT, WHEN. Fused call f (they count on their own: other kernels of the context do not touch this region) sends
// into slot f mod 3 at the peers, reads slot f mod 3 of its own window, and re-arms slot (f - 1) mod 3 of its own window:
// *all rows that call f - 1 used*, which the state remembers. A latent is read by every cluster, so its readers cannot
// re-arm it at once.
//
// WHY A SLOT IS NOT READ EARLY. Data is its own signal: a 4-byte word that is not the sentinel is one that was sent
// (mailbox.h).
//
// WHY IT IS NOT READ STALE. Words of slot f mod 3 were last sent in call f - 3 and re-armed in call f - 2, by kernels that
// ended before this one began (kernel order; `dependency_wait` under dependent launch). The rows re-armed are those of call
// f - 3 itself, so M may shrink and grow.
//
// WHY IT IS NOT OVERWRITTEN LATE (a peer's words of call f + 3 falling to a re-arm of call f + 1, or replacing unread words
// of call f). The peer's call f + 3 sends after its call f + 2 has ended; that has seen this rank's header of call f + 2,
// which a thread of this rank's call f + 2 sent after `dependency_wait` and a system-scope fence: so after this rank's calls
// f (the reading) and f + 1 (the re-arm) ended. Release: fence, header; acquire: header, fence, kernel order (header.h). Two
// slots would not do: in call f + 2 the peer has only seen the header of f + 1, which says nothing of the re-arm in call f
// + 1.
//
// WHAT AN EXPIRED WAIT LEAVES. Every CTA of a cluster runs to its end, because its neighbours count on its parts; the waits
// give up and the results are garbage. The fault word is set; `out` is not to be used, and the region must be reset.
#pragma once

#include "gpu/kernels/fused_tail_params.cuh"
#include "gpu/primitives/bounded_wait.h"
#include "gpu/primitives/epoch.h"
#include "gpu/primitives/header.h"
#include "gpu/primitives/numeric.h"
#include "gpu/primitives/scoped.h"

namespace latent_moe::gpu::fused {

/// What a CTA knows of the calls before; 32 bytes, so that CTAs do not meet in a sector.
struct alignas(32) State {
    std::uint32_t slot;  ///< of this call
    std::uint32_t rows;  ///< that the call before this one used, in the slot before, times 2; and its digests' index
    LATENT_MOE_DEVICE std::uint32_t rows_before() const { return rows >> 1; }
    LATENT_MOE_DEVICE std::uint32_t digests() const { return ~rows & 1; }
};

/// The region before the slots: an entry a CTA, and the digests of the two last calls, spread so that adding to them is
/// quick.
inline constexpr int digest_lanes = static_cast<int>(wave_size);
struct Head {
    State state[max_grid];
    struct alignas(128) Count {
        std::uint32_t items;
    };
    Count pooled[slots][max_split][pool_counts];  ///< see fused_tail_pool.cuh
    alignas(128) std::uint32_t digest[2][digest_lanes][8];
};
inline constexpr std::int64_t state_bytes = sizeof(Head);
static_assert(state_bytes % 128 == 0);

using U = Unit<Dtype::bf16>;

/// One slot of the regions. `Cta` knows whether there is a single peer: its region is then a parameter of its own.
template <class Cta>
struct Slot {
    const Cta& cta;
    std::int64_t offset;  ///< in every region

    LATENT_MOE_DEVICE Slot(const Cta& c, std::uint32_t index) : cta(c), offset(state_bytes + index * c.p.slot_bytes) {}

    /// Box `kind` (0: latents, 1: shared, 2: columns) for data from `source` in the window of `receiver`.
    LATENT_MOE_DEVICE uint4* box(int kind, int source, int receiver) const {
        const Params& p = cta.p;
        std::int64_t at = offset + (kind == 0 ? 0 : p.latent_box) + (kind == 2 ? p.column_box : 0);
        if constexpr (Cta::pair) return reinterpret_cast<uint4*>((receiver == p.rank ? p.own_region : p.peer_region) + at);
        const int peers = cta.world() - 1, index = mailbox_index(source, receiver);
        at =
            offset + (kind == 0 ? index * p.latent_box : peers * p.latent_box + ((kind - 1) * peers + index) * p.column_box);
        return reinterpret_cast<uint4*>(static_cast<char*>(p.exchange.window.base[receiver]) + p.region + at);
    }
    LATENT_MOE_DEVICE uint4* latents_from(int source) const { return box(0, source, cta.p.rank); }
    LATENT_MOE_DEVICE uint4* shared_from(int source) const { return box(1, source, cta.p.rank); }
    LATENT_MOE_DEVICE uint4* columns_from(int source) const { return box(2, source, cta.p.rank); }
    LATENT_MOE_DEVICE uint4* latents_to(int peer) const { return box(0, cta.p.rank, peer); }
    LATENT_MOE_DEVICE uint4* shared_to(int peer) const { return box(1, cta.p.rank, peer); }
    LATENT_MOE_DEVICE uint4* columns_to(int peer) const { return box(2, cta.p.rank, peer); }
};

/// Calls `body(peer)` for every peer, the next rank first.
template <class Cta, class Body>
LATENT_MOE_DEVICE void for_each_peer(const Cta& cta, Body body) {
    if constexpr (Cta::pair) {
        body(1 - cta.p.rank);
    } else {
#pragma unroll 1
        for (int k = 1, peer = cta.p.rank; k < cta.world(); ++k) {
            peer = peer + 1 == cta.world() ? 0 : peer + 1;
            body(peer);
        }
    }
}

LATENT_MOE_DEVICE Head& head(const Params& p) {
    return *reinterpret_cast<Head*>(p.own_region);
}

/// After `dependency_wait`.
LATENT_MOE_DEVICE State load_state(const Params& p) {
    const uint2 v = load_relaxed<Scope::device>(reinterpret_cast<const uint2*>(head(p).state + blockIdx.x));
    return {v.x, v.y};
}

/// By one warp, once all threads of the CTA have loaded the state. As with the epoch: CTA b writes the entries b, b + G, …,
/// so that the next call finds its own whatever its grid.
LATENT_MOE_DEVICE void store_state(const Params& p, const State& now, int lane) {
    const uint2 next =
        make_uint2(now.slot == slots - 1 ? 0 : now.slot + 1, static_cast<std::uint32_t>(p.tokens) << 1 | now.digests());
#pragma unroll 1
    for (int i = static_cast<int>(blockIdx.x) + lane * static_cast<int>(gridDim.x); i < max_grid;
         i += static_cast<int>(wave_size * gridDim.x)) {
        store_relaxed<Scope::device>(reinterpret_cast<uint2*>(head(p).state + i), next);
    }
}

/// One thread's waiting for peers. As `Wait` of bounded_wait.h, but the telling is left to the end of the thread's role,
/// where no registers are in use: a call inside a polling loop would make the hot path spill.
class PeerWait {
public:
    LATENT_MOE_DEVICE explicit PeerWait(const Params& p) : p_(p) {}

    /// Call after every look that found nothing. True: give up, now and ever after.
    LATENT_MOE_DEVICE bool over(int peer, Phase phase) {
        let_others_run();
        if ((++looks_ & 31) == 0 && blame_ == 0) {
            const auto now = static_cast<std::uint32_t>(clock_ns() >> tick_log2_ns) | 1u;
            if (start_ == 0) start_ = now;
            if (now - start_ > p_.timeout_ticks || load_relaxed(&control(p_.exchange).fault) != 0) {
                blame_ = static_cast<std::uint32_t>(peer) << 8 | static_cast<std::uint32_t>(phase);
            }
        }
        return blame_ != 0;
    }

    /// At the end of the role, once the epoch is in shared memory.
    LATENT_MOE_DEVICE void report(std::uint32_t epoch_word) const {
        if (blame_ != 0) tell(p_, load_shared<std::uint32_t>(epoch_word), blame_);
    }

private:
    LATENT_MOE_DEVICE_CALL static void tell(const Params& p, std::uint32_t epoch, std::uint32_t blame) {
        const Exchange& x = p.exchange;
        if (faulted(x, load_relaxed(&control(x).fault), epoch)) return;
        raise_fault(x, epoch, FaultCode::timeout, static_cast<int>(blame >> 8), static_cast<Phase>(blame & 0xff), 0, 0);
    }

    const Params& p_;
    std::uint32_t start_ = 0;  ///< tick of the first wait that took long enough to look at the clock
    std::uint32_t looks_ = 0;
    std::uint32_t blame_ = 0;  ///< peer and phase (never 0) of the wait that was given up
};

/// Polls n mailbox words together, `at(i)` from `peer(i)`, until all have come. A null address yields zeros.
template <int n, class At, class Peer>
LATENT_MOE_DEVICE void take(uint4 (&v)[n], PeerWait& wait, Phase phase, At at, Peer peer) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
        v[i] = uint4{};
        if (const uint4* from = at(i)) v[i] = load_relaxed(from);
    }
    while (true) {
        bool missing = false;
        int whom = 0;
#pragma unroll
        for (int i = 0; i < n; ++i) {
            if (U::arrived(v[i])) continue;
            missing = true, whom = peer(i);
            v[i] = load_relaxed(at(i));
        }
        if (!missing || wait.over(whom, phase)) return;
    }
}

/// Finished columns, as they come, into `out`. Each of the CTAs that take them, this one of `takers`, has a contiguous range
/// of each peer's units.
template <class Cta>
LATENT_MOE_DEVICE void gather_columns(const Cta& cta, const Slot<Cta>& slot, PeerWait& wait, int thread, int threads,
                                      std::uint32_t taker, std::uint32_t takers) {
    const Params& p = cta.p;
    const std::uint32_t all = p.tokens * p.column_units, share = (all + takers - 1) / takers;
    const std::uint32_t begin = taker * share, end = min(begin + share, all);
    for_each_peer(cta, [&](int source) {
        const uint4* box = slot.columns_from(source);
#pragma unroll 1
        for (std::uint32_t i = begin + thread; i < end; i += threads) {
            const std::uint32_t token = i / p.column_units, unit = i % p.column_units + source * p.column_units;
            uint4* to = p.out.at(token, unit);
            uint4 v[1];
            take<1>(
                v, wait, Phase::combine, [&](int) { return box + i; }, [&](int) { return source; });
            store16(to, v[0]);
        }
    });
}

/// [block of 64 columns][row][64 columns, swizzled]: Σ routed · γ.
LATENT_MOE_DEVICE uint4* pool_of(const Params& p, std::uint32_t slot) {
    return reinterpret_cast<uint4*>(p.pool + slot * p.pool_slot_bytes);
}
/// [row][item]: float32.
LATENT_MOE_DEVICE std::uint32_t* pool_squares_of(const Params& p, std::uint32_t slot) {
    return reinterpret_cast<std::uint32_t*>(p.pool + slot * p.pool_slot_bytes + std::int64_t{p.blocks} * pool_block_bytes);
}

/// Of the slot before `state.slot`, as `rearm`: the squares of all rows that the call before may have pooled, latents that
/// may be polled, and the counts.
LATENT_MOE_DEVICE void rearm_pool(const Params& p, const State& state, int thread, int threads) {
    const std::uint32_t slot = state.slot == 0 ? slots - 1 : state.slot - 1;
    const std::uint32_t rows = min(state.rows_before(), static_cast<std::uint32_t>(most_pooled_rows));
    const std::uint32_t all = rows * (p.pool_squares_row / 4), step = gridDim.x * threads;
#pragma unroll 1
    for (std::uint32_t i = blockIdx.x + thread * gridDim.x; i < all; i += step) {
        store_relaxed<Scope::device>(reinterpret_cast<uint4*>(pool_squares_of(p, slot)) + i,
                                     make_uint4(no_square, no_square, no_square, no_square));
    }
    // Which tile the call before had is not known here, so what may be polled is re-armed after every call.
    const std::uint32_t of_block = min(rows, std::uint32_t{most_polled_rows}) * 8, units = p.blocks * of_block;
#pragma unroll 1
    for (std::uint32_t i = blockIdx.x + thread * gridDim.x; i < units; i += step) {
        const std::uint32_t block = i / of_block;
        store_relaxed<Scope::device>(pool_of(p, slot) + block * (pool_block_bytes / 16) + (i - block * of_block),
                                     U::sentinel());
    }
    if (blockIdx.x == 0 && thread < max_split * pool_counts) {
        store_relaxed<Scope::device>(&head(p).pooled[slot][0][thread].items, 0u);
    }
}

/// Re-arms the slot before `state.slot`: each CTA a contiguous range. By `threads` threads of every CTA.
template <class Cta>
LATENT_MOE_DEVICE void rearm(const Cta& cta, const State& state, int thread, int threads) {
    const Params& p = cta.p;
    const Slot<Cta> slot(cta, state.slot == 0 ? slots - 1 : state.slot - 1);
    const std::uint32_t latents = state.rows_before() * p.latent_units, columns = state.rows_before() * p.column_units;
    const std::uint32_t all = latents + 2 * columns, share = (all + gridDim.x - 1) / gridDim.x;
    const std::uint32_t begin = blockIdx.x * share, end = min(begin + share, all);
    for_each_peer(cta, [&](int source) {
#pragma unroll 1
        for (std::uint32_t j = begin + thread; j < end; j += threads) {
            uint4* to = j < latents             ? slot.latents_from(source) + j
                        : j < latents + columns ? slot.shared_from(source) + (j - latents)
                                                : slot.columns_from(source) + (j - latents - columns);
            store_relaxed(to, U::sentinel());
        }
    });
}

/// By whole warps: to this call's digest.
LATENT_MOE_DEVICE void add_digest(const Params& p, const State& state, std::uint32_t digest) {
    digest = sum_over_wave(digest);
    const unsigned lane = threadIdx.x % wave_size, place = (blockIdx.x + threadIdx.x / wave_size) % digest_lanes;
    if (lane == 0) add_relaxed<Scope::device>(&head(p).digest[state.digests()][place][0], digest);
}

/// The protocol's own work, by one warp of each CTA: the epoch, and in CTA 0 the headers, which carry what the call before
/// added to its digest.
LATENT_MOE_DEVICE_CALL void keep_protocol(const Params& p, std::uint32_t epoch, std::uint32_t digests_before, int lane) {
    const Exchange& x = p.exchange;
    const Call call{epoch, false};
    const bool fault = faulted(x, load_relaxed(&control(x).fault), epoch);
    leave_call(x, call, lane, static_cast<int>(wave_size));
    if (blockIdx.x != 0 || fault) return;
    std::uint32_t* digest = head(p).digest[digests_before][lane];
    const std::uint32_t sum = sum_over_wave(load_relaxed<Scope::device>(digest));
    store_relaxed<Scope::device>(digest, 0u);
    if (lane == 0) add_relaxed<Scope::device>(&control(x).digest[(call.slot() + slots - 1) % slots], sum);
    sync_wave();
    exchange_headers(x, call, static_cast<std::uint32_t>(p.tokens), lane);
}

/// What a CTA without a tile does of a call: takes part in the protocol, re-arms, moves on. By all its threads.
template <class Cta>
LATENT_MOE_DEVICE State take_part(const Cta& cta, int thread, int threads) {
    constexpr int wave = static_cast<int>(wave_size);
    const Params& p = cta.p;
    dependency_wait();
    if (p.release && thread == 0) release_dependents();
    const State state = load_state(p);
    const auto epoch = load_relaxed<Scope::device>(&control(p.exchange).epoch[blockIdx.x]);
    sync_cta();  // all have read both
    if (thread < wave) {
        store_state(p, state, thread);
        keep_protocol(p, epoch, state.rows & 1, thread);
    } else {
        rearm(cta, state, thread - wave, threads - wave);
        if (p.pool) rearm_pool(p, state, thread - wave, threads - wave);
    }
    return state;
}

/// A CTA behind those with tiles: takes part, and the peers' columns with the others of its kind. By all its threads.
template <class Cta>
LATENT_MOE_DEVICE void receive_columns(const Cta& cta, int thread, int threads) {
    const Params& p = cta.p;
    dependency_wait();
    if (thread == 0) {
        store_shared(cta.bar(Barriers::epoch), load_relaxed<Scope::device>(&control(p.exchange).epoch[blockIdx.x]));
    }
    const State state = take_part(cta, thread, threads);
    PeerWait wait(p);
    gather_columns(cta, Slot<Cta>(cta, state.slot), wait, thread, threads, blockIdx.x - (gridDim.x - p.receivers),
                   p.receivers);
    wait.report(cta.bar(Barriers::epoch));
}

}  // namespace latent_moe::gpu::fused

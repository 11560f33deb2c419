// Sending this rank's partials to the peers: latents to all, of the shared ones to each its slice.
#pragma once

#include "gpu/kernels/fused_tail_mailboxes.cuh"
#include "gpu/kernels/fused_tail_pool.cuh"

namespace latent_moe::gpu::fused {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

/// Each CTA sends a contiguous range of the latents, or of the shared slices; `at_once` units a thread.
template <class Cta, int at_once>
struct Publisher {
    struct Parcel {
        const uint4* from;    ///< null: none
        std::uint32_t place;  ///< unit in the box
        int peer;             ///< of a shared slice
    };

    const Cta& cta;
    const Params& p;
    const bool latents;
    const std::uint32_t step;
    std::uint32_t next, end;
    Parcel parcels[at_once];
    uint4 values[at_once];

    LATENT_MOE_DEVICE Publisher(const Cta& c, int thread, int threads, bool of_latents)
        : cta(c), p(c.p), latents(of_latents), step(threads) {
        const int peers = cta.world() - 1;
        const std::uint32_t all = latents ? (peers > 0 ? p.tokens * p.latent_units : 0)
                                          : (p.exchange_shared ? p.tokens * p.column_units * peers : 0);
        const std::uint32_t senders = gridDim.x - p.receivers;
        const std::uint32_t share = (all + senders - 1) / senders, begin = blockIdx.x * share;
        next = begin + thread, end = min(begin + share, all);
        locate();
    }
    LATENT_MOE_DEVICE Parcel parcel(std::uint32_t i) const {
        if (i >= end) return {nullptr, 0, 0};
        if (latents) return {p.routed.at(i / p.latent_units, i % p.latent_units), i, 0};
        int peer = 1 - p.rank;
        if constexpr (!Cta::pair) {
            const std::uint32_t of_peer = p.tokens * p.column_units;
            peer = static_cast<int>(i / of_peer) + p.rank + 1, i %= of_peer;
            if (peer >= cta.world()) peer -= cta.world();
        }
        return {p.shared.at(i / p.column_units, peer * p.column_units + i % p.column_units), i, peer};
    }
    LATENT_MOE_DEVICE void locate() {
#pragma unroll
        for (int k = 0; k < at_once; ++k) parcels[k] = parcel(next + k * step);
    }
    /// After `dependency_wait`.
    LATENT_MOE_DEVICE void load() {
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
            if (parcels[k].from) values[k] = load_relaxed<Scope::device>(parcels[k].from);
        }
    }
    LATENT_MOE_DEVICE void send(const Slot<Cta>& slot, const Parcel& parcel, uint4 value) const {
        if (!parcel.from) return;
        value = U::canonical(value);
        if (latents) {
            for_each_peer(cta, [&](int peer) { store_relaxed(slot.latents_to(peer) + parcel.place, value); });
        } else {
            store_relaxed(slot.shared_to(parcel.peer) + parcel.place, value);
        }
    }
    /// What was loaded, and all the rest.
    LATENT_MOE_DEVICE void send_all(const Slot<Cta>& slot) {
#pragma unroll 1
        while (true) {
#pragma unroll
            for (int k = 0; k < at_once; ++k) send(slot, parcels[k], values[k]);
            next += step * at_once;
            if (next >= end) break;
            locate(), load();
        }
    }
};

/// The latents in the order of the pool's items, a warp each, `at_once` of them: what the product begins with leaves first.
template <class Cta, int at_once>
struct ItemPublisher {
    const Cta& cta;
    const Params& p;
    const int step;
    int next, end;
    PoolItem items[at_once];
    uint4 values[at_once];

    LATENT_MOE_DEVICE ItemPublisher(const Cta& c, int warp, int warps)
        : cta(c), p(c.p), step(warps * static_cast<int>(gridDim.x)) {
        next = warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
        end = cta.world() > 1 ? pool_item_count(cta) : 0;
        locate();
    }
    LATENT_MOE_DEVICE void locate() {
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
            items[k].unit = p.latent_units;
            if (next + k * step < end) items[k] = pool_item(cta, next + k * step);
        }
    }
    LATENT_MOE_DEVICE bool exists(const PoolItem& item) const {
        return item.unit < p.latent_units && item.unit < item.end;
    }
    /// After `dependency_wait`.
    LATENT_MOE_DEVICE void load() {
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
            if (exists(items[k])) values[k] = load_relaxed<Scope::device>(p.routed.at(items[k].token, items[k].unit));
        }
    }
    /// What was loaded, and all the rest.
    LATENT_MOE_DEVICE void send_all(const Slot<Cta>& slot) {
#pragma unroll 1
        while (true) {
#pragma unroll
            for (int k = 0; k < at_once; ++k) {
                if (!exists(items[k])) continue;
                const uint4 value = U::canonical(values[k]);
                for_each_peer(cta, [&](int peer) {
                    store_relaxed(slot.latents_to(peer) + items[k].token * p.latent_units + items[k].unit, value);
                });
            }
            next += step * at_once;
            if (next >= end) break;
            locate(), load();
        }
    }
};

#endif

}  // namespace latent_moe::gpu::fused

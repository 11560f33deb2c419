// One unit of Σ_ranks x, in rank order, from the mailboxes of this call and this rank's own input.
#pragma once

#include "gpu/primitives/header.h"
#include "gpu/primitives/mailbox.h"

namespace latent_moe::gpu {

/// One mailbox per peer, `stride` units each, the first at `first`: where they lie at `receiver`.
struct Boxes {
    uint4* first;
    std::int64_t stride;
    LATENT_MOE_DEVICE uint4* from(int source, int receiver) const {
        return first + mailbox_index(source, receiver) * stride;
    }
};

LATENT_MOE_DEVICE Boxes boxes_at(const Exchange& x, const Call& call, int receiver, std::int64_t stride, int skipped = 0) {
    return {reinterpret_cast<uint4*>(slot_at(x, call, receiver)) + skipped * stride, stride};
}

/// Sends a canonical unit to every peer's mailbox for this rank, the next rank first.
template <Dtype dtype>
LATENT_MOE_DEVICE void send_to_peers(const Exchange& x, const Call& call, std::int64_t stride, std::uint32_t unit,
                                     uint4 value, int skipped = 0) {
    for (int k = 1, peer = x.window.rank; k < x.window.world; ++k) {
        peer = peer + 1 == x.window.world ? 0 : peer + 1;
        Mailbox<dtype>::send(boxes_at(x, call, peer, stride, skipped).from(x.window.rank, peer) + unit, value);
    }
}

/// Mailboxes polled together. The sum is in rank order whatever it is.
constexpr int batch_for(int world) {
    return world <= 2 ? 2 : world <= 4 ? 4 : 8;
}

/// round(Σ_ranks): takes `unit` from every peer's mailbox; `own` is this rank's canonical summand.
template <Dtype dtype, int batch>
LATENT_MOE_DEVICE uint4 sum_over_ranks(const Exchange& x, const Boxes& boxes, std::uint32_t unit, uint4 own, Wait& wait,
                                       Phase phase) {
    using U = Unit<dtype>;
    const int rank = x.window.rank, world = x.window.world;
    float sum[U::size] = {};
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
        Mailbox<dtype>::take(from, peers, values, wait, phase);
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            float term[U::size];
            U::unpack(values[i], term);
#pragma unroll
            for (int e = 0; e < U::size; ++e) sum[e] += term[e];
        }
    }
    return U::pack(sum);
}

/// What CTA 0 of every exchanging kernel does, and nothing else: the headers. The other CTAs carry data.
LATENT_MOE_DEVICE void keep_protocol(const Exchange& x, const Call& call, std::uint32_t tokens) {
    sync_cta();  // all threads have read the epoch
    if (threadIdx.x >= wave_size) return;
    leave_call(x, call, threadIdx.x, wave_size);
    exchange_headers(x, call, tokens, threadIdx.x);
}

inline bool valid(const Exchange& x) {
    const PeerWindow& w = x.window;
    if (w.world < 1 || w.world > max_ranks || w.rank < 0 || w.rank >= w.world || x.tail > 255 || !x.record) return false;
    if (x.slot_bytes % 128 != 0) return false;
    for (int r = 0; r < w.world; ++r) {
        if (!w.base[r]) return false;
    }
    return true;
}

}  // namespace latent_moe::gpu

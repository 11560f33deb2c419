// The fused tail's mailboxes for the kernel before it: a producer that sends its partial rows to the peers itself, as it
// makes them, instead of leaving that to the tail. They are on the link while the producer ends and the tail begins.
//
// DUTIES OF THE PRODUCER, on every rank alike or not. It runs in the tail's stream, right before the call. After
// `dependency_wait` it reads the slot; then it sends all of the call's rows, latents to every peer and of the shared rows
// each peer's columns, each unit of 8 columns once, and also writes them to `routed` and `shared`, where the tail reads this
// rank's own share. The call says `partials_sent` and has as many rows. The order of memory is the mailboxes' own: a word
// that has come is its own signal; and a slot is free, because the kernel before this one was, or came after, the tail two
// calls ago (fused_tail_mailboxes.cuh).
#pragma once

#include "gpu/kernels/fused_tail_mailboxes.cuh"

namespace latent_moe::gpu::fused {

/// What a producer is given by the host: `fused_tail_slot`.
struct SlotView {
    char* region[max_ranks];  ///< every rank's
    std::int64_t slot_bytes, latent_box, column_box;
    int rank, world;
    int latent_units, column_units;

    /// After `dependency_wait`.
    LATENT_MOE_DEVICE std::int64_t offset() const {
        const State& state = reinterpret_cast<const Head*>(region[rank])->entries[0].tail;
        return state_bytes + load_relaxed<Scope::device>(&state.slot) * slot_bytes;
    }
    LATENT_MOE_DEVICE void send_latents(std::int64_t offset, int token, int unit, uint4 value) const {
        value = U::canonical(value);
        for (int peer = 0; peer < world; ++peer) {
            if (peer == rank) continue;
            char* box = region[peer] + offset + mailbox_index(rank, peer) * latent_box;
            store_relaxed(reinterpret_cast<uint4*>(box) + token * latent_units + unit, value);
        }
    }
    /// `unit`: of all H columns.
    LATENT_MOE_DEVICE void send_shared(std::int64_t offset, int token, int unit, uint4 value) const {
        const int peer = unit / column_units;
        if (peer == rank) return;
        char* box = region[peer] + offset + (world - 1) * latent_box + mailbox_index(rank, peer) * column_box;
        store_relaxed(reinterpret_cast<uint4*>(box) + token * column_units + unit - peer * column_units,
                      U::canonical(value));
    }
};

}  // namespace latent_moe::gpu::fused

// Mailboxes: memory in which data is its own signal.
//
//     sender                                receiver
//     send(mailbox word i, canonical v)  ─▶  poll word i until it is not the sentinel; take it; write the sentinel back
//
// An empty 4-byte word holds the sentinel: -0.0 (bf16, f16: two of them; f32: one). Senders turn -0.0 into +0.0, so no word
// that was sent equals it. That beats words that carry a flag (LL): half the bytes on the wire and half the polling loads.
//
// GUARANTEE. A word that is not the sentinel is the one that was sent in this call: a 4-byte word is never torn, so data and
// signal are one access and need no other order (relaxed, system scope, both sides). That the word cannot be older: its
// reader wrote the sentinel back when it took it, before the sender's next use of the slot (the argument is in epoch.h).
// What was read is re-armed word by word by whoever read it, never "the rows of the current call": when M shrinks and grows
// no stale row can be left. One thread reads a given word.
#pragma once

#include "bounded_wait.h"
#include "epoch.h"
#include "numeric.h"
#include "scoped.h"
#include "window.h"

namespace latent_moe::gpu {

/// The first byte of this call's slot at `rank`.
LATENT_MOE_DEVICE char* slot_at(const Exchange& x, const Call& call, int rank) {
    return static_cast<char*>(x.window.base[rank]) + control_bytes + call.slot() * x.slot_bytes;
}

template <Dtype dtype>
struct Mailbox {
    using U = Unit<dtype>;

    LATENT_MOE_DEVICE static void send(uint4* to, uint4 canonical) { store_relaxed(to, canonical); }

    /// Polls `count` mailboxes, `boxes[i]` from peer `peers[i]`, all in flight together; takes and re-arms them. An entry
    /// with a null box keeps the value that it has.
    template <int count>
    LATENT_MOE_DEVICE static void take(uint4* const (&boxes)[count], const int (&peers)[count], uint4 (&values)[count],
                                       Wait& wait, Phase phase) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            if (boxes[i]) values[i] = load_relaxed(boxes[i]);
        }
#pragma unroll
        for (int i = 0; i < count; ++i) {
            if (!boxes[i]) continue;
            while (!U::arrived(values[i])) {
                if (wait.over(peers[i], phase)) break;
                values[i] = load_relaxed(boxes[i]);
            }
            store_relaxed(boxes[i], U::sentinel());
        }
    }
};

}  // namespace latent_moe::gpu

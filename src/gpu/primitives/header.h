// Every exchange says what it carries: {epoch, tokens, layer, tail, digest of the sender's previous output}.
//
//     rank a ── header(a, call n) ──▶ window of b, headers[n mod 3][mailbox_index(a, b)]          and b to a, for every pair
//
// GUARANTEE. 1. A call whose ranks differ in tokens, layer or tail, or whose previous outputs differed, sets the fault word
// on both ranks; each names the other, what it expected and what it found. A header is one 16-byte access: never half of an
// old one. Its epoch is compared, and its place is written again only three calls later: an older header never satisfies it.
// 2. The header carries the order on which the reuse of slots rests: sender: everything before this call's kernel (kernel
// order) → fence.acq_rel.sys → relaxed store of the header. Receiver: relaxed load that sees it → fence.acq_rel.sys → its
// next kernels (kernel order). So what rank a did up to its call n - 1 happens before what rank b does from call n + 1 on.
// Neither fence lies on the path of the data.
#pragma once

#include "bounded_wait.h"
#include "epoch.h"
#include "scoped.h"
#include "window.h"

namespace latent_moe::gpu {

/// By one whole warp of the grid, once a call; lane r talks to rank r. Returns when every peer's header came, or a fault was
/// set.
LATENT_MOE_DEVICE_ANY void exchange_headers(const Exchange& x, const Call& call, std::uint32_t tokens, int lane) {
    Control& own = control(x);
    const int slot = call.slot(), previous = (slot + slots - 1) % slots, next = (slot + 1) % slots;
    const Header mine{call.epoch, tokens << 8 | x.tail, x.layer, load_relaxed<Scope::device>(&own.digest[previous])};
    if (lane == 0) store_relaxed<Scope::device>(&own.digest[next], 0u);
    fence<Scope::system>();
    if (lane < x.window.world && lane != x.window.rank) {
        Header* to = &control_of(x, lane).headers[slot][mailbox_index(x.window.rank, lane)];
        // An epoch of 0 is an empty place, so epoch n is sent as n + 1.
        store_whole16(reinterpret_cast<uint4*>(to),
                      make_uint4(mine.epoch + 1, mine.tokens_and_tail, static_cast<std::uint32_t>(mine.layer), mine.digest));

        const Header* from = &own.headers[slot][mailbox_index(lane, x.window.rank)];
        Wait wait(x, call.epoch);
        uint4 theirs;
        do {
            theirs = load_whole16(reinterpret_cast<const uint4*>(from));
        } while (theirs.x != mine.epoch + 1 && !wait.over(lane, Phase::header));

        const auto check = [&](Phase what, std::uint32_t expected, std::uint32_t found) {
            if (expected != found) raise_fault(x, call.epoch, FaultCode::mismatch, lane, what, expected, found);
            return expected == found;
        };
        if (!wait.gave_up()) {
            check(Phase::header_tokens, mine.tokens_and_tail >> 8, theirs.y >> 8) &&
                check(Phase::header_tail, mine.tokens_and_tail & 0xff, theirs.y & 0xff) &&
                check(Phase::header_layer, static_cast<std::uint32_t>(mine.layer), theirs.z) &&
                check(Phase::header_digest, mine.digest, theirs.w);
        }
    }
    fence<Scope::system>();
}

/// By a whole warp: adds its lanes' digests of what they wrote to the call's. Integer sums: the order does not matter.
LATENT_MOE_DEVICE void add_to_digest(const Exchange& x, const Call& call, std::uint32_t digest) {
    digest = sum_over_wave(digest);
    if (threadIdx.x % wave_size == 0) add_relaxed<Scope::device>(&control(x).digest[call.slot()], digest);
}

}  // namespace latent_moe::gpu

// What ranks share: a window of the same layout at every rank, of which each rank can address every other's.
//
//     window of one rank:  | Control | slot 0 | slot 1 | slot 2 |        a slot holds one call's mailboxes
//
// Before the first call, and after every fault: `reset_window` on every rank, then a barrier of the host's own.
//
// LOOPBACK. A world of two whose two bases are the same memory is a rank that talks to itself: what it sends arrives in the
// mailbox that it reads. Tools that serialise ranks (compute-sanitizer, the profiler) run every kernel that way.
#pragma once

#include <cstddef>
#include <cstdint>

#include "anywhere.h"

namespace latent_moe::gpu {

inline constexpr int max_ranks = 16;
inline constexpr int slots = 3;       ///< see epoch.h
inline constexpr int max_grid = 256;  ///< most CTAs of a kernel that takes part in the exchange

struct PeerWindow {
    void* base[max_ranks];
    int rank;
    int world;
};

/// What one rank tells another about the call that it is in (header.h). Written and read as one.
struct alignas(16) Header {
    std::uint32_t epoch;
    std::uint32_t tokens_and_tail;  ///< tokens << 8 | tail
    std::int32_t layer;
    std::uint32_t digest;  ///< of the sender's previous output
};

/// The head of a window. Zeroed before the first call. Only `fault` and `headers` are written by peers.
struct Control {
    std::uint32_t fault;     ///< sticky (bounded_wait.h); not 0: every kernel leaves at once
    std::uint32_t reported;  ///< 1 once somebody wrote the host's record
    std::uint32_t digest[slots];
    alignas(128) std::uint32_t epoch[max_grid];
    alignas(128) Header headers[slots][max_ranks];
};

/// What `Control::fault` holds: FaultCode | (rank + 1) << 8 | Phase << 16. The host aborts a context by copying `abort_word`
/// there, on a stream of its own: kernels that wait look at it now and then, and tell the peers.
constexpr std::uint32_t abort_word(int rank) {
    return 3 | static_cast<std::uint32_t>(rank + 1) << 8;
}

inline constexpr std::int64_t control_bytes = 4096;
static_assert(sizeof(Control) <= control_bytes);

constexpr std::int64_t window_bytes(std::int64_t slot_bytes) {
    return control_bytes + slots * slot_bytes;
}

/// Where the mailbox of `source` lies among those at `receiver`: a rank has none for itself.
LATENT_MOE_ANYWHERE constexpr int mailbox_index(int source, int receiver) {
    return source < receiver ? source : source - 1;
}

/// What went wrong first. Lies in host-mapped memory: the host polls `code` without blocking.
enum class FaultCode : std::uint32_t { none, timeout, mismatch, aborted };
enum class Phase : std::uint32_t {
    none,
    header_tokens,
    header_tail,
    header_layer,
    header_digest,
    header,
    gather,
    scatter,
    combine,
    self_check_weights,  ///< of the rank that the record names
    self_check_output,
};

struct FaultRecord {
    std::uint32_t code;   ///< FaultCode; written last
    std::int32_t rank;    ///< the rank that was waited for, or that differs
    std::uint32_t phase;  ///< Phase
    std::int32_t layer;
    std::uint64_t call;  ///< epoch of the call, from 0
    std::uint64_t expected;
    std::uint64_t found;
};

/// All that a kernel needs to take part in the exchange. `slot_bytes`, `timeout_ns` and the order of calls are the same on
/// every rank.
struct Exchange {
    PeerWindow window;
    std::int64_t slot_bytes;   ///< a multiple of 128
    FaultRecord* record;       ///< device address of host-mapped memory
    std::uint64_t timeout_ns;  ///< how long one kernel may wait
    std::int32_t layer;        ///< of this call; goes into the header
    std::uint32_t tail;        ///< of this call, below 256; goes into the header
};

}  // namespace latent_moe::gpu

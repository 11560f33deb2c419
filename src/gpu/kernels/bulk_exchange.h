// Collectives over the peer window for messages too large for mailboxes: plain stores at the speed of the link, and a
// counter a CTA that says how far they have come.
//
//     a lane's window:  | Control, mailboxes (window.h) | counters | slot 0 | slot 1 | slot 2 |
//                                                       ^ Bulk::offset
//
// Conventions: kernels.h. Results are summed in rank order in float32 and rounded once, as everywhere.
#pragma once

#include <cstdint>

#include "gpu/kernels/row_exchange.h"
#include "gpu/primitives/window.h"
#include "gpu/runtime/device_api.h"
#include "latent_moe/tensor.h"

namespace latent_moe::gpu {

/// Where the slots of bulk messages lie in every rank's window.
struct Bulk {
    std::int64_t offset = 0;      ///< of the counters, from the window's base; a multiple of 128
    std::int64_t slot_bytes = 0;  ///< a multiple of 128
};

inline constexpr std::int64_t bulk_counter_bytes = std::int64_t{slots} * max_ranks * max_grid * 8;

constexpr std::int64_t bulk_bytes(std::int64_t slot_bytes) {
    return bulk_counter_bytes + slots * slot_bytes;
}

/// Zeroes the counters; together with `reset_window`.
cudaError_t reset_bulk(void* base, const Bulk& bulk, cudaStream_t stream);

/// y = round(Σ_ranks x), and with a prefix y = round(y + prefix). One hop where `own` is null: every rank sends everything
/// to every rank. Otherwise rank r makes rows own[r] and two kernels do it: reduce-scatter, all-gather; `own` covers all
/// rows.
struct BulkAllReduce {
    Exchange exchange;
    Bulk bulk;
    ConstRows x;
    Rows y;
    ConstRows prefix;
    const OwnRows* own = nullptr;
    std::int64_t tokens = 0;
    std::int64_t width = 0;
    Dtype dtype = Dtype::bf16;
    int max_ctas = 64;
};
cudaError_t bulk_all_reduce(const BulkAllReduce& op, cudaStream_t stream);

/// As `reduce_scatter` and `all_gather` (row_exchange.h).
cudaError_t bulk_reduce_scatter(const ReduceScatter& op, const Bulk& bulk, cudaStream_t stream);
cudaError_t bulk_all_gather(const AllGather& op, const Bulk& bulk, cudaStream_t stream);

}  // namespace latent_moe::gpu

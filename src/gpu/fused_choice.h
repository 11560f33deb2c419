// Which way of cutting the fused tail's work is fastest on these GPUs: what was estimated, or what all ranks together
// measure when a context is made.
//
// A cut decides the order of sums (rows of a tile, parts of K), so contexts that measure may differ from one another in last
// bits; the ranks of one never do, since they take the same cut. A cut has to be `worth_changing` faster than the estimated
// one to take its place, so that mere noise changes nobody's bits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/function_ref.h"
#include "gpu/kernels/fused_tail.h"
#include "gpu/runtime/device_api.h"
#include "latent_moe/bootstrap.h"

namespace latent_moe::gpu {

/// By what share of the estimated cut's time.
inline constexpr double worth_changing = 0.03;

/// The cuts to try for calls of up to `tokens` rows, `estimated` first: others with no more CTAs, and its own with other
/// numbers of copies in flight, places and prefetches. Asks the current device what fits.
std::vector<FusedTailPlan> cuts_to_try(const FusedTailShape& shape, std::int64_t tokens, int max_ctas,
                                       const FusedTailPlan& estimated);

/// A cut and what a call took with it, on the slowest rank.
struct MeasuredCut {
    FusedTailPlan plan;
    double us = 0;
};

/// Collective, with each rank's device current and its grid registered: enqueues calls by each of `plans` with `run` (a
/// second argument counts them) and gives all of them with their times, the one to take first. Where ranks would try
/// different ones nothing is run, and the first is given alone.
std::vector<MeasuredCut> measure_cuts(const Bootstrap& bootstrap, const std::vector<FusedTailPlan>& plans,
                                      FunctionRef<void(const FusedTailPlan&, int)> run, cudaStream_t stream);

/// "128 rows, K in 4, 28 clusters, 3 to 8 copies in flight": for logs.
std::string name_of(const FusedTailPlan& plan);

}  // namespace latent_moe::gpu

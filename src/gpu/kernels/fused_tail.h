// The fused decode tail: out = prefix + Σ shared + scale · norm(Σ routed) · W_upᵀ, on every rank, in one kernel. The drawing
// is in fused_tail.cu; conventions (strides, streams, dependent launch) are those of kernels.h.
//
// USE. At creation, on the rank's device: `prepare_fused_tail`, then a `plan_fused_tail` for each class of token counts that
// may come (`plan.tokens` is 8, 16, 32, 64 or 128: rows of one kernel). Ranks may cut the work differently, but
// `plan.tokens` and `plan.digest` of a call must be the same on all.
//
// Every rank's window has a region of `fused_tail_region_bytes` at the same offset, a multiple of 128, that no other kernel
// uses. `reset_fused_tail` empties it: before the first call, and after a fault, together with `reset_window` and then a
// barrier of the host's own.
//
// Each call is one `launch_fused_tail`. It takes one epoch of the exchange, or one for each `plan.tokens` rows.
//
// Grids that wait for each other must be resident together: the sum of `fused_tail_grid` over the ranks on one GPU must fit.
// Where ranks share a GPU, calls must not start early: the early CTAs of one rank's next call could keep out the CTAs of
// another rank that its present call waits for.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "gpu/primitives/window.h"
#include "gpu/runtime/device_api.h"
#include "latent_moe/tensor.h"

namespace latent_moe::gpu {

/// What does not change from call to call.
struct FusedTailShape {
    std::int64_t hidden = 0;  ///< H; H / world is a multiple of 8
    std::int64_t latent = 0;  ///< L, a multiple of 8
    int world = 1;            ///< 1 to 16; need not be a power of two
    int capacity = 128;       ///< rows of a mailbox

    bool operator==(const FusedTailShape&) const = default;
};

/// How the work is cut. Chosen by `plan_fused_tail`; every field may be overridden by measurement, then `fused_tail_fits`
/// tells whether the result can run.
struct FusedTailPlan {
    int tokens = 0;             ///< token columns of the product: 8, 16, 32, 64 or 128; rows of one kernel
    int rows = 0;               ///< of W that a cluster owns at a time: 64 or 128
    int split = 0;              ///< CTAs of a cluster, each a part of K: 1, 2, 4 or 8
    int clusters = 0;           ///< each takes every `clusters`-th tile of W
    int receivers = 0;          ///< clusters behind these that only take the peers' columns: the others leave before
    int token_ring = 6;         ///< places for blocks of latents, where more than 32 tokens' latents are pooled
    int in_flight_early = 3;    ///< bulk copies of weights in flight a CTA, until the latents are there,
    int in_flight_late = 8;     ///< and after
    int prefetch_blocks = 24;   ///< of weights that shared memory does not hold, into L2, at most,
    int prefetch_at_once = 3;   ///< all at once if there are no more,
    int prefetch_clocks = 700;  ///< one in so many clocks
    bool float8 = false;        ///< `packed` is e4m3 (packed_float8.h): in builds for measurement only
    bool digest = true;         ///< of the latents, for the next call's header; the same on every rank

    bool operator==(const FusedTailPlan&) const = default;
};

int fused_tail_grid(const FusedTailPlan& plan);

/// Once per device, before the first plan: modules loaded, shared memory allowed. cudaErrorNotSupported: no sm_90a kernel
/// here.
cudaError_t prepare_fused_tail();

/// The cuts of calls of up to `tokens` rows that can run here with at most `max_ctas` CTAs, all resident at once (asks the
/// device), best first by what a CTA of each must take in. All have the same `tokens`; the sums' order differs from one to
/// another. cudaErrorInvalidValue: outside the limits; cudaErrorLaunchOutOfResources: nothing fits.
cudaError_t fused_tail_plans(const FusedTailShape& shape, std::int64_t tokens, int max_ctas, bool float8,
                             std::vector<FusedTailPlan>* plans);

/// The first of them, for weights as `plan->float8` says.
inline cudaError_t plan_fused_tail(const FusedTailShape& shape, std::int64_t tokens, int max_ctas, FusedTailPlan* plan) {
    std::vector<FusedTailPlan> plans;
    const cudaError_t error = fused_tail_plans(shape, tokens, max_ctas, plan->float8, &plans);
    if (error == cudaSuccess) *plan = plans.front();
    return error;
}

/// Whether this plan can run this shape here, its whole grid resident.
cudaError_t fused_tail_fits(const FusedTailShape& shape, const FusedTailPlan& plan);

/// Where the kernel without clusters (fused_tail_mfma.cuh) runs: it needs MFMA and waves of 64.
inline constexpr std::array<const char*, 3> fused_tail_architectures = {"gfx90a", "gfx942", "gfx950"};

std::int64_t fused_tail_region_bytes(const FusedTailShape& shape);
/// Of this rank's own memory, for the call under way: the sum of many tokens' latents.
std::int64_t fused_tail_workspace_bytes(const FusedTailShape& shape);

/// `workspace`: too; it may be null if no call has more than 16 rows.
cudaError_t reset_fused_tail(void* region, void* workspace, const FusedTailShape& shape, cudaStream_t stream);

struct FusedTail {
    Exchange exchange;               ///< `slot_bytes` is not used here
    std::int64_t region_offset = 0;  ///< of the region in every window
    FusedTailShape shape;
    FusedTailPlan plan;
    void* workspace = nullptr;     ///< `fused_tail_workspace_bytes`
    ConstRows routed;              ///< [tokens, latent], this rank's partial
    ConstRows shared;              ///< [tokens, hidden]: this rank's partial, or the sum; may be absent
    bool shared_is_sum = false;    ///< `shared` is Σ already, the same on every rank: it is not exchanged
    ConstRows prefix;              ///< [tokens, hidden], the same on every rank, added last; may be absent
    Rows out;                      ///< [tokens, hidden]; may be exactly `shared` or `prefix`
    const void* packed = nullptr;  ///< this rank's rows of W_up (packed_layout.h), bf16
    bool rms_norm = true;
    const void* gamma = nullptr;  ///< [latent]; null: ones
    float epsilon = 1e-5F;
    float scale = 1.0F;
    const float* column_scales = nullptr;  ///< [hidden / world], on top of `scale`; may be null, but not for e4m3
    std::int64_t tokens = 0;               ///< at most `shape.capacity`; 0 takes part in the exchange too
    /// May start before its predecessor has ended: weights and γ are read at once, nothing else before the predecessor has
    /// ended.
    bool starts_early = false;
    /// Lets the successor start early. The successor must `griddepcontrol.wait` before it touches what this call reads or
    /// writes.
    bool releases_early = false;
    long long* stamps = nullptr;  ///< see fused_tail_stamps.cuh; null: none
};
cudaError_t launch_fused_tail(const FusedTail& op, cudaStream_t stream);

}  // namespace latent_moe::gpu

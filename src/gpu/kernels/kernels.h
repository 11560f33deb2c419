// The host's side of every kernel: plain functions that enqueue one kernel (or, where said, a few) on a stream. They
// allocate nothing, never wait, may be captured, and return what is wrong with their arguments before they launch anything.
//
// Conventions. Rows are strided views; a stride counts elements, 0 means contiguous. Every row starts at a multiple of 16
// bytes, every width is a multiple of 8. `tokens` may be 0: a call that takes part in the exchange is then still made.
// `max_ctas` bounds the grid (2 to `max_grid`): all grids that wait for each other, of all ranks on one GPU, must be
// resident together, each CTA on a multiprocessor of its own (so that those left free stay free). `dependent_launch`: the
// kernel may start before its predecessor ends, and lets its successor do the same (launch.h); only weights and γ are read
// before it has ended. A successor that waits holds its place on the GPU too: where ranks share one, count both grids. Load
// every kernel (CUDA_MODULE_LOADING=EAGER, or call it once) before any waits.
#pragma once

#include <cstdint>

#include "gpu/primitives/window.h"
#include "gpu/runtime/device_api.h"
#include "latent_moe/tensor.h"

namespace latent_moe::gpu {

/// Empties this rank's window: control words zero, mailboxes armed for `dtype`. Before the first call and after a fault;
/// then the ranks need a barrier of the host's own.
cudaError_t reset_window(void* base, std::int64_t slot_bytes, Dtype dtype, cudaStream_t stream);

/// y = round(Σ_ranks x), summed in rank order in float32; with a prefix, y = round(y + prefix). `y` may be exactly `x` or
/// `prefix`; `prefix` must be the same on every rank. Calls of more rows than a slot holds are split into several kernels.
struct AllReduce {
    Exchange exchange;
    ConstRows x;
    Rows y;
    ConstRows prefix;
    std::int64_t tokens = 0;
    std::int64_t width = 0;
    Dtype dtype = Dtype::bf16;
    int stages = 1;  ///< 1: every rank sends everything to every rank; 2: reduce-scatter, then all-gather
    int max_ctas = 64;
    bool dependent_launch = false;
};
cudaError_t all_reduce(const AllReduce& op, cudaStream_t stream);

/// Bytes of a slot that one kernel of `rows` rows needs.
std::int64_t all_reduce_slot_bytes(int world, int stages, std::int64_t rows, std::int64_t width, Dtype dtype);

/// y = norm(round(Σ_ranks x)): the all-reduce above in one stage, and RMSNorm (or nothing) in the same kernel. Bit for bit
/// what `all_reduce` and then `rms_norm` give. Up to as many rows as a slot holds (`all_reduce_slot_bytes` with one stage).
struct AllReduceRmsNorm {
    Exchange exchange;
    ConstRows x;
    const void* gamma = nullptr;  ///< null: no norm
    float epsilon = 1e-5F;
    Rows y;
    std::int64_t tokens = 0;
    std::int64_t width = 0;  ///< at most `max_norm_width(dtype)`
    Dtype dtype = Dtype::bf16;
    int max_ctas = 132;
    bool dependent_launch = false;
};
cudaError_t all_reduce_rms_norm(const AllReduceRmsNorm& op, cudaStream_t stream);
std::int64_t max_norm_width(Dtype dtype);  ///< 32768 for 16-bit elements, 16384 for float32

/// y = RMSNorm(x; γ, ε): float32 throughout, rounded once. `y` may be exactly `x`.
struct RmsNorm {
    ConstRows x;
    const void* gamma = nullptr;
    float epsilon = 1e-5F;
    Rows y;
    std::int64_t tokens = 0;
    std::int64_t width = 0;
    Dtype dtype = Dtype::bf16;
    bool dependent_launch = false;
};
cudaError_t rms_norm(const RmsNorm& op, cudaStream_t stream);

/// y = round(a + b), and with a prefix y = round(y + prefix). `y` may be exactly any of the three.
struct Add {
    ConstRows a;
    ConstRows b;
    ConstRows prefix;
    Rows y;
    std::int64_t tokens = 0;
    std::int64_t width = 0;
    Dtype dtype = Dtype::bf16;
    bool dependent_launch = false;
};
cudaError_t add(const Add& op, cudaStream_t stream);

cudaError_t copy_rows(ConstRows from, Rows to, std::int64_t tokens, std::int64_t width, Dtype dtype, cudaStream_t stream);
cudaError_t zero_rows(Rows to, std::int64_t tokens, std::int64_t width, Dtype dtype, cudaStream_t stream);

/// Packs `rows` rows of `latent` elements for `skinny_projection` (packed_layout.h): `packed` has `PackedLayout::bytes()`
/// bytes.
struct PackWeights {
    ConstRows w;
    std::int64_t rows = 0;    ///< N: output columns of this rank
    std::int64_t latent = 0;  ///< K
    void* packed = nullptr;
};
cudaError_t pack_weights(const PackWeights& op, cudaStream_t stream);

/// c = round(addend + scale · A · Wᵀ), and with a prefix c = round(c + prefix); A is [tokens, K], W is [N, K] packed, sums
/// are float32 in an order that depends on K, N and the class of `tokens` (up to 8, 16, 32, 64), never on a row's neighbours
/// or on timing. `c` may be exactly `addend` (accumulate in place) or `prefix`; without an addend c = round(scale · A · Wᵀ).
struct SkinnyProjection {
    ConstRows a;
    const void* packed = nullptr;
    ConstRows addend;
    ConstRows prefix;
    Rows c;
    float scale = 1.0F;
    const float* column_scales = nullptr;  ///< optional, N factors
    std::int64_t tokens = 0;               ///< 0 to 64
    std::int64_t rows = 0;                 ///< N
    std::int64_t latent = 0;               ///< K
    Dtype dtype = Dtype::bf16;             ///< bf16 or f16: of A, W and C
    bool dependent_launch = false;
    int early_ctas = max_grid;     ///< a larger grid does not start early: it would keep others out while it waits
    bool portable = false;         ///< use the kernel for every architecture where the wgmma kernel would run
    bool batch_invariant = false;  ///< sum in the order of 64 tokens, however few there are
};
cudaError_t skinny_projection(const SkinnyProjection& op, cudaStream_t stream);

}  // namespace latent_moe::gpu

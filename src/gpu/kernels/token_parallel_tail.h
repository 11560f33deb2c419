// The whole token-parallel tail in one kernel a rank, on Hopper, bf16. Conventions: kernels.h.
//
//     a rank's region of its window:  | words: who sent, took, finished, copied which block | latents | shared | outputs |
//
// Its size, and that of the workspace, do not depend on the number of tokens: rows travel in blocks, of which `depth` are on
// their way at a time.
#pragma once

#include <cstdint>

#include "gpu/kernels/kernels.h"
#include "gpu/kernels/row_exchange.h"
#include "gpu/primitives/anywhere.h"

namespace latent_moe::gpu {

/// Once per device, before the first call: kernels loaded, shared memory allowed. cudaErrorNotSupported: none for it here.
cudaError_t prepare_token_parallel_tail();

/// What decides how the region is laid out: the same on every rank, and for every call of a context.
struct TokenParallelShape {
    std::int64_t hidden;
    std::int64_t latent;
    int world;
    int block_rows;  ///< of one owner's rows: 256 or less
    int depth;       ///< blocks of an owner that may be on their way
};

/// The largest blocks, and then as many of them, as fit in `budget` bytes of window and workspace. `depth` is 0 where not
/// even two blocks of 8 rows do.
TokenParallelShape shape_token_parallel_tail(std::int64_t hidden, std::int64_t latent, int world,
                                             std::int64_t budget = std::int64_t{88} << 20);
std::int64_t token_parallel_region_bytes(const TokenParallelShape& shape);
std::int64_t token_parallel_workspace_bytes(const TokenParallelShape& shape);
/// Before the first call and after every fault, on every rank; then a barrier of the host's own. The window's head
/// (window.h) lies in front of the region and is reset apart.
cudaError_t reset_token_parallel_tail(void* region, void* workspace, const TokenParallelShape& shape, cudaStream_t stream);

/// Who does what. A function of its arguments, which must be the same on every rank.
struct TokenParallelPlan {
    int grid = 0;          ///< CTAs, all resident at once with those of the ranks that share the GPU
    int carriers = 0;      ///< of these, the first: they send partials; the others multiply
    int tile_columns = 0;  ///< 128 or 256
    int posting = 2;       ///< warps of a carrier that hand their pieces to the copy engine; 0: its threads store them
    int settle = 3;        ///< an owner is told of a step so many pieces after its last one
    int ahead = 0;         ///< blocks of an owner, from the first, whose latents all CTAs send
};
/// `carriers`: 0 for as many as were measured to be best.
TokenParallelPlan plan_token_parallel_tail(const TokenParallelShape& shape, std::int64_t tokens, int max_ctas,
                                           int carriers = 0);

struct TokenParallelTail {
    Exchange exchange;
    std::int64_t region_offset = 0;  ///< from the window's base; a multiple of 128
    TokenParallelShape shape;
    TokenParallelPlan plan;
    void* workspace = nullptr;
    OwnRows own;                   ///< covers all tokens
    ConstRows routed;              ///< partials of all tokens
    ConstRows shared;              ///< partials of all tokens; or null
    ConstRows addend;              ///< instead of `shared`: reduced rows, of this rank's tokens only; or null
    ConstRows prefix;              ///< of this rank's tokens only; or null
    Rows out;                      ///< of all tokens, or with `stop_before_gather` of this rank's only
    const void* packed = nullptr;  ///< the whole W_up (packed_layout.h)
    bool rms_norm = true;
    const void* gamma = nullptr;
    float epsilon = 1e-5F;
    float scale = 1.0F;
    bool stop_before_gather = false;
};
/// `out` may be exactly `shared`, or `prefix` or `addend` with the rows of other ranks around them.
cudaError_t token_parallel_tail(const TokenParallelTail& tail, cudaStream_t stream);

}  // namespace latent_moe::gpu

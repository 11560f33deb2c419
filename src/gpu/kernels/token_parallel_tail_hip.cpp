// The whole token-parallel tail in one kernel needs what Hopper has (tensor copies, wgmma): none on AMD GPUs.
#include "gpu/kernels/token_parallel_tail.h"

namespace latent_moe::gpu {

cudaError_t prepare_token_parallel_tail() {
    return cudaErrorNotSupported;
}
TokenParallelShape shape_token_parallel_tail(std::int64_t hidden, std::int64_t latent, int world, std::int64_t) {
    return {hidden, latent, world, 0, 0};
}
std::int64_t token_parallel_region_bytes(const TokenParallelShape&) {
    return 0;
}
std::int64_t token_parallel_workspace_bytes(const TokenParallelShape&) {
    return 0;
}
cudaError_t reset_token_parallel_tail(void*, void*, const TokenParallelShape&, cudaStream_t) {
    return cudaErrorNotSupported;
}
TokenParallelPlan plan_token_parallel_tail(const TokenParallelShape&, std::int64_t, int, int) {
    return {};
}
cudaError_t token_parallel_tail(const TokenParallelTail&, cudaStream_t) {
    return cudaErrorNotSupported;
}

}  // namespace latent_moe::gpu

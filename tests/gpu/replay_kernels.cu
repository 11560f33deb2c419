#include "replay_kernels.h"

namespace latent_moe::test {
namespace {

__global__ void draw(std::uint16_t* to, std::int64_t count, std::uint32_t seed) {
    for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * blockDim.x) {
        std::uint32_t x = static_cast<std::uint32_t>(i) * 2654435761U ^ seed * 0x9e3779b9U;
        x ^= x >> 16, x *= 0x7feb352dU, x ^= x >> 15, x *= 0x846ca68bU, x ^= x >> 16;
        const float value = static_cast<float>(x >> 8) * (1.F / 8388608.F) - 1.F;
        to[i] = x % 61 == 0 ? 0x8000 : static_cast<std::uint16_t>(__float_as_uint(value) >> 16);
    }
}

__global__ void compare(const uint4* a, const uint4* b, std::int64_t units, unsigned long long* wrong) {
    unsigned mine = 0;
    for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < units;
         i += std::int64_t{gridDim.x} * blockDim.x) {
        const uint4 x = a[i], y = b[i];
        mine += x.x != y.x || x.y != y.y || x.z != y.z || x.w != y.w;
    }
    if (mine != 0) atomicAdd(wrong, static_cast<unsigned long long>(mine));
}

}  // namespace

cudaError_t draw_bf16(std::byte* to, std::int64_t count, std::uint32_t seed, cudaStream_t stream) {
    draw<<<264, 256, 0, stream>>>(reinterpret_cast<std::uint16_t*>(to), count, seed);
    return cudaGetLastError();
}

cudaError_t count_differences(const std::byte* a, const std::byte* b, std::int64_t bytes, unsigned long long* wrong,
                              cudaStream_t stream) {
    compare<<<132, 256, 0, stream>>>(reinterpret_cast<const uint4*>(a), reinterpret_cast<const uint4*>(b), bytes / 16,
                                     wrong);
    return cudaGetLastError();
}

}  // namespace latent_moe::test

#include "gpu/runtime/matmul.h"

#include <bit>

namespace latent_moe::gpu {

std::uint32_t matmul_alignment(const void* data, std::int64_t stride, Dtype dtype) {
    const std::uint64_t bits =
        reinterpret_cast<std::uintptr_t>(data) | static_cast<std::uint64_t>(stride) * bytes_of(dtype) | 16;
    return 1U << std::countr_zero(bits);
}

bool is_aligned(const MatmulOperands& o, std::int64_t k) {
    return matmul_alignment(o.w, k, o.in) == 16 && matmul_alignment(o.x, o.x_stride, o.in) == 16 &&
           (o.c == nullptr || matmul_alignment(o.c, o.c_stride, o.out) == 16) &&
           matmul_alignment(o.d, o.d_stride, o.out) == 16;
}

}  // namespace latent_moe::gpu

// CUDA's bf16 on the host, beside cuda_runtime.h.
#pragma once

#include <cstdint>

#include "core/numeric.h"

struct __nv_bfloat16 {
    std::uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 value) {
    return latent_moe::float_from_bf16(value.bits);
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    return {latent_moe::bf16_from_float(value)};
}

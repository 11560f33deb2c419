// One element of 16 bits, where rows of any alignment are taken: the vendors' types under CUDA's names.
#pragma once

#ifdef __HIP__

#include <hip/hip_fp16.h>

#include "scoped.h"

struct __nv_bfloat16 {
    std::uint16_t bits;
};
LATENT_MOE_DEVICE float __bfloat162float(__nv_bfloat16 value) {
    return latent_moe::gpu::as_float(std::uint32_t{value.bits} << 16);
}
LATENT_MOE_DEVICE __nv_bfloat16 __float2bfloat16_rn(float value) {
    return {static_cast<std::uint16_t>(latent_moe::gpu::hip::bf16_of(value))};
}

#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#endif

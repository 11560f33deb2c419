// CUDA's f16 on the host, beside cuda_runtime.h.
#pragma once

#include <cstdint>

#include "core/numeric.h"

struct __half {
    std::uint16_t bits;
};
inline float __half2float(__half value) {
    return latent_moe::float_from_f16(value.bits);
}
inline __half __float2half_rn(float value) {
    return {latent_moe::f16_from_float(value)};
}
inline __half __ushort_as_half(unsigned short bits) {
    return {bits};
}

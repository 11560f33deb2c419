// How a float32 sum of a product becomes an element of its output: what `finish_product` and `ordered_projection` share.
// Rows of any alignment.
#pragma once

#include "gpu/kernels/finish_product.h"
#include "gpu/primitives/numeric.h"
#include "gpu/primitives/scalar.h"

namespace latent_moe::gpu {

template <class T>
struct Number;
template <>
struct Number<__nv_bfloat16> {
    __device__ static float widen(__nv_bfloat16 v) { return __bfloat162float(v); }
    __device__ static __nv_bfloat16 round(float v) { return __float2bfloat16_rn(v); }
};
template <>
struct Number<__half> {
    __device__ static float widen(__half v) { return __half2float(v); }
    __device__ static __half round(float v) { return __float2half_rn(v); }
};
template <>
struct Number<float> {
    __device__ static float widen(float v) { return v; }
    __device__ static float round(float v) { return v; }
};

/// `op.sums` is not read, and its strides are those of the rows: never 0.
template <class T>
__device__ void finish_element(const FinishProduct& op, std::int64_t m, std::int64_t n, float sum) {
    using N = Number<T>;
    const float scale = op.column_scales != nullptr ? op.scale * op.column_scales[n] : op.scale;
    const float addend =
        op.addend.data != nullptr ? N::widen(static_cast<const T*>(op.addend.data)[m * op.addend.stride + n]) : 0;
    T value = N::round(fmaf(scale, sum, addend));
    if (op.prefix.data != nullptr) {
        value = N::round(N::widen(value) + N::widen(static_cast<const T*>(op.prefix.data)[m * op.prefix.stride + n]));
    }
    static_cast<T*>(op.out.data)[m * op.out.stride + n] = value;
}

/// With every stride written out.
inline FinishProduct with_strides(FinishProduct op) {
    for (std::int64_t* stride : {&op.addend.stride, &op.prefix.stride, &op.out.stride}) {
        if (*stride == 0) *stride = op.width;
    }
    return op;
}

}  // namespace latent_moe::gpu

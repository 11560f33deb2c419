// What every kernel of the skinny projection shares: its operands, and how a finished sum becomes an element of C.
#pragma once

#include "gpu/kernels/kernels.h"
#include "gpu/kernels/packed_layout.h"
#include "gpu/kernels/rows.h"
#include "gpu/primitives/numeric.h"

namespace latent_moe::gpu {

struct Projection {
    UnitRows a, addend, prefix, c;
    const char* packed;
    PackedLayout layout;
    const float* column_scales;
    float scale;
    int tokens;
};

/// False: the arguments cannot be right.
inline bool describe(const SkinnyProjection& op, Projection& p) {
    p = {.a = unit_rows(op.a, op.latent, op.dtype),
         .addend = unit_rows(op.addend, op.rows, op.dtype),
         .prefix = unit_rows(op.prefix, op.rows, op.dtype),
         .c = unit_rows(op.c, op.rows, op.dtype),
         .packed = static_cast<const char*>(op.packed),
         .layout = {op.rows, op.latent},
         .column_scales = op.column_scales,
         .scale = op.scale,
         .tokens = static_cast<int>(op.tokens)};
    return op.tokens >= 0 && op.tokens <= 64 && op.rows > 0 && op.rows % 8 == 0 && op.latent > 0 && op.latent % 8 == 0 &&
           p.packed != nullptr && aligned(p.a) && aligned(p.addend) && aligned(p.prefix) && aligned(p.c);
}

/// Two neighbouring columns of C, from their finished float32 sums.
template <Dtype dtype>
LATENT_MOE_DEVICE void finish(const Projection& p, int token, std::int64_t n, float (&sum)[2], std::uint32_t addend) {
    using E = Element<dtype>;
    const auto word = [&](const UnitRows& rows) {
        return reinterpret_cast<std::uint32_t*>(rows.data + token * rows.stride) + n / 2;
    };
    float term[2] = {};
    if (p.addend.data) E::unpack(addend, term);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float scale = p.column_scales ? p.scale * p.column_scales[n + i] : p.scale;
        sum[i] = fmaf(scale, sum[i], term[i]);
    }
    std::uint32_t result = E::pack(sum);
    if (p.prefix.data) {
        E::unpack(result, sum), E::unpack(*word(p.prefix), term);
        sum[0] += term[0], sum[1] += term[1];
        result = E::pack(sum);
    }
    *word(p.c) = result;
}

template <Dtype dtype>
LATENT_MOE_DEVICE std::uint32_t addend_at(const Projection& p, int token, std::int64_t n) {
    return p.addend.data ? reinterpret_cast<const std::uint32_t*>(p.addend.data + token * p.addend.stride)[n / 2] : 0;
}

}  // namespace latent_moe::gpu

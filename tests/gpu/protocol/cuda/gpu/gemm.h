// In place of src/gpu/gemm.h: the library's products, by plain loops of one thread.
//
//     D[m, n] = T(C[m, n] + alpha · Σ_k X[m, k] · W[n, k]), k in order
#pragma once

#include <cstdint>
#include <vector>

#include "core/matrix.h"
#include "cuda_runtime.h"
#include "gpu/primitives/numeric.h"
#include "latent_moe/bootstrap.h"
#include "latent_moe/tensor.h"

namespace latent_moe::gpu {

class Gemm {
public:
    struct Operands {
        const void* x;
        std::int64_t x_stride;
        const void* w;
        const void* c;
        std::int64_t c_stride;
        void* d;
        std::int64_t d_stride;
        std::int64_t m;
        std::int64_t n;
        Dtype in;
        Dtype out;
        float alpha;
    };

    explicit Gemm(std::int64_t k) : k_(k) {}
    void choose(const Bootstrap&, const std::vector<std::int64_t>&, std::int64_t, std::int64_t, Dtype) {}
    void prepare(std::int64_t, std::int64_t, std::int64_t, Dtype, Dtype) {}
    void acquire_workspace() {}
    void release_workspace() noexcept {}
    std::size_t workspace_bytes() const noexcept { return 0; }

    void run(const Operands& o, cudaStream_t stream) const {
        stream->launch_in_order({1, wave_size}, [&] {
            for (std::int64_t i = threadIdx.x; i < o.m * o.n; i += wave_size) {
                const std::int64_t m = i / o.n, n = i % o.n;
                float sum = 0;
                for (std::int64_t k = 0; k < k_; ++k)
                    sum += element(o.x, o.in, m * o.x_stride + k) * element(o.w, o.in, n * k_ + k);
                const float addend = o.c != nullptr ? element(o.c, o.out, m * o.c_stride + n) : 0;
                store(o.d, o.out, m * o.d_stride + n, std::fma(o.alpha, sum, addend));
            }
        });
    }

private:
    static float element(const void* data, Dtype dtype, std::int64_t i) {
        if (dtype == Dtype::f32) return static_cast<const float*>(data)[i];
        const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[i];
        return dtype == Dtype::bf16 ? float_from_bf16(bits) : float_from_f16(bits);
    }
    static void store(void* data, Dtype dtype, std::int64_t i, float value) {
        if (dtype == Dtype::f32) {
            static_cast<float*>(data)[i] = value;
        } else {
            static_cast<std::uint16_t*>(data)[i] = dtype == Dtype::bf16 ? bf16_from_float(value) : f16_from_float(value);
        }
    }

    std::int64_t k_;
};

}  // namespace latent_moe::gpu

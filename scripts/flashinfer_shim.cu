// FlashInfer's fused all-reduce + RMSNorm behind a plain C function, for scripts/bench-external. Only FlashInfer's headers
// are needed (from its wheel, unpacked), neither its Python package nor its just-in-time compiler:
//
//     nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -shared -Xcompiler -fPIC -cudart shared
//         --expt-relaxed-constexpr -I WHEEL/flashinfer/data/include -I WHEEL/flashinfer/data/spdlog/include
//         scripts/flashinfer_shim.cu -o libflashinfer_shim.so
#include <flashinfer/comm/trtllm_allreduce_fusion.cuh>

namespace fusion = flashinfer::trtllm_allreduce_fusion;
using Params = fusion::AllReduceFusionParams<__nv_bfloat16>;

namespace {

template <fusion::AllReduceFusionPattern pattern>
cudaError_t launch(const Params& params, bool dependent_launch) {
    switch (params.nranks) {
        case 2: return fusion::allreduce_fusion_kernel_launcher<pattern, __nv_bfloat16, 2, true>(params, dependent_launch);
        case 4: return fusion::allreduce_fusion_kernel_launcher<pattern, __nv_bfloat16, 4, true>(params, dependent_launch);
        case 8: return fusion::allreduce_fusion_kernel_launcher<pattern, __nv_bfloat16, 8, true>(params, dependent_launch);
        default: return cudaErrorNotSupported;
    }
}

}  // namespace

/// norm_out = RMSNorm(Σ in + residual) · gamma, residual_out = Σ in + residual; without gamma sum_out = Σ in. bf16.
extern "C" int latent_moe_flashinfer(int world, int rank, int tokens, int width, void** workspace, void* in, void* sum_out,
                                     void* residual_in, void* residual_out, void* norm_out, void* gamma, float epsilon,
                                     int one_shot, int dependent_launch, void* stream) {
    Params params{};
    params.nranks = world;
    params.rank = rank;
    params.size = tokens * width;
    params.hidden_dim = width;
    params.workspace = workspace;
    params.allreduce_in = in;
    params.allreduce_out = sum_out;
    params.residual_in = residual_in;
    params.residual_out = residual_out;
    params.norm_out = norm_out;
    params.rms_gamma = gamma;
    params.rms_eps = epsilon;
    params.use_oneshot = one_shot != 0;
    params.stream = static_cast<cudaStream_t>(stream);
    if (gamma == nullptr) {
        params.pattern = fusion::AllReduceFusionPattern::kAllReduce;
        return launch<fusion::AllReduceFusionPattern::kAllReduce>(params, dependent_launch != 0);
    }
    params.pattern = fusion::AllReduceFusionPattern::kARResidualRMSNorm;
    return launch<fusion::AllReduceFusionPattern::kARResidualRMSNorm>(params, dependent_launch != 0);
}

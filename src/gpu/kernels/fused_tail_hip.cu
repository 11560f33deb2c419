// The fused decode tail on AMD GPUs: its kernels and the host's side. What they do is in fused_tail_mfma.cuh.
#include <algorithm>
#include <cstring>

#include "gpu/kernels/fused_tail.h"
#include "gpu/kernels/fused_tail_mfma.cuh"
#include "gpu/primitives/launch.h"

namespace latent_moe::gpu {
namespace {

using fused_mfma::Params;

constexpr int waves = cta_threads(8 * static_cast<int>(wave_size)) / static_cast<int>(wave_size);
constexpr int threads = waves * static_cast<int>(wave_size);
constexpr int most_tokens = 64;  ///< of one kernel
constexpr int tile_columns = 16;

template <int tokens, int batch>
__global__ void __launch_bounds__(threads) fused(const Params p) {
    using Cta = fused_mfma::Cta<tokens, waves, batch>;
    LATENT_MOE_SHARED(typename Cta::Shared, shared);
    fused_mfma::tail<tokens, waves, batch>(p, shared);
}

__global__ void __launch_bounds__(256) reset(char* region, std::int64_t bytes) {
    for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < bytes / 16; i += gridDim.x * std::int64_t{256}) {
        store_relaxed(reinterpret_cast<uint4*>(region) + i,
                      i * 16 < fused_mfma::head_bytes ? uint4{} : fused_mfma::U::sentinel());
    }
    fence<Scope::system>();
}

using Kernel = void (*)(const Params);

template <int tokens>
Kernel kernel_for(int world) {
    switch (batch_for(world)) {
        case 2: return fused<tokens, 2>;
        case 4: return fused<tokens, 4>;
        default: return fused<tokens, 8>;
    }
}
Kernel kernel_for(int tokens, int world) {
    return tokens == 16 ? kernel_for<16>(world) : tokens == 32 ? kernel_for<32>(world) : kernel_for<64>(world);
}

bool valid(const FusedTailShape& s) {
    return s.world >= 1 && s.world <= max_ranks && s.hidden > 0 && s.hidden % (8 * s.world) == 0 && s.latent > 0 &&
           s.latent % 8 == 0 && s.hidden <= 1 << 20 && s.latent <= 1 << 20 && s.capacity >= 1 && s.capacity <= 1 << 16;
}

/// In units of 16 bytes.
struct RegionLayout {
    std::int64_t latent_box, column_box, slot;
    explicit RegionLayout(const FusedTailShape& s) {
        const auto round_up = [](std::int64_t units) { return (units + 7) / 8 * 8; };
        latent_box = round_up(s.capacity * s.latent / 8);
        column_box = round_up(s.capacity * (s.hidden / s.world) / 8);
        slot = (s.world - 1) * (latent_box + 2 * column_box);
    }
    std::int64_t bytes() const { return fused_mfma::head_bytes + slots * slot * 16; }
};

/// In bytes: latents, then squares.
struct WorkspaceLayout {
    std::int64_t latents, squares;
    explicit WorkspaceLayout(const FusedTailShape& s) {
        const std::int64_t rows = std::min(most_tokens, s.capacity);
        latents = rows * s.latent * 2;
        squares = rows * PackedLayout{1, s.latent}.blocks() * 4;
    }
};

}  // namespace

int fused_tail_grid(const FusedTailPlan& plan) {
    return plan.clusters + 1;  // and CTA 0
}

cudaError_t prepare_fused_tail() {
    int device = 0;
    cudaDeviceProp properties{};
    if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
    if (const cudaError_t e = cudaGetDeviceProperties(&properties, device); e != cudaSuccess) return e;
    const bool is_cdna =
        std::any_of(fused_tail_architectures.begin(), fused_tail_architectures.end(),
                    [&](const char* name) { return std::strncmp(properties.gcnArchName, name, std::strlen(name)) == 0; });
    if (!is_cdna) return cudaErrorNotSupported;
    cudaFuncAttributes attributes{};
    return cudaFuncGetAttributes(&attributes, fused<16, 2>);
}

cudaError_t fused_tail_fits(const FusedTailShape& shape, const FusedTailPlan& plan) {
    if (!valid(shape) || plan.clusters < 1 || fused_tail_grid(plan) > max_grid ||
        (plan.tokens != 16 && plan.tokens != 32 && plan.tokens != 64)) {
        return cudaErrorInvalidValue;
    }
    int device = 0, multiprocessors = 0, ctas = 0;
    if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
    if (const cudaError_t e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
        e != cudaSuccess)
        return e;
    const auto* kernel = reinterpret_cast<const void*>(kernel_for(plan.tokens, shape.world));
    if (const cudaError_t e = hipOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, threads, 0); e != cudaSuccess)
        return e;
    return ctas * multiprocessors >= fused_tail_grid(plan) ? cudaSuccess : cudaErrorLaunchOutOfResources;
}

cudaError_t fused_tail_plans(const FusedTailShape& shape, std::int64_t tokens, int max_ctas, bool float8,
                             std::vector<FusedTailPlan>* plans) {
    if (!valid(shape) || tokens < 0 || max_ctas < 2 || float8 || plans == nullptr) return cudaErrorInvalidValue;
    FusedTailPlan candidate;
    candidate.tokens = tokens <= 16 ? 16 : tokens <= 32 ? 32 : most_tokens;
    candidate.rows = tile_columns, candidate.split = 1;
    const int tiles = static_cast<int>((shape.hidden / shape.world + tile_columns - 1) / tile_columns);
    const int most = std::min(max_ctas, max_grid) - 1, turns = (tiles + most - 1) / most;
    candidate.clusters = (tiles + turns - 1) / turns;  // no more than the same number of turns needs
    if (const cudaError_t e = fused_tail_fits(shape, candidate); e != cudaSuccess) return e;
    *plans = {candidate};
    return cudaSuccess;
}

std::int64_t fused_tail_region_bytes(const FusedTailShape& shape) {
    return RegionLayout(shape).bytes();
}

std::int64_t fused_tail_workspace_bytes(const FusedTailShape& shape) {
    const WorkspaceLayout layout(shape);
    return layout.latents + layout.squares;
}

cudaError_t reset_fused_tail(void* region, void* /*workspace*/, const FusedTailShape& shape, cudaStream_t stream) {
    if (region == nullptr || !valid(shape)) return cudaErrorInvalidValue;
    return launch({.grid = 264, .block = 256, .stream = stream}, reset, static_cast<char*>(region),
                  RegionLayout(shape).bytes());
}

cudaError_t launch_fused_tail(const FusedTail& op, cudaStream_t stream) {
    const FusedTailShape& s = op.shape;
    if (!valid(s) || !valid(op.exchange) || op.exchange.window.world != s.world || op.region_offset % 128 != 0 ||
        op.region_offset < control_bytes || op.tokens < 0 || op.tokens > s.capacity || op.workspace == nullptr ||
        op.plan.tokens % 16 != 0 || op.plan.clusters < 1) {
        return cudaErrorInvalidValue;
    }
    const RegionLayout region(s);
    auto* workspace = static_cast<char*>(op.workspace);
    Params p{.exchange = op.exchange,
             .region = op.region_offset,
             .slot_bytes = region.slot * 16,
             .latent_box = region.latent_box,
             .column_box = region.column_box,
             .routed = unit_rows(op.routed, s.latent, Dtype::bf16),
             .shared = unit_rows(op.shared, s.hidden, Dtype::bf16),
             .prefix = unit_rows(op.prefix, s.hidden, Dtype::bf16),
             .out = unit_rows(op.out, s.hidden, Dtype::bf16),
             .weights = static_cast<const char*>(op.packed),
             .gamma = op.rms_norm ? static_cast<const char*>(op.gamma) : nullptr,
             .column_scales = op.column_scales,
             .latents = reinterpret_cast<uint4*>(workspace),
             .squares = reinterpret_cast<float*>(workspace + WorkspaceLayout(s).latents),
             .layout = {s.hidden / s.world, s.latent},
             .scale = op.scale,
             .epsilon = op.epsilon,
             .inverse_latent = 1.0F / static_cast<float>(s.latent),
             .tokens = 0,
             .latent_units = static_cast<int>(s.latent / 8),
             .column_units = static_cast<int>(s.hidden / s.world / 8),
             .rms_norm = op.rms_norm,
             .exchange_shared = op.shared.data != nullptr && !op.shared_is_sum && s.world > 1};
    if (op.tokens > 0 && (!p.routed || !p.out || !p.weights || !aligned(p.routed) || !aligned(p.shared) ||
                          !aligned(p.prefix) || !aligned(p.out) || reinterpret_cast<std::uintptr_t>(p.gamma) % 16 != 0)) {
        return cudaErrorInvalidValue;
    }
    std::int64_t done = 0;
    do {
        p.tokens = static_cast<int>(std::min<std::int64_t>(op.plan.tokens, op.tokens - done));
        const Launch how{.grid = op.tokens == 0 ? 2 : fused_tail_grid(op.plan), .block = threads, .stream = stream};
        if (const cudaError_t e = launch(how, kernel_for(op.plan.tokens, s.world), p); e != cudaSuccess) return e;
        for (UnitRows* rows : {&p.routed, &p.shared, &p.prefix, &p.out}) {
            if (*rows) rows->data += p.tokens * rows->stride;
        }
        done += p.tokens;
    } while (done < op.tokens);
    return cudaSuccess;
}

}  // namespace latent_moe::gpu

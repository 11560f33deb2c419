// W_up from plain rows to the packed layout: a thread moves 16 bytes.
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/packed_layout.h"
#include "gpu/kernels/rows.h"
#include "gpu/primitives/launch.h"

namespace latent_moe::gpu {
namespace {

__global__ void __launch_bounds__(256) pack(UnitRows w, PackedLayout layout, char* packed) {
    constexpr int block_units = PackedLayout::block_bytes / 16;
    const std::int64_t units = layout.bytes() / 16, step = std::int64_t{gridDim.x} * blockDim.x;
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < units; i += step) {
        const std::int64_t block = i / block_units,
                           n = block / layout.blocks() * PackedLayout::tile_rows + i % block_units / 8;
        const std::int64_t k = block % layout.blocks() * PackedLayout::block_columns + i % 8 * 8;
        uint4 value{};
        if (n < layout.rows && k < layout.latent) value = load16(w.data + n * w.stride + k * 2);
        store16(packed + layout.element(n, k), value);
    }
}

}  // namespace

cudaError_t pack_weights(const PackWeights& op, cudaStream_t stream) {
    const UnitRows w = unit_rows(op.w, op.latent, Dtype::bf16);
    const PackedLayout layout{op.rows, op.latent};
    if (op.rows <= 0 || op.latent <= 0 || op.latent % 8 != 0 || !w || !op.packed || !aligned(w))
        return cudaErrorInvalidValue;
    return launch({.grid = 1056, .block = 256, .stream = stream}, pack, w, layout, static_cast<char*>(op.packed));
}

}  // namespace latent_moe::gpu

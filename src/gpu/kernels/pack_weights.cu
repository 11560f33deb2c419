// W_up from plain rows to the packed layouts: a thread moves 16 bytes; of e4m3 it makes a word of four elements, and in a
// second kernel looks a whole row through. Once a layer, when it is added.
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/packed_float8.h"
#include "gpu/kernels/packed_layout.h"
#include "gpu/kernels/rows.h"
#include "gpu/primitives/launch.h"
#include "gpu/primitives/scalar.h"

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

__global__ void __launch_bounds__(256)
    pack_codes(const std::uint8_t* codes, PackedFloat8Layout layout, std::uint32_t* packed) {
    const std::int64_t words = layout.bytes() / 4, step = std::int64_t{gridDim.x} * blockDim.x;
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += step) {
        const auto [n, k] = layout.place(i);
        std::uint8_t rows[2][2] = {};
        for (int row = 0; row < 2; ++row) {
            if (n + 8 * row >= layout.rows || k >= layout.latent) continue;
            const std::uint8_t* from = codes + (n + 8 * row) * layout.latent + k;
            rows[row][0] = from[0], rows[row][1] = from[1];
        }
        packed[i] = pack_float8_word(rows[0], rows[1]);
    }
}

__global__ void __launch_bounds__(256)
    scales_of_rows(const std::uint8_t* codes, std::int64_t rows, std::int64_t latent, const float* given, float* scales) {
    const std::int64_t n = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (n >= rows) return;
    bool number = true;
    for (std::int64_t k = 0; k < latent; ++k) number = number && (codes[n * latent + k] & 0x7f) != 0x7f;
    scales[n] = number ? (given ? given[n] : 1.0F) : as_float(0x7fc00000);
}

}  // namespace

cudaError_t pack_weights(const PackWeights& op, cudaStream_t stream) {
    const UnitRows w = unit_rows(op.w, op.latent, Dtype::bf16);
    const PackedLayout layout{op.rows, op.latent};
    if (op.rows <= 0 || op.latent <= 0 || op.latent % 8 != 0 || !w || !op.packed || !aligned(w))
        return cudaErrorInvalidValue;
    return launch({.grid = 1056, .block = 256, .stream = stream}, pack, w, layout, static_cast<char*>(op.packed));
}

cudaError_t pack_float8_weights(const PackFloat8& op, cudaStream_t stream) {
    if (op.rows <= 0 || op.latent <= 0 || op.latent % 8 != 0 || !op.codes || !op.packed || !op.scales)
        return cudaErrorInvalidValue;
    const auto* codes = static_cast<const std::uint8_t*>(op.codes);
    const cudaError_t error = launch({.grid = 1056, .block = 256, .stream = stream}, pack_codes, codes,
                                     PackedFloat8Layout{op.rows, op.latent}, static_cast<std::uint32_t*>(op.packed));
    if (error != cudaSuccess) return error;
    return launch({.grid = static_cast<int>((op.rows + 255) / 256), .block = 256, .stream = stream}, scales_of_rows, codes,
                  op.rows, op.latent, op.row_scales, op.scales);
}

}  // namespace latent_moe::gpu

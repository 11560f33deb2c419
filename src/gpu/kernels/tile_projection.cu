// Many tokens times packed weights: a persistent grid of clusters of two. Nobody waits for another rank.
//
//     producer thread of each CTA   A and W, tile after tile, a ring of stages ahead (tile_product.cuh)
//     two warpgroups of each CTA    multiply; then addend and prefix in, output out, 16 bytes a lane, 128 bytes a row
//
// While one warpgroup is in its epilogue the other goes on with what the ring holds.
#include "gpu/kernels/tile_projection.h"

#include <algorithm>

#include "gpu/kernels/rows.h"
#include "gpu/kernels/tile_product.cuh"
#include "gpu/primitives/launch.h"
#include "gpu/primitives/numeric.h"
#include "gpu/primitives/tensor_map.h"

namespace latent_moe::gpu {
namespace {

using U = Unit<Dtype::bf16>;

struct Params {
    const char* packed;
    UnitRows addend, prefix, c;
    float scale;
    std::uint32_t tokens, rows, latent;
};

template <int tile_columns>
__global__ void __launch_bounds__(tile_threads, 1)
    project_tiles(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using Tile = TileProduct<tile_columns>;
    extern __shared__ char raw[];
    const Tile tile{.base = (shared_address(raw) + 1023) & ~1023u};
    const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / Tile::group_threads, 0);
    const int cta = static_cast<int>(cluster::rank());
    if (threadIdx.x == 0) {
        tile.init();
        mbarrier::publish_init();
        prefetch_tensor_map(&map);
    }
    __syncthreads();
    cluster::arrive();
    cluster::wait();

    const PackedLayout layout{p.rows, p.latent};
    const typename Tile::Weights weights{p.packed, static_cast<std::uint32_t>(layout.tiles()),
                                         static_cast<std::uint32_t>(layout.blocks())};
    const std::uint32_t column_tiles = (p.rows + tile_columns - 1) / tile_columns;
    const std::uint32_t tiles = (p.tokens + Tile::pair_rows - 1) / Tile::pair_rows * column_tiles;
    const std::uint32_t pair = blockIdx.x / 2, pairs = gridDim.x / 2;
    typename Tile::Place at;

    if (warpgroup == Tile::groups) {
        keep_few_registers();
        if (threadIdx.x == Tile::threads) {
            dependency_wait();
            for (std::uint32_t t = pair; t < tiles; t += pairs) {
                tile.load(at, t == pair, weights, t % column_tiles, cta, &map,
                          [&] { return static_cast<int>(t / column_tiles * Tile::pair_rows) + cta * Tile::cta_rows; });
            }
        }
    } else {
        take_many_registers();
        dependency_wait();
        const int group = warpgroup, thread = threadIdx.x % Tile::group_threads, warp = thread / 32, lane = thread % 32;
        typename Tile::Sums sums;
        for (std::uint32_t t = pair; t < tiles; t += pairs) {
            tile.multiply(at, weights.blocks, group, thread, sums);
            const std::uint32_t row = t / column_tiles * Tile::pair_rows + cta * Tile::cta_rows + group * Tile::group_rows +
                                      row_of_unit(0, 0, warp, lane);
            const std::uint32_t unit = (t % column_tiles * tile_columns + column_of_unit(0, lane)) / U::size;
            const auto valid = [&](int h, int g, int e) {
                return row + 8 * h + e < p.tokens && unit + 8 * g < p.rows / U::size;
            };
            struct Loaded {
                uint4 addend[2];
            };
            finish_in_passes<tile_columns, 2, Loaded>(
                sums, lane,
                [&](int h, int g, Loaded& loaded) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        if (!valid(h, g, e)) continue;
                        if (p.addend.data) loaded.addend[e] = load16(p.addend.at(row + 8 * h + e, unit + 8 * g));
                    }
                },
                [&](int h, int g, const Loaded& loaded, const float(&units)[2][U::size]) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        if (!valid(h, g, e)) continue;
                        float value[U::size] = {};
                        if (p.addend.data) U::unpack(loaded.addend[e], value);
#pragma unroll
                        for (int i = 0; i < U::size; ++i) value[i] = fmaf(p.scale, units[e][i], value[i]);
                        uint4 result = U::pack(value);
                        if (p.prefix.data) result = U::add(result, load16(p.prefix.at(row + 8 * h + e, unit + 8 * g)));
                        store16(p.c.at(row + 8 * h + e, unit + 8 * g), result);
                    }
                });
        }
    }
    cluster::arrive();  // nobody leaves while its neighbour may still arrive at its barriers
    cluster::wait();
#endif
}

int multiprocessors() {
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
}

}  // namespace

cudaError_t tile_projection(const TileProjection& op, cudaStream_t stream) {
    const UnitRows a = unit_rows(op.a, op.latent, Dtype::bf16);
    const Params p{.packed = static_cast<const char*>(op.packed),
                   .addend = unit_rows(op.addend, op.rows, Dtype::bf16),
                   .prefix = unit_rows(op.prefix, op.rows, Dtype::bf16),
                   .c = unit_rows(op.c, op.rows, Dtype::bf16),
                   .scale = op.scale,
                   .tokens = static_cast<std::uint32_t>(op.tokens),
                   .rows = static_cast<std::uint32_t>(op.rows),
                   .latent = static_cast<std::uint32_t>(op.latent)};
    if (op.tokens < 0 || op.tokens > INT32_MAX || op.rows <= 0 || op.rows % 8 != 0 || op.latent <= 0 || op.latent % 8 != 0 ||
        !op.packed || !p.c || !a || !aligned(a) || !aligned(p.addend) || !aligned(p.prefix) || !aligned(p.c)) {
        return cudaErrorInvalidValue;
    }
    if (op.tokens == 0) return cudaSuccess;
    CUtensorMap map;
    if (const cudaError_t error = describe_rows(map, a.data, op.tokens, op.latent, a.stride, 128); error != cudaSuccess)
        return error;
    const int ctas = (op.max_ctas > 0 ? op.max_ctas : multiprocessors()) / 2 * 2;
    const std::int64_t row_tiles = (op.tokens + 255) / 256;
    int columns = op.tile_columns;
    if (columns == 0) {  // fewer waves of the larger tiles, or what is quicker while one wave is not full
        const std::int64_t waves = (2 * row_tiles * ((op.rows + 255) / 256) + ctas - 1) / ctas;
        const std::int64_t narrow_waves = (2 * row_tiles * ((op.rows + 127) / 128) + ctas - 1) / ctas;
        columns = 57 * narrow_waves < 100 * waves ? 128 : 256;  // what a wave of either was measured to take
    }
    const std::int64_t tiles = row_tiles * ((op.rows + columns - 1) / columns);
    const auto go = [&](auto kernel, int shared) {
        shared += 1024;
        if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
            error != cudaSuccess)
            return error;
        const Launch how{.grid = static_cast<int>(std::min<std::int64_t>(2 * tiles, ctas)),
                         .block = tile_threads,
                         .cluster = 2,
                         .shared_bytes = shared,
                         .stream = stream};
        return launch(how, kernel, p, map);
    };
    return columns == 256 ? go(project_tiles<256>, TileProduct<256>::shared_bytes)
                          : go(project_tiles<128>, TileProduct<128>::shared_bytes);
}

}  // namespace latent_moe::gpu

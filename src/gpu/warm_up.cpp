#include "gpu/warm_up.h"

#include <algorithm>

#include "gpu/kernels/column_exchange.h"
#include "gpu/kernels/convert.h"
#include "gpu/kernels/finish_product.h"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/ordered_projection.h"
#include "gpu/kernels/packed_layout.h"
#include "gpu/kernels/row_exchange.h"
#include "gpu/kernels/sum_rows.h"

namespace latent_moe::gpu {
namespace {

constexpr std::int64_t rows = skinny_tokens;

void load_exchanges(const Shape& shape, const GpuLane::Parts& parts, const void* gamma, std::byte* data, FaultRecord* record,
                    cudaStream_t stream) {
    const DeviceMemory window(control_bytes, "loading of kernels");
    check(cudaMemsetAsync(window.get(), 0, window.bytes(), stream), "cudaMemsetAsync");
    check(cudaMemsetAsync(window.get(), 1, sizeof(Control::fault), stream), "cudaMemsetAsync");
    Exchange exchange = parts.exchange;
    exchange.record = record;
    std::fill_n(exchange.window.base, exchange.window.world, window.get());
    const Dtype dtype = shape.activations;
    for (const int stages : {1, 2}) {
        check(all_reduce({.exchange = exchange,
                          .x = {data},
                          .y = {data},
                          .tokens = 1,
                          .width = shape.latent,
                          .dtype = dtype,
                          .stages = stages,
                          .max_ctas = parts.max_ctas},
                         stream),
              "all-reduce kernel");
    }
    if (gamma != nullptr) {
        check(all_reduce_rms_norm({.exchange = exchange,
                                   .x = {data},
                                   .gamma = gamma,
                                   .y = {data},
                                   .tokens = 1,
                                   .width = shape.latent,
                                   .dtype = dtype,
                                   .max_ctas = parts.max_ctas},
                                  stream),
              "all-reduce + norm kernel");
    }
    // Without shared partials the kernel is the same; with as many rows as CTAs may be it is the one for many rows.
    if (shape.hidden % (std::int64_t{8} * exchange.window.world) == 0) {
        const std::int64_t own_width = shape.hidden / exchange.window.world;
        for (const std::int64_t tokens : {1, 2}) {
            check(reduce_for_columns({.exchange = exchange,
                                      .routed = {data},
                                      .gamma = gamma,
                                      .latent = {data},
                                      .tokens = tokens,
                                      .latent_width = shape.latent,
                                      .own_width = own_width,
                                      .dtype = dtype,
                                      .max_ctas = 2},
                                     stream),
                  "column exchange kernel");
        }
        check(gather_columns({.exchange = exchange,
                              .own = {data},
                              .y = {data},
                              .tokens = 1,
                              .own_width = own_width,
                              .dtype = dtype,
                              .max_ctas = parts.max_ctas},
                             stream),
              "column gather kernel");
    }
    OwnRows own{};
    for (int rank = 0; rank < exchange.window.world; ++rank) own.first[rank] = rank, own.count[rank] = 1;
    check(reduce_scatter({.exchange = exchange,
                          .x = {data},
                          .own = own,
                          .y = {data},
                          .width = shape.latent,
                          .dtype = dtype,
                          .max_ctas = parts.max_ctas},
                         stream),
          "reduce-scatter kernel");
    check(all_gather({.exchange = exchange,
                      .x = {data},
                      .own = own,
                      .y = {data},
                      .width = shape.latent,
                      .dtype = dtype,
                      .max_ctas = parts.max_ctas},
                     stream),
          "all-gather kernel");
    if (parts.bulk.slot_bytes > 0) {
        const ReduceScatter scatter{.exchange = exchange,
                                    .x = {data},
                                    .own = own,
                                    .y = {data},
                                    .width = shape.latent,
                                    .dtype = dtype,
                                    .max_ctas = parts.max_ctas};
        const AllGather all{.exchange = exchange,
                            .x = {data},
                            .own = own,
                            .y = {data},
                            .width = shape.latent,
                            .dtype = dtype,
                            .max_ctas = parts.max_ctas};
        check(bulk_all_reduce({.exchange = exchange,
                               .bulk = parts.bulk,
                               .x = {data},
                               .y = {data},
                               .tokens = 1,
                               .width = shape.latent,
                               .dtype = dtype,
                               .max_ctas = parts.max_ctas},
                              stream),
              "bulk all-reduce kernel");
        check(bulk_reduce_scatter(scatter, parts.bulk, stream), "reduce-scatter kernel");
        check(bulk_all_gather(all, parts.bulk, stream), "all-gather kernel");
    }
    check(cudaStreamSynchronize(stream), "loading of kernels");
}

void load_projections(const Shape& shape, std::int64_t n, const std::byte* x, std::byte* out, cudaStream_t stream) {
    if (shape.activations == Dtype::f32 || n % 8 != 0) return;
    const DeviceMemory packed(static_cast<std::size_t>(PackedLayout{n, shape.latent}.bytes()), "loading of kernels");
    check(cudaMemsetAsync(packed.get(), 0, packed.bytes(), stream), "cudaMemsetAsync");
    for (const std::int64_t tokens : {8, 16, 32, 64}) {
        check(skinny_projection({.a = {x},
                                 .packed = packed.get(),
                                 .c = {out},
                                 .tokens = tokens,
                                 .rows = n,
                                 .latent = shape.latent,
                                 .dtype = shape.activations},
                                stream),
              "projection kernel");
    }
    check(cudaStreamSynchronize(stream), "projection kernel");
}

}  // namespace

void warm_up(const Shape& shape, const GpuLane::Parts& parts, std::int64_t shard_rows, bool batch_invariant,
             FaultRecord* record, cudaStream_t stream) {
    const Dtype dtype = shape.activations;
    const std::int64_t widest = std::max(shape.hidden, shape.latent);
    const std::size_t matrix_bytes = static_cast<std::size_t>(rows * widest) * sizeof(float);
    const DeviceMemory data(3 * matrix_bytes, "loading of kernels");
    std::byte* const x = data.get();
    std::byte* const y = x + matrix_bytes;
    auto* const sums = reinterpret_cast<float*>(y + matrix_bytes);
    check(cudaMemsetAsync(data.get(), 0, data.bytes(), stream), "cudaMemsetAsync");

    check(add({.a = {x}, .b = {x}, .y = {y}, .tokens = 1, .width = shape.hidden, .dtype = dtype}, stream), "add kernel");
    check(fill_noise(x, dtype, rows * widest, stream), "noise kernel");
    check(widen_rows({x}, dtype, sums, Dtype::f32, 1, shape.latent, stream), "widening kernel");
    check(finish_product({.sums = sums, .out = {y}, .tokens = 1, .width = shape.latent, .dtype = dtype}, stream),
          "epilogue kernel");
    if (batch_invariant) {
        check(ordered_projection({.x = {x},
                                  .w = x,
                                  .weight_dtype = dtype,
                                  .latent = 8,
                                  .finish = {.out = {y}, .tokens = 1, .width = 8, .dtype = dtype}},
                                 stream),
              "projection kernel");
    }
    check(sum_rows({.x = {{x}}, .world = 1, .y = {y}, .tokens = 1, .width = shape.latent, .dtype = dtype}, stream),
          "sum kernel");
    const void* gamma = shape.norm == Norm::rms ? x : nullptr;
    if (gamma != nullptr) {
        check(rms_norm({.x = {x}, .gamma = gamma, .y = {y}, .tokens = 1, .width = shape.latent, .dtype = dtype}, stream),
              "norm kernel");
    }
    load_projections(shape, shape.hidden, x, y, stream);
    if (shard_rows != shape.hidden) load_projections(shape, shard_rows, x, y, stream);
    if (parts.exchange.window.world > 1) load_exchanges(shape, parts, gamma, y, record, stream);
    check(cudaStreamSynchronize(stream), "loading of kernels");
}

}  // namespace latent_moe::gpu

#include "gpu/product.h"

#include <algorithm>

#include "gpu/kernels/convert.h"
#include "gpu/kernels/finish_product.h"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/ordered_projection.h"
#include "gpu/views.h"
#include "latent_moe/status.h"

namespace latent_moe::gpu {
namespace {

constexpr std::int64_t most_float32_rows = 1024;

}  // namespace

Product::Product(const Shape& shape, const Bootstrap& bootstrap, std::int64_t block_tokens,
                 const std::vector<std::int64_t>& widths, bool batch_invariant)
    : shape_(shape), widths_(widths), float32_rows_(std::min(block_tokens, most_float32_rows)) {
    if (batch_invariant) return;
    gemm_.emplace(shape.latent);
    const std::int64_t least = shape.activations == Dtype::f32 ? 1 : skinny_tokens + 1;
    gemm_->choose(bootstrap, widths, least, block_tokens, shape.activations);
}

void Product::prepare(const GpuPackedLayer& layer) {
    if (!gemm_ || !layer.needs_float32_sums()) return;
    needs_sums_ = true;
    const Dtype dtype = layer.weights(WeightPart::shard).dtype;
    needs_widening_ |= dtype != shape_.activations;
    acquire_workspace();
    // With row scales alone the skinny kernel takes the small ones.
    const std::int64_t least = dtype == Dtype::f32 ? 1 : skinny_tokens + 1;
    for (const std::int64_t n : widths_) {
        if (least <= float32_rows_) gemm_->prepare(n, least, float32_rows_, dtype, Dtype::f32);
    }
}

void Product::acquire_workspace() {
    if (gemm_) gemm_->acquire_workspace();
    const auto rows = static_cast<std::size_t>(float32_rows_);
    if (needs_sums_ && sums_.get() == nullptr) {
        sums_ = DeviceMemory(rows * static_cast<std::size_t>(shape_.hidden) * sizeof(float), "float32 sums");
    }
    if (needs_widening_ && widened_.get() == nullptr) {
        widened_ = DeviceMemory(rows * static_cast<std::size_t>(shape_.latent) * sizeof(float), "widened activations");
    }
}

void Product::release_workspace() noexcept {
    if (gemm_) gemm_->release_workspace();
    sums_ = {};
    widened_ = {};
}

void Product::run(const ConstMatrix& x, const ProductWeights& weights, const Epilogue& epilogue, const Matrix& out,
                  const Matrix& spare, int early_ctas, cudaStream_t stream) {
    if (out.rows == 0) return;
    const bool aligned = is_aligned(x) && is_aligned(out) && is_aligned(epilogue.addend) && is_aligned(epilogue.prefix);
    if (weights.packed != nullptr && aligned && (out.rows <= skinny_tokens || !gemm_))
        return run_packed(x, weights, epilogue, out, early_ctas, stream);
    if (weights.packed != nullptr && !gemm_)  // a row's bits must not depend on where it lies either
        throw Error(StatusCode::unsupported, "a batch-invariant context takes rows that are aligned to 16 bytes");
    if (weights.plain == nullptr)
        throw Error(StatusCode::unsupported, "rows that are not aligned to 16 bytes need max_tokens above 64");
    if (!gemm_) {
        return check(ordered_projection({.x = rows_of(x),
                                         .w = weights.plain,
                                         .weight_dtype = weights.dtype,
                                         .latent = shape_.latent,
                                         .finish = {.scale = weights.scale,
                                                    .column_scales = weights.row_scales,
                                                    .addend = rows_of(epilogue.addend),
                                                    .prefix = rows_of(epilogue.prefix),
                                                    .out = writable(out),
                                                    .tokens = out.rows,
                                                    .width = out.columns,
                                                    .dtype = out.dtype}},
                                        stream),
                     "projection kernel");
    }
    if (weights.dtype != shape_.activations || weights.row_scales != nullptr)
        return run_in_float32(x, weights, epilogue, out, stream);

    const bool prefix_in_out = epilogue.prefix.present() && epilogue.prefix.data == out.data;
    const Matrix product = prefix_in_out ? spare.column_range(0, out.columns) : out;
    gemm_->run({.x = x.data,
                .x_stride = x.stride,
                .w = weights.plain,
                .c = epilogue.addend.data,
                .c_stride = epilogue.addend.stride,
                .d = product.data,
                .d_stride = product.stride,
                .m = out.rows,
                .n = weights.rows,
                .in = weights.dtype,
                .out = shape_.activations,
                .alpha = weights.scale},
               stream);
    if (!epilogue.prefix.present()) return;
    check(add({.a = rows_of(product),
               .b = rows_of(epilogue.prefix),
               .y = writable(out),
               .tokens = out.rows,
               .width = out.columns,
               .dtype = out.dtype},
              stream),
          "prefix kernel");
}

void Product::run_packed(const ConstMatrix& x, const ProductWeights& weights, const Epilogue& epilogue, const Matrix& out,
                         int early_ctas, cudaStream_t stream) const {
    for (std::int64_t first = 0; first < out.rows; first += skinny_tokens) {
        const std::int64_t count = std::min(skinny_tokens, out.rows - first);
        const int early = first == 0 ? early_ctas : 0;
        check(skinny_projection({.a = rows_of(x.row_range(first, count)),
                                 .packed = weights.packed,
                                 .addend = rows_of(epilogue.addend.row_range(first, count)),
                                 .prefix = rows_of(epilogue.prefix.row_range(first, count)),
                                 .c = writable(out.row_range(first, count)),
                                 .scale = weights.scale,
                                 .column_scales = weights.row_scales,
                                 .tokens = count,
                                 .rows = weights.rows,
                                 .latent = shape_.latent,
                                 .dtype = shape_.activations,
                                 .dependent_launch = early > 0,
                                 .early_ctas = early,
                                 .batch_invariant = !gemm_},
                                stream),
              "projection kernel");
    }
}

void Product::run_in_float32(const ConstMatrix& x, const ProductWeights& weights, const Epilogue& epilogue,
                             const Matrix& out, cudaStream_t stream) {
    auto* sums = reinterpret_cast<float*>(sums_.get());
    for (std::int64_t first = 0; first < out.rows; first += float32_rows_) {
        const std::int64_t count = std::min(float32_rows_, out.rows - first);
        ConstMatrix part = x.row_range(first, count);
        if (weights.dtype != part.dtype) {
            check(widen_rows(rows_of(part), part.dtype, widened_.get(), weights.dtype, count, shape_.latent, stream),
                  "widening kernel");
            part = {widened_.get(), count, shape_.latent, shape_.latent, weights.dtype};
        }
        gemm_->run({.x = part.data,
                    .x_stride = part.stride,
                    .w = weights.plain,
                    .c = nullptr,
                    .c_stride = 0,
                    .d = sums,
                    .d_stride = weights.rows,
                    .m = count,
                    .n = weights.rows,
                    .in = weights.dtype,
                    .out = Dtype::f32,
                    .alpha = 1.0F},
                   stream);
        check(finish_product({.sums = sums,
                              .scale = weights.scale,
                              .column_scales = weights.row_scales,
                              .addend = rows_of(epilogue.addend.row_range(first, count)),
                              .prefix = rows_of(epilogue.prefix.row_range(first, count)),
                              .out = writable(out.row_range(first, count)),
                              .tokens = count,
                              .width = out.columns,
                              .dtype = out.dtype},
                             stream),
              "epilogue kernel");
    }
}

}  // namespace latent_moe::gpu

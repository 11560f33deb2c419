#include "gpu/lane.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/partition.h"
#include "gpu/kernels/column_exchange.h"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/row_exchange.h"
#include "gpu/views.h"
#include "latent_moe/status.h"

namespace latent_moe::gpu {
namespace {

/// In the headers, where no tail is under way.
constexpr std::uint32_t no_tail = 255;

void require_aligned(const char* what, const ConstMatrix& matrix) {
    if (is_aligned(matrix)) return;
    throw Error(StatusCode::invalid_argument,
                fmt::format("{}: rows at {} with a stride of {} bytes, expected multiples of 16 on a GPU", what,
                            static_cast<const void*>(matrix.data), matrix.stride_bytes()));
}

OwnRows own_rows(std::span<const TokenRange> own) {
    OwnRows rows{};
    for (std::size_t rank = 0; rank < own.size(); ++rank) {
        rows.first[rank] = own[rank].first;
        rows.count[rank] = own[rank].count;
    }
    return rows;
}

std::int64_t bytes_of_rows(const ConstMatrix& matrix) noexcept {
    return matrix.rows * matrix.row_bytes();
}

/// Of what all ranks own together, as every rank counts it, whatever its own part is.
std::int64_t bytes_of_rows(const ConstMatrix& matrix, std::span<const TokenRange> own) noexcept {
    std::int64_t rows = 0;
    for (const TokenRange& range : own) rows += range.count;
    return rows * matrix.row_bytes();
}

}  // namespace

void GpuLane::set_call(cudaStream_t stream, const CallIdentity& identity, bool overlaps) noexcept {
    stream_ = stream;
    overlaps_ = overlaps;
    starts_early_ = overlaps && identity.starts_early;
    releases_early_ = overlaps && identity.releases_early;
    parts_.exchange.layer = static_cast<std::int32_t>(identity.layer);
    parts_.exchange.tail = identity.is_tail ? static_cast<std::uint32_t>(identity.tail) : no_tail;
}

bool GpuLane::through_nccl(std::int64_t bytes) const noexcept {
    return parts_.nccl != nullptr && (parts_.exchange.window.world == 0 || bytes >= parts_.nccl_from_bytes);
}

void GpuLane::all_reduce(Step step, const ConstMatrix& in, const Matrix& out, const ConstMatrix& prefix) {
    require_aligned(name(step), in);
    require_aligned(name(step), out);
    require_aligned("prefix", prefix);
    if (world_ == 1) {
        if (prefix.present()) return add(in, prefix, {}, out);
        if (in.data != out.data) copy(in, out);
        return;
    }
    if (through_nccl(bytes_of_rows(in))) {
        const bool prefix_in_out = prefix.present() && prefix.data == out.data;
        const Matrix sum = prefix_in_out ? parts_.spare.row_range(0, out.rows) : out;
        parts_.nccl->all_reduce(in, sum, stream_);
        if (prefix.present()) add(sum, prefix, {}, out);
        return;
    }
    if (in_bulk(bytes_of_rows(in))) return check(all_reduce_in_bulk(in, out, prefix), "bulk all-reduce kernel");
    check(gpu::all_reduce({.exchange = parts_.exchange,
                           .x = rows_of(in),
                           .y = writable(out),
                           .prefix = rows_of(prefix),
                           .tokens = in.rows,
                           .width = in.columns,
                           .dtype = in.dtype,
                           .stages = stages(bytes_of_rows(in)),
                           .max_ctas = max_ctas()},
                          stream_),
          "all-reduce kernel");
}

/// Two ranks send everything in one hop; for more, reduce-scatter and all-gather move less.
cudaError_t GpuLane::all_reduce_in_bulk(const ConstMatrix& in, const Matrix& out, const ConstMatrix& prefix) const {
    OwnRows own{};
    for (int rank = 0; rank < world_; ++rank) {
        const TokenRange range = even_part(in.rows, world_, rank);
        own.first[rank] = range.first;
        own.count[rank] = range.count;
    }
    return bulk_all_reduce({.exchange = parts_.exchange,
                            .bulk = parts_.bulk,
                            .x = rows_of(in),
                            .y = writable(out),
                            .prefix = rows_of(prefix),
                            .own = world_ == 2 ? nullptr : &own,
                            .tokens = in.rows,
                            .width = in.columns,
                            .dtype = in.dtype,
                            .max_ctas = max_ctas()},
                           stream_);
}

void GpuLane::all_reduce_norm(Step step, const ConstMatrix& in, const void* gamma, const Matrix& out) {
    const std::int64_t bytes = bytes_of_rows(in);
    if (world_ == 1 && gamma != nullptr) return normalise(gamma, in, out);
    if (gamma == nullptr || through_nccl(bytes) || stages(bytes) != 1) {
        all_reduce(step, in, out, {});
        if (gamma != nullptr) normalise(gamma, out, out);
        return;
    }
    require_aligned(name(step), in);
    require_aligned(name(step), out);
    // As many rows at a time as a slot holds.
    const std::int64_t slot_rows =
        parts_.exchange.slot_bytes / all_reduce_slot_bytes(world_, 1, 8, in.columns, in.dtype) * 8;
    std::int64_t first = 0;
    do {
        const std::int64_t count = std::min(slot_rows, in.rows - first);
        check(all_reduce_rms_norm({.exchange = parts_.exchange,
                                   .x = rows_of(in.row_range(first, count)),
                                   .gamma = gamma,
                                   .epsilon = shape_.epsilon,
                                   .y = writable(out.row_range(first, count)),
                                   .tokens = count,
                                   .width = in.columns,
                                   .dtype = in.dtype,
                                   .max_ctas = max_ctas()},
                                  stream_),
              "all-reduce + norm kernel");
        first += count;
    } while (first < in.rows);
}

void GpuLane::reduce_scatter(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const Matrix& out) {
    require_aligned(name(step), in);
    require_aligned(name(step), out);
    const TokenRange mine = own[static_cast<std::size_t>(rank_)];
    if (world_ == 1) return copy(in.row_range(mine.first, mine.count), out);
    if (through_nccl(bytes_of_rows(in, own))) return parts_.nccl->reduce_scatter(in, own, out, stream_);
    const ReduceScatter op{.exchange = parts_.exchange,
                           .x = rows_of(in),
                           .own = own_rows(own),
                           .y = writable(out),
                           .width = in.columns,
                           .dtype = in.dtype,
                           .max_ctas = max_ctas()};
    const bool bulk = in_bulk(bytes_of_rows(in, own));
    check(bulk ? bulk_reduce_scatter(op, parts_.bulk, stream_) : gpu::reduce_scatter(op, stream_), "reduce-scatter kernel");
}

void GpuLane::reduce_scatter_norm(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const void* gamma,
                                  const Matrix& out) {
    reduce_scatter(step, in, own, out);
    if (gamma != nullptr) normalise(gamma, out, out);
}

void GpuLane::all_gather(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const Matrix& out) {
    require_aligned(name(step), in);
    require_aligned(name(step), out);
    const TokenRange mine = own[static_cast<std::size_t>(rank_)];
    if (world_ == 1) {
        const Matrix rows = out.row_range(mine.first, mine.count);
        if (rows.data != in.data) copy(in, rows);
        return;
    }
    if (through_nccl(bytes_of_rows(in, own))) return parts_.nccl->all_gather(in, own, out, stream_);
    const AllGather op{.exchange = parts_.exchange,
                       .x = rows_of(in),
                       .own = own_rows(own),
                       .y = writable(out),
                       .width = out.columns,
                       .dtype = out.dtype,
                       .max_ctas = max_ctas()};
    const bool bulk = in_bulk(bytes_of_rows(in, own));
    check(bulk ? bulk_all_gather(op, parts_.bulk, stream_) : gpu::all_gather(op, stream_), "all-gather kernel");
}

bool GpuLane::cuts_columns(const ConstMatrix& own) const noexcept {
    return parts_.exchange.window.world != 0 && own.columns % 8 == 0;
}

void GpuLane::reduce_for_columns(Step step, const ConstMatrix& routed, const void* gamma, const Matrix& latent,
                                 const ConstMatrix& shared, std::span<const TokenRange> columns, const Matrix& own) {
    if (world_ > 1 && cuts_columns(own)) {
        for (const ConstMatrix& each : {routed, ConstMatrix(latent), shared, ConstMatrix(own)})
            require_aligned(name(step), each);
        return check(gpu::reduce_for_columns({.exchange = parts_.exchange,
                                              .routed = rows_of(routed),
                                              .gamma = gamma,
                                              .epsilon = shape_.epsilon,
                                              .latent = writable(latent),
                                              .shared = rows_of(shared),
                                              .own = writable(own),
                                              .tokens = routed.rows,
                                              .latent_width = routed.columns,
                                              .own_width = own.columns,
                                              .dtype = routed.dtype,
                                              .max_ctas = max_ctas(),
                                              .starts_early = takes_early_start(),
                                              .releases_early = overlaps_},
                                             stream_),
                     "column exchange kernel");
    }
    all_reduce_norm(step, routed, gamma, latent);
    if (shared.present()) reduce_columns(Step::reduce_shared, shared, columns, own);
}

void GpuLane::reduce_columns(Step step, const ConstMatrix& shared, std::span<const TokenRange> columns, const Matrix& own) {
    const TokenRange mine = columns[static_cast<std::size_t>(rank_)];
    if (world_ == 1) {
        if (own.data != shared.data) copy(shared, own);
    } else if (cuts_columns(own)) {
        for (const ConstMatrix& each : {shared, ConstMatrix(own)}) require_aligned(name(step), each);
        check(gpu::reduce_for_columns({.exchange = parts_.exchange,
                                       .shared = rows_of(shared),
                                       .own = writable(own),
                                       .tokens = shared.rows,
                                       .own_width = own.columns,
                                       .dtype = shared.dtype,
                                       .max_ctas = max_ctas(),
                                       .starts_early = takes_early_start()},
                                      stream_),
              "column exchange kernel");
    } else if (parts_.exchange.window.world == 0) {
        parts_.nccl->reduce_columns(shared, columns, own, stream_);
    } else {  // columns that 16-byte units do not cut: all of them, of which this rank keeps its own
        const Matrix sum = parts_.spare.row_range(0, shared.rows);
        all_reduce(step, shared, sum, {});
        copy_odd(sum.column_range(mine.first, mine.count), own);
    }
}

void GpuLane::gather_columns(Step step, const ConstMatrix& own, std::span<const TokenRange> columns, const Matrix& out,
                             const ConstMatrix& prefix) {
    const TokenRange mine = columns[static_cast<std::size_t>(rank_)];
    if (world_ > 1 && cuts_columns(own)) {
        for (const ConstMatrix& each : {own, ConstMatrix(out), prefix}) require_aligned(name(step), each);
        return check(gpu::gather_columns({.exchange = parts_.exchange,
                                          .own = rows_of(own),
                                          .prefix = rows_of(prefix),
                                          .y = writable(out),
                                          .tokens = out.rows,
                                          .own_width = own.columns,
                                          .dtype = out.dtype,
                                          .max_ctas = max_ctas(),
                                          .starts_early = takes_early_start(),
                                          .releases_early = releases_early_},
                                         stream_),
                     "column gather kernel");
    }
    if (world_ == 1) {
        if (prefix.present()) return add(own, prefix, {}, out);
        if (own.data != out.data) copy(own, out);
        return;
    }
    const Matrix whole = parts_.spare.row_range(0, out.rows);
    if (parts_.exchange.window.world == 0) {
        const bool through_spare = prefix.present() && prefix.data == out.data;
        const Matrix gathered = through_spare ? whole : out;
        parts_.nccl->gather_columns(own, columns, gathered, stream_);
        if (prefix.present()) add(gathered, prefix, {}, out);
        return;
    }
    fill_zero(whole);  // a sum in which every column has one summand
    copy_odd(own, whole.column_range(mine.first, mine.count));
    all_reduce(step, whole, out, prefix);
}

/// Rows of any width and alignment.
void GpuLane::copy_odd(const ConstMatrix& in, const Matrix& out) {
    if (out.rows == 0) return;
    check(cudaMemcpy2DAsync(out.data, static_cast<std::size_t>(out.stride_bytes()), in.data,
                            static_cast<std::size_t>(in.stride_bytes()), static_cast<std::size_t>(out.row_bytes()),
                            static_cast<std::size_t>(out.rows), cudaMemcpyDeviceToDevice, stream_),
          "copy of columns");
}

void GpuLane::normalise(const void* gamma, const ConstMatrix& in, const Matrix& out) {
    if (out.rows == 0) return;
    check(rms_norm({.x = rows_of(in),
                    .gamma = gamma,
                    .epsilon = shape_.epsilon,
                    .y = writable(out),
                    .tokens = in.rows,
                    .width = in.columns,
                    .dtype = in.dtype},
                   stream_),
          "norm kernel");
}

void GpuLane::project(const ConstMatrix& x, const PackedLayer& layer, WeightPart part, const Epilogue& epilogue,
                      const Matrix& out) {
    parts_.product->run(x, static_cast<const GpuPackedLayer&>(layer).weights(part), epilogue, out,
                        parts_.spare.row_range(0, out.rows), takes_early_start() ? max_ctas() : 0, stream_);
}

void GpuLane::add(const ConstMatrix& a, const ConstMatrix& b, const ConstMatrix& prefix, const Matrix& out) {
    if (out.rows == 0) return;
    check(gpu::add({.a = rows_of(a),
                    .b = rows_of(b),
                    .prefix = rows_of(prefix),
                    .y = writable(out),
                    .tokens = out.rows,
                    .width = out.columns,
                    .dtype = out.dtype},
                   stream_),
          "add kernel");
}

void GpuLane::copy(const ConstMatrix& in, const Matrix& out) {
    if (out.rows == 0) return;
    check(copy_rows(rows_of(in), writable(out), out.rows, out.columns, out.dtype, stream_), "copy kernel");
}

void GpuLane::fill_zero(const Matrix& out) {
    if (out.rows == 0) return;
    check(zero_rows(writable(out), out.rows, out.columns, out.dtype, stream_), "zero kernel");
}

}  // namespace latent_moe::gpu

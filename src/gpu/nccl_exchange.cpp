#include "gpu/nccl_exchange.h"

#include <algorithm>
#include <array>

#include "core/partition.h"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/sum_rows.h"
#include "gpu/views.h"

namespace latent_moe::gpu {
namespace {

ncclDataType_t type_of(Dtype dtype) {
    switch (dtype) {
        case Dtype::bf16: return ncclBfloat16;
        case Dtype::f16: return ncclFloat16;
        default: return ncclFloat32;
    }
}

bool is_contiguous(const ConstMatrix& matrix) {
    return matrix.stride == matrix.columns;
}
std::size_t elements(const ConstMatrix& matrix) {
    return static_cast<std::size_t>(matrix.rows * matrix.columns);
}

void copy(const ConstMatrix& from, const Matrix& to, cudaStream_t stream) {
    check(copy_rows(rows_of(from), writable(to), from.rows, from.columns, from.dtype, stream), "copy kernel");
}

/// NCCL's operations between construction and `end` leave together.
class Group {
public:
    Group() { check(nccl().GroupStart(), "ncclGroupStart"); }
    void end() {
        ended_ = true;
        check(nccl().GroupEnd(), "ncclGroupEnd");
    }
    ~Group() {
        if (!ended_) static_cast<void>(nccl().GroupEnd());
    }

private:
    bool ended_ = false;
};

}  // namespace

NcclExchange::NcclExchange(NcclCommunicator& communicator, const Shape& shape, int rank, int world,
                           std::int64_t block_tokens, bool all_sums_ours)
    : communicator_(communicator),
      shape_(shape),
      rank_(rank),
      world_(world),
      block_tokens_(block_tokens),
      all_sums_ours_(all_sums_ours) {
    acquire_workspace();
}

void NcclExchange::acquire_workspace() {
    const auto row = static_cast<std::size_t>(std::max(shape_.hidden, shape_.latent)) * bytes_of(shape_.activations);
    const auto rows = static_cast<std::size_t>(block_tokens_ * world_);
    if (staging_.get() == nullptr) staging_ = DeviceMemory(rows * row, "NCCL staging");
    if (received_.get() == nullptr) received_ = DeviceMemory(rows * row, "NCCL staging");
}

void NcclExchange::connect(cudaStream_t stream) {
    check(cudaMemsetAsync(staging_.get(), 0, staging_.bytes(), stream), "cudaMemsetAsync");
    const std::int64_t width = std::max(shape_.hidden, shape_.latent);
    const Matrix all{staging_.get(), block_tokens_, width, width, shape_.activations};
    std::array<TokenRange, max_world> parts;
    const std::span<const TokenRange> own(parts.data(), static_cast<std::size_t>(world_));
    for (std::int64_t rows = 1; rows > 0; rows = rows < block_tokens_ ? std::min(16 * rows, block_tokens_) : 0) {
        const Matrix some = all.row_range(0, rows);
        all_reduce(some, some, stream);
        for (int rank = 0; rank < world_; ++rank) parts[static_cast<std::size_t>(rank)] = even_part(rows, world_, rank);
        const TokenRange mine = own[static_cast<std::size_t>(rank_)];
        const Matrix sum = some.row_range(mine.first, mine.count);
        reduce_scatter(some, own, sum, stream);
        all_gather(sum, own, some, stream);
    }
    check(cudaStreamSynchronize(stream), "NCCL's first collectives");
}

void NcclExchange::release_workspace() noexcept {
    staging_ = {};
    received_ = {};
}

Matrix NcclExchange::staging(const ConstMatrix& like, std::int64_t first, std::int64_t count) const {
    return Matrix{staging_.get(), 0, like.columns, like.columns, like.dtype}.row_range(first, count);
}

void NcclExchange::all_reduce(const ConstMatrix& in, const Matrix& out, cudaStream_t stream) {
    if (in.rows == 0) return;
    if (world_ == 2 && !all_sums_ours_) {
        const Matrix staged = staging(in, 0, in.rows);
        if (!is_contiguous(in)) copy(in, staged, stream);
        const ConstMatrix from = is_contiguous(in) ? in : staged;
        const Matrix to = is_contiguous(out) ? out : staged;
        communicator_.before(stream);
        check(nccl().AllReduce(from.data, to.data, elements(from), type_of(in.dtype), ncclSum, communicator_.get(), stream),
              "ncclAllReduce");
        communicator_.after(stream);
        if (to.data != out.data) copy(to, out, stream);
        return;
    }
    std::array<TokenRange, max_world> parts;
    for (int rank = 0; rank < world_; ++rank) parts[static_cast<std::size_t>(rank)] = even_part(in.rows, world_, rank);
    const std::span<const TokenRange> own(parts.data(), static_cast<std::size_t>(world_));
    const TokenRange mine = own[static_cast<std::size_t>(rank_)];
    const Matrix sum = out.row_range(mine.first, mine.count);
    reduce_scatter(in, own, sum, stream);
    all_gather(sum, own, out, stream);
}

void NcclExchange::reduce_scatter(const ConstMatrix& in, std::span<const TokenRange> own, const Matrix& out,
                                  cudaStream_t stream) {
    const TokenRange mine = own[static_cast<std::size_t>(rank_)];
    const auto block = static_cast<std::size_t>(mine.count * in.row_bytes());
    std::array<ConstMatrix, max_world> parts;
    std::int64_t staged = 0;
    for (std::size_t peer = 0; peer < own.size(); ++peer) {
        parts[peer] = in.row_range(own[peer].first, own[peer].count);
        if (is_contiguous(in) || static_cast<int>(peer) == rank_ || own[peer].count == 0) continue;
        const Matrix compact = staging(in, staged, own[peer].count);
        copy(parts[peer], compact, stream);
        parts[peer] = compact;
        staged += own[peer].count;
    }
    communicator_.before(stream);
    Group group;
    for (int peer = 0; peer < world_; ++peer) {
        if (peer == rank_) continue;
        const ConstMatrix& part = parts[static_cast<std::size_t>(peer)];
        if (part.rows > 0)
            check(nccl().Send(part.data, elements(part), type_of(in.dtype), peer, communicator_.get(), stream), "ncclSend");
        if (mine.count > 0) {
            check(nccl().Recv(received_.get() + static_cast<std::size_t>(peer) * block, block / bytes_of(in.dtype),
                              type_of(in.dtype), peer, communicator_.get(), stream),
                  "ncclRecv");
        }
    }
    group.end();
    communicator_.after(stream);
    if (mine.count == 0) return;
    SumRows sum{.world = world_, .y = writable(out), .tokens = mine.count, .width = in.columns, .dtype = in.dtype};
    for (int peer = 0; peer < world_; ++peer) {
        sum.x[peer] = peer == rank_ ? rows_of(parts[static_cast<std::size_t>(peer)])
                                    : ConstRows(received_.get() + static_cast<std::size_t>(peer) * block);
    }
    check(sum_rows(sum, stream), "sum kernel");
}

void NcclExchange::reduce_columns(const ConstMatrix& in, std::span<const TokenRange> columns, const Matrix& out,
                                  cudaStream_t stream) {
    if (in.rows == 0) return;
    // A rank's columns, row behind row, are what it gets as if they were rows.
    std::array<ConstMatrix, max_world> parts;
    std::byte* compact = staging_.get();
    for (std::size_t peer = 0; peer < columns.size(); ++peer) {
        parts[peer] = in.column_range(columns[peer].first, columns[peer].count);
        if (static_cast<int>(peer) == rank_) continue;
        const Matrix to{compact, in.rows, columns[peer].count, columns[peer].count, in.dtype};
        copy(parts[peer], to, stream);
        parts[peer] = to;
        compact += to.rows * to.row_bytes();
    }
    const auto block = static_cast<std::size_t>(out.rows * out.row_bytes());
    communicator_.before(stream);
    Group group;
    for (int peer = 0; peer < world_; ++peer) {
        if (peer == rank_) continue;
        const ConstMatrix& part = parts[static_cast<std::size_t>(peer)];
        check(nccl().Send(part.data, elements(part), type_of(in.dtype), peer, communicator_.get(), stream), "ncclSend");
        check(nccl().Recv(received_.get() + static_cast<std::size_t>(peer) * block, block / bytes_of(in.dtype),
                          type_of(in.dtype), peer, communicator_.get(), stream),
              "ncclRecv");
    }
    group.end();
    communicator_.after(stream);
    SumRows sum{.world = world_, .y = writable(out), .tokens = out.rows, .width = out.columns, .dtype = in.dtype};
    for (int peer = 0; peer < world_; ++peer) {
        sum.x[peer] = peer == rank_ ? rows_of(parts[static_cast<std::size_t>(peer)])
                                    : ConstRows(received_.get() + static_cast<std::size_t>(peer) * block);
    }
    check(sum_rows(sum, stream), "sum kernel");
}

void NcclExchange::gather_columns(const ConstMatrix& in, std::span<const TokenRange> columns, const Matrix& out,
                                  cudaStream_t stream) {
    if (in.rows == 0) return;
    std::array<Matrix, max_world> parts;
    std::byte* compact = staging_.get();
    for (std::size_t peer = 0; peer < columns.size(); ++peer) {
        parts[peer] = {compact, out.rows, columns[peer].count, columns[peer].count, out.dtype};
        compact += parts[peer].rows * parts[peer].row_bytes();
    }
    const Matrix& sent = parts[static_cast<std::size_t>(rank_)];
    copy(in, sent, stream);
    communicator_.before(stream);
    Group group;
    for (int peer = 0; peer < world_; ++peer) {
        if (peer == rank_) continue;
        const Matrix& theirs = parts[static_cast<std::size_t>(peer)];
        check(nccl().Send(sent.data, elements(sent), type_of(in.dtype), peer, communicator_.get(), stream), "ncclSend");
        check(nccl().Recv(theirs.data, elements(theirs), type_of(in.dtype), peer, communicator_.get(), stream), "ncclRecv");
    }
    group.end();
    communicator_.after(stream);
    for (std::size_t peer = 0; peer < columns.size(); ++peer) {
        const Matrix to = out.column_range(columns[peer].first, columns[peer].count);
        if (to.data != in.data) copy(parts[peer], to, stream);
    }
}

void NcclExchange::all_gather(const ConstMatrix& in, std::span<const TokenRange> own, const Matrix& out,
                              cudaStream_t stream) {
    const TokenRange mine = own[static_cast<std::size_t>(rank_)];
    std::array<Matrix, max_world> parts;  // where each rank's rows are sent from or received
    std::int64_t staged = 0;
    for (std::size_t peer = 0; peer < own.size(); ++peer) {
        parts[peer] =
            is_contiguous(out) ? out.row_range(own[peer].first, own[peer].count) : staging(out, staged, own[peer].count);
        staged += own[peer].count;
    }
    const Matrix& sent = parts[static_cast<std::size_t>(rank_)];
    if (in.data != sent.data && mine.count > 0) copy(in, sent, stream);
    communicator_.before(stream);
    Group group;
    for (int peer = 0; peer < world_; ++peer) {
        if (peer == rank_) continue;
        const Matrix& theirs = parts[static_cast<std::size_t>(peer)];
        if (mine.count > 0)
            check(nccl().Send(sent.data, elements(sent), type_of(in.dtype), peer, communicator_.get(), stream), "ncclSend");
        if (theirs.rows > 0) {
            check(nccl().Recv(theirs.data, elements(theirs), type_of(in.dtype), peer, communicator_.get(), stream),
                  "ncclRecv");
        }
    }
    group.end();
    communicator_.after(stream);
    if (is_contiguous(out)) return;
    for (std::size_t peer = 0; peer < own.size(); ++peer) {
        if (own[peer].count > 0) copy(parts[peer], out.row_range(own[peer].first, own[peer].count), stream);
    }
}

}  // namespace latent_moe::gpu

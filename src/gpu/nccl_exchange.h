// The collectives where ranks have no peer window, or are so large that NCCL moves them faster: NCCL carries the bytes, the
// sums stay ours. A sum of two summands has only one order, so two ranks use NCCL's own all-reduce; how often that rounds
// may depend on the size, so not in a batch-invariant context.
//
//     all-reduce = reduce-scatter by rows (send and receive, then Σ in rank order) + all-gather by rows
//
// NCCL cannot say whether the ranks are in the same call: nothing here compares headers.
#pragma once

#include <span>

#include "core/matrix.h"
#include "gpu/nccl_communicator.h"
#include "gpu/runtime/resources.h"
#include "latent_moe/context.h"
#include "latent_moe/shape.h"

namespace latent_moe::gpu {

class NcclExchange {
public:
    /// `all_sums_ours`: NCCL's own all-reduce is not used.
    NcclExchange(NcclCommunicator& communicator, const Shape& shape, int rank, int world, std::int64_t block_tokens,
                 bool all_sums_ours);

    void acquire_workspace();
    /// One small to large collective of each kind. NCCL connects peers when a collective first needs it, which a capture
    /// does not allow ("operation not permitted when stream is capturing"). By all ranks; waits for the end.
    void connect(cudaStream_t stream);
    void release_workspace() noexcept;
    std::size_t workspace_bytes() const noexcept { return staging_.bytes() + received_.bytes(); }

    /// As in `Lane`, without the prefix.
    void all_reduce(const ConstMatrix& in, const Matrix& out, cudaStream_t stream);
    void reduce_scatter(const ConstMatrix& in, std::span<const TokenRange> own, const Matrix& out, cudaStream_t stream);
    void all_gather(const ConstMatrix& in, std::span<const TokenRange> own, const Matrix& out, cudaStream_t stream);

    void reduce_columns(const ConstMatrix& in, std::span<const TokenRange> columns, const Matrix& out, cudaStream_t stream);
    void gather_columns(const ConstMatrix& in, std::span<const TokenRange> columns, const Matrix& out, cudaStream_t stream);

private:
    Matrix staging(const ConstMatrix& like, std::int64_t first, std::int64_t count) const;

    NcclCommunicator& communicator_;
    Shape shape_;
    int rank_;
    int world_;
    std::int64_t block_tokens_;
    bool all_sums_ours_;
    DeviceMemory staging_;   // [block tokens · ranks, widest]: a token-parallel block is cut from every rank's tokens
    DeviceMemory received_;  // every rank's summand of this rank's rows
};

}  // namespace latent_moe::gpu

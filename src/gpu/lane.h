// One stream's operations: which kernel or library call does each.
#pragma once

#include <cstdint>
#include <span>
#include <utility>

#include "core/matrix.h"
#include "gpu/kernels/bulk_exchange.h"
#include "gpu/nccl_exchange.h"
#include "gpu/primitives/window.h"
#include "gpu/product.h"
#include "latent_moe/shape.h"
#include "tails/backend.h"

namespace latent_moe::gpu {

class GpuLane final : public Lane {
public:
    struct Parts {
        Exchange exchange = {};                    ///< without a peer window its world is 0
        Bulk bulk;                                 ///< behind the mailboxes in the window
        std::int64_t bulk_from_bytes = INT64_MAX;  ///< summands at least this large go in bulk
        std::int64_t one_stage_bytes = INT64_MAX;  ///< summands up to this size go to every rank in one hop
        int max_ctas = 64;                         ///< of a kernel that waits for peers, beside the other lane's
        int max_ctas_alone = 64;                   ///< of such a kernel while the other lane has none
        NcclExchange* nccl = nullptr;              ///< null: everything goes through the window
        std::int64_t nccl_from_bytes = 0;          ///< summands at least this large go through NCCL
        Product* product = nullptr;                ///< null on a lane that only reduces
        Matrix spare;                              ///< [block tokens, hidden]
    };

    GpuLane(const Shape& shape, int rank, int world, const Parts& parts)
        : shape_(shape), rank_(rank), world_(world), parts_(parts) {}

    /// `overlaps`: kernels of a call may wait on the device for those before them.
    void set_call(cudaStream_t stream, const CallIdentity& identity, bool overlaps) noexcept;
    cudaStream_t stream() const noexcept { return stream_; }
    const Parts& parts() const noexcept { return parts_; }
    /// Whether the other lane may have a kernel that waits for peers too.
    void set_beside(bool beside) noexcept { beside_ = beside; }

    void all_reduce(Step step, const ConstMatrix& in, const Matrix& out, const ConstMatrix& prefix) override;
    void all_reduce_norm(Step step, const ConstMatrix& in, const void* gamma, const Matrix& out) override;
    void reduce_scatter(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const Matrix& out) override;
    void reduce_scatter_norm(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const void* gamma,
                             const Matrix& out) override;
    void all_gather(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const Matrix& out) override;
    void reduce_for_columns(Step step, const ConstMatrix& routed, const void* gamma, const Matrix& latent,
                            const ConstMatrix& shared, std::span<const TokenRange> columns, const Matrix& own) override;
    void reduce_columns(Step step, const ConstMatrix& shared, std::span<const TokenRange> columns,
                        const Matrix& own) override;
    void gather_columns(Step step, const ConstMatrix& own, std::span<const TokenRange> columns, const Matrix& out,
                        const ConstMatrix& prefix) override;
    void project(const ConstMatrix& x, const PackedLayer& layer, WeightPart part, const Epilogue& epilogue,
                 const Matrix& out) override;
    void add(const ConstMatrix& a, const ConstMatrix& b, const ConstMatrix& prefix, const Matrix& out) override;
    void copy(const ConstMatrix& in, const Matrix& out) override;
    void fill_zero(const Matrix& out) override;

private:
    bool through_nccl(std::int64_t bytes) const noexcept;
    bool in_bulk(std::int64_t bytes) const noexcept { return bytes >= parts_.bulk_from_bytes; }
    cudaError_t all_reduce_in_bulk(const ConstMatrix& in, const Matrix& out, const ConstMatrix& prefix) const;
    /// Whether the kernel that is about to be launched may start before its predecessor has ended.
    bool takes_early_start() noexcept { return std::exchange(starts_early_, overlaps_ && !beside_); }
    int max_ctas() const noexcept { return beside_ ? parts_.max_ctas : parts_.max_ctas_alone; }
    bool cuts_columns(const ConstMatrix& own) const noexcept;
    void copy_odd(const ConstMatrix& in, const Matrix& out);
    int stages(std::int64_t bytes) const noexcept { return bytes <= parts_.one_stage_bytes ? 1 : 2; }
    void normalise(const void* gamma, const ConstMatrix& in, const Matrix& out);

    Shape shape_;
    int rank_;
    int world_;
    Parts parts_;
    cudaStream_t stream_ = nullptr;
    bool beside_ = false;
    bool overlaps_ = false;
    bool starts_early_ = false;  ///< of the call's next kernel
    bool releases_early_ = false;
};

}  // namespace latent_moe::gpu

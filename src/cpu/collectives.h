// Collectives over host memory, written once over `Transport`. Sums run in rank order in float32 and are rounded once, so
// every rank gets the same bits whichever path a size takes.
//
// Small: one stage. Every rank reads every partial and sums for itself; one exchange.
// Large: two stages. Each rank sums a part of its own, then all gather; two exchanges, 1/R of the arithmetic.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/transport.h"
#include "core/matrix.h"
#include "core/wait_meter.h"
#include "cpu/workers.h"
#include "latent_moe/context.h"

namespace latent_moe {

class Collectives {
public:
    /// `widest`: most columns of any row.
    Collectives(Transport& transport, Channel channel, Workers& workers, const Shape& shape, std::int64_t widest,
                WaitMeter& waits);

    /// Headers of the exchanges that follow; `step` is filled in by the operations.
    void set_header(const ExchangeHeader& header) noexcept { header_ = header; }

    void all_reduce(Step step, const ConstMatrix& in, const Matrix& out, const ConstMatrix& prefix);
    void all_reduce_norm(Step step, const ConstMatrix& in, const void* gamma, const Matrix& out);
    void reduce_scatter(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const Matrix& out);
    void reduce_scatter_norm(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const void* gamma,
                             const Matrix& out);
    void all_gather(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const Matrix& out);

    void reduce_columns(Step step, const ConstMatrix& in, std::span<const TokenRange> columns, const Matrix& out);
    void gather_columns(Step step, const ConstMatrix& in, std::span<const TokenRange> columns, const Matrix& out,
                        const ConstMatrix& prefix);

    std::size_t workspace_bytes() const noexcept;

private:
    /// What happens to a summed row of float32 values before it is stored as row `row` of the output.
    using FinishRow = FunctionRef<void(int worker, std::int64_t row, float* values, std::byte* out)>;

    void exchange(Step step, std::span<const Region> outgoing, Transport::Consume consume);
    void reduce_rows(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const Matrix& out, FinishRow finish);
    void all_reduce_rows(Step step, const ConstMatrix& in, const Matrix& out, FinishRow finish);
    void widen_gamma(const void* gamma);
    std::int64_t rows_per_chunk(std::int64_t row_bytes) const noexcept;
    float* sum_of(int worker) noexcept { return sums_.data() + worker * widest_; }
    float* scratch_of(int worker) noexcept { return scratch_.data() + worker * widest_; }

    Transport& transport_;
    Channel channel_;
    Workers& workers_;
    Shape shape_;
    std::int64_t widest_;
    WaitMeter& waits_;
    ExchangeHeader header_;
    std::vector<float> sums_;     // a row a worker
    std::vector<float> scratch_;  // a row a worker
    std::vector<float> gamma_;
    std::vector<std::byte> staged_;  // one-stage results, until no peer reads the inputs any more
};

}  // namespace latent_moe

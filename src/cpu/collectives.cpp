#include "cpu/collectives.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/numeric.h"
#include "core/partition.h"
#include "cpu/row_math.h"

namespace latent_moe {
namespace {

/// Up to so many bytes of a partial the second exchange costs more than the repeated sums.
constexpr std::int64_t one_stage_bytes = std::int64_t{64} << 10;

Region region_of(const ConstMatrix& matrix) {
    return {matrix.data, matrix.rows, matrix.row_bytes(), matrix.stride_bytes()};
}

void copy_rows(const Region& from, const Matrix& to) {
    for (std::int64_t row = 0; row < from.rows; ++row) {
        if (from.row_bytes != 0) std::memcpy(to.row(row), from.row(row), static_cast<std::size_t>(from.row_bytes));
    }
}

}  // namespace

Collectives::Collectives(Transport& transport, Channel channel, Workers& workers, const Shape& shape, std::int64_t widest,
                         WaitMeter& waits)
    : transport_(transport),
      channel_(channel),
      workers_(workers),
      shape_(shape),
      widest_(widest),
      waits_(waits),
      sums_(static_cast<std::size_t>(widest * workers.count())),
      scratch_(sums_.size()),
      gamma_(static_cast<std::size_t>(shape.latent), 1.0F),
      staged_(static_cast<std::size_t>(
          std::max(one_stage_bytes, widest * static_cast<std::int64_t>(bytes_of(shape.activations))))) {}

std::size_t Collectives::workspace_bytes() const noexcept {
    return (sums_.size() + scratch_.size() + gamma_.size()) * sizeof(float) + staged_.size();
}

void Collectives::exchange(Step step, std::span<const Region> outgoing, Transport::Consume consume) {
    ExchangeHeader header = header_;
    header.step = step;
    const auto begin = std::chrono::steady_clock::now();
    transport_.exchange(channel_, header, outgoing, [&](std::span<const Region> incoming) {
        waits_.add(std::chrono::steady_clock::now() - begin);
        consume(incoming);
    });
}

std::int64_t Collectives::rows_per_chunk(std::int64_t row_bytes) const noexcept {
    return std::max<std::int64_t>(1, transport_.preferred_region_bytes() / std::max<std::int64_t>(row_bytes, 1));
}

void Collectives::widen_gamma(const void* gamma) {
    if (gamma != nullptr) widen(gamma, shape_.activations, gamma_.data(), shape_.latent);
}

void Collectives::all_reduce(Step step, const ConstMatrix& in, const Matrix& out, const ConstMatrix& prefix) {
    const Dtype dtype = in.dtype;
    if (in.rows * in.row_bytes() <= one_stage_bytes) {
        all_reduce_rows(step, in, out, [&](int worker, std::int64_t row, float* values, std::byte* to) {
            finish_row(values, dtype, prefix.present() ? prefix.row(row) : nullptr, to, scratch_of(worker), in.columns);
        });
        return;
    }
    // Two stages by columns: each rank owns a column range of every row.
    const int world = transport_.world();
    const std::int64_t chunk = rows_per_chunk(in.row_bytes() / world);
    std::array<TokenRange, max_world> columns;
    for (int rank = 0; rank < world; ++rank) columns[static_cast<std::size_t>(rank)] = even_part(in.columns, world, rank, 8);
    const TokenRange mine = columns[static_cast<std::size_t>(transport_.rank())];
    for (std::int64_t first = 0; first < in.rows; first += chunk) {
        const std::int64_t rows = std::min(chunk, in.rows - first);
        const Matrix part_out = out.row_range(first, rows);
        const Matrix own_out = part_out.column_range(mine.first, mine.count);
        const ConstMatrix own_prefix = prefix.row_range(first, rows).column_range(mine.first, mine.count);
        std::array<Region, max_world> outgoing;
        const auto to_all = std::span(outgoing.data(), static_cast<std::size_t>(world));
        for (std::size_t rank = 0; rank < to_all.size(); ++rank) {
            outgoing[rank] = region_of(in.row_range(first, rows).column_range(columns[rank].first, columns[rank].count));
        }
        // In place is safe: this rank writes its own columns of its own buffer, and no peer reads those.
        exchange(step, to_all, [&](std::span<const Region> incoming) {
            workers_.for_each(mine.count == 0 ? 0 : rows, [&](int worker, std::int64_t row) {
                sum_row(incoming, row, dtype, sum_of(worker), scratch_of(worker), mine.count);
                finish_row(sum_of(worker), dtype, own_prefix.present() ? own_prefix.row(row) : nullptr, own_out.row(row),
                           scratch_of(worker), mine.count);
            });
        });
        std::fill(to_all.begin(), to_all.end(), region_of(own_out));
        exchange(step, to_all, [&](std::span<const Region> incoming) {
            for (int peer = 0; peer < world; ++peer) {
                if (peer == transport_.rank()) continue;
                const TokenRange range = columns[static_cast<std::size_t>(peer)];
                copy_rows(incoming[static_cast<std::size_t>(peer)], part_out.column_range(range.first, range.count));
            }
        });
    }
}

void Collectives::all_reduce_norm(Step step, const ConstMatrix& in, const void* gamma, const Matrix& out) {
    widen_gamma(gamma);
    const auto finish = [&](int, std::int64_t, float* values, std::byte* to) {
        norm_row(shape_, gamma_.data(), values);
        narrow(values, in.dtype, to, in.columns);
    };
    if (in.rows * in.row_bytes() <= one_stage_bytes) {
        all_reduce_rows(step, in, out, finish);
        return;
    }
    // Two stages by rows, since the norm needs whole ones.
    const int world = transport_.world();
    const std::int64_t chunk = rows_per_chunk(in.row_bytes()) * world;
    for (std::int64_t first = 0; first < in.rows; first += chunk) {
        const std::int64_t rows = std::min(chunk, in.rows - first);
        std::array<TokenRange, max_world> ranges;
        for (int rank = 0; rank < world; ++rank) ranges[static_cast<std::size_t>(rank)] = even_part(rows, world, rank);
        const std::span<const TokenRange> own(ranges.data(), static_cast<std::size_t>(world));
        const TokenRange mine = own[static_cast<std::size_t>(transport_.rank())];
        const Matrix part_out = out.row_range(first, rows);
        const Matrix own_out = part_out.row_range(mine.first, mine.count);
        reduce_rows(step, in.row_range(first, rows), own, own_out, finish);
        all_gather(Step::gather_latent, own_out, own, part_out);
    }
}

void Collectives::reduce_scatter(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const Matrix& out) {
    reduce_rows(step, in, own, out,
                [&](int, std::int64_t, float* values, std::byte* to) { narrow(values, in.dtype, to, in.columns); });
}

void Collectives::reduce_scatter_norm(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const void* gamma,
                                      const Matrix& out) {
    widen_gamma(gamma);
    reduce_rows(step, in, own, out, [&](int, std::int64_t, float* values, std::byte* to) {
        norm_row(shape_, gamma_.data(), values);
        narrow(values, in.dtype, to, in.columns);
    });
}

void Collectives::all_gather(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const Matrix& out) {
    std::array<Region, max_world> outgoing;
    outgoing.fill(region_of(in));
    exchange(step, std::span(outgoing.data(), own.size()), [&](std::span<const Region> incoming) {
        for (std::size_t peer = 0; peer < own.size(); ++peer) {
            const Matrix to = out.row_range(own[peer].first, own[peer].count);
            if (incoming[peer].data != to.data) copy_rows(incoming[peer], to);
        }
    });
}

// This rank's columns of the sum. `out` may be those columns of `in`: no peer reads them from here.
void Collectives::reduce_columns(Step step, const ConstMatrix& in, std::span<const TokenRange> columns, const Matrix& out) {
    const TokenRange mine = columns[static_cast<std::size_t>(transport_.rank())];
    const std::int64_t chunk = rows_per_chunk(mine.count * in.row_bytes() / std::max<std::int64_t>(in.columns, 1));
    for (std::int64_t first = 0; first == 0 || first < in.rows; first += chunk) {
        const std::int64_t rows = std::min(chunk, in.rows - first);
        std::array<Region, max_world> outgoing;
        for (std::size_t rank = 0; rank < columns.size(); ++rank) {
            outgoing[rank] = region_of(in.row_range(first, rows).column_range(columns[rank].first, columns[rank].count));
        }
        exchange(step, std::span(outgoing.data(), columns.size()), [&](std::span<const Region> incoming) {
            workers_.for_each(rows, [&](int worker, std::int64_t row) {
                sum_row(incoming, row, in.dtype, sum_of(worker), scratch_of(worker), mine.count);
                narrow(sum_of(worker), in.dtype, out.row(first + row), mine.count);
            });
        });
    }
}

void Collectives::gather_columns(Step step, const ConstMatrix& in, std::span<const TokenRange> columns, const Matrix& out,
                                 const ConstMatrix& prefix) {
    const std::int64_t chunk = rows_per_chunk(in.row_bytes());
    for (std::int64_t first = 0; first == 0 || first < in.rows; first += chunk) {
        const std::int64_t rows = std::min(chunk, in.rows - first);
        const auto finish = [&](const Region& part, const TokenRange& range) {
            workers_.for_each(rows, [&](int worker, std::int64_t row) {
                const Matrix to = out.row_range(first + row, 1).column_range(range.first, range.count);
                if (!prefix.present()) {
                    if (part.row(row) != to.data)
                        std::memcpy(to.data, part.row(row), static_cast<std::size_t>(to.row_bytes()));
                    return;
                }
                const ConstMatrix added = prefix.row_range(first + row, 1).column_range(range.first, range.count);
                widen(part.row(row), in.dtype, sum_of(worker), range.count);
                finish_row(sum_of(worker), in.dtype, added.data, to.data, scratch_of(worker), range.count);
            });
        };
        const Region own = region_of(in.row_range(first, rows));
        const auto mine = static_cast<std::size_t>(transport_.rank());
        std::array<Region, max_world> outgoing;
        outgoing.fill(own);
        exchange(step, std::span(outgoing.data(), columns.size()), [&](std::span<const Region> incoming) {
            for (std::size_t rank = 0; rank < columns.size(); ++rank) {
                if (rank != mine) finish(incoming[rank], columns[rank]);
            }
        });
        finish(own, columns[mine]);  // now that no peer reads it any more: it may lie in `out`
    }
}

// Rows of `own[rank]` go to that rank, which sums and finishes them. `out` may be this rank's own rows of `in`: no peer
// reads those from here.
void Collectives::reduce_rows(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const Matrix& out,
                              FinishRow finish) {
    std::array<Region, max_world> outgoing;
    for (std::size_t rank = 0; rank < own.size(); ++rank) {
        outgoing[rank] = region_of(in.row_range(own[rank].first, own[rank].count));
    }
    const std::int64_t rows = own[static_cast<std::size_t>(transport_.rank())].count;
    exchange(step, std::span(outgoing.data(), own.size()), [&](std::span<const Region> incoming) {
        workers_.for_each(rows, [&](int worker, std::int64_t row) {
            sum_row(incoming, row, in.dtype, sum_of(worker), scratch_of(worker), in.columns);
            finish(worker, row, sum_of(worker), out.row(row));
        });
    });
}

// One stage. `out` may be `in`, which peers read until the exchange ends: results wait in `staged_` until then.
void Collectives::all_reduce_rows(Step step, const ConstMatrix& in, const Matrix& out, FinishRow finish) {
    std::array<Region, max_world> outgoing;
    outgoing.fill(region_of(in));
    const std::int64_t row_bytes = in.row_bytes();
    exchange(step, std::span(outgoing.data(), static_cast<std::size_t>(transport_.world())),
             [&](std::span<const Region> incoming) {
                 workers_.for_each(in.rows, [&](int worker, std::int64_t row) {
                     sum_row(incoming, row, in.dtype, sum_of(worker), scratch_of(worker), in.columns);
                     finish(worker, row, sum_of(worker), staged_.data() + row * row_bytes);
                 });
             });
    copy_rows({staged_.data(), in.rows, row_bytes, row_bytes}, out);
}

}  // namespace latent_moe

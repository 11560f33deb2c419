// Rows on a device with a margin behind each, so that a write beside the rows shows.
#pragma once

#include <cstdint>

#include "cli/rank_work.h"
#include "cli/tensors.h"
#include "core/matrix.h"
#include "latent_moe/tensor.h"
#include "tails/device.h"

namespace latent_moe::cli {

/// Memory for up to `most_rows` rows, taken once; `shape` says what of it is used next.
class PaddedRows {
public:
    static constexpr std::int64_t most_padding = 32;

    PaddedRows(Device& device, std::int64_t most_rows, std::int64_t columns, Dtype dtype);

    /// Fills rows, margins and the memory behind with the margins' pattern, on the host.
    void shape(std::int64_t rows, std::int64_t padding);
    /// The rows on the host: what `upload` sends and what `download` brought.
    Matrix host() noexcept { return wide().column_range(0, columns_); }
    void write(const ConstMatrix& rows) noexcept;
    void poison(int byte) noexcept;

    void upload();
    void download();

    Rows rows() const noexcept { return {room_.view().data, columns_ + padding_}; }
    /// Of what `download` brought.
    bool margins_intact() const noexcept;
    bool same_as(const ConstMatrix& rows) noexcept;

private:
    Matrix wide() noexcept { return {host_.view().data, rows_, columns_ + padding_, columns_ + padding_, dtype_}; }

    Device* device_;
    std::int64_t columns_;
    Dtype dtype_;
    DeviceTensor room_;
    Tensor host_;
    std::int64_t rows_ = 0;
    std::int64_t padding_ = 0;
};

}  // namespace latent_moe::cli

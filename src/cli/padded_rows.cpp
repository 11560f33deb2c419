#include "cli/padded_rows.h"

#include <algorithm>
#include <cstring>

namespace latent_moe::cli {
namespace {

constexpr std::byte pattern{0xA5};

}  // namespace

PaddedRows::PaddedRows(Device& device, std::int64_t most_rows, std::int64_t columns, Dtype dtype)
    : device_(&device),
      columns_(columns),
      dtype_(dtype),
      room_(device, most_rows + 1, columns + most_padding, dtype),  // a row more: what lies behind the last is watched too
      host_(most_rows + 1, columns + most_padding, dtype) {}

void PaddedRows::shape(std::int64_t rows, std::int64_t padding) {
    rows_ = rows;
    padding_ = padding;
    host_.fill_bytes(static_cast<int>(pattern));
}

void PaddedRows::write(const ConstMatrix& rows) noexcept {
    const Matrix to = host();
    for (std::int64_t row = 0; row < rows.rows; ++row)
        std::memcpy(to.row(row), rows.row(row), static_cast<std::size_t>(rows.row_bytes()));
}

void PaddedRows::poison(int byte) noexcept {
    const Matrix to = host();
    for (std::int64_t row = 0; row < to.rows; ++row)
        std::memset(to.row(row), byte, static_cast<std::size_t>(to.row_bytes()));
}

void PaddedRows::upload() {
    device_->upload(room_.view().data, host_.view().data, host_.bytes());
}

void PaddedRows::download() {
    device_->download(host_.view().data, room_.view().data, host_.bytes());
}

bool PaddedRows::margins_intact() const noexcept {
    const std::byte* const begin = host_.view().data;
    const auto row_bytes = static_cast<std::size_t>(columns_) * bytes_of(dtype_);
    const auto stride_bytes = static_cast<std::size_t>(columns_ + padding_) * bytes_of(dtype_);
    const auto untouched = [](const std::byte* from, const std::byte* to) {
        return std::all_of(from, to, [](std::byte each) { return each == pattern; });
    };
    for (std::int64_t row = 0; row < rows_; ++row) {
        const std::byte* const at = begin + static_cast<std::size_t>(row) * stride_bytes;
        if (!untouched(at + row_bytes, at + stride_bytes)) return false;
    }
    return untouched(begin + static_cast<std::size_t>(rows_) * stride_bytes, begin + host_.bytes());
}

bool PaddedRows::same_as(const ConstMatrix& rows) noexcept {
    const Matrix mine = host();
    for (std::int64_t row = 0; row < rows.rows; ++row) {
        if (std::memcmp(mine.row(row), rows.row(row), static_cast<std::size_t>(rows.row_bytes())) != 0) return false;
    }
    return true;
}

}  // namespace latent_moe::cli

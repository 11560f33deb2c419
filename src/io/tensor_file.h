// The inputs of one tail in a file: what every rank brings.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "io/safetensors.h"
#include "latent_moe/tensor.h"

namespace latent_moe::io {

/// `routed.R` [tokens, latent] and `shared.R` [tokens, hidden] for each rank R from 0, and an optional `prefix` [tokens,
/// hidden]. Bytes lie in the mapped file, rows are contiguous, and they **may be misaligned**: copy them out with memcpy.
class TensorFile {
public:
    /// Throws `Error(io)` unless the tensors are complete and agree with one another.
    static TensorFile open(const std::filesystem::path& path);

    int world() const noexcept { return static_cast<int>(routed_.size()); }
    std::int64_t tokens() const noexcept { return routed_.front().rows; }
    std::int64_t latent() const noexcept { return routed_.front().columns; }
    /// Nothing if the file has neither a shared partial nor a prefix to tell it.
    std::optional<std::int64_t> hidden() const noexcept;
    Dtype dtype() const noexcept { return routed_.front().dtype; }

    /// One a rank.
    std::span<const Matrix> routed() const noexcept { return routed_; }
    /// One a rank, or none at all: a model without shared experts.
    std::span<const Matrix> shared() const noexcept { return shared_; }
    const std::optional<Matrix>& prefix() const noexcept { return prefix_; }

private:
    explicit TensorFile(SafetensorsFile file) : file_(std::move(file)) {}

    SafetensorsFile file_;
    std::vector<Matrix> routed_;
    std::vector<Matrix> shared_;
    std::optional<Matrix> prefix_;
};

}  // namespace latent_moe::io

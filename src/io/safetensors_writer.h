// Writing safetensors files. The target appears only once it is complete; until then, and after an error, it is as it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/output_file.h"
#include "io/safetensors.h"
#include "latent_moe/tensor.h"

namespace latent_moe::io {

struct TensorDeclaration {
    std::string name;
    Dtype dtype = Dtype::bf16;
    std::vector<std::int64_t> shape;
};

struct TensorToWrite {
    std::string name;
    Dtype dtype = Dtype::bf16;
    std::vector<std::int64_t> shape;
    const void* data = nullptr;
    std::int64_t row_stride = 0;  ///< elements from one row to the next; 0: contiguous
};

/// Throws `Error(io)` where the disk or the folder does not play along, `Error(invalid_argument)` for a wrong declaration.
/// Tensors of wider elements come first in the file, so that each one is aligned to its element.
void write_safetensors(const std::filesystem::path& path, std::span<const TensorToWrite> tensors,
                       const Metadata& metadata = {});

/// The same for tensors that do not fit in memory together: declare all, then append the rows of each, tensor after tensor
/// in the order declared. A row runs along the last dimension, so a vector is one row, and a scalar is one row of one
/// element.
class SafetensorsWriter {
public:
    SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorDeclaration> tensors,
                      const Metadata& metadata = {});

    /// `name` says which tensor the caller believes to be at, and must be right. `row_stride` as in `TensorToWrite`.
    void append_rows(std::string_view name, const void* data, std::int64_t rows, std::int64_t row_stride = 0);

    /// Throws `Error(invalid_argument)` if rows are missing. Without `finish()` nothing is left behind.
    void finish();

private:
    struct Layout {
        std::int64_t rows = 0;
        std::int64_t columns = 0;
        std::size_t row_bytes = 0;
        std::uint64_t begin = 0;  // in the data section
        std::uint64_t end = 0;
    };

    std::vector<Layout> lay_out() const;
    Layout layout_of(const TensorDeclaration& tensor) const;
    void check_name(const std::string& name) const;
    std::string header(const Metadata& metadata) const;
    void write_rows(const std::byte* data, std::int64_t rows, std::int64_t row_stride);
    void skip_complete_tensors();
    [[noreturn]] void refuse(std::string_view tensor, std::string_view problem) const;

    std::string source_;
    std::vector<TensorDeclaration> tensors_;
    std::vector<Layout> layouts_;  // one a tensor
    std::size_t current_ = 0;
    std::int64_t rows_done_ = 0;  // of the current tensor
    OutputFile file_;
};

}  // namespace latent_moe::io

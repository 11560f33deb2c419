// Reading safetensors files: 8 bytes of header length, a JSON header, then the tensors' bytes without gaps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/mapped_file.h"
#include "latent_moe/tensor.h"

namespace latent_moe::io {

/// One tensor of a file. `bytes` are the file's own, row-major and little-endian, and begin wherever the file put them: **at
/// any address, aligned or not**. Copy them out with memcpy; never read them through a pointer to their element type.
struct TensorView {
    std::string name;
    std::string dtype_name;      ///< as the file spells it: "BF16", "I64", …
    std::optional<Dtype> dtype;  ///< nothing for the format's types that this library only lists
    std::vector<std::int64_t> shape;
    std::span<const std::byte> bytes;
};

/// A tensor of at most two dimensions and of an element type that this library computes with. A vector is one row; a scalar
/// is one row of one element. `bytes` may be misaligned, as in `TensorView`.
struct Matrix {
    std::string name;
    Dtype dtype = Dtype::bf16;
    std::int64_t rows = 0;
    std::int64_t columns = 0;
    std::span<const std::byte> bytes;
};

using Metadata = std::map<std::string, std::string>;

struct SafetensorsContents {
    std::vector<TensorView> tensors;  ///< sorted by name
    Metadata metadata;
};

/// Reads the whole of a safetensors file that lies in memory. The views point into `file`. Trusts nothing: throws
/// `Error(io)` that names `source` for every departure from the format. Touches no file.
SafetensorsContents parse_safetensors(std::span<const std::byte> file, std::string_view source);

/// Throws `Error(invalid_argument)` for more than two dimensions and for element types that are only listed.
Matrix as_matrix(const TensorView& tensor, std::string_view source);

/// "[7168, 3584]"
std::string shape_text(std::span<const std::int64_t> shape);

/// A safetensors file, mapped read-only. Views that it hands out live as long as it does, wherever it is moved to.
class SafetensorsFile {
public:
    static SafetensorsFile open(const std::filesystem::path& path);

    const std::filesystem::path& path() const noexcept { return path_; }
    const std::vector<TensorView>& tensors() const noexcept { return contents_.tensors; }
    const Metadata& metadata() const noexcept { return contents_.metadata; }

    /// Null if the file has no such tensor.
    const TensorView* find(std::string_view name) const noexcept;
    /// Throws `Error(invalid_argument)` if the file has no such tensor.
    const TensorView& tensor(std::string_view name) const;
    Matrix matrix(std::string_view name) const;

private:
    SafetensorsFile(std::filesystem::path path, MappedFile file, SafetensorsContents contents);

    std::filesystem::path path_;
    MappedFile file_;
    SafetensorsContents contents_;
};

}  // namespace latent_moe::io

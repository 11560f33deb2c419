// A whole file, read-only, in memory.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace latent_moe::io {

/// The mapping follows the file: whoever truncates the file while it is open here takes the pages away from under the
/// reader.
class MappedFile {
public:
    /// Throws `Error(io)` unless `path` is a regular file that can be read.
    static MappedFile open(const std::filesystem::path& path);

    MappedFile(MappedFile&& other) noexcept;
    MappedFile& operator=(MappedFile&& other) noexcept;
    ~MappedFile();

    std::span<const std::byte> bytes() const noexcept { return bytes_; }

private:
    explicit MappedFile(std::span<const std::byte> bytes) noexcept : bytes_(bytes) {}

    std::span<const std::byte> bytes_;
};

}  // namespace latent_moe::io

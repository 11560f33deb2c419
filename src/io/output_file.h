// A file that appears under its name only once it is complete.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace latent_moe::io {

/// Writes to a temporary file in the target's folder and renames it at `commit()`. Without a commit the target stays as it
/// was and the temporary file goes away; it has no name until then where the file system can do so, so that a process that
/// is killed leaves none. A target that is a device or a pipe is written to directly. Every failure is an
/// `Error(io)` that names the target.
class OutputFile {
public:
    explicit OutputFile(const std::filesystem::path& target);
    OutputFile(const OutputFile&) = delete;
    OutputFile& operator=(const OutputFile&) = delete;
    ~OutputFile();

    void write(std::span<const std::byte> bytes);
    void commit();

private:
    void open_beside_target();
    /// Where the process itself finds the open file.
    std::string own_name() const;
    /// Draws names for the temporary file until `create` makes one; false, with `errno`, if it cannot.
    template <typename Create>
    bool give_name(Create create);
    void flush();
    void write_through(std::span<const std::byte> bytes);
    [[noreturn]] void refuse(const char* action, int code) const;

    std::filesystem::path target_;
    std::filesystem::path temporary_;  // empty where there is none, or none with a name
    bool beside_ = false;              // false where the target is written to directly
    int descriptor_ = -1;
    std::vector<std::byte> buffer_;  // rows may be a few bytes each
};

}  // namespace latent_moe::io

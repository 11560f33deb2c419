// Files for tests to read: sound ones, and ones broken on purpose.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "latent_moe/status.h"

namespace latent_moe::io {

/// An empty folder that goes away with everything in it.
class TemporaryFolder {
public:
    TemporaryFolder();
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;
    ~TemporaryFolder();

    std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
    const std::filesystem::path& path() const noexcept { return path_; }
    std::vector<std::string> names() const;

private:
    std::filesystem::path path_;
};

void write_text(const std::filesystem::path& path, const std::string& text);
std::string read_text(const std::filesystem::path& path);

/// A safetensors file as bytes: the true length of `header`, `header`, `data`.
std::string safetensors_text(const std::string& header, const std::string& data);
/// The same with a length of the test's choosing.
std::string safetensors_text(std::uint64_t header_length, const std::string& header, const std::string& data);

std::span<const std::byte> bytes_of_text(const std::string& text);

/// Expects `action` to throw an `Error` with this code whose message is one line that holds every one of `parts`.
void expect_refusal(const std::function<void()>& action, StatusCode code, const std::vector<std::string>& parts);

}  // namespace latent_moe::io

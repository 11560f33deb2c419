#include "files.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace latent_moe::io {

TemporaryFolder::TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "latent-moe-io-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot make a temporary folder");
    path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
}

std::vector<std::string> TemporaryFolder::names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) names.push_back(entry.path().filename().string());
    std::ranges::sort(names);
    return names;
}

void write_text(const std::filesystem::path& path, const std::string& text) {
    std::ofstream file(path, std::ios::binary);
    file << text;
    if (!file.flush()) throw std::runtime_error("cannot write " + path.string());
}

std::string read_text(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

std::string safetensors_text(const std::string& header, const std::string& data) {
    return safetensors_text(header.size(), header, data);
}

std::string safetensors_text(std::uint64_t header_length, const std::string& header, const std::string& data) {
    std::string text(reinterpret_cast<const char*>(&header_length), sizeof(header_length));
    return text + header + data;
}

std::span<const std::byte> bytes_of_text(const std::string& text) {
    return std::as_bytes(std::span(text));
}

void expect_refusal(const std::function<void()>& action, StatusCode code, const std::vector<std::string>& parts) {
    try {
        action();
    } catch (const Error& error) {
        const std::string message = error.what();
        EXPECT_EQ(error.code(), code) << message;
        EXPECT_EQ(message.find('\n'), std::string::npos) << message;
        for (const std::string& part : parts)
            EXPECT_NE(message.find(part), std::string::npos) << part << " not in: " << message;
        return;
    }
    ADD_FAILURE() << "was not refused, expected a message with " << (parts.empty() ? "" : parts.back());
}

}  // namespace latent_moe::io

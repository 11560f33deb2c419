// parse_safetensors over arbitrary bytes: it returns or throws Error, and whatever it returns lies within the file.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "io/safetensors.h"
#include "latent_moe/status.h"

namespace {

using latent_moe::io::TensorView;

void require(bool holds) {
    if (!holds) std::abort();
}

/// Reads every byte, so that the sanitizer sees a range that leaves the file.
std::size_t touch(std::span<const std::byte> bytes) {
    volatile unsigned sum = 0;
    for (const std::byte byte : bytes) sum = sum + static_cast<unsigned>(byte);
    return bytes.size();
}

void parse(std::span<const std::byte> file) {
    try {
        const auto contents = latent_moe::io::parse_safetensors(file, "fuzz");
        std::size_t total = 0;
        for (const TensorView& tensor : contents.tensors) total += touch(tensor.bytes);
        require(total <= file.size());
        for (const TensorView& tensor : contents.tensors) latent_moe::io::as_matrix(tensor, "fuzz");
    } catch (const latent_moe::Error& error) {
        require(std::strchr(error.what(), '\n') == nullptr);
    }
}

/// The fuzzer rarely guesses a header length that fits. Here the input is a header, and its first byte the size of the data.
std::vector<std::byte> file_with_header(std::span<const std::byte> header, std::size_t data_bytes) {
    const std::uint64_t length = header.size();
    std::vector<std::byte> file(sizeof(length) + header.size() + data_bytes);
    std::memcpy(file.data(), &length, sizeof(length));
    if (!header.empty()) std::memcpy(file.data() + sizeof(length), header.data(), header.size());
    return file;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const auto input = std::as_bytes(std::span(data, size));
    parse(input);
    if (!input.empty()) parse(file_with_header(input.subspan(1), static_cast<std::size_t>(input.front())));
    return 0;
}

#include "context/mismatch_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "latent_moe/status.h"

namespace latent_moe {
namespace {

const char* safetensors_name(Dtype dtype) {
    switch (dtype) {
        case Dtype::bf16: return "BF16";
        case Dtype::f16: return "F16";
        case Dtype::f32: return "F32";
        case Dtype::e4m3: return "F8_E4M3";
    }
    return "U8";
}

std::string quoted(const std::string& text) {
    std::string escaped = "\"";
    for (const char each : text) {
        if (each == '"' || each == '\\') escaped += '\\';
        escaped += static_cast<unsigned char>(each) < 0x20 ? ' ' : each;
    }
    return escaped + '"';
}

class OwnFile {
public:
    explicit OwnFile(const std::string& path)
        : path_(path), descriptor_(::open(path.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600)) {
        if (descriptor_ < 0) fail();
    }
    OwnFile(const OwnFile&) = delete;
    OwnFile& operator=(const OwnFile&) = delete;
    ~OwnFile() { ::close(descriptor_); }

    void write(const void* data, std::size_t bytes) {
        const auto* at = static_cast<const std::byte*>(data);
        while (bytes > 0) {
            const ssize_t written = ::write(descriptor_, at, bytes);
            if (written <= 0) fail();
            at += written;
            bytes -= static_cast<std::size_t>(written);
        }
    }

private:
    [[noreturn]] void fail() const {
        throw Error(StatusCode::io, fmt::format("{}: cannot be written: {}", path_, std::strerror(errno)));
    }

    std::string path_;
    int descriptor_;
};

}  // namespace

void write_mismatch(const std::string& path, const std::string& what, const std::vector<MismatchTensor>& tensors) {
    std::string header = fmt::format("{{\"__metadata__\":{{\"message\":{}}}", quoted(what));
    std::int64_t at = 0;
    for (const MismatchTensor& tensor : tensors) {
        const std::int64_t bytes = tensor.rows.rows * tensor.rows.row_bytes();
        header += fmt::format(",{}:{{\"dtype\":\"{}\",\"shape\":[{},{}],\"data_offsets\":[{},{}]}}", quoted(tensor.name),
                              safetensors_name(tensor.rows.dtype), tensor.rows.rows, tensor.rows.columns, at, at + bytes);
        at += bytes;
    }
    header += '}';
    header.resize((header.size() + 7) / 8 * 8, ' ');
    OwnFile file(path);
    const std::uint64_t length = header.size();
    file.write(&length, sizeof length);
    file.write(header.data(), header.size());
    for (const MismatchTensor& tensor : tensors)
        file.write(tensor.rows.data, static_cast<std::size_t>(tensor.rows.rows * tensor.rows.row_bytes()));
}

}  // namespace latent_moe

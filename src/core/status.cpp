// Messages quote what was found: names in files, paths, variables. Whatever bytes those hold, a message is one line of text.
#include "latent_moe/status.h"

#include <fmt/format.h>

#include <cstddef>
#include <iterator>

#include "core/one_line.h"

namespace latent_moe {
namespace {

/// The bytes of the well-formed UTF-8 character that a text begins with, 0 where it begins with none. The Unicode Standard,
/// table 3-7.
std::size_t character_bytes(std::string_view text) {
    const auto byte = [&](std::size_t at) { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0U; };
    const unsigned first = byte(0);
    if (first < 0x80) return 1;
    if (first < 0xC2 || first > 0xF4) return 0;
    const std::size_t bytes = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    const unsigned least = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
    const unsigned most = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
    if (byte(1) < least || byte(1) > most) return 0;
    for (std::size_t at = 2; at < bytes; ++at) {
        if (byte(at) < 0x80 || byte(at) > 0xBF) return 0;
    }
    return bytes;
}

void append_escaped(std::string& line, unsigned char byte) {
    switch (byte) {
        case '\n': line += "\\n"; return;
        case '\r': line += "\\r"; return;
        case '\t': line += "\\t"; return;
        default: fmt::format_to(std::back_inserter(line), "\\x{:02x}", byte);
    }
}

}  // namespace

std::string one_line(std::string_view text) {
    std::string line;
    line.reserve(text.size());
    while (!text.empty()) {
        const auto first = static_cast<unsigned char>(text.front());
        const std::size_t bytes = character_bytes(text);
        if (bytes == 0 || first < 0x20 || first == 0x7F) {
            append_escaped(line, first);
            text.remove_prefix(1);
        } else {
            line += text.substr(0, bytes);
            text.remove_prefix(bytes);
        }
    }
    return line;
}

Status::Status(StatusCode code, std::string_view message) : code_(code), message_(one_line(message)) {}

Error::Error(StatusCode code, std::string_view message) : std::runtime_error(one_line(message)), code_(code) {}

}  // namespace latent_moe

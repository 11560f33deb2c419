#include "io/report.h"

#include <fmt/format.h>

#include <cstddef>
#include <system_error>

#include "latent_moe/status.h"

namespace latent_moe::io {
namespace {

constexpr std::size_t longest_quote = 160;

bool continues_a_utf8_sequence(char byte) {
    return (static_cast<unsigned char>(byte) & 0xC0U) == 0x80U;
}

std::string_view clip(std::string_view text) {
    std::size_t length = longest_quote;
    while (length > 0 && continues_a_utf8_sequence(text[length])) --length;
    return text.substr(0, length);
}

}  // namespace

std::string printable(std::string_view text) {
    std::string line;
    line.reserve(text.size());
    for (const char character : text) {
        const auto byte = static_cast<unsigned char>(character);
        if (byte < 0x20 || byte == 0x7F) {
            line += fmt::format("\\x{:02x}", byte);
        } else {
            line += character;
        }
    }
    return line;
}

std::string quote(std::string_view text) {
    if (text.size() <= longest_quote) return fmt::format("\"{}\"", printable(text));
    return fmt::format("\"{}...\"", printable(clip(text)));
}

namespace {

/// A path without characters is named by its quotes.
std::string named(std::string_view source) {
    return source.empty() ? "\"\"" : printable(source);
}

}  // namespace

void refuse_file(std::string_view source, std::string_view problem) {
    throw Error(StatusCode::io, fmt::format("{}: {}", named(source), problem));
}

void refuse_request(std::string_view source, std::string_view problem) {
    throw Error(StatusCode::invalid_argument, fmt::format("{}: {}", named(source), problem));
}

std::string system_message(int code) {
    return std::generic_category().message(code);
}

}  // namespace latent_moe::io

#include "io/report.h"

#include <fmt/format.h>

#include <cstddef>
#include <system_error>

#include "core/one_line.h"
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

std::string quote(std::string_view text) {
    if (text.size() <= longest_quote) return fmt::format("\"{}\"", one_line(text));
    return fmt::format("\"{}...\"", one_line(clip(text)));
}

namespace {

/// A path without characters is named by its quotes.
std::string named(std::string_view source) {
    return source.empty() ? "\"\"" : std::string(source);
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

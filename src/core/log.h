// Lines on standard error about what the library does, as many as LATENT_MOE_LOG asks for.
//
//     error   the fault that ends a context
//     warn    a call that was refused: the first, the tenth, the hundredth … of each context and reason. The default
//     info    contexts created, sealed, suspended, resumed and destroyed, with what they take
//     debug   every call
//
// `off` silences all. A line is `[latent-moe] LEVEL: …`.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string_view>
#include <utility>

namespace latent_moe {

enum class LogLevel : std::uint8_t { off, error, warn, info, debug };

/// The level that a text names; `warn` for no text or another one.
LogLevel log_level_from(const char* text) noexcept;
/// What LATENT_MOE_LOG said when it was first asked for.
LogLevel log_level() noexcept;
inline bool logs(LogLevel level) noexcept {
    return level <= log_level();
}

void write_log(LogLevel level, std::string_view line) noexcept;

template <typename... Values>
void log(LogLevel level, fmt::format_string<Values...> format, Values&&... values) noexcept {
    if (!logs(level)) return;
    try {
        write_log(level, fmt::format(format, std::forward<Values>(values)...));
    } catch (...) {  // NOLINT(bugprone-empty-catch): a line that cannot be made is not worth a failure
    }
}

}  // namespace latent_moe

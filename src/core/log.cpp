#include "core/log.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "core/one_line.h"

namespace latent_moe {
namespace {

constexpr std::array<std::string_view, 5> level_names = {"off", "error", "warn", "info", "debug"};

}  // namespace

LogLevel log_level_from(const char* text) noexcept {
    const auto* const found = text == nullptr ? level_names.end() : std::find(level_names.begin(), level_names.end(), text);
    return found == level_names.end() ? LogLevel::warn : static_cast<LogLevel>(found - level_names.begin());
}

LogLevel log_level() noexcept {
    static const LogLevel level = log_level_from(std::getenv("LATENT_MOE_LOG"));
    return level;
}

void write_log(LogLevel level, std::string_view line) noexcept {
    try {
        // One write, so that lines of several ranks do not mix; one line, whatever a message holds.
        const std::string text =
            fmt::format("[latent-moe] {}: {}\n", level_names[static_cast<std::size_t>(level)], one_line(line));
        std::fwrite(text.data(), 1, text.size(), stderr);
    } catch (...) {  // NOLINT(bugprone-empty-catch)
    }
}

}  // namespace latent_moe

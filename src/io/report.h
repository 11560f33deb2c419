// How src/io words its errors: one line that names the file.
#pragma once

#include <string>
#include <string_view>

namespace latent_moe::io {

/// `text` in one line, clipped and in double quotes: for names that come out of a file.
std::string quote(std::string_view text);

/// Throws `Error(io)`: the file is missing, unreadable or malformed.
[[noreturn]] void refuse_file(std::string_view source, std::string_view problem);

/// Throws `Error(invalid_argument)`: the file is sound, but it does not hold what was asked for.
[[noreturn]] void refuse_request(std::string_view source, std::string_view problem);

/// What the operating system calls the error `code` (an `errno`).
std::string system_message(int code);

}  // namespace latent_moe::io

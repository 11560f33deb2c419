// JSON from untrusted files, read without the leniencies of the JSON library.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

namespace latent_moe::io {

/// Parses `text`, which must be one JSON object. Throws `Error(io)` for anything else, and also for duplicate keys (the
/// library would keep one of them silently), NUL bytes (it would take one for the end of the text) and nesting deeper
/// than 32. `subject` says what the text is: "header", "index".
nlohmann::json parse_json_object(std::string_view text, std::string_view source, std::string_view subject);

}  // namespace latent_moe::io

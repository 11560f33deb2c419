// Text for one line of a message or a log.
#pragma once

#include <string>
#include <string_view>

namespace latent_moe {

/// The text with each control character, and each byte that is not part of UTF-8, written as \n, \r, \t or \xNN. Text of one
/// line is given back as it is, so doing this twice does no more.
std::string one_line(std::string_view text);

}  // namespace latent_moe

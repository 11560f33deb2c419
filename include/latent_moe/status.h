// What a call reports: a code, and one line that names the thing, what was found and what was expected.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "latent_moe/export.h"

namespace latent_moe {

enum class StatusCode {
    ok,
    invalid_argument,  ///< the caller passed something that no configuration accepts
    mismatch,          ///< ranks disagree: about the configuration, or about the call they are in; or a self-check disagrees
                       ///< with a result
    unsupported,       ///< the request is meaningful, but this build or this context does not serve it
    unavailable,       ///< the machine lacks something: a GPU, a driver, a library, a peer link
    out_of_memory,
    timeout,   ///< a peer did not arrive before the deadline; the message says which
    aborted,   ///< `abort()` was called here or on a peer, or an earlier call of this context failed
    io,        ///< a file is missing, truncated or malformed
    internal,  ///< a defect of this library
};

LATENT_MOE_API const char* name(StatusCode code) noexcept;

/// The outcome of a call on the hot path. Never throws; holds no memory when `ok()`.
class [[nodiscard]] LATENT_MOE_API Status {
public:
    Status() = default;
    /// A message is one line of UTF-8 whatever it quotes: control characters, and bytes that are not UTF-8, are written as
    /// \n, \r, \t or \xNN.
    Status(StatusCode code, std::string_view message);

    bool ok() const noexcept { return code_ == StatusCode::ok; }
    StatusCode code() const noexcept { return code_; }
    /// One line, empty when `ok()`.
    const std::string& message() const noexcept { return message_; }

private:
    StatusCode code_ = StatusCode::ok;
    std::string message_;
};

/// Thrown by everything that sets up: shapes, contexts, layers, files. Never by `Layer::run`.
class LATENT_MOE_API Error : public std::runtime_error {
public:
    /// The message is kept as `Status` keeps it.
    Error(StatusCode code, std::string_view message);

    StatusCode code() const noexcept { return code_; }
    Status status() const { return {code_, what()}; }

private:
    StatusCode code_;
};

}  // namespace latent_moe

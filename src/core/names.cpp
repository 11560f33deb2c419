// The names that people read and type, in one place.
#include <array>
#include <utility>

#include "latent_moe/plan.h"
#include "latent_moe/shape.h"
#include "latent_moe/status.h"
#include "latent_moe/tensor.h"
#include "latent_moe/version.h"

namespace latent_moe {
namespace {

constexpr std::array<const char*, tail_count> tail_names = {"replicated",     "overlap",     "column_parallel",
                                                            "token_parallel", "late_reduce", "fused"};

}  // namespace

const char* name(StatusCode code) noexcept {
    switch (code) {
        case StatusCode::ok: return "ok";
        case StatusCode::invalid_argument: return "invalid argument";
        case StatusCode::mismatch: return "mismatch";
        case StatusCode::unsupported: return "unsupported";
        case StatusCode::unavailable: return "unavailable";
        case StatusCode::out_of_memory: return "out of memory";
        case StatusCode::timeout: return "timeout";
        case StatusCode::aborted: return "aborted";
        case StatusCode::io: return "io";
        case StatusCode::internal: return "internal";
    }
    return "unknown";
}

const char* name(Dtype dtype) noexcept {
    switch (dtype) {
        case Dtype::bf16: return "bf16";
        case Dtype::f16: return "f16";
        case Dtype::f32: return "f32";
        case Dtype::e4m3: return "e4m3";
    }
    return "unknown";
}

const char* name(Norm norm) noexcept {
    return norm == Norm::rms ? "rms" : "none";
}

const char* name(SharedState state) noexcept {
    switch (state) {
        case SharedState::partial: return "partial";
        case SharedState::reduced: return "reduced";
        case SharedState::absent: return "absent";
    }
    return "unknown";
}

const char* name(Tail tail) noexcept {
    const auto index = static_cast<std::size_t>(tail);
    return index < tail_names.size() ? tail_names[index] : "unknown tail";
}

std::optional<Tail> tail_from_name(std::string_view wanted) noexcept {
    for (std::size_t index = 0; index < tail_names.size(); ++index) {
        if (wanted == tail_names[index]) return static_cast<Tail>(index);
    }
    return std::nullopt;
}

const char* library_version() noexcept {
    return header_version;
}

}  // namespace latent_moe

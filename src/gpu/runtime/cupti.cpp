#include "gpu/runtime/cupti.h"

#include <fmt/format.h>

#include "gpu/runtime/library.h"
#include "latent_moe/status.h"

namespace latent_moe::gpu {
namespace {

Cupti load() {
    Cupti table;
    Library library({"libcupti.so.13"});
#define X(name) table.name = library.symbol<std::remove_pointer_t<decltype(&cupti##name)>>("cupti" #name);
    LATENT_MOE_CUPTI_FUNCTIONS(X)
#undef X
    table.missing = library.missing();
    return table;
}

}  // namespace

const Cupti& look_for_cupti() {
    static const Cupti table = load();
    return table;
}

const Cupti& cupti() {
    const Cupti& table = look_for_cupti();
    if (!table.missing.empty()) throw Error(StatusCode::unavailable, fmt::format("CUPTI: {}", table.missing));
    return table;
}

void check(CUptiResult result, const char* call) {
    if (result == CUPTI_SUCCESS) return;
    const char* text = nullptr;
    static_cast<void>(cupti().GetResultString(result, &text));
    throw Error(StatusCode::unavailable, fmt::format("{}: {}", call, text != nullptr ? text : "unknown error"));
}

}  // namespace latent_moe::gpu

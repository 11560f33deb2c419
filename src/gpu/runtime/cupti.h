// CUPTI, CUDA's own tracer, loaded when it is first wanted.
#pragma once

#include <cupti.h>

#include <string>

namespace latent_moe::gpu {

struct Cupti {
// clang-format off
#define LATENT_MOE_CUPTI_FUNCTIONS(X) \
    X(GetVersion) \
    X(GetResultString) \
    X(ActivityEnable) X(ActivityDisable) X(ActivityRegisterCallbacks) X(ActivityFlushAll) X(ActivityGetNextRecord)
// clang-format on
#define X(name) decltype(&cupti##name) name = nullptr;
    LATENT_MOE_CUPTI_FUNCTIONS(X)
#undef X
    std::string missing;  ///< empty if it can be used
};

const Cupti& look_for_cupti();
/// Throws `unavailable` if it is missing.
const Cupti& cupti();

void check(CUptiResult result, const char* call);

}  // namespace latent_moe::gpu

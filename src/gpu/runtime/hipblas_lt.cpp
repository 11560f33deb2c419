#include "gpu/runtime/hipblas_lt.h"

#include <fmt/format.h>

#include "gpu/runtime/library.h"
#include "latent_moe/status.h"

namespace latent_moe::gpu {
namespace {

HipblasLt load() {
    HipblasLt table;
    Library library({"libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so"});
#define X(name) table.name = library.symbol<std::remove_pointer_t<decltype(&hipblasLt##name)>>("hipblasLt" #name);
    LATENT_MOE_HIPBLASLT_FUNCTIONS(X)
#undef X
    table.missing = library.missing();
    return table;
}

}  // namespace

const HipblasLt& look_for_hipblas_lt() {
    static const HipblasLt table = load();
    return table;
}

const HipblasLt& hipblas_lt() {
    const HipblasLt& table = look_for_hipblas_lt();
    if (!table.missing.empty()) throw Error(StatusCode::unavailable, fmt::format("hipBLASLt: {}", table.missing));
    return table;
}

void fail(hipblasStatus_t status, const char* call) {
    throw Error(status == HIPBLAS_STATUS_ALLOC_FAILED ? StatusCode::out_of_memory : StatusCode::internal,
                fmt::format("{}: hipBLAS status {}", call, static_cast<int>(status)));
}

}  // namespace latent_moe::gpu

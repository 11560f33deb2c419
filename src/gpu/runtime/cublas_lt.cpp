#include "gpu/runtime/cublas_lt.h"

#include <fmt/format.h>

#include "gpu/runtime/library.h"
#include "latent_moe/status.h"

namespace latent_moe::gpu {
namespace {

CublasLt load() {
    CublasLt table;
    Library library({"libcublasLt.so.13"});
#define X(name) table.name = library.symbol<std::remove_pointer_t<decltype(&cublasLt##name)>>("cublasLt" #name);
    LATENT_MOE_CUBLASLT_FUNCTIONS(X)
#undef X
    table.missing = library.missing();
    return table;
}

}  // namespace

std::string CublasLt::version_text() const {
    const std::size_t version = GetVersion();
    return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

const CublasLt& look_for_cublas_lt() {
    static const CublasLt table = load();
    return table;
}

const CublasLt& cublas_lt() {
    const CublasLt& table = look_for_cublas_lt();
    if (!table.missing.empty()) throw Error(StatusCode::unavailable, fmt::format("cuBLASLt: {}", table.missing));
    return table;
}

void fail(cublasStatus_t status, const char* call) {
    throw Error(status == CUBLAS_STATUS_ALLOC_FAILED ? StatusCode::out_of_memory : StatusCode::internal,
                fmt::format("{}: {}", call, cublas_lt().GetStatusString(status)));
}

}  // namespace latent_moe::gpu

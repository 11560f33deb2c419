// cuBLASLt without a GPU, for `host_time_stub`, which asks no product of it. It is loaded by name, so only names count.
#include <cstddef>

namespace {

constexpr int success = 0;
constexpr int not_supported = 15;

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

std::size_t cublasLtGetVersion() {
    return 0;
}
const char* cublasLtGetStatusString(int) {
    return "a status of the stub";
}
int cublasLtCreate(void** handle) {
    *handle = nullptr;
    return success;
}
int cublasLtDestroy(void*) {
    return success;
}

#define NOT_SUPPORTED(name)   \
    int cublasLt##name() {    \
        return not_supported; \
    }
NOT_SUPPORTED(Matmul)
NOT_SUPPORTED(MatmulAlgoGetHeuristic)
NOT_SUPPORTED(MatmulAlgoConfigGetAttribute)
NOT_SUPPORTED(MatmulDescInit_internal)
NOT_SUPPORTED(MatmulDescSetAttribute)
NOT_SUPPORTED(MatrixLayoutInit_internal)
NOT_SUPPORTED(MatmulPreferenceInit_internal)
NOT_SUPPORTED(MatmulPreferenceSetAttribute)

}  // extern "C"

// cuBLASLt, loaded at run time, for rows that kernels are timed beside. Where it is missing `library` is null, and that is
// said.
#pragma once

#include <cublasLt.h>
#include <dlfcn.h>

#include <cstdio>
#include <type_traits>

namespace latent_moe::test {

struct CublasLt {
    void* library = nullptr;
    cublasLtHandle_t handle{};
    decltype(&cublasLtCreate) create{};
    decltype(&cublasLtMatmul) matmul{};
    decltype(&cublasLtMatmulDescCreate) desc{};
    decltype(&cublasLtMatmulDescSetAttribute) set_desc{};
    decltype(&cublasLtMatrixLayoutCreate) layout{};
    decltype(&cublasLtMatmulPreferenceCreate) preference{};
    decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference{};
    decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic{};

    CublasLt() {
        library = dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
        if (!library) {
            std::printf("cuBLASLt: %s\n", dlerror());
            return;
        }
        const auto load = [&](auto& f, const char* symbol) {
            f = reinterpret_cast<std::decay_t<decltype(f)>>(dlsym(library, symbol));
        };
        load(create, "cublasLtCreate"), load(matmul, "cublasLtMatmul"), load(desc, "cublasLtMatmulDescCreate");
        load(set_desc, "cublasLtMatmulDescSetAttribute"), load(layout, "cublasLtMatrixLayoutCreate");
        load(preference, "cublasLtMatmulPreferenceCreate"), load(set_preference, "cublasLtMatmulPreferenceSetAttribute");
        load(heuristic, "cublasLtMatmulAlgoGetHeuristic");
        create(&handle);
    }
};

}  // namespace latent_moe::test

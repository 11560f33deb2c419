// What the check programs say to one another as ranks.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "gpu/runtime/check.h"
#include "latent_moe/latent_moe.h"

namespace latent_moe::test {

inline int devices() {
    int count = 0;
    gpu::check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    return count;
}

template <typename T>
bool same_everywhere(const Bootstrap& boot, T value) {
    std::vector<T> all(static_cast<std::size_t>(boot.world));
    boot.all_gather_bytes(&value, all.data(), sizeof value);
    return std::ranges::all_of(all, [&](const T& other) { return other == all.front(); });
}

/// Nobody goes on before all are here.
inline void meet(const Bootstrap& boot) {
    static_cast<void>(same_everywhere(boot, 0));
}

}  // namespace latent_moe::test

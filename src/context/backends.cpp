#include "context/backends.h"

#include <fmt/format.h>

#include <thread>

#include "cpu/cpu_backend.h"
#include "cpu/cpu_device.h"
#include "cpu/product.h"
#include "latent_moe/status.h"
#ifdef LATENT_MOE_HAS_GPU
#include "gpu/gpu_backend.h"
#endif

namespace latent_moe {
namespace {

std::vector<std::string> describe_cpu() {
    Workers alone(1);
    const bool native = Product(alone, 1, 8).native_bf16();
    return {
        fmt::format("cores: {}", std::thread::hardware_concurrency()),
        fmt::format("bf16 products: {}", native ? "native" : "widened to float32 block by block (no AVX-512 bf16 here)")};
}

std::unique_ptr<Device> make_cpu_device_of(const Bootstrap&, const Options&) {
    return make_cpu_device();
}

std::string always_available() {
    return {};
}

std::vector<BackendEntry> make_backends() {
    std::vector<BackendEntry> entries;
#ifdef LATENT_MOE_HAS_GPU
    entries.push_back(gpu_backend_entry());
#endif
    entries.push_back({"cpu", &always_available, &make_cpu_backend, &describe_cpu, &make_cpu_device_of});
    return entries;
}

}  // namespace

const std::vector<BackendEntry>& backends() {
    static const std::vector<BackendEntry> entries = make_backends();
    return entries;
}

const BackendEntry& find_backend(const std::string& name) {
    std::vector<std::string> names;
    for (const BackendEntry& entry : backends()) {
        names.push_back(entry.name);
        if (name != "auto" && name != entry.name) continue;
        const std::string reason = entry.unavailable();
        if (reason.empty()) return entry;
        if (name == entry.name)
            throw Error(StatusCode::unavailable, fmt::format("backend {} cannot run here: {}", name, reason));
    }
    throw Error(StatusCode::unavailable, fmt::format("backend is '{}', this build has {}", name, fmt::join(names, " and ")));
}

}  // namespace latent_moe

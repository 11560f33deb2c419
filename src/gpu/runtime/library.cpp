#include "gpu/runtime/library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <array>

namespace latent_moe::gpu {
namespace {

#ifdef LATENT_MOE_HIP
constexpr std::array vendor_folders = {"/opt/rocm/lib"};
#else
constexpr std::array vendor_folders = {"/usr/local/cuda/lib64", "/usr/local/cuda/extras/CUPTI/lib64"};
#endif

}  // namespace

Library::Library(std::initializer_list<const char*> sonames) : soname_(*sonames.begin()) {
    for (const char* soname : sonames) {
        handle_ = dlopen(soname, RTLD_NOW | RTLD_LOCAL);
        for (const char* folder : vendor_folders) {
            if (handle_ == nullptr) handle_ = dlopen(fmt::format("{}/{}", folder, soname).c_str(), RTLD_NOW | RTLD_LOCAL);
        }
        if (handle_ == nullptr) continue;
        soname_ = soname;
        return;
    }
    missing_ = fmt::format("{} not found (not in the linker's path, nor in {})", soname_, vendor_folders[0]);
}

void* Library::find(const char* name, bool optional) {
    if (handle_ == nullptr) return nullptr;
    void* symbol = dlsym(handle_, name);
    if (symbol == nullptr && !optional && missing_.empty())
        missing_ = fmt::format("{} has no {}: it is too old", soname_, name);
    return symbol;
}

}  // namespace latent_moe::gpu

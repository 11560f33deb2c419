#include "gpu/runtime/library.h"

#include <dlfcn.h>
#include <fmt/format.h>

namespace latent_moe::gpu {

Library::Library(const char* soname) : soname_(soname) {
    handle_ = dlopen(soname, RTLD_NOW | RTLD_LOCAL);
    for (const char* folder : {"lib64", "extras/CUPTI/lib64"}) {
        if (handle_ != nullptr) return;
        handle_ = dlopen(fmt::format("/usr/local/cuda/{}/{}", folder, soname).c_str(), RTLD_NOW | RTLD_LOCAL);
    }
    if (handle_ == nullptr)
        missing_ = fmt::format("{} not found (not in the linker's path, nor in /usr/local/cuda/lib64)", soname);
}

void* Library::find(const char* name, bool optional) {
    if (handle_ == nullptr) return nullptr;
    void* symbol = dlsym(handle_, name);
    if (symbol == nullptr && !optional && missing_.empty())
        missing_ = fmt::format("{} has no {}: it is too old", soname_, name);
    return symbol;
}

}  // namespace latent_moe::gpu

// How the fake libraries tell a test what was asked of them: one line a call, in one list for the process.
#pragma once

#include <fmt/format.h>

#include <dlfcn.h>
#include <cstdlib>
#include <string>

#define LATENT_MOE_FAKE extern "C" __attribute__((visibility("default")))

namespace latent_moe::fake {

/// Into the list that the test program keeps (it exports this function); nowhere in a program that keeps none.
inline void log(const std::string& line) {
    static const auto keep = reinterpret_cast<void (*)(const char*)>(dlsym(RTLD_DEFAULT, "latent_moe_keep_call"));
    if (keep != nullptr) keep(line.c_str());
}

}  // namespace latent_moe::fake

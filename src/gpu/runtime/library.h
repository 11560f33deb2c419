// A shared library that is looked for when it is first wanted: a program that links none of them starts everywhere.
#pragma once

#include <initializer_list>
#include <string>

namespace latent_moe::gpu {

class Library {
public:
    /// Looks for the first of `sonames` that there is, as the dynamic linker does, then in the vendor's own folder. Stays
    /// loaded for ever.
    Library(std::initializer_list<const char*> sonames);

    /// Why it cannot be used; empty if it can.
    const std::string& missing() const noexcept { return missing_; }

    /// Null where the library has no such function; `missing` then says so, unless it is `optional`.
    template <typename Function>
    Function* symbol(const char* name, bool optional = false) {
        return reinterpret_cast<Function*>(find(name, optional));
    }

private:
    void* find(const char* name, bool optional);

    const char* soname_;
    void* handle_ = nullptr;
    std::string missing_;
};

}  // namespace latent_moe::gpu

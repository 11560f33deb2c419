// Loads, stores and fences that name the memory order and the set of threads it holds for.
//
// GUARANTEE. Every access here is *strong* in the sense of the PTX memory model: two threads inside each other's scope that
// access the same word with these functions do not race, and a word of up to 8 bytes is never torn. A 16-byte `uint4`
// access is four such 4-byte words in no particular order; `*_whole16` is one access of 16 bytes. `relaxed` orders nothing
// else; `acquire` and `release` order everything that the thread did after or before, and what happened before that.
#pragma once

#include <cstdint>

namespace latent_moe::gpu {

enum class Scope {
    device,  ///< the threads of this GPU
    system,  ///< the threads of all GPUs and the host
};

#define LATENT_MOE_DEVICE __device__ __forceinline__
#define LATENT_MOE_SCOPED(statement_of_scope) \
    if constexpr (scope == Scope::system)     \
        statement_of_scope("sys");            \
    else                                      \
        statement_of_scope("gpu")

template <Scope scope = Scope::system>
LATENT_MOE_DEVICE std::uint32_t load_relaxed(const std::uint32_t* from) {
    std::uint32_t value;
#define X(s) asm volatile("ld.relaxed." s ".global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory")
    LATENT_MOE_SCOPED(X);
#undef X
    return value;
}

template <Scope scope = Scope::system>
LATENT_MOE_DEVICE std::uint64_t load_relaxed(const std::uint64_t* from) {
    std::uint64_t value;
#define X(s) asm volatile("ld.relaxed." s ".global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory")
    LATENT_MOE_SCOPED(X);
#undef X
    return value;
}

template <Scope scope = Scope::system>
LATENT_MOE_DEVICE uint2 load_relaxed(const uint2* from) {
    uint2 v;
#define X(s) asm volatile("ld.relaxed." s ".global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory")
    LATENT_MOE_SCOPED(X);
#undef X
    return v;
}

template <Scope scope = Scope::system>
LATENT_MOE_DEVICE uint4 load_relaxed(const uint4* from) {
    uint4 v;
#define X(s)                                                              \
    asm volatile("ld.relaxed." s ".global.v4.u32 {%0, %1, %2, %3}, [%4];" \
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)             \
                 : "l"(from)                                              \
                 : "memory")
    LATENT_MOE_SCOPED(X);
#undef X
    return v;
}

template <Scope scope = Scope::system>
LATENT_MOE_DEVICE void store_relaxed(std::uint32_t* to, std::uint32_t value) {
#define X(s) asm volatile("st.relaxed." s ".global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory")
    LATENT_MOE_SCOPED(X);
#undef X
}

template <Scope scope = Scope::system>
LATENT_MOE_DEVICE void store_relaxed(std::uint64_t* to, std::uint64_t value) {
#define X(s) asm volatile("st.relaxed." s ".global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory")
    LATENT_MOE_SCOPED(X);
#undef X
}

template <Scope scope = Scope::system>
LATENT_MOE_DEVICE void store_relaxed(uint2* to, uint2 v) {
#define X(s) asm volatile("st.relaxed." s ".global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory")
    LATENT_MOE_SCOPED(X);
#undef X
}

template <Scope scope = Scope::system>
LATENT_MOE_DEVICE void store_relaxed(uint4* to, uint4 v) {
#define X(s)                                                                                                                \
    asm volatile("st.relaxed." s ".global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) \
                 : "memory")
    LATENT_MOE_SCOPED(X);
#undef X
}

template <Scope scope = Scope::system>
LATENT_MOE_DEVICE std::uint32_t load_acquire(const std::uint32_t* from) {
    std::uint32_t value;
#define X(s) asm volatile("ld.acquire." s ".global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory")
    LATENT_MOE_SCOPED(X);
#undef X
    return value;
}

template <Scope scope = Scope::system>
LATENT_MOE_DEVICE void store_release(std::uint32_t* to, std::uint32_t value) {
#define X(s) asm volatile("st.release." s ".global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory")
    LATENT_MOE_SCOPED(X);
#undef X
}

/// Orders what the thread did, or saw done, before it before what it does after it, for every thread of the scope.
template <Scope scope = Scope::system>
LATENT_MOE_DEVICE void fence() {
#define X(s) asm volatile("fence.acq_rel." s ";" ::: "memory")
    LATENT_MOE_SCOPED(X);
#undef X
}

/// 16 bytes that are read or written as one: never torn, at any scope.
LATENT_MOE_DEVICE uint4 load_whole16(const uint4* from) {
    std::uint64_t low, high;
    asm volatile("{ .reg .b128 whole; ld.relaxed.sys.global.b128 whole, [%2]; mov.b128 {%0, %1}, whole; }"
                 : "=l"(low), "=l"(high)
                 : "l"(from)
                 : "memory");
    return make_uint4(static_cast<std::uint32_t>(low), static_cast<std::uint32_t>(low >> 32),
                      static_cast<std::uint32_t>(high), static_cast<std::uint32_t>(high >> 32));
}

LATENT_MOE_DEVICE void store_whole16(uint4* to, uint4 v) {
    const std::uint64_t low = v.x | static_cast<std::uint64_t>(v.y) << 32, high = v.z | static_cast<std::uint64_t>(v.w)
                                                                                            << 32;
    asm volatile("{ .reg .b128 whole; mov.b128 whole, {%1, %2}; st.relaxed.sys.global.b128 [%0], whole; }" ::"l"(to),
                 "l"(low), "l"(high)
                 : "memory");
}

#undef LATENT_MOE_SCOPED

}  // namespace latent_moe::gpu

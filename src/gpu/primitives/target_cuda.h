// The target NVIDIA GPUs (target.h): PTX.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace latent_moe::gpu {

#define LATENT_MOE_DEVICE __device__ __forceinline__
#define LATENT_MOE_DEVICE_ANY __device__ inline
#ifdef LATENT_MOE_NO_CALLS  // defined by a source whose kernels move registers between warps: ptxas has no calls there
#define LATENT_MOE_DEVICE_CALL __device__ __forceinline__
#else
#define LATENT_MOE_DEVICE_CALL __device__ __noinline__ inline
#endif

// ---- who am I

inline constexpr unsigned wave_size = 32;
constexpr int cta_threads(int wanted) {
    return wanted;
}

/// In shared memory accesses are performed in order: what the compiler leaves in place needs no fence.
struct SharedWord {
    volatile std::uint32_t value;
    LATENT_MOE_DEVICE std::uint32_t get() const { return value; }
    LATENT_MOE_DEVICE void set(std::uint32_t v) { value = v; }
};
#define LATENT_MOE_SHARED(type, name) __shared__ std::type_identity_t<type> name

// ---- memory

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

/// Relaxed; returns what was there before.
template <Scope scope = Scope::system>
LATENT_MOE_DEVICE std::uint32_t exchange_relaxed(std::uint32_t* at, std::uint32_t value) {
    if constexpr (scope == Scope::system) return atomicExch_system(at, value);
    return atomicExch(at, value);
}
template <Scope scope = Scope::system>
LATENT_MOE_DEVICE std::uint32_t add_relaxed(std::uint32_t* at, std::uint32_t value) {
    if constexpr (scope == Scope::system) return atomicAdd_system(at, value);
    return atomicAdd(at, value);
}

LATENT_MOE_DEVICE uint4 load_past_l1(const uint4* from) {
    return __ldcg(from);
}

// ---- threads of a CTA, of a wave

LATENT_MOE_DEVICE void sync_cta() {
    __syncthreads();
}
LATENT_MOE_DEVICE void sync_wave() {
    __syncwarp();
}
LATENT_MOE_DEVICE void prepare_thread_barriers() {}
/// `threads` is a multiple of 32.
LATENT_MOE_DEVICE void sync_threads_of(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
LATENT_MOE_DEVICE std::uint32_t sum_over_wave(std::uint32_t value) {
    return __reduce_add_sync(0xffffffff, value);
}

/// The value of the lane whose number differs by `mask`, below 32.
LATENT_MOE_DEVICE std::uint32_t shuffle_xor(std::uint32_t value, unsigned mask) {
    return __shfl_xor_sync(0xffffffff, value, mask);
}
LATENT_MOE_DEVICE float shuffle_xor(float value, unsigned mask) {
    return __shfl_xor_sync(0xffffffff, value, mask);
}

// ---- kernels and time

LATENT_MOE_DEVICE void dependency_wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
LATENT_MOE_DEVICE void release_dependents() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
LATENT_MOE_DEVICE std::uint64_t clock_ns() {
    std::uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
/// Nothing: the next look takes long enough by itself.
LATENT_MOE_DEVICE void let_others_run() {}

// ---- arithmetic

LATENT_MOE_DEVICE float as_float(std::uint32_t bits) {
    return __uint_as_float(bits);
}
LATENT_MOE_DEVICE std::uint32_t as_bits(float value) {
    return __float_as_uint(value);
}
LATENT_MOE_DEVICE std::uint32_t pack_bf16x2(float low, float high) {
    std::uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
LATENT_MOE_DEVICE std::uint32_t pack_f16x2(float low, float high) {
    const __half2 h = __floats2half2_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&h);
}
LATENT_MOE_DEVICE float2 unpack_f16x2(std::uint32_t word) {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
}
LATENT_MOE_DEVICE std::uint32_t canonical_bf16x2(std::uint32_t word) {  // · 1 + 0
    std::uint32_t result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(word), "r"(0x3f803f80), "r"(0));
    return result;
}
LATENT_MOE_DEVICE std::uint32_t canonical_f16x2(std::uint32_t word) {
    std::uint32_t result;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(word), "r"(0x3c003c00), "r"(0));
    return result;
}
LATENT_MOE_DEVICE std::uint32_t canonical_f32(std::uint32_t word) {
    return __float_as_uint(__fadd_rn(__uint_as_float(word), 0.0F));
}
/// 1 / √x
LATENT_MOE_DEVICE float reciprocal_root(float x) {
    return rsqrtf(x);
}

}  // namespace latent_moe::gpu

// The target AMD GPUs (target.h): clang's atomics and fences, which its AMDGPU memory model turns into cache bits and
// cache operations. On gfx942 an access at system scope carries `sc0 sc1` and one at device scope `sc1`; a fence that
// releases at system scope writes back L2 (`buffer_wbl2 sc0 sc1`), one that acquires drops what the caches hold (`buffer_inv
// sc0 sc1`). tests/gpu/hip/assembly_test.py reads them in what the compiler made.
//
// Everything that is shared lies in global memory, and says so: a flat access would wait for LDS too.
#pragma once

#include <cstdint>
#include <type_traits>

#include "gpu/runtime/device_api.h"

namespace latent_moe::gpu {

#define LATENT_MOE_DEVICE __device__ __attribute__((always_inline)) inline
#define LATENT_MOE_DEVICE_ANY __device__ inline
#define LATENT_MOE_DEVICE_CALL __device__ __attribute__((always_inline)) inline

// ---- who am I

inline constexpr unsigned wave_size = 64;
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

namespace hip {

template <class T>
using Global = __attribute__((address_space(1))) T;

template <class T>
LATENT_MOE_DEVICE const Global<T>* global(const T* p) {
    return (const Global<T>*)p;  // a C-style cast is the only one between address spaces
}
template <class T>
LATENT_MOE_DEVICE Global<T>* global(T* p) {
    return (Global<T>*)p;
}

template <Scope scope, int order, class T>
LATENT_MOE_DEVICE T load(const T* from) {
    if constexpr (scope == Scope::system)
        return __hip_atomic_load(global(from), order, __HIP_MEMORY_SCOPE_SYSTEM);
    else
        return __hip_atomic_load(global(from), order, __HIP_MEMORY_SCOPE_AGENT);
}
template <Scope scope, int order, class T>
LATENT_MOE_DEVICE void store(T* to, T value) {
    if constexpr (scope == Scope::system)
        __hip_atomic_store(global(to), value, order, __HIP_MEMORY_SCOPE_SYSTEM);
    else
        __hip_atomic_store(global(to), value, order, __HIP_MEMORY_SCOPE_AGENT);
}

/// One hand-off's scope, for the test of the test: -DLATENT_MOE_WEAKEN=<its name> takes it down to this device, and the
/// assembly test must then fail.
#define LATENT_MOE_HAND_OFF_mailbox_store 1
#define LATENT_MOE_HAND_OFF_mailbox_load 2
#define LATENT_MOE_HAND_OFF_header_store 3
#define LATENT_MOE_HAND_OFF_header_load 4
#define LATENT_MOE_HAND_OFF_fence 5
#define LATENT_MOE_HAND_OFF_counter_store 6
#define LATENT_MOE_HAND_OFF_counter_load 7
#define LATENT_MOE_JOIN(a, b) a##b
#define LATENT_MOE_HAND_OFF(name) LATENT_MOE_JOIN(LATENT_MOE_HAND_OFF_, name)
enum HandOff : int { mailbox_store = 1, mailbox_load, header_store, header_load, fences, counter_store, counter_load };
constexpr Scope scope_of(Scope scope, [[maybe_unused]] HandOff hand_off) {
#ifdef LATENT_MOE_WEAKEN
    if (hand_off == LATENT_MOE_HAND_OFF(LATENT_MOE_WEAKEN)) return Scope::device;
#endif
    return scope;
}

LATENT_MOE_DEVICE std::uint64_t both(std::uint32_t low, std::uint32_t high) {
    return low | static_cast<std::uint64_t>(high) << 32;
}
LATENT_MOE_DEVICE uint2 halves(std::uint64_t word) {
    return make_uint2(static_cast<std::uint32_t>(word), static_cast<std::uint32_t>(word >> 32));
}

}  // namespace hip

template <Scope scope = Scope::system>
LATENT_MOE_DEVICE std::uint32_t load_relaxed(const std::uint32_t* from) {
    return hip::load<scope, __ATOMIC_RELAXED>(from);
}
template <Scope scope = Scope::system>
LATENT_MOE_DEVICE std::uint64_t load_relaxed(const std::uint64_t* from) {
    return hip::load<hip::scope_of(scope, hip::counter_load), __ATOMIC_RELAXED>(from);
}
template <Scope scope = Scope::system>
LATENT_MOE_DEVICE uint2 load_relaxed(const uint2* from) {
    return hip::halves(hip::load<scope, __ATOMIC_RELAXED>(reinterpret_cast<const std::uint64_t*>(from)));
}
/// Two accesses of 8 bytes: the widest that the language promises not to tear.
template <Scope scope = Scope::system>
LATENT_MOE_DEVICE uint4 load_relaxed(const uint4* from) {
    constexpr Scope here = hip::scope_of(scope, hip::mailbox_load);
    const auto* words = reinterpret_cast<const std::uint64_t*>(from);
    const uint2 low = hip::halves(hip::load<here, __ATOMIC_RELAXED>(words));
    const uint2 high = hip::halves(hip::load<here, __ATOMIC_RELAXED>(words + 1));
    return make_uint4(low.x, low.y, high.x, high.y);
}

template <Scope scope = Scope::system>
LATENT_MOE_DEVICE void store_relaxed(std::uint32_t* to, std::uint32_t value) {
    hip::store<scope, __ATOMIC_RELAXED>(to, value);
}
template <Scope scope = Scope::system>
LATENT_MOE_DEVICE void store_relaxed(std::uint64_t* to, std::uint64_t value) {
    hip::store<hip::scope_of(scope, hip::counter_store), __ATOMIC_RELAXED>(to, value);
}
template <Scope scope = Scope::system>
LATENT_MOE_DEVICE void store_relaxed(uint2* to, uint2 v) {
    hip::store<scope, __ATOMIC_RELAXED>(reinterpret_cast<std::uint64_t*>(to), hip::both(v.x, v.y));
}
template <Scope scope = Scope::system>
LATENT_MOE_DEVICE void store_relaxed(uint4* to, uint4 v) {
    constexpr Scope here = hip::scope_of(scope, hip::mailbox_store);
    auto* words = reinterpret_cast<std::uint64_t*>(to);
    hip::store<here, __ATOMIC_RELAXED>(words, hip::both(v.x, v.y));
    hip::store<here, __ATOMIC_RELAXED>(words + 1, hip::both(v.z, v.w));
}

template <Scope scope = Scope::system>
LATENT_MOE_DEVICE std::uint32_t load_acquire(const std::uint32_t* from) {
    return hip::load<scope, __ATOMIC_ACQUIRE>(from);
}
template <Scope scope = Scope::system>
LATENT_MOE_DEVICE void store_release(std::uint32_t* to, std::uint32_t value) {
    hip::store<scope, __ATOMIC_RELEASE>(to, value);
}

template <Scope scope = Scope::system>
LATENT_MOE_DEVICE void fence() {
    if constexpr (hip::scope_of(scope, hip::fences) == Scope::system)
        __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "");
    else
        __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "agent");
}

/// No access of 16 bytes is promised to be whole here, so the first 8 bytes vouch for the last: they are stored after them
/// (release) and loaded before them (acquire). Whoever finds the first half of one store finds its last half too, or that of
/// a later one; a header (header.h) tells stores apart by its first half, and is not stored again before it was read.
LATENT_MOE_DEVICE uint4 load_whole16(const uint4* from) {
    constexpr Scope here = hip::scope_of(Scope::system, hip::header_load);
    const auto* words = reinterpret_cast<const std::uint64_t*>(from);
    const uint2 low = hip::halves(hip::load<here, __ATOMIC_ACQUIRE>(words));
    const uint2 high = hip::halves(hip::load<here, __ATOMIC_RELAXED>(words + 1));
    return make_uint4(low.x, low.y, high.x, high.y);
}
LATENT_MOE_DEVICE void store_whole16(uint4* to, uint4 v) {
    constexpr Scope here = hip::scope_of(Scope::system, hip::header_store);
    auto* words = reinterpret_cast<std::uint64_t*>(to);
    hip::store<here, __ATOMIC_RELAXED>(words + 1, hip::both(v.z, v.w));
    hip::store<here, __ATOMIC_RELEASE>(words, hip::both(v.x, v.y));
}

LATENT_MOE_DEVICE uint4 load_past_l1(const uint4* from) {
    return load_relaxed<Scope::device>(from);
}

template <Scope scope = Scope::system>
LATENT_MOE_DEVICE std::uint32_t exchange_relaxed(std::uint32_t* at, std::uint32_t value) {
    if constexpr (scope == Scope::system)
        return __hip_atomic_exchange(hip::global(at), value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    else
        return __hip_atomic_exchange(hip::global(at), value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <Scope scope = Scope::system>
LATENT_MOE_DEVICE std::uint32_t add_relaxed(std::uint32_t* at, std::uint32_t value) {
    if constexpr (scope == Scope::system)
        return __hip_atomic_fetch_add(hip::global(at), value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    else
        return __hip_atomic_fetch_add(hip::global(at), value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// ---- threads of a CTA, of a wave

LATENT_MOE_DEVICE void sync_cta() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
/// The lanes of a wave run in step: only the compiler must be kept from moving memory accesses across.
LATENT_MOE_DEVICE void sync_wave() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

/// There are no named barriers: a counter in LDS for each counts the threads that have come, and a round is over when it has
/// reached the next multiple of them.
namespace hip {
inline constexpr int thread_barriers = 16;
LATENT_MOE_DEVICE std::uint32_t* thread_barrier_counters() {
    __shared__ std::uint32_t counters[thread_barriers];
    return counters;
}
}  // namespace hip
LATENT_MOE_DEVICE void prepare_thread_barriers() {
    if (threadIdx.x < hip::thread_barriers) hip::thread_barrier_counters()[threadIdx.x] = 0;
}
LATENT_MOE_DEVICE void sync_threads_of(int barrier, int threads) {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    std::uint32_t* counter = hip::thread_barrier_counters() + barrier;
    // One lane speaks for all of its wave that are here.
    const std::uint64_t here = __builtin_amdgcn_read_exec();
    if (__builtin_amdgcn_mbcnt_hi(static_cast<std::uint32_t>(here >> 32),
                                  __builtin_amdgcn_mbcnt_lo(static_cast<std::uint32_t>(here), 0u)) == 0) {
        const auto count = static_cast<std::uint32_t>(threads);
        const std::uint32_t before = __hip_atomic_fetch_add(counter, static_cast<std::uint32_t>(__builtin_popcountll(here)),
                                                            __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
        const std::uint32_t over = (before / count + 1) * count;
        while (static_cast<std::int32_t>(__hip_atomic_load(counter, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP) - over) <
               0) {
            __builtin_amdgcn_s_sleep(0);
        }
    }
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

LATENT_MOE_DEVICE unsigned lane_of_wave() {
    return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
}
/// A lane that is not active counts as 0.
LATENT_MOE_DEVICE std::uint32_t shuffle_xor(std::uint32_t value, unsigned mask) {
    return static_cast<std::uint32_t>(
        __builtin_amdgcn_ds_bpermute(static_cast<int>((lane_of_wave() ^ mask) * 4), static_cast<int>(value)));
}
LATENT_MOE_DEVICE float shuffle_xor(float value, unsigned mask) {
    return __builtin_bit_cast(float, shuffle_xor(__builtin_bit_cast(std::uint32_t, value), mask));
}
LATENT_MOE_DEVICE std::uint32_t sum_over_wave(std::uint32_t value) {
#pragma unroll
    for (unsigned mask = wave_size / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    return value;
}

// ---- kernels and time

/// Nothing: a kernel begins when the one before it in its stream has ended.
LATENT_MOE_DEVICE void dependency_wait() {}
LATENT_MOE_DEVICE void release_dependents() {}

/// The clock that all CUs share counts at 100 MHz.
LATENT_MOE_DEVICE std::uint64_t clock_ns() {
    return __builtin_amdgcn_s_memrealtime() * 10;
}
/// Leaves the issue slots to this CU's other waves for 64 clocks.
LATENT_MOE_DEVICE void let_others_run() {
    __builtin_amdgcn_s_sleep(1);
}

// ---- arithmetic

LATENT_MOE_DEVICE float as_float(std::uint32_t bits) {
    return __builtin_bit_cast(float, bits);
}
LATENT_MOE_DEVICE std::uint32_t as_bits(float value) {
    return __builtin_bit_cast(std::uint32_t, value);
}

namespace hip {

/// Round to nearest even in integers: gfx942 has no such conversion.
LATENT_MOE_DEVICE std::uint32_t bf16_of(float value) {
    const std::uint32_t bits = as_bits(value);
    return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
LATENT_MOE_DEVICE std::uint32_t f16_of(float value) {
    const std::uint32_t bits = __builtin_bit_cast(std::uint16_t, static_cast<_Float16>(value));
    return value != value ? 0x7fff : bits;
}
/// Each half: 0 for the bits of -0.0.
LATENT_MOE_DEVICE std::uint32_t canonical_halves(std::uint32_t word) {
    if ((word & 0xffff) == 0x8000) word &= 0xffff0000;
    if ((word & 0xffff0000) == 0x80000000) word &= 0xffff;
    return word;
}

}  // namespace hip

LATENT_MOE_DEVICE std::uint32_t pack_bf16x2(float low, float high) {
    return hip::bf16_of(low) | hip::bf16_of(high) << 16;
}
LATENT_MOE_DEVICE std::uint32_t pack_f16x2(float low, float high) {
    return hip::f16_of(low) | hip::f16_of(high) << 16;
}
LATENT_MOE_DEVICE float2 unpack_f16x2(std::uint32_t word) {
    const auto half = [](std::uint32_t bits) {
        return static_cast<float>(__builtin_bit_cast(_Float16, static_cast<std::uint16_t>(bits)));
    };
    return make_float2(half(word & 0xffff), half(word >> 16));
}
LATENT_MOE_DEVICE std::uint32_t canonical_bf16x2(std::uint32_t word) {
    return hip::canonical_halves(word);
}
LATENT_MOE_DEVICE std::uint32_t canonical_f16x2(std::uint32_t word) {
    return hip::canonical_halves(word);
}
LATENT_MOE_DEVICE std::uint32_t canonical_f32(std::uint32_t word) {
    return word == 0x80000000 ? 0 : word;
}
/// Rounded right, as the host's: it is needed once a row.
LATENT_MOE_DEVICE float reciprocal_root(float x) {
    return 1.0F / __builtin_sqrtf(x);
}

}  // namespace latent_moe::gpu

// The target host (target.h): threads of this machine play the threads of a grid, one each. They learn who they are, and
// find their neighbours, through thread-local words that a test's harness sets (tests/gpu/protocol/emulated_gpu.h).
//
// There is one scope here, and x86 or the thread sanitizer orders more than a GPU does: what the host shows is that the
// functions compute and synchronise right. Which orders they *need* is for the model checker, which has a target of its own.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "host_numbers.h"

#ifndef LATENT_MOE_WAVE_SIZE
#define LATENT_MOE_WAVE_SIZE 32
#endif

namespace latent_moe::gpu {

#define LATENT_MOE_DEVICE inline
#define LATENT_MOE_DEVICE_ANY inline
#define LATENT_MOE_DEVICE_CALL inline

// ---- who am I

/// A thread's own word. Several threads of a grid may take turns on one of this machine, and the thread sanitizer, which
/// tells them apart, must not take that for a race.
template <class T>
class OwnWord {
public:
    constexpr explicit OwnWord(T value) : value_(value) {}
    operator T() const { return value_.load(std::memory_order_relaxed); }
    T operator->() const { return *this; }
    OwnWord& operator=(T value) {
        value_.store(value, std::memory_order_relaxed);
        return *this;
    }

private:
    std::atomic<T> value_;
};

struct Index {
    OwnWord<unsigned> x;
    constexpr explicit Index(unsigned of_x) : x(of_x) {}
};
inline thread_local Index blockIdx{0}, gridDim{1}, threadIdx{0}, blockDim{1};
inline constexpr unsigned wave_size = LATENT_MOE_WAVE_SIZE;
/// Two waves: a thread here is a thread of this machine.
constexpr int cta_threads(int wanted) {
    return std::min(wanted, 2 * static_cast<int>(wave_size));
}

/// What a thread asks of those that it runs with.
class Neighbours {
public:
    virtual ~Neighbours() = default;
    virtual void sync_cta() = 0;
    virtual void sync_wave() = 0;
    virtual std::uint32_t sum_over_wave(std::uint32_t value) = 0;
    /// Every lane's value, for all of the wave to read until they share again.
    virtual const uint4* share_in_wave(uint4 value) = 0;
    virtual void prepare_thread_barriers() = 0;
    virtual void sync_threads_of(int barrier, int threads) = 0;
    virtual void dependency_wait() = 0;
    virtual std::byte* shared_memory() = 0;  ///< of the CTA: `host::shared_bytes`
    virtual void let_others_run() = 0;
    virtual std::uint64_t clock_ns() = 0;
};
inline thread_local OwnWord<Neighbours*> neighbours{nullptr};

inline void sync_cta() {
    neighbours->sync_cta();
}
inline void sync_wave() {
    neighbours->sync_wave();
}
inline std::uint32_t sum_over_wave(std::uint32_t value) {
    return neighbours->sum_over_wave(value);
}
inline const uint4* share_in_wave(uint4 value) {
    return neighbours->share_in_wave(value);
}
inline std::uint32_t shuffle_xor(std::uint32_t value, unsigned mask) {
    return share_in_wave({value, 0, 0, 0})[threadIdx.x % wave_size ^ mask].x;
}
inline float shuffle_xor(float value, unsigned mask) {
    return std::bit_cast<float>(shuffle_xor(std::bit_cast<std::uint32_t>(value), mask));
}
inline void prepare_thread_barriers() {
    neighbours->prepare_thread_barriers();
}
inline void sync_threads_of(int barrier, int threads) {
    neighbours->sync_threads_of(barrier, threads);
}
inline void dependency_wait() {
    neighbours->dependency_wait();
}
inline void release_dependents() {}
inline void let_others_run() {
    neighbours->let_others_run();
}
inline std::uint64_t clock_ns() {
    return neighbours->clock_ns();
}

// ---- memory

namespace host {

template <class T>
T load(const T* from, std::memory_order order = std::memory_order_relaxed) {
    return std::atomic_ref<T>(const_cast<T&>(*from)).load(order);
}
template <class T>
void store(T* to, T value, std::memory_order order = std::memory_order_relaxed) {
    std::atomic_ref<T>(*to).store(value, order);
}

__extension__ typedef unsigned __int128 Whole16;

inline constexpr std::size_t shared_bytes = 64 << 10;
template <class T>
T& shared_variable() {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= shared_bytes);
    return *reinterpret_cast<T*>(neighbours->shared_memory());
}

/// See `fence`.
inline std::atomic<std::uint32_t> all_fences{0};

}  // namespace host

template <Scope scope = Scope::system>
std::uint32_t load_relaxed(const std::uint32_t* from) {
    return host::load(from);
}
template <Scope scope = Scope::system>
std::uint64_t load_relaxed(const std::uint64_t* from) {
    return host::load(from);
}
template <Scope scope = Scope::system>
uint2 load_relaxed(const uint2* from) {
    return {host::load(&from->x), host::load(&from->y)};
}
template <Scope scope = Scope::system>
uint4 load_relaxed(const uint4* from) {
    return {host::load(&from->x), host::load(&from->y), host::load(&from->z), host::load(&from->w)};
}

template <Scope scope = Scope::system>
void store_relaxed(std::uint32_t* to, std::uint32_t value) {
    host::store(to, value);
}
template <Scope scope = Scope::system>
void store_relaxed(std::uint64_t* to, std::uint64_t value) {
    host::store(to, value);
}
template <Scope scope = Scope::system>
void store_relaxed(uint2* to, uint2 v) {
    host::store(&to->y, v.y), host::store(&to->x, v.x);
}
/// Last word first: whoever takes a vector for one access is to see it torn now and then.
template <Scope scope = Scope::system>
void store_relaxed(uint4* to, uint4 v) {
    host::store(&to->w, v.w), host::store(&to->z, v.z), host::store(&to->y, v.y), host::store(&to->x, v.x);
}

template <Scope scope = Scope::system>
std::uint32_t load_acquire(const std::uint32_t* from) {
    return host::load(from, std::memory_order_acquire);
}
template <Scope scope = Scope::system>
void store_release(std::uint32_t* to, std::uint32_t value) {
    host::store(to, value, std::memory_order_release);
}

inline uint4 load_whole16(const uint4* from) {
    return std::bit_cast<uint4>(host::load(reinterpret_cast<const host::Whole16*>(from)));
}
inline void store_whole16(uint4* to, uint4 v) {
    host::store(reinterpret_cast<host::Whole16*>(to), std::bit_cast<host::Whole16>(v));
}

inline uint4 load_past_l1(const uint4* from) {
    return *from;
}

template <Scope scope = Scope::system>
std::uint32_t exchange_relaxed(std::uint32_t* at, std::uint32_t value) {
    return std::atomic_ref<std::uint32_t>(*at).exchange(value, std::memory_order_relaxed);
}
template <Scope scope = Scope::system>
std::uint32_t add_relaxed(std::uint32_t* at, std::uint32_t value) {
    return std::atomic_ref<std::uint32_t>(*at).fetch_add(value, std::memory_order_relaxed);
}

#define LATENT_MOE_SHARED(type, name) auto& name = host::shared_variable<std::type_identity_t<type>>()

struct SharedWord {
    std::uint32_t value;
    std::uint32_t get() const { return host::load(&value, std::memory_order_acquire); }
    void set(std::uint32_t v) { host::store(&value, v, std::memory_order_release); }
};

/// A word of the CTA's shared memory, by its address there.
template <class T>
T load_shared(std::uint32_t address) {
    static_assert(sizeof(T) == 4);
    return std::bit_cast<T>(host::load(reinterpret_cast<std::uint32_t*>(neighbours->shared_memory() + address)));
}
template <class T>
void store_shared(std::uint32_t address, T value) {
    static_assert(sizeof(T) == 4);
    host::store(reinterpret_cast<std::uint32_t*>(neighbours->shared_memory() + address),
                std::bit_cast<std::uint32_t>(value));
}

/// A read-modify-write of one word that all fences share, not `atomic_thread_fence`: the thread sanitizer does not know that
/// one, and would call memory racy that a fence orders. Two fences with a hand-off between them run in its order, so the
/// second reads what the first wrote and synchronises with it. Two fences without a hand-off are ordered as well, which no
/// GPU promises: that is why the model checker's target has real fences.
template <Scope scope = Scope::system>
void fence() {
    host::all_fences.fetch_add(1, std::memory_order_acq_rel);
}

}  // namespace latent_moe::gpu

// The target of the model checker (primitives/target.h): every word of the windows is a Relacy atomic, every thread of the
// grids one of Relacy's fibers. Relacy explores who runs when, and which of the values that C++'s memory model allows a load
// returns; the order words and fences of the protocol are Relacy's own, so a fence that is missing is missing.
//
// Relacy gives stores their place in a word's history as they are executed. Real memory need not: two stores to a word that
// nothing orders may land either way round. So this target keeps, of each word's last store, who made it and who has seen
// it, and calls it a fault (`overwritten`) when a store to it comes from a thread that neither the store nor a load of it
// happens before.
//
// Scopes: a word of which an access has device scope must not be touched by two ranks (`scope`), and a device-scope fence
// orders nothing here, since no rank could rely on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <sstream>

#include <relacy/relacy.hpp>
// Relacy redefines these for the code under test, which uses none of them.
#undef new
#undef delete
#undef malloc
#undef calloc
#undef realloc
#undef free
#undef assert
#undef errno
#undef memory_order_relaxed
#undef memory_order_consume
#undef memory_order_acquire
#undef memory_order_release
#undef memory_order_acq_rel
#undef memory_order_seq_cst

#include "gpu/primitives/host_numbers.h"
#include "gpu/primitives/window.h"

namespace latent_moe::gpu {

#define LATENT_MOE_DEVICE inline
#define LATENT_MOE_DEVICE_ANY inline
#define LATENT_MOE_DEVICE_CALL inline

// ---- the model's machine: what the checker (protocol_model.cpp) sets up before every execution

namespace model {

inline constexpr int most_threads = 54;
inline constexpr int most_words = 20480;
inline constexpr int most_ranks = 3;
inline constexpr int most_headers = 256;

/// What a thread is.
struct Identity {
    int rank;
    unsigned cta, ctas, thread, threads;
};

/// A word of memory, as Relacy's atomic has it: the version makes every store one of its own.
constexpr std::uint64_t versioned(std::uint32_t version, std::uint32_t value) {
    return std::uint64_t{version} << 32 | value;
}

/// What is known of a word's last store.
struct LastStore {
    std::uint32_t version;
    int thread;
    rl::timestamp_t at;                  ///< on that thread's clock
    rl::timestamp_t seen[most_threads];  ///< when a thread first loaded it; 0: never
    unsigned ranks;                      ///< that have touched the word
    bool device_scope;                   ///< some access had
};

/// What a thread asks of those that it runs with.
class Neighbours {
public:
    virtual ~Neighbours() = default;
    virtual void sync_cta() = 0;
    virtual void sync_wave() = 0;
    virtual std::uint32_t sum_over_wave(std::uint32_t value) = 0;
    virtual void dependency_wait() = 0;
};

struct Machine {
    Identity threads[most_threads];
    Neighbours* neighbours;
    const FaultRecord* record;  ///< of any rank: the first fault ends the execution
    std::byte* memory;          ///< of all ranks, one behind the other; only its addresses are used
    std::size_t bytes_of_rank, control_bytes, control_words, slot_words;
    rl::atomic<std::uint64_t>* words;
    LastStore last[most_words];
    uint4 headers[most_headers];  ///< every 16-byte value there was: the atomic holds its index
    std::uint32_t header_count;
    std::uint32_t stores;  ///< so far: the next one's version
    char fault[160];       ///< what was found, for people
};
inline Machine machine;

inline const Identity& self() {
    return machine.threads[rl::thread_index()];
}

template <class... Args>
void fail(const char* format, Args... args) {
    std::snprintf(machine.fault, sizeof machine.fault, format, args...);
    rl::ctx().fail_test(machine.fault, rl::test_result_user_assert_failed, $);
}

/// Which of the model's words is at an address of a window.
inline std::size_t index_of(const void* address) {
    if (address == machine.record) {
        const FaultRecord& r = *machine.record;
        fail("fault: rank %d finds rank %d in phase %u: %llu instead of %llu", self().rank, r.rank, r.phase,
             static_cast<unsigned long long>(r.found), static_cast<unsigned long long>(r.expected));
    }
    const auto at = static_cast<std::size_t>(static_cast<const std::byte*>(address) - machine.memory);
    const std::size_t rank = at / machine.bytes_of_rank, offset = at % machine.bytes_of_rank;
    const bool control = offset < machine.control_bytes;
    const std::size_t word = control ? offset / 4 : machine.control_words + (offset - machine.control_bytes) / 4;
    if (rank >= most_ranks || offset % 4 != 0 ||
        word >= (control ? machine.control_words : machine.control_words + machine.slot_words)) {
        fail("outside: rank %d touches memory that is no window", self().rank);
    }
    return rank * (machine.control_words + machine.slot_words) + word;
}

inline void touch(std::size_t word, bool device_scope) {
    LastStore& last = machine.last[word];
    last.ranks |= 1U << self().rank;
    last.device_scope |= device_scope;
    if (last.device_scope && (last.ranks & (last.ranks - 1)) != 0)
        fail("scope: a word that two ranks touch, at device scope");
}

inline std::uint32_t load(std::size_t word, rl::memory_order order, bool device_scope) {
    touch(word, device_scope);
    const std::uint64_t value = machine.words[word].load(order, $);
    LastStore& last = machine.last[word];
    rl::timestamp_t& seen = last.seen[rl::thread_index()];
    if (value >> 32 == last.version && seen == 0) seen = rl::ctx().threadx_->own_acq_rel_order_;
    return static_cast<std::uint32_t>(value);
}

/// Is the word's last store, or a load of it, ordered before what this thread does now?
inline bool last_store_is_before_us(const LastStore& last) {
    const rl::timestamp_t* known = rl::ctx().threadx_->acq_rel_order_;
    if (last.version == 0 || known[last.thread] >= last.at) return true;
    for (int t = 0; t < most_threads && machine.threads[t].threads != 0; ++t) {
        if (last.seen[t] != 0 && known[t] >= last.seen[t]) return true;
    }
    return false;
}
/// To a peer: has it read what we sent there before, and do we know?
inline bool last_store_was_read(const LastStore& last) {
    const rl::timestamp_t* known = rl::ctx().threadx_->acq_rel_order_;
    if (last.version == 0 || machine.threads[last.thread].rank != self().rank) return true;
    for (int t = 0; t < most_threads && machine.threads[t].threads != 0; ++t) {
        if (machine.threads[t].rank != self().rank && last.seen[t] != 0 && known[t] >= last.seen[t]) return true;
    }
    return false;
}

inline void note_store(LastStore& last, std::uint32_t version) {
    last.version = version;
    last.thread = static_cast<int>(rl::thread_index());
    last.at = rl::ctx().threadx_->own_acq_rel_order_;
    for (rl::timestamp_t& seen : last.seen) seen = 0;
}

/// Relacy may run others before the store itself, not after it: until the next access, `last` is of the store before.
inline void store(std::size_t word, std::uint32_t value, rl::memory_order order, bool device_scope) {
    const std::size_t words_of_rank = machine.control_words + machine.slot_words;
    const int owner = static_cast<int>(word / words_of_rank);
    if (word % words_of_rank == 0) {
        fail("fault: rank %d tells rank %d of a fault: code %u, rank %u, phase %u", self().rank, owner, value & 0xff,
             (value >> 8 & 0xff) - 1, value >> 16);
    }
    touch(word, device_scope);
    const std::uint32_t version = ++machine.stores;
    machine.words[word].store(versioned(version, value), order, $);
    LastStore& last = machine.last[word];
    if (!last_store_is_before_us(last)) {
        fail("overwritten: rank %d stores to a word of rank %d that rank %d stored to, in no order", self().rank, owner,
             machine.threads[last.thread].rank);
    }
    if (owner != self().rank && !last_store_was_read(last)) {
        fail("overwritten: rank %d stores to a word of rank %d that may not have been read", self().rank, owner);
    }
    note_store(last, version);
}

}  // namespace model

// ---- who am I

struct ThreadIndex {
    operator unsigned() const { return model::self().thread; }
};
struct CtaIndex {
    operator unsigned() const { return model::self().cta; }
};
struct CtaCount {
    operator unsigned() const { return model::self().ctas; }
};
struct ThreadCount {
    operator unsigned() const { return model::self().threads; }
};
template <class T>
struct Index {
    T x;
};
inline constexpr Index<ThreadIndex> threadIdx{};
inline constexpr Index<CtaIndex> blockIdx{};
inline constexpr Index<CtaCount> gridDim{};
inline constexpr Index<ThreadCount> blockDim{};
inline constexpr unsigned wave_size = LATENT_MOE_WAVE_SIZE;

inline void sync_cta() {
    model::machine.neighbours->sync_cta();
}
inline void sync_wave() {
    model::machine.neighbours->sync_wave();
}
inline std::uint32_t sum_over_wave(std::uint32_t value) {
    return model::machine.neighbours->sum_over_wave(value);
}
inline void dependency_wait() {
    model::machine.neighbours->dependency_wait();
}
inline void release_dependents() {}
inline void let_others_run() {
    rl::yield(1, $);
}
/// Waits do not expire here: a wait without an end is a livelock, which Relacy reports.
inline std::uint64_t clock_ns() {
    return 1;
}

// ---- memory

template <Scope scope = Scope::system>
std::uint32_t load_relaxed(const std::uint32_t* from) {
    return model::load(model::index_of(from), rl::mo_relaxed, scope == Scope::device);
}
template <Scope scope = Scope::system>
uint2 load_relaxed(const uint2* from) {
    return {load_relaxed<scope>(&from->x), load_relaxed<scope>(&from->y)};
}
template <Scope scope = Scope::system>
uint4 load_relaxed(const uint4* from) {
    uint4 v;
    v.x = load_relaxed<scope>(&from->x), v.y = load_relaxed<scope>(&from->y);
    v.z = load_relaxed<scope>(&from->z), v.w = load_relaxed<scope>(&from->w);
    return v;
}
template <Scope scope = Scope::system>
void store_relaxed(std::uint32_t* to, std::uint32_t value) {
    model::store(model::index_of(to), value, rl::mo_relaxed, scope == Scope::device);
}
template <Scope scope = Scope::system>
void store_relaxed(std::uint64_t* to, std::uint64_t value);  // of bulk exchanges, which no model has
template <Scope scope = Scope::system>
void store_relaxed(uint2* to, uint2 v) {
    store_relaxed<scope>(&to->y, v.y), store_relaxed<scope>(&to->x, v.x);
}
template <Scope scope = Scope::system>
void store_relaxed(uint4* to, uint4 v) {
    store_relaxed<scope>(&to->w, v.w), store_relaxed<scope>(&to->z, v.z);
    store_relaxed<scope>(&to->y, v.y), store_relaxed<scope>(&to->x, v.x);
}
template <Scope scope = Scope::system>
std::uint32_t load_acquire(const std::uint32_t* from) {
    return model::load(model::index_of(from), rl::mo_acquire, scope == Scope::device);
}
template <Scope scope = Scope::system>
void store_release(std::uint32_t* to, std::uint32_t value) {
    model::store(model::index_of(to), value, rl::mo_release, scope == Scope::device);
}

inline uint4 load_whole16(const uint4* from) {
    return model::machine.headers[model::load(model::index_of(from), rl::mo_relaxed, false)];
}
inline void store_whole16(uint4* to, uint4 v) {
    model::Machine& m = model::machine;
    if (m.header_count == model::most_headers) model::fail("outside: more headers than the model has room for");
    m.headers[m.header_count] = v;
    model::store(model::index_of(to), m.header_count++, rl::mo_relaxed, false);
}

template <Scope scope = Scope::system>
std::uint32_t exchange_relaxed(std::uint32_t* at, std::uint32_t value) {
    const std::size_t word = model::index_of(at);
    model::touch(word, scope == Scope::device);
    const std::uint32_t version = ++model::machine.stores;
    const std::uint64_t before = model::machine.words[word].exchange(model::versioned(version, value), rl::mo_relaxed, $);
    model::note_store(model::machine.last[word], version);
    return static_cast<std::uint32_t>(before);
}
template <Scope scope = Scope::system>
std::uint32_t add_relaxed(std::uint32_t* at, std::uint32_t value) {
    const std::size_t word = model::index_of(at);
    model::touch(word, scope == Scope::device);
    const std::uint32_t version = ++model::machine.stores;
    std::uint64_t before = model::machine.words[word].debug_value();
    while (!model::machine.words[word].compare_exchange_strong(
        before, model::versioned(version, static_cast<std::uint32_t>(before) + value), rl::mo_relaxed, $)) {}
    model::note_store(model::machine.last[word], version);
    return static_cast<std::uint32_t>(before);
}

/// Shared memory between the protocol's warp and the others: only read when a wait has expired, which none does here.
template <class T>
T load_shared(std::uint32_t) {
    return {};
}
template <class T>
void store_shared(std::uint32_t, T) {}

template <Scope scope = Scope::system>
void fence() {
    if constexpr (scope == Scope::system) rl::atomic_thread_fence(rl::mo_acq_rel, $);
}

}  // namespace latent_moe::gpu

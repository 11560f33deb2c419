#include "faults/failing_allocation.h"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace latent_moe::faults {
namespace {

std::atomic<std::int64_t> left{0};  // 0: none fails

bool fails_now() noexcept {
    return left.load(std::memory_order_relaxed) > 0 && left.fetch_sub(1, std::memory_order_relaxed) == 1;
}

void* allocate(std::size_t bytes, std::size_t alignment) {
    if (fails_now()) throw std::bad_alloc();
    const std::size_t size = (bytes + alignment) / alignment * alignment;  // never 0
    void* const memory = std::aligned_alloc(alignment, size);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

}  // namespace

void fail_allocation(std::int64_t count) noexcept {
    left = count;
}

bool stop_failing() noexcept {
    return left.exchange(0) <= 0;
}

}  // namespace latent_moe::faults

namespace faults = latent_moe::faults;

void* operator new(std::size_t bytes) {
    return faults::allocate(bytes, alignof(std::max_align_t));
}
void* operator new[](std::size_t bytes) {
    return faults::allocate(bytes, alignof(std::max_align_t));
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
    return faults::allocate(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
    return faults::allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept {
    std::free(memory);
}
void operator delete[](void* memory) noexcept {
    std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
    std::free(memory);
}
void operator delete[](void* memory, std::size_t) noexcept {
    std::free(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
    std::free(memory);
}
void operator delete[](void* memory, std::align_val_t) noexcept {
    std::free(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
    std::free(memory);
}
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept {
    std::free(memory);
}

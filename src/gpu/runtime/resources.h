// Device memory, streams and events that free themselves. Each belongs to the device that was current when it was made.
#pragma once

#include <cstddef>
#include <utility>

#include "gpu/runtime/check.h"
#include "gpu/runtime/device_api.h"

namespace latent_moe::gpu {

/// Makes a device current for a scope.
class CurrentDevice {
public:
    explicit CurrentDevice(int device) {
        check(cudaGetDevice(&before_), "cudaGetDevice");
        changed_ = before_ != device;
        if (changed_) check(cudaSetDevice(device), "cudaSetDevice");
    }
    ~CurrentDevice() {
        if (changed_) static_cast<void>(cudaSetDevice(before_));
    }
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;

private:
    int before_ = 0;
    bool changed_ = false;
};

/// Something with a handle that is released once. `Kind` says how.
template <typename Kind>
class Owned {
public:
    Owned() = default;
    explicit Owned(typename Kind::Handle handle) : handle_(handle) {}
    Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    Owned& operator=(Owned&& other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~Owned() {
        if (handle_ != nullptr) Kind::release(handle_);
    }

    typename Kind::Handle get() const noexcept { return handle_; }
    explicit operator bool() const noexcept { return handle_ != nullptr; }

private:
    typename Kind::Handle handle_ = nullptr;
};

struct StreamKind {
    using Handle = cudaStream_t;
    static void release(Handle stream) { static_cast<void>(cudaStreamDestroy(stream)); }
};
struct EventKind {
    using Handle = cudaEvent_t;
    static void release(Handle event) { static_cast<void>(cudaEventDestroy(event)); }
};
struct DeviceMemoryKind {
    using Handle = std::byte*;
    static void release(Handle memory) { static_cast<void>(cudaFree(memory)); }
};
struct MappedMemoryKind {
    using Handle = std::byte*;
    static void release(Handle memory) { static_cast<void>(cudaFreeHost(memory)); }
};

using Stream = Owned<StreamKind>;
using Event = Owned<EventKind>;

/// Does not wait for the default stream; of the highest priority the device has where `urgent`.
Stream make_stream(bool urgent = false);
/// For ordering only, or for timing too.
Event make_event(bool timing = false);

class DeviceMemory {
public:
    DeviceMemory() = default;
    /// `what` names it if there is not enough.
    DeviceMemory(std::size_t bytes, const char* what);
    /// Of the kind that peers write while kernels here look at it.
    static DeviceMemory window(std::size_t bytes);

    std::byte* get() const noexcept { return memory_.get(); }
    std::size_t bytes() const noexcept { return memory_ ? bytes_ : 0; }

private:
    Owned<DeviceMemoryKind> memory_;
    std::size_t bytes_ = 0;
};

/// Host memory, zeroed, that every device reads and writes at the same address.
class MappedMemory {
public:
    MappedMemory() = default;
    MappedMemory(std::size_t bytes, const char* what);

    std::byte* get() const noexcept { return memory_.get(); }

private:
    Owned<MappedMemoryKind> memory_;
};

}  // namespace latent_moe::gpu

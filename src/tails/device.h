// What a caller of a backend needs beside it: memory, a stream, recorded work, a clock. The command line and the tests are
// such callers; tails are not.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>

#include "core/function_ref.h"
#include "latent_moe/context.h"

namespace latent_moe {

/// Work that was recorded once and can be run any number of times: a captured graph on a GPU.
class Recording {
public:
    virtual ~Recording() = default;
    /// Enqueues the work on the device's stream.
    virtual void replay() = 0;
};

/// `bytes` bytes to be written afresh from a master copy; both in device memory.
struct FreshInput {
    void* to = nullptr;
    const void* from = nullptr;
    std::size_t bytes = 0;
};

/// One rank's device. Not thread safe: a thread a rank. Everything throws `Error` on failure.
class Device {
public:
    virtual ~Device() = default;

    /// At least 256-byte aligned.
    virtual void* allocate(std::size_t bytes) = 0;
    virtual void release(void* memory) noexcept = 0;
    /// Both are done when they return.
    virtual void upload(void* to, const void* from, std::size_t bytes) = 0;
    virtual void download(void* to, const void* from, std::size_t bytes) = 0;

    /// What is passed to `Layer::run`; null where work is done when a call returns.
    virtual Stream stream() const noexcept = 0;
    /// Waits for all work of the stream; throws what it failed with.
    virtual void synchronize() = 0;

    /// Records what `body` enqueues on `stream()`. `body` and what it refers to must live as long as the recording.
    virtual std::unique_ptr<Recording> record(std::function<void()> body) = 0;
    /// Enqueues one kernel that occupies the whole device and writes the inputs, as the experts' last kernel would.
    virtual void produce(std::span<const FreshInput> inputs) = 0;
    /// Microseconds of the device's own clock for the work that `body` enqueues. Synchronises.
    virtual double time_us(FunctionRef<void()> body) = 0;
};

}  // namespace latent_moe

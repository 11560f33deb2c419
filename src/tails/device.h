// What a caller of a backend needs beside it: memory, a stream, recorded work, a clock. The command line and the tests are
// such callers; tails are not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "latent_moe/context.h"
#include "latent_moe/status.h"

namespace latent_moe {

/// Where tensors lie. Everything throws `Error` on failure.
class Memory {
public:
    virtual ~Memory() = default;

    /// At least 256-byte aligned.
    virtual void* allocate(std::size_t bytes) = 0;
    virtual void release(void* memory) noexcept = 0;
    /// Between the host and this memory, or within it. Done when they return.
    virtual void upload(void* to, const void* from, std::size_t bytes) = 0;
    virtual void download(void* to, const void* from, std::size_t bytes) = 0;
};

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

/// The kernel in front of a tail, which writes its inputs as the experts' last kernel would.
enum class Producer : std::uint8_t {
    late,         ///< takes every thread the device has; its dependents start when it has ended
    early,        ///< the same, but its dependents may start as soon as its own threads leave room
    cooperating,  ///< runs for 6 us in a corner of every multiprocessor, so that its dependents start beside it
};

/// One rank's device. Not thread safe: a thread a rank. Everything throws `Error` on failure.
class Device : public Memory {
public:
    /// What is passed to `Layer::run`; null where work is done when a call returns.
    virtual Stream stream() const noexcept = 0;
    /// Waits for all work of the stream; throws what it failed with.
    virtual void synchronize() = 0;

    /// Records what `body` enqueues on `stream()`. `body` and what it refers to must live as long as the recording.
    virtual std::unique_ptr<Recording> record(std::function<void()> body) = 0;
    /// Microseconds of one replay by the device's own clock. Where work is enqueued, another replay runs in front of it,
    /// which does not count: ranks whose work waits for each other's then begin alike, and enqueueing is not timed.
    virtual double time_us(Recording& recording) = 0;

    /// Of a memory of its own, how much anybody uses; 0 where memory is the host's.
    virtual std::size_t used_bytes() { return 0; }

    /// Whether `produce` can be used. It cannot where work is done when a call returns: nothing then runs in the shadow of
    /// what is in front of it, and inputs written beforehand are as good.
    virtual bool has_producers() const noexcept { return false; }
    /// Enqueues one kernel that writes the inputs.
    virtual void produce(Producer, std::span<const FreshInput>) {
        throw Error(StatusCode::unsupported, "this device has no producer kernels");
    }
};

}  // namespace latent_moe

// An all-gather of host bytes over a duplicate of the caller's communicator, through a small buffer on its device.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>

#include "core/log.h"
#include "gpu/runtime/nccl.h"
#include "gpu/runtime/resources.h"
#include "latent_moe/nccl.h"
#include "latent_moe/status.h"

namespace latent_moe {
namespace {

using gpu::check;
using gpu::nccl;

constexpr std::size_t most_bytes = std::size_t{1} << 20;  // of each rank at a time

class Duplicate {
public:
    Duplicate(ncclComm_t original, int timeout_ms) : timeout_(timeout_ms) {
        check(nccl().CommCuDevice(original, &device_), "ncclCommCuDevice");
        const gpu::CurrentDevice current(device_);
        check(nccl().CommUserRank(original, &rank_), "ncclCommUserRank");
        check(nccl().CommCount(original, &world_), "ncclCommCount");
        stream_ = gpu::make_stream();
        buffer_ = gpu::DeviceMemory(most_bytes * static_cast<std::size_t>(world_ + 1), "bootstrap over NCCL");
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.splitShare = 0;
        check(nccl().CommSplit(original, 0, rank_, &comm_, &config), "ncclCommSplit");
    }
    ~Duplicate() {
        if (comm_ == nullptr) return;
        if (broken_) {
            static_cast<void>(nccl().CommAbort(comm_));
        } else if (!gpu::destroy_within(timeout_, comm_, device_)) {
            log(LogLevel::error, "bootstrap over NCCL, rank {} of {}: a rank did not come within {} ms to its end", rank_,
                world_, timeout_.count());
        }
    }
    Duplicate(const Duplicate&) = delete;
    Duplicate& operator=(const Duplicate&) = delete;

    int rank() const noexcept { return rank_; }
    int world() const noexcept { return world_; }

    void all_gather(const void* send, void* received, std::size_t bytes) {
        const std::lock_guard lock(mutex_);
        const gpu::CurrentDevice current(device_);
        for (std::size_t done = 0; done < bytes; done += most_bytes) {
            const std::size_t part = std::min(most_bytes, bytes - done);
            std::byte* own = buffer_.get();
            std::byte* all = own + most_bytes;
            check(cudaMemcpyAsync(own, static_cast<const std::byte*>(send) + done, part, cudaMemcpyHostToDevice,
                                  stream_.get()),
                  "cudaMemcpyAsync");
            check(nccl().AllGather(own, all, part, ncclUint8, comm_, stream_.get()), "ncclAllGather");
            wait();
            for (int rank = 0; rank < world_; ++rank) {
                check(cudaMemcpyAsync(static_cast<std::byte*>(received) + static_cast<std::size_t>(rank) * bytes + done,
                                      all + static_cast<std::size_t>(rank) * part, part, cudaMemcpyDeviceToHost,
                                      stream_.get()),
                      "cudaMemcpyAsync");
            }
            check(cudaStreamSynchronize(stream_.get()), "cudaMemcpyAsync");
        }
    }

private:
    /// For the stream, but not for ever.
    void wait() {
        if (broken_) throw Error(StatusCode::aborted, "bootstrap over NCCL: an earlier exchange failed");
        const auto deadline = std::chrono::steady_clock::now() + timeout_;
        for (;;) {
            const cudaError_t state = cudaStreamQuery(stream_.get());
            if (state == cudaSuccess) return;
            if (state != cudaErrorNotReady) check(state, "ncclAllGather");
            if (std::chrono::steady_clock::now() > deadline) {
                broken_ = true;
                throw Error(StatusCode::timeout,
                            fmt::format("bootstrap over NCCL: a rank did not arrive within {} ms", timeout_.count()));
            }
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
    }

    std::chrono::milliseconds timeout_;
    int device_ = 0;
    int rank_ = 0;
    int world_ = 1;
    bool broken_ = false;
    std::mutex mutex_;
    gpu::Stream stream_;
    gpu::DeviceMemory buffer_;
    ncclComm_t comm_ = nullptr;
};

}  // namespace

Bootstrap nccl_ranks(void* communicator, int timeout_ms) {
    if (communicator == nullptr) throw Error(StatusCode::invalid_argument, "the NCCL communicator is null");
    const auto duplicate = std::make_shared<Duplicate>(static_cast<ncclComm_t>(communicator), timeout_ms);
    Bootstrap bootstrap{.rank = duplicate->rank(), .world = duplicate->world()};
    bootstrap.all_gather_bytes = [duplicate](const void* send, void* received, std::size_t bytes) {
        duplicate->all_gather(send, received, bytes);
    };
    return bootstrap;
}

}  // namespace latent_moe

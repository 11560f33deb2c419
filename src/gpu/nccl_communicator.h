// This context's own NCCL communicator, and the watch that keeps a wait for a dead peer from lasting for ever.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "gpu/runtime/nccl.h"
#include "gpu/runtime/resources.h"
#include "latent_moe/bootstrap.h"
#include "latent_moe/status.h"

namespace latent_moe::gpu {

class NcclCommunicator {
public:
    /// Collective, with the rank's device current; rank 0's unique id goes over the bootstrap.
    NcclCommunicator(const Bootstrap& bootstrap, int device, int timeout_ms);
    /// Takes leave of the peers, but waits no longer than the timeout for one that does not come.
    ~NcclCommunicator();
    NcclCommunicator(const NcclCommunicator&) = delete;
    NcclCommunicator& operator=(const NcclCommunicator&) = delete;

    ncclComm_t get() const noexcept { return comm_; }

    /// Around the operations of one call, on the call's stream. A stream that captures is not watched: its work is not in
    /// flight.
    void before(cudaStream_t stream);
    void after(cudaStream_t stream);

    /// What went wrong first. Never blocks.
    Status fault() const;
    /// Ends what is in flight, from any thread; later operations fail.
    void abort(const Status& why) noexcept;
    /// Whether it was aborted. Then nothing may be asked of it any more, nor be given back to it.
    bool has_ended() const noexcept;

private:
    void watch();

    ncclComm_t comm_ = nullptr;
    int rank_;
    int world_;
    int device_;
    std::chrono::milliseconds timeout_;
    Event started_;
    Event done_;

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    Status fault_;
    bool pending_ = false;  ///< `started_` and `done_` were recorded and `done_` has not been seen
    bool stop_ = false;
    bool aborted_ = false;
    std::thread watcher_;
};

}  // namespace latent_moe::gpu

#include "gpu/nccl_communicator.h"

#include <fmt/format.h>

#include "core/log.h"
#include "gpu/collective_setup.h"

namespace latent_moe::gpu {
namespace {

constexpr std::chrono::milliseconds watch_interval{20};

bool is_capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
}

}  // namespace

NcclCommunicator::NcclCommunicator(const Bootstrap& bootstrap, int device, int timeout_ms)
    : rank_(bootstrap.rank), world_(bootstrap.world), device_(device), timeout_(timeout_ms) {
    ncclUniqueId id{};
    together(bootstrap, nccl_name, [&] {
        started_ = make_event();
        done_ = make_event();
        if (bootstrap.rank == 0) check(nccl().GetUniqueId(&id), "ncclGetUniqueId");
        static_cast<void>(nccl());
    });
    id = gather(bootstrap, id).front();
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.splitShare = 0;
    together(bootstrap, nccl_name, [&] {
        check(nccl().CommInitRankConfig(&comm_, bootstrap.world, id, bootstrap.rank, &config), "ncclCommInitRankConfig");
    });
    watcher_ = std::thread([this] { watch(); });
}

NcclCommunicator::~NcclCommunicator() {
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
    }
    changed_.notify_all();
    if (watcher_.joinable()) watcher_.join();
    if (comm_ == nullptr || aborted_ || destroy_within(timeout_, comm_, device_)) return;
    log(LogLevel::error, "rank {} of {}: {} did not come within {} ms to the end of the {} communicator, which waits for it",
        rank_, world_, world_ == 2 ? fmt::format("rank {}", 1 - rank_) : std::string("a rank"), timeout_.count(), nccl_name);
}

void NcclCommunicator::before(cudaStream_t stream) {
    const std::lock_guard lock(mutex_);
    if (!fault_.ok()) throw Error(fault_.code(), fault_.message());
    if (pending_ || is_capturing(stream)) return;  // an earlier pair still stands for the whole queue behind it
    check(cudaEventRecord(started_.get(), stream), "cudaEventRecord");
}

void NcclCommunicator::after(cudaStream_t stream) {
    const std::lock_guard lock(mutex_);
    if (pending_ || is_capturing(stream)) return;
    check(cudaEventRecord(done_.get(), stream), "cudaEventRecord");
    pending_ = true;
}

Status NcclCommunicator::fault() const {
    const std::lock_guard lock(mutex_);
    return fault_;
}

bool NcclCommunicator::has_ended() const noexcept {
    const std::lock_guard lock(mutex_);
    return aborted_;
}

void NcclCommunicator::abort(const Status& why) noexcept {
    const std::lock_guard lock(mutex_);
    if (aborted_) return;
    aborted_ = true;
    if (fault_.ok()) fault_ = why;
    static_cast<void>(nccl().CommAbort(comm_));
}

void NcclCommunicator::watch() {
    static_cast<void>(cudaSetDevice(device_));
    // Looking at an event would otherwise break a capture that another thread has under way in global mode.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
    std::chrono::milliseconds waited{0};  // with `started_` seen and `done_` not
    std::unique_lock lock(mutex_);
    while (!stop_ && !aborted_) {
        changed_.wait_for(lock, watch_interval);
        if (stop_ || aborted_) break;
        Status fault;
        ncclResult_t error = ncclSuccess;
        if (nccl().CommGetAsyncError(comm_, &error) == ncclSuccess && error != ncclSuccess && error != ncclInProgress) {
            fault = {StatusCode::aborted, fmt::format("{}: {}", nccl_name, nccl().GetErrorString(error))};
        }
        // Only one pair at a time is watched: the queue behind it moves when it has.
        if (pending_ && cudaEventQuery(done_.get()) != cudaErrorNotReady) {
            pending_ = false;
            waited = {};
        } else if (pending_ && cudaEventQuery(started_.get()) == cudaSuccess) {
            waited += watch_interval;
            if (waited > timeout_) {
                fault = {StatusCode::timeout,
                         fmt::format("{}: a peer did not arrive within {} ms", nccl_name, timeout_.count())};
            }
        }
        if (fault.ok()) continue;
        fault_ = fault;
        aborted_ = true;
        static_cast<void>(nccl().CommAbort(comm_));
    }
}

}  // namespace latent_moe::gpu

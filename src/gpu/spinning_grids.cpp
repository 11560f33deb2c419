#include "gpu/spinning_grids.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "gpu/runtime/check.h"
#include "latent_moe/status.h"

namespace latent_moe::gpu {
namespace {

constexpr int contexts_beside = 2;
constexpr int fewest_ctas = 4;  // a header and one part of the data on each lane

struct Registry {
    std::mutex mutex;
    std::map<int, int> ctas;  // by device
};

Registry& registry() {
    static Registry instance;
    return instance;
}

int room(int multiprocessors, int reserved) {
    return std::max(0, multiprocessors - reserved);
}

}  // namespace

GridReservation::GridReservation(int device, int ctas, int reserved_multiprocessors) {
    int multiprocessors = 0;
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    int& taken = all.ctas[device];
    if (taken + ctas > room(multiprocessors, reserved_multiprocessors)) {
        throw Error(StatusCode::unavailable, fmt::format("device {} has room for {} CTAs that wait for peers ({} "
                                                         "multiprocessors, {} reserved); other contexts have {}, "
                                                         "this one needs {}",
                                                         device, room(multiprocessors, reserved_multiprocessors),
                                                         multiprocessors, reserved_multiprocessors, taken, ctas));
    }
    taken += ctas;
    device_ = device;
    ctas_ = ctas;
}

GridReservation::GridReservation(GridReservation&& other) noexcept
    : device_(other.device_), ctas_(std::exchange(other.ctas_, 0)) {}

GridReservation& GridReservation::operator=(GridReservation&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(ctas_, other.ctas_);
    return *this;
}

GridReservation::~GridReservation() {
    if (ctas_ == 0) return;
    const std::lock_guard lock(registry().mutex);
    registry().ctas[device_] -= ctas_;
}

LaneGrids lane_grids(int multiprocessors, int reserved_multiprocessors, int sharing, int fused_ctas) {
    const int all = room(multiprocessors, reserved_multiprocessors) / sharing;
    const int share = fused_ctas > all / contexts_beside ? all : all / contexts_beside;
    const int ctas = std::max(share, fewest_ctas);
    return {.main = ctas - ctas / 3, .side = std::max(2, ctas / 3), .alone = ctas};
}

}  // namespace latent_moe::gpu

#include "gpu/spinning_grids.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "gpu/grid_registry.h"
#include "gpu/runtime/check.h"
#include "gpu/runtime/device_api.h"
#include "latent_moe/status.h"

namespace latent_moe::gpu {
namespace {

constexpr int contexts_beside = 2;
constexpr int fewest_ctas = 4;  // a header and one part of the data on each lane

GridRegistry& registry() {
    static GridRegistry instance;
    return instance;
}

int room(int multiprocessors, int reserved) {
    return std::max(0, multiprocessors - reserved);
}

}  // namespace

GridReservation::GridReservation(int device, int ctas, int reserved_multiprocessors) {
    int multiprocessors = 0;
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    const int all = room(multiprocessors, reserved_multiprocessors);
    if (!registry().add(device, ctas, all)) {
        throw Error(
            StatusCode::unavailable,
            fmt::format("device {} has room for {} CTAs that wait for peers ({} multiprocessors, {} reserved); other "
                        "contexts have {} (twice theirs once they start kernels early), this one needs {}",
                        device, all, multiprocessors, reserved_multiprocessors, registry().taken(device), ctas));
    }
    device_ = device;
    ctas_ = ctas;
    room_ = all;
}

GridReservation::GridReservation(GridReservation&& other) noexcept
    : device_(other.device_), ctas_(std::exchange(other.ctas_, 0)), room_(other.room_), starts_early_(other.starts_early_) {}

GridReservation& GridReservation::operator=(GridReservation&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(ctas_, other.ctas_);
    std::swap(room_, other.room_);
    std::swap(starts_early_, other.starts_early_);
    return *this;
}

GridReservation::~GridReservation() {
    if (ctas_ != 0) registry().remove(device_, ctas_, starts_early_);
}

bool GridReservation::may_start_early() noexcept {
    if (ctas_ != 0 && !starts_early_) starts_early_ = registry().start_early(device_, ctas_, room_);
    return ctas_ == 0 || starts_early_;  // without a reservation nothing waits for peers
}

LaneGrids lane_grids(int multiprocessors, int reserved_multiprocessors, int sharing, int fused_ctas) {
    const int all = room(multiprocessors, reserved_multiprocessors) / sharing;
    const int share = fused_ctas > all / contexts_beside ? all : all / contexts_beside;
    const int ctas = std::max(share, fewest_ctas);
    return {.main = ctas - ctas / 3, .side = std::max(2, ctas / 3), .alone = ctas};
}

}  // namespace latent_moe::gpu

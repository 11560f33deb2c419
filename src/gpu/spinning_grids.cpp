#include "gpu/spinning_grids.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "gpu/grid_registry.h"
#include "gpu/runtime/check.h"
#include "gpu/runtime/device_api.h"
#include "gpu/runtime/vendor.h"
#include "latent_moe/status.h"

namespace latent_moe::gpu {
namespace {

GridRegistry& registry() {
    static GridRegistry instance;
    return instance;
}

}  // namespace

GridReservation::GridReservation(int device, int ctas, int reserved_multiprocessors) {
    int multiprocessors = 0;
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    room_ = room_of(multiprocessors, reserved_multiprocessors, vendor::free_for_a_cluster(device));
    if (!registry().add(device, ctas, room_)) {
        throw Error(
            StatusCode::unavailable,
            fmt::format("device {} has room for {} CTAs that wait for peers ({} multiprocessors, {} reserved), and for "
                        "{} beside any one context's; other contexts have {} (twice theirs once they start kernels "
                        "early), this one needs {}",
                        device, room_.all, multiprocessors, reserved_multiprocessors, room_.beside, registry().taken(device),
                        ctas));
    }
    device_ = device;
    ctas_ = ctas;
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

}  // namespace latent_moe::gpu

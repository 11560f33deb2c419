// Grids that wait for peers must all be resident together, or the one that is awaited may never start. Contexts register how
// many such CTAs they may have on a device at once; what does not fit is refused.
//
// A CTA counts as a whole multiprocessor (the norm's, with 512 threads of 128 registers, fills one). Everything else that
// runs on the device waits for nobody, so it ends and makes room, if it can begin (grid_registry.h).
#pragma once

#include "gpu/grid_registry.h"

namespace latent_moe::gpu {

class GridReservation {
public:
    GridReservation() = default;
    /// Throws `unavailable` with the numbers if the device has no room beside what is registered and what is reserved.
    GridReservation(int device, int ctas, int reserved_multiprocessors);
    GridReservation(GridReservation&& other) noexcept;
    GridReservation& operator=(GridReservation&& other) noexcept;
    ~GridReservation();

    /// Whether kernels may start before their predecessors have ended (grid_registry.h). Once true it stays true.
    bool may_start_early() noexcept;

private:
    int device_ = -1;
    int ctas_ = 0;
    Room room_{};
    bool starts_early_ = false;
};

}  // namespace latent_moe::gpu

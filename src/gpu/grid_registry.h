// The books of `GridReservation`: who may have how many waiting CTAs on a device. Knows no device, so that it can be tested
// anywhere.
//
// A kernel that starts before its predecessor has ended holds places while it can do nothing. Beside a second context that
// can be for ever: on one GPU A's call and A's next hold all places, on the other B's and B's next, and each waits for what
// the other GPU has no place for. So a context that starts kernels early counts twice beside others; alone it need not,
// since its calls get their places in order.
#pragma once

#include <map>
#include <mutex>

namespace latent_moe::gpu {

class GridRegistry {
public:
    /// False: there is no room for `ctas` beside those of others.
    bool add(int device, int ctas, int room) {
        const std::lock_guard lock(mutex_);
        Device& d = devices_[device];
        if (d.ctas + ctas > room) return false;
        d.ctas += ctas, ++d.contexts;
        return true;
    }
    /// Whether a context with `ctas` may start kernels early from now on. It may keep doing so (a captured graph will), so
    /// it counts twice for those that come later.
    bool start_early(int device, int ctas, int room) {
        const std::lock_guard lock(mutex_);
        Device& d = devices_[device];
        if (d.contexts > 1 && d.ctas + ctas > room) return false;
        d.ctas += ctas;
        return true;
    }
    void remove(int device, int ctas, bool starts_early) {
        const std::lock_guard lock(mutex_);
        Device& d = devices_[device];
        d.ctas -= starts_early ? 2 * ctas : ctas, --d.contexts;
    }
    int taken(int device) {
        const std::lock_guard lock(mutex_);
        return devices_[device].ctas;
    }

private:
    struct Device {
        int ctas = 0;  ///< twice those of contexts that start kernels early
        int contexts = 0;
    };
    std::mutex mutex_;
    std::map<int, Device> devices_;
};

}  // namespace latent_moe::gpu

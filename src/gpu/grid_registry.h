// The books of `GridReservation`: who may have how many waiting CTAs on a device. Knows no device, so that it can be tested
// anywhere.
//
// A kernel that starts before its predecessor has ended holds places while it can do nothing. Beside a second context that
// can be for ever: on one GPU A's call and A's next hold all places, on the other B's and B's next, and each waits for what
// the other GPU has no place for. So a context that starts kernels early counts twice beside others; alone it need not,
// since its calls get their places in order.
//
// What waits for nobody ends and makes room, but it must be able to begin: a product's kernel comes in clusters, whose CTAs
// need places near one another, and the places that others leave may lie anywhere. So all contexts but one may take less
// than all places, whichever that one is.
#pragma once

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <set>

namespace latent_moe::gpu {

/// Places of a device for CTAs that wait for peers, one a multiprocessor.
struct Room {
    int all;     ///< of all contexts together
    int beside;  ///< of all contexts but one
};
constexpr Room room_of(int multiprocessors, int reserved, int free_for_a_cluster) noexcept {
    const int all = std::max(0, multiprocessors - reserved);
    return {.all = all, .beside = std::clamp(multiprocessors - free_for_a_cluster, 0, all)};
}

class GridRegistry {
public:
    /// False: there is no room for `ctas` beside those of others.
    bool add(int device, int ctas, Room room) {
        const std::lock_guard lock(mutex_);
        Contexts& contexts = devices_[device];
        contexts.insert(ctas);
        if (fit(contexts, room)) return true;
        contexts.erase(contexts.find(ctas));
        return false;
    }
    /// Whether a context with `ctas` may start kernels early from now on. It may keep doing so (a captured graph will), so
    /// it counts twice for those that come later.
    bool start_early(int device, int ctas, Room room) {
        const std::lock_guard lock(mutex_);
        Contexts& contexts = devices_[device];
        contexts.erase(contexts.find(ctas));
        contexts.insert(2 * ctas);
        if (contexts.size() == 1 || fit(contexts, room)) return true;
        contexts.erase(contexts.find(2 * ctas));
        contexts.insert(ctas);
        return false;
    }
    void remove(int device, int ctas, bool starts_early) {
        const std::lock_guard lock(mutex_);
        Contexts& contexts = devices_[device];
        contexts.erase(contexts.find(starts_early ? 2 * ctas : ctas));
    }
    int taken(int device) {
        const std::lock_guard lock(mutex_);
        return sum(devices_[device]);
    }

private:
    using Contexts = std::multiset<int>;  ///< CTAs of each, twice those of one that starts kernels early

    static int sum(const Contexts& contexts) { return std::accumulate(contexts.begin(), contexts.end(), 0); }
    static bool fit(const Contexts& contexts, Room room) {
        const int all = sum(contexts);
        return all <= room.all && all - *contexts.begin() <= room.beside;
    }

    std::mutex mutex_;
    std::map<int, Contexts> devices_;
};

}  // namespace latent_moe::gpu

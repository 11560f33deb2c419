// Which call is this? The answer lives on the device, because a graph freezes its arguments.
//
// GUARANTEE. All CTAs of a call see the same epoch, all ranks agree on it as long as they make the same calls, and each call
// of a context has its own. CTA b of a grid of G reads the word b and, once all its threads have read it, writes epoch + 1
// to the words b, b + G, b + 2G, …: no CTA waits for another, and the next kernel, whatever its grid, finds all `max_grid`
// words equal. The order between kernels is that of the stream (with dependent launch, `dependency_wait`), so plain kernel
// order is the memory order here.
//
// SLOTS. Call n uses slot n mod 3 of the window. A mailbox word of call n must be re-armed by its reader before the kernel
// of call n + 1 ends (the mailboxes here: by the thread that read it, at once). The header of call n + 2 releases that
// (header.h), the peer acquires it in its own call n + 2, and only its call n + 3 writes the word again.
#pragma once

#include "bounded_wait.h"
#include "scoped.h"
#include "window.h"

namespace latent_moe::gpu {

/// Epochs count modulo a multiple of `slots`, so that the slots rotate evenly past the wrap too.
inline constexpr std::uint32_t epoch_period = static_cast<std::uint32_t>(slots) << 30;

struct Call {
    std::uint32_t epoch;
    bool leave;  ///< a fault was set before this call: do nothing
    LATENT_MOE_DEVICE int slot() const { return static_cast<int>(epoch % slots); }
};

/// By every thread, after `dependency_wait`. Both loads are in flight together with the caller's first loads.
LATENT_MOE_DEVICE Call enter_call(const Exchange& x) {
    const Control& c = control(x);
    const std::uint32_t epoch = load_relaxed<Scope::device>(&c.epoch[blockIdx.x]);
    const std::uint32_t fault = load_relaxed(&c.fault);
    return {epoch, faulted(x, fault, epoch)};
}

/// By every thread of the CTA (or by one full warp of it: pass its lane and 32), after all threads of the CTA have entered.
LATENT_MOE_DEVICE void leave_call(const Exchange& x, const Call& call, int thread, int threads) {
    const std::uint32_t next = call.epoch + 1 == epoch_period ? 0 : call.epoch + 1;
    for (int i = blockIdx.x + thread * gridDim.x; i < max_grid; i += threads * gridDim.x) {
        store_relaxed<Scope::device>(&control(x).epoch[i], next);
    }
}

}  // namespace latent_moe::gpu

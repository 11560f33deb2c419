// Waiting for a peer, but not for ever.
//
// GUARANTEE. A wait ends when the data came, when `timeout_ns` have passed on this GPU's clock, when the context's fault
// word is set (by another thread, a peer, or the host that aborts). In the last two cases the fault word is set from then
// on, on this rank and on every peer that can be reached, and all kernels of the context leave on entry: a captured step of
// 92 tails fails in one timeout. The first fault of a rank is written to the host's record once, `code` last, after a
// system-scope fence: a host that reads a non-zero `code` (acquire) sees the whole record. A fault word carries no data, so
// relaxed accesses suffice for it.
#pragma once

#include "scoped.h"
#include "window.h"

namespace latent_moe::gpu {

LATENT_MOE_DEVICE Control& control_of(const Exchange& x, int rank) {
    return *static_cast<Control*>(x.window.base[rank]);
}
LATENT_MOE_DEVICE Control& control(const Exchange& x) {
    return control_of(x, x.window.rank);
}

/// The fault word: what a rank tells its peers. 0: none.
LATENT_MOE_DEVICE std::uint32_t fault_word(FaultCode code, int rank, Phase phase) {
    return static_cast<std::uint32_t>(code) | static_cast<std::uint32_t>(rank + 1) << 8 |
           static_cast<std::uint32_t>(phase) << 16;
}

/// Fills the host's record, if nobody did.
LATENT_MOE_DEVICE_ANY bool record_fault(const Exchange& x, const FaultRecord& fault) {
    if (exchange_relaxed<Scope::device>(&control(x).reported, 1) != 0) return false;
    *x.record = FaultRecord{0, fault.rank, fault.phase, fault.layer, fault.call, fault.expected, fault.found};
    fence<Scope::system>();
    store_relaxed(&x.record->code, fault.code);
    return true;
}

LATENT_MOE_DEVICE_ANY void tell_everybody(const Exchange& x, std::uint32_t word) {
    for (int r = 0; r < x.window.world; ++r) store_relaxed(&control_of(x, r).fault, word);
}

/// Sets this rank's fault word and its peers', and tells the host. A peer blames `x.window.rank` for a mismatch that it did
/// not find itself, and whom this rank blames for anything else.
LATENT_MOE_DEVICE_ANY void raise_fault(const Exchange& x, std::uint32_t epoch, FaultCode code, int rank, Phase phase,
                                       std::uint64_t expected, std::uint64_t found) {
    record_fault(
        x, {static_cast<std::uint32_t>(code), rank, static_cast<std::uint32_t>(phase), x.layer, epoch, expected, found});
    tell_everybody(x, fault_word(code, code == FaultCode::mismatch ? x.window.rank : rank, phase));
}

/// True if a kernel that reads `word` in `Control::fault` must leave. The first to see a fault that came from elsewhere
/// tells the host of it, and the peers of an abort.
LATENT_MOE_DEVICE_ANY bool faulted(const Exchange& x, std::uint32_t word, std::uint32_t epoch) {
    if (word == 0) return false;
    const bool first =
        record_fault(x, {word & 0xff, static_cast<int>(word >> 8 & 0xff) - 1, word >> 16, x.layer, epoch, 0, 0});
    if (first && (word & 0xff) == static_cast<std::uint32_t>(FaultCode::aborted)) tell_everybody(x, word);
    return true;
}

/// One thread's waiting. Use: `while (!ready()) if (wait.over(peer, phase)) break;`
class Wait {
public:
    LATENT_MOE_DEVICE Wait(const Exchange& exchange, std::uint32_t epoch) : x_(exchange), epoch_(epoch) {}

    /// Call after every look that found nothing. True: give up (now and ever after).
    LATENT_MOE_DEVICE bool over(int peer, Phase phase) {
        let_others_run();
        if ((++looks_ & 31) != 0) return gave_up_;
        return look_around(peer, phase);
    }

    LATENT_MOE_DEVICE bool gave_up() const { return gave_up_; }

private:
    /// Touches no host memory: thousands of waiting threads that read over PCIe stalled the launches of the very peer that
    /// they waited for.
    LATENT_MOE_DEVICE_CALL bool look_around(int peer, Phase phase) {
        if (gave_up_) return true;
        const std::uint64_t now = clock_ns();
        if (start_ == 0) start_ = now;
        gave_up_ = faulted(x_, load_relaxed(&control(x_).fault), epoch_);
        if (!gave_up_ && now - start_ > x_.timeout_ns) {
            gave_up_ = true;
            raise_fault(x_, epoch_, FaultCode::timeout, peer, phase, 0, 0);
        }
        return gave_up_;
    }

    const Exchange& x_;
    std::uint64_t start_ = 0;  ///< of the first wait that took long enough to look at the clock
    std::uint32_t epoch_;
    std::uint32_t looks_ = 0;
    bool gave_up_ = false;
};

}  // namespace latent_moe::gpu

// Setting up with other ranks: gathers of plain values, and steps that succeed or fail on all ranks together.
#pragma once

#include <array>
#include <exception>
#include <string>
#include <type_traits>
#include <vector>

#include "latent_moe/bootstrap.h"

namespace latent_moe::gpu {

/// Collective: every rank's `value`, in rank order.
template <typename Value>
std::vector<Value> gather(const Bootstrap& bootstrap, const Value& value) {
    static_assert(std::is_trivially_copyable_v<Value>);
    std::vector<Value> all(static_cast<std::size_t>(bootstrap.world));
    bootstrap.all_gather_bytes(&value, all.data(), sizeof(Value));
    return all;
}

/// Collective: rethrows this rank's failure; throws `unavailable` naming the first rank that failed, if another did.
void throw_together(const Bootstrap& bootstrap, const char* what, const std::exception_ptr& failure);

/// Collective: runs `step`, which is local or collective in a way that cannot block when another rank fails.
template <typename Step>
void together(const Bootstrap& bootstrap, const char* what, Step step) {
    std::exception_ptr failure;
    try {
        step();
    } catch (const std::exception&) {
        failure = std::current_exception();
    }
    throw_together(bootstrap, what, failure);
}

}  // namespace latent_moe::gpu

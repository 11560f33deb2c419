// Outside peers of the tails, for `bench`: the same arithmetic composed of other people's libraries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "latent_moe/context.h"
#include "tails/device.h"

namespace latent_moe {

class ExternalTail {
public:
    virtual ~ExternalTail() = default;

    /// As it stands in a table: "external:LIBRARIES schedule".
    virtual const std::string& name() const noexcept = 0;
    virtual const char* libraries() const noexcept = 0;
    /// The tail of ours whose bytes and arithmetic it shares; for its floor.
    virtual Tail like() const noexcept = 0;
    /// Where its inputs and its output must lie. Allocations are collective.
    virtual Memory& memory() noexcept = 0;
    /// One tail of the layer that was added `layer`-th; enqueues only. `shared` may be overwritten.
    virtual void run(std::size_t layer, const TailInput& input, Rows out, Stream stream) = 0;
};

/// All that a backend knows here. One rank's; everything but `tails` and `refused` is collective.
class ExternalTails {
public:
    struct Refused {
        std::string name;
        std::string reason;
    };

    virtual ~ExternalTails() = default;

    /// The whole W_up; the source may be freed on return.
    virtual void add_layer(const WeightView& up_projection, const void* gamma) = 0;
    /// Before calls of so many tokens: the libraries' algorithms are chosen by measuring.
    virtual void prepare(std::int64_t tokens) = 0;

    virtual std::vector<ExternalTail*> tails() = 0;
    virtual const std::vector<Refused>& refused() const noexcept = 0;
};

}  // namespace latent_moe

// What the project's own programs ask a context for beyond its public API.
#pragma once

#include <cstddef>

#include "core/planner.h"
#include "latent_moe/context.h"
#include "tails/backend.h"

namespace latent_moe {

class ContextAccess {
public:
    /// What the plan was made from.
    static Capabilities capabilities(const Context& context);
    /// For tests that damage a context.
    static Backend& backend(const Context& context);
    static PackedLayer& packed_layer(const Context& context, std::size_t index);
};

}  // namespace latent_moe

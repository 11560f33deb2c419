// What the project's own programs ask a context for beyond its public API.
#pragma once

#include "core/planner.h"
#include "latent_moe/context.h"

namespace latent_moe {

class ContextAccess {
public:
    /// What the plan was made from.
    static Capabilities capabilities(const Context& context);
};

}  // namespace latent_moe

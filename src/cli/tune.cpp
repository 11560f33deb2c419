// `tune`: measures the crossovers on this machine. To come.
#include "cli/command.h"
#include "latent_moe/status.h"

namespace latent_moe::cli {

Command tune_command() {
    return {.name = "tune",
            .summary = "Measures on this machine which tail is best for how many tokens (not built yet)",
            .examples = "  latent-moe tune",
            .add_options = [](CLI::App& app, Arguments&) { app.allow_extras(); },
            .execute = [](const Arguments&, Ranks&) -> int {
                throw Error(StatusCode::unavailable,
                            "tune is not built yet: the plan uses the cost model's constants (see `latent-moe explain`)");
            }};
}

}  // namespace latent_moe::cli

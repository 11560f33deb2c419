// Which table of measured times a context's plan goes by.
#pragma once

#include <string>

#include "core/planner.h"
#include "core/tune_table.h"

namespace latent_moe {

/// For `Options::tune_table`: a file's table that fits; `auto`: a shipped one; `none`. Where none fits the note says why.
/// Throws `io` for a file that is missing or broken.
PlanSource find_tune_table(const std::string& asked, const TuneKey& here);

}  // namespace latent_moe

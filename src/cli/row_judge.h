// Whether every row of an output is right. `judge.h` asks how accurate a tail is over all its rows, and would not see one
// wrong element among a million; this asks of each row alone, with more room for chance.
#pragma once

#include <optional>
#include <string>

#include "core/matrix.h"
#include "core/reference.h"
#include "latent_moe/plan.h"

namespace latent_moe::cli {

/// What is wrong with the first row that is not as near to float64 as twice the unfused chain is (three times for
/// `late_reduce`, which rounds once more), or that is not finite where the chain is; nothing if all rows are right.
std::optional<std::string> find_wrong_row(const ConstMatrix& out, const ReferenceInput& input, Tail tail);

}  // namespace latent_moe::cli

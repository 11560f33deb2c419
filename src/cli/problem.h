// What a command works on, made from the options and from the files that they name.
#pragma once

#include <optional>
#include <vector>

#include "cli/arguments.h"
#include "cli/ranks.h"
#include "cli/tensors.h"
#include "latent_moe/options.h"
#include "latent_moe/shape.h"

namespace latent_moe::cli {

struct Problem {
    Shape shape;
    int world = 1;
    std::vector<std::int64_t> tokens;
    Options options;
    std::int64_t layer = 0;  ///< whose weights are used
    WeightSource weights;
    std::optional<io::TensorFile> inputs;

    std::int64_t most_tokens() const;
    /// The rows of W_up that a rank packs: its shard where rows divide evenly, else all.
    TokenRange rows_of_rank(int rank) const;
};

/// Opens the files, settles the number of ranks and checks everything against everything. `fallback_tokens` where neither
/// `--tokens` nor an inputs file says.
Problem make_problem(const Arguments& arguments, Ranks& ranks, const std::vector<std::int64_t>& fallback_tokens);

/// Throws `out_of_memory` if this machine cannot hold the work on so many layers, with the reference where it is `checked`.
void require_run_memory(const Problem& problem, bool checked, int layers);

/// Whether a tail needs the whole W_up on every rank, if there are several.
bool needs_whole_weights(Tail tail) noexcept;

/// One call's inputs for the largest number of tokens. `needed[rank]`: whether that rank's partials are wanted here.
CallInputs make_inputs(const Arguments& arguments, const Problem& problem, const std::vector<bool>& needed,
                       std::uint64_t instance = 0);
/// The same for the ranks of this process, or for all of them where outputs are checked in it.
CallInputs make_inputs(const Arguments& arguments, const Problem& problem, const Ranks& ranks, bool checked);

}  // namespace latent_moe::cli

// What the ranks of `run`, `verify`, `bench` and `op` do alike.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/problem.h"
#include "core/function_ref.h"
#include "latent_moe/context.h"

namespace latent_moe::cli {

/// Collective: a sealed context with these layers.
Context make_context(Problem& problem, const Bootstrap& bootstrap, const std::vector<std::int64_t>& layers);

/// Whether `tail` may run so many tokens; if not, why.
std::optional<std::string> refusal_of(const Plan& plan, Tail tail);

/// Throws `unsupported`: of the tails that were asked for none can run for any of the numbers of tokens.
[[noreturn]] void throw_none_can_run(const TailChoice& choice, const Refusal* first_refusal);

/// One rank's memory for an output of at most `most_tokens` tokens.
class OutputRows {
public:
    OutputRows(const Context& context, std::int64_t most_tokens);

    /// Every byte of the rows that a call of `tokens` writes.
    void fill_bytes(int value) noexcept { rows_.fill_bytes(value); }
    Rows rows() noexcept { return rows_.view().data; }
    /// What this rank holds after a call of `tokens`: all rows, or its own where the caller is sequence-parallel.
    ConstMatrix written(std::int64_t tokens) const noexcept;
    /// Collective: the whole output.
    ConstMatrix whole(const Bootstrap& bootstrap, std::int64_t tokens);

private:
    const Context* context_;
    Tensor rows_;
    Tensor whole_;
};

/// This rank's own rows of the output for a sequence-parallel context; nothing for others.
std::optional<TokenRange> own_rows(const Context& context, std::int64_t tokens);

/// Collective: whether all ranks hold the same bits.
bool same_on_all_ranks(const Bootstrap& bootstrap, const ConstMatrix& matrix);

struct Timing {
    double median_us = 0;
    double p10_us = 0;
    double p90_us = 0;
    int repeats = 0;
};

/// Collective: runs `call` until about a second has passed, or `repeats` times, after a run that does not count. The ranks
/// start together; the slowest counts.
Timing time_calls(const Bootstrap& bootstrap, std::optional<int> repeats, FunctionRef<void(int repetition)> call);

/// For people: "hidden 7168, latent 3584, norm rms (eps 1e-05), bf16"
std::string shape_text(const Shape& shape);

}  // namespace latent_moe::cli

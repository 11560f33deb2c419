// Gates, then costs: which tail runs. Costs are those of a table that `tune` measured, or else the cost model's.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/machine.h"
#include "core/tune_table.h"
#include "latent_moe/options.h"
#include "latent_moe/plan.h"
#include "latent_moe/shape.h"

namespace latent_moe {

/// What a backend can do, as far as the choice of a tail depends on it.
struct Capabilities {
    Machine machine;
    std::string device;  ///< one rank's, as tables of `tune` are keyed
    std::string links;   ///< how data gets from rank to rank, alike
    double weight_element_bytes = 2;
    bool concurrent_lanes = true;         ///< two collectives may be under way at once
    std::string concurrent_lanes_reason;  ///< why not
    bool fused = false;
    std::string fused_reason = "this backend has no fused kernel";
    bool dependent_launch = false;             ///< the fused tail may start before the kernel in front of it has ended
    std::int64_t one_stage_bytes = INT64_MAX;  ///< most latents of a rank that the fused tail may send to every other
    std::string not_captured_reason;           ///< why the portable tails may not be captured; empty: they may
    std::int64_t row_alignment = 1;            ///< bytes: where rows of the caller's must begin
    bool whole_weights = false;                ///< the whole W_up is on every rank
    bool shares_device = false;                ///< ranks share devices: what goes between them crosses no link
    bool host_memory = false;                  ///< the caller's tensors are host memory, so their values can be checked
    std::string no_batch_invariance;           ///< why a row's bits depend on the rest of the batch; empty: they need not
};

/// Whether a call through this tail may come in two halves (`Layer::begin`).
constexpr bool has_halves(Tail tail) noexcept {
    return tail == Tail::replicated || tail == Tail::column_parallel || tail == Tail::token_parallel;
}

/// Where a plan's costs come from.
struct PlanSource {
    std::optional<TuneTable> table;  ///< that fits this context; else the cost model is asked
    std::string note;                ///< which table it is, or why there is none
};

class Planner {
public:
    Planner(const Shape& shape, int world, const Options& options, Capabilities capabilities, PlanSource source = {});

    /// The tail for a call of `tokens` tokens; nothing if none can run. Does not allocate.
    std::optional<Tail> choose(std::int64_t tokens, bool in_halves = false) const noexcept;
    /// Whether this tail may run at all for so many tokens.
    bool allowed(Tail tail, std::int64_t tokens) const noexcept { return gate(tail, tokens) == Gate::open; }
    /// Why it may not; empty if it may.
    std::string refusal(Tail tail, std::int64_t tokens) const;

    Plan plan(std::int64_t tokens) const;

private:
    enum class Gate : std::uint8_t {
        open,
        one_rank,
        no_shared,
        shared_reduced,
        indivisible_columns,
        norm,
        capacity,
        max_tokens,
        whole_weights,
        lanes,
        fused_kernel,
        sequence_parallel,
        other_tail_asked,
        token_limit,
        custom_all_reduce,
        one_stage,
        other_reducer,
        capture,
    };

    /// From so many tokens on, until the next range begins; without a tail, the cost model is asked.
    struct Range {
        std::int64_t from = 0;
        std::optional<Tail> tail;
    };

    Gate gate(Tail tail, std::int64_t tokens) const noexcept;
    std::optional<Tail> choice_for_all_tokens() const noexcept;
    std::int64_t latent_bytes(std::int64_t tokens) const noexcept;
    std::int64_t summand_bytes(std::int64_t tokens) const noexcept;  ///< of the shared partial
    double model_us(Tail tail, std::int64_t tokens) const noexcept;
    std::optional<Tail> cheapest_of_model(std::int64_t tokens, bool in_halves) const noexcept;

    // With a table.
    bool measured(Tail tail, std::int64_t tokens) const noexcept;
    std::vector<std::int64_t> stops() const;
    std::vector<Range> ranges(bool in_halves) const;
    std::optional<Tail> chosen_by_table(std::int64_t tokens, bool in_halves) const noexcept;

    Shape shape_;
    int world_;
    Options options_;
    bool kept_to_one_ = false;  ///< `options_.tail` is the choice for all numbers of tokens, not the caller's
    Capabilities capabilities_;
    PlanSource source_;
    std::vector<Range> ranges_;  ///< empty without a table
    std::vector<Range> ranges_in_halves_;
};

}  // namespace latent_moe

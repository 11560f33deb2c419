#include "core/planner.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/cost_model.h"

namespace latent_moe {
namespace {

constexpr Tail tail_at(int index) noexcept {
    return static_cast<Tail>(index);
}

/// Tails in which a rank multiplies by its own rows of W_up only.
constexpr bool splits_columns(Tail tail) noexcept {
    return tail == Tail::column_parallel || tail == Tail::fused;
}

}  // namespace

Planner::Planner(const Shape& shape, int world, const Options& options, Capabilities capabilities, PlanSource source)
    : shape_(shape), world_(world), options_(options), capabilities_(std::move(capabilities)), source_(std::move(source)) {
    if (options_.batch_invariant && !options_.tail) {
        options_.tail = choice_for_all_tokens();
        kept_to_one_ = true;
    }
    if (!source_.table) return;
    ranges_ = ranges(false);
    ranges_in_halves_ = ranges(true);
}

/// Tails round differently, so a batch-invariant context keeps to one: the cheapest, for some tokens, of those that can run
/// any number of them.
std::optional<Tail> Planner::choice_for_all_tokens() const noexcept {
    constexpr std::int64_t some_tokens = 64;
    std::optional<Tail> best;
    double best_us = 0;
    bool best_known = false;
    for (int index = 0; index < tail_count; ++index) {
        const Tail tail = tail_at(index);
        if (!allowed(tail, 1) || !allowed(tail, options_.max_tokens)) continue;
        const bool known = measured(tail, some_tokens);
        const double us = known ? *source_.table->us(tail, some_tokens) : model_us(tail, some_tokens);
        if (best && (known != best_known ? best_known : us >= best_us)) continue;  // measured ones first
        best = tail;
        best_us = us;
        best_known = known;
    }
    return best;
}

std::int64_t Planner::latent_bytes(std::int64_t tokens) const noexcept {
    return tokens * shape_.latent * static_cast<std::int64_t>(bytes_of(shape_.activations));
}
std::int64_t Planner::summand_bytes(std::int64_t tokens) const noexcept {
    return tokens * shape_.hidden * static_cast<std::int64_t>(bytes_of(shape_.activations));
}

Planner::Gate Planner::gate(Tail tail, std::int64_t tokens) const noexcept {
    if (options_.tail && *options_.tail != tail) return Gate::other_tail_asked;
    if (tokens > options_.max_tokens) return Gate::max_tokens;
    if (tokens > options_.tail_token_limit[static_cast<std::size_t>(tail)]) return Gate::token_limit;
    if (world_ == 1 && tail != Tail::replicated) return Gate::one_rank;
    if (options_.sequence_parallel && world_ > 1 && tail != Tail::token_parallel) return Gate::sequence_parallel;
    if (tail == Tail::late_reduce && shape_.norm != Norm::none) return Gate::norm;
    if (splits_columns(tail) && shape_.hidden % world_ != 0) return Gate::indivisible_columns;
    if (tail == Tail::overlap && options_.shared == SharedState::absent) return Gate::no_shared;
    if ((tail == Tail::overlap || tail == Tail::late_reduce) && options_.shared == SharedState::reduced)
        return Gate::shared_reduced;
    if (tail == Tail::fused && !capabilities_.fused) return Gate::fused_kernel;
    if (tail == Tail::fused && !options_.custom_all_reduce) return Gate::custom_all_reduce;
    if (tail == Tail::fused && tokens > options_.capacity_tokens) return Gate::capacity;
    if (tail == Tail::fused && latent_bytes(tokens) > capabilities_.one_stage_bytes) return Gate::one_stage;
    if (tail == Tail::fused && summand_bytes(tokens) >= options_.other_reducer_from_bytes) return Gate::other_reducer;
    if (tail != Tail::fused && world_ > 1 && options_.captured && !capabilities_.not_captured_reason.empty()) {
        return Gate::capture;
    }
    if (tail == Tail::overlap && !capabilities_.concurrent_lanes) return Gate::lanes;
    if (!splits_columns(tail) && world_ > 1 && !capabilities_.whole_weights) return Gate::whole_weights;
    return Gate::open;
}

std::string Planner::refusal(Tail tail, std::int64_t tokens) const {
    switch (gate(tail, tokens)) {
        case Gate::open: return {};
        case Gate::one_rank: return "there is one rank, so nothing to exchange: replicated is the whole job";
        case Gate::no_shared: return "there is no shared partial whose reduction could overlap";
        case Gate::shared_reduced:
            return tail == Tail::overlap
                       ? "the shared partial is already reduced, so there is nothing to overlap"
                       : "the shared partial is already reduced, and this tail would sum it over the ranks again";
        case Gate::indivisible_columns:
            return fmt::format("hidden {} is not divisible by {} ranks, so the rows of W_up cannot be split evenly",
                               shape_.hidden, world_);
        case Gate::norm: return "the norm needs the summed latent before the projection";
        case Gate::capacity:
            return fmt::format("{} tokens exceed the capacity of {} tokens", tokens, options_.capacity_tokens);
        case Gate::max_tokens: return fmt::format("{} tokens exceed max_tokens {}", tokens, options_.max_tokens);
        case Gate::whole_weights:
            return fmt::format(
                "it needs the whole W_up on every rank ({:.1f} MB a layer instead of {:.1f}); keep_whole_weights is off",
                static_cast<double>(shape_.hidden * shape_.latent) * capabilities_.weight_element_bytes / 1e6,
                static_cast<double>(shape_.hidden * shape_.latent) * capabilities_.weight_element_bytes / 1e6 / world_);
        case Gate::lanes: return capabilities_.concurrent_lanes_reason;
        case Gate::fused_kernel: return capabilities_.fused_reason;
        case Gate::sequence_parallel:
            return "a sequence-parallel caller wants its own tokens only: token_parallel stops before the gather";
        case Gate::other_tail_asked:
            return kept_to_one_ ? fmt::format("a batch-invariant context keeps to one tail, {}", name(*options_.tail))
                                : fmt::format("the options ask for {} only", name(*options_.tail));
        case Gate::custom_all_reduce: return "custom all-reduce is switched off, and this tail has one inside";
        case Gate::one_stage:
            return fmt::format("{} bytes of latents exceed the {} that may go to every one of {} ranks in one stage",
                               latent_bytes(tokens), capabilities_.one_stage_bytes, world_);
        case Gate::other_reducer:
            return fmt::format("a summand of {} bytes belongs to another reducer, which takes precedence from {} on",
                               summand_bytes(tokens), options_.other_reducer_from_bytes);
        case Gate::capture: return fmt::format("the calls are to be captured, and {}", capabilities_.not_captured_reason);
        case Gate::token_limit:
            return fmt::format("{} tokens exceed the limit of {} tokens that the options set for it", tokens,
                               options_.tail_token_limit[static_cast<std::size_t>(tail)]);
    }
    return "unknown";
}

double Planner::model_us(Tail tail, std::int64_t tokens) const noexcept {
    return expected_us(tail,
                       {.shape = shape_,
                        .world = world_,
                        .tokens = tokens,
                        .shared = options_.shared,
                        .weight_element_bytes = capabilities_.weight_element_bytes},
                       capabilities_.machine);
}

std::optional<Tail> Planner::cheapest_of_model(std::int64_t tokens, bool in_halves) const noexcept {
    std::optional<Tail> best;
    double best_us = 0;
    for (int index = 0; index < tail_count; ++index) {
        const Tail tail = tail_at(index);
        if (!allowed(tail, tokens) || (in_halves && !has_halves(tail))) continue;
        const double us = model_us(tail, tokens);
        if (!best || us < best_us) {
            best = tail;
            best_us = us;
        }
    }
    return best;
}

/// Whether the table knows a tail that may run.
bool Planner::measured(Tail tail, std::int64_t tokens) const noexcept {
    return source_.table && source_.table->us(tail, tokens) && allowed(tail, tokens);
}

/// Between two neighbours of these every gate stands as it is and every tail's time is a straight line.
std::vector<std::int64_t> Planner::stops() const {
    std::vector<std::int64_t> all = source_.table->tokens();
    const auto add_gate = [&](std::int64_t most) {
        if (most < 0 || most >= max_tokens_limit) return;
        all.push_back(most);
        all.push_back(most + 1);
    };
    all.push_back(0);
    add_gate(options_.capacity_tokens);
    add_gate(options_.max_tokens);
    if (capabilities_.one_stage_bytes < INT64_MAX) add_gate(capabilities_.one_stage_bytes / latent_bytes(1));
    if (options_.other_reducer_from_bytes < INT64_MAX) add_gate((options_.other_reducer_from_bytes - 1) / summand_bytes(1));
    for (const std::int64_t most : options_.tail_token_limit) add_gate(most);
    for (const std::vector<TunePoint>& known : source_.table->points) {
        if (known.size() == 1) add_gate(known.front().tokens - 1), add_gate(known.front().tokens);  // it holds there alone
    }
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    return all;
}

/// Walks the stops: the tail of the last one stays unless another is clearly faster, and then gives way where the lines of
/// the two cross.
std::vector<Planner::Range> Planner::ranges(bool in_halves) const {
    const TuneTable& table = *source_.table;
    const auto us = [&](Tail tail, std::int64_t tokens) { return *table.us(tail, tokens); };
    const auto may = [&](Tail tail, std::int64_t tokens) {
        return measured(tail, tokens) && (!in_halves || has_halves(tail));
    };
    std::vector<Range> found;
    std::int64_t last_stop = -1;
    for (const std::int64_t stop : stops()) {
        std::optional<Tail> choice;
        for (int index = 0; index < tail_count; ++index) {
            const Tail tail = tail_at(index);
            if (may(tail, stop) && (!choice || us(tail, stop) < us(*choice, stop))) choice = tail;
        }
        const std::optional<Tail> holder = found.empty() ? std::nullopt : found.back().tail;
        const bool holder_can = holder && may(*holder, stop);
        if (holder_can && us(*holder, stop) <= us(*choice, stop) * (1 + tune_hysteresis)) choice = holder;
        if (found.empty() || choice != holder) {
            std::int64_t from = stop;
            while (holder_can && from - 1 > last_stop && us(*choice, from - 1) <= us(*holder, from - 1)) --from;
            found.push_back({found.empty() ? 0 : from, choice});
        }
        last_stop = stop;
    }
    return found;
}

std::optional<Tail> Planner::chosen_by_table(std::int64_t tokens, bool in_halves) const noexcept {
    const std::vector<Range>& ranges = in_halves ? ranges_in_halves_ : ranges_;
    const auto behind = std::upper_bound(ranges.begin(), ranges.end(), tokens,
                                         [](std::int64_t wanted, const Range& range) { return wanted < range.from; });
    return behind == ranges.begin() ? std::nullopt : std::prev(behind)->tail;
}

std::optional<Tail> Planner::choose(std::int64_t tokens, bool in_halves) const noexcept {
    const std::optional<Tail> tail = chosen_by_table(tokens, in_halves);
    return tail ? tail : cheapest_of_model(tokens, in_halves);
}

Plan Planner::plan(std::int64_t tokens) const {
    Plan plan{.tokens = tokens};
    for (int index = 0; index < tail_count; ++index) {
        const Tail tail = tail_at(index);
        if (!allowed(tail, tokens)) {
            plan.refused.push_back({tail, refusal(tail, tokens)});
        } else if (measured(tail, tokens)) {
            plan.candidates.push_back({.tail = tail, .expected_us = *source_.table->us(tail, tokens), .measured = true});
        } else {
            plan.candidates.push_back({.tail = tail, .expected_us = model_us(tail, tokens)});
        }
    }
    const std::optional<Tail> chosen = choose(tokens);
    std::stable_sort(plan.candidates.begin(), plan.candidates.end(), [&](const Candidate& left, const Candidate& right) {
        if ((left.tail == chosen) != (right.tail == chosen)) return left.tail == chosen;
        if (left.measured != right.measured) return left.measured;
        return left.expected_us < right.expected_us;
    });
    plan.from_table = chosen_by_table(tokens, false).has_value();
    if (plan.from_table) {
        plan.source = fmt::format("table {}", source_.note);
    } else {
        plan.source = fmt::format("cost model with the constants of {}", capabilities_.machine.description);
        if (source_.table) plan.source += fmt::format(" (table {} has no tail that may run)", source_.note);
        if (!source_.table && !source_.note.empty()) plan.source += fmt::format(" ({})", source_.note);
    }
    if (!plan.candidates.empty()) {
        plan.tail = plan.candidates.front().tail;
        plan.expected_us = plan.candidates.front().expected_us;
    }
    return plan;
}

}  // namespace latent_moe

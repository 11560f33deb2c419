// The options that subcommands share, as the user typed them. `problem.h` makes sense of them.
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "latent_moe/plan.h"
#include "latent_moe/shape.h"

namespace latent_moe::cli {

/// `--tail`: names, or `auto` (what the plan chooses), or `all`.
struct TailChoice {
    enum class Kind : std::uint8_t { automatic, all, named } kind = Kind::automatic;
    std::vector<Tail> named;

    bool one_named() const noexcept { return kind == Kind::named && named.size() == 1; }
};

/// How a tail's inputs come to be while it is timed: there beforehand, or written in front of every call.
enum class InputState : std::uint8_t { raw, fresh_late, fresh_early, cooperating };
inline constexpr int input_state_count = 4;
const char* name(InputState state) noexcept;

struct Arguments {
    // The shape.
    std::optional<std::string> model;
    std::optional<std::int64_t> hidden;
    std::optional<std::int64_t> latent;
    std::optional<Norm> norm;
    std::optional<float> epsilon;
    std::optional<float> routed_scale;
    std::optional<Dtype> dtype;

    // Where tensors come from.
    std::optional<std::string> weights;
    std::optional<std::int64_t> layer;
    std::optional<std::string> inputs;
    std::uint64_t seed = 1;
    std::optional<Dtype> weight_dtype;
    bool no_prefix = false;

    // The ranks and the context.
    std::optional<int> tp;
    bool processes = false;
    std::string backend = "auto";
    std::optional<std::vector<std::int64_t>> tokens;
    TailChoice tail;
    std::optional<SharedState> shared;
    bool sequence_parallel = false;
    bool expert_parallel = false;
    bool custom_all_reduce = true;
    bool captured = false;
    std::optional<std::int64_t> other_reducer_from_bytes;
    bool keep_whole_weights = false;
    int deferred_slots = 0;  ///< hand over this many un-combined rows a token; 0: combined ones
    bool batch_invariant = false;
    bool halves = false;
    bool float8_weights = false;
    std::optional<std::int64_t> capacity;
    std::vector<std::pair<Tail, std::int64_t>> limits;
    std::string tune_table = "auto";
    int threads = 0;
    int timeout_ms = 30'000;

    // What comes out.
    std::optional<std::string> out;
    std::optional<std::string> json;
    bool quiet = false;

    // Of one subcommand each.
    std::optional<std::string> machine;                   // explain
    bool measure = false;                                 // info
    int verify = 0;                                       // tune
    bool no_check = false;                                // run
    std::optional<int> layers;                            // bench, synthesize
    std::optional<std::vector<InputState>> input_states;  // bench
    std::vector<bool> dependent_launch = {false, true};   // bench: without, with, both in turn
    bool no_external = false;                             // bench
    bool step = false;                                    // bench
    std::vector<double> tpot_ms;                          // bench
    std::optional<std::string> trace;                     // bench
    bool progress = false;                                // bench, tune
    double budget_s = 240;                                // tune
    std::optional<int> repeats;                           // run, bench, op
    std::string path;                                     // inspect
    std::string operation;                                // op
    std::int64_t first_layer = 1;                         // synthesize
    int shards = 1;                                       // synthesize
    std::optional<std::string> inputs_out;                // synthesize
    std::optional<double> minutes;                        // soak
    std::optional<std::int64_t> calls;                    // soak
    std::uint64_t from_call = 0;                          // soak
};

/// `1,2,4-8,64`. Throws `Error(invalid_argument)`.
std::vector<std::int64_t> parse_tokens(const std::string& text);

void add_shape_options(CLI::App& app, Arguments& arguments);
void add_rank_options(CLI::App& app, Arguments& arguments);
void add_tokens_option(CLI::App& app, Arguments& arguments, const std::string& fallback);
void add_tail_option(CLI::App& app, Arguments& arguments, TailChoice::Kind fallback);
void add_context_options(CLI::App& app, Arguments& arguments);
/// What engines may want of a tail beside its arithmetic.
void add_feature_options(CLI::App& app, Arguments& arguments);
void add_tensor_options(CLI::App& app, Arguments& arguments, bool with_inputs);
void add_seed_option(CLI::App& app, Arguments& arguments, const std::string& help);
void add_bench_options(CLI::App& app, Arguments& arguments);
void add_repeats_option(CLI::App& app, Arguments& arguments);
void add_output_options(CLI::App& app, Arguments& arguments);

}  // namespace latent_moe::cli

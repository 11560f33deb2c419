#include "cli/problem.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/partition.h"
#include "latent_moe/status.h"

namespace latent_moe::cli {
namespace {

[[noreturn]] void refuse(const std::string& message) {
    throw Error(StatusCode::invalid_argument, message);
}

/// A layer of the checkpoint, and the checkpoint.
struct FoundLayer {
    io::Checkpoint checkpoint;
    io::CheckpointLayer layer;
};

std::optional<FoundLayer> find_layer(const Arguments& arguments) {
    if (!arguments.weights) return std::nullopt;
    io::Checkpoint checkpoint = io::Checkpoint::open(*arguments.weights);
    if (checkpoint.layers().empty()) refuse(fmt::format("{}: holds no latent-MoE layer", *arguments.weights));
    io::CheckpointLayer layer = checkpoint.layer(arguments.layer.value_or(checkpoint.layers().front().number));
    return FoundLayer{std::move(checkpoint), std::move(layer)};
}

/// A width from the options, the weights and the inputs, which must agree as far as they say.
std::int64_t agreed_width(const char* what, std::int64_t asked, const Arguments& arguments,
                          std::optional<std::int64_t> of_weights, const char* input_tensor,
                          std::optional<std::int64_t> of_inputs) {
    std::int64_t width = asked;
    if (of_weights) {
        if (width != 0 && width != *of_weights) {
            refuse(fmt::format("{}: {} is {}, expected {} as {} says", *arguments.weights, what, *of_weights, width,
                               arguments.model ? "--model " + *arguments.model : fmt::format("--{}", what)));
        }
        width = *of_weights;
    }
    if (of_inputs) {
        if (width != 0 && width != *of_inputs) {
            refuse(fmt::format("{}: {} has {} columns, expected {} {}", *arguments.inputs, input_tensor, *of_inputs, what,
                               width));
        }
        width = *of_inputs;
    }
    if (width == 0) refuse(fmt::format("{} is not known: give --model, --weights, or --hidden and --latent", what));
    return width;
}

Shape make_shape(const Arguments& arguments, const std::optional<FoundLayer>& found,
                 const std::optional<io::TensorFile>& inputs) {
    Shape asked;
    if (arguments.model) {
        const std::optional<Shape> preset = shape_preset(*arguments.model);
        if (!preset) {
            refuse(
                fmt::format("--model is '{}', expected one of {}", *arguments.model, fmt::join(shape_preset_names(), ", ")));
        }
        asked = *preset;
    }
    asked.hidden = arguments.hidden.value_or(asked.hidden);
    asked.latent = arguments.latent.value_or(asked.latent);
    if (arguments.hidden || arguments.latent) {  // what was typed is checked as typed, before the files are looked at
        Shape typed = asked;
        if (!arguments.hidden) typed.hidden = 8;
        if (!arguments.latent) typed.latent = 8;
        validate(typed);
    }

    Shape shape = asked;
    const auto of_weights = [&](std::int64_t width) { return found ? std::optional(width) : std::nullopt; };
    shape.hidden =
        agreed_width("hidden", asked.hidden, arguments, of_weights(found ? found->layer.hidden() : 0),
                     inputs && inputs->shared().empty() ? "prefix" : "shared.0", inputs ? inputs->hidden() : std::nullopt);
    shape.latent = agreed_width("latent", asked.latent, arguments, of_weights(found ? found->layer.latent() : 0), "routed.0",
                                inputs ? std::optional(inputs->latent()) : std::nullopt);
    if (found && !arguments.model) shape.norm = found->layer.gamma ? Norm::rms : Norm::none;
    shape.norm = arguments.norm.value_or(shape.norm);
    shape.epsilon = arguments.epsilon.value_or(shape.epsilon);
    shape.routed_scale = arguments.routed_scale.value_or(shape.routed_scale);
    shape.activations = arguments.dtype.value_or(inputs ? inputs->dtype() : shape.activations);
    if (inputs && inputs->dtype() != shape.activations) {
        refuse(fmt::format("{}: tensors are {}, expected {} as --dtype says", *arguments.inputs, name(inputs->dtype()),
                           name(shape.activations)));
    }
    validate(shape);
    return shape;
}

std::vector<std::int64_t> make_tokens(const Arguments& arguments, const std::optional<io::TensorFile>& inputs,
                                      const std::vector<std::int64_t>& fallback) {
    const std::vector<std::int64_t> tokens =
        arguments.tokens.value_or(inputs ? std::vector<std::int64_t>{inputs->tokens()} : fallback);
    const std::int64_t most = *std::max_element(tokens.begin(), tokens.end());
    if (inputs && inputs->tokens() > max_tokens_limit) {
        refuse(fmt::format("{}: routed.0 has {} rows, expected at most {}", *arguments.inputs, inputs->tokens(),
                           max_tokens_limit));
    }
    if (inputs && most > inputs->tokens()) {
        refuse(fmt::format("--tokens asks for {}, but {} holds {}", most, *arguments.inputs, inputs->tokens()));
    }
    return tokens;
}

SharedState make_shared_state(const Arguments& arguments, const std::optional<io::TensorFile>& inputs) {
    const bool file_has_none = inputs && inputs->shared().empty();
    const SharedState state = arguments.shared.value_or(file_has_none ? SharedState::absent : SharedState::partial);
    if (file_has_none && state != SharedState::absent) {
        refuse(fmt::format("{}: has no shared.0, expected it for --shared {}", *arguments.inputs, name(state)));
    }
    if (inputs && !file_has_none && state == SharedState::absent) {
        refuse(fmt::format("{}: has shared.0, expected none for --shared absent", *arguments.inputs));
    }
    return state;
}

Options make_options(const Arguments& arguments, const Shape& shape, int world, const std::vector<std::int64_t>& tokens) {
    Options options{.backend = arguments.backend, .timeout_ms = arguments.timeout_ms};
    options.max_tokens = std::max<std::int64_t>(1, *std::max_element(tokens.begin(), tokens.end()));
    options.capacity_tokens =
        arguments.capacity.value_or(std::min<std::int64_t>(options.capacity_tokens, options.max_tokens));
    options.sequence_parallel = arguments.sequence_parallel;
    options.expert_parallel = arguments.expert_parallel;
    options.deferred_finalize = arguments.deferred_slots > 0;
    options.batch_invariant = arguments.batch_invariant;
    if (arguments.batch_invariant && arguments.tail.one_named()) options.tail = arguments.tail.named.front();
    options.float8_weights = arguments.float8_weights;
    options.custom_all_reduce = arguments.custom_all_reduce;
    options.captured = arguments.captured;
    options.other_reducer_from_bytes = arguments.other_reducer_from_bytes.value_or(options.other_reducer_from_bytes);
    options.cpu_threads = arguments.threads;
    options.tune_table = arguments.tune_table;
    for (const auto& [tail, most] : arguments.limits) options.tail_token_limit[static_cast<std::size_t>(tail)] = most;

    // The whole W_up costs `world` times the memory: only where it is asked for, or nothing could run without.
    const bool tails_need_it = arguments.tail.kind == TailChoice::Kind::all ||
                               std::any_of(arguments.tail.named.begin(), arguments.tail.named.end(), needs_whole_weights);
    const bool columns_are_named = arguments.tail.one_named() && !needs_whole_weights(arguments.tail.named.front());
    if (columns_are_named && shape.hidden % world != 0) {
        throw Error(StatusCode::unsupported, fmt::format("tail {} cannot run: hidden {} is not divisible by {} ranks (--tp)",
                                                         name(arguments.tail.named.front()), shape.hidden, world));
    }
    options.keep_whole_weights =
        arguments.keep_whole_weights || tails_need_it || shape.hidden % world != 0 || arguments.sequence_parallel;
    return options;
}

}  // namespace

bool needs_whole_weights(Tail tail) noexcept {
    return tail != Tail::column_parallel && tail != Tail::fused;
}

std::int64_t Problem::most_tokens() const {
    return *std::max_element(tokens.begin(), tokens.end());
}

TokenRange Problem::rows_of_rank(int rank) const {
    return shape.hidden % world == 0 ? even_part(shape.hidden, world, rank) : TokenRange{0, shape.hidden};
}

Problem make_problem(const Arguments& arguments, Ranks& ranks, const std::vector<std::int64_t>& fallback_tokens) {
    std::optional<io::TensorFile> inputs;
    if (arguments.inputs) inputs = io::TensorFile::open(*arguments.inputs);
    ranks.set_world(arguments.tp, inputs ? std::min(inputs->world(), max_world) : 2);
    const int world = ranks.world();
    if (inputs && inputs->world() != world) {
        refuse(fmt::format("{}: holds the partials of {} ranks, expected {}", *arguments.inputs, inputs->world(), world));
    }
    std::optional<FoundLayer> found = find_layer(arguments);
    const Shape shape = make_shape(arguments, found, inputs);
    const std::vector<std::int64_t> tokens = make_tokens(arguments, inputs, fallback_tokens);
    Options options = make_options(arguments, shape, world, tokens);
    options.shared = make_shared_state(arguments, inputs);
    const std::int64_t layer = found ? found->layer.number : arguments.layer.value_or(1);
    WeightSource weights = found ? WeightSource(shape, *arguments.weights, std::move(found->checkpoint))
                                 : WeightSource(shape, arguments.weight_dtype.value_or(Dtype::bf16), arguments.seed);
    return {shape, world, tokens, options, layer, std::move(weights), std::move(inputs)};
}

void require_run_memory(const Problem& problem, bool checked, int layers) {
    const auto hidden = static_cast<double>(problem.shape.hidden);
    const auto latent = static_cast<double>(problem.shape.latent);
    const auto tokens = static_cast<double>(problem.most_tokens());
    const double copies = problem.options.keep_whole_weights ? problem.world : 1;
    const auto element = static_cast<double>(bytes_of(problem.shape.activations));
    const double weights = hidden * latent * 2 * (layers * copies + 1 + (checked ? 1 : 0));
    const double activations = 2 * problem.world * tokens * (latent + 2 * hidden) * element + tokens * hidden * element;
    const double reference = checked ? tokens * (latent * 12 + hidden * 32) : 0;
    require_memory(weights + activations + reference,
                   fmt::format("hidden {}, latent {} on {} ranks with {} tokens", problem.shape.hidden, problem.shape.latent,
                               problem.world, problem.most_tokens()));
}

CallInputs make_inputs(const Arguments& arguments, const Problem& problem, const std::vector<bool>& needed,
                       std::uint64_t instance) {
    if (problem.inputs && arguments.deferred_slots > 0)
        refuse("--deferred and --inputs are given, but a file of inputs holds combined rows");
    if (problem.inputs) return read_inputs(*problem.inputs, problem.options.shared, !arguments.no_prefix, needed);
    return draw_inputs({.shape = problem.shape,
                        .world = problem.world,
                        .tokens = problem.most_tokens(),
                        .shared = problem.options.shared,
                        .prefix = !arguments.no_prefix,
                        .deferred_slots = arguments.deferred_slots,
                        .seed = arguments.seed,
                        .instance = instance},
                       needed);
}

CallInputs make_inputs(const Arguments& arguments, const Problem& problem, const Ranks& ranks, bool checked) {
    std::vector<bool> needed;
    for (int rank = 0; rank < problem.world; ++rank) needed.push_back((checked && ranks.speaks()) || ranks.is_here(rank));
    return make_inputs(arguments, problem, needed);
}

}  // namespace latent_moe::cli

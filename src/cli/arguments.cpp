#include "cli/arguments.h"

#include <fmt/format.h>

#include <charconv>
#include <string_view>

#include "latent_moe/status.h"

namespace latent_moe::cli {
namespace {

constexpr const char* shape_group = "Shape";
constexpr const char* rank_group = "Ranks and schedule";
constexpr const char* feature_group = "Features";
constexpr const char* tensor_group = "Tensors";
constexpr const char* bench_group = "Measurement";
constexpr const char* output_group = "Output";

[[noreturn]] void refuse(const std::string& message) {
    throw Error(StatusCode::invalid_argument, message);
}

std::int64_t parse_whole(std::string_view text, const char* option, std::string_view whole) {
    std::int64_t value = 0;
    const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (problem != std::errc{} || end != text.data() + text.size() || text.empty()) {
        refuse(fmt::format("{} is '{}': '{}' is not a whole number", option, whole, text));
    }
    return value;
}

std::int64_t parse_token_count(std::string_view text, std::string_view list) {
    const std::int64_t tokens = parse_whole(text, "--tokens", list);
    if (tokens < 0 || tokens > max_tokens_limit) {
        refuse(fmt::format("--tokens is '{}': {} is outside 0 to {}", list, tokens, max_tokens_limit));
    }
    return tokens;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
    std::vector<std::string_view> parts;
    for (std::size_t at = 0;;) {
        const std::size_t end = text.find(separator, at);
        parts.push_back(text.substr(at, end - at));
        if (end == std::string_view::npos) return parts;
        at = end + 1;
    }
}

Tail parse_tail(std::string_view text, const char* option) {
    if (const std::optional<Tail> tail = tail_from_name(text)) return *tail;
    std::vector<std::string> names;
    for (int index = 0; index < tail_count; ++index) names.emplace_back(name(static_cast<Tail>(index)));
    refuse(fmt::format("{} is '{}', expected one of {}", option, text, fmt::join(names, ", ")));
}

TailChoice parse_tails(const std::string& text) {
    if (text == "auto") return {TailChoice::Kind::automatic, {}};
    if (text == "all") return {TailChoice::Kind::all, {}};
    TailChoice choice{TailChoice::Kind::named, {}};
    for (const std::string_view part : split(text, ',')) choice.named.push_back(parse_tail(part, "--tail"));
    return choice;
}

Dtype parse_dtype(const std::string& text, const char* option, bool weights) {
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32, Dtype::e4m3}) {
        if (text == name(dtype) && (weights || dtype != Dtype::e4m3)) return dtype;
    }
    refuse(fmt::format("{} is '{}', expected bf16, f16{}", option, text, weights ? ", f32 or e4m3" : " or f32"));
}

std::vector<InputState> parse_input_states(const std::string& text) {
    std::vector<InputState> states;
    for (const std::string_view part : split(text, ',')) {
        const std::size_t before = states.size();
        for (int index = 0; index < input_state_count; ++index) {
            const auto state = static_cast<InputState>(index);
            if (part == name(state) || part == "all") states.push_back(state);
        }
        if (states.size() == before) {
            refuse(fmt::format("--input-state is '{}': '{}' is none of raw, fresh-late, fresh-early, cooperating and all",
                               text, part));
        }
    }
    return states;
}

std::vector<double> parse_milliseconds(const std::string& text, const char* option) {
    std::vector<double> all;
    for (const std::string_view part : split(text, ',')) {
        double value = 0;
        const auto [end, problem] = std::from_chars(part.data(), part.data() + part.size(), value);
        if (problem != std::errc{} || end != part.data() + part.size() || !(value > 0 && value < 1e9))
            refuse(fmt::format("{} is '{}': '{}' is no number of milliseconds above 0", option, text, part));
        all.push_back(value);
    }
    return all;
}

template <typename Value>
Value require_range(const char* option, Value value, Value least, Value most) {
    if (value < least || value > most) refuse(fmt::format("{} is {}, expected {} to {}", option, value, least, most));
    return value;
}

/// An option whose text `parse` turns into something that is stored.
template <typename Parse>
CLI::Option* add_parsed(CLI::App& app, const std::string& flag, const std::string& help, const char* type, Parse parse) {
    return app.add_option_function<std::string>(flag, parse, help)->type_name(type);
}

template <typename Value>
CLI::Option* add_number(CLI::App& app, const std::string& flag, std::optional<Value>& to, const std::string& help,
                        std::int64_t least, std::int64_t most) {
    return add_parsed(app, flag, help, "N", [&to, flag, least, most](const std::string& text) {
        to = static_cast<Value>(require_range(flag.c_str(), parse_whole(text, flag.c_str(), text), least, most));
    });
}

}  // namespace

std::vector<std::int64_t> parse_tokens(const std::string& text) {
    std::vector<std::int64_t> tokens;
    for (const std::string_view part : split(text, ',')) {
        const std::size_t dash = part.find('-', 1);
        const std::int64_t first = parse_token_count(part.substr(0, dash), text);
        const std::int64_t last = dash == std::string_view::npos ? first : parse_token_count(part.substr(dash + 1), text);
        if (last < first) refuse(fmt::format("--tokens is '{}': the range {} runs backwards", text, part));
        for (std::int64_t count = first; count <= last; ++count) tokens.push_back(count);
    }
    return tokens;
}

void add_shape_options(CLI::App& app, Arguments& arguments) {
    CLI::Option* model = app.add_option("--model", arguments.model, "kimi-k3, nemotron-3-super or nemotron-3-ultra")
                             ->type_name("NAME")
                             ->group(shape_group);
    add_number(app, "--hidden", arguments.hidden, "columns of the output, a multiple of 8", INT64_MIN, INT64_MAX)
        ->excludes(model)
        ->group(shape_group);
    add_number(app, "--latent", arguments.latent, "columns of the routed partial, a multiple of 8", INT64_MIN, INT64_MAX)
        ->excludes(model)
        ->group(shape_group);
    add_parsed(app, "--norm", "rms or none", "NAME", [&arguments](const std::string& text) {
        if (text != "rms" && text != "none") refuse(fmt::format("--norm is '{}', expected rms or none", text));
        arguments.norm = text == "rms" ? Norm::rms : Norm::none;
    })->group(shape_group);
    app.add_option("--eps", arguments.epsilon, "the norm's epsilon (1e-5)")->type_name("X")->group(shape_group);
    app.add_option("--routed-scale", arguments.routed_scale, "factor of the routed part (1)")
        ->type_name("X")
        ->group(shape_group);
    add_parsed(app, "--dtype", "of the activations: bf16, f16 or f32 (bf16, or as the inputs are)", "NAME",
               [&arguments](const std::string& text) { arguments.dtype = parse_dtype(text, "--dtype", false); })
        ->group(shape_group);
}

void add_rank_options(CLI::App& app, Arguments& arguments) {
    add_number(app, "--tp", arguments.tp, fmt::format("ranks, 1 to {} (2, or as the inputs or mpirun say)", max_world), 1,
               max_world)
        ->group(rank_group);
    add_parsed(app, "--ranks", "threads: all ranks in this process; processes: one rank a process, under mpirun (threads)",
               "KIND",
               [&arguments](const std::string& text) {
                   if (text != "threads" && text != "processes")
                       refuse(fmt::format("--ranks is '{}', expected threads or processes", text));
                   arguments.processes = text == "processes";
               })
        ->group(rank_group);
    add_parsed(app, "--backend", "auto, cpu, cuda or hip (auto: the GPU if there is one)", "NAME",
               [&arguments](const std::string& text) {
                   if (text != "auto" && text != "cpu" && text != "cuda" && text != "hip") {
                       refuse(fmt::format("--backend is '{}', expected auto, cpu, cuda or hip", text));
                   }
                   arguments.backend = text;
               })
        ->group(rank_group);
    add_parsed(app, "--threads", "worker threads of each rank on the CPU (its share of the cores)", "N",
               [&arguments](const std::string& text) {
                   arguments.threads = static_cast<int>(
                       require_range<std::int64_t>("--threads", parse_whole(text, "--threads", text), 1, 256));
               })
        ->group(rank_group);
    add_parsed(app, "--timeout-ms", "after so long without a peer a rank gives up (30000)", "N",
               [&arguments](const std::string& text) {
                   arguments.timeout_ms = static_cast<int>(
                       require_range<std::int64_t>("--timeout-ms", parse_whole(text, "--timeout-ms", text), 1, 86'400'000));
               })
        ->group(rank_group);
}

void add_tokens_option(CLI::App& app, Arguments& arguments, const std::string& fallback) {
    add_parsed(app, "--tokens", fmt::format("numbers of tokens: 1,2,4-8,64 ({})", fallback), "LIST",
               [&arguments](const std::string& text) { arguments.tokens = parse_tokens(text); })
        ->group(rank_group);
}

void add_tail_option(CLI::App& app, Arguments& arguments, TailChoice::Kind fallback) {
    arguments.tail.kind = fallback;
    add_parsed(app, "--tail",
               fmt::format("replicated, overlap, column_parallel, token_parallel, late_reduce, fused, several with commas, "
                           "auto (what the plan chooses) or all ({})",
                           fallback == TailChoice::Kind::all ? "all" : "auto"),
               "NAMES", [&arguments](const std::string& text) { arguments.tail = parse_tails(text); })
        ->group(rank_group);
}

void add_context_options(CLI::App& app, Arguments& arguments) {
    add_parsed(app, "--shared", "what the shared rows are: partial, reduced or absent (partial)", "STATE",
               [&arguments](const std::string& text) {
                   for (const SharedState state : {SharedState::partial, SharedState::reduced, SharedState::absent}) {
                       if (text == name(state)) arguments.shared = state;
                   }
                   if (!arguments.shared) refuse(fmt::format("--shared is '{}', expected partial, reduced or absent", text));
               })
        ->group(rank_group);
    app.add_flag("--sequence-parallel", arguments.sequence_parallel, "each rank wants only its own rows of the output")
        ->group(rank_group);
    app.add_flag("--expert-parallel", arguments.expert_parallel, "the ranks split experts, not columns")->group(rank_group);
    app.add_flag_callback(
           "--no-custom-all-reduce", [&arguments] { arguments.custom_all_reduce = false; },
           "the engine has custom all-reduces switched off: the vendor's collectives do it all")
        ->group(rank_group);
    app.add_flag("--captured", arguments.captured, "the calls will be captured in graphs")->group(rank_group);
    add_number(app, "--other-reducer-from-bytes", arguments.other_reducer_from_bytes,
               "summands of this size on are another reducer's of the engine", 1, INT64_MAX)
        ->group(rank_group);
    app.add_flag("--keep-whole-weights", arguments.keep_whole_weights,
                 "keep all of W_up on every rank, so that more tails can run")
        ->group(rank_group);
    add_number(app, "--capacity", arguments.capacity, "most tokens of a call of the fused tail (128)", 1, max_tokens_limit)
        ->group(rank_group);
    app.add_option("--table", arguments.tune_table,
                   "measured times that the plan goes by: a file of `tune`, auto (a shipped one that fits) or none (auto)")
        ->type_name("FILE")
        ->group(rank_group);
    app.add_option_function<std::vector<std::string>>(
           "--limit",
           [&arguments](const std::vector<std::string>& texts) {
               for (const std::string& text : texts) {
                   const std::size_t equals = text.find('=');
                   if (equals == std::string::npos) refuse(fmt::format("--limit is '{}', expected TAIL=TOKENS", text));
                   const std::int64_t most = parse_whole(text.substr(equals + 1), "--limit", text);
                   if (most < 0) refuse(fmt::format("--limit is '{}', expected at least 0 tokens", text));
                   arguments.limits.emplace_back(parse_tail(text.substr(0, equals), "--limit"), most);
               }
           },
           "most tokens for which a tail may be chosen; may be repeated")
        ->type_name("TAIL=TOKENS")
        ->expected(1, tail_count)
        ->group(rank_group);
}

void add_feature_options(CLI::App& app, Arguments& arguments) {
    add_parsed(
        app, "--deferred", "hand over the rows of so many experts a token un-combined, with weights and a row map", "SLOTS",
        [&arguments](const std::string& text) {
            arguments.deferred_slots =
                static_cast<int>(require_range<std::int64_t>("--deferred", parse_whole(text, "--deferred", text), 1, 64));
        })
        ->group(feature_group);
    app.add_flag("--batch-invariant", arguments.batch_invariant,
                 "a row's bits depend neither on the number of tokens nor on its neighbours")
        ->group(feature_group);
    app.add_flag("--float8-weights", arguments.float8_weights, "pack W_up as e4m3 with a scale a row")->group(feature_group);
}

void add_tensor_options(CLI::App& app, Arguments& arguments, bool with_inputs) {
    app.add_option("--weights", arguments.weights,
                   "safetensors file, model.safetensors.index.json, or the folder of either (drawn from the seed)")
        ->type_name("PATH")
        ->group(tensor_group);
    add_number(app, "--layer", arguments.layer, "number of the layer whose weights are used (the first)", 0, INT64_MAX)
        ->group(tensor_group);
    if (with_inputs) {
        app.add_option("--inputs", arguments.inputs,
                       "safetensors with routed.R and shared.R for each rank R, and perhaps prefix")
            ->type_name("FILE")
            ->group(tensor_group);
    }
    add_seed_option(app, arguments, "of all tensors that are drawn (1)");
    add_parsed(app, "--weight-dtype", "of drawn weights: bf16, f16, f32 or e4m3 (bf16)", "NAME",
               [&arguments](const std::string& text) { arguments.weight_dtype = parse_dtype(text, "--weight-dtype", true); })
        ->group(tensor_group);
    app.add_flag("--no-prefix", arguments.no_prefix, "add no prefix")->group(tensor_group);
}

void add_seed_option(CLI::App& app, Arguments& arguments, const std::string& help) {
    add_parsed(app, "--seed", help, "N", [&arguments](const std::string& text) {
        const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), arguments.seed);
        if (problem != std::errc{} || end != text.data() + text.size())
            refuse(fmt::format("--seed is '{}', expected a whole number from 0 to {}", text, UINT64_MAX));
    })->group(tensor_group);
}

const char* name(InputState state) noexcept {
    switch (state) {
        case InputState::raw: return "raw";
        case InputState::fresh_late: return "fresh-late";
        case InputState::fresh_early: return "fresh-early";
        case InputState::cooperating: return "cooperating";
    }
    return "unknown";
}

void add_bench_options(CLI::App& app, Arguments& arguments) {
    add_parsed(
        app, "--input-state",
        "raw: inputs are there already; fresh-late, fresh-early, cooperating: a kernel writes them in front of every "
        "tail and lets it start at its end, at once, or beside itself; several with commas, or all (all on a GPU, raw "
        "on a CPU)",
        "LIST", [&arguments](const std::string& text) { arguments.input_states = parse_input_states(text); })
        ->group(bench_group);
    add_parsed(app, "--dependent-launch",
               "on, off or both: whether the fused tail may start before the kernel in front of it has ended (both)",
               "STATE",
               [&arguments](const std::string& text) {
                   if (text != "on" && text != "off" && text != "both")
                       refuse(fmt::format("--dependent-launch is '{}', expected on, off or both", text));
                   arguments.dependent_launch.clear();
                   if (text != "on") arguments.dependent_launch.push_back(false);
                   if (text != "off") arguments.dependent_launch.push_back(true);
               })
        ->group(bench_group);
    app.add_flag("--no-external", arguments.no_external, "without the rows of other libraries")->group(bench_group);
    CLI::Option* step = app.add_flag("--step", arguments.step,
                                     "a decode step's worth: 92 layers in one recording, and what they save beside other "
                                     "libraries' rows")
                            ->group(bench_group);
    add_parsed(app, "--tpot-ms",
               "with --step: time per output token with the other library's tails, one number or one for each of --tokens",
               "LIST", [&arguments](const std::string& text) { arguments.tpot_ms = parse_milliseconds(text, "--tpot-ms"); })
        ->needs(step)
        ->group(bench_group);
    app.add_option("--trace", arguments.trace,
                   "write the kernels of one pass of each tail as a trace that Perfetto and Chrome show")
        ->type_name("FILE")
        ->group(output_group);
    app.add_flag("--progress", arguments.progress, "say on standard error what is being done, a line each, and since when")
        ->group(output_group);
}

void add_repeats_option(CLI::App& app, Arguments& arguments) {
    add_number(app, "--repeats", arguments.repeats,
               "timed repetitions (as many as fit in about a quarter of a second, 5 to 100)", 1, 100'000)
        ->group(output_group);
}

void add_output_options(CLI::App& app, Arguments& arguments) {
    app.add_option("--json", arguments.json, "write the result as JSON; - is standard output, in place of the table")
        ->type_name("FILE")
        ->group(output_group);
    app.add_flag("--quiet,-q", arguments.quiet, "no table and no progress")->group(output_group);
}

}  // namespace latent_moe::cli

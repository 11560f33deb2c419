// `bench`: tails side by side in one run.
//
// A repetition is one call on each of several layers with weights of their own, so that weights come from memory, not from a
// cache, and inputs take turns. Ranks start a repetition together and the slowest one counts.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <thread>

#include "cli/command.h"
#include "cli/memory.h"
#include "cli/onednn_product.h"
#include "cli/output.h"
#include "cli/problem.h"
#include "cli/rank_work.h"
#include "context/backends.h"
#include "core/cost_model.h"
#include "core/partition.h"
#include "cpu/cpu_backend.h"
#include "latent_moe/status.h"

namespace latent_moe::cli {
namespace {

constexpr int default_layers = 12;
constexpr int input_sets = 3;
constexpr const char* product_row = "onednn-product";

void add_options(CLI::App& app, Arguments& arguments) {
    add_shape_options(app, arguments);
    add_rank_options(app, arguments);
    add_tokens_option(app, arguments, "1,8,64,256");
    add_tail_option(app, arguments, TailChoice::Kind::all);
    add_context_options(app, arguments);
    add_tensor_options(app, arguments, true);
    app.add_option("--layers", arguments.layers, "layers with weights of their own (12, or as many as fit)")
        ->check(CLI::Range(1, 1024))
        ->type_name("N")
        ->group("Tensors");
    add_repeats_option(app, arguments);
    add_output_options(app, arguments);
}

struct Row {
    std::string tail;
    std::int64_t tokens = 0;
    int layers = 0;
    Timing timing;
    Work work;
    double floor_us = 0;
};

struct Memory {
    std::size_t at_start = 0;  ///< of the program, before the first tensor
    std::size_t peak = 0;      ///< while the tails ran
    std::size_t weights = 0;
    std::size_t activations = 0;

    std::size_t needed() const noexcept { return weights + activations; }
    double ratio() const noexcept {
        return static_cast<double>(peak - at_start) / static_cast<double>(std::max<std::size_t>(needed(), 1));
    }
};

struct Result {
    std::string backend;
    Machine machine;
    std::vector<Row> rows;
    std::vector<Refusal> refused;
    Memory memory;
    std::string product_dtype;
};

std::string cpu_model() {
    std::ifstream file("/proc/cpuinfo");
    std::string line;
    while (std::getline(file, line)) {
        if (line.starts_with("model name")) return line.substr(std::min(line.size(), line.find(':') + 2));
    }
    return "unknown";
}

/// As many layers as were asked for and as fit beside everything else.
std::vector<std::int64_t> layers_to_run(const Arguments& arguments, Problem& problem) {
    const double copies = problem.options.keep_whole_weights ? problem.world : 1;
    const double layer_bytes = static_cast<double>(problem.shape.hidden * problem.shape.latent) * 2 * copies;
    const int fitting = static_cast<int>(std::clamp(available_memory() * 0.6 / layer_bytes, 1.0, 1024.0));
    return problem.weights.layers(problem.layer, std::min(arguments.layers.value_or(default_layers), fitting));
}

/// Which tails run for so many tokens; the others are noted once.
std::vector<Tail> tails_to_time(const Arguments& arguments, const Plan& plan, std::vector<Refusal>& refused) {
    if (arguments.tail.kind == TailChoice::Kind::automatic)
        return plan.candidates.empty() ? std::vector<Tail>{} : std::vector{plan.tail};
    std::vector<Tail> tails;
    for (int index = 0; index < tail_count; ++index) {
        const Tail tail = static_cast<Tail>(index);
        const std::vector<Tail>& named = arguments.tail.named;
        if (!named.empty() && std::find(named.begin(), named.end(), tail) == named.end()) continue;
        const auto reason = refusal_of(plan, tail);
        if (!reason) {
            tails.push_back(tail);
        } else if (std::none_of(refused.begin(), refused.end(), [&](const Refusal& other) { return other.tail == tail; })) {
            refused.push_back({tail, fmt::format("{} (at {} tokens)", *reason, plan.tokens)});
        }
    }
    return tails;
}

Capabilities capabilities_here(const Problem& problem, const Bootstrap& bootstrap) {
    Options options = problem.options;
    options.max_tokens = 1;
    options.capacity_tokens = 1;
    return find_backend(options.backend).make(problem.shape, bootstrap, options)->capabilities();
}

/// The inputs that calls take in turn, on this rank's device. What the host drew is gone again.
std::vector<RankInputs> rotating_inputs(const Arguments& arguments, const Problem& problem, Device& device, int rank) {
    std::vector<bool> needed(static_cast<std::size_t>(problem.world));
    needed[static_cast<std::size_t>(rank)] = true;
    std::vector<RankInputs> sets;
    for (int set = 0; set < (problem.inputs ? 1 : input_sets); ++set) {
        sets.emplace_back(device, make_inputs(arguments, problem, needed, static_cast<std::uint64_t>(set)), rank);
    }
    return sets;
}

/// One rank's part of the whole run.
class RankBench {
public:
    RankBench(const Arguments& arguments, Problem& problem, const Bootstrap& bootstrap,
              const std::vector<std::int64_t>& layers)
        : arguments_(arguments),
          problem_(problem),
          bootstrap_(bootstrap),
          device_(make_device(problem, bootstrap)),
          capabilities_(capabilities_here(problem, bootstrap)),
          context_(make_context(problem, bootstrap, layers)),
          inputs_(rotating_inputs(arguments, problem, *device_, bootstrap.rank)),
          out_(*device_, context_, problem.most_tokens()) {}

    /// Each tail once; then the memory is what the tails need.
    void warm_up(Result& result) {
        for (const std::int64_t tokens : problem_.tokens) {
            for (const Tail tail : tails_to_time(arguments_, context_.plan(tokens), result.refused))
                passes(tail, tokens).front()();
        }
        device_->synchronize();
        std::size_t own = out_.bytes();
        for (const RankInputs& set : inputs_) own += set.bytes();
        const std::vector<std::size_t> activations = gathered(bootstrap_, own);
        const std::vector<std::size_t> weights = gathered(bootstrap_, context_.weight_bytes());
        for (int rank = 0; rank < (arguments_.processes ? 1 : problem_.world); ++rank) {  // those of this process
            result.memory.weights += weights[static_cast<std::size_t>(rank)];
            result.memory.activations += activations[static_cast<std::size_t>(rank)];
        }
        result.memory.peak = peak_resident_bytes();
        gathered(bootstrap_, 0);  // before anyone goes on
        result.backend = context_.backend();
        result.machine = capabilities_.machine;
    }

    /// All tails for so many tokens side by side, and oneDNN's product where that means something.
    void time(std::int64_t tokens, Result& result) {
        std::vector<Refusal> told_already;
        const std::vector<Tail> tails = tails_to_time(arguments_, context_.plan(tokens), told_already);
        if (tails.empty()) return;
        std::vector<Turns> contestants;
        for (const Tail tail : tails) contestants.push_back(passes(tail, tokens));
        const std::unique_ptr<OnednnProduct> product = make_product(tokens);
        const int product_layers = product ? product->layers() : 0;
        if (product) {
            contestants.push_back({[&] {
                for (int layer = 0; layer < product_layers; ++layer) product->run(layer);
            }});
        }
        const std::vector<Timing> timings = time_side_by_side(bootstrap_, *device_, arguments_.repeats, contestants);
        for (std::size_t at = 0; at < tails.size(); ++at) {
            const Work work = work_of(tails[at], problem_.shape, problem_.world, tokens, problem_.options.shared,
                                      capabilities_.weight_element_bytes);
            result.rows.push_back(
                row(name(tails[at]), tokens, static_cast<int>(context_.layer_count()), timings[at], work, problem_.world));
        }
        if (!product) return;
        Work work = work_of(Tail::column_parallel, problem_.shape, problem_.world, tokens, SharedState::absent, 2);
        work.wire_bytes = 0;
        result.rows.push_back(row(product_row, tokens, product_layers, timings.back(), work, 1));
        result.product_dtype = product->dtype();
    }

private:
    /// Over all layers, each with the inputs in another turn.
    Turns passes(Tail tail, std::int64_t tokens) {
        Turns turns;
        for (std::size_t turn = 0; turn < inputs_.size(); ++turn) {
            turns.emplace_back([this, turn, tokens, tail] {
                for (std::size_t layer = 0; layer < context_.layer_count(); ++layer) {
                    const TailInput input = inputs_[(turn + layer) % inputs_.size()].of(context_, tokens);
                    require(context_.layer(layer).run(tail, input, out_.rows(), device_->stream()));
                }
            });
        }
        return turns;
    }

    /// oneDNN's product of one rank's shard alone, over as many layers as fit.
    std::unique_ptr<OnednnProduct> make_product(std::int64_t tokens) const {
        if (context_.backend() != "cpu" || tokens == 0 || problem_.shape.hidden % problem_.world != 0) return nullptr;
        const std::int64_t columns = problem_.shape.hidden / problem_.world;
        const double layer_bytes =
            static_cast<double>(columns * problem_.shape.latent) * sizeof(float) * bootstrap_.local_world;
        const int fitting = static_cast<int>(std::clamp(available_memory() * 0.6 / layer_bytes, 1.0, 1024.0));
        const int layers = gathered(bootstrap_, std::min(fitting, static_cast<int>(context_.layer_count()))).front();
        return std::make_unique<OnednnProduct>(tokens, problem_.shape.latent, columns, layers,
                                               cpu_threads_of_rank(problem_.options, bootstrap_.local_world));
    }

    Row row(const char* tail, std::int64_t tokens, int layers, Timing timing, const Work& work, int world) const {
        for (double* us : {&timing.median_us, &timing.p10_us, &timing.p90_us}) *us /= layers;
        return {tail, tokens, layers, timing, work, floor_us(world, work, capabilities_.machine)};
    }

    const Arguments& arguments_;
    const Problem& problem_;
    const Bootstrap& bootstrap_;
    std::unique_ptr<Device> device_;
    Capabilities capabilities_;
    Context context_;
    std::vector<RankInputs> inputs_;
    RankOutput out_;
};

void report(Output& output, const Arguments& arguments, const Problem& problem, const Result& result) {
    output.line("{}; {} {}, backend {}", shape_text(problem.shape), problem.world,
                arguments.processes ? "processes" : "threads", result.backend);
    output.line("machine: {}, {} cores; floors from the constants of {}", cpu_model(), std::thread::hardware_concurrency(),
                result.machine.description);
    Table table({"<tail", "tokens", "layers", "median us", "p10 us", "p90 us", "repeats", "weights+act MB", "wire MB",
                 "floor us", "x floor"});
    const std::vector<Row>& rows = result.rows;
    for (const Row& row : rows) {
        table.row({row.tail, fmt::format("{}", row.tokens), fmt::format("{}", row.layers), us_text(row.timing.median_us),
                   us_text(row.timing.p10_us), us_text(row.timing.p90_us), fmt::format("{}", row.timing.repeats),
                   fmt::format("{:.2f}", (row.work.weight_bytes + row.work.activation_bytes) / 1e6),
                   fmt::format("{:.3f}", row.work.wire_bytes / 1e6), us_text(row.floor_us),
                   fmt::format("{:.2f}", row.timing.median_us / row.floor_us)});
    }
    output.table(table);
    if (!result.product_dtype.empty()) {
        for (const Row& row : rows) {
            const auto product = std::find_if(rows.begin(), rows.end(), [&](const Row& other) {
                return other.tail == product_row && other.tokens == row.tokens;
            });
            if (row.tail != name(Tail::column_parallel) || product == rows.end()) continue;
            output.line("column_parallel takes {:.2f} times {} at {} tokens",
                        row.timing.median_us / product->timing.median_us, product_row, row.tokens);
        }
        output.line("{}: oneDNN's product of one rank's shard alone, all ranks at once, {} weights in its own layout",
                    product_row, result.product_dtype);
    }
    for (const Refusal& refusal : result.refused) output.line("refused: {}: {}", name(refusal.tail), refusal.reason);
    const Memory& memory = result.memory;
    output.line("memory: peak {} above the {} at start, {:.2f} x the {} of weights and {} of activations{}",
                bytes_text(static_cast<double>(memory.peak - memory.at_start)),
                bytes_text(static_cast<double>(memory.at_start)), memory.ratio(),
                bytes_text(static_cast<double>(memory.weights)), bytes_text(static_cast<double>(memory.activations)),
                arguments.processes ? " (rank 0's process)" : "");
}

Json to_json(const Problem& problem, const Result& result) {
    const Memory& memory = result.memory;
    Json json = {{"schema", "latent-moe/bench/1"},
                 {"machine",
                  {{"cpu", cpu_model()},
                   {"cores", std::thread::hardware_concurrency()},
                   {"constants", result.machine.description},
                   {"memory_bytes_per_us", result.machine.memory_bytes_per_us},
                   {"flops_per_us", result.machine.flops_per_us},
                   {"wire_bytes_per_us", result.machine.wire_bytes_per_us},
                   {"hop_us", result.machine.hop_us},
                   {"launch_us", result.machine.launch_us}}},
                 {"rows", Json::array()}};
    for (const Row& row : result.rows) {
        json["rows"].push_back({{"tail", row.tail},
                                {"backend", row.tail == product_row ? "onednn" : result.backend},
                                {"tp", problem.world},
                                {"tokens", row.tokens},
                                {"layers", row.layers},
                                {"median_us", row.timing.median_us},
                                {"p10_us", row.timing.p10_us},
                                {"p90_us", row.timing.p90_us},
                                {"repeats", row.timing.repeats},
                                {"hbm_bytes", row.work.weight_bytes + row.work.activation_bytes},
                                {"wire_bytes", row.work.wire_bytes},
                                {"floor_us", row.floor_us},
                                {"ratio_to_floor", row.timing.median_us / row.floor_us}});
    }
    json["refused"] = Json::array();
    for (const Refusal& refusal : result.refused)
        json["refused"].push_back({{"tail", name(refusal.tail)}, {"reason", refusal.reason}});
    json["memory"] = {{"at_start_bytes", memory.at_start},
                      {"peak_bytes", memory.peak},
                      {"weight_bytes", memory.weights},
                      {"activation_bytes", memory.activations},
                      {"ratio", memory.ratio()}};
    return json;
}

int execute(const Arguments& arguments, Ranks& ranks) {
    Result result;
    result.memory.at_start = resident_bytes();
    Problem problem = make_problem(arguments, ranks, {1, 8, 64, 256});
    require_run_memory(problem, false, 1);
    const std::vector<std::int64_t> layers = layers_to_run(arguments, problem);
    Output output(arguments, ranks.speaks());

    ranks.run([&](const Bootstrap& bootstrap) {
        Result mine = result;
        Progress progress(arguments, bootstrap.rank == 0);
        progress.say("packing {} layers", layers.size());
        RankBench bench(arguments, problem, bootstrap, layers);
        bench.warm_up(mine);
        for (const std::int64_t tokens : problem.tokens) {
            progress.say("{} tokens", tokens);
            bench.time(tokens, mine);
        }
        gathered(bootstrap, 0);  // nobody reads `result` any more
        if (bootstrap.rank == 0) result = std::move(mine);
    });
    if (ranks.speaks() && result.rows.empty())
        throw_none_can_run(arguments.tail, result.refused.empty() ? nullptr : &result.refused.front());
    if (!ranks.speaks()) return done;

    report(output, arguments, problem, result);
    output.json(to_json(problem, result));
    return done;
}

}  // namespace

Command bench_command() {
    return {.name = "bench",
            .summary = "Times tails side by side in one run, beside the least that they could take",
            .examples =
                "  latent-moe bench --model kimi-k3 --tp 2 --tokens 1,8,64,256 --tail all\n"
                "  latent-moe bench --model kimi-k3 --tp 2 --tokens 256 --tail column_parallel --json bench.json\n"
                "  latent-moe bench --weights checkpoint/ --layers 3 --tp 4 --repeats 20",
            .add_options = &add_options,
            .execute = &execute};
}

}  // namespace latent_moe::cli

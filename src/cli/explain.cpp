// `explain`: which tail runs for each number of tokens, and why not the others.
#include <fmt/format.h>

#include <filesystem>

#include "cli/command.h"
#include "cli/output.h"
#include "cli/problem.h"
#include "cli/rank_work.h"
#include "core/cost_model.h"
#include "core/machine_kind.h"
#include "core/planner.h"
#include "gpu/known_devices.h"
#include "io/machine_file.h"
#include "latent_moe/status.h"

namespace latent_moe::cli {
namespace {

std::string machine_names() {
    std::vector<std::string> names;
    for (const MachineKind& kind : gpu::known_devices()) names.push_back(kind.name);
    return fmt::format("{}", fmt::join(names, ", "));
}

void add_options(CLI::App& app, Arguments& arguments) {
    add_shape_options(app, arguments);
    add_rank_options(app, arguments);
    add_tokens_option(app, arguments, "1,8,64,256,1024,8192");
    add_tail_option(app, arguments, TailChoice::Kind::automatic);
    add_context_options(app, arguments);
    add_tensor_options(app, arguments, true);
    app.add_option("--machine", arguments.machine,
                   fmt::format("predict for another machine: a file of `info --measure`, or {} (this one)", machine_names()))
        ->type_name("NAME|FILE")
        ->group("Ranks and schedule");
    add_output_options(app, arguments);
}

struct Result {
    std::string backend;
    bool keeps_whole = false;
    std::vector<Plan> plans;
    std::optional<MachineKind> predicted_for;
};

/// Every tail by its formula, for a person or a program that compares: whether it can run is told elsewhere.
Json predictions(const Problem& problem, const MachineKind& kind) {
    const Machine machine = kind.of(problem.world);
    Json all = Json::array();
    for (const std::int64_t tokens : problem.tokens) {
        CostedCall call{.shape = problem.shape,
                        .world = problem.world,
                        .tokens = tokens,
                        .shared = problem.options.shared,
                        .weight_element_bytes = static_cast<double>(bytes_of(problem.shape.activations))};
        Json us = Json::object();
        for (int index = 0; index < tail_count; ++index) {
            const auto tail = static_cast<Tail>(index);
            us[name(tail)] = expected_us(tail, call, machine);
        }
        call.starts_early = true;
        all.push_back({{"tokens", tokens},
                       {"us", std::move(us)},
                       {"us_starting_early", {{name(Tail::fused), expected_us(Tail::fused, call, machine)}}}});
    }
    return all;
}

MachineKind find_machine(const std::string& asked) {
    if (std::optional<MachineKind> known = gpu::known_device(asked)) return *std::move(known);
    std::error_code error;  // a name too long for a file is no file
    if (!std::filesystem::exists(asked, error)) {
        throw Error(StatusCode::invalid_argument,
                    fmt::format("machine is {}, expected {} or a file of `info --measure`", asked, machine_names()));
    }
    return io::read_machine(asked);
}

/// Plans of a context that nobody makes, on a machine that need not be here.
Result predict(const Problem& problem, const MachineKind& kind) {
    const Capabilities capabilities{
        .machine = kind.of(problem.world),
        .weight_element_bytes = static_cast<double>(bytes_of(problem.shape.activations)),
        .fused = kind.fused && problem.world > 1,
        .fused_reason = "this machine has no fused kernel",
        .one_stage_bytes = kind.one_stage_bytes[problem.world <= 4 ? 0 : 1],
        .not_captured_reason = problem.options.custom_all_reduce ? std::string() : kind.not_captured_reason,
        .whole_weights = problem.options.keep_whole_weights || problem.world == 1};
    const Planner planner(problem.shape, problem.world, problem.options, capabilities);
    Result result{.backend = {}, .keeps_whole = problem.options.keep_whole_weights, .predicted_for = kind};
    for (const std::int64_t tokens : problem.tokens) result.plans.push_back(planner.plan(tokens));
    return result;
}

void report_machine(Output& output, const Problem& problem, const MachineKind& kind) {
    output.line("PREDICTION, not a measurement: the cost model for {} x {}, constants {}", problem.world,
                kind.machine.description, kind.origin);
    if (problem.world > kind.linked_ranks) {
        output.line("its links join {} ranks: predicted as if they joined all {}", kind.linked_ranks, problem.world);
    }
    if (!kind.unmeasured.empty() && problem.world > 1)
        output.line("not measured there, and as the backend assumes them: {}", fmt::join(kind.unmeasured, ", "));
}

void report(Output& output, const Arguments& arguments, const Problem& problem, const Result& result) {
    if (result.predicted_for) {
        output.line("{}; {} ranks", shape_text(problem.shape), problem.world);
        report_machine(output, problem, *result.predicted_for);
    } else {
        output.line("{}; {} {}, backend {}", shape_text(problem.shape), problem.world,
                    arguments.processes ? "processes" : "threads", result.backend);
    }
    for (std::size_t row = 0; row < result.plans.size(); ++row) {  // told once as long as it is the same
        const Plan& plan = result.plans[row];
        if (row > 0 && plan.source == result.plans[row - 1].source) continue;
        output.line("expected times{}: {}", row == 0 ? "" : fmt::format(" from {} tokens", plan.tokens), plan.source);
    }
    const auto us = [](const Plan& plan, const Candidate& candidate) {  // beside measured times it is told what is not
        return fmt::format("{}{}", us_text(candidate.expected_us),
                           plan.from_table && !candidate.measured ? " by the model" : "");
    };
    Table table({"tokens", "<tail", "expected us", "<others that can run (us)"});
    for (const Plan& plan : result.plans) {
        std::vector<std::string> others;
        for (const Candidate& candidate : plan.candidates) {
            if (candidate.tail != plan.tail)
                others.push_back(fmt::format("{} {}", name(candidate.tail), us(plan, candidate)));
        }
        table.row({fmt::format("{}", plan.tokens), plan.candidates.empty() ? "none" : name(plan.tail),
                   plan.candidates.empty() ? "" : us_text(plan.expected_us), fmt::format("{}", fmt::join(others, ", "))});
    }
    output.table(table);

    // A reason that holds for every number of tokens is told once.
    const auto told_before = [&](std::size_t row, const Refusal& refusal) {
        return row > 0 && refusal_of(result.plans[row - 1], refusal.tail) == refusal.reason;
    };
    for (std::size_t row = 0; row < result.plans.size(); ++row) {
        for (const Refusal& refusal : result.plans[row].refused) {
            if (!told_before(row, refusal))
                output.line("refused from {} tokens: {}: {}", result.plans[row].tokens, name(refusal.tail), refusal.reason);
        }
    }

    const double whole = static_cast<double>(problem.shape.hidden * problem.shape.latent) * 2;
    const double shard = whole / problem.world;
    if (problem.world > 1) {
        output.line("the whole W_up on every rank (--keep-whole-weights, {}): {} a layer and rank instead of {}, {} more",
                    result.keeps_whole ? "on" : "off", bytes_text(whole), bytes_text(shard), bytes_text(whole - shard));
    }
}

Json to_json(const Problem& problem, const Result& result) {
    const std::int64_t whole = problem.shape.hidden * problem.shape.latent * 2;
    Json json = {{"schema", "latent-moe/explain/1"}, {"rows", Json::array()}};
    for (const Plan& plan : result.plans) {
        const bool runs = !plan.candidates.empty();
        Json row = {{"tokens", plan.tokens},
                    {"tail", runs ? Json(name(plan.tail)) : Json()},
                    {"expected_us", runs ? Json(plan.expected_us) : Json()},
                    {"source", plan.source},
                    {"from_table", plan.from_table},
                    {"candidates", Json::array()},
                    {"refused", Json::array()}};
        for (const Candidate& each : plan.candidates) {
            row["candidates"].push_back(
                {{"tail", name(each.tail)}, {"expected_us", each.expected_us}, {"measured", each.measured}});
        }
        for (const Refusal& each : plan.refused)
            row["refused"].push_back({{"tail", name(each.tail)}, {"reason", each.reason}});
        json["rows"].push_back(row);
    }
    json["source"] = result.plans.front().source;
    if (result.predicted_for) {
        json["machine"] = Json::parse(io::machine_text(*result.predicted_for));
        json["predictions"] = predictions(problem, *result.predicted_for);
    }
    json["keep_whole_weights"] = {
        {"on", result.keeps_whole}, {"bytes_a_layer_and_rank", whole}, {"bytes_without", whole / problem.world}};
    return json;
}

int execute(const Arguments& arguments, Ranks& ranks) {
    Problem problem = make_problem(arguments, ranks, {1, 8, 64, 256, 1024, 8192});
    problem.options.capacity_tokens = arguments.capacity.value_or(Options{}.capacity_tokens);
    if (arguments.tail.one_named()) problem.options.tail = arguments.tail.named.front();
    Output output(arguments, ranks.speaks());

    if (arguments.machine) {
        if (arguments.tune_table != "auto" && arguments.tune_table != "none") {
            throw Error(StatusCode::invalid_argument,
                        "--machine predicts, and --table holds what was measured: expected one of them");
        }
        if (arguments.backend != "auto") {
            throw Error(StatusCode::invalid_argument,
                        fmt::format("backend is {}, expected none beside --machine, which is predicted and not asked",
                                    arguments.backend));
        }
        if (!ranks.speaks()) return done;
        const Result predicted = predict(problem, find_machine(*arguments.machine));
        report(output, arguments, problem, predicted);
        output.json(to_json(problem, predicted));
        return done;
    }
    Result result{.backend = {}, .keeps_whole = problem.options.keep_whole_weights, .plans = {}, .predicted_for = {}};
    ranks.run([&](const Bootstrap& bootstrap) {
        const Context context = Context::create(problem.shape, bootstrap, problem.options);
        if (bootstrap.rank != 0) return;
        result.backend = context.backend();
        for (const std::int64_t tokens : problem.tokens) result.plans.push_back(context.plan(tokens));
    });
    if (!ranks.speaks()) return done;

    report(output, arguments, problem, result);
    output.json(to_json(problem, result));
    return done;
}

}  // namespace

Command explain_command() {
    return {.name = "explain",
            .summary = "Says which tail runs for each number of tokens, and why not the others",
            .examples =
                "  latent-moe explain --model kimi-k3 --tp 4\n"
                "  latent-moe explain --model nemotron-3-ultra --tp 2 --keep-whole-weights --tokens 1-8,64\n"
                "  latent-moe explain --model kimi-k3 --tp 8 --shared reduced --limit fused=16 --json -\n"
                "  latent-moe explain --model kimi-k3 --tp 8 --machine b200 --keep-whole-weights",
            .add_options = &add_options,
            .execute = &execute};
}

}  // namespace latent_moe::cli

// `explain`: which tail runs for each number of tokens, and why not the others.
#include <fmt/format.h>

#include "cli/command.h"
#include "cli/output.h"
#include "cli/problem.h"
#include "cli/rank_work.h"

namespace latent_moe::cli {
namespace {

void add_options(CLI::App& app, Arguments& arguments) {
    add_shape_options(app, arguments);
    add_rank_options(app, arguments);
    add_tokens_option(app, arguments, "1,8,64,256,1024,8192");
    add_tail_option(app, arguments, TailChoice::Kind::automatic);
    add_context_options(app, arguments);
    add_tensor_options(app, arguments, true);
    add_output_options(app, arguments);
}

struct Result {
    std::string backend;
    bool keeps_whole = false;
    std::vector<Plan> plans;
};

void report(Output& output, const Arguments& arguments, const Problem& problem, const Result& result) {
    output.line("{}; {} {}, backend {}", shape_text(problem.shape), problem.world,
                arguments.processes ? "processes" : "threads", result.backend);
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
    json["keep_whole_weights"] = {
        {"on", result.keeps_whole}, {"bytes_a_layer_and_rank", whole}, {"bytes_without", whole / problem.world}};
    return json;
}

int execute(const Arguments& arguments, Ranks& ranks) {
    Problem problem = make_problem(arguments, ranks, {1, 8, 64, 256, 1024, 8192});
    problem.options.capacity_tokens = arguments.capacity.value_or(Options{}.capacity_tokens);
    if (arguments.tail.one_named()) problem.options.tail = arguments.tail.named.front();
    Output output(arguments, ranks.speaks());

    Result result{.backend = {}, .keeps_whole = problem.options.keep_whole_weights, .plans = {}};
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
                "  latent-moe explain --model kimi-k3 --tp 8 --shared reduced --limit fused=16 --json -",
            .add_options = &add_options,
            .execute = &execute};
}

}  // namespace latent_moe::cli

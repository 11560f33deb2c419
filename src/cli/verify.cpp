// `verify`: tails against the float64 reference, over numbers of tokens.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <tuple>

#include "cli/command.h"
#include "cli/judge.h"
#include "cli/output.h"
#include "cli/problem.h"
#include "cli/rank_work.h"
#include "context/backends.h"
#include "core/float8_packing.h"
#include "core/planner.h"
#include "latent_moe/status.h"

namespace latent_moe::cli {
namespace {

void add_options(CLI::App& app, Arguments& arguments) {
    add_shape_options(app, arguments);
    add_rank_options(app, arguments);
    add_tokens_option(app, arguments, "0,1,5,8,33, or as the inputs have");
    add_tail_option(app, arguments, TailChoice::Kind::all);
    add_context_options(app, arguments);
    add_feature_options(app, arguments);
    app.add_flag("--halves", arguments.halves, "calls in halves: begin with the shared rows, finish with the routed ones")
        ->excludes("--deferred")
        ->group("Features");
    add_tensor_options(app, arguments, true);
    add_output_options(app, arguments);
}

struct Case {
    Tail tail;
    std::int64_t tokens;
    Verdict verdict;
    bool ranks_identical;
    bool repeat_identical;
    bool batch_identical;  ///< rows have the bits that they had in a call of another number of tokens, where that was asked

    bool pass() const noexcept { return verdict.accurate() && ranks_identical && repeat_identical && batch_identical; }
};

struct RefusedCase {
    std::int64_t tokens;
    Refusal refusal;
};

struct Result {
    std::string backend;
    std::vector<Case> cases;
    std::vector<RefusedCase> refused;
    std::optional<double> float8_error;  ///< of packing the weights, in the output

    std::size_t passed() const {
        return static_cast<std::size_t>(
            std::count_if(cases.begin(), cases.end(), [](const Case& each) { return each.pass(); }));
    }
};

std::vector<Tail> tails_to_try(const TailChoice& choice, const Plan& plan) {
    if (choice.kind == TailChoice::Kind::named) return choice.named;
    if (choice.kind == TailChoice::Kind::automatic)
        return plan.candidates.empty() ? std::vector<Tail>{} : std::vector{plan.tail};
    std::vector<Tail> all;
    for (int index = 0; index < tail_count; ++index) all.push_back(static_cast<Tail>(index));
    return all;
}

/// Why a tail cannot be tried, if it cannot.
std::optional<std::string> why_not(const Arguments& arguments, const Plan& plan, Tail tail) {
    if (arguments.halves && !has_halves(tail)) return "it has no halves";
    return refusal_of(plan, tail);
}

Status run_once(const Context& context, Tail tail, const TailInput& input, const Rows& out, Stream stream, bool halves) {
    const Layer layer = context.layer(0);
    if (!halves) return layer.run(tail, input, out, stream);
    const Status begun = layer.begin(tail, input.shared, out, input.tokens, stream);
    return begun.ok() ? layer.finish(input.routed, input.prefix, stream) : begun;
}

/// Runs a tail twice over poisoned memory: what a call leaves unwritten shows as NaN, what it leaves to chance as a
/// difference.
std::pair<bool, bool> run_twice(const Context& context, const Bootstrap& bootstrap, Tail tail, const TailInput& input,
                                Device& device, RankOutput& out, bool halves) {
    out.fill_bytes(0xFE);
    require(run_once(context, tail, input, out.rows(), device.stream(), halves));
    const ConstMatrix once = out.written(input.tokens);
    const std::vector<std::byte> first(once.data, once.data + once.rows * once.row_bytes());
    out.fill_bytes(0xFF);
    require(run_once(context, tail, input, out.rows(), device.stream(), halves));
    const ConstMatrix written = out.written(input.tokens);
    const bool repeated = first.empty() || std::memcmp(first.data(), written.data, first.size()) == 0;
    const std::vector<char> all_repeated = gathered(bootstrap, static_cast<char>(repeated));
    const bool ranks_identical = context.options().sequence_parallel || same_on_all_ranks(bootstrap, written);
    return {ranks_identical, std::all_of(all_repeated.begin(), all_repeated.end(), [](char each) { return each != 0; })};
}

/// Whether the rows that both calls have are the same bits; `earlier` becomes this call's.
bool same_first_rows(const ConstMatrix& rows, std::vector<std::byte>& earlier) {
    const auto bytes = static_cast<std::size_t>(rows.rows * rows.row_bytes());
    const std::size_t both = std::min(bytes, earlier.size());
    const bool same = both == 0 || std::memcmp(rows.data, earlier.data(), both) == 0;
    earlier.assign(rows.data, rows.data + bytes);
    return same;
}

std::vector<ConstMatrix> views_of(const std::vector<Tensor>& tensors) {
    std::vector<ConstMatrix> views;
    for (const Tensor& tensor : tensors) views.push_back(tensor.view());
    return views;
}

void report(Output& output, const Arguments& arguments, const Problem& problem, const Result& result) {
    output.line("{}; {} {}, backend {}", shape_text(problem.shape), problem.world,
                arguments.processes ? "processes" : "threads", result.backend);
    Table table({"<tail", "tokens", "rel L2", "chain's", "allowed", "max abs", "<ranks", "<repeat", "<result"});
    for (const Case& each : result.cases) {
        table.row({name(each.tail), fmt::format("{}", each.tokens), error_text(each.verdict.rel_l2),
                   error_text(each.verdict.chain_rel_l2), error_text(each.verdict.allowed), error_text(each.verdict.max_abs),
                   each.ranks_identical ? "identical" : "DIFFER", each.repeat_identical ? "identical" : "DIFFERS",
                   each.pass()                 ? "pass"
                   : !each.verdict.same_finite ? "FAIL: not finite where the chain is, or the other way round"
                   : !each.batch_identical     ? "FAIL: rows depend on the number of tokens"
                                               : "FAIL"});
    }
    if (!table.empty()) output.table(table);

    // One line for all token counts that a tail is refused for with the same reason.
    for (std::size_t i = 0; i < result.refused.size(); ++i) {
        const auto same = [&](const RefusedCase& other) {
            return other.refusal.tail == result.refused[i].refusal.tail &&
                   other.refusal.reason == result.refused[i].refusal.reason;
        };
        if (std::any_of(result.refused.begin(), result.refused.begin() + static_cast<std::ptrdiff_t>(i), same)) continue;
        std::vector<std::int64_t> tokens;
        for (const RefusedCase& other : result.refused) {
            if (same(other)) tokens.push_back(other.tokens);
        }
        output.line(
            "refused: {} ({}): {}", name(result.refused[i].refusal.tail),
            tokens.size() == problem.tokens.size() ? "any tokens" : fmt::format("tokens {}", fmt::join(tokens, ", ")),
            result.refused[i].refusal.reason);
    }
    if (result.float8_error) {
        output.line(
            "float8 weights: in float64 the output is {} (relative L2) from that of the weights as given; the errors above "
            "are "
            "beside it",
            error_text(*result.float8_error));
    }
    output.line("{} passed, {} failed", result.passed(), result.cases.size() - result.passed());
}

Json to_json(const Problem& problem, const Result& result) {
    const bool batch_invariant = problem.options.batch_invariant;
    Json json = {{"schema", "latent-moe/verify/1"}, {"cases", Json::array()}, {"refused", Json::array()}};
    for (const Case& each : result.cases) {
        json["cases"].push_back({{"tail", name(each.tail)},
                                 {"backend", result.backend},
                                 {"tp", problem.world},
                                 {"tokens", each.tokens},
                                 {"dtype", name(problem.shape.activations)},
                                 {"rel_l2", each.verdict.rel_l2},
                                 {"chain_rel_l2", each.verdict.chain_rel_l2},
                                 {"max_abs", each.verdict.max_abs},
                                 {"ranks_identical", each.ranks_identical},
                                 {"repeat_identical", each.repeat_identical},
                                 {"pass", each.pass()}});
        if (batch_invariant) json["cases"].back()["batch_identical"] = each.batch_identical;
    }
    if (result.float8_error) json["float8_rel_l2"] = *result.float8_error;
    for (const RefusedCase& each : result.refused) {
        json["refused"].push_back(
            {{"tail", name(each.refusal.tail)}, {"tokens", each.tokens}, {"reason", each.refusal.reason}});
    }
    json["passed"] = result.passed();
    json["failed"] = result.cases.size() - result.passed();
    return json;
}

int execute(const Arguments& arguments, Ranks& ranks) {
    Problem problem = make_problem(arguments, ranks, {0, 1, 5, 8, 33});
    find_backend(problem.options.backend);      // what is missing is said before inputs are made
    problem.options.keep_whole_weights = true;  // so that every tail can run
    problem.options.capacity_tokens = arguments.capacity.value_or(problem.options.max_tokens);
    require_run_memory(problem, true, 1);
    Output output(arguments, ranks.speaks());

    // Rows of a smaller call are the first rows of a larger one, so one reference serves all.
    const CallInputs inputs = make_inputs(arguments, problem, ranks, true);
    std::optional<Judge> judge;
    std::optional<double> float8_error;
    ranks.once([&] {
        Progress progress(arguments, true);
        progress.say("computing the reference in float64 for {} tokens", problem.most_tokens());
        const LayerWeights given = problem.weights.load_whole(problem.layer);
        const ReferenceInput as_given = reference_input(problem.shape, inputs, problem.options.shared, given);
        ReferenceInput of_chain = as_given;
        Float8Rows float8;
        if (problem.options.float8_weights && given.rows.dtype != Dtype::e4m3) {
            float8 = pack_float8(given.view(), given.rows.columns);
            of_chain.weights = {reinterpret_cast<const std::byte*>(float8.bits.data()), given.rows.rows, given.rows.columns,
                                given.rows.columns, Dtype::e4m3};
            of_chain.row_scales = float8.scales.data();
        }
        ReferenceInput exact = of_chain;
        if (!inputs.routed_exact.empty()) exact.routed = views_of(inputs.routed_exact);
        judge.emplace(exact, of_chain);
        if (float8.rows == 0) return;
        exact.weights = as_given.weights;
        exact.row_scales = as_given.row_scales;
        float8_error = judge->distance_to(exact);
    });

    Result result{.float8_error = float8_error};
    ranks.run([&](const Bootstrap& bootstrap) {
        const bool tells = bootstrap.rank == 0;
        const std::unique_ptr<Device> device = make_device(problem.options, bootstrap);
        const Context context = make_context(problem, bootstrap, {problem.layer});
        const RankInputs rank_inputs(*device, inputs, bootstrap.rank);
        RankOutput out(*device, context, problem.most_tokens());
        Progress progress(arguments, tells);
        if (tells) result.backend = context.backend();
        std::map<Tail, std::vector<std::byte>> earlier;  // the rows of the tail's last call
        for (const std::int64_t tokens : problem.tokens) {
            const Plan plan = context.plan(tokens);
            const TailInput input = rank_inputs.of(context, tokens);
            for (const Tail tail : tails_to_try(arguments.tail, plan)) {
                if (const auto reason = why_not(arguments, plan, tail)) {
                    if (tells) result.refused.push_back({tokens, {tail, *reason}});
                    continue;
                }
                progress.say("{}, {} tokens", name(tail), tokens);
                const auto [ranks_identical, repeat_identical] =
                    run_twice(context, bootstrap, tail, input, *device, out, arguments.halves);
                const ConstMatrix whole = out.whole(bootstrap, tokens);
                const bool batch_identical = !problem.options.batch_invariant || same_first_rows(whole, earlier[tail]);
                if (!tells) continue;
                result.cases.push_back(
                    {tail, tokens, judge->judge(whole, tail), ranks_identical, repeat_identical, batch_identical});
            }
        }
    });
    if (!ranks.speaks()) return done;

    if (result.cases.empty())
        throw_none_can_run(arguments.tail, result.refused.empty() ? nullptr : &result.refused.front().refusal);
    report(output, arguments, problem, result);
    output.json(to_json(problem, result));
    return result.passed() == result.cases.size() ? done : check_failed;
}

}  // namespace

Command verify_command() {
    return {.name = "verify",
            .summary = "Compares tails with the float64 reference, over numbers of tokens",
            .examples =
                "  latent-moe verify --model kimi-k3 --tp 4 --tokens 0,1,5,8,16,33 --tail all\n"
                "  latent-moe verify --model nemotron-3-super --tp 3 --dtype f16 --json -\n"
                "  latent-moe verify --weights checkpoint/ --layer 2 --tp 2 --tail column_parallel\n"
                "  latent-moe verify --halves --tp 2 --tokens 1,7,64\n"
                "  latent-moe verify --deferred 8 --float8-weights --batch-invariant --tokens 1,7,64\n"
                "  mpirun -n 4 latent-moe verify --ranks processes --model kimi-k3",
            .add_options = &add_options,
            .execute = &execute};
}

}  // namespace latent_moe::cli

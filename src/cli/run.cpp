// `run`: one tail over given or synthetic tensors.
#include <fmt/format.h>

#include <optional>

#include "cli/command.h"
#include "cli/judge.h"
#include "cli/output.h"
#include "cli/problem.h"
#include "cli/rank_work.h"
#include "context/backends.h"
#include "io/safetensors_writer.h"
#include "latent_moe/status.h"

namespace latent_moe::cli {
namespace {

void add_options(CLI::App& app, Arguments& arguments) {
    add_shape_options(app, arguments);
    add_rank_options(app, arguments);
    add_tokens_option(app, arguments, "one number: 16, or as the inputs have");
    add_tail_option(app, arguments, TailChoice::Kind::automatic);
    add_context_options(app, arguments);
    add_feature_options(app, arguments);
    add_tensor_options(app, arguments, true);
    app.add_option("--out", arguments.out, "safetensors file to write, with the tensor `out`")
        ->type_name("FILE")
        ->group("Output");
    app.add_flag("--no-check", arguments.no_check, "do not compare with float64")->group("Output");
    add_repeats_option(app, arguments);
    add_output_options(app, arguments);
}

/// What rank 0 knows in the end.
struct Result {
    std::string backend;
    Plan plan;
    Tail tail = Tail::replicated;
    std::optional<Verdict> verdict;
    bool ranks_identical = true;
    Timing timing;

    bool pass() const noexcept { return ranks_identical && (!verdict || verdict->accurate()); }
};

/// The tail that was asked for, or the plan's choice.
Tail settle_tail(const Arguments& arguments, const Plan& plan) {
    if (arguments.tail.one_named()) {
        const Tail tail = arguments.tail.named.front();
        if (const auto reason = refusal_of(plan, tail)) {
            throw Error(StatusCode::unsupported,
                        fmt::format("tail {} cannot run {} tokens: {}", name(tail), plan.tokens, *reason));
        }
        return tail;
    }
    if (plan.candidates.empty()) {
        throw Error(StatusCode::unsupported, fmt::format("no tail can run {} tokens; {}: {}", plan.tokens,
                                                         name(plan.refused.front().tail), plan.refused.front().reason));
    }
    return plan.tail;
}

std::string why(const Arguments& arguments, const Plan& plan) {
    if (arguments.tail.one_named()) return "asked for by name";
    const std::string choice = plan.candidates.size() == 1
                                   ? "the only one that can run"
                                   : fmt::format("the cheapest of the {} that can run", plan.candidates.size());
    return fmt::format("{}, expected {} us from the {}", choice, us_text(plan.expected_us), plan.source);
}

void report(Output& output, const Arguments& arguments, const Problem& problem, const Result& result) {
    output.line("shape    {}", shape_text(problem.shape));
    output.line("ranks    {} {}, backend {}", problem.world, arguments.processes ? "processes" : "threads", result.backend);
    output.line("weights  {}, layer {}", arguments.weights.value_or(fmt::format("drawn from seed {}", arguments.seed)),
                problem.layer);
    output.line("inputs   {}, {} tokens", arguments.inputs.value_or(fmt::format("drawn from seed {}", arguments.seed)),
                problem.tokens.front());
    output.line("tail     {}: {}", name(result.tail), why(arguments, result.plan));
    for (const Candidate& candidate : result.plan.candidates) {
        if (candidate.tail != result.tail)
            output.line("           {}: could run, expected {} us", name(candidate.tail), us_text(candidate.expected_us));
    }
    for (const Refusal& refusal : result.plan.refused)
        output.line("           {}: cannot run: {}", name(refusal.tail), refusal.reason);
    output.line("time     median {} us of {} calls (10 % under {}, 90 % under {})", us_text(result.timing.median_us),
                result.timing.repeats, us_text(result.timing.p10_us), us_text(result.timing.p90_us));
    if (result.verdict) {
        output.line("error    {} relative L2 against float64; the unfused chain's is {}; allowed is {}: {}",
                    error_text(result.verdict->rel_l2), error_text(result.verdict->chain_rel_l2),
                    error_text(result.verdict->allowed), result.verdict->accurate() ? "pass" : "FAIL");
        if (!result.verdict->same_finite)
            output.line("           NaN or infinity where the chain is finite, or the other way round");
    }
    output.line("bits     {}", problem.options.sequence_parallel ? "each rank holds its own rows"
                               : result.ranks_identical          ? "identical on every rank"
                                                                 : "DIFFERENT between ranks");
    if (arguments.out) {
        output.line("out      {}: [{}, {}] {}", *arguments.out, problem.tokens.front(), problem.shape.hidden,
                    name(problem.shape.activations));
    }
}

Json to_json(const Problem& problem, const Result& result) {
    Json json = {{"schema", "latent-moe/run/1"},
                 {"tail", name(result.tail)},
                 {"backend", result.backend},
                 {"tp", problem.world},
                 {"tokens", problem.tokens.front()},
                 {"layer", problem.layer},
                 {"dtype", name(problem.shape.activations)},
                 {"hidden", problem.shape.hidden},
                 {"latent", problem.shape.latent},
                 {"expected_us", result.plan.expected_us},
                 {"median_us", result.timing.median_us},
                 {"repeats", result.timing.repeats},
                 {"ranks_identical", result.ranks_identical}};
    if (result.verdict) {
        json["rel_l2"] = result.verdict->rel_l2;
        json["chain_rel_l2"] = result.verdict->chain_rel_l2;
        json["max_abs"] = result.verdict->max_abs;
    }
    json["pass"] = result.pass();
    json["refused"] = Json::array();
    for (const Refusal& refusal : result.plan.refused)
        json["refused"].push_back({{"tail", name(refusal.tail)}, {"reason", refusal.reason}});
    return json;
}

int execute(const Arguments& arguments, Ranks& ranks) {
    if (arguments.tail.kind == TailChoice::Kind::all ||
        (arguments.tail.kind == TailChoice::Kind::named && !arguments.tail.one_named())) {
        throw Error(StatusCode::invalid_argument, "run takes one --tail or auto; for several see `latent-moe verify`");
    }
    Problem problem = make_problem(arguments, ranks, {16});
    find_backend(problem.options.backend);  // what is missing is said before inputs are made
    if (problem.tokens.size() != 1) {
        throw Error(StatusCode::invalid_argument,
                    fmt::format("run takes one number of --tokens, found {}", problem.tokens.size()));
    }
    const std::int64_t tokens = problem.tokens.front();
    require_run_memory(problem, !arguments.no_check, 1);

    // Files that cannot be written are told before the work.
    Output output(arguments, ranks.speaks());
    std::optional<io::SafetensorsWriter> file;
    if (arguments.out && ranks.speaks()) {
        require_file_of_its_own(arguments, "--out", *arguments.out);
        file.emplace(*arguments.out,
                     std::vector<io::TensorDeclaration>{{"out", problem.shape.activations, {tokens, problem.shape.hidden}}});
    }

    const CallInputs inputs = make_inputs(arguments, problem, ranks, !arguments.no_check);
    std::optional<Judge> judge;
    if (!arguments.no_check) {
        ranks.once([&] {
            Progress progress(arguments, true);
            progress.say("computing the reference in float64");
            judge.emplace(
                reference_input(problem.shape, inputs, problem.options.shared, problem.weights.load_whole(problem.layer)));
        });
    }

    Result result;
    ranks.run([&](const Bootstrap& bootstrap) {
        const std::unique_ptr<Device> device = make_device(problem.options, bootstrap);
        const Context context = make_context(problem, bootstrap, {problem.layer});
        const Plan plan = context.plan(tokens);
        const Tail tail = settle_tail(arguments, plan);
        const RankInputs rank_inputs(*device, inputs, bootstrap.rank);
        RankOutput out(*device, context, tokens);
        const auto call = [&] {
            require(context.layer(0).run(tail, rank_inputs.of(context, tokens), out.rows(), device->stream()));
        };

        out.fill_bytes(0xFF);  // NaN: what the call leaves unwritten shows
        call();
        const bool identical = problem.options.sequence_parallel || same_on_all_ranks(bootstrap, out.written(tokens));
        const ConstMatrix whole = out.whole(bootstrap, tokens);
        if (bootstrap.rank == 0) {
            result = {.backend = context.backend(), .plan = plan, .tail = tail, .ranks_identical = identical};
            if (judge) result.verdict = judge->judge(whole, tail);
            if (file && tokens > 0) file->append_rows("out", whole.data, tokens);
        }
        const Timing timing = time_call(bootstrap, *device, arguments.repeats, call);
        if (bootstrap.rank == 0) result.timing = timing;
    });
    if (!ranks.speaks()) return done;

    if (file) file->finish();
    report(output, arguments, problem, result);
    output.json(to_json(problem, result));
    return result.pass() ? done : check_failed;
}

}  // namespace

Command run_command() {
    return {.name = "run",
            .summary = "Runs one tail over given or synthetic tensors and writes the output",
            .examples =
                "  latent-moe run --model kimi-k3 --tp 4 --tokens 16\n"
                "  latent-moe run --weights checkpoint/ --layer 1 --inputs inputs.safetensors --out out.safetensors\n"
                "  latent-moe run --hidden 1024 --latent 512 --norm none --tail late_reduce --tp 2\n"
                "  mpirun -n 4 latent-moe run --ranks processes --model nemotron-3-super",
            .add_options = &add_options,
            .execute = &execute};
}

}  // namespace latent_moe::cli

// `bench`: tails side by side in one run, with other libraries' beside them. rank_bench.h says how they are timed.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "cli/bench_result.h"
#include "cli/command.h"
#include "cli/memory.h"
#include "cli/output.h"
#include "cli/problem.h"
#include "cli/rank_bench.h"
#include "context/backends.h"
#include "io/trace_file.h"
#include "latent_moe/status.h"

namespace latent_moe::cli {
namespace {

constexpr int default_layers = 12;

void add_options(CLI::App& app, Arguments& arguments) {
    add_shape_options(app, arguments);
    add_rank_options(app, arguments);
    add_tokens_option(app, arguments, "1,8,64,256; with --step 1,8,32,128,256,4096");
    add_tail_option(app, arguments, TailChoice::Kind::all);
    add_context_options(app, arguments);
    add_tensor_options(app, arguments, true);
    app.add_option("--layers", arguments.layers, "layers with weights of their own (12, with --step 92, or as many as fit)")
        ->check(CLI::Range(1, 1024))
        ->type_name("N")
        ->group("Tensors");
    add_bench_options(app, arguments);
    add_repeats_option(app, arguments);
    add_output_options(app, arguments);
}

void require_sense(const Arguments& arguments, const Problem& problem) {
    const BackendEntry& backend = find_backend(problem.options.backend);
    const bool all_raw =
        !arguments.input_states || std::all_of(arguments.input_states->begin(), arguments.input_states->end(),
                                               [](InputState state) { return state == InputState::raw; });
    if (!all_raw && backend.name == "cpu") {
        throw Error(StatusCode::unsupported,
                    "--input-state asks for fresh inputs, but backend cpu has no producer kernel: expected raw");
    }
    if (arguments.trace) {
        const std::string missing =
            backend.why_no_trace != nullptr ? backend.why_no_trace() : fmt::format("backend {} has no tracer", backend.name);
        if (!missing.empty()) throw Error(StatusCode::unavailable, fmt::format("--trace: {}", missing));
    }
    if (arguments.tpot_ms.size() > 1 && arguments.tpot_ms.size() != problem.tokens.size()) {
        throw Error(StatusCode::invalid_argument, fmt::format("--tpot-ms has {} numbers, expected 1 or {} as --tokens has",
                                                              arguments.tpot_ms.size(), problem.tokens.size()));
    }
}

void write_kernels(const std::string& path, const std::vector<KernelRun>& kernels) {
    std::vector<io::TraceSpan> spans;
    std::map<int, std::string> devices;
    for (const KernelRun& run : kernels) {
        spans.push_back({run.name, run.device, run.stream, run.begin_us, run.end_us - run.begin_us});
        devices.emplace(run.device, fmt::format("device {}", run.device));
    }
    io::write_trace(path, spans, devices);
}

int execute(const Arguments& arguments, Ranks& ranks) {
    BenchResult result;
    result.memory.at_start = resident_bytes();
    const std::vector<std::int64_t> decode{1, 8, 64, 256};
    const std::vector<std::int64_t> step{1, 8, 32, 128, 256, 4096};
    Problem problem = make_problem(arguments, ranks, arguments.step ? step : decode);
    require_sense(arguments, problem);
    require_run_memory(problem, false, 1);
    const std::vector<std::int64_t> layers =
        layers_that_fit(problem, arguments.layers.value_or(arguments.step ? step_layers : default_layers));
    Output output(arguments, ranks.speaks());
    if (ranks.speaks() && arguments.trace) {  // what cannot be written is said before minutes of measuring
        require_file_of_its_own(arguments, "--trace", *arguments.trace);
        const io::OutputFile writable(*arguments.trace);
    }

    std::vector<KernelRun> kernels;
    ranks.run([&](const Bootstrap& bootstrap) {
        BenchResult mine = result;
        std::vector<KernelRun> my_kernels;
        Progress progress(arguments, bootstrap.rank == 0);
        RankBench bench(arguments, problem, bootstrap, layers, progress);
        bench.warm_up(mine);
        try {
            for (const std::int64_t tokens : problem.tokens) bench.time(tokens, mine);
            if (arguments.trace) bench.trace(mine, my_kernels);
        } catch (const Error& error) {  // what was measured before it stands
            if (mine.rows.empty()) throw;
            mine.failure = error.status();
        }
        if (mine.failure.ok()) gathered(bootstrap, 0);  // nobody reads `result` any more
        if (bootstrap.rank == 0) {
            result = std::move(mine);
            kernels = std::move(my_kernels);
        }
    });
    if (ranks.speaks() && result.rows.empty()) {
        const auto first = std::find_if(result.refused.begin(), result.refused.end(),
                                        [](const RefusedRow& refused) { return tail_from_name(refused.tail).has_value(); });
        const bool known = first != result.refused.end();
        const Refusal refusal = known ? Refusal{*tail_from_name(first->tail), first->reason} : Refusal{};
        throw_none_can_run(arguments.tail, known ? &refusal : nullptr);
    }
    if (!ranks.speaks()) return done;

    print_bench(output, arguments, problem, result);
    output.json(bench_json(arguments, problem, result));
    if (arguments.trace && result.failure.ok()) write_kernels(*arguments.trace, kernels);
    if (!result.failure.ok()) throw Error(result.failure.code(), result.failure.message());
    return done;
}

}  // namespace

Command bench_command() {
    return {.name = "bench",
            .summary = "Times tails side by side in one run, beside the least that they could take",
            .examples =
                "  latent-moe bench --model kimi-k3 --tp 2 --tokens 1,8,64,256 --tail all\n"
                "  latent-moe bench --model kimi-k3 --tp 2 --tokens 256 --tail column_parallel --json bench.json\n"
                "  latent-moe bench --model kimi-k3 --tokens 16 --trace trace.json --progress\n"
                "  latent-moe bench --model kimi-k3 --step --tpot-ms 23.86\n"
                "  latent-moe bench --weights checkpoint/ --layers 3 --tp 4 --repeats 20",
            .add_options = &add_options,
            .execute = &execute};
}

}  // namespace latent_moe::cli

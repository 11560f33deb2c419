// `info`: what this build and this machine have, and what a context would take.
#include <fmt/format.h>

#include <algorithm>
#include <thread>

#include "cli/command.h"
#include "cli/measure_machine.h"
#include "cli/onednn_product.h"
#include "cli/output.h"
#include "cli/problem.h"
#include "cli/rank_work.h"
#include "cli/tensors.h"
#include "context/backends.h"
#include "io/machine_file.h"
#include "latent_moe/version.h"
#ifdef LATENT_MOE_HAS_MPI
#include <mpi.h>
#endif

namespace latent_moe::cli {
namespace {

void add_options(CLI::App& app, Arguments& arguments) {
    add_shape_options(app, arguments);
    add_rank_options(app, arguments);
    add_tokens_option(app, arguments, "8192");
    add_context_options(app, arguments);
    app.add_flag("--measure", arguments.measure,
                 "measure the constants that the cost model goes by, on all ranks together (Kimi-K3's shape)")
        ->group("Measurement");
    add_repeats_option(app, arguments);
    add_output_options(app, arguments);
}

std::string mpi_version() {
#ifdef LATENT_MOE_HAS_MPI
    std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
    int length = 0;
    MPI_Get_library_version(text.data(), &length);
    const std::string whole(text.data(), static_cast<std::size_t>(length));
    return whole.substr(0, whole.find_first_of(",\n"));
#else
    return "not in this build: --ranks processes is not available";
#endif
}

std::vector<std::pair<std::string, std::string>> libraries() {
    return {{"oneDNN", onednn_version()},
            {"MPI", mpi_version()},
            {"fmt", fmt::format("{}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100)},
            {"nlohmann-json",
             fmt::format("{}.{}.{}", NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR, NLOHMANN_JSON_VERSION_PATCH)},
            {"CLI11", CLI11_VERSION}};
}

/// What a context of this shape takes on each rank.
struct Sizes {
    std::string backend;
    std::size_t workspace = 0;
    double shard = 0;  ///< of W_up, a layer
    double whole = 0;
};

Sizes measure_sizes(const Problem& problem, Ranks& ranks) {
    Sizes sizes;
    sizes.whole = static_cast<double>(problem.shape.hidden * problem.shape.latent) * 2;
    sizes.shard = sizes.whole / problem.world;
    constexpr double block_tokens = 512;  // about what the CPU's workspace holds rows for
    require_memory(problem.world * block_tokens * static_cast<double>(problem.shape.latent + 2 * problem.shape.hidden) *
                       static_cast<double>(bytes_of(problem.shape.activations)),
                   fmt::format("the workspaces of {} ranks", problem.world));
    ranks.run([&](const Bootstrap& bootstrap) {
        const Context context = Context::create(problem.shape, bootstrap, problem.options);
        if (bootstrap.rank != 0) return;
        sizes.backend = context.backend();
        sizes.workspace = context.workspace_bytes();
    });
    return sizes;
}

std::string rate_text(double bytes_per_us) {
    return fmt::format("{:.4g} GB/s", bytes_per_us / 1e3);
}

void report_machine(Output& output, const MeasuredMachine& measured) {
    const Machine& machine = measured.kind.machine;
    const auto told = [&](const char* name) {
        const std::vector<std::string>& unmeasured = measured.kind.unmeasured;
        return std::find(unmeasured.begin(), unmeasured.end(), name) == unmeasured.end() ? "measured"
                                                                                         : "NOT measured, assumed";
    };
    output.line("constants of one rank of {}, {}", machine.description, measured.kind.origin);
    output.line("  memory: {} ({})", rate_text(machine.memory_bytes_per_us), told("memory_bytes_per_us"));
    output.line("  arithmetic: {:.4g} Gflop/s ({})", machine.flops_per_us / 1e3, told("flops_per_us"));
    output.line("  launch: {} us ({})", us_text(machine.launch_us), told("launch_us"));
    output.line("  hop: {} us; collective: {} us ({})", us_text(machine.hop_us), us_text(machine.collective_us),
                told("hop_us"));
    output.line("  wire: {} a direction ({})", rate_text(machine.wire_bytes_per_us), told("wire_bytes_per_us"));
    output.line(
        "  what the backend's kernels reach of these (\"reached\" in the JSON) is as the backend knows it, not measured "
        "here");
}

Json to_json(const MeasuredMachine& measured) {
    Json json = Json::parse(io::machine_text(measured.kind));
    const MachineTimes& times = measured.times;
    json["timed_us"] = {
        {"product_wide", times.wide_us}, {"product_narrow", times.narrow_us}, {"product_large", times.large_us}};
    if (times.few_us > 0) {
        json["timed_us"]["all_reduce_few"] = times.few_us;
        json["timed_us"]["all_reduce_many"] = times.many_us;
    }
    return json;
}

MeasuredMachine measured_here(const Arguments& given, Ranks& ranks) {
    Arguments arguments = given;
    if (!arguments.model && !arguments.hidden) arguments.model = "kimi-k3";
    const Problem problem = make_problem(arguments, ranks, {8192});
    MeasuredMachine measured;
    ranks.run([&](const Bootstrap& bootstrap) {
        Progress progress(arguments, bootstrap.rank == 0);
        MeasuredMachine mine = measure_machine(arguments, problem, bootstrap, progress);
        if (bootstrap.rank == 0) measured = std::move(mine);
    });
    return measured;
}

int execute(const Arguments& arguments, Ranks& ranks) {
    Output output(arguments, ranks.speaks());
    const bool has_shape = arguments.model || arguments.hidden || arguments.latent;
    std::optional<Problem> problem;
    std::optional<Sizes> sizes;
    if (has_shape) {
        problem = make_problem(arguments, ranks, {8192});
        sizes = measure_sizes(*problem, ranks);
    } else {
        ranks.set_world(arguments.tp, 1);
        find_backend(arguments.backend);  // one that was asked for and is not here is an error
    }
    std::optional<MeasuredMachine> measured;
    if (arguments.measure) measured = measured_here(arguments, ranks);
    if (!ranks.speaks()) return done;

    Json json = {{"schema", "latent-moe/info/1"},
                 {"version", library_version()},
                 {"cores", std::thread::hardware_concurrency()},
                 {"backends", Json::array()},
                 {"libraries", Json::object()}};
    output.line("latent-moe {}", library_version());
    for (const BackendEntry& backend : backends()) {
        const std::string missing = backend.unavailable();
        output.line("backend {}: {}", backend.name, missing.empty() ? "available" : "not available: " + missing);
        const std::vector<std::string> lines = missing.empty() ? backend.describe() : std::vector<std::string>{};
        for (const std::string& line : lines) output.line("  {}", line);
        json["backends"].push_back(
            {{"name", backend.name}, {"available", missing.empty()}, {"reason", missing}, {"details", lines}});
    }
    output.line("libraries");
    for (const auto& [library, version] : libraries()) {
        output.line("  {}: {}", library, version);
        json["libraries"][library] = version;
    }
    if (sizes) {
        output.line("a context of {}; {} ranks, up to {} tokens", shape_text(problem->shape), problem->world,
                    problem->options.max_tokens);
        output.line("  workspace: {} a rank", bytes_text(static_cast<double>(sizes->workspace)));
        output.line("  weights: {} a layer and rank; {} with --keep-whole-weights", bytes_text(sizes->shard),
                    bytes_text(sizes->whole));
        json["context"] = {{"backend", sizes->backend},
                           {"tp", problem->world},
                           {"workspace_bytes", sizes->workspace},
                           {"weight_bytes_a_layer", sizes->shard},
                           {"whole_weight_bytes_a_layer", sizes->whole}};
    }
    if (measured) {
        report_machine(output, *measured);
        json["machine"] = to_json(*measured);
    }
    output.json(json);
    return done;
}

}  // namespace

Command info_command() {
    return {.name = "info",
            .summary = "Shows devices, libraries with versions, and the bytes that a context takes",
            .examples =
                "  latent-moe info\n"
                "  latent-moe info --model kimi-k3 --tp 4\n"
                "  latent-moe info --measure --tp 2 --json machine.json   # then: explain --machine machine.json --tp 8",
            .add_options = &add_options,
            .execute = &execute};
}

}  // namespace latent_moe::cli

// `info`: what this build and this machine have, and what a context would take.
#include <fmt/format.h>

#include <thread>

#include "cli/command.h"
#include "cli/onednn_product.h"
#include "cli/output.h"
#include "cli/problem.h"
#include "cli/rank_work.h"
#include "context/backends.h"
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
    ranks.run([&](const Bootstrap& bootstrap) {
        const Context context = Context::create(problem.shape, bootstrap, problem.options);
        if (bootstrap.rank != 0) return;
        sizes.backend = context.backend();
        sizes.workspace = context.workspace_bytes();
    });
    return sizes;
}

int execute(const Arguments& arguments, Ranks& ranks) {
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
    if (!ranks.speaks()) return done;

    Output output(arguments, true);
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
    output.json(json);
    return done;
}

}  // namespace

Command info_command() {
    return {.name = "info",
            .summary = "Shows devices, libraries with versions, and the bytes that a context takes",
            .examples =
                "  latent-moe info\n"
                "  latent-moe info --model kimi-k3 --tp 4",
            .add_options = &add_options,
            .execute = &execute};
}

}  // namespace latent_moe::cli

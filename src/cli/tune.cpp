// `tune`: measures every tail that can run here over the number of tokens, all ranks together, as `bench` does with inputs
// that are there beforehand, and writes the times as a table that plans go by.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <filesystem>

#include "cli/command.h"
#include "cli/output.h"
#include "cli/problem.h"
#include "cli/rank_bench.h"
#include "context/backends.h"
#include "core/planner.h"
#include "core/tune_table.h"
#include "io/output_file.h"
#include "io/tune_file.h"
#include "latent_moe/status.h"

namespace latent_moe::cli {
namespace {

const std::vector<std::int64_t> usual_tokens{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192};
constexpr int layers_on_gpu = 12;  // more bytes than any cache of today's GPUs
constexpr int layers_on_cpu = 4;
constexpr double verified_ratio = 1.05;

void add_options(CLI::App& app, Arguments& arguments) {
    add_shape_options(app, arguments);
    add_rank_options(app, arguments);
    add_tokens_option(app, arguments, fmt::format("{}", fmt::join(usual_tokens, ",")));
    add_tail_option(app, arguments, TailChoice::Kind::all);
    add_context_options(app, arguments);
    app.remove_option(app.get_option("--table"));  // plans go by it; here every tail is measured
    add_tensor_options(app, arguments, false);
    app.add_option("--layers", arguments.layers,
                   "layers with weights of their own (12 on a GPU, 4 on a CPU, or as many as fit)")
        ->check(CLI::Range(1, 1024))
        ->type_name("N")
        ->group("Tensors");
    add_repeats_option(app, arguments);
    app.add_option("--budget-s", arguments.budget_s,
                   "stop before the number of tokens that would take longer than this (240)")
        ->check(CLI::Range(0.0, 86400.0))
        ->type_name("SECONDS")
        ->group("Measurement");
    app.add_option(
           "--verify", arguments.verify,
           "then, at so many numbers of tokens in between, compare the tail that the table chooses with the fastest (0)")
        ->check(CLI::Range(0, 1000))
        ->type_name("N")
        ->group("Measurement");
    app.add_option("--out", arguments.out,
                   "file of tables: this one is added, or takes the place of one for the same machine and shape")
        ->type_name("FILE")
        ->group("Output");
    app.add_flag("--progress", arguments.progress, "say on standard error what is being done, a line each, and since when")
        ->group("Output");
    add_output_options(app, arguments);
}

std::string today() {
    const std::time_t now = std::time(nullptr);
    std::tm parts{};
    gmtime_r(&now, &parts);
    return fmt::format("{:04}-{:02}-{:02}", parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday);
}

/// What the table chose at a number of tokens that it does not hold, beside the fastest there.
struct Verified {
    std::int64_t tokens = 0;
    Tail chosen = Tail::replicated;
    Tail best = Tail::replicated;
    double chosen_us = 0;
    double best_us = 0;

    double ratio() const noexcept { return chosen_us / best_us; }
    bool good() const noexcept { return ratio() <= verified_ratio; }
};

/// What `--out` holds now.
std::vector<TuneTable> tables_in(const std::string& path) {
    std::error_code error;
    if (std::filesystem::exists(path, error)) return io::read_tune_tables(path);
    if (error) throw Error(StatusCode::io, fmt::format("{}: cannot open: {}", path, error.message()));
    return {};
}

/// Adds a table to the file as it is now: another `tune` may have written to it meanwhile. False: the file holds a fuller
/// one, which stays, since this one was stopped early.
bool save(const std::string& path, const TuneTable& table, bool stopped_early) {
    std::vector<TuneTable> tables = tables_in(path);
    const auto old =
        std::find_if(tables.begin(), tables.end(), [&](const TuneTable& each) { return each.key == table.key; });
    if (old == tables.end()) {
        tables.push_back(table);
    } else if (stopped_early && old->tokens().size() > table.tokens().size()) {
        return false;
    } else {
        *old = table;
    }
    io::write_tune_tables(path, tables);
    return true;
}

struct Tuned {
    TuneTable table;
    Capabilities capabilities;
    std::vector<Verified> verified;
    std::int64_t stopped_before = 0;  ///< number of tokens that there was no time for; 0: none
    double seconds = 0;
};

/// Collective: what rank 0 says of the clock holds for all.
class Budget {
public:
    Budget(const Bootstrap& bootstrap, double seconds) : bootstrap_(bootstrap), seconds_(seconds) {}

    double spent() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

    /// Whether so many tokens, which take as long a token as the last ones did, end in time.
    bool allows(std::int64_t tokens) const {
        const double growth =
            last_tokens_ > 0 ? std::max(1.0, static_cast<double>(tokens) / static_cast<double>(last_tokens_)) : 1;
        const bool fits = last_s_ == 0 || spent() + last_s_ * growth <= seconds_;
        return gathered(bootstrap_, fits ? 1 : 0).front() == 1;
    }

    template <typename Work>
    void spend(std::int64_t tokens, Work work) {
        const double before = spent();
        work();
        last_s_ = spent() - before;
        last_tokens_ = tokens;
    }

private:
    const Bootstrap& bootstrap_;
    double seconds_;
    std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
    double last_s_ = 0;
    std::int64_t last_tokens_ = 0;
};

/// Times what runs at these numbers of tokens, and looks at what the table would have chosen. Collective.
std::vector<Verified> verify(int count, const Problem& problem, const Tuned& tuned, RankBench& bench) {
    const Planner planner(problem.shape, problem.world, problem.options, tuned.capabilities,
                          {.table = tuned.table, .note = "just measured"});
    std::vector<Verified> all;
    for (const std::int64_t tokens : untried_tokens(tuned.table.tokens(), count)) {
        const std::optional<Tail> chosen = planner.choose(tokens);
        BenchResult result;
        bench.time(tokens, result);
        Verified found{.tokens = tokens};
        for (const BenchRow& row : result.rows) {
            const std::optional<Tail> tail = tail_from_name(row.tail);
            if (!tail) continue;
            if (found.best_us == 0 || row.timing.median_us < found.best_us) {
                found.best = *tail;
                found.best_us = row.timing.median_us;
            }
            if (tail == chosen) {
                found.chosen = *tail;
                found.chosen_us = row.timing.median_us;
            }
        }
        if (found.chosen_us > 0) all.push_back(found);
    }
    return all;
}

Tuned measure(const Arguments& arguments, Problem& problem, const Bootstrap& bootstrap,
              const std::vector<std::int64_t>& layers) {
    Progress progress(arguments, bootstrap.rank == 0);
    const Budget whole_time(bootstrap, 0);
    RankBench bench(arguments, problem, bootstrap, layers, progress);
    Tuned tuned{.table = {}, .capabilities = bench.capabilities()};
    BenchResult result;
    Budget budget(bootstrap, arguments.budget_s - whole_time.spent());
    for (const std::int64_t tokens : problem.tokens) {
        if (!budget.allows(tokens)) {
            tuned.stopped_before = tokens;
            break;
        }
        budget.spend(tokens, [&] { bench.time(tokens, result); });
    }
    tuned.table.key =
        tune_key(problem.shape, problem.world, problem.options, tuned.capabilities.device, tuned.capabilities.links);
    tuned.table.origin = fmt::format("measured by tune on {}, {} layers", today(), layers.size());
    for (const BenchRow& row : result.rows) {
        const std::optional<Tail> tail = tail_from_name(row.tail);
        if (tail) tuned.table.points[static_cast<std::size_t>(*tail)].push_back({row.tokens, row.timing.median_us});
    }
    tuned.seconds = whole_time.spent();
    if (arguments.verify > 0) tuned.verified = verify(arguments.verify, problem, tuned, bench);
    return tuned;
}

std::ptrdiff_t count_good(const std::vector<Verified>& verified) {
    return std::count_if(verified.begin(), verified.end(), [](const Verified& each) { return each.good(); });
}

void report_verified(Output& output, const std::vector<Verified>& verified) {
    if (verified.empty()) {
        output.line("nothing to verify: no number of tokens lies between two that were measured");
        return;
    }
    Table rows({"tokens", "<chosen", "us", "<fastest", "us", "ratio"});
    for (const Verified& each : verified) {
        rows.row({fmt::format("{}", each.tokens), name(each.chosen), us_text(each.chosen_us), name(each.best),
                  us_text(each.best_us), fmt::format("{:.3f}{}", each.ratio(), each.good() ? "" : " !")});
    }
    const auto worst = std::max_element(verified.begin(), verified.end(),
                                        [](const Verified& a, const Verified& b) { return a.ratio() < b.ratio(); });
    output.line("at numbers of tokens that are not in the table:");
    output.table(rows);
    output.line("verified: {} of {} within {:.0f} % of the fastest; the worst is {:.3f} times it, at {} tokens",
                count_good(verified), verified.size(), 100 * (verified_ratio - 1), worst->ratio(), worst->tokens);
}

/// Where the plan of a context like the measured one changes.
struct Crossover {
    std::int64_t from = 0;
    Tail tail = Tail::replicated;
};

std::vector<Crossover> crossovers(const Problem& problem, const Tuned& tuned, std::int64_t most) {
    Capabilities capabilities = tuned.capabilities;
    const Planner planner(problem.shape, problem.world, problem.options, capabilities, {.table = tuned.table});
    std::vector<Crossover> found;
    for (std::int64_t tokens = 0; tokens <= most; ++tokens) {
        const std::optional<Tail> tail = planner.choose(tokens);
        if (tail && (found.empty() || found.back().tail != *tail)) found.push_back({tokens, *tail});
    }
    return found;
}

void report(Output& output, const Arguments& arguments, const Problem& problem, const Tuned& tuned,
            const std::vector<Crossover>& changes) {
    const TuneTable& table = tuned.table;
    output.line("{}; {} {}, {}, {}", shape_text(problem.shape), problem.world, arguments.processes ? "processes" : "threads",
                table.key.device, table.key.links);
    std::vector<std::string> headers{"tokens"};
    for (int index = 0; index < tail_count; ++index) {
        if (table.has(static_cast<Tail>(index))) headers.push_back(fmt::format("{} us", name(static_cast<Tail>(index))));
    }
    headers.emplace_back("<best");
    Table rows(headers);
    for (const std::int64_t tokens : table.tokens()) {
        std::vector<std::string> cells{fmt::format("{}", tokens)};
        const TunePoint* best = nullptr;
        const char* best_name = "";
        for (int index = 0; index < tail_count; ++index) {
            const std::vector<TunePoint>& points = table.points[static_cast<std::size_t>(index)];
            if (points.empty()) continue;
            const auto point =
                std::find_if(points.begin(), points.end(), [&](const TunePoint& each) { return each.tokens == tokens; });
            cells.push_back(point == points.end() ? "-" : us_text(point->us));
            if (point == points.end() || (best != nullptr && best->us <= point->us)) continue;
            best = &*point;
            best_name = name(static_cast<Tail>(index));
        }
        cells.emplace_back(best_name);
        rows.row(cells);
    }
    output.table(rows);
    for (const Crossover& change : changes) output.line("from {} tokens: {}", change.from, name(change.tail));
    if (tuned.stopped_before > 0) {
        output.line("not measured for want of time (--budget-s {:g}): {} tokens and what follows", arguments.budget_s,
                    tuned.stopped_before);
    }
    if (arguments.verify > 0) report_verified(output, tuned.verified);
    output.line("took {:.1f} s", tuned.seconds);
}

Json to_json(const Arguments& arguments, const Tuned& tuned, const std::vector<Crossover>& changes) {
    Json json = Json::parse(io::tune_text({tuned.table}));
    json["crossovers"] = Json::array();
    for (const Crossover& change : changes)
        json["crossovers"].push_back({{"from_tokens", change.from}, {"tail", name(change.tail)}});
    json["seconds"] = tuned.seconds;
    if (arguments.verify > 0) {
        json["verified"] = {
            {"allowed_ratio", verified_ratio}, {"within", count_good(tuned.verified)}, {"rows", Json::array()}};
        for (const Verified& each : tuned.verified) {
            json["verified"]["rows"].push_back({{"tokens", each.tokens},
                                                {"chosen", name(each.chosen)},
                                                {"chosen_us", each.chosen_us},
                                                {"best", name(each.best)},
                                                {"best_us", each.best_us},
                                                {"ratio", each.ratio()}});
        }
    }
    if (tuned.stopped_before > 0) json["stopped_before_tokens"] = tuned.stopped_before;
    return json;
}

int execute(const Arguments& given, Ranks& ranks) {
    if (std::isnan(given.budget_s)) {
        throw Error(StatusCode::invalid_argument, "--budget-s is nan, expected a number of seconds");
    }
    Arguments arguments = given;
    arguments.no_external = true;
    arguments.input_states = {InputState::raw};
    arguments.dependent_launch = {false};  // what a caller gets who takes no duties on
    arguments.tune_table = "none";
    Problem problem = make_problem(arguments, ranks, usual_tokens);
    std::sort(problem.tokens.begin(), problem.tokens.end());
    problem.tokens.erase(std::unique(problem.tokens.begin(), problem.tokens.end()), problem.tokens.end());
    require_run_memory(problem, false, 1);
    if (ranks.speaks() && arguments.out) {  // what cannot be read or written is said before minutes of measuring
        tables_in(*arguments.out);
        const io::OutputFile writable(*arguments.out);
    }
    const bool on_cpu = find_backend(problem.options.backend).name == "cpu";
    const std::vector<std::int64_t> layers =
        layers_that_fit(problem, arguments.layers.value_or(on_cpu ? layers_on_cpu : layers_on_gpu));
    Output output(arguments, ranks.speaks());

    Tuned tuned;
    ranks.run([&](const Bootstrap& bootstrap) {
        Tuned mine = measure(arguments, problem, bootstrap, layers);
        if (bootstrap.rank == 0) tuned = std::move(mine);
    });
    if (!ranks.speaks()) return done;
    if (tuned.table.tokens().empty()) throw_none_can_run(arguments.tail, nullptr);

    const std::vector<Crossover> changes = crossovers(problem, tuned, tuned.table.tokens().back());
    report(output, arguments, problem, tuned, changes);
    output.json(to_json(arguments, tuned, changes));
    if (!arguments.out) {
        output.line("not saved: --out names a file");
    } else if (save(*arguments.out, tuned.table, tuned.stopped_before > 0)) {
        output.line("saved in {}", *arguments.out);
    } else {
        output.line("not saved: {} holds a table of more numbers of tokens, and this one was stopped early", *arguments.out);
        return check_failed;
    }
    return count_good(tuned.verified) == std::ssize(tuned.verified) ? done : check_failed;
}

}  // namespace

Command tune_command() {
    return {.name = "tune",
            .summary = "Measures on this machine which tail is best for how many tokens, and saves it for plans to go by",
            .examples =
                "  latent-moe tune --model kimi-k3 --tp 2 --out table.json\n"
                "  latent-moe tune --backend cpu --model nemotron-3-super --tokens 1,16,256 --budget-s 60 --out table.json\n"
                "  latent-moe explain --model kimi-k3 --tp 2 --keep-whole-weights --table table.json\n"
                "  latent-moe tune --model kimi-k3 --tp 2 --verify 40 --out table.json",
            .add_options = &add_options,
            .execute = &execute};
}

}  // namespace latent_moe::cli

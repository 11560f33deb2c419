// `soak`: calls of every kind, at random, for as long as one likes; each result is checked against float64.
//
// Sets of contexts come and go. In a set, ranks make calls that were drawn from the seed: tokens, tail, layer, in place or
// not, rows with margins, eager and recorded, one rank late, suspended and resumed in between. After each call
//
//     every rank    its inputs and all margins are as they were; every replay gave the same bits
//     all ranks     hold the same bits
//     all ranks     in some sets: the context's own self-check agrees
//     rank 0        every row is right: float64 and the unfused chain beside it, which share no code with any tail
//
// What fails is told with the command that does it again.
#include <fmt/format.h>
#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "cli/command.h"
#include "cli/memory.h"
#include "cli/output.h"
#include "cli/padded_rows.h"
#include "cli/rank_work.h"
#include "cli/row_judge.h"
#include "cli/soak_plan.h"
#include "context/backends.h"
#include "context/context_access.h"
#include "core/digest.h"
#include "core/partition.h"
#include "core/planner.h"
#include "latent_moe/status.h"

namespace latent_moe::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t most_failures = 10;
constexpr std::int64_t most_calls = 1'000'000'000'000;

void add_options(CLI::App& app, Arguments& arguments) {
    app.add_option("--minutes", arguments.minutes, "stop after so long (1, or when --calls are made)")
        ->check(CLI::Range(0.0, 1e6))
        ->type_name("X");
    app.add_option("--calls", arguments.calls, "stop after so many calls")
        ->check(CLI::Range(std::int64_t{1}, most_calls))
        ->type_name("N");
    app.add_option("--from-call", arguments.from_call, "begin with this call of the seed's (0)")
        ->check(CLI::Range(std::int64_t{0}, most_calls))
        ->type_name("N");
    add_seed_option(app, arguments, "of everything that is drawn (1)");
    add_rank_options(app, arguments);
    add_output_options(app, arguments);
}

struct Failure {
    std::uint64_t call = 0;
    std::string what;
};

/// What the processes hold between two sets; the most of all ranks.
struct Holdings {
    std::size_t resident = 0;
    std::size_t device = 0;  ///< bytes of a GPU's memory
    std::size_t files = 0;
    std::size_t threads = 0;
};

struct Result {
    std::string backend;
    std::uint64_t calls = 0;
    std::uint64_t replays = 0;
    std::uint64_t in_halves = 0;
    std::uint64_t refused = 0;
    std::uint64_t suspended = 0;
    std::uint64_t contexts = 0;
    std::uint64_t aborted = 0;
    std::map<std::string, std::uint64_t> by_tail;
    std::map<int, std::uint64_t> sets_by_world;
    std::vector<Failure> failures;
    std::vector<Holdings> holdings;  ///< a set each
    double seconds = 0;
};

std::size_t entries_of(const char* folder) {
    std::size_t count = 0;
    std::error_code ignored;
    for (auto entry = std::filesystem::directory_iterator(folder, ignored); entry != std::filesystem::directory_iterator();
         entry.increment(ignored)) {
        ++count;
    }
    return count;
}

/// What was freed is not held, whichever thread's arena it lies in.
void return_freed_memory() {
#ifdef __GLIBC__
    // Where another allocator stands in for glibc's (a sanitizer's, a preloaded one), the first trim sets glibc's own up,
    // and two ranks' threads at once would read it half made.
    static std::mutex one_at_a_time;
    const std::lock_guard lock(one_at_a_time);
    malloc_trim(0);
#endif
}

Holdings holdings_of(const Bootstrap& bootstrap, Device& device) {
    return_freed_memory();
    const Holdings mine{resident_bytes(), device.used_bytes(), entries_of("/proc/self/fd"), entries_of("/proc/self/task")};
    Holdings most;
    for (const Holdings& each : gathered(bootstrap, mine)) {
        most.resident = std::max(most.resident, each.resident);
        most.device = std::max(most.device, each.device);
        most.files = std::max(most.files, each.files);
        most.threads = std::max(most.threads, each.threads);
    }
    return most;
}

/// What one rank saw of one call.
struct Seen {
    std::uint64_t digest = 0;
    bool repeated = true;
    bool margins = true;
    bool inputs = true;
};

/// One rank of one set.
class SoakRank {
public:
    SoakRank(const Arguments& arguments, const SoakSet& set, const Bootstrap& bootstrap, std::uint64_t first_layer,
             const Options& options, Device& device)
        : seed_(arguments.seed),
          set_(set),
          bootstrap_(bootstrap),
          weights_(set.shape, set.weight_dtype, arguments.seed),
          device_(&device) {
        for (int layer = 0; layer < set.layers; ++layer) layers_.push_back(static_cast<std::int64_t>(first_layer) + layer);
        for (int context = 0; context < set.contexts; ++context) {
            try {
                contexts_.push_back(Context::create(set.shape, bootstrap, options));
            } catch (const Error& error) {
                // A GPU that ranks share may have no room for another context beside theirs; all ranks are told so.
                if (error.code() != StatusCode::unavailable || contexts_.empty() ||
                    !ContextAccess::capabilities(contexts_.front()).shares_device) {
                    throw;
                }
                break;
            }
            const TokenRange rows =
                set.whole_views ? TokenRange{0, set.shape.hidden} : even_part(set.shape.hidden, set.world, bootstrap.rank);
            for (const std::int64_t layer : layers_) {
                const LayerWeights loaded = weights_.load(layer, rows);
                contexts_.back().add_layer(layer, loaded.view(), loaded.gamma_data());
            }
            contexts_.back().seal();
        }
        const Shape& shape = set.shape;
        routed_.emplace(*device_, options.max_tokens, shape.latent, shape.activations);
        for (std::optional<PaddedRows>* rows : {&shared_, &prefix_, &out_})
            rows->emplace(*device_, options.max_tokens, shape.hidden, shape.activations);
    }

    const std::string& backend() const { return contexts_.front().backend(); }
    std::size_t contexts() const noexcept { return contexts_.size(); }

    /// `result` is rank 0's to write.
    void make_call(std::uint64_t number, Result& result) {
        const SoakCall call = draw_call(seed_, number, set_);
        Context& context = contexts_[static_cast<std::size_t>(call.context) % contexts_.size()];
        const bool tells = bootstrap_.rank == 0;
        if (call.suspend_before) {
            context.suspend();
            context.resume();
            if (tells) ++result.suspended;
        }
        if (call.refused) {
            expect_refusal(context);
            if (tells) ++result.refused;
        }
        const Plan plan = context.plan(call.tokens);
        const Tail tail = tail_of(call, plan);

        std::vector<bool> needed(static_cast<std::size_t>(set_.world), tells);
        needed[static_cast<std::size_t>(bootstrap_.rank)] = true;
        const CallInputs inputs = draw_inputs({.shape = set_.shape,
                                               .world = set_.world,
                                               .tokens = call.tokens,
                                               .shared = set_.options.shared,
                                               .prefix = call.prefix,
                                               .seed = seed_,
                                               .instance = number},
                                              needed);
        const auto [seen, out] = run(context, call, tail, inputs);
        const std::vector<Seen> all = gathered(bootstrap_, seen);
        const Tensor whole =
            set_.options.sequence_parallel ? gather_own_rows(bootstrap_, context, out.view(), call.tokens) : Tensor();
        if (!tells) return;
        ++result.calls;
        result.replays += static_cast<std::uint64_t>(call.replays);
        ++result.by_tail[name(tail)];
        if (call.in_halves) ++result.in_halves;
        if (const std::optional<std::string> wrong =
                verdict(call, tail, inputs, all, whole.view().present() ? whole : out)) {
            result.failures.push_back({number, fmt::format("tail {}, {} ranks, {} tokens, {}: {}", name(tail), set_.world,
                                                           call.tokens, shape_text(set_.shape), *wrong)});
        }
    }

    /// The last thing that is done with a set: its ranks cannot meet again.
    void abort_all() {
        for (Context& context : contexts_) {
            context.abort("the soak ends this set with an abort");
            const Status status = context.layer(0).run({}, {});
            if (status.code() == StatusCode::aborted) continue;
            throw Error(StatusCode::internal,
                        fmt::format("a call after abort() ended in '{}', expected aborted", name(status.code())));
        }
    }

private:
    static Tail tail_of(const SoakCall& call, const Plan& plan) {
        if (call.planned_tail && !call.in_halves) return plan.tail;
        std::vector<Tail> tails;
        for (const Candidate& candidate : plan.candidates) {
            if (!call.in_halves || has_halves(candidate.tail)) tails.push_back(candidate.tail);
        }
        return tails[call.tail_draw % tails.size()];  // those with halves are always among a group's
    }

    void expect_refusal(const Context& context) const {
        const std::int64_t too_many = set_.options.max_tokens + 1;
        const Status status = context.layer(0).run({.tokens = too_many}, {}, device_->stream());
        if (status.code() == StatusCode::invalid_argument) return;
        throw Error(StatusCode::internal, fmt::format("a call of {} tokens ended in '{}: {}', expected it to be refused",
                                                      too_many, name(status.code()), status.message()));
    }

    std::pair<Seen, Tensor> run(const Context& context, const SoakCall& call, Tail tail, const CallInputs& inputs) {
        const auto rank = static_cast<std::size_t>(bootstrap_.rank);
        const TokenRange own =
            set_.options.sequence_parallel ? context.own_tokens(call.tokens, bootstrap_.rank) : TokenRange{0, call.tokens};
        const ConstMatrix routed = inputs.routed[rank].view();
        const ConstMatrix shared = inputs.shared.empty() ? ConstMatrix{} : inputs.shared[rank].view();
        const ConstMatrix prefix = call.prefix ? inputs.prefix.view().row_range(own.first, own.count) : ConstMatrix{};
        PaddedRows& out = call.placement == Placement::over_shared   ? *shared_
                          : call.placement == Placement::over_prefix ? *prefix_
                                                                     : *out_;
        const auto stage = [&](PaddedRows& rows, std::int64_t count, const ConstMatrix& content, int poison) {
            rows.shape(count, call.padding);
            rows.poison(poison);
            if (content.present()) rows.write(content);
            rows.upload();
        };

        TailInput input{.tokens = call.tokens, .consume_shared = call.consume_shared};
        Seen seen;
        Tensor first;
        const Layer layer = context.layer(static_cast<std::size_t>(call.layer));
        const auto enqueue = [&] {
            if (call.in_halves) {
                require(layer.begin(tail, input.shared, out.rows(), call.tokens, device_->stream()));
                require(layer.finish(input.routed, input.prefix, device_->stream()));
                return;
            }
            require(call.planned_tail ? layer.run(input, out.rows(), device_->stream())
                                      : layer.run(tail, input, out.rows(), device_->stream()));
        };
        std::unique_ptr<Recording> recording;
        for (int repeat = 0; repeat <= call.replays; ++repeat) {
            const int poison = repeat % 2 == 0 ? 0xFF : 0xFE;  // NaN, another each time: what stays unwritten shows
            stage(*routed_, call.tokens, routed, poison);
            stage(*shared_, call.tokens, shared, poison);
            stage(*prefix_, own.count, prefix, poison);
            stage(*out_, own.count, {}, poison);
            input.routed = {routed_->rows().data, routed_->rows().stride};
            if (shared.present()) input.shared = {shared_->rows().data, shared_->rows().stride};
            if (prefix.present()) input.prefix = {prefix_->rows().data, prefix_->rows().stride};
            if (call.late_rank == bootstrap_.rank) std::this_thread::sleep_for(std::chrono::microseconds(call.late_us));
            if (repeat == 0) {
                enqueue();
            } else {
                if (!recording) {
                    recording = device_->record(enqueue);
                    // Making a graph may wait for the device, which a peer that is ahead has waiting for this rank.
                    static_cast<void>(gathered(bootstrap_, char{}));
                }
                recording->replay();
            }
            device_->synchronize();
            for (std::optional<PaddedRows>* rows : {&routed_, &shared_, &prefix_, &out_}) {
                (*rows)->download();
                seen.margins = seen.margins && (*rows)->margins_intact();
            }
            seen.inputs = seen.inputs && routed_->same_as(routed);
            if (shared.present() && !call.consume_shared && &out != &*shared_)
                seen.inputs = seen.inputs && shared_->same_as(shared);
            if (prefix.present() && &out != &*prefix_) seen.inputs = seen.inputs && prefix_->same_as(prefix);
            const ConstMatrix written = out.host();
            if (repeat == 0) {
                first = contiguous(written);
                seen.digest = set_.options.sequence_parallel ? 0 : digest_of(std::as_const(first).view());
            } else {
                seen.repeated = seen.repeated && out.same_as(std::as_const(first).view());
            }
        }
        return {seen, std::move(first)};
    }

    static Tensor contiguous(const ConstMatrix& rows) {
        Tensor copy(rows.rows, rows.columns, rows.dtype);
        for (std::int64_t row = 0; row < rows.rows; ++row)
            std::copy_n(rows.row(row), rows.row_bytes(), copy.view().row(row));
        return copy;
    }

    std::optional<std::string> verdict(const SoakCall& call, Tail tail, const CallInputs& inputs,
                                       const std::vector<Seen>& all, const Tensor& out) {
        for (std::size_t rank = 0; rank < all.size(); ++rank) {
            if (!all[rank].repeated) return fmt::format("a replay on rank {} gave other bits", rank);
            if (!all[rank].margins) return fmt::format("rank {} wrote beside its rows", rank);
            if (!all[rank].inputs) return fmt::format("rank {} wrote to an input", rank);
            if (all[rank].digest != all[0].digest) return fmt::format("rank {} holds other bits than rank 0", rank);
        }
        const LayerWeights layer = weights_.load_whole(layers_[static_cast<std::size_t>(call.layer)]);
        return find_wrong_row(out.view(), reference_input(set_.shape, inputs, set_.options.shared, layer), tail);
    }

    const std::uint64_t seed_;
    const SoakSet& set_;
    const Bootstrap& bootstrap_;
    WeightSource weights_;
    std::vector<std::int64_t> layers_;
    Device* const device_;
    std::vector<Context> contexts_;
    std::optional<PaddedRows> routed_;
    std::optional<PaddedRows> shared_;
    std::optional<PaddedRows> prefix_;
    std::optional<PaddedRows> out_;
};

/// What grew from the second quarter of the sets to the last, if anything did; sets differ in size, so medians count.
std::optional<std::string> growth(const std::vector<Holdings>& holdings) {
    constexpr std::size_t enough = 40;
    if (holdings.size() < enough) return std::nullopt;
    const auto median = [&](std::size_t quarter, auto field) {
        std::vector<std::size_t> values;
        for (std::size_t i = quarter * holdings.size() / 4; i < (quarter + 1) * holdings.size() / 4; ++i)
            values.push_back(holdings[i].*field);
        std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
        return values[values.size() / 2];
    };
    const std::size_t resident_before = median(1, &Holdings::resident);
    const std::size_t resident_after = median(3, &Holdings::resident);
    constexpr std::size_t let_pass = 32U << 20U;  // of an allocator that settles
    if (resident_after > resident_before + resident_before / 10 + let_pass) {
        return fmt::format("memory grew from {} to {}", bytes_text(static_cast<double>(resident_before)),
                           bytes_text(static_cast<double>(resident_after)));
    }
    const std::size_t device_before = median(1, &Holdings::device);
    const std::size_t device_after = median(3, &Holdings::device);
    if (device_after > device_before + let_pass) {
        return fmt::format("memory of the GPU grew from {} to {}", bytes_text(static_cast<double>(device_before)),
                           bytes_text(static_cast<double>(device_after)));
    }
    const std::size_t files_before = median(1, &Holdings::files);
    const std::size_t files_after = median(3, &Holdings::files);
    if (files_after > files_before) return fmt::format("open files grew from {} to {}", files_before, files_after);
    return std::nullopt;
}

std::string replay_command(const Arguments& arguments, const Failure& failure) {
    std::string command = fmt::format("latent-moe soak --seed {} --from-call {} --calls 1 --backend {}", arguments.seed,
                                      failure.call, arguments.backend);
    if (arguments.processes) command += " --ranks processes";
    if (arguments.tp) command += fmt::format(" --tp {}", *arguments.tp);
    if (arguments.threads != 0) command += fmt::format(" --threads {}", arguments.threads);
    if (arguments.timeout_ms != Arguments{}.timeout_ms) command += fmt::format(" --timeout-ms {}", arguments.timeout_ms);
    return command;
}

Json to_json(const Arguments& arguments, const Result& result, const std::optional<std::string>& grown) {
    Json json = {{"schema", "latent-moe/soak/1"},    {"seed", arguments.seed},
                 {"backend", result.backend},        {"ranks", arguments.processes ? "processes" : "threads"},
                 {"from_call", arguments.from_call}, {"calls", result.calls},
                 {"replays", result.replays},        {"in_halves", result.in_halves},
                 {"refused", result.refused},        {"contexts", result.contexts},
                 {"suspended", result.suspended},    {"aborted", result.aborted},
                 {"seconds", result.seconds},        {"by_tail", result.by_tail},
                 {"failures", Json::array()}};
    for (const auto& [world, sets] : result.sets_by_world) json["sets_by_world"][fmt::format("{}", world)] = sets;
    for (const Failure& failure : result.failures) {
        json["failures"].push_back(
            {{"call", failure.call}, {"what", failure.what}, {"replay", replay_command(arguments, failure)}});
    }
    if (!result.holdings.empty()) {
        const auto describe = [](const Holdings& each) {
            return Json{{"resident_bytes", each.resident},
                        {"device_bytes", each.device},
                        {"files", each.files},
                        {"threads", each.threads}};
        };
        json["holdings"] = {{"first_set", describe(result.holdings.front())},
                            {"middle_set", describe(result.holdings[result.holdings.size() / 2])},
                            {"last_set", describe(result.holdings.back())},
                            {"peak_resident_bytes", peak_resident_bytes()}};
    }
    json["grown"] = grown ? Json(*grown) : Json(nullptr);
    json["passed"] = result.failures.empty() && !grown;
    return json;
}

void report(Output& output, const Arguments& arguments, const Result& result, const std::optional<std::string>& grown) {
    std::vector<std::string> tails;
    for (const auto& [tail, calls] : result.by_tail) tails.push_back(fmt::format("{} {}", tail, calls));
    output.line(
        "seed {}, backend {}, {}: {} calls ({}; {} in halves) and {} replays, {} contexts, {} suspended, {} refused, {} "
        "aborted; "
        "{:.0f} s",
        arguments.seed, result.backend, arguments.processes ? "processes" : "threads", result.calls, fmt::join(tails, ", "),
        result.in_halves, result.replays, result.contexts, result.suspended, result.refused, result.aborted, result.seconds);
    if (!result.holdings.empty()) {
        const auto first_to_last = [&](auto field) {
            const auto text = [&](const Holdings& holdings) { return bytes_text(static_cast<double>(holdings.*field)); };
            return fmt::format("{} after the first set, {} after half of them, {} before the last",
                               text(result.holdings.front()), text(result.holdings[result.holdings.size() / 2]),
                               text(result.holdings.back()));
        };
        output.line("resident: {}, {} at most", first_to_last(&Holdings::resident),
                    bytes_text(static_cast<double>(peak_resident_bytes())));
        if (result.holdings.front().device != 0) output.line("on the GPU: {}", first_to_last(&Holdings::device));
    }
    for (const Failure& failure : result.failures) {
        output.line("FAIL: call {}: {}", failure.call, failure.what);
        output.line("      again: {}", replay_command(arguments, failure));
    }
    if (grown) output.line("FAIL: {}", *grown);
    output.line("{} wrong", result.failures.size());
}

int execute(const Arguments& arguments, Ranks& ranks) {
    Output output(arguments, ranks.speaks());
    Progress progress(arguments, ranks.speaks());
    const auto begin = Clock::now();
    const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
    const std::uint64_t end =
        arguments.calls ? arguments.from_call + static_cast<std::uint64_t>(*arguments.calls) : UINT64_MAX;
    if (arguments.minutes && std::isnan(*arguments.minutes)) {
        throw Error(StatusCode::invalid_argument, "--minutes is nan, expected a number of minutes");
    }
    const double most_seconds = arguments.minutes ? *arguments.minutes * 60 : arguments.calls ? INFINITY : 60;

    // oneDNN keeps the kernels of the last thousand shapes. A soak sees more than that, and what it holds is not to grow.
    ::setenv("DNNL_PRIMITIVE_CACHE_CAPACITY", "16", 0);
    ranks.set_world(arguments.tp, 2);
    const std::optional<int> world = arguments.processes || arguments.tp ? std::optional(ranks.world()) : std::nullopt;
    Result result;
    const std::uint64_t first_set = arguments.from_call / calls_per_set;
    bool more = true;  // the same in all processes: rank 0's clock
    for (std::uint64_t call = arguments.from_call; more && call < end;) {
        const std::uint64_t number = call / calls_per_set;
        const std::uint64_t last = std::min(end, (number + 1) * calls_per_set);
        const SoakSet set = draw_set(arguments.seed, number, world);
        if (!world) ranks.set_world(set.world, set.world);
        std::uint64_t current = call;  // rank 0's
        try {
            ranks.run([&](const Bootstrap& bootstrap) {
                Options options = set.options;
                options.backend = arguments.backend;
                options.timeout_ms = arguments.timeout_ms;
                options.cpu_threads = arguments.threads;
                const std::unique_ptr<Device> device = make_device(options, bootstrap);
                const Holdings holdings = holdings_of(bootstrap, *device);  // the set before is gone
                SoakRank rank(arguments, set, bootstrap, number * 8, options, *device);
                // Allocating may wait for a device that ranks share, and so for a peer that is ahead and waits for this one.
                static_cast<void>(gathered(bootstrap, char{}));
                if (bootstrap.rank == 0) result.contexts += rank.contexts();
                for (std::uint64_t each = call; each < last; ++each) {
                    if (bootstrap.rank == 0) current = each;
                    rank.make_call(each, result);
                }
                const bool would =
                    bootstrap.rank != 0 || (seconds() < most_seconds && result.failures.size() < most_failures);
                const bool goes_on = gathered(bootstrap, static_cast<char>(would)).front() != 0;
                if (bootstrap.rank == 0) {
                    result.backend = rank.backend();
                    if (number != first_set) result.holdings.push_back(holdings);
                }
                if (arguments.processes || bootstrap.rank == 0) more = goes_on;  // one writer a process
                if (set.ends_in_abort && !arguments.processes) rank.abort_all();
            });
        } catch (const Error& error) {
            if (arguments.processes)
                throw Error(error.code(), fmt::format("{} ({})", error.what(), replay_command(arguments, {current, {}})));
            if (error.code() == StatusCode::unavailable) throw;  // no check has failed: the machine cannot do it
            result.failures.push_back({current, error.what()});
            more = false;
        }
        if (set.ends_in_abort && !arguments.processes) ++result.aborted;
        ++result.sets_by_world[set.world];
        progress.say("{} calls, {} contexts, {} wrong", result.calls, result.contexts, result.failures.size());
        call = last;
    }
    if (!ranks.speaks()) return done;
    result.seconds = seconds();
    const std::optional<std::string> grown = growth(result.holdings);
    report(output, arguments, result, grown);
    output.json(to_json(arguments, result, grown));
    return result.failures.empty() && !grown ? done : check_failed;
}

}  // namespace

Command soak_command() {
    return {
        .name = "soak",
        .summary = "Random calls of every kind, each checked against float64; what fails can be done again from its seed",
        .examples =
            "  latent-moe soak --minutes 30\n"
            "  latent-moe soak --calls 500 --seed 7 --json -\n"
            "  latent-moe soak --seed 7 --from-call 311 --calls 1\n"
            "  mpirun -n 4 latent-moe soak --ranks processes --minutes 10",
        .add_options = &add_options,
        .execute = &execute};
}

}  // namespace latent_moe::cli

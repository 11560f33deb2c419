// What happens to the others when one rank goes wrong: one of three on CPUs, one of two on GPUs, a GPU each. Each fault is a
// scene: every rank's part in it, and what each rank must have seen in the end.
//
//     fault_check [--backend NAME] [--case NAME]… [--repeat N] [--reuse] [--markdown]
//
// All scenes once by default; exit status 1 if any went wrong. `--reuse`: ranks that live through a round play the next one
// too, with a new context; always so on GPUs.
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <regex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "context/backends.h"
#include "faults/failing_allocation.h"
#include "faults/launcher.h"
#include "support/device_rows.h"
#include "support/problem.h"

namespace latent_moe::faults {
namespace {

using test::Problem;
using test::Tensor;

constexpr int culprit = 1;
constexpr int calls_before = 5;  // that all ranks make before the fault

/// What all scenes run on.
struct Setting {
    std::string backend;
    int world;
    int deadline_ms;          ///< of a wait in a call
    int meeting_ms;           ///< deadline of the bootstrap: on a GPU creation takes longer, and not the same on all ranks
    bool reuses;              ///< ranks that live through a round play the next: they take seconds to begin on a GPU
    std::vector<Tail> tails;  ///< by turns; faults meet the first
    std::vector<Tail> exchanges;  ///< tails whose calls are compared in exchanges of different kinds
    Problem problem;

    bool on_gpus() const { return backend != "cpu"; }
};

Setting make_setting(const std::string& backend, bool reuses) {
    const bool cpu = backend == "cpu";
    const int world = cpu ? 3 : 2;
    using enum Tail;
    return {.backend = backend,
            .world = world,
            .deadline_ms = cpu ? 700 : 200,
            .meeting_ms = cpu ? 700 : 1000,
            .reuses = reuses || !cpu,
            .tails = cpu ? std::vector{replicated, column_parallel} : std::vector{replicated, fused, column_parallel, fused},
            .exchanges = cpu ? std::vector{replicated} : std::vector{replicated, fused},
            .problem = {world, 5, {.hidden = 96, .latent = 64}}};
}

/// What one rank must report.
struct Expected {
    enum Ending { error, fine, error_or_fine, no_report, error_or_no_report } ending = error;
    std::vector<StatusCode> codes = {};   ///< any of them; empty: any error
    std::vector<std::string> words = {};  ///< regular expressions: all of them in the message
};

struct Scene {
    std::string name;
    std::string what;
    std::function<void(Rank&, const Setting&, std::mt19937_64&)> part;
    Expected others;
    Expected of_culprit;
    int groups = 1;
};

Options options_of(const Setting& setting) {
    Options options = setting.problem.context_options();
    options.backend = setting.backend;
    options.timeout_ms = setting.deadline_ms;
    options.cpu_threads = 1;
    return options;
}

std::unique_ptr<Device> make_device(const Setting& setting, const Bootstrap& bootstrap) {
    return find_backend(setting.backend).make_device(bootstrap, options_of(setting));
}

void require(const Status& status) {
    if (!status.ok()) throw Error(status.code(), status.message());
}

/// Marks the moment of an error before anything is taken down.
template <typename Body>
void noting(Rank& rank, Body body) {
    try {
        body();
    } catch (...) {
        rank.error_now();
        throw;
    }
}

/// A rank's context, and its rows where the backend wants them.
class Seat {
public:
    Seat(Rank& rank, const Setting& setting, std::size_t group = 0)
        : rank_(rank), problem_(setting.problem), tails_(setting.tails), deadline_ms_(setting.deadline_ms) {
        noting(rank, [&] {
            const auto own = static_cast<std::size_t>(rank.rank);
            device_ = make_device(setting, rank.groups[group]);
            for (const Tensor& tensor : {problem_.routed[own], problem_.shared[own], problem_.prefix, problem_.output()})
                rows_.push_back(std::make_unique<test::DeviceRows>(*device_, tensor));
            context_ = Context::create(problem_.shape, rank.groups[group], options_of(setting));
            context_->add_layer(7, problem_.weight_view(), problem_.gamma_data());
            context_->add_layer(8, problem_.weight_view(), problem_.gamma_data());
            context_->seal();
        });
    }

    /// One call of layer 7; throws what went wrong, a wrong result too.
    void call(Tail tail, std::int64_t tokens, std::size_t layer = 0) {
        noting(rank_, [&] {
            const auto enqueue = [&] {
                require(context_->layer(layer).run(tail, input(tokens), {rows_[3]->data()}, device_->stream()));
            };
            poison();
            enqueue();
            finish(enqueue, tokens);
        });
    }
    void call() { call(tails_.front(), problem_.tokens); }
    void calls(int count) {
        for (int each = 0; each < count; ++each)
            call(tails_[static_cast<std::size_t>(each) % tails_.size()], problem_.tokens);
    }
    [[noreturn]] void call_forever() {
        for (;;) calls(4);
    }
    /// A call that is recorded and replayed.
    void replay() {
        noting(rank_, [&] {
            const auto enqueue = [&] {
                require(
                    context_->layer(0).run(tails_.back(), input(problem_.tokens), {rows_[3]->data()}, device_->stream()));
            };
            poison();
            device_->record(enqueue)->replay();
            finish(enqueue, problem_.tokens);
        });
    }

    const Context& context() const { return *context_; }
    Device& device() { return *device_; }
    /// Makes no call for longer than the others wait.
    void stay_away() const { std::this_thread::sleep_for(std::chrono::milliseconds(3 * deadline_ms_)); }
    void destroy_context() { context_.reset(); }
    /// Throws if that takes longer than a wait in a call may.
    void destroy_context_in_time() {
        const std::int64_t begin = now_ns();
        destroy_context();
        const std::int64_t ms = (now_ns() - begin) / 1'000'000;
        if (ms > deadline_ms_ + 1000)
            throw std::runtime_error(
                fmt::format("the context's destructor took {} ms, expected at most {} and a second", ms, deadline_ms_));
    }

private:
    TailInput input(std::int64_t tokens) const {
        return {.routed = {rows_[0]->data()}, .shared = {rows_[1]->data()}, .prefix = {rows_[2]->data()}, .tokens = tokens};
    }
    void poison() {
        Tensor out = problem_.output();
        out.poison();
        device_->upload(rows_[3]->data(), out.data(), out.content().size());
    }
    /// On a GPU a call has only been enqueued; the fault that it found is said by the next.
    template <typename Enqueue>
    void finish(Enqueue enqueue, std::int64_t tokens) {
        device_->synchronize();
        if (context_->poll_fault()) {
            enqueue();
            throw std::runtime_error("a call returned no error though there is a fault");
        }
        const std::vector<std::byte>& out = rows_[3]->download();
        if (tokens != problem_.tokens) return;
        const ConstMatrix rows{out.data(), tokens, problem_.shape.hidden, problem_.shape.hidden, problem_.shape.activations};
        const double error = relative_l2(rows, problem_.reference());
        if (!(error <= 2 * problem_.chain_error()))
            throw std::runtime_error(fmt::format("an output is wrong: relative error {:.2e}", error));
    }

    Rank& rank_;
    const Problem& problem_;
    const std::vector<Tail>& tails_;
    const int deadline_ms_;
    std::unique_ptr<Device> device_;
    std::vector<std::unique_ptr<test::DeviceRows>> rows_;  // routed, shared, prefix, out
    std::optional<Context> context_;
};

/// The culprit gets a signal at a moment of chance, all others go on calling.
auto signalled(int signal) {
    return [signal](Rank& rank, const Setting& setting, std::mt19937_64& random) {
        Seat seat(rank, setting);
        seat.calls(calls_before);
        if (rank.rank == culprit) {
            const auto delay = std::chrono::microseconds(random() % 5000);
            std::thread([&rank, signal, delay] {
                std::this_thread::sleep_for(delay);
                rank.fault_now();
                ::kill(::getpid(), signal);
            }).detach();
        }
        seat.call_forever();
    };
}

/// The culprit does `other` where the others make a call.
template <typename Other>
auto instead_of_a_call(Other other, std::optional<Tail> tail = std::nullopt) {
    return [other, tail](Rank& rank, const Setting& setting, std::mt19937_64&) {
        Seat seat(rank, setting);
        seat.calls(calls_before);
        if (rank.rank == culprit) {
            rank.fault_now();
            other(seat);
        } else {
            if (tail) seat.call(*tail, setting.problem.tokens);
            seat.call_forever();
        }
    };
}

/// The culprit gets a signal, all others find it stopped or dead when they destroy contexts that have no fault.
auto signalled_before_destruction(int signal) {
    return [signal](Rank& rank, const Setting& setting, std::mt19937_64&) {
        Seat seat(rank, setting);
        seat.calls(calls_before);
        if (rank.rank == culprit) {
            rank.fault_now();
            ::kill(::getpid(), signal);
        }
        while (rank.shared.fault_ns == 0) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        if (seat.context().poll_fault()) throw std::runtime_error("there is a fault before anything has gone wrong");
        seat.destroy_context_in_time();
    };
}

/// While it lives, less than a megabyte of the device's memory is anybody's.
class FullMemory {
public:
    explicit FullMemory(Device& device) : device_(device) {
        for (std::size_t bytes = std::size_t{64} << 30; bytes >= std::size_t{1} << 20;) {
            try {
                pieces_.push_back(device.allocate(bytes));
            } catch (const Error&) {
                bytes /= 2;
            }
        }
    }
    ~FullMemory() {
        for (void* const piece : pieces_) device_.release(piece);
    }
    FullMemory(const FullMemory&) = delete;
    FullMemory& operator=(const FullMemory&) = delete;

private:
    Device& device_;
    std::vector<void*> pieces_;
};

std::vector<Scene> make_scenes(const Setting& stage) {
    using enum StatusCode;
    const Expected silent{
        Expected::error,
        {timeout, aborted},
        {fmt::format("ranks? (0, )?1(, 2)? did not answer within {} ms|rank 1 did not arrive within {} ms|rank 1 aborted",
                     stage.meeting_ms, stage.deadline_ms)}};
    const Expected gone{Expected::error, {aborted}, {"rank 1 is gone"}};
    const Expected no_report{Expected::no_report};
    const Expected fine{Expected::fine};
    // On a GPU nobody holds a connection during calls: a dead rank is a silent one.
    const Expected dead = stage.on_gpus() ? silent : gone;
    std::vector<Scene> scenes;
    scenes.push_back({"killed", "SIGKILL at a moment of chance", signalled(SIGKILL), dead, no_report});
    scenes.push_back({"terminated", "SIGTERM at a moment of chance", signalled(SIGTERM), dead, no_report});
    scenes.push_back({"stopped", "SIGSTOP at a moment of chance", signalled(SIGSTOP), silent, no_report});
    scenes.push_back({"stopped_before_destruction", "SIGSTOP after its last call; the others destroy their contexts",
                      signalled_before_destruction(SIGSTOP), fine, no_report});
    scenes.push_back({"killed_before_destruction", "SIGKILL after its last call; the others destroy their contexts",
                      signalled_before_destruction(SIGKILL), fine, no_report});
    scenes.push_back({"slow", "late in each of 6 calls, but within the deadline",
                      [](Rank& rank, const Setting& setting, std::mt19937_64& random) {
                          Seat seat(rank, setting);
                          for (int each = 0; each < 6; ++each) {
                              if (rank.rank == culprit)
                                  std::this_thread::sleep_for(std::chrono::milliseconds(
                                      random() % (static_cast<unsigned>(setting.deadline_ms) / 4)));
                              seat.call();
                          }
                      },
                      fine, fine});
    scenes.push_back({"too_slow", "later than the deadline", instead_of_a_call([](Seat& seat) {
                          seat.stay_away();
                          seat.call();
                      }),
                      silent, Expected{}});
    scenes.push_back({"never_calls", "returns to its caller, who makes no call",
                      instead_of_a_call([](Seat& seat) { seat.stay_away(); }), silent, fine});
    scenes.push_back({"aborts",
                      "Context::abort()",
                      instead_of_a_call([](Seat& seat) {
                          const_cast<Context&>(seat.context()).abort("the engine of this rank gives up");
                          seat.call();
                      }),
                      silent,
                      {Expected::error, {aborted}, {"the engine of this rank gives up"}}});
    for (const Tail tail : stage.exchanges) {
        const std::int64_t tokens = stage.problem.tokens;
        const std::string suffix = tail == stage.exchanges.front() ? "" : fmt::format("_than_{}", name(tail));
        // The fused tail has mailboxes of its own: whoever is in it and whoever is not only miss each other.
        const auto out_of_step = [&](int rank, const char* what) {
            const std::string other = fmt::format("rank {}", rank);
            if (!stage.on_gpus()) return Expected{Expected::error, {mismatch}, {"rank 0", "rank 1", "make different calls"}};
            // What a kernel has found is said by every call that comes later, as `aborted` with the cause.
            if (tail == Tail::fused && std::string_view(what) == "the tail")
                return Expected{Expected::error, {aborted}, {other}};
            return Expected{Expected::error, {aborted}, {other, fmt::format("differ in {}", what)}};
        };
        scenes.push_back({"other_tokens" + suffix, "a call with 4 tokens where the others have 5",
                          instead_of_a_call([tail](Seat& seat) { seat.call(tail, 4); }, tail), out_of_step(1, "tokens"),
                          out_of_step(0, "tokens")});
        scenes.push_back({"other_tail" + suffix, "a call through another tail",
                          instead_of_a_call([tokens](Seat& seat) { seat.call(Tail::token_parallel, tokens); }, tail),
                          out_of_step(1, "the tail"), out_of_step(0, "the tail")});
        scenes.push_back({"other_layer" + suffix, "a call of another layer",
                          instead_of_a_call([tail, tokens](Seat& seat) { seat.call(tail, tokens, 1); }, tail),
                          out_of_step(1, "the layer"), out_of_step(0, "the layer")});
    }
    const Expected other_shape{Expected::error, {mismatch}, {"ranks differ in hidden", "rank 0 has 96", "rank 1 has 192"}};
    scenes.push_back({"other_shape", "creation with another shape",
                      [](Rank& rank, const Setting& setting, std::mt19937_64&) {
                          if (rank.rank == culprit) rank.fault_now();
                          Shape shape = setting.problem.shape;
                          if (rank.rank == culprit) shape.hidden = 192;
                          Context::create(shape, rank.groups[0], options_of(setting));
                      },
                      other_shape, other_shape});
    const Expected other_order{Expected::error, {mismatch}, {"seal: ranks differ in id of layer 0", "rank 1 has 8"}};
    scenes.push_back({"other_layer_order", "layers added in another order",
                      [](Rank& rank, const Setting& setting, std::mt19937_64&) {
                          const Problem& problem = setting.problem;
                          Context context = Context::create(problem.shape, rank.groups[0], options_of(setting));
                          if (rank.rank == culprit) rank.fault_now();
                          for (const std::int64_t layer : {0, 1})
                              context.add_layer(rank.rank == culprit ? 8 - layer : 7 + layer, problem.weight_view(),
                                                problem.gamma_data());
                          noting(rank, [&] { context.seal(); });
                      },
                      other_order, other_order});
    scenes.push_back({"bad_creation",
                      "creation refuses its options on one rank",
                      [](Rank& rank, const Setting& setting, std::mt19937_64&) {
                          Options options = options_of(setting);
                          if (rank.rank == culprit) {
                              rank.fault_now();
                              options.max_tokens = -3;
                          }
                          Context::create(setting.problem.shape, rank.groups[0], options);
                      },
                      {Expected::error, {aborted}, {"failed on rank 1", "max_tokens is -3"}},
                      {Expected::error, {invalid_argument}, {"max_tokens is -3"}}});
    scenes.push_back({"dies_in_creation", "SIGKILL between creation and seal",
                      [](Rank& rank, const Setting& setting, std::mt19937_64&) {
                          Context context = Context::create(setting.problem.shape, rank.groups[0], options_of(setting));
                          context.add_layer(7, setting.problem.weight_view(), setting.problem.gamma_data());
                          if (rank.rank == culprit) {
                              rank.fault_now();
                              ::kill(::getpid(), SIGKILL);
                          }
                          noting(rank, [&] { context.seal(); });
                      },
                      gone, no_report});
    scenes.push_back({"throws_in_creation",
                      "an exception of its caller between creation and seal",
                      [](Rank& rank, const Setting& setting, std::mt19937_64&) {
                          const Problem& problem = setting.problem;
                          Context context = Context::create(problem.shape, rank.groups[0], options_of(setting));
                          noting(rank, [&] {
                              if (rank.rank == culprit) {
                                  rank.fault_now();
                                  context.add_layer(7, {}, problem.gamma_data());
                              }
                              context.add_layer(7, problem.weight_view(), problem.gamma_data());
                              context.seal();
                          });
                      },
                      silent,
                      {Expected::error, {invalid_argument}, {"layer 7: W_up is null"}}});
    scenes.push_back({"out_of_memory",
                      "an allocation of chance fails during creation, packing or seal",
                      [](Rank& rank, const Setting& setting, std::mt19937_64& random) {
                          if (rank.rank == culprit) {
                              rank.fault_now();
                              fail_allocation(1 + static_cast<std::int64_t>(random() % 250));
                          }
                          const Seat seat(rank, setting);
                          if (rank.rank == culprit && !stop_failing())
                              throw Error(out_of_memory, "rank 1: the allocation that was to fail never came");
                          throw Error(out_of_memory, "rank 1: a context survived its failed allocation");
                      },
                      {Expected::error, {aborted, timeout, out_of_memory, unavailable}, {"rank 1"}},
                      {stage.on_gpus() ? Expected::error_or_no_report : Expected::error}});
    scenes.push_back({"destroyed_on_one_rank", "its context is destroyed", instead_of_a_call([](Seat& seat) {
                          seat.destroy_context();
                          seat.stay_away();
                      }),
                      silent, fine});
    scenes.push_back({"destroyed_beside_another", "a context is made, used and destroyed several times while another runs",
                      [](Rank& rank, const Setting& setting, std::mt19937_64&) {
                          std::exception_ptr failure;
                          std::thread beside([&] {
                              try {
                                  for (int each = 0; each < (setting.on_gpus() ? 2 : 10); ++each)
                                      Seat(rank, setting, 1).calls(4);
                              } catch (...) {
                                  failure = std::current_exception();
                              }
                          });
                          try {
                              Seat seat(rank, setting);
                              seat.calls(setting.on_gpus() ? 3000 : 100);
                          } catch (...) {
                              beside.join();
                              throw;
                          }
                          beside.join();
                          if (failure) std::rethrow_exception(failure);
                      },
                      fine, fine, 2});
    if (!stage.on_gpus()) return scenes;
    scenes.push_back({"full_gpu_at_creation",
                      "its GPU's memory is full when it creates",
                      [](Rank& rank, const Setting& setting, std::mt19937_64&) {
                          const std::unique_ptr<Device> device = make_device(setting, rank.groups[0]);
                          std::optional<FullMemory> full;
                          if (rank.rank == culprit) {
                              full.emplace(*device);
                              rank.fault_now();
                          }
                          const Seat seat(rank, setting);
                      },
                      {Expected::error, {}, {"rank 1"}},
                      Expected{}});
    scenes.push_back({"full_gpu_at_capture",
                      "its GPU's memory is full when it captures a call",
                      [](Rank& rank, const Setting& setting, std::mt19937_64&) {
                          Seat seat(rank, setting);
                          seat.calls(calls_before);
                          std::optional<FullMemory> full;
                          if (rank.rank == culprit) {
                              full.emplace(seat.device());
                              rank.fault_now();
                          }
                          seat.replay();
                      },
                      {Expected::error_or_fine, silent.codes, silent.words},
                      {Expected::error_or_fine, {out_of_memory}, {}}});
    return scenes;
}

/// What is wrong with a report; empty if it is as expected.
std::string fault_of(const Setting& setting, const Expected& expected, const std::optional<Report>& report) {
    using enum Expected::Ending;
    if (!report) {
        const bool may = expected.ending == no_report || expected.ending == error_or_no_report;
        return may ? "" : "it ended without a word";
    }
    if (expected.ending == no_report) return fmt::format("it lives: {}", report->message);
    if (!setting.on_gpus()) {  // what a driver opens lasts as long as the process
        if (report->files_left > 0) return fmt::format("{} files are left open", report->files_left);
        if (report->threads_left > 0 && expected.ending == fine)
            return fmt::format("{} threads are left", report->threads_left);
    }
    const bool good = report->code == StatusCode::ok;
    if (expected.ending == fine)
        return good ? "" : fmt::format("'{}: {}', expected no error", name(report->code), report->message);
    if (good) return expected.ending == error_or_fine ? "" : "no error";
    const bool right_code = expected.codes.empty() ||
                            std::find(expected.codes.begin(), expected.codes.end(), report->code) != expected.codes.end();
    if (!right_code) return fmt::format("the code is {}: {}", name(report->code), report->message);
    for (const std::string& word : expected.words) {
        if (!std::regex_search(report->message, std::regex(word)))
            return fmt::format("'{}' lacks '{}'", report->message, word);
    }
    return "";
}

/// One line of the table.
struct Row {
    int ran = 0;
    int wrong = 0;
    double worst_seconds = 0;
    double worst_seconds_to_end = 0;
    std::map<std::string, int> said;  // by ranks that are not the culprit
};

/// A scene and the seed of what is drawn in it: what ranks play in a round.
struct Show {
    const Scene* scene;
    std::uint64_t seed;
};

bool somebody_dies(const Scene& scene) {
    return scene.of_culprit.ending == Expected::no_report;
}

/// The shows of each launch. Where ranks are used again, all shows that nobody dies in are one's, and of the others so many
/// as processes that begin together find memory.
std::vector<std::vector<Show>> launches_of(const Setting& setting, const std::vector<Scene>& scenes, int repeat) {
    constexpr std::size_t most_deaths = 5;
    std::vector<std::vector<Show>> launches;
    std::vector<Show> living;
    for (const Scene& scene : scenes) {
        for (int each = 1; each <= repeat; ++each) {
            const Show show{&scene, static_cast<std::uint64_t>(each)};
            if (setting.reuses && !somebody_dies(scene)) {
                living.push_back(show);
            } else if (setting.reuses && !launches.empty() && launches.back().size() < most_deaths) {
                launches.back().push_back(show);
            } else {
                launches.push_back({show});
            }
        }
    }
    if (!living.empty()) launches.push_back(living);
    return launches;
}

std::unique_ptr<RankProcesses> start(const Setting& setting, const std::vector<Show>& shows) {
    const auto show_of = [shows](int round) { return shows[static_cast<std::size_t>(round)]; };
    Launch launch{.world = setting.world,
                  .rounds = static_cast<int>(shows.size()),
                  .timeout_ms = setting.meeting_ms,
                  .body = [&setting, show_of](Rank& rank) {
                      const Show show = show_of(rank.round);
                      std::mt19937_64 random(show.seed);
                      show.scene->part(rank, setting, random);
                  }};
    for (const Show& show : shows) launch.groups = std::max(launch.groups, show.scene->groups);
    if (setting.reuses) {
        launch.mortal = culprit;
        launch.dies = [show_of](int round) { return somebody_dies(*show_of(round).scene); };
    }
    if (setting.on_gpus()) {
        launch.patience_ms = 10'000;
        launch.prepare = [&setting](int rank) {  // all that is loaded with the first context
            const Options options{.backend = setting.backend, .device = rank};
            static_cast<void>(Context::create(setting.problem.shape, single_rank(), options));
        };
    }
    return std::make_unique<RankProcesses>(launch);
}

/// Judges a round; empty if all is as expected.
std::string judge(const Setting& setting, const Scene& scene, const std::vector<std::optional<Report>>& reports, Row& row) {
    std::string trouble;
    for (int rank = 0; rank < setting.world; ++rank) {
        const auto& report = reports[static_cast<std::size_t>(rank)];
        const std::string fault = fault_of(setting, rank == culprit ? scene.of_culprit : scene.others, report);
        if (!fault.empty()) trouble += fmt::format("{}rank {}: {}", trouble.empty() ? "" : "; ", rank, fault);
        if (rank == culprit || !report || report->code == StatusCode::ok) continue;
        row.worst_seconds = std::max(row.worst_seconds, report->seconds);
        row.worst_seconds_to_end = std::max(row.worst_seconds_to_end, report->seconds_to_end);
        ++row.said[fmt::format("{}: {}", name(report->code), report->message)];
    }
    return trouble;
}

/// How many of the shows have been played when these ranks cannot go on.
std::size_t play(const Setting& setting, RankProcesses& ranks, const std::vector<Show>& shows,
                 const std::function<void(const Show&, Row&)>& played, std::map<std::string, Row>& rows) {
    for (std::size_t each = 0; each < shows.size(); ++each) {
        const Scene& scene = *shows[each].scene;
        Row& row = rows[scene.name];
        std::string trouble;
        bool goes_on = false;
        try {
            const auto reports = ranks.play();
            goes_on = true;
            for (std::size_t rank = 0; rank < reports.size(); ++rank)
                goes_on = goes_on && (reports[rank] || (rank == culprit && somebody_dies(scene)));
            trouble = judge(setting, scene, reports, row);
        } catch (const std::exception& error) {
            trouble = error.what();
        }
        ++row.ran;
        if (!trouble.empty()) {
            ++row.wrong;
            fmt::print(stderr, "FAIL: {} (seed {}): {}\n", scene.name, shows[each].seed, trouble);
        }
        played(shows[each], row);
        if (!goes_on) return each + 1;
    }
    return shows.size();
}

void print(const Scene& scene, const Row& row, bool markdown) {
    std::string said = "no error: all calls right";
    if (!row.said.empty()) {
        said = std::ranges::max_element(row.said, {}, [](const auto& entry) { return entry.second; })->first;
    }
    fmt::print(
        fmt::runtime(markdown ? "| `{}`: {} | {} | {} | {} | {} |\n" : "{}: {}: ran {}, wrong {}, worst {}: {}\n"),
        scene.name, scene.what, row.ran, row.wrong,
        row.said.empty() ? std::string("-") : fmt::format("{:.2f} / {:.2f} s", row.worst_seconds, row.worst_seconds_to_end),
        said);
    std::fflush(stdout);
}

int run(int count, char** texts) {
    std::string backend = "cpu";
    std::vector<std::string> only;
    int repeat = 1;
    bool reuses = false;
    bool markdown = false;
    for (int i = 1; i < count; ++i) {
        const std::string_view text = texts[i];
        if (text == "--case" && i + 1 < count) {
            only.emplace_back(texts[++i]);
        } else if (text == "--backend" && i + 1 < count) {
            backend = texts[++i];
        } else if (text == "--repeat" && i + 1 < count) {
            repeat = std::max(1, std::atoi(texts[++i]));
        } else if (text == "--reuse") {
            reuses = true;
        } else if (text == "--markdown") {
            markdown = true;
        } else {
            fmt::print(stderr,
                       "fault_check: unknown argument '{}', expected --backend NAME, --case NAME, --repeat N, --reuse or "
                       "--markdown\n",
                       text);
            return 2;
        }
    }
    const Setting setting = make_setting(backend, reuses);
    static_cast<void>(setting.problem.chain_error());  // computed before the processes part
    if (markdown)
        fmt::print(
            "| fault of one rank of {} | ran | wrong | worst time to the others' error / end | what they said "
            "|\n|---|---|---|---|---|\n",
            setting.world);
    std::vector<Scene> scenes = make_scenes(setting);
    if (!only.empty()) {
        const std::vector<Scene> all = std::exchange(scenes, {});
        for (const std::string& name : only) {
            const auto found = std::ranges::find(all, name, &Scene::name);
            if (found == all.end()) {
                fmt::print(stderr, "fault_check: --case is '{}', which is no scene\n", name);
                return 2;
            }
            scenes.push_back(*found);
        }
    }
    const Belongings before;
    std::map<std::string, Row> rows;
    const auto played = [&](const Show& show, const Row& row) {
        if (row.ran == repeat) print(*show.scene, row, markdown);
    };
    bool all_right = true;
    for (std::vector<Show>& shows : launches_of(setting, scenes, repeat)) {
        while (!shows.empty()) {
            const std::size_t done = play(setting, *start(setting, shows), shows, played, rows);
            shows.erase(shows.begin(), shows.begin() + static_cast<std::ptrdiff_t>(done));
        }
        if (const std::string left = before.left_over(); !left.empty()) {
            fmt::print(stderr, "FAIL: {}\n", left);
            all_right = false;
        }
    }
    for (const auto& [scene, row] : rows) all_right = all_right && row.wrong == 0;
    return all_right ? 0 : 1;
}

}  // namespace
}  // namespace latent_moe::faults

int main(int count, char** texts) {
    return latent_moe::faults::run(count, texts);
}

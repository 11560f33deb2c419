// What happens to the others when one rank of three goes wrong. Each fault is a scene: every rank's part in it, and what
// each rank must have seen in the end.
//
//     fault_check [--case NAME] [--repeat N] [--markdown]       all scenes once by default; exit status 1 if any went wrong
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <regex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "faults/failing_allocation.h"
#include "faults/launcher.h"
#include "support/problem.h"

namespace latent_moe::faults {
namespace {

using test::Problem;
using test::Tensor;

constexpr int world = 3;
constexpr int culprit = 1;
constexpr int calls_before = 5;  // that all ranks make before the fault
constexpr int deadline_ms = 700;

/// What one rank must report.
struct Expected {
    enum Ending { error, fine, no_report } ending = error;
    std::vector<StatusCode> codes = {};   ///< any of them; empty: any error
    std::vector<std::string> words = {};  ///< regular expressions: all of them in the message
};

struct Scene {
    std::string name;
    std::string what;
    std::function<void(Rank&, const Problem&, std::mt19937_64&)> part;
    Expected others;
    Expected of_culprit;
    int groups = 1;
};

Problem make_problem() {
    return {world, 5, {.hidden = 96, .latent = 64}};
}

Options options_of(const Problem& problem) {
    Options options = problem.context_options();
    options.timeout_ms = deadline_ms;
    options.cpu_threads = 1;
    return options;
}

Context make_context(const Problem& problem, const Bootstrap& bootstrap) {
    Context context = Context::create(problem.shape, bootstrap, options_of(problem));
    context.add_layer(7, problem.weight_view(), problem.gamma_data());
    context.add_layer(8, problem.weight_view(), problem.gamma_data());
    context.seal();
    return context;
}

void require(const Status& status) {
    if (!status.ok()) throw Error(status.code(), status.message());
}

/// One call of layer 7; throws what went wrong, a wrong result too.
void call(const Context& context, const Problem& problem, Tail tail = Tail::replicated, std::int64_t tokens = 5,
          std::size_t layer = 0) {
    Tensor out = problem.output();
    TailInput input = problem.input(context.rank());
    input.tokens = tokens;
    require(context.layer(layer).run(tail, input, out.writable_rows()));
    if (tokens != problem.tokens) return;
    const double error = relative_l2(std::as_const(out).matrix(), problem.reference());
    if (error > 2 * problem.chain_error())
        throw std::runtime_error(fmt::format("an output is wrong: relative error {:.2e}", error));
}

void calls(const Context& context, const Problem& problem, int count) {
    for (int each = 0; each < count; ++each)
        call(context, problem, each % 2 == 0 ? Tail::replicated : Tail::column_parallel);
}

[[noreturn]] void call_forever(const Context& context, const Problem& problem) {
    for (;;) calls(context, problem, 2);
}

/// The culprit gets a signal at a moment of chance, all others go on calling.
auto signalled(int signal) {
    return [signal](Rank& rank, const Problem& problem, std::mt19937_64& random) {
        const Context context = make_context(problem, rank.groups[0]);
        calls(context, problem, calls_before);
        if (rank.rank == culprit) {
            const auto delay = std::chrono::microseconds(random() % 5000);
            std::thread([&rank, signal, delay] {
                std::this_thread::sleep_for(delay);
                rank.fault_now();
                ::kill(::getpid(), signal);
            }).detach();
        }
        call_forever(context, problem);
    };
}

/// The culprit does `other` where the others make a call.
template <typename Other>
auto instead_of_a_call(Other other) {
    return [other](Rank& rank, const Problem& problem, std::mt19937_64&) {
        Context context = make_context(problem, rank.groups[0]);
        calls(context, problem, calls_before);
        if (rank.rank == culprit) {
            rank.fault_now();
            other(context, problem);
        } else {
            call_forever(context, problem);
        }
    };
}

void stay_away() {
    std::this_thread::sleep_for(std::chrono::milliseconds(3 * deadline_ms));
}

std::vector<Scene> make_scenes() {
    using enum StatusCode;
    const Expected silent{Expected::error, {timeout, aborted}, {"ranks? (0, )?1(, 2)? did not answer within 700 ms"}};
    const Expected gone{Expected::error, {aborted}, {"rank 1 is gone"}};
    const Expected out_of_step{Expected::error, {mismatch}, {"rank 0", "rank 1", "ranks make different calls"}};
    const Expected no_report{Expected::no_report};
    const Expected fine{Expected::fine};
    std::vector<Scene> scenes;
    scenes.push_back({"killed", "SIGKILL at a moment of chance", signalled(SIGKILL), gone, no_report});
    scenes.push_back({"terminated", "SIGTERM at a moment of chance", signalled(SIGTERM), gone, no_report});
    scenes.push_back({"stopped", "SIGSTOP at a moment of chance", signalled(SIGSTOP), silent, no_report});
    scenes.push_back({"slow", "late in each of 6 calls, but within the deadline",
                      [](Rank& rank, const Problem& problem, std::mt19937_64& random) {
                          const Context context = make_context(problem, rank.groups[0]);
                          for (int each = 0; each < 6; ++each) {
                              if (rank.rank == culprit)
                                  std::this_thread::sleep_for(std::chrono::milliseconds(random() % (deadline_ms / 4)));
                              call(context, problem);
                          }
                      },
                      fine, fine});
    scenes.push_back({"too_slow", "later than the deadline", instead_of_a_call([](Context& context, const Problem& problem) {
                          stay_away();
                          call(context, problem);
                      }),
                      silent, Expected{}});
    scenes.push_back({"never_calls", "returns to its caller, who makes no call",
                      instead_of_a_call([](Context&, const Problem&) { stay_away(); }), silent, fine});
    scenes.push_back({"aborts",
                      "Context::abort()",
                      instead_of_a_call([](Context& context, const Problem& problem) {
                          context.abort("the engine of this rank gives up");
                          call(context, problem);
                      }),
                      silent,
                      {Expected::error, {aborted}, {"the engine of this rank gives up"}}});
    scenes.push_back(
        {"other_tokens", "a call with 4 tokens where the others have 5",
         instead_of_a_call([](Context& context, const Problem& problem) { call(context, problem, Tail::replicated, 4); }),
         out_of_step, out_of_step});
    scenes.push_back(
        {"other_tail", "a call through another tail",
         instead_of_a_call([](Context& context, const Problem& problem) { call(context, problem, Tail::token_parallel); }),
         out_of_step, out_of_step});
    scenes.push_back(
        {"other_layer", "a call of another layer",
         instead_of_a_call([](Context& context, const Problem& problem) { call(context, problem, Tail::replicated, 5, 1); }),
         out_of_step, out_of_step});
    const Expected other_shape{Expected::error, {mismatch}, {"ranks differ in hidden", "rank 0 has 96", "rank 1 has 192"}};
    scenes.push_back({"other_shape", "creation with another shape",
                      [](Rank& rank, const Problem& problem, std::mt19937_64&) {
                          if (rank.rank == culprit) rank.fault_now();
                          Shape shape = problem.shape;
                          if (rank.rank == culprit) shape.hidden = 192;
                          Context::create(shape, rank.groups[0], options_of(problem));
                      },
                      other_shape, other_shape});
    const Expected other_order{Expected::error, {mismatch}, {"seal: ranks differ in id of layer 0", "rank 1 has 8"}};
    scenes.push_back({"other_layer_order", "layers added in another order",
                      [](Rank& rank, const Problem& problem, std::mt19937_64&) {
                          Context context = Context::create(problem.shape, rank.groups[0], options_of(problem));
                          if (rank.rank == culprit) rank.fault_now();
                          for (const std::int64_t layer : {0, 1})
                              context.add_layer(rank.rank == culprit ? 8 - layer : 7 + layer, problem.weight_view(),
                                                problem.gamma_data());
                          context.seal();
                      },
                      other_order, other_order});
    scenes.push_back({"bad_creation",
                      "creation refuses its options on one rank",
                      [](Rank& rank, const Problem& problem, std::mt19937_64&) {
                          Options options = options_of(problem);
                          if (rank.rank == culprit) {
                              rank.fault_now();
                              options.max_tokens = -3;
                          }
                          Context::create(problem.shape, rank.groups[0], options);
                      },
                      {Expected::error, {aborted}, {"failed on rank 1", "max_tokens is -3"}},
                      {Expected::error, {invalid_argument}, {"max_tokens is -3"}}});
    scenes.push_back({"dies_in_creation", "SIGKILL between creation and seal",
                      [](Rank& rank, const Problem& problem, std::mt19937_64&) {
                          Context context = Context::create(problem.shape, rank.groups[0], options_of(problem));
                          context.add_layer(7, problem.weight_view(), problem.gamma_data());
                          if (rank.rank == culprit) {
                              rank.fault_now();
                              ::kill(::getpid(), SIGKILL);
                          }
                          context.seal();
                      },
                      gone, no_report});
    scenes.push_back({"throws_in_creation",
                      "an exception of its caller between creation and seal",
                      [](Rank& rank, const Problem& problem, std::mt19937_64&) {
                          Context context = Context::create(problem.shape, rank.groups[0], options_of(problem));
                          if (rank.rank == culprit) {
                              rank.fault_now();
                              context.add_layer(7, {}, problem.gamma_data());
                          }
                          context.add_layer(7, problem.weight_view(), problem.gamma_data());
                          context.seal();
                      },
                      silent,
                      {Expected::error, {invalid_argument}, {"layer 7: W_up is null"}}});
    scenes.push_back({"out_of_memory",
                      "an allocation of chance fails during creation, packing or seal",
                      [](Rank& rank, const Problem& problem, std::mt19937_64& random) {
                          if (rank.rank == culprit) {
                              rank.fault_now();
                              fail_allocation(1 + static_cast<std::int64_t>(random() % 250));
                          }
                          const Context context = make_context(problem, rank.groups[0]);
                          if (rank.rank == culprit && !stop_failing())
                              throw Error(out_of_memory, "rank 1: the allocation that was to fail never came");
                          throw Error(out_of_memory, "rank 1: a context survived its failed allocation");
                      },
                      {Expected::error, {aborted, timeout, out_of_memory}, {"rank 1"}},
                      Expected{}});
    scenes.push_back({"destroyed_on_one_rank", "its context is destroyed",
                      instead_of_a_call([](Context& context, const Problem&) {
                          { const Context last = std::move(context); }
                          stay_away();
                      }),
                      silent, fine});
    scenes.push_back({"destroyed_beside_another", "a context is made, used and destroyed ten times while another runs",
                      [](Rank& rank, const Problem& problem, std::mt19937_64&) {
                          std::exception_ptr failure;
                          std::thread beside([&] {
                              try {
                                  for (int each = 0; each < 10; ++each)
                                      calls(make_context(problem, rank.groups[1]), problem, 2);
                              } catch (...) {
                                  failure = std::current_exception();
                              }
                          });
                          try {
                              const Context context = make_context(problem, rank.groups[0]);
                              calls(context, problem, 100);
                          } catch (...) {
                              beside.join();
                              throw;
                          }
                          beside.join();
                          if (failure) std::rethrow_exception(failure);
                      },
                      fine, fine, 2});
    return scenes;
}

/// What is wrong with a report; empty if it is as expected.
std::string fault_of(const Expected& expected, const std::optional<Report>& report) {
    if (expected.ending == Expected::no_report) return report ? "it lives" : "";
    if (!report) return "it ended without a word";
    if (report->files_left > 0) return fmt::format("{} files are left open", report->files_left);
    if (report->threads_left > 0 && expected.ending == Expected::fine)
        return fmt::format("{} threads are left", report->threads_left);
    if (expected.ending == Expected::fine)
        return report->code == StatusCode::ok
                   ? ""
                   : fmt::format("'{}: {}', expected no error", name(report->code), report->message);
    if (report->code == StatusCode::ok) return "no error";
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
    std::map<std::string, int> said;  // by ranks that are not the culprit
};

void play(const Scene& scene, const Problem& problem, std::uint64_t seed, Row& row) {
    ++row.ran;
    std::string trouble;
    try {
        std::mt19937_64 random(seed);
        const auto reports =
            launch({.world = world, .groups = scene.groups, .timeout_ms = deadline_ms, .body = [&](Rank& rank) {
                        scene.part(rank, problem, random);
                    }});
        for (int rank = 0; rank < world; ++rank) {
            const auto& report = reports[static_cast<std::size_t>(rank)];
            const std::string fault = fault_of(rank == culprit ? scene.of_culprit : scene.others, report);
            if (!fault.empty()) trouble += fmt::format("{}rank {}: {}", trouble.empty() ? "" : "; ", rank, fault);
            if (rank == culprit || !report || report->code == StatusCode::ok) continue;
            row.worst_seconds = std::max(row.worst_seconds, report->seconds);
            ++row.said[fmt::format("{}: {}", name(report->code), report->message)];
        }
    } catch (const std::exception& error) {
        trouble = error.what();
    }
    if (trouble.empty()) return;
    ++row.wrong;
    fmt::print(stderr, "FAIL: {} (seed {}): {}\n", scene.name, seed, trouble);
}

int run(int count, char** texts) {
    std::string only;
    int repeat = 1;
    bool markdown = false;
    for (int i = 1; i < count; ++i) {
        const std::string_view text = texts[i];
        if (text == "--case" && i + 1 < count) {
            only = texts[++i];
        } else if (text == "--repeat" && i + 1 < count) {
            repeat = std::max(1, std::atoi(texts[++i]));
        } else if (text == "--markdown") {
            markdown = true;
        } else {
            fmt::print(stderr, "fault_check: unknown argument '{}', expected --case NAME, --repeat N or --markdown\n", text);
            return 2;
        }
    }
    const Problem problem = make_problem();
    static_cast<void>(problem.chain_error());  // computed before the processes part
    if (markdown)
        fmt::print(
            "| fault of one rank of three | ran | wrong | worst time to the others' error | what they said "
            "|\n|---|---|---|---|---|\n");
    bool found = false;
    bool all_right = true;
    for (const Scene& scene : make_scenes()) {
        if (!only.empty() && scene.name != only) continue;
        found = true;
        Row row;
        for (int each = 0; each < repeat; ++each) play(scene, problem, static_cast<std::uint64_t>(each) + 1, row);
        all_right = all_right && row.wrong == 0;
        std::string said = "no error: all calls right";
        if (!row.said.empty()) {
            said = std::max_element(row.said.begin(), row.said.end(), [](const auto& left, const auto& right) {
                       return left.second < right.second;
                   })->first;
        }
        fmt::print(
            fmt::runtime(markdown ? "| `{}`: {} | {} | {} | {} | {} |\n" : "{}: {}: ran {}, wrong {}, worst {}: {}\n"),
            scene.name, scene.what, row.ran, row.wrong,
            row.said.empty() ? std::string("-") : fmt::format("{:.2f} s", row.worst_seconds), said);
        std::fflush(stdout);
    }
    if (found) return all_right ? 0 : 1;
    fmt::print(stderr, "fault_check: --case is '{}', which is no scene\n", only);
    return 2;
}

}  // namespace
}  // namespace latent_moe::faults

int main(int count, char** texts) {
    return latent_moe::faults::run(count, texts);
}

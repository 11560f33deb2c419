// Creation, layers, the order of calls, and what happens when ranks disagree or stay away.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/harness.h"
#include "support/problem.h"

namespace latent_moe {
namespace {

using test::on_ranks;
using test::Problem;
using test::Tensor;

std::string message_of(const std::function<void()>& body, StatusCode expected) {
    try {
        body();
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), expected) << error.what();
        return error.what();
    }
    ADD_FAILURE() << "expected an error";
    return {};
}

/// Every field that ranks must agree in, with a change to it and the message that names it.
struct Difference {
    const char* message;
    std::function<void(Shape&, Options&)> make;
};

TEST(ContextCreation, NamesTheFieldInWhichRanksDifferOnEveryRank) {
    const std::vector<Difference> differences = {
        {"hidden: rank 0 has 1344, rank 1 has 2688", [](Shape& shape, Options&) { shape.hidden = 2688; }},
        {"latent: rank 0 has 96, rank 1 has 104", [](Shape& shape, Options&) { shape.latent = 104; }},
        {"norm: rank 0 has rms, rank 1 has none", [](Shape& shape, Options&) { shape.norm = Norm::none; }},
        {"epsilon: rank 0 has 1e-05, rank 1 has 1e-06", [](Shape& shape, Options&) { shape.epsilon = 1e-6F; }},
        {"routed_scale: rank 0 has 1, rank 1 has 2", [](Shape& shape, Options&) { shape.routed_scale = 2; }},
        {"activations: rank 0 has bf16, rank 1 has f16", [](Shape& shape, Options&) { shape.activations = Dtype::f16; }},
        {"capacity_tokens: rank 0 has 128, rank 1 has 64", [](Shape&, Options& options) { options.capacity_tokens = 64; }},
        {"max_tokens: rank 0 has 4096, rank 1 has 5000", [](Shape&, Options& options) { options.max_tokens = 5000; }},
        {"keep_whole_weights: rank 0 has true, rank 1 has false",
         [](Shape&, Options& options) { options.keep_whole_weights = false; }},
        {"tail: rank 0 has any, rank 1 has replicated", [](Shape&, Options& options) { options.tail = Tail::replicated; }},
        {"shared: rank 0 has partial, rank 1 has absent",
         [](Shape&, Options& options) { options.shared = SharedState::absent; }},
        {"sequence_parallel: rank 0 has false, rank 1 has true",
         [](Shape&, Options& options) { options.sequence_parallel = true; }},
    };
    const Problem problem(2, 1);
    for (const Difference& difference : differences) {
        on_ranks(2, [&](const Bootstrap& bootstrap) {
            Shape shape = problem.shape;
            Options options = problem.context_options();
            if (bootstrap.rank == 1) difference.make(shape, options);
            const std::string message =
                message_of([&] { Context::create(shape, bootstrap, options); }, StatusCode::mismatch);
            EXPECT_EQ(message, std::string("context creation: ranks differ in ") + difference.message);
        });
    }
}

TEST(ContextCreation, FailsOnEveryRankWhenOneRankFails) {
    const Problem problem(3, 1);
    on_ranks(3, [&](const Bootstrap& bootstrap) {
        Shape shape = problem.shape;
        if (bootstrap.rank == 2) shape.latent = 7;
        const StatusCode expected = bootstrap.rank == 2 ? StatusCode::invalid_argument : StatusCode::aborted;
        const std::string message =
            message_of([&] { Context::create(shape, bootstrap, problem.context_options()); }, expected);
        EXPECT_NE(message.find("latent is 7, expected a multiple of 8 from 8 to 1048576"), std::string::npos) << message;
        EXPECT_EQ(message.find("failed on rank 2") != std::string::npos, bootstrap.rank != 2) << message;
    });
}

TEST(ContextCreation, RefusesABackendThatIsNotThere) {
    const std::string message = message_of(
        [] { Context::create(*shape_preset("kimi-k3"), single_rank(), {.backend = "abacus"}); }, StatusCode::unavailable);
    EXPECT_NE(message.find("backend is 'abacus', this build has"), std::string::npos) << message;
}

TEST(ContextCreation, RefusesOptionsOutsideTheLimitsAndSaysWhich) {
    const Shape shape{.hidden = 64, .latent = 32};
    const auto message = [&](const Options& options, int world = 1) {
        std::string text;
        run_thread_ranks(world, [&](const Bootstrap& bootstrap) {
            const std::string mine =
                message_of([&] { Context::create(shape, bootstrap, options); }, StatusCode::invalid_argument);
            if (bootstrap.rank == 0) text = mine;
        });
        return text;
    };
    EXPECT_EQ(message({.max_tokens = 70'000}), "max_tokens is 70000, expected 1 to 65536");
    EXPECT_EQ(message({.capacity_tokens = -1}), "capacity_tokens is -1, expected 0 to 65536");
    EXPECT_EQ(message({.timeout_ms = 0}), "timeout_ms is 0, expected at least 1");
    EXPECT_EQ(message({.cpu_threads = -1}), "cpu_threads is -1, expected 0 to 1024");
    EXPECT_EQ(message({.backend = "cpu"}, 3),
              "hidden 64 is not divisible by 3 ranks: no rank can own an equal shard of W_up, expected keep_whole_weights "
              "or a number of "
              "ranks that divides it");
}

TEST(ContextCreation, RefusesATailThatCanNeverRun) {
    const Problem problem(2, 1);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        Options options = problem.context_options();
        options.tail = Tail::late_reduce;
        const std::string message =
            message_of([&] { Context::create(problem.shape, bootstrap, options); }, StatusCode::unsupported);
        EXPECT_EQ(message, "tail late_reduce cannot run: the norm needs the summed latent before the projection");
    });
}

TEST(Layers, AreCheckedWhenTheyAreAdded) {
    const Problem problem(1, 1);
    Context context = Context::create(problem.shape, single_rank(), problem.context_options());
    const auto message = [&](WeightView view, const void* gamma) {
        return message_of([&] { context.add_layer(4, view, gamma); }, StatusCode::invalid_argument);
    };
    WeightView view = problem.weight_view();
    EXPECT_EQ(message({}, problem.gamma_data()), "layer 4: W_up is null");
    EXPECT_EQ(message(view, nullptr), "layer 4: gamma is null, expected the norm's weights");
    view.rows = 100;
    EXPECT_EQ(message(view, problem.gamma_data()), "layer 4: W_up has 100 rows, expected all 1344 or this rank's 1344");
    view = problem.weight_view();
    view.stride = 95;
    EXPECT_EQ(message(view, problem.gamma_data()), "layer 4: W_up has a row stride of 95 elements, expected at least 96");
    context.add_layer(4, problem.weight_view(), problem.gamma_data());
    EXPECT_EQ(message(problem.weight_view(), problem.gamma_data()), "layer 4 was added already");
    context.seal();
    EXPECT_EQ(
        message_of([&] { context.add_layer(5, problem.weight_view(), problem.gamma_data()); }, StatusCode::unsupported),
        "layer 5: the context is sealed already");
}

TEST(Layers, MustBeTheSameOnEveryRank) {
    const Problem problem(2, 1);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        Context context = Context::create(problem.shape, bootstrap, problem.context_options());
        context.add_layer(bootstrap.rank == 0 ? 3 : 4, problem.weight_view(), problem.gamma_data());
        EXPECT_EQ(message_of([&] { context.seal(); }, StatusCode::mismatch),
                  "seal: ranks differ in id of layer 0 in order: rank 0 has 3, rank 1 has 4");
    });
}

TEST(Calls, RefuseBadArgumentsAndLeaveTheContextUsable) {
    const Problem problem(1, 4);
    const Context context = make_context(problem, single_rank(), problem.context_options());
    Tensor out = problem.output();
    const auto message = [&](const TailInput& input, Rows rows) {
        const Status status = context.layer(0).run(input, rows);
        EXPECT_EQ(status.code(), StatusCode::invalid_argument);
        return status.message();
    };
    TailInput input = problem.input(0);
    input.tokens = 5000;
    EXPECT_EQ(message(input, out.writable_rows()), "tokens is 5000, expected 0 to max_tokens 4096");
    input.tokens = -1;
    EXPECT_EQ(message(input, out.writable_rows()), "tokens is -1, expected 0 to max_tokens 4096");
    input = problem.input(0);
    input.routed = {};
    EXPECT_EQ(message(input, out.writable_rows()), "routed is null, expected [4, 96]");
    input = problem.input(0);
    input.shared.stride = 1000;
    EXPECT_EQ(message(input, out.writable_rows()), "shared has a row stride of 1000 elements, expected at least 1344");
    input = problem.input(0);
    EXPECT_EQ(message(input, {}), "out is null, expected [4, 1344]");
    Tensor both = problem.shared[0];
    input.shared = both.rows();
    EXPECT_EQ(message(input, {both.matrix().row(1), 1344}),
              "out overlaps shared, expected separate memory or exactly the same rows");
    EXPECT_FALSE(context.poll_fault().has_value());
    EXPECT_TRUE(context.layer(0).run(problem.input(0), out.writable_rows()).ok());
}

TEST(Calls, RefuseDeferredRowsThatDoNotFit) {
    const Problem problem(1, 4);
    const test::Uncombined rows(problem, 2, Dtype::f32);
    Options options = problem.context_options();
    Tensor out = problem.output();
    TailInput input = problem.input(0);
    DeferredRows deferred = rows.deferred(0);
    input.deferred = &deferred;
    const auto message = [&](const Context& context) { return context.layer(0).run(input, out.writable_rows()).message(); };
    const Context without = make_context(problem, single_rank(), options);
    input.routed = {};
    EXPECT_EQ(message(without), "deferred rows are given, but the context's option deferred_finalize is off");

    options.deferred_finalize = true;
    const Context context = make_context(problem, single_rank(), options);
    EXPECT_EQ(message(context), "");
    EXPECT_GE(context.workspace_bytes(), without.workspace_bytes() + 4096 * 96 * 2);
    input.routed = problem.routed[0].rows();
    EXPECT_EQ(message(context), "routed and deferred rows are given, expected one of them");
    input.routed = {};
    deferred.slots = 0;
    EXPECT_EQ(message(context), "deferred slots is 0, expected 1 to 1024");
    deferred = rows.deferred(0);
    deferred.weight_dtype = Dtype::f16;
    EXPECT_EQ(message(context), "the deferred weights are f16, expected bf16 or f32");
    deferred = rows.deferred(0);
    deferred.weights = nullptr;
    EXPECT_EQ(message(context), "the deferred weights are null");
    deferred = rows.deferred(0);
    deferred.map = nullptr;
    EXPECT_EQ(message(context), "the deferred row map is null");
    deferred = rows.deferred(0);
    deferred.rows.stride = 95;
    EXPECT_EQ(message(context), "deferred rows has a row stride of 95 elements, expected at least 96");
    deferred = rows.deferred(0);
    std::vector<std::int32_t> map(8, 7);
    map[5] = 8;
    deferred.map = map.data();
    EXPECT_EQ(message(context), "the deferred row map says 8 for slot 1 of token 2, expected below 8");
    deferred.count = -1;
    EXPECT_EQ(message(context), "the count of the deferred rows is -1, expected at least 0");
    deferred.count = INT64_MAX;
    EXPECT_EQ(message(context), "the count of the deferred rows is 9223372036854775807, expected at most 2147483647");
    deferred = rows.deferred(0);
    deferred.map = reinterpret_cast<const std::int32_t*>(reinterpret_cast<const char*>(deferred.map) + 1);
    EXPECT_EQ(message(context), "the deferred row map is not aligned to its int32 elements");
    EXPECT_FALSE(context.poll_fault().has_value());
}

TEST(BatchInvariance, RefusesEveryTailButOneWithTheReason) {
    const Problem problem(2, 3);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        Options options = problem.context_options();
        options.batch_invariant = true;
        const Context context = make_context(problem, bootstrap, options);
        const Plan plan = context.plan(3);
        ASSERT_EQ(plan.candidates.size(), 1U);
        for (const Refusal& refusal : plan.refused) {
            EXPECT_EQ(refusal.reason, std::string("a batch-invariant context keeps to one tail, ") + name(plan.tail));
        }
        // A tail that may not run every number of tokens is not the one.
        options.tail_token_limit[static_cast<std::size_t>(plan.tail)] = 100;
        const Context other = make_context(problem, bootstrap, options);
        EXPECT_NE(other.plan(3).tail, plan.tail);
    });
}

TEST(Contexts, ThatWereMovedFromSaySo) {
    const Problem problem(1, 2);
    Context context = make_context(problem, single_rank(), problem.context_options());
    Layer layer = context.layer(0);
    Tensor out = problem.output();
    const Layer other_layer = std::move(layer);
    const std::string of_layer = "the layer was moved from, expected one that is in use";
    EXPECT_EQ(layer.run(problem.input(0), out.writable_rows()).message(), of_layer);
    EXPECT_EQ(layer.begin(problem.shared[0].rows(), out.writable_rows(), 2).message(), of_layer);
    EXPECT_EQ(layer.finish(problem.routed[0].rows()).message(), of_layer);
    EXPECT_EQ(context.accumulate_projection(problem.routed[0].rows(), layer, out.writable_rows(), 2).message(), of_layer);
    const Context other = std::move(context);
    const std::string of_context = "the context was moved from, expected one that is in use";
    EXPECT_EQ(message_of([&] { context.seal(); }, StatusCode::invalid_argument), of_context);
    EXPECT_EQ(message_of([&] { context.plan(1); }, StatusCode::invalid_argument), of_context);
    EXPECT_EQ(message_of([&] { context.abort(); }, StatusCode::invalid_argument), of_context);
    EXPECT_EQ(message_of([&] { context.resume(); }, StatusCode::invalid_argument), of_context);
    EXPECT_EQ(message_of([&] { static_cast<void>(context.poll_fault()); }, StatusCode::invalid_argument), of_context);
    EXPECT_EQ(context.all_reduce_rms_norm(problem.routed[0].rows(), nullptr, out.writable_rows(), 2).message(), of_context);
    EXPECT_TRUE(other_layer.run(problem.input(0), out.writable_rows()).ok());
}

TEST(Creation, RefusesNumbersThatNameNothing) {
    const Problem problem(1, 1);
    Shape shape = problem.shape;
    shape.norm = static_cast<Norm>(7);
    EXPECT_EQ(message_of([&] { Context::create(shape, single_rank()); }, StatusCode::invalid_argument),
              "norm is number 7, expected none or rms");
    const auto refused = [&](auto change) {
        Options options = problem.context_options();
        change(options);
        return message_of([&] { Context::create(problem.shape, single_rank(), options); }, StatusCode::invalid_argument);
    };
    EXPECT_EQ(refused([](Options& options) { options.shared = static_cast<SharedState>(9); }),
              "shared is number 9, expected partial, reduced or absent");
    EXPECT_EQ(refused([](Options& options) { options.tune_table.clear(); }),
              "tune_table is empty, expected a file, auto or none");
    EXPECT_EQ(refused([](Options& options) { options.other_reducer_from_bytes = -1; }),
              "other_reducer_from_bytes is -1, expected at least 0");
    EXPECT_EQ(refused([](Options& options) {
                  options.self_check_period = 1;
                  options.self_check_folder = "/nowhere";
              }),
              "self_check_folder is '/nowhere', expected a folder that is there");
}

TEST(Creation, RefusesABootstrapThatGathersNothing) {
    for (const int filler : {0, 0xEE}) {
        Bootstrap bootstrap{.rank = 1, .world = 2};
        bootstrap.all_gather_bytes = [filler](const void*, void* received, std::size_t bytes) {
            std::memset(received, filler, 2 * bytes);
        };
        const std::string message =
            message_of([&] { Context::create(Problem(2, 1).shape, bootstrap); }, StatusCode::mismatch);
        EXPECT_NE(message.find("place 0 of what the bootstrap's all_gather_bytes gave rank 1 of 2 is from rank"),
                  std::string::npos)
            << message;
    }
}

TEST(Creation, RefusesABootstrapThatGathersOtherBytesThanItWasGiven) {
    Bootstrap bootstrap{.rank = 0, .world = 1};
    int calls = 0;
    bootstrap.all_gather_bytes = [&calls](const void* send, void* received, std::size_t bytes) {
        std::memcpy(received, send, bytes);
        if (++calls == 2) static_cast<unsigned char*>(received)[0] ^= 1;
    };
    const std::string message =
        message_of([&] { Context::create(Problem(1, 1).shape, bootstrap); }, StatusCode::invalid_argument);
    EXPECT_NE(message.find("all_gather_bytes gave rank 0 of 1 other bytes for itself"), std::string::npos) << message;
}

TEST(Creation, RefusesRanksThatStandInAnotherPlaceThanTheirNumberSays) {
    struct Numbers {
        int first, second;
        const char* says;
    };
    for (const Numbers& numbers : {Numbers{1, 0, "place 0"}, Numbers{0, 0, "place 1"}, Numbers{1, 1, "place 0"}}) {
        std::vector<std::string> messages(2);
        run_thread_ranks(2, [&](const Bootstrap& given) {
            Bootstrap bootstrap{.rank = given.rank == 0 ? numbers.first : numbers.second, .world = 2};
            bootstrap.all_gather_bytes = given.all_gather_bytes;
            messages[static_cast<std::size_t>(given.rank)] =
                message_of([&] { Context::create(Problem(2, 1).shape, bootstrap); }, StatusCode::mismatch);
        });
        for (const std::string& message : messages) {
            EXPECT_NE(message.find(numbers.says), std::string::npos) << message;
            EXPECT_NE(message.find(", expected rank"), std::string::npos) << message;
        }
    }
}

TEST(Calls, WhoseBootstrapFailsEndInAnErrorThatSaysSo) {
    const Problem problem(2, 3);
    for (const bool any : {true, false}) {
        run_thread_ranks(2, [&](const Bootstrap& given) {
            bool broken = false;
            Bootstrap bootstrap{.rank = given.rank, .world = 2};
            bootstrap.all_gather_bytes = [&](const void* send, void* received, std::size_t bytes) {
                if (broken && any) throw 42;
                if (broken) throw std::runtime_error("connection lost");
                given.all_gather_bytes(send, received, bytes);
            };
            const Context context = make_context(problem, bootstrap, problem.context_options());
            Tensor out = problem.output();
            broken = true;
            const Status status = context.layer(0).run(problem.input(given.rank), out.writable_rows());
            EXPECT_EQ(status.code(), StatusCode::unavailable);
            EXPECT_EQ(status.message(), "the bootstrap's all_gather_bytes failed on rank " + std::to_string(given.rank) +
                                            ": " + (any ? "an exception that is not a std::exception" : "connection lost"));
            EXPECT_EQ(context.layer(0).run(problem.input(given.rank), out.writable_rows()).code(), StatusCode::aborted);
        });
    }
}

TEST(Calls, RefuseStridesWhoseRowsHaveNoAddress) {
    const Problem problem(1, 2);
    const Context context = make_context(problem, single_rank(), problem.context_options());
    Tensor out = problem.output();
    TailInput input = problem.input(0);
    for (const std::int64_t stride : {INT64_MAX, (std::int64_t{1} << 30) + 1}) {
        input.routed.stride = stride;
        EXPECT_EQ(context.layer(0).run(input, out.writable_rows()).message(),
                  "routed has a row stride of " + std::to_string(stride) + " elements, expected at most 1073741824");
    }
    for (const int rank : {-1, 1}) EXPECT_EQ(context.own_tokens(4, rank).count, 0);
    for (const std::int64_t tokens : {INT64_MIN, std::int64_t{-1}, INT64_MAX})
        EXPECT_EQ(context.own_tokens(tokens, 0).count, 0);
}

TEST(Plans, RefuseANegativeNumberOfTokens) {
    const Problem problem(1, 2);
    const Context context = make_context(problem, single_rank(), problem.context_options());
    EXPECT_EQ(message_of([&] { static_cast<void>(context.plan(-1)); }, StatusCode::invalid_argument),
              "tokens is -1, expected at least 0");
}

TEST(Suspending, IsRefusedWhereItHasHappenedAlready) {
    const Problem problem(1, 2);
    Context context = make_context(problem, single_rank(), problem.context_options());
    EXPECT_EQ(message_of([&] { context.resume(); }, StatusCode::unsupported), "the context is not suspended");
    context.suspend();
    EXPECT_EQ(message_of([&] { context.suspend(); }, StatusCode::unsupported), "the context is suspended already");
    context.resume();
}

TEST(AForkedProcess, LeavesItsCopyOfAContextBehindAtOnce) {
    const Problem problem(1, 2);
    std::optional<Context> context = make_context(problem, single_rank(), problem.context_options());
    const pid_t child = ::fork();
    if (child == 0) {
        ::alarm(20);
        context.reset();
        ::_exit(0);
    }
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
}

TEST(Aborting, TellsItsReasonInOneLine) {
    const Problem problem(1, 2);
    Context context = make_context(problem, single_rank(), problem.context_options());
    context.abort("two\nlines");
    const std::optional<Fault> fault = context.poll_fault();
    ASSERT_TRUE(fault.has_value());
    EXPECT_EQ(fault->message, "two\\nlines");
}

TEST(Calls, NeedASealedContext) {
    const Problem problem(1, 1);
    Context context = Context::create(problem.shape, single_rank(), problem.context_options());
    const Layer layer = context.add_layer(7, problem.weight_view(), problem.gamma_data());
    Tensor out = problem.output();
    EXPECT_EQ(layer.run(problem.input(0), out.writable_rows()).code(), StatusCode::unsupported);
}

/// Two ranks make calls that differ; both must fail, with `message`, and stay failed.
void expect_mismatch(const std::function<Status(const Context&, int rank, const Problem&, Tensor& out)>& call,
                     const std::string& message) {
    const Problem problem(2, 6);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        Context context = Context::create(problem.shape, bootstrap, problem.context_options());
        context.add_layer(7, problem.weight_view(), problem.gamma_data());
        context.add_layer(8, problem.weight_view(), problem.gamma_data());
        context.seal();
        Tensor out = problem.output();
        const Status status = call(context, bootstrap.rank, problem, out);
        EXPECT_EQ(status.code(), StatusCode::mismatch);
        EXPECT_EQ(status.message(), message);
        ASSERT_TRUE(context.poll_fault().has_value());
        EXPECT_EQ(context.poll_fault()->message, message);
        EXPECT_EQ(context.layer(0).run(problem.input(bootstrap.rank), out.writable_rows()).code(), StatusCode::aborted);
    });
}

TEST(Calls, WithDifferentTokensAreAnErrorOnEveryRank) {
    expect_mismatch(
        [](const Context& context, int rank, const Problem& problem, Tensor& out) {
            TailInput input = problem.input(rank);
            input.tokens = rank == 0 ? 6 : 0;
            return context.layer(0).run(Tail::column_parallel, input, out.writable_rows());
        },
        "ranks make different calls: rank 0 is in tail column_parallel of layer 7 with 6 tokens and a prefix, rank 1 in "
        "tail "
        "column_parallel of layer 7 "
        "with 0 tokens and a prefix");
}

TEST(Calls, OfDifferentLayersAreAnErrorOnEveryRank) {
    expect_mismatch(
        [](const Context& context, int rank, const Problem& problem, Tensor& out) {
            return context.layer(static_cast<std::size_t>(rank))
                .run(Tail::overlap, problem.input(rank), out.writable_rows());
        },
        "ranks make different calls: rank 0 is in tail overlap of layer 7 with 6 tokens and a prefix, rank 1 in tail "
        "overlap of layer 8 "
        "with 6 tokens and a prefix");
}

TEST(Calls, ThroughDifferentTailsAreAnErrorOnEveryRank) {
    expect_mismatch(
        [](const Context& context, int rank, const Problem& problem, Tensor& out) {
            return context.layer(0).run(rank == 0 ? Tail::replicated : Tail::token_parallel, problem.input(rank),
                                        out.writable_rows());
        },
        "ranks make different calls: rank 0 is in tail replicated of layer 7 with 6 tokens and a prefix, rank 1 in tail "
        "token_parallel "
        "of layer 7 with 6 "
        "tokens and a prefix");
}

TEST(Calls, ThatAPeerNeverMakesEndInATimeoutThatNamesIt) {
    const Problem problem(2, 3);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        Options options = problem.context_options();
        options.timeout_ms = 400;
        const Context context = make_context(problem, bootstrap, options);
        if (bootstrap.rank == 1) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1200));
            return;
        }
        Tensor out = problem.output();
        for (const Tail tail : {Tail::overlap, Tail::replicated}) {
            const Status status = context.layer(0).run(tail, problem.input(0), out.writable_rows());
            EXPECT_EQ(status.code(), tail == Tail::overlap ? StatusCode::timeout : StatusCode::aborted);
            EXPECT_NE(status.message().find("rank 1 did not arrive within 400 ms"), std::string::npos) << status.message();
        }
        ASSERT_TRUE(context.poll_fault().has_value());
        EXPECT_EQ(context.poll_fault()->layer, 7);
    });
}

TEST(Contexts, WithoutAFaultAreDestroyedAtOnceThoughAPeerIsAway) {
    const Problem problem(2, 3);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        std::optional<Context> context = make_context(problem, bootstrap, problem.context_options());
        Tensor out = problem.output();
        for (const Tail tail : {Tail::overlap, Tail::column_parallel})
            EXPECT_TRUE(context->layer(0).run(tail, problem.input(bootstrap.rank), out.writable_rows()).ok());
        if (bootstrap.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
        const auto begin = std::chrono::steady_clock::now();
        context.reset();
        EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(750));
    });
}

TEST(Calls, ThatFailAtAPeerSayWhichAndAtWhichStep) {
    const Problem problem(2, 3);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        Options options = problem.context_options();
        options.timeout_ms = 400;
        const Context context = make_context(problem, bootstrap, options);
        if (bootstrap.rank == 1) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1200));
            return;
        }
        Tensor out = problem.output();
        EXPECT_EQ(context.layer(0).run(Tail::replicated, problem.input(0), out.writable_rows()).code(), StatusCode::timeout);
        ASSERT_TRUE(context.poll_fault().has_value());
        EXPECT_EQ(context.poll_fault()->rank, 1);
        EXPECT_EQ(context.poll_fault()->phase, "reduction of the latent");
    });
}

TEST(Calls, MayBeRefusedOnOneRankAloneAndThenFailOnBoth) {
    const Problem problem(2, 3);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        const Context context = make_context(problem, bootstrap, problem.context_options());
        Tensor out = problem.output();
        TailInput refused = problem.input(bootstrap.rank);
        refused.routed = {};
        if (bootstrap.rank == 1) {
            EXPECT_EQ(context.layer(0).run(refused, out.writable_rows()).code(), StatusCode::invalid_argument);
        }
        // Rank 1's second call must not pass for its first.
        EXPECT_EQ(context.layer(0).run(problem.input(bootstrap.rank), out.writable_rows()).code(), StatusCode::mismatch);
    });
}

TEST(Calls, WithAPrefixOnOneRankOnlyAreAnErrorOnEveryRank) {
    const Problem problem(2, 3);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        const Context context = make_context(problem, bootstrap, problem.context_options());
        Tensor out = problem.output();
        TailInput input = problem.input(bootstrap.rank);
        if (bootstrap.rank == 1) input.prefix = {};
        EXPECT_EQ(context.layer(0).run(Tail::replicated, input, out.writable_rows()).code(), StatusCode::mismatch);
    });
}

TEST(Calls, RefuseATailThatDoesNotExist) {
    const Problem problem(1, 1);
    const Context context = make_context(problem, single_rank(), problem.context_options());
    Tensor out = problem.output();
    EXPECT_EQ(context.layer(0).run(static_cast<Tail>(42), problem.input(0), out.writable_rows()).message(),
              "tail is number 42, expected 0 to 5");
}

TEST(Contexts, ThatShareTheirRanksMustBeCalledInTheSameOrder) {
    const Problem problem(2, 3);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        const Context first = make_context(problem, bootstrap, problem.context_options());
        const Context second = make_context(problem, bootstrap, problem.context_options());
        Tensor out = problem.output();
        ASSERT_TRUE(first.layer(0).run(problem.input(bootstrap.rank), out.writable_rows()).ok());
        ASSERT_TRUE(second.layer(0).run(problem.input(bootstrap.rank), out.writable_rows()).ok());
        const Context& next = bootstrap.rank == 0 ? first : second;
        const Status status = next.layer(0).run(Tail::replicated, problem.input(bootstrap.rank), out.writable_rows());
        EXPECT_EQ(status.code(), StatusCode::mismatch);
        EXPECT_EQ(
            status.message(),
            "contexts that share their ranks were called in different orders: rank 0 is in context 1, rank 1 in context 2");
    });
}

TEST(ContextCreation, RefusesASequenceParallelCallerThatNoTailCanServe) {
    const Problem problem(2, 3);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        Options options = problem.context_options();
        options.sequence_parallel = true;
        options.keep_whole_weights = false;
        const std::string message =
            message_of([&] { Context::create(problem.shape, bootstrap, options); }, StatusCode::unsupported);
        EXPECT_EQ(message.find("no tail can run; token_parallel, for one: it needs the whole W_up"), 0U) << message;
    });
}

TEST(Abort, EndsThePeersWaitAndFailsLaterCalls) {
    if (!test::ranks_are_threads()) GTEST_SKIP() << "processes learn of an abort by their deadline";
    const Problem problem(2, 3);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        Context context = make_context(problem, bootstrap, problem.context_options());
        Tensor out = problem.output();
        if (bootstrap.rank == 1) {
            std::this_thread::sleep_for(std::chrono::milliseconds(30));
            context.abort("the engine shuts down");
            EXPECT_EQ(context.layer(0).run(problem.input(1), out.writable_rows()).message(),
                      "the context failed earlier: the engine shuts down");
            return;
        }
        const Status status = context.layer(0).run(problem.input(0), out.writable_rows());
        EXPECT_EQ(status.code(), StatusCode::aborted);
        EXPECT_EQ(status.message(), "rank 1 gave up: the engine shuts down");
    });
}

TEST(SuspendAndResume, GiveTheWorkspaceBackAndRebuildIt) {
    const Problem problem(2, 40);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        Context context = make_context(problem, bootstrap, problem.context_options());
        Tensor before = problem.output();
        Tensor after = problem.output();
        ASSERT_TRUE(context.layer(0).run(problem.input(bootstrap.rank), before.writable_rows()).ok());
        const std::size_t bytes = context.workspace_bytes();
        EXPECT_GT(bytes, 0U);
        context.suspend();
        EXPECT_EQ(context.workspace_bytes(), 0U);
        EXPECT_EQ(context.layer(0).run(problem.input(bootstrap.rank), after.writable_rows()).code(),
                  StatusCode::unsupported);
        context.resume();
        EXPECT_EQ(context.workspace_bytes(), bytes);
        ASSERT_TRUE(context.layer(0).run(problem.input(bootstrap.rank), after.writable_rows()).ok());
        EXPECT_EQ(before.content(), after.content());
    });
}

TEST(Contexts, RunBesideOneAnother) {
    if (!test::ranks_are_threads()) GTEST_SKIP() << "two groups of processes would need two launchers";
    const Problem problem(2, 24);
    std::vector<std::thread> groups;
    std::atomic<int> right = 0;
    for (int group = 0; group < 2; ++group) {
        groups.emplace_back([&] {
            run_thread_ranks(2, [&](const Bootstrap& bootstrap) {
                const Context context = make_context(problem, bootstrap, problem.context_options());
                for (int repeat = 0; repeat < 10; ++repeat) {
                    Tensor out = problem.output();
                    ASSERT_TRUE(context.layer(0).run(problem.input(bootstrap.rank), out.writable_rows()).ok());
                }
                ++right;
            });
        });
    }
    for (std::thread& group : groups) group.join();
    EXPECT_EQ(right, 4);
}

TEST(Parts, AllReduceRmsNormIsTheChainsNormBitForBit) {
    for (const int world : {1, 2, 4}) {
        for (const std::int64_t tokens : {0, 1, 5, 600}) {
            const Problem problem(world, tokens, {.hidden = 64, .latent = 256});
            on_ranks(world, [&](const Bootstrap& bootstrap) {
                const Context context = make_context(problem, bootstrap, problem.context_options());
                Tensor y(tokens, problem.shape.latent, problem.shape.activations);
                const Status status =
                    context.all_reduce_rms_norm(problem.routed[static_cast<std::size_t>(bootstrap.rank)].rows(),
                                                problem.gamma_data(), y.writable_rows(), tokens);
                ASSERT_TRUE(status.ok()) << status.message();
                EXPECT_TRUE(test::same_on_all_ranks(bootstrap, y.content()));
                double error = 0;
                double norm = 0;
                for (std::int64_t row = 0; row < tokens; ++row) {
                    double squares = 0;
                    std::vector<double> sums;
                    for (std::int64_t column = 0; column < problem.shape.latent; ++column) {
                        double sum = 0;
                        for (const Tensor& partial : problem.routed) sum += static_cast<double>(partial.at(row, column));
                        sums.push_back(sum);
                        squares += sum * sum;
                    }
                    for (std::int64_t column = 0; column < problem.shape.latent; ++column) {
                        const double expected = sums[static_cast<std::size_t>(column)] /
                                                std::sqrt(squares / static_cast<double>(problem.shape.latent) + 1e-5) *
                                                static_cast<double>(problem.gamma.at(0, column));
                        error += std::pow(static_cast<double>(y.at(row, column)) - expected, 2);
                        norm += expected * expected;
                    }
                }
                EXPECT_LE(error, 4e-3 * 4e-3 * norm);
            });
        }
    }
}

TEST(Parts, AccumulateProjectionAddsToItsColumnSliceInPlace) {
    const Problem problem(2, 300, {.prefix = false});
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        const Context context = make_context(problem, bootstrap, problem.context_options());
        const auto rank = static_cast<std::size_t>(bootstrap.rank);
        const std::int64_t width = problem.shape.hidden / 2;
        Tensor c = problem.shared[rank];
        const Matrix slice = c.matrix().column_range(bootstrap.rank * width, width);
        const Status status = context.accumulate_projection(problem.routed[rank].rows(), context.layer(0),
                                                            {slice.data, slice.stride}, problem.tokens);
        ASSERT_TRUE(status.ok()) << status.message();
        for (std::int64_t row = 0; row < problem.tokens; row += 37) {
            for (std::int64_t column = 0; column < problem.shape.hidden; ++column) {
                const float before = problem.shared[rank].at(row, column);
                if (column / width != bootstrap.rank) {
                    ASSERT_EQ(c.at(row, column), before);
                    continue;
                }
                double expected = static_cast<double>(before);
                for (std::int64_t k = 0; k < problem.shape.latent; ++k) {
                    expected += static_cast<double>(problem.routed[rank].at(row, k)) *
                                static_cast<double>(problem.weights.at(column, k));
                }
                ASSERT_NEAR(c.at(row, column), expected, 0.005 + 0.005 * std::abs(expected));
            }
        }
    });
}

}  // namespace
}  // namespace latent_moe

// The C ABI: what it computes is what C++ computes; every way to misuse it ends in a status and a message.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "latent_moe/latent_moe.h"
#include "latent_moe/latent_moe_c.h"

extern "C" int latent_moe_header_is_c(void);

namespace {

constexpr std::int64_t hidden = 64;
constexpr std::int64_t latent = 32;
constexpr std::int64_t tokens = 5;

std::vector<float> numbers(std::size_t count, unsigned seed) {
    std::vector<float> values(count);
    for (float& value : values) {
        seed = seed * 1664525U + 1013904223U;
        value = static_cast<float>(seed >> 8) / 8388608.0F - 1.0F;
    }
    return values;
}

latent_moe_shape small_shape() {
    latent_moe_shape shape;
    EXPECT_EQ(latent_moe_shape_init(&shape, sizeof shape), LATENT_MOE_OK);
    shape.hidden = hidden;
    shape.latent = latent;
    shape.activations = LATENT_MOE_F32;
    return shape;
}

latent_moe_options small_options() {
    latent_moe_options options;
    EXPECT_EQ(latent_moe_options_init(&options, sizeof options), LATENT_MOE_OK);
    options.backend = "cpu";
    options.max_tokens = 16;
    options.cpu_threads = 1;
    return options;
}

const std::vector<float>& up_projection() {
    static const std::vector<float> values = numbers(hidden * latent, 1);
    return values;
}

const std::vector<float>& norm_weights() {
    static const std::vector<float> values(latent, 1.0F);
    return values;
}

latent_moe_weights small_weights() {
    latent_moe_weights weights;
    EXPECT_EQ(latent_moe_weights_init(&weights, sizeof weights), LATENT_MOE_OK);
    weights.data = up_projection().data();
    weights.rows = hidden;
    weights.dtype = LATENT_MOE_F32;
    return weights;
}

/// One rank alone with one sealed layer, number 3, and inputs for it.
class CAbi : public testing::Test {
protected:
    void SetUp() override {
        ASSERT_EQ(latent_moe_bootstrap_threads(1, 5000, &bootstrap), LATENT_MOE_OK);
        const latent_moe_shape shape = small_shape();
        const latent_moe_options options = small_options();
        ASSERT_EQ(latent_moe_context_create(&shape, bootstrap, &options, &context), LATENT_MOE_OK)
            << latent_moe_last_error();
        const latent_moe_weights weights = small_weights();
        ASSERT_EQ(latent_moe_context_add_layer(context, 3, &weights, norm_weights().data(), &layer), LATENT_MOE_OK);
        ASSERT_EQ(latent_moe_context_seal(context), LATENT_MOE_OK);
        ASSERT_EQ(latent_moe_input_init(&input, sizeof input), LATENT_MOE_OK);
        input.routed.data = routed.data();
        input.shared.data = shared.data();
        input.tokens = tokens;
    }
    void TearDown() override {
        latent_moe_context_destroy(context);
        latent_moe_bootstrap_destroy(bootstrap);
    }

    latent_moe_status run() { return latent_moe_layer_run(layer, LATENT_MOE_TAIL_AUTO, &input, out.data(), 0, nullptr); }

    latent_moe_bootstrap* bootstrap = nullptr;
    latent_moe_context* context = nullptr;
    const latent_moe_layer* layer = nullptr;
    latent_moe_input input{};
    std::vector<float> routed = numbers(tokens * latent, 2);
    std::vector<float> shared = numbers(tokens * hidden, 3);
    std::vector<float> out = std::vector<float>(tokens * hidden);
};

/// The call failed so, and said so.
#define EXPECT_FAILURE(call, status, message)                                            \
    do {                                                                                 \
        EXPECT_EQ(call, status);                                                         \
        EXPECT_NE(std::string(latent_moe_last_error()).find(message), std::string::npos) \
            << "the message is: " << latent_moe_last_error();                            \
    } while (false)

TEST_F(CAbi, ComputesTheBitsThatTheCppApiComputes) {
    ASSERT_EQ(run(), LATENT_MOE_OK) << latent_moe_last_error();
    auto direct =
        latent_moe::Context::create({.hidden = hidden, .latent = latent, .activations = latent_moe::Dtype::f32},
                                    latent_moe::single_rank(), {.backend = "cpu", .max_tokens = 16, .cpu_threads = 1});
    const latent_moe::Layer same = direct.add_layer(
        3, {.data = up_projection().data(), .rows = hidden, .dtype = latent_moe::Dtype::f32}, norm_weights().data());
    direct.seal();
    std::vector<float> expected(out.size());
    ASSERT_TRUE(same.run({.routed = routed.data(), .shared = shared.data(), .tokens = tokens}, expected.data()).ok());
    EXPECT_EQ(out, expected);
    EXPECT_EQ(latent_moe_layer_id(layer), 3);
}

TEST_F(CAbi, TakesACallInHalves) {
    const std::vector<float> prefix = numbers(tokens * hidden, 4);
    input.prefix.data = prefix.data();
    ASSERT_EQ(run(), LATENT_MOE_OK);
    std::vector<float> halves(out.size());
    ASSERT_EQ(latent_moe_layer_begin(layer, LATENT_MOE_TAIL_AUTO, {shared.data(), 0}, tokens, halves.data(), 0, nullptr),
              LATENT_MOE_OK)
        << latent_moe_last_error();
    EXPECT_FAILURE(run(), LATENT_MOE_UNSUPPORTED, "layer 3 has begun and not finished");
    ASSERT_EQ(latent_moe_layer_finish(layer, {routed.data(), 0}, {prefix.data(), 0}, nullptr), LATENT_MOE_OK)
        << latent_moe_last_error();
    EXPECT_EQ(halves, out);
    EXPECT_FAILURE(latent_moe_layer_finish(layer, {routed.data(), 0}, {nullptr, 0}, nullptr), LATENT_MOE_UNSUPPORTED,
                   "layer 3 has not begun");
    EXPECT_FAILURE(
        latent_moe_layer_begin(layer, LATENT_MOE_TAIL_OVERLAP, {shared.data(), 0}, tokens, halves.data(), 0, nullptr),
        LATENT_MOE_UNSUPPORTED, "there is one rank");
    EXPECT_FAILURE(latent_moe_layer_begin(nullptr, 0, {shared.data(), 0}, tokens, halves.data(), 0, nullptr),
                   LATENT_MOE_INVALID_ARGUMENT, "layer is null");
    EXPECT_FAILURE(latent_moe_layer_finish(nullptr, {routed.data(), 0}, {nullptr, 0}, nullptr), LATENT_MOE_INVALID_ARGUMENT,
                   "layer is null");
}

TEST(CAbiRanks, OfASequenceParallelContextGetTheirOwnRows) {
    constexpr int world = 2;
    std::array<latent_moe_bootstrap*, world> bootstraps{};
    ASSERT_EQ(latent_moe_bootstrap_threads(world, 5000, bootstraps.data()), LATENT_MOE_OK);
    const std::vector<float> routed = numbers(tokens * latent, 2);
    const std::vector<float> shared = numbers(tokens * hidden, 3);
    std::array<std::vector<float>, world> outs;  // of all rows, then of each rank's own
    std::array<std::vector<float>, world> own;
    std::array<std::string, world> errors;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world; ++rank) {
        threads.emplace_back([&, rank] {
            const auto at = static_cast<std::size_t>(rank);
            for (const int sequence_parallel : {0, 1}) {
                latent_moe_options options = small_options();
                options.sequence_parallel = sequence_parallel;
                options.keep_whole_weights = 1;
                const latent_moe_shape shape = small_shape();
                latent_moe_context* context = nullptr;
                const latent_moe_layer* layer = nullptr;
                const latent_moe_weights weights = small_weights();
                latent_moe_input input{};
                latent_moe_input_init(&input, sizeof input);
                input.routed.data = routed.data();
                input.shared.data = shared.data();
                input.tokens = tokens;
                std::int64_t first = 0;
                std::int64_t count = tokens;
                const bool ready =
                    latent_moe_context_create(&shape, bootstraps[at], &options, &context) == LATENT_MOE_OK &&
                    latent_moe_context_add_layer(context, 3, &weights, norm_weights().data(), &layer) == LATENT_MOE_OK &&
                    latent_moe_context_seal(context) == LATENT_MOE_OK &&
                    latent_moe_context_own_tokens(context, tokens, rank, &first, &count) == LATENT_MOE_OK;
                std::vector<float>& out = sequence_parallel != 0 ? own[at] : outs[at];
                out.resize(static_cast<std::size_t>(sequence_parallel != 0 ? count : tokens) * hidden);
                if (!ready || latent_moe_layer_run(layer, LATENT_MOE_TAIL_TOKEN_PARALLEL, &input, out.data(), 0, nullptr) !=
                                  LATENT_MOE_OK)
                    errors[at] = latent_moe_last_error();
                latent_moe_context_destroy(context);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    std::vector<float> gathered;
    for (int rank = 0; rank < world; ++rank) {
        const auto at = static_cast<std::size_t>(rank);
        EXPECT_EQ(errors[at], "");
        gathered.insert(gathered.end(), own[at].begin(), own[at].end());
        latent_moe_bootstrap_destroy(bootstraps[at]);
    }
    EXPECT_EQ(gathered, outs[0]);
    EXPECT_EQ(outs[0], outs[1]);
}

TEST_F(CAbi, TakesUncombinedRows) {
    latent_moe_options options = small_options();
    options.deferred_finalize = 1;
    const latent_moe_shape shape = small_shape();
    latent_moe_context* deferring = nullptr;
    const latent_moe_layer* same = nullptr;
    ASSERT_EQ(latent_moe_context_create(&shape, bootstrap, &options, &deferring), LATENT_MOE_OK) << latent_moe_last_error();
    const latent_moe_weights weights = small_weights();
    ASSERT_EQ(latent_moe_context_add_layer(deferring, 3, &weights, norm_weights().data(), &same), LATENT_MOE_OK);
    ASSERT_EQ(latent_moe_context_seal(deferring), LATENT_MOE_OK);
    ASSERT_EQ(run(), LATENT_MOE_OK);

    // The rows backwards, each with weight 1 in the second of two slots.
    const std::vector<float> slot_weights = {7, 1, 7, 1, 7, 1, 7, 1, 7, 1};
    const std::vector<std::int32_t> map = {-1, 4, -1, 3, -1, 2, -1, 1, -1, 0};
    std::vector<float> rows;
    for (std::int64_t token = tokens; token-- > 0;)
        rows.insert(rows.end(), routed.begin() + token * latent, routed.begin() + (token + 1) * latent);
    latent_moe_input uncombined = input;
    uncombined.routed.data = nullptr;
    uncombined.deferred = {.rows = {rows.data(), 0},
                           .count = tokens,
                           .slots = 2,
                           .weights = slot_weights.data(),
                           .weight_dtype = LATENT_MOE_F32,
                           .map = map.data()};
    std::vector<float> combined(out.size());
    const auto run_uncombined = [&](const latent_moe_layer* through) {
        return latent_moe_layer_run(through, LATENT_MOE_TAIL_AUTO, &uncombined, combined.data(), 0, nullptr);
    };
    ASSERT_EQ(run_uncombined(same), LATENT_MOE_OK) << latent_moe_last_error();
    EXPECT_EQ(combined, out);
    EXPECT_FAILURE(run_uncombined(layer), LATENT_MOE_UNSUPPORTED, "deferred_finalize is off");
    uncombined.deferred.weight_dtype = 7;
    EXPECT_FAILURE(run_uncombined(same), LATENT_MOE_INVALID_ARGUMENT, "dtype of the deferred weights is number 7");
    latent_moe_context_destroy(deferring);
}

TEST_F(CAbi, TellsWhatTheContextIs) {
    EXPECT_EQ(latent_moe_context_rank(context), 0);
    EXPECT_EQ(latent_moe_context_world(context), 1);
    EXPECT_STREQ(latent_moe_context_backend(context), "cpu");
    EXPECT_EQ(latent_moe_context_weight_bytes(context), (hidden * latent + latent) * sizeof(float));
    EXPECT_GT(latent_moe_context_workspace_bytes(context), 0U);
    std::int64_t first = -1;
    std::int64_t count = -1;
    EXPECT_EQ(latent_moe_context_own_tokens(context, 7, 0, &first, &count), LATENT_MOE_OK);
    EXPECT_EQ(first, 0);
    EXPECT_EQ(count, 7);
    EXPECT_FAILURE(latent_moe_context_own_tokens(context, 7, 1, &first, &count), LATENT_MOE_INVALID_ARGUMENT,
                   "rank is 1, expected 0 to 0");
}

TEST_F(CAbi, ShowsThePlanWithItsRefusals) {
    latent_moe_plan* plan = nullptr;
    ASSERT_EQ(latent_moe_context_plan(context, 4, &plan), LATENT_MOE_OK);
    EXPECT_EQ(latent_moe_plan_tail(plan), LATENT_MOE_TAIL_REPLICATED);
    ASSERT_EQ(latent_moe_plan_candidates(plan), 1U);
    ASSERT_EQ(latent_moe_plan_refusals(plan), 5U);
    latent_moe_tail tail = LATENT_MOE_TAIL_AUTO;
    const char* reason = nullptr;
    ASSERT_EQ(latent_moe_plan_refusal(plan, 0, &tail, &reason), LATENT_MOE_OK);
    EXPECT_EQ(tail, LATENT_MOE_TAIL_OVERLAP);
    EXPECT_NE(std::string(reason).find("there is one rank"), std::string::npos);
    EXPECT_FAILURE(latent_moe_plan_candidate(plan, 1, &tail, nullptr), LATENT_MOE_INVALID_ARGUMENT,
                   "candidate is number 1, expected below 1");
    latent_moe_plan_destroy(plan);
    EXPECT_FAILURE(latent_moe_context_plan(context, -1, &plan), LATENT_MOE_INVALID_ARGUMENT, "tokens is -1");
}

TEST_F(CAbi, RefusesNullHandlesAndPointers) {
    EXPECT_FAILURE(latent_moe_context_seal(nullptr), LATENT_MOE_INVALID_ARGUMENT, "context is null");
    EXPECT_FAILURE(latent_moe_layer_run(nullptr, LATENT_MOE_TAIL_AUTO, &input, out.data(), 0, nullptr),
                   LATENT_MOE_INVALID_ARGUMENT, "layer is null");
    EXPECT_FAILURE(latent_moe_layer_run(layer, LATENT_MOE_TAIL_AUTO, nullptr, out.data(), 0, nullptr),
                   LATENT_MOE_INVALID_ARGUMENT, "input is null");
    EXPECT_FAILURE(latent_moe_layer_run(layer, LATENT_MOE_TAIL_AUTO, &input, nullptr, 0, nullptr),
                   LATENT_MOE_INVALID_ARGUMENT, "out is null");
    EXPECT_FAILURE(latent_moe_context_create(nullptr, bootstrap, nullptr, &context), LATENT_MOE_INVALID_ARGUMENT,
                   "shape is null");
    const latent_moe_shape shape = small_shape();
    EXPECT_FAILURE(latent_moe_context_create(&shape, nullptr, nullptr, &context), LATENT_MOE_INVALID_ARGUMENT,
                   "bootstrap is null");
    EXPECT_FAILURE(latent_moe_context_create(&shape, bootstrap, nullptr, nullptr), LATENT_MOE_INVALID_ARGUMENT,
                   "context is null");
    EXPECT_FAILURE(latent_moe_bootstrap_create(0, 1, 1, nullptr, nullptr, &bootstrap), LATENT_MOE_INVALID_ARGUMENT,
                   "all_gather is null");
    EXPECT_FAILURE(latent_moe_context_poll_fault(context, nullptr), LATENT_MOE_INVALID_ARGUMENT, "fault is null");
    EXPECT_FAILURE(latent_moe_shape_preset(nullptr, nullptr, 0), LATENT_MOE_INVALID_ARGUMENT, "model is null");
    EXPECT_FAILURE(latent_moe_accumulate_projection(context, {routed.data(), 0}, nullptr, out.data(), 0, tokens, nullptr),
                   LATENT_MOE_INVALID_ARGUMENT, "layer is null");
    EXPECT_FAILURE(latent_moe_all_reduce_rms_norm(nullptr, {routed.data(), 0}, nullptr, out.data(), 0, tokens, nullptr),
                   LATENT_MOE_INVALID_ARGUMENT, "context is null");
    // Destroying nothing is nothing.
    latent_moe_context_destroy(nullptr);
    latent_moe_bootstrap_destroy(nullptr);
    latent_moe_plan_destroy(nullptr);
}

TEST_F(CAbi, RefusesNumbersThatAreNoEnumerator) {
    EXPECT_FAILURE(latent_moe_layer_run(layer, 9, &input, out.data(), 0, nullptr), LATENT_MOE_INVALID_ARGUMENT,
                   "tail is number 9, expected 0 to 5");
    latent_moe_context* none = nullptr;
    latent_moe_shape shape = small_shape();
    shape.norm = 4;
    EXPECT_FAILURE(latent_moe_context_create(&shape, bootstrap, nullptr, &none), LATENT_MOE_INVALID_ARGUMENT,
                   "norm is number 4, expected 0 to 1");
    shape = small_shape();
    shape.activations = -1;
    EXPECT_FAILURE(latent_moe_context_create(&shape, bootstrap, nullptr, &none), LATENT_MOE_INVALID_ARGUMENT,
                   "activations is number -1");
    shape = small_shape();
    latent_moe_options options = small_options();
    options.shared = 3;
    EXPECT_FAILURE(latent_moe_context_create(&shape, bootstrap, &options, &none), LATENT_MOE_INVALID_ARGUMENT,
                   "shared is number 3");
    EXPECT_EQ(none, nullptr);
}

TEST_F(CAbi, PassesOnWhatTheLibrarySays) {
    latent_moe_shape shape = small_shape();
    shape.hidden = 65;
    latent_moe_context* none = nullptr;
    EXPECT_FAILURE(latent_moe_context_create(&shape, bootstrap, nullptr, &none), LATENT_MOE_INVALID_ARGUMENT, "hidden");
    EXPECT_FAILURE(latent_moe_context_seal(context), LATENT_MOE_UNSUPPORTED, "sealed already");
    EXPECT_FAILURE(latent_moe_layer_run(layer, LATENT_MOE_TAIL_OVERLAP, &input, out.data(), 0, nullptr),
                   LATENT_MOE_UNSUPPORTED, "there is one rank");
    input.tokens = 17;
    EXPECT_FAILURE(run(), LATENT_MOE_INVALID_ARGUMENT, "tokens is 17, expected 0 to max_tokens 16");
    EXPECT_FAILURE(latent_moe_shape_preset("kimi-k9", &shape, sizeof shape), LATENT_MOE_INVALID_ARGUMENT,
                   "model is 'kimi-k9', expected kimi-k3");
    latent_moe_options options = small_options();
    options.backend = "abacus";
    shape = small_shape();
    EXPECT_FAILURE(latent_moe_context_create(&shape, bootstrap, &options, &none), LATENT_MOE_UNAVAILABLE, "abacus");
    EXPECT_FAILURE(latent_moe_bootstrap_nccl(nullptr, 1000, &bootstrap), LATENT_MOE_INVALID_ARGUMENT,
                   "communicator is null");
}

TEST_F(CAbi, TellsOfAnAbortInTheFault) {
    latent_moe_fault fault{};
    fault.struct_size = sizeof fault;
    ASSERT_EQ(latent_moe_context_poll_fault(context, &fault), LATENT_MOE_OK);
    EXPECT_EQ(fault.present, 0);
    ASSERT_EQ(latent_moe_context_abort(context, "enough"), LATENT_MOE_OK);
    ASSERT_EQ(latent_moe_context_poll_fault(context, &fault), LATENT_MOE_OK);
    EXPECT_EQ(fault.present, 1);
    EXPECT_STREQ(fault.message, "enough");
    EXPECT_FAILURE(run(), LATENT_MOE_ABORTED, "enough");
}

TEST_F(CAbi, CountsCallsAndRefusals) {
    ASSERT_EQ(run(), LATENT_MOE_OK);
    input.tokens = -1;
    EXPECT_EQ(run(), LATENT_MOE_INVALID_ARGUMENT);
    latent_moe_counters counters{};
    counters.struct_size = sizeof counters;
    ASSERT_EQ(latent_moe_context_counters(context, &counters), LATENT_MOE_OK);
    EXPECT_EQ(counters.calls[LATENT_MOE_TAIL_REPLICATED], 1U);
    EXPECT_EQ(counters.refused[LATENT_MOE_INVALID_ARGUMENT], 1U);
    EXPECT_EQ(counters.failed[LATENT_MOE_ABORTED], 0U);
    EXPECT_FAILURE(latent_moe_context_counters(context, nullptr), LATENT_MOE_INVALID_ARGUMENT, "counters is null");
}

TEST_F(CAbi, GivesTheWorkspaceBackAndTakesItAgain) {
    ASSERT_EQ(latent_moe_context_suspend(context), LATENT_MOE_OK);
    EXPECT_EQ(latent_moe_context_workspace_bytes(context), 0U);
    EXPECT_FAILURE(run(), LATENT_MOE_UNSUPPORTED, "suspended");
    ASSERT_EQ(latent_moe_context_resume(context), LATENT_MOE_OK);
    EXPECT_EQ(run(), LATENT_MOE_OK);
}

TEST(CAbiStructs, OfAnOlderProgramGetTheDefaultsOfWhatTheyLack) {
    // A program whose options ended with max_tokens.
    struct {
        latent_moe_options options;
        unsigned char behind;
    } caller{};
    std::memset(&caller, 0xAB, sizeof caller);
    const std::size_t size = offsetof(latent_moe_options, timeout_ms);
    ASSERT_EQ(latent_moe_options_init(&caller.options, size), LATENT_MOE_OK);
    EXPECT_EQ(caller.options.struct_size, size);
    EXPECT_EQ(caller.options.max_tokens, 8192);
    unsigned char next = 0;
    std::memcpy(&next, reinterpret_cast<unsigned char*>(&caller.options) + size, 1);
    EXPECT_EQ(next, 0xAB) << "written behind the caller's struct";

    caller.options.backend = "cpu";
    latent_moe_bootstrap* bootstrap = nullptr;
    latent_moe_context* context = nullptr;
    const latent_moe_shape shape = small_shape();
    ASSERT_EQ(latent_moe_bootstrap_threads(1, 1000, &bootstrap), LATENT_MOE_OK);
    EXPECT_EQ(latent_moe_context_create(&shape, bootstrap, &caller.options, &context), LATENT_MOE_OK)
        << latent_moe_last_error();
    latent_moe_context_destroy(context);
    latent_moe_bootstrap_destroy(bootstrap);
}

TEST(CAbiStructs, OfANewerProgramAreRefusedOnlyIfTheySayMore) {
    struct {
        latent_moe_shape shape;
        std::int64_t news;
    } caller{};
    ASSERT_EQ(latent_moe_shape_init(&caller.shape, sizeof caller), LATENT_MOE_OK);
    caller.shape.hidden = hidden;
    caller.shape.latent = latent;
    latent_moe_bootstrap* bootstrap = nullptr;
    latent_moe_context* context = nullptr;
    latent_moe_options options = small_options();
    ASSERT_EQ(latent_moe_bootstrap_threads(1, 1000, &bootstrap), LATENT_MOE_OK);
    ASSERT_EQ(latent_moe_context_create(&caller.shape, bootstrap, &options, &context), LATENT_MOE_OK)
        << latent_moe_last_error();
    latent_moe_context_destroy(context);
    context = nullptr;
    caller.news = 1;
    EXPECT_FAILURE(latent_moe_context_create(&caller.shape, bootstrap, &options, &context), LATENT_MOE_UNSUPPORTED,
                   "older than the caller's header");
    latent_moe_bootstrap_destroy(bootstrap);
}

TEST(CAbiStructs, NeedTheirSize) {
    latent_moe_shape shape{};
    latent_moe_bootstrap* bootstrap = nullptr;
    latent_moe_context* context = nullptr;
    ASSERT_EQ(latent_moe_bootstrap_threads(1, 1000, &bootstrap), LATENT_MOE_OK);
    EXPECT_FAILURE(latent_moe_context_create(&shape, bootstrap, nullptr, &context), LATENT_MOE_INVALID_ARGUMENT,
                   "shape: struct_size is 0, expected");
    EXPECT_FAILURE(latent_moe_options_init(nullptr, sizeof(latent_moe_options)), LATENT_MOE_INVALID_ARGUMENT,
                   "options is null");
    EXPECT_FAILURE(latent_moe_input_init(nullptr, 0), LATENT_MOE_INVALID_ARGUMENT, "input is null");
    latent_moe_bootstrap_destroy(bootstrap);
}

int gather_of_one_rank(void* user, const void* send, void* received, size_t bytes) {
    ++*static_cast<int*>(user);
    if (bytes > 0) std::memcpy(received, send, bytes);
    return 0;
}

int gather_that_fails(void*, const void*, void*, size_t) {
    return 42;
}

TEST(CAbiRanks, MayBeTheCallersOwn) {
    int calls = 0;
    latent_moe_bootstrap* bootstrap = nullptr;
    ASSERT_EQ(latent_moe_bootstrap_create(0, 1, 1, &gather_of_one_rank, &calls, &bootstrap), LATENT_MOE_OK);
    const latent_moe_shape shape = small_shape();
    const latent_moe_options options = small_options();
    latent_moe_context* context = nullptr;
    ASSERT_EQ(latent_moe_context_create(&shape, bootstrap, &options, &context), LATENT_MOE_OK) << latent_moe_last_error();
    EXPECT_GT(calls, 0);
    latent_moe_context_destroy(context);
    latent_moe_bootstrap_destroy(bootstrap);
}

TEST(CAbiRanks, WhoseGatherFailsSaySo) {
    latent_moe_bootstrap* bootstrap = nullptr;
    ASSERT_EQ(latent_moe_bootstrap_create(0, 1, 1, &gather_that_fails, nullptr, &bootstrap), LATENT_MOE_OK);
    const latent_moe_shape shape = small_shape();
    const latent_moe_options options = small_options();
    latent_moe_context* context = nullptr;
    EXPECT_FAILURE(latent_moe_context_create(&shape, bootstrap, &options, &context), LATENT_MOE_UNAVAILABLE,
                   "all_gather returned 42 on rank 0");
    EXPECT_EQ(context, nullptr);
    latent_moe_bootstrap_destroy(bootstrap);
}

TEST(CAbiRanks, ThatDisagreeAreToldSoOnBoth) {
    std::array<latent_moe_bootstrap*, 2> bootstraps{};
    ASSERT_EQ(latent_moe_bootstrap_threads(2, 5000, bootstraps.data()), LATENT_MOE_OK);
    std::vector<std::thread> threads;
    std::array<std::string, 2> messages;
    for (std::size_t rank = 0; rank < 2; ++rank) {
        threads.emplace_back([&, rank] {
            const latent_moe_shape shape = small_shape();
            latent_moe_options options = small_options();
            options.max_tokens = 16 + static_cast<std::int64_t>(rank);
            latent_moe_context* context = nullptr;
            EXPECT_EQ(latent_moe_context_create(&shape, bootstraps[rank], &options, &context), LATENT_MOE_MISMATCH);
            messages[rank] = latent_moe_last_error();  // of this thread
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& message : messages) EXPECT_NE(message.find("max_tokens"), std::string::npos) << message;
    for (latent_moe_bootstrap* each : bootstraps) latent_moe_bootstrap_destroy(each);
}

TEST(CAbiRanks, RefuseAWorldThatIsNone) {
    latent_moe_bootstrap* bootstrap = nullptr;
    EXPECT_FAILURE(latent_moe_bootstrap_threads(0, 1000, &bootstrap), LATENT_MOE_INVALID_ARGUMENT, "0");
    EXPECT_FAILURE(latent_moe_bootstrap_threads(1, 1000, nullptr), LATENT_MOE_INVALID_ARGUMENT, "bootstraps is null");
}

TEST(CAbiLibrary, SaysWhichItIs) {
    EXPECT_NE(latent_moe_header_is_c(), 0);
    EXPECT_STREQ(latent_moe_version(), latent_moe::library_version());
    EXPECT_STREQ(latent_moe_status_name(LATENT_MOE_TIMEOUT), "timeout");
    EXPECT_STREQ(latent_moe_tail_name(LATENT_MOE_TAIL_AUTO), "auto");
    EXPECT_STREQ(latent_moe_tail_name(LATENT_MOE_TAIL_FUSED), "fused");
}

}  // namespace

// The HIP backend against libraries that only write down what they are asked for (fake_*.cpp): which kernels it launches,
// which products and collectives it asks for, how processes share memory. The results of kernels are not looked at: none
// runs.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "gpu/process_window.h"
#include "gpu/runtime/matmul.h"
#include "support/harness.h"
#include "support/problem.h"

namespace {

std::mutex mutex;
std::vector<std::string> calls;

}  // namespace

/// The fake libraries look it up by name.
extern "C" __attribute__((visibility("default"))) void latent_moe_keep_call(const char* line) {
    const std::lock_guard lock(mutex);
    calls.emplace_back(line);
}

namespace latent_moe {
namespace {

using test::on_ranks;
using test::Problem;
using test::ProblemOptions;
using test::Tensor;

std::vector<std::string> take_calls() {
    const std::lock_guard lock(mutex);
    return std::exchange(calls, {});
}
std::ptrdiff_t count_matching(const std::vector<std::string>& lines, const std::string& pattern) {
    const std::regex expression(pattern);
    return std::ranges::count_if(lines, [&](const std::string& line) { return std::regex_search(line, expression); });
}
std::string joined(const std::vector<std::string>& lines) {
    std::string text;
    for (const std::string& line : lines) text += line + "\n";
    return text;
}

class Setting {
public:
    Setting(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
    ~Setting() { unsetenv(name_); }
    Setting(const Setting&) = delete;
    Setting& operator=(const Setting&) = delete;

private:
    const char* name_;
};

Options hip_options(const Problem& problem) {
    Options options = problem.context_options();
    options.backend = "hip";
    options.keep_whole_weights = true;
    return options;
}

/// The calls that one run of a tail makes, on all ranks together.
std::vector<std::string> calls_of(Tail tail, const Problem& problem, const Options& options) {
    std::vector<std::string> lines;
    on_ranks(problem.world, [&](const Bootstrap& bootstrap) {
        const Context context = make_context(problem, bootstrap, options);
        int nothing = 0;
        std::vector<int> all(static_cast<std::size_t>(problem.world));
        const auto barrier = [&] { bootstrap.all_gather_bytes(&nothing, all.data(), sizeof nothing); };
        barrier();
        if (bootstrap.rank == 0) take_calls();
        barrier();
        Tensor out = problem.output();
        const Status status =
            context.layer(0).run(tail, problem.input(bootstrap.rank), out.writable_rows(), reinterpret_cast<Stream>(0x1000));
        EXPECT_TRUE(status.ok()) << name(tail) << ": " << status.message();
        barrier();
        if (bootstrap.rank == 0) lines = take_calls();
        barrier();
    });
    return lines;
}

constexpr ProblemOptions kimi_like{.hidden = 2048, .latent = 512, .prefix = false};

TEST(HipBackend, LaunchesTheFusedTailAsOneKernelOfWholeWaves) {
    const Problem problem(2, 5, kimi_like);
    const auto lines = calls_of(Tail::fused, problem, hip_options(problem));
    ASSERT_EQ(lines.size(), 2U) << joined(lines);
    // 1024 columns a rank are 64 tiles of 16, and CTA 0.
    EXPECT_EQ(count_matching(lines, "^launch .*5fusedILi16ELi2E.* grid 65 block 512$"), 2) << joined(lines);
}

TEST(HipBackend, CutsAFusedCallThatIsLongerThanItsKernel) {
    const Problem problem(4, 100, kimi_like);
    Options options = hip_options(problem);
    const auto lines = calls_of(Tail::fused, problem, options);
    EXPECT_EQ(count_matching(lines, "^launch .*5fusedILi64ELi4E.* grid 33 block 512$"), 4 * 2) << joined(lines);
}

TEST(HipBackend, ProjectsFewTokensWithItsOwnKernelAndManyThroughHipblaslt) {
    const Problem few(2, 33, kimi_like), many(2, 300, kimi_like);
    EXPECT_EQ(
        count_matching(calls_of(Tail::column_parallel, few, hip_options(few)), "^launch .*7projectI.*ELi64E.* grid 64 "), 2);
    const auto lines = calls_of(Tail::column_parallel, many, hip_options(many));
    // Dᵀ[1024, 300] = W[1024, 512] · Xᵀ[512, 300]: bf16 (14), float32 inside (2), the first solution that works.
    EXPECT_EQ(count_matching(lines,
                             "^hipblasLtMatmul 300 a 512x1024/512 type 14 transposed true b 512x300/512 type 14 c "
                             "1024x300/[0-9]+ type 14.* alpha 1 beta 1 compute 2 solution 101 workspace 33554432$"),
              2)
        << joined(lines);
}

TEST(HipBackend, DestroysEveryDescriptorOfHipblaslt) {
    const Problem many(2, 300, kimi_like);
    calls_of(Tail::replicated, many, hip_options(many));
    const auto alive = reinterpret_cast<int (*)()>(dlsym(dlopen("libhipblaslt.so.1", RTLD_NOW), "fake_hipblaslt_alive"));
    ASSERT_NE(alive, nullptr);
    EXPECT_EQ(alive(), 0);
}

TEST(HipBackend, SkipsASolutionThatTheUserRefuses) {
    const Setting refused("LATENT_MOE_REFUSED_ALGORITHMS", "101");
    const gpu::Matmul library;
    std::vector<std::byte> memory(1 << 16);
    const auto found = library.suggestions({.x = memory.data(),
                                            .x_stride = 64,
                                            .w = memory.data(),
                                            .c = nullptr,
                                            .c_stride = 0,
                                            .d = memory.data(),
                                            .d_stride = 64,
                                            .m = 8,
                                            .n = 64,
                                            .in = Dtype::bf16,
                                            .out = Dtype::bf16,
                                            .alpha = 1},
                                           64, 0, 8);
    ASSERT_EQ(found.size(), 1U);  // 102 cannot, 101 may not
    EXPECT_EQ(found.front().data[0], 103);
}

TEST(HipBackend, SendsLargeSummandsThroughRccl) {
    const Setting everything("LATENT_MOE_NCCL_FROM_BYTES", "1");
    const Problem problem(3, 6, {.hidden = 1344, .latent = 96, .prefix = false});
    const auto lines = calls_of(Tail::replicated, problem, hip_options(problem));
    // The latents and the shared rows: each rank sends two of its six rows to each of two others, then gathers the same.
    EXPECT_EQ(count_matching(lines, "^ncclSend rank . to . count 192 type 9$"), 3 * 2 * 2) << joined(lines);
    EXPECT_EQ(count_matching(lines, "^ncclRecv rank . from . count 2688 type 9$"), 3 * 2 * 2) << joined(lines);
    EXPECT_EQ(count_matching(lines, "^ncclGroupStart$"), count_matching(lines, "^ncclGroupEnd$"));
    EXPECT_EQ(count_matching(lines, "3sumILNS_5DtypeE0E"), 3 * 2) << "sums in rank order are our own";
}

/// What would send even small summands in every other way.
struct EveryOtherWay {
    Setting nccl{"LATENT_MOE_NCCL_FROM_BYTES", "1"}, bulk{"LATENT_MOE_BULK_FROM_BYTES", "1"},
        two_stages{"LATENT_MOE_ONE_STAGE_BYTES", "1"};
};

Options batch_invariant(const Problem& problem, Tail tail) {
    Options options = hip_options(problem);
    options.batch_invariant = true;
    options.tail = tail;
    return options;
}

TEST(HipBackend, MultipliesAndSendsInOneWayOnlyWhereThatIsToBeBatchInvariant) {
    const EveryOtherWay other_way;
    for (const Tail tail : {Tail::replicated, Tail::overlap, Tail::column_parallel, Tail::token_parallel}) {
        const Problem problem(3, 300, {.hidden = 1344, .latent = 96, .prefix = false});
        const auto lines = calls_of(tail, problem, batch_invariant(problem, tail));
        EXPECT_EQ(count_matching(lines, "hipblasLtMatmul|nccl|exchange_bulk|two_stage"), 0) << joined(lines);
        const int chunks = tail == Tail::token_parallel ? 2 : 5;  // of 64 tokens: of a rank's own, or of all
        EXPECT_EQ(count_matching(lines, "^launch .*7projectI"), 3 * chunks) << name(tail);
        Options options = batch_invariant(problem, tail);
        options.batch_invariant = false;
        EXPECT_GT(count_matching(calls_of(tail, problem, options), "hipblasLtMatmul|nccl|exchange_bulk|two_stage"), 0);
    }
    const Problem wide(2, 300, {.hidden = 1344, .latent = 96, .dtype = Dtype::f32, .weight_dtype = Dtype::f32});
    const auto lines = calls_of(Tail::column_parallel, wide, batch_invariant(wide, Tail::column_parallel));
    EXPECT_EQ(count_matching(lines, "^launch .*8multiplyI"), 2) << joined(lines);
    EXPECT_EQ(count_matching(lines, "hipblasLtMatmul"), 0) << joined(lines);
}

TEST(HipBackend, AddsOnItsOwnEvenAtTwoRanksWhereThatIsToBeBatchInvariant) {
    const Problem problem(2, 6, kimi_like);
    Options options = batch_invariant(problem, Tail::replicated);
    options.custom_all_reduce = false;  // so RCCL carries everything
    const auto lines = calls_of(Tail::replicated, problem, options);
    EXPECT_EQ(count_matching(lines, "^ncclAllReduce"), 0) << joined(lines);
    EXPECT_EQ(count_matching(lines, "3sumILNS_5DtypeE0E"), 2 * 2) << joined(lines);
    options.batch_invariant = false;
    EXPECT_EQ(count_matching(calls_of(Tail::replicated, problem, options), "^ncclAllReduce"), 2 * 2);
}

TEST(HipBackend, SaysWhatCannotBeBatchInvariant) {
    const Problem problem(2, 4, kimi_like);
    const auto why_not = [&](const Options& options) {
        std::string why;
        on_ranks(2, [&](const Bootstrap& bootstrap) {
            try {
                make_context(problem, bootstrap, options);
            } catch (const Error& error) {
                if (bootstrap.rank == 0) why = error.what();
            }
        });
        return why;
    };
    EXPECT_NE(why_not(batch_invariant(problem, Tail::fused)).find("how its kernel cuts a product depends on the number"),
              std::string::npos);
    Options options = batch_invariant(problem, Tail::replicated);
    options.other_reducer_from_bytes = 1 << 20;
    EXPECT_NE(why_not(options).find("batch_invariant: from other_reducer_from_bytes on"), std::string::npos);
}

TEST(HipBackend, AsksRcclForACommunicatorOfItsOwn) {
    const Setting everything("LATENT_MOE_NCCL_FROM_BYTES", "1");
    const Problem problem(2, 4, kimi_like);
    take_calls();
    on_ranks(2, [&](const Bootstrap& bootstrap) { make_context(problem, bootstrap, hip_options(problem)); });
    const auto lines = take_calls();
    for (const char* rank : {"0", "1"}) {
        EXPECT_EQ(count_matching(lines, std::string("^ncclCommInitRankConfig world 2 rank ") + rank +
                                            " id 7 config 0xcafebeef true splitShare 0$"),
                  1)
            << joined(lines);
    }
    EXPECT_EQ(count_matching(lines, "^ncclCommDestroy$"), 2);
}

TEST(HipBackend, DoesNotWaitForEverForAPeerThatDoesNotTakeLeave) {
    const Setting everything("LATENT_MOE_NCCL_FROM_BYTES", "1");
    const Setting stopped("FAKE_RCCL_DESTROY_MS", "2500");
    const Problem problem(2, 4, kimi_like);
    Options options = hip_options(problem);
    options.timeout_ms = 300;
    take_calls();
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        std::optional<Context> context = make_context(problem, bootstrap, options);
        const auto begin = std::chrono::steady_clock::now();
        context.reset();
        EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(2000));
    });
    EXPECT_EQ(count_matching(take_calls(), "^ncclCommDestroy ends$"), 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(3000));
    EXPECT_EQ(count_matching(take_calls(), "^ncclCommDestroy ends$"), 2) << "what is left waits on a thread of its own";
}

TEST(HipBackend, TakesUncachedMemoryForWindowsAndCoherentMemoryForFaults) {
    const Problem problem(2, 4, kimi_like);
    take_calls();
    on_ranks(2, [&](const Bootstrap& bootstrap) { make_context(problem, bootstrap, hip_options(problem)); });
    const auto lines = take_calls();
    EXPECT_EQ(count_matching(lines, "^hipExtMallocWithFlags [0-9]+ flags 3$"), 2) << joined(lines);
    EXPECT_EQ(count_matching(lines, "^hipHostMalloc [0-9]+ flags 0x40000003$"), 2) << joined(lines);
}

TEST(HipBackend, HasNoFusedTailOnAnArchitectureWithoutMfma) {
    const Setting other("FAKE_HIP_ARCHITECTURE", "gfx1250");
    const Problem problem(2, 4, kimi_like);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        const Context context = make_context(problem, bootstrap, hip_options(problem));
        const Plan plan = context.plan(4);
        const auto fused = std::ranges::find(plan.refused, Tail::fused, &Refusal::tail);
        ASSERT_NE(fused, plan.refused.end());
        EXPECT_NE(fused->reason.find("gfx1250 has no fused kernel"), std::string::npos) << fused->reason;
    });
}

TEST(HipBackend, SaysThatAnOldRcclIsTooOld) {
    // The library is looked for once a process, so in a new one.
    testing::FLAGS_gtest_death_test_style = "threadsafe";
    EXPECT_EXIT(
        {
            setenv("FAKE_RCCL_VERSION", "21205", 1);
            const bool said = gpu::look_for_nccl().missing == "RCCL is version 2.12.5, expected 2.18 or newer";
            std::exit(said ? 0 : 1);
        },
        testing::ExitedWithCode(0), "");
}

/// Ranks that are processes: what they gather goes through memory that they share.
struct Board {
    std::atomic<int> arrived[64];
    char data[64][4][256];
};

Bootstrap process_rank(Board& board, int rank, int world) {
    Bootstrap bootstrap{.rank = rank, .world = world};
    auto round = std::make_shared<int>(0);
    bootstrap.all_gather_bytes = [&board, rank, world, round](const void* send, void* received, std::size_t bytes) {
        const int here = (*round)++;
        std::memcpy(board.data[here][rank], send, bytes);
        board.arrived[here]++;
        while (board.arrived[here] < world) usleep(100);
        for (int r = 0; r < world; ++r)
            std::memcpy(static_cast<char*>(received) + static_cast<std::size_t>(r) * bytes, board.data[here][r], bytes);
    };
    return bootstrap;
}

/// Runs `body(bootstrap)` in two processes; its result is their exit status.
void in_two_processes(const std::function<int(const Bootstrap&)>& body) {
    auto* board =
        static_cast<Board*>(mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    ASSERT_NE(board, MAP_FAILED);
    pid_t children[2];
    for (int rank = 0; rank < 2; ++rank) {
        children[rank] = fork();
        if (children[rank] == 0) _exit(body(process_rank(*board, rank, 2)));
    }
    for (const pid_t child : children) {
        int status = 0;
        waitpid(child, &status, 0);
        EXPECT_TRUE(WIFEXITED(status)) << status;
        EXPECT_EQ(WEXITSTATUS(status), 0);
    }
    munmap(board, sizeof(Board));
}

TEST(HipPeerMemory, LetsProcessesAddressEachOtherByIpc) {
    in_two_processes([](const Bootstrap& bootstrap) {
        const gpu::ProcessWindow window(bootstrap, nullptr, 4096);
        if (!window.missing().empty() || window.bases().size() != 2) return 1;
        const int rank = bootstrap.rank, peer = 1 - rank;
        static_cast<int*>(window.bases()[static_cast<std::size_t>(peer)])[rank] = 40 + rank;
        int sent = 0;
        int both[2];
        bootstrap.all_gather_bytes(&sent, both, sizeof sent);
        const int found = static_cast<int*>(window.bases()[static_cast<std::size_t>(rank)])[peer];
        bootstrap.all_gather_bytes(&sent, both, sizeof sent);
        return found == 40 + peer ? 0 : 2;
    });
}

TEST(HipPeerMemory, SaysOnEveryRankWhyThereIsNone) {
    const Setting none("FAKE_HIP_NO_IPC", "1");
    in_two_processes([](const Bootstrap& bootstrap) {
        const gpu::ProcessWindow window(bootstrap, nullptr, 4096);
        return window.missing().find("rank 0 cannot address a peer's memory: hipIpcOpenMemHandle") == 0 ? 0 : 1;
    });
}

}  // namespace
}  // namespace latent_moe

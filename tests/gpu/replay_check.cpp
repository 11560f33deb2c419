// Replays captured tails by the thousand while their inputs, their sizes and the traffic beside them change, and compares
// every element of every result on the device with what the same tail gave in an eager call.
//
//     replay_check [ranks=2] [model=kimi-k3 | hidden=N latent=N] [replays=10000] [rare=100] [idle=SECONDS] [nccl] [late]
//                  [tokens=M,M,…] [tails=NAME,…]
//
// A graph a tail and size; a round replays the graphs of every size (those above 64 tokens in `rare` rounds of all) in an
// order drawn anew, so sizes grow, shrink and alternate, and graphs interleave. The first graph is captured and replayed
// before any eager call. `late`: now and then a rank comes up to 1 ms late. `nccl`: an all-reduce of NCCL's own runs all
// the while on every GPU. `idle`: at the end nothing happens for so long, then every graph is replayed once more. Exit
// status 0: nothing was wrong. The last lines are a table.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gpu/nccl_communicator.h"
#include "gpu/runtime/resources.h"
#include "latent_moe/latent_moe.h"
#include "ranks.h"
#include "replay_kernels.h"

using namespace latent_moe;
using gpu::check;
using test::devices;
using test::meet;
using test::same_everywhere;

namespace {

constexpr int input_sets = 3;
constexpr std::int64_t often_up_to = 64;

struct Wish {
    int world = 2;
    Shape shape{.hidden = 7168, .latent = 3584};
    std::string shape_name = "kimi-k3";
    int replays = 10'000;
    int rare = 100;
    int idle_seconds = 0;
    bool nccl = false;
    bool late = false;
    std::vector<std::int64_t> tokens = {0, 1, 2, 3, 5, 7, 8, 16, 17, 33, 64, 65, 128, 257, 1024, 4096};
    std::vector<std::string> tails;
};

struct Outcome {
    long replays = 0;
    unsigned long long wrong = 0;  ///< units of 16 bytes
    bool ranks_identical = true;
    bool first_graph_right = true;
};

/// All-reduces of 8 MB, one behind the other, until it goes out of scope.
class Traffic {
public:
    Traffic(const Bootstrap& boot, int device)
        : communicator_(boot, device, 60'000), data_(std::size_t{8} << 20, "traffic"), stream_(gpu::make_stream()) {
        // Ranks must enqueue equally many: rank 0 says when to stop, always some rounds ahead.
        thread_ = std::thread([this, device] {
            const gpu::CurrentDevice current(device);
            while (!stop_) {
                check(gpu::nccl().AllReduce(data_.get(), data_.get(), data_.bytes() / 2, ncclBfloat16, ncclMax,
                                            communicator_.get(), stream_.get()),
                      "ncclAllReduce");
                ++enqueued_;
                check(cudaStreamSynchronize(stream_.get()), "traffic");
                while (!stop_ && enqueued_ >= allowed_) std::this_thread::yield();
            }
        });
    }
    /// By all ranks, now and then: lets `more` all-reduces go.
    void allow(int more) { allowed_ += more; }
    ~Traffic() {
        while (enqueued_ < allowed_) std::this_thread::yield();
        stop_ = true;
        thread_.join();
    }

private:
    gpu::NcclCommunicator communicator_;
    gpu::DeviceMemory data_;
    gpu::Stream stream_;
    std::atomic<long> allowed_{1};
    std::atomic<long> enqueued_{0};
    std::atomic<bool> stop_{false};
    std::thread thread_;
};

class Graph {
public:
    template <typename Body>
    Graph(cudaStream_t stream, Body body) {
        check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
        body();
        cudaGraph_t graph = nullptr;
        check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
        check(cudaGraphInstantiate(&executable_, graph, 0), "cudaGraphInstantiate");
        check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    }
    Graph(Graph&& other) noexcept : executable_(std::exchange(other.executable_, nullptr)) {}
    ~Graph() {
        if (executable_ != nullptr) static_cast<void>(cudaGraphExecDestroy(executable_));
    }
    void launch(cudaStream_t stream) const { check(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch"); }

private:
    cudaGraphExec_t executable_ = nullptr;
};

class RankCheck {
public:
    RankCheck(const Wish& wish, const Bootstrap& boot)
        : wish_(wish),
          boot_(boot),
          device_(boot.rank % devices()),
          current_(device_),
          most_(*std::ranges::max_element(wish.tokens)),
          context_(Context::create(wish.shape, boot,
                                   {.backend = "cuda",
                                    .capacity_tokens = 128,
                                    .max_tokens = std::max<std::int64_t>(1, most_),
                                    .timeout_ms = 20'000,
                                    .keep_whole_weights = true,
                                    .cpu_threads = 1})),
          stream_(gpu::make_stream()),
          routed_(bytes(most_ * wish.shape.latent), "routed"),
          shared_(bytes(most_ * wish.shape.hidden), "shared"),
          out_(bytes(most_ * wish.shape.hidden), "out"),
          wrong_(16, "counter") {
        const DeviceMemory up(bytes(wish.shape.hidden * wish.shape.latent), "W_up");
        const DeviceMemory gamma(bytes(wish.shape.latent), "gamma");
        fill(up, 99);
        fill(gamma, 98);
        check(cudaStreamSynchronize(stream_.get()), "weights");
        layer_.push_back(context_.add_layer(7, {.data = up.get(), .rows = wish.shape.hidden, .scale = 1.0F / 64},
                                            wish.shape.norm == Norm::rms ? gamma.get() : nullptr));
        context_.seal();
        for (int set = 0; set < input_sets; ++set) {
            inputs_.push_back({DeviceMemory(routed_.bytes(), "inputs"), DeviceMemory(shared_.bytes(), "inputs")});
            fill(inputs_.back().routed, static_cast<std::uint32_t>(1000 * set + 2 * boot.rank));
            fill(inputs_.back().shared, static_cast<std::uint32_t>(1000 * set + 2 * boot.rank + 1));
        }
        check(cudaMemsetAsync(wrong_.get(), 0, wrong_.bytes(), stream_.get()), "counter");
        check(cudaStreamSynchronize(stream_.get()), "inputs");
    }

    void run(std::map<std::string, Outcome>& outcomes) {
        for (int index = 0; index < tail_count; ++index) {
            const Tail tail = static_cast<Tail>(index);
            if (!wish_.tails.empty() && std::ranges::find(wish_.tails, name(tail)) == wish_.tails.end()) continue;
            check_tail(tail, outcomes);
        }
    }

private:
    using DeviceMemory = gpu::DeviceMemory;
    struct Inputs {
        DeviceMemory routed, shared;
    };
    /// One size of one tail.
    struct Size {
        std::int64_t tokens;
        Graph graph;
        DeviceMemory first;  ///< of the graph, before any eager call
        std::vector<DeviceMemory> expected;
    };

    std::size_t bytes(std::int64_t elements) const {
        return std::max<std::size_t>(64, static_cast<std::size_t>(elements) * 2);
    }
    void fill(const DeviceMemory& memory, std::uint32_t seed) const {
        check(test::draw_bf16(memory.get(), static_cast<std::int64_t>(memory.bytes() / 2), seed, stream_.get()), "draw");
    }
    std::int64_t out_bytes(std::int64_t tokens) const { return tokens * wish_.shape.hidden * 2; }

    void take_inputs(int set, std::int64_t tokens) const {
        const Inputs& from = inputs_[static_cast<std::size_t>(set)];
        const auto copy = [&](const DeviceMemory& to, const DeviceMemory& source, std::int64_t width) {
            check(cudaMemcpyAsync(to.get(), source.get(), static_cast<std::size_t>(tokens * width) * 2,
                                  cudaMemcpyDeviceToDevice, stream_.get()),
                  "inputs");
        };
        copy(routed_, from.routed, wish_.shape.latent);
        copy(shared_, from.shared, wish_.shape.hidden);
        check(cudaMemsetAsync(out_.get(), 0xff, static_cast<std::size_t>(out_bytes(tokens)), stream_.get()), "poison");
    }
    void call(Tail tail, std::int64_t tokens) const {
        const Status status = layer_.front().run(
            tail, {.routed = {routed_.get()}, .shared = {shared_.get()}, .tokens = tokens}, {out_.get()}, stream_.get());
        if (!status.ok()) throw Error(status.code(), status.message());
    }
    void compare(const DeviceMemory& expected, std::int64_t tokens) const {
        check(test::count_differences(out_.get(), expected.get(), out_bytes(tokens),
                                      reinterpret_cast<unsigned long long*>(wrong_.get()), stream_.get()),
              "compare");
    }
    unsigned long long wrong_so_far(const std::string& where) const {
        check(cudaStreamSynchronize(stream_.get()), where.c_str());
        if (const auto fault = context_.poll_fault())
            throw Error(StatusCode::internal, fmt::format("{}: {}", where, fault->message));
        unsigned long long wrong = 0;
        check(cudaMemcpy(&wrong, wrong_.get(), sizeof wrong, cudaMemcpyDeviceToHost), "counter");
        return wrong;
    }

    void check_tail(Tail tail, std::map<std::string, Outcome>& outcomes) {
        std::vector<Size> sizes;
        Outcome outcome;
        const unsigned long long before = wrong_so_far(name(tail));
        for (const std::int64_t tokens : wish_.tokens) {
            const Plan plan = context_.plan(tokens);
            const auto runs_tail = [&](const Candidate& each) { return each.tail == tail; };
            if (std::none_of(plan.candidates.begin(), plan.candidates.end(), runs_tail)) continue;
            // Memory comes and goes only while no rank waits for another: freeing waits for the GPU, which ranks may share.
            meet(boot_);
            const std::size_t most_bytes = bytes(out_bytes(tokens) / 2);
            Size size{
                tokens, Graph(stream_.get(), [&] { call(tail, tokens); }), DeviceMemory(most_bytes, "first result"), {}};
            for (int set = 0; set < input_sets; ++set) size.expected.emplace_back(most_bytes, "expected");
            meet(boot_);
            take_inputs(0, tokens);
            size.graph.launch(stream_.get());
            check(cudaMemcpyAsync(size.first.get(), out_.get(), static_cast<std::size_t>(out_bytes(tokens)),
                                  cudaMemcpyDeviceToDevice, stream_.get()),
                  "first result");
            for (int set = 0; set < input_sets; ++set) {
                take_inputs(set, tokens);
                call(tail, tokens);
                const DeviceMemory& expected = size.expected[static_cast<std::size_t>(set)];
                check(cudaMemcpyAsync(expected.get(), out_.get(), static_cast<std::size_t>(out_bytes(tokens)),
                                      cudaMemcpyDeviceToDevice, stream_.get()),
                      "expected");
                const std::uint64_t hash = hash_of(expected, out_bytes(tokens));
                outcome.ranks_identical &= same_everywhere(boot_, hash);
            }
            const auto same = [&] {
                return hash_of(size.first, out_bytes(tokens)) == hash_of(size.expected[0], out_bytes(tokens));
            };
            outcome.first_graph_right &= same();
            sizes.push_back(std::move(size));
        }
        if (sizes.empty()) return;

        std::vector<std::size_t> sequence(sizes.size());
        std::iota(sequence.begin(), sequence.end(), 0);
        std::mt19937 order(2026 + static_cast<unsigned>(tail));  // the same on every rank
        std::optional<Traffic> traffic;
        if (wish_.nccl) traffic.emplace(boot_, device_);
        const int every = std::max(1, wish_.replays / std::max(1, wish_.rare));
        for (int round = 0; round < wish_.replays; ++round) {
            std::shuffle(sequence.begin(), sequence.end(), order);
            for (const std::size_t which : sequence) {
                const Size& size = sizes[which];
                if (size.tokens > often_up_to && round % every != 0) continue;
                const int set = static_cast<int>(order() % input_sets);
                const auto late = static_cast<unsigned>(order());
                if (wish_.late && late % 64 == 0 &&
                    static_cast<int>(late / 64 % static_cast<unsigned>(boot_.world)) == boot_.rank)
                    std::this_thread::sleep_for(std::chrono::microseconds(late / 4096 % 1000));
                take_inputs(set, size.tokens);
                size.graph.launch(stream_.get());
                compare(size.expected[static_cast<std::size_t>(set)], size.tokens);
                ++outcome.replays;
            }
            if (round % 32 == 0) {
                if (traffic) traffic->allow(4);
                static_cast<void>(wrong_so_far(fmt::format("{} round {}", name(tail), round)));
            }
        }
        traffic.reset();
        if (wish_.idle_seconds > 0) {
            static_cast<void>(wrong_so_far(name(tail)));
            std::this_thread::sleep_for(std::chrono::seconds(wish_.idle_seconds));
            for (const Size& size : sizes) {
                take_inputs(1, size.tokens);
                size.graph.launch(stream_.get());
                compare(size.expected[1], size.tokens);
                ++outcome.replays;
            }
        }
        outcome.wrong = wrong_so_far(name(tail)) - before;
        std::vector<unsigned long long> all(static_cast<std::size_t>(boot_.world));
        boot_.all_gather_bytes(&outcome.wrong, all.data(), sizeof outcome.wrong);
        outcome.wrong = 0;
        for (const unsigned long long each : all) outcome.wrong += each;
        if (boot_.rank == 0) {
            outcomes[name(tail)] = outcome;
            fmt::print("{} tp{} {}: {} replays a rank, {} wrong units\n", wish_.shape_name, boot_.world, name(tail),
                       outcome.replays, outcome.wrong);
            std::fflush(stdout);
        }
    }

    std::uint64_t hash_of(const DeviceMemory& memory, std::int64_t count) const {
        std::vector<std::uint64_t> host(static_cast<std::size_t>(count) / 8);
        check(cudaStreamSynchronize(stream_.get()), "hash");
        if (count > 0)
            check(cudaMemcpy(host.data(), memory.get(), static_cast<std::size_t>(count), cudaMemcpyDeviceToHost), "hash");
        std::uint64_t hash = 0xcbf29ce484222325U;
        for (const std::uint64_t word : host) hash = (hash ^ word) * 0x100000001b3U;
        return hash;
    }

    const Wish& wish_;
    const Bootstrap& boot_;
    int device_;
    gpu::CurrentDevice current_;
    std::int64_t most_;
    Context context_;
    gpu::Stream stream_;
    DeviceMemory routed_, shared_, out_, wrong_;
    std::vector<Layer> layer_;
    std::vector<Inputs> inputs_;
};

std::vector<std::string> words_of(const std::string& list) {
    std::vector<std::string> words;
    for (std::size_t at = 0; at <= list.size();) {
        const std::size_t comma = std::min(list.find(',', at), list.size());
        words.push_back(list.substr(at, comma - at));
        at = comma + 1;
    }
    return words;
}

Wish wish_of(int argc, char** argv) {
    Wish wish;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        const std::size_t equals = argument.find('=');
        const std::string key = argument.substr(0, equals);
        const std::string value = equals == std::string::npos ? "" : argument.substr(equals + 1);
        const auto number = [&] { return std::strtol(value.c_str(), nullptr, 10); };
        if (key == "ranks") {
            wish.world = static_cast<int>(number());
        } else if (key == "model") {
            const auto preset = shape_preset(value);
            if (!preset) throw Error(StatusCode::invalid_argument, fmt::format("model: {} is no preset", value));
            wish.shape = *preset, wish.shape_name = value;
        } else if (key == "hidden") {
            wish.shape.hidden = number(), wish.shape_name = "own shape";
        } else if (key == "latent") {
            wish.shape.latent = number(), wish.shape_name = "own shape";
        } else if (key == "replays") {
            wish.replays = static_cast<int>(number());
        } else if (key == "rare") {
            wish.rare = static_cast<int>(number());
        } else if (key == "idle") {
            wish.idle_seconds = static_cast<int>(number());
        } else if (key == "nccl") {
            wish.nccl = true;
        } else if (key == "late") {
            wish.late = true;
        } else if (key == "tokens") {
            wish.tokens.clear();
            for (const std::string& word : words_of(value)) wish.tokens.push_back(std::strtol(word.c_str(), nullptr, 10));
        } else if (key == "tails") {
            wish.tails = words_of(value);
        } else {
            throw Error(StatusCode::invalid_argument, fmt::format("unknown argument '{}'", argument));
        }
    }
    return wish;
}

}  // namespace

int main(int argc, char** argv) {
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);  // streams of ranks that share a GPU must not queue behind each other
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);       // this program's own kernels: loading one waits for ranks that wait
    int count = 0;
    if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
        fmt::print(stderr, "replay_check: no GPU here: {}\n", cudaGetErrorString(error));
        return 3;
    }
    try {
        const Wish wish = wish_of(argc, argv);
        if (wish.nccl && wish.world > count)
            throw Error(StatusCode::unavailable, "nccl needs a GPU a rank: NCCL refuses ranks that share one");
        std::map<std::string, Outcome> outcomes;
        const auto begin = std::chrono::steady_clock::now();
        run_thread_ranks(
            wish.world, [&](const Bootstrap& boot) { RankCheck(wish, boot).run(outcomes); }, 60'000);
        bool right = true;
        for (const auto& [tail, outcome] : outcomes) {
            const bool ok = outcome.wrong == 0 && outcome.ranks_identical && outcome.first_graph_right;
            right &= ok;
            fmt::print("{:<4} {} tp{:<3}{:<16} {:>8} replays  {} wrong units, ranks {}, first graph {}\n", ok ? "ok" : "BAD",
                       wish.shape_name, wish.world, tail, outcome.replays, outcome.wrong,
                       outcome.ranks_identical ? "identical" : "DIFFER", outcome.first_graph_right ? "right" : "WRONG");
        }
        fmt::print("{} in {:.1f} s\n", right ? "all passed" : "FAILED",
                   std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
        return right ? 0 : 1;
    } catch (const std::exception& error) {
        fmt::print("FAIL replay_check: {}\n", error.what());
        return 1;
    }
}

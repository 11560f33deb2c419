// The self-check on a GPU: silent where nothing is wrong, and seen within its period where a packed weight, an output or a
// mailbox is damaged. Ranks are threads of this process, one GPU each or several on one.
//
//     self_check [ranks=2] [only=TEXT] [cost]
//
// Damage comes from outside the library: a weight is changed between calls; into the captured graph of a call this program
// puts a node that changes a byte of the output in front of the check, or a byte of the rank's mailboxes in front of the
// tail. `cost` times graphs of calls without the check, with it never due, and always due. Exit status 0: all passed.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "context/context_access.h"
#include "core/synthetic.h"
#include "gpu/packed_layer.h"
#include "gpu/runtime/resources.h"
#include "latent_moe/latent_moe.h"
#include "ranks.h"

using namespace latent_moe;
using gpu::check;
using test::devices;
using test::meet;

namespace {

std::mutex print_mutex;
int failures = 0;
int passed = 0;
std::string folder;

void say(const std::string& text) {
    const std::lock_guard lock(print_mutex);
    fmt::print("{}\n", text);
    std::fflush(stdout);
}

void expect(bool right, const std::string& text) {
    {
        const std::lock_guard lock(print_mutex);
        right ? ++passed : ++failures;
    }
    if (!right) say("FAIL " + text);
}

bool any(const Bootstrap& boot, bool mine) {
    const char value = mine ? 1 : 0;
    std::vector<char> all(static_cast<std::size_t>(boot.world));
    boot.all_gather_bytes(&value, all.data(), 1);
    return std::ranges::count(all, 1) > 0;
}

struct Case {
    std::string name;
    Shape shape{.hidden = 1024, .latent = 512};
    SharedState shared = SharedState::partial;
    bool sequence_parallel = false;
    std::int64_t max_tokens = 300;
    Dtype weights = Dtype::bf16;
};

/// One rank's context of one layer, with inputs on the device.
class Rank {
public:
    Rank(const Case& c, const Bootstrap& boot, std::int64_t period)
        : boot_(boot), case_(c), device_(boot.rank % devices()), stream_(gpu::make_stream()) {
        Options options{.backend = "cuda", .max_tokens = c.max_tokens, .timeout_ms = 5000, .keep_whole_weights = true};
        options.shared = c.shared;
        options.sequence_parallel = c.sequence_parallel;
        options.self_check_period = period;
        options.self_check_folder = folder;
        options.cpu_threads = 1;
        context_.emplace(Context::create(c.shape, boot, options));
        const Shape& s = c.shape;
        std::vector<std::byte> weights(static_cast<std::size_t>(s.hidden * s.latent) * bytes_of(c.weights));
        fill_normal({weights.data(), s.hidden, s.latent, s.latent, c.weights}, draw_key(7, Draw::weights, 0),
                    1.0F / std::sqrt(static_cast<float>(s.latent)));
        std::vector<std::byte> gamma(static_cast<std::size_t>(s.latent) * bytes_of(s.activations));
        fill_normal({gamma.data(), 1, s.latent, s.latent, s.activations}, draw_key(7, Draw::gamma, 0), 0.1F, 1.0F);
        layer_.emplace(context_->add_layer(7, {.data = weights.data(), .rows = s.hidden, .dtype = c.weights},
                                           s.norm == Norm::rms ? gamma.data() : nullptr));
        context_->seal();
        const bool reduced = c.shared == SharedState::reduced;
        routed_ = upload(s.latent, [&](Matrix m) { fill_partial(m, draw_key(3, Draw::routed, 0), boot.rank, boot.world); });
        shared_ = upload(s.hidden, [&](Matrix m) {
            fill_partial(m, draw_key(3, Draw::shared, 0), reduced ? 0 : boot.rank, reduced ? 1 : boot.world);
        });
        prefix_ = upload(s.hidden, [&](Matrix m) { fill_normal(m, draw_key(3, Draw::prefix, 0), 1); });
        out_ = upload(s.hidden, [](Matrix) {});
    }

    Context& context() { return *context_; }
    cudaStream_t stream() const { return stream_.get(); }
    std::byte* out() const { return out_.get(); }
    std::int64_t row_bytes() const {
        return case_.shape.hidden * static_cast<std::int64_t>(bytes_of(case_.shape.activations));
    }

    Status run(Tail tail, std::int64_t tokens, bool prefix_in_out) {
        TailInput input{.routed = {routed_.get()}, .tokens = tokens};
        if (case_.shared != SharedState::absent) input.shared = {shared_.get()};
        const std::int64_t first = case_.sequence_parallel ? context_->own_tokens(tokens, boot_.rank).first : 0;
        std::byte* prefix = prefix_.get() + first * row_bytes();
        if (prefix_in_out && tokens > 0 && !case_.sequence_parallel) {
            check(cudaMemcpyAsync(out_.get(), prefix, static_cast<std::size_t>(tokens * row_bytes()),
                                  cudaMemcpyDeviceToDevice, stream()),
                  "prefix");
            prefix = out_.get();
        }
        input.prefix = {prefix};
        return layer_->run(tail, input, {out_.get()}, stream());
    }

    std::string wait() {
        check(cudaStreamSynchronize(stream()), "calls");
        const auto fault = context_->poll_fault();
        return fault ? fault->message : "";
    }

private:
    template <typename Fill>
    gpu::DeviceMemory upload(std::int64_t columns, Fill fill) const {
        const Dtype dtype = case_.shape.activations;
        std::vector<std::byte> host(static_cast<std::size_t>(case_.max_tokens * columns) * bytes_of(dtype));
        fill(Matrix{host.data(), case_.max_tokens, columns, columns, dtype});
        gpu::DeviceMemory memory(host.size(), "a test's tensor");
        check(cudaMemcpy(memory.get(), host.data(), host.size(), cudaMemcpyHostToDevice), "upload");
        return memory;
    }

    Bootstrap boot_;
    Case case_;
    gpu::CurrentDevice device_;
    gpu::Stream stream_;
    std::optional<Context> context_;
    std::optional<Layer> layer_;
    gpu::DeviceMemory routed_;
    gpu::DeviceMemory shared_;
    gpu::DeviceMemory prefix_;
    gpu::DeviceMemory out_;
};

/// What `body` enqueues, as a graph that may be changed before it runs.
class Graph {
public:
    template <typename Body>
    Graph(cudaStream_t stream, Body body) : stream_(stream) {
        check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
        body();
        check(cudaStreamEndCapture(stream, &graph_), "cudaStreamEndCapture");
        std::size_t count = 0;
        check(cudaGraphGetNodes(graph_, nullptr, &count), "cudaGraphGetNodes");
        nodes_.resize(count);
        check(cudaGraphGetNodes(graph_, nodes_.data(), &count), "cudaGraphGetNodes");
    }
    ~Graph() {
        if (executable_ != nullptr) static_cast<void>(cudaGraphExecDestroy(executable_));
        if (graph_ != nullptr) static_cast<void>(cudaGraphDestroy(graph_));
    }
    Graph(const Graph&) = delete;

    std::size_t size() const { return nodes_.size(); }

    /// Sets a byte between two of the captured nodes, which follow one another, some times over.
    void set_bytes(std::size_t after, const std::vector<std::byte*>& places, int value, int times) {
        std::vector<cudaGraphNode_t> last = {nodes_[after]};
        for (int time = 0; time < times; ++time) {
            for (std::byte* place : places) {
                cudaMemsetParams params{};
                params.dst = place;
                params.value = static_cast<unsigned>(value);
                params.elementSize = 1;
                params.width = 1;
                params.height = 1;
                cudaGraphNode_t node = nullptr;
                check(cudaGraphAddMemsetNode(&node, graph_, last.data(), 1, &params), "cudaGraphAddMemsetNode");
                last = {node};
            }
        }
#if CUDART_VERSION >= 13000
        check(cudaGraphAddDependencies(graph_, last.data(), &nodes_[after + 1], nullptr, 1), "cudaGraphAddDependencies");
#else
        check(cudaGraphAddDependencies(graph_, last.data(), &nodes_[after + 1], 1), "cudaGraphAddDependencies");
#endif
    }
    void prepare() {
        check(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
    }
    void launch() {
        check(cudaGraphLaunch(executable_, stream_), "cudaGraphLaunch");
    }

private:
    cudaStream_t stream_;
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t executable_ = nullptr;
    std::vector<cudaGraphNode_t> nodes_;
};

std::vector<Tail> tails_of(const Context& context, std::int64_t tokens) {
    std::vector<Tail> tails;
    for (const Candidate& each : context.plan(tokens).candidates) tails.push_back(each.tail);
    return tails;
}

void silent(const Case& c, const Bootstrap& boot) {
    Rank rank(c, boot, 1);
    std::uint64_t calls = 0;
    std::string tried;
    for (const std::int64_t tokens : {0, 1, 8, 40, 300}) {
        if (tokens > c.max_tokens) continue;
        for (const Tail tail : tails_of(rank.context(), tokens)) {
            const Status status = rank.run(tail, tokens, tokens == 8);
            ++calls;
            const std::string fault = rank.wait();
            meet(boot);
            expect(status.ok() && fault.empty(), fmt::format("{}: {} M={} rank {}: {} {}", c.name, name(tail), tokens,
                                                             boot.rank, status.message(), fault));
            if (!fault.empty()) return;
            if (tokens == 1) tried += fmt::format(" {}", name(tail));
        }
    }
    expect(rank.context().counters().self_checks == calls,
           fmt::format("{}: {} checks of {} calls", c.name, rank.context().counters().self_checks, calls));
    if (boot.rank == 0) say(fmt::format("ok   {}: nothing found in {} calls, all checked:{}", c.name, calls, tried));
}

void replayed(const Case& c, const Bootstrap& boot) {
    constexpr int period = 4;
    constexpr int replays = 40;
    Rank rank(c, boot, period);
    const Tail tail = rank.context().plan(8).tail;
    Graph graph(rank.stream(), [&] { static_cast<void>(rank.run(tail, 8, false)); });
    graph.prepare();
    for (int each = 0; each < replays; ++each) graph.launch();
    const std::string fault = rank.wait();
    const std::uint64_t checks = rank.context().counters().self_checks;
    expect(fault.empty() && checks == replays / period,
           fmt::format("{}: {} checks in {} replays, {}", c.name, checks, replays, fault));
    if (boot.rank == 0) say(fmt::format("ok   {}: {} replayed {} times, {} checked", c.name, name(tail), replays, checks));
}

enum class Damage { none, weight, output, mailbox };

/// The upper byte of the first element of each of the three slots of the main lane, the side lane and the fused tail, of a
/// context that has made no call.
std::vector<std::vector<std::byte*>> mailbox_bytes(const Context& context) {
    const std::span<std::byte> window = ContextAccess::backend(context).peer_window();
    std::vector<std::byte> copy(window.size());
    check(cudaMemcpy(copy.data(), window.data(), copy.size(), cudaMemcpyDeviceToHost), "download");
    std::vector<std::vector<std::byte*>> found;
    const auto armed = [&](std::size_t at) { return copy[at] == std::byte{0} && copy[at + 1] == std::byte{0x80}; };
    for (std::size_t at = 0; at + 4096 <= copy.size(); at += 2) {
        std::size_t end = at;
        while (end + 2 <= copy.size() && armed(end)) end += 2;
        if (end - at >= 4096) {  // three slots, one behind the other
            found.emplace_back();
            for (std::size_t slot = 0; slot < 3; ++slot)
                found.back().push_back(window.data() + at + slot * ((end - at) / 3) + 1);
        }
        at = end;
    }
    return found;
}

/// The last rank is damaged. Returns the replay in which a fault showed on some rank, from 1; 0: none did.
struct Seen {
    int replay = 0;
    std::string message;
    bool harmful = false;  ///< the output differs from that of the undamaged call
};

Seen damaged(const Case& c, const Bootstrap& boot, Tail tail, Damage damage, int period, std::size_t run) {
    constexpr std::int64_t tokens = 8;
    Rank rank(c, boot, period);
    const bool mine = boot.rank == boot.world - 1;
    const std::vector<std::vector<std::byte*>> mailboxes = mailbox_bytes(rank.context());
    Graph plain(rank.stream(), [&] { static_cast<void>(rank.run(tail, tokens, false)); });
    plain.prepare();
    plain.launch();
    if (const std::string fault = rank.wait(); !fault.empty()) return {.replay = -1, .message = fault};
    std::vector<std::byte> right(static_cast<std::size_t>(tokens * rank.row_bytes()));
    std::vector<std::byte> out(right.size());
    check(cudaMemcpy(right.data(), rank.out(), right.size(), cudaMemcpyDeviceToHost), "download");
    // From the call that was just checked on, the next check is `period` calls away: the worst case.
    Graph graph(rank.stream(), [&] { static_cast<void>(rank.run(tail, tokens, false)); });
    if (damage == Damage::weight && mine) {
        auto& layer = dynamic_cast<gpu::GpuPackedLayer&>(ContextAccess::packed_layer(rank.context(), 0));
        std::byte* at = const_cast<std::byte*>(layer.weights(WeightPart::shard).packed) + 4;
        std::byte value{};
        check(cudaMemcpy(&value, at, 1, cudaMemcpyDeviceToHost), "download");
        value ^= std::byte{1};  // the lowest bit of a mantissa
        check(cudaMemcpy(at, &value, 1, cudaMemcpyHostToDevice), "upload");
    }
    if (damage == Damage::output && mine) {
        // The top of an exponent, in a column that this rank checks.
        const std::int64_t column = c.shape.hidden / boot.world * boot.rank + 5;
        graph.set_bytes(graph.size() - 2, {rank.out() + 2 * rank.row_bytes() + column * 2 + 1}, 0x7e, 1);
    }
    if (damage == Damage::mailbox && mine) {
        if (run < mailboxes.size()) graph.set_bytes(0, mailboxes[run], 0xc0, 8);
    }
    graph.prepare();
    meet(boot);
    Seen seen;
    for (int replay = 1; replay <= 2 * period + 3 && seen.replay == 0; ++replay) {
        graph.launch();
        const std::string fault = rank.wait();
        check(cudaMemcpy(out.data(), rank.out(), out.size(), cudaMemcpyDeviceToHost), "download");
        seen.harmful = any(boot, out != right) || seen.harmful;
        if (!any(boot, !fault.empty())) continue;
        if (fault.empty()) graph.launch();  // what a rank is told it says from its next call on
        seen = {.replay = replay, .message = rank.wait(), .harmful = seen.harmful};
    }
    expect(seen.replay == 0 || !any(boot, seen.message.empty()),
           fmt::format("{}: a rank knows nothing of the fault that another has", name(tail)));
    const Status later = rank.run(tail, tokens, false);
    expect(seen.replay == 0 || later.code() == StatusCode::aborted, fmt::format("{}: it goes on", name(tail)));
    meet(boot);
    return seen;
}

void cost(const Case& c, const Bootstrap& boot) {
    constexpr int calls = 12;
    for (const std::int64_t tokens : {1, 8, 16, 64}) {
        std::string line = fmt::format("cost {} M={}, us a call:", c.name, tokens);
        for (const std::int64_t period : {0, 1 << 30, 1}) {
            Rank rank(c, boot, period);
            const Tail tail = rank.context().plan(tokens).tail;
            Graph graph(rank.stream(), [&] {
                for (int call = 0; call < calls; ++call) static_cast<void>(rank.run(tail, tokens, false));
            });
            graph.prepare();
            const gpu::Event begin = gpu::make_event(true);
            const gpu::Event end = gpu::make_event(true);
            std::vector<float> times;
            graph.launch();
            for (int each = 0; each < 15; ++each) {
                meet(boot);
                check(cudaEventRecord(begin.get(), rank.stream()), "cudaEventRecord");
                graph.launch();
                check(cudaEventRecord(end.get(), rank.stream()), "cudaEventRecord");
                if (const std::string fault = rank.wait(); !fault.empty()) throw Error(StatusCode::internal, fault);
                float ms = 0;
                check(cudaEventElapsedTime(&ms, begin.get(), end.get()), "cudaEventElapsedTime");
                times.push_back(ms * 1000 / calls);
            }
            std::ranges::sort(times);
            line += fmt::format("  {} {:.1f}", period == 0 ? "off" : period == 1 ? "always" : "never due", times[7]);
        }
        if (boot.rank == 0) say(line);
    }
}

}  // namespace

int main(int argc, char** argv) {
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    int count = 0;
    if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
        fmt::print(stderr, "self_check: no GPU here: {}\n", cudaGetErrorString(error));
        return 3;
    }
    folder = std::filesystem::temp_directory_path() / "latent-moe-self-check";
    std::filesystem::create_directory(folder);
    int world = 2;
    std::string only;
    bool costs = false;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        if (argument.starts_with("ranks=")) world = std::stoi(argument.substr(6));
        if (argument.starts_with("only=")) only = argument.substr(5);
        if (argument == "cost") costs = true;
    }
    const auto on_ranks = [&](int ranks, const std::string& what, const std::function<void(const Bootstrap&)>& body) {
        if (what.find(only) == std::string::npos) return;
        try {
            run_thread_ranks(ranks, body, 20'000);
        } catch (const std::exception& error) {
            expect(false, fmt::format("{}: {}", what, error.what()));
        }
    };

    std::vector<Case> cases;
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
        Case c{.name = fmt::format("silent {}", name(dtype)), .weights = dtype};
        c.shape.activations = dtype;
        cases.push_back(c);
    }
    cases.push_back({.name = "silent no norm", .shape = {.hidden = 1024, .latent = 512, .norm = Norm::none}});
    cases.push_back({.name = "silent shared reduced", .shared = SharedState::reduced});
    cases.push_back({.name = "silent no shared", .shared = SharedState::absent});
    cases.push_back({.name = "silent sequence-parallel", .sequence_parallel = true});
    cases.push_back({.name = "silent max 64", .max_tokens = 64});
    cases.push_back({.name = "silent f32 weights", .weights = Dtype::f32});
    cases.back().shape.routed_scale = 2.5F;
    for (const Case& c : cases) {
        for (const int ranks : {1, world, 3}) {
            if (ranks == 3 && c.shape.hidden % 3 != 0 && c.name != "silent bf16") continue;
            Case named = c;
            named.name += fmt::format(" tp{}", ranks);
            on_ranks(ranks, named.name, [&](const Bootstrap& boot) { silent(named, boot); });
        }
    }
    on_ranks(world, "replayed", [&](const Bootstrap& boot) { replayed({.name = "replayed"}, boot); });

    constexpr int period = 4;
    const Case small{.name = "damage", .max_tokens = 64};
    const auto story = [&](Tail tail, Damage damage, const char* what, std::size_t run, bool must_harm) {
        const std::string title = fmt::format("damage {} {}", what, name(tail));
        on_ranks(world, title, [&](const Bootstrap& boot) {
            const Seen seen = damaged(small, boot, tail, damage, period, run);
            const bool right = seen.replay >= 1 && seen.replay <= period;
            const bool harmless = !must_harm && seen.replay == 0 && !seen.harmful;
            expect(right || harmless,
                   fmt::format("{}: seen in replay {} of {}: {}", title, seen.replay, period, seen.message));
            if (boot.rank == boot.world - 1) {
                say(harmless ? fmt::format("--   {}: nobody reads that word", title)
                             : fmt::format("{} {}: seen in call {} (period {}): {}", right ? "ok  " : "??  ", title,
                                           seen.replay, period, seen.message));
            }
        });
    };
    for (const Tail tail : {Tail::replicated, Tail::overlap, Tail::column_parallel, Tail::token_parallel, Tail::fused}) {
        story(tail, Damage::weight, "weight", 0, true);
        story(tail, Damage::output, "output", 0, true);
        for (std::size_t run = 0; run < 3; ++run) {
            const char* const names[] = {"mailbox-main", "mailbox-side", "mailbox-fused"};
            story(tail, Damage::mailbox, names[run], run, false);
        }
    }
    if (costs) {
        const Case kimi{.name = "kimi-k3", .shape = *shape_preset("kimi-k3"), .max_tokens = 64};
        for (const int ranks : {1, world}) {
            Case named = kimi;
            named.name += fmt::format(" tp{}", ranks);
            on_ranks(ranks, named.name, [&](const Bootstrap& boot) { cost(named, boot); });
        }
    }
    std::filesystem::remove_all(folder);
    fmt::print("{} passed, {} failed\n", passed, failures);
    return failures == 0 ? 0 : 1;
}

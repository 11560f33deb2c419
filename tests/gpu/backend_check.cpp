// Checks and times whole tails on GPUs through the public API, against core/reference.h. Ranks are threads of this process,
// one GPU each or several on one; with MPI (backend_check_mpi under mpirun) they are processes.
//
//     backend_check [ranks=2,3,4,8] [only=TEXT] [check] [batches] [time]           default: check time
//
// `batches`: batch-invariant contexts, 1 to 130 and more tokens, rows compared bit by bit with those of the largest call.
//
// Every case: each tail that may run, each number of tokens; eager twice, then captured and replayed with inputs that
// change; ranks and repeats must agree in every bit. Exit status 0: all passed. The last lines are a table.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/numeric.h"
#include "core/reference.h"
#include "core/synthetic.h"
#include "gpu/runtime/resources.h"
#include "latent_moe/latent_moe.h"
#include "ranks.h"
#ifdef LATENT_MOE_CHECK_MPI
#include "latent_moe/mpi.h"
#endif

using namespace latent_moe;
using gpu::check;
using test::devices;
using test::meet;
using test::same_everywhere;

namespace {

struct Case {
    std::string name;
    Shape shape;
    int world = 2;
    std::vector<std::int64_t> tokens = {0, 1, 2, 3, 5, 7, 8, 16, 17, 33, 64, 65, 128, 257, 1024};
    Dtype weights = Dtype::bf16;
    bool row_scales = false;
    SharedState shared = SharedState::partial;
    bool sequence_parallel = false;
    bool strided = false;     ///< rows of inputs and outputs are not contiguous
    bool shard_only = false;  ///< ranks give their own rows of W_up; seal gathers the rest
    bool suspend = false;
    bool batch_invariant = false;
};

constexpr std::int64_t padding = 16;

std::mutex print_mutex;
int failures = 0;
std::vector<std::string> table;

void failed(const std::string& text) {
    const std::lock_guard lock(print_mutex);
    if (++failures <= 60) fmt::print("FAIL {}\n", text);
    std::fflush(stdout);
}

void require(const Status& status, const std::string& where) {
    if (!status.ok()) throw Error(status.code(), fmt::format("{}: {}", where, status.message()));
}

/// Rows on the host and on the device.
struct Tensor {
    std::int64_t rows, columns, stride;
    Dtype dtype;
    std::vector<std::byte> host;
    gpu::DeviceMemory device;

    Tensor(std::int64_t rows_, std::int64_t columns_, Dtype dtype_, bool strided = false)
        : rows(rows_),
          columns(columns_),
          stride(columns_ + (strided ? padding : 0)),
          dtype(dtype_),
          host(static_cast<std::size_t>(rows_ * stride) * bytes_of(dtype_) + 16),
          device(host.size(), "a test's tensor") {}

    Matrix view() { return {host.data(), rows, columns, stride, dtype}; }
    std::byte* data() const { return device.get(); }
    void upload(cudaStream_t stream) const {
        check(cudaMemcpyAsync(device.get(), host.data(), host.size(), cudaMemcpyHostToDevice, stream), "upload");
        check(cudaStreamSynchronize(stream), "upload");
    }
    void download(cudaStream_t stream) {
        check(cudaMemcpyAsync(host.data(), device.get(), host.size(), cudaMemcpyDeviceToHost, stream), "download");
        check(cudaStreamSynchronize(stream), "download");
    }
    void poison(cudaStream_t stream) const { check(cudaMemsetAsync(device.get(), 0xff, host.size(), stream), "poison"); }
    /// The rows alone, without what is between them.
    std::vector<std::byte> bits(std::int64_t count) {
        std::vector<std::byte> all;
        const Matrix m = view();
        for (std::int64_t row = 0; row < count; ++row) all.insert(all.end(), m.row(row), m.row(row) + m.row_bytes());
        return all;
    }
};

std::uint64_t hash_of(const std::vector<std::byte>& bytes) {
    std::uint64_t hash = 0xcbf29ce484222325U;
    for (const std::byte b : bytes) hash = (hash ^ static_cast<std::uint64_t>(b)) * 0x100000001b3U;
    return hash;
}

/// W_up of one layer, on the host.
struct Weights {
    std::vector<std::byte> data;
    std::vector<float> row_scales;
    std::vector<std::byte> gamma;
    Matrix view;

    Weights(const Case& c, std::uint64_t layer)
        : data(static_cast<std::size_t>(c.shape.hidden * c.shape.latent) * bytes_of(c.weights)),
          gamma(static_cast<std::size_t>(c.shape.latent) * bytes_of(c.shape.activations)),
          view{data.data(), c.shape.hidden, c.shape.latent, c.shape.latent, c.weights} {
        if (c.weights == Dtype::e4m3) {
            for (std::size_t i = 0; i < data.size(); ++i) {  // finite values of every size
                const auto bits = static_cast<std::uint8_t>((i * 2654435761U >> 11) + i * layer);
                data[i] = std::byte((bits & 0x7f) == 0x7f ? 0x31 : bits & 0xbf);
            }
        } else {
            fill_normal(view, draw_key(7, Draw::weights, layer), 1.0F / std::sqrt(static_cast<float>(c.shape.latent)));
        }
        if (c.row_scales) {
            for (std::int64_t row = 0; row < c.shape.hidden; ++row)
                row_scales.push_back(0.5F + static_cast<float>(row % 13) * 0.1F);
        }
        fill_normal({gamma.data(), 1, c.shape.latent, c.shape.latent, c.shape.activations}, draw_key(7, Draw::gamma, layer),
                    0.1F, 1.0F);
    }

    Layer add_to(Context& context, const Case& c, std::int64_t id) const {
        const std::int64_t rows = c.shard_only ? c.shape.hidden / context.world() : c.shape.hidden;
        const std::int64_t first = c.shard_only ? rows * context.rank() : 0;
        return context.add_layer(id,
                                 {.data = view.row(first),
                                  .rows = rows,
                                  .dtype = c.weights,
                                  .scale = c.weights == Dtype::e4m3 ? 0.01F : 1.0F,
                                  .row_scales = row_scales.empty() ? nullptr : row_scales.data() + first},
                                 c.shape.norm == Norm::rms ? gamma.data() : nullptr);
    }
};

struct Reference {
    std::vector<double> exact;
    double chain_error = 0;
};

/// One number of tokens of one case: its inputs on every rank, and what should come out. Made by rank 0 for all threads.
Reference reference_of(const Case& c, const Weights& weights, std::int64_t tokens, bool with_prefix, std::uint64_t seed) {
    std::vector<std::vector<std::byte>> memory;
    const auto draw = [&](std::int64_t columns) {
        memory.emplace_back(static_cast<std::size_t>(tokens * columns) * bytes_of(c.shape.activations) + 16);
        return Matrix{memory.back().data(), tokens, columns, columns, c.shape.activations};
    };
    ReferenceInput input{.shape = c.shape, .weights = weights.view, .weight_scale = c.weights == Dtype::e4m3 ? 0.01F : 1.0F};
    for (int rank = 0; rank < c.world; ++rank) {
        const Matrix routed = draw(c.shape.latent);
        fill_partial(routed, draw_key(seed, Draw::routed, 0), rank, c.world);
        input.routed.push_back(routed);
        if (c.shared == SharedState::absent || (c.shared == SharedState::reduced && rank > 0)) continue;
        const Matrix shared = draw(c.shape.hidden);
        fill_partial(shared, draw_key(seed, Draw::shared, 0), c.shared == SharedState::reduced ? 0 : rank,
                     c.shared == SharedState::reduced ? 1 : c.world);
        input.shared.push_back(shared);
    }
    if (with_prefix) {
        const Matrix prefix = draw(c.shape.hidden);
        fill_normal(prefix, draw_key(seed, Draw::prefix, 0), 1);
        input.prefix = prefix;
    }
    if (!weights.row_scales.empty()) input.row_scales = weights.row_scales.data();
    if (c.shape.norm == Norm::rms) input.gamma = weights.gamma.data();
    Reference reference{.exact = reference_tail(input)};
    if (tokens > 0) reference.chain_error = relative_l2(chain_tail(input), reference.exact);
    return reference;
}

class Graph {
public:
    Graph() = default;
    /// All ranks capture before any instantiates: a capture in global mode forbids other threads much.
    template <typename Body>
    Graph(const Bootstrap& boot, cudaStream_t stream, cudaStreamCaptureMode mode, Body body) {
        meet(boot);
        check(cudaStreamBeginCapture(stream, mode), "cudaStreamBeginCapture");
        body();
        check(cudaStreamEndCapture(stream, &graph_), "cudaStreamEndCapture");
        meet(boot);
        check(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
    }
    ~Graph() {
        if (executable_ != nullptr) static_cast<void>(cudaGraphExecDestroy(executable_));
        if (graph_ != nullptr) static_cast<void>(cudaGraphDestroy(graph_));
    }
    Graph(const Graph&) = delete;
    void launch(cudaStream_t stream) const { check(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch"); }

private:
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t executable_ = nullptr;
};

struct Outcome {
    int cases = 0;
    int refused = 0;
    double worst_ratio = 0;  // of our error to the chain's
    double worst_error = 0;
    double milliseconds = 0;
};

/// What all ranks of a case share in one process; with MPI every rank has its own and only rank 0's counts.
struct Shared {
    std::map<std::pair<std::int64_t, std::uint64_t>, Reference> references;
    std::map<std::string, Outcome> outcomes;  // by tail; rank 0 writes
    std::vector<Weights> weights;
};

void check_rank(const Case& c, const Bootstrap& boot, Shared& shared) {
    const gpu::CurrentDevice device(boot.rank % devices());
    Options options{.backend = "cuda",
                    .max_tokens = std::max<std::int64_t>(1, c.tokens.back()),
                    .timeout_ms = 8000,
                    .keep_whole_weights = true};
    options.shared = c.shared;
    options.sequence_parallel = c.sequence_parallel;
    options.cpu_threads = 1;
    Context context = Context::create(c.shape, boot, options);
    std::vector<Layer> layers;
    for (std::size_t i = 0; i < shared.weights.size(); ++i)
        layers.push_back(shared.weights[i].add_to(context, c, static_cast<std::int64_t>(10 + i)));
    context.seal();
    if (boot.rank == 0) {
        fmt::print("{}: weights {:.1f} MB, workspace {:.1f} MB\n", c.name, static_cast<double>(context.weight_bytes()) / 1e6,
                   static_cast<double>(context.workspace_bytes()) / 1e6);
        std::fflush(stdout);
    }
    if (c.suspend) {
        context.suspend();
        context.resume();
    }

    const gpu::Stream stream_owner = gpu::make_stream();
    const cudaStream_t stream = stream_owner.get();
    const Dtype dtype = c.shape.activations;
    for (std::size_t index = 0; index < c.tokens.size(); ++index) {
        const std::int64_t tokens = c.tokens[index];
        const bool with_prefix = index % 2 == 1;
        const bool prefix_is_out = index % 4 == 3 && !c.sequence_parallel;
        const bool consume = index % 3 == 2;
        const Layer& layer = layers[index % layers.size()];
        const Weights& weights = shared.weights[index % layers.size()];
        const TokenRange own = c.sequence_parallel ? context.own_tokens(tokens, boot.rank) : TokenRange{0, tokens};

        Tensor routed(tokens, c.shape.latent, dtype, c.strided);
        Tensor partial(tokens, c.shape.hidden, dtype, c.strided);
        Tensor prefix(own.count, c.shape.hidden, dtype, c.strided);
        Tensor out(own.count, c.shape.hidden, dtype, c.strided);
        const auto draw = [&](std::uint64_t seed) {
            fill_partial(routed.view(), draw_key(seed, Draw::routed, 0), boot.rank, c.world);
            const bool reduced = c.shared == SharedState::reduced;
            fill_partial(partial.view(), draw_key(seed, Draw::shared, 0), reduced ? 0 : boot.rank, reduced ? 1 : c.world);
            fill_normal(prefix.view(), draw_key(seed, Draw::prefix, 0), 1, 0, own.first);
        };
        const auto upload = [&] {
            routed.upload(stream);
            partial.upload(stream);
            prefix.upload(stream);
            out.poison(stream);
            if (prefix_is_out) {
                check(cudaMemcpyAsync(out.data(), prefix.data(), prefix.host.size(), cudaMemcpyDeviceToDevice, stream),
                      "prefix");
            }
            check(cudaStreamSynchronize(stream), "inputs");
        };
        const auto reference = [&](std::uint64_t seed) -> const Reference& {
            if (boot.rank == 0 && !shared.references.contains({tokens, seed})) {
                shared.references[{tokens, seed}] = reference_of(c, weights, tokens, with_prefix, seed);
            }
            meet(boot);
            return shared.references[{tokens, seed}];
        };

        for (int which = 0; which < tail_count; ++which) {
            const auto tail = static_cast<Tail>(which);
            const Plan plan = context.plan(tokens);
            Outcome ours;
            if (!std::ranges::any_of(plan.candidates, [&](const Candidate& candidate) { return candidate.tail == tail; })) {
                if (boot.rank == 0) ++shared.outcomes[name(tail)].refused;
                continue;
            }
            const std::string where = fmt::format("{} {} M={}", c.name, name(tail), tokens);
            const auto run = [&] {
                const auto began = std::chrono::steady_clock::now();
                TailInput input{.routed = {routed.data(), routed.stride}, .tokens = tokens, .consume_shared = consume};
                if (c.shared != SharedState::absent) input.shared = {partial.data(), partial.stride};
                if (with_prefix)
                    input.prefix =
                        prefix_is_out ? ConstRows(out.data(), out.stride) : ConstRows(prefix.data(), prefix.stride);
                require(layer.run(tail, input, {out.data(), out.stride}, stream), where);
                // A call only enqueues. If it took long, a launch had to wait for the device, which may be waiting for it.
                const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
                if (took > 0.2) failed(fmt::format("{}: the call itself took {:.1f} s on rank {}", where, took, boot.rank));
            };
            const auto result = [&] {
                check(cudaStreamSynchronize(stream), where.c_str());
                if (const auto fault = context.poll_fault())
                    throw Error(StatusCode::internal, fmt::format("{}: {}", where, fault->message));
                out.download(stream);
                return out.bits(own.count);
            };
            const auto judge = [&](std::uint64_t seed, const std::vector<std::byte>& bits, const char* how) {
                if (!c.sequence_parallel && !same_everywhere(boot, hash_of(bits)))
                    failed(fmt::format("{} {}: ranks differ", where, how));
                const Reference& expected = reference(seed);
                if (expected.exact.empty() || own.count == 0) return;  // no tokens, or the reference is another process's
                const auto from = expected.exact.begin() + own.first * c.shape.hidden;
                const double error = relative_l2(out.view(), std::vector<double>(from, from + own.count * c.shape.hidden));
                const double ratio = error / std::max(expected.chain_error, 1e-7);
                ours.worst_error = std::max(ours.worst_error, error);
                ours.worst_ratio = std::max(ours.worst_ratio, ratio);
                // late_reduce rounds every rank's product before the sum: that is the tail, not the backend.
                const double allowed = tail == Tail::late_reduce ? 1.2 + 0.05 * c.world : 1.2;
                if (!(error <= allowed * expected.chain_error + 2e-6)) {
                    failed(fmt::format("{} {}: rank {} error {:.3g}, chain {:.3g}", where, how, boot.rank, error,
                                       expected.chain_error));
                }
            };

            const auto begin = std::chrono::steady_clock::now();
            draw(1);
            upload();
            meet(boot);
            run();
            const std::vector<std::byte> first = result();
            judge(1, first, "eager");
            upload();
            meet(boot);
            run();
            if (result() != first) failed(fmt::format("{}: repeat differs on rank {}", where, boot.rank));

            // Captured with whatever lies in the inputs, replayed with others.
            const Graph graph(boot, stream, index % 2 == 0 ? cudaStreamCaptureModeThreadLocal : cudaStreamCaptureModeGlobal,
                              run);
            meet(boot);
            for (int replay = 0; replay < 3; ++replay) {
                const std::uint64_t seed = replay == 1 ? 2 : 1;
                draw(seed);
                upload();
                meet(boot);
                if (replay == 1 && boot.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // a late rank
                graph.launch(stream);
                const std::vector<std::byte> bits = result();
                if (replay == 1) {
                    judge(2, bits, "replayed");
                } else if (bits != first) {
                    failed(fmt::format("{}: replay {} differs from the eager call on rank {}", where, replay, boot.rank));
                }
            }
            meet(boot);
            if (boot.rank == 0) {
                Outcome& total = shared.outcomes[name(tail)];
                ++total.cases;
                total.worst_ratio = std::max(total.worst_ratio, ours.worst_ratio);
                total.worst_error = std::max(total.worst_error, ours.worst_error);
                total.milliseconds +=
                    std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
            }
        }
    }
    meet(boot);
}

/// How many rows have other bits than in a call of `most` tokens: calls of 1 to 130 and some more tokens, from both ends.
int rows_that_differ(const Case& c, const Weights& weights, const Bootstrap& boot, Tail tail, bool batch_invariant) {
    constexpr std::int64_t most = 1024;
    Options options{.backend = "cuda", .max_tokens = most, .timeout_ms = 8000, .keep_whole_weights = true, .tail = tail};
    options.batch_invariant = batch_invariant;
    options.cpu_threads = 1;
    Context context = Context::create(c.shape, boot, options);
    const Layer layer = weights.add_to(context, c, 3);
    context.seal();
    const gpu::Stream stream_owner = gpu::make_stream();
    const cudaStream_t stream = stream_owner.get();
    const Dtype dtype = c.shape.activations;
    Tensor routed(most, c.shape.latent, dtype);
    Tensor partial(most, c.shape.hidden, dtype);
    Tensor prefix(most, c.shape.hidden, dtype);
    Tensor out(most, c.shape.hidden, dtype);
    fill_partial(routed.view(), draw_key(5, Draw::routed, 0), boot.rank, boot.world);
    fill_partial(partial.view(), draw_key(5, Draw::shared, 0), boot.rank, boot.world);
    fill_normal(prefix.view(), draw_key(5, Draw::prefix, 0), 1);
    for (const Tensor* each : {&routed, &partial, &prefix}) each->upload(stream);
    const auto bits_of = [&](std::int64_t first, std::int64_t tokens) {
        const auto rows = [&](const Tensor& tensor) {
            return ConstRows(tensor.data() + first * tensor.stride * static_cast<std::int64_t>(bytes_of(dtype)),
                             tensor.stride);
        };
        out.poison(stream);
        check(cudaStreamSynchronize(stream), "poison");
        meet(boot);
        require(layer.run(tail, {.routed = rows(routed), .shared = rows(partial), .prefix = rows(prefix), .tokens = tokens},
                          {out.data(), out.stride}, stream),
                c.name);
        check(cudaStreamSynchronize(stream), c.name.c_str());
        if (const auto fault = context.poll_fault()) throw Error(StatusCode::internal, fault->message);
        check(cudaMemcpy(out.host.data(), out.data(), out.host.size() / most * static_cast<std::size_t>(tokens),
                         cudaMemcpyDeviceToHost),
              "download");
        std::vector<std::byte> bits = out.bits(tokens);
        if (!same_everywhere(boot, hash_of(bits)))
            failed(fmt::format("{} {} M={}: ranks differ", c.name, name(tail), tokens));
        return bits;
    };
    const std::vector<std::byte> whole = bits_of(0, most);
    const std::size_t row = whole.size() / most;
    std::vector<std::int64_t> sizes = {257, 600, 1000};
    for (std::int64_t size = 130; size > 0; --size) sizes.push_back(size);
    int differ = 0;
    for (const std::int64_t size : sizes) {
        for (const std::int64_t first : {std::int64_t{0}, most - size}) {
            const std::vector<std::byte> bits = bits_of(first, size);
            for (std::int64_t m = 0; m < size; ++m) {
                const bool same = std::memcmp(bits.data() + static_cast<std::size_t>(m) * row,
                                              whole.data() + static_cast<std::size_t>(first + m) * row, row) == 0;
                if (same || differ++ > 0 || !batch_invariant) continue;
                failed(fmt::format("{} {}: row {} as row {} of {} on rank {}", c.name, name(tail), first + m, m, size,
                                   boot.rank));
            }
        }
    }
    meet(boot);
    return differ;
}

void check_batches(const Case& c, const Bootstrap& boot, const Weights& weights) {
    const gpu::CurrentDevice device(boot.rank % devices());
    std::vector<Tail> tails = {Tail::replicated, Tail::overlap, Tail::column_parallel, Tail::token_parallel};
    if (c.shape.norm == Norm::none) tails.push_back(Tail::late_reduce);
    if (c.world == 1) tails = {Tail::replicated};
    for (const Tail tail : tails) {
        const int with = rows_that_differ(c, weights, boot, tail, true);
        const int without = rows_that_differ(c, weights, boot, tail, false);
        if (boot.rank != 0) continue;
        const std::lock_guard lock(print_mutex);
        table.push_back(fmt::format("{:<24} {:<16} rows with other bits: {} in the mode, {} without it", c.name, name(tail),
                                    with, without));
        fmt::print("{}\n", table.back());
        std::fflush(stdout);
    }
}

/// Microseconds a layer: a graph of layers with distinct weights, so that they are in no cache; inputs stay in place.
void time_rank(const Bootstrap& boot, const Case& c, int layer_count) {
    const gpu::CurrentDevice device(boot.rank % devices());
    Options options{.backend = "cuda", .max_tokens = c.tokens.back(), .timeout_ms = 20'000, .keep_whole_weights = true};
    options.cpu_threads = 1;
    options.batch_invariant = c.batch_invariant;
    if (c.batch_invariant) options.tail = Tail::column_parallel;
    Context context = Context::create(c.shape, boot, options);
    std::vector<Layer> layers;
    const Weights weights(c, 1);  // equal bits in distinct memory serve as well
    for (int i = 0; i < layer_count; ++i) layers.push_back(weights.add_to(context, c, i));
    context.seal();
    const gpu::Stream stream_owner = gpu::make_stream();
    const cudaStream_t stream = stream_owner.get();
    const gpu::Event begin = gpu::make_event(true);
    const gpu::Event end = gpu::make_event(true);
    for (const std::int64_t tokens : c.tokens) {
        Tensor routed(tokens, c.shape.latent, c.shape.activations);
        Tensor partial(tokens, c.shape.hidden, c.shape.activations);
        Tensor out(tokens, c.shape.hidden, c.shape.activations);
        fill_partial(routed.view(), draw_key(1, Draw::routed, 0), boot.rank, boot.world);
        fill_partial(partial.view(), draw_key(1, Draw::shared, 0), boot.rank, boot.world);
        routed.upload(stream);
        partial.upload(stream);
        std::string line = fmt::format("{} M={:<5}", c.name, tokens);
        const auto measure = [&](const char* what, const auto& one_layer) {
            const auto run = [&] {
                for (const Layer& layer : layers) require(one_layer(layer), line);
            };
            run();
            check(cudaStreamSynchronize(stream), "a timed tail");
            const Graph graph(boot, stream, cudaStreamCaptureModeThreadLocal, run);
            std::vector<float> times;
            for (int i = 0; i < 12; ++i) {
                meet(boot);
                check(cudaEventRecord(begin.get(), stream), "cudaEventRecord");
                graph.launch(stream);
                check(cudaEventRecord(end.get(), stream), "cudaEventRecord");
                check(cudaStreamSynchronize(stream), "a timed tail");
                if (const auto fault = context.poll_fault()) throw Error(StatusCode::internal, fault->message);
                float ms = 0;
                check(cudaEventElapsedTime(&ms, begin.get(), end.get()), "cudaEventElapsedTime");
                if (i >= 2) times.push_back(ms * 1000 / static_cast<float>(layer_count));
            }
            std::ranges::sort(times);
            line += fmt::format("  {} {:.1f}", what, times[times.size() / 2]);
        };
        const auto tail_call = [&](Tail tail, bool consume) {
            return [&, tail, consume](const Layer& layer) {
                return layer.run(
                    tail,
                    {.routed = {routed.data()}, .shared = {partial.data()}, .tokens = tokens, .consume_shared = consume},
                    {out.data()}, stream);
            };
        };
        if (!c.batch_invariant) {
            measure("replicated", tail_call(Tail::replicated, false));
            measure("overlap", tail_call(Tail::overlap, false));
        }
        measure("column", tail_call(Tail::column_parallel, false));
        measure("column(consume)", tail_call(Tail::column_parallel, true));
        if (!c.batch_invariant) measure("token", tail_call(Tail::token_parallel, false));
        const gpu::DeviceMemory gamma(static_cast<std::size_t>(c.shape.latent) * 4, "gamma");
        check(cudaMemset(gamma.get(), 0x3c, gamma.bytes()), "cudaMemset");
        measure("| reduce+norm", [&](const Layer&) {
            return context.all_reduce_rms_norm({routed.data()}, gamma.get(), {out.data()}, tokens, stream);
        });
        measure("projection", [&](const Layer& layer) {
            return context.accumulate_projection({routed.data()}, layer, {out.data(), c.shape.hidden}, tokens, stream);
        });
        if (boot.rank == 0) {
            const std::lock_guard lock(print_mutex);
            table.push_back(line);
            fmt::print("{}\n", line);
            std::fflush(stdout);
        }
    }
    meet(boot);
}

/// What goes wrong must be an error on every rank, in bounded time. Each story has a context of its own.
void check_faults(const Bootstrap& boot, int only_story) {
    int stories = 0;
    const gpu::CurrentDevice device(boot.rank % devices());
    const Case c{.name = "faults", .shape = {.hidden = 512, .latent = 256}};
    const Weights weights(c, 1);
    const gpu::Stream stream_owner = gpu::make_stream();
    const cudaStream_t stream = stream_owner.get();
    Tensor routed(64, 256, Dtype::bf16);
    Tensor shared(64, 512, Dtype::bf16);
    Tensor out(64, 512, Dtype::bf16);
    routed.upload(stream);
    shared.upload(stream);
    const auto story = [&](const char* what, const char* expected, double most_seconds,
                           const std::function<void(Context&, const Layer&)>& act) {
        if (stories++ != only_story) return;
        Context context = Context::create(
            c.shape, boot,
            {.backend = "cuda", .max_tokens = 64, .timeout_ms = 1000, .keep_whole_weights = true, .cpu_threads = 1});
        const Layer layer = weights.add_to(context, c, 3);
        const Layer other = weights.add_to(context, c, 4);
        context.seal();
        meet(boot);
        const auto begin = std::chrono::steady_clock::now();
        act(context, boot.rank == 1 && std::string(what) == "another layer" ? other : layer);
        check(cudaStreamSynchronize(stream), what);
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        const auto fault = context.poll_fault();
        const std::string message = fault ? fault->message : "no fault";
        const bool one_sided =
            std::string(expected).starts_with("did not arrive") && boot.rank != 0;  // the other rank only says so
        if (!fault || (!one_sided && message.find(expected) == std::string::npos) || seconds > most_seconds) {
            failed(fmt::format("faults: {}: rank {} after {:.2f} s: {}", what, boot.rank, seconds, message));
        } else if (boot.rank == 0) {
            fmt::print("faults: {}: {:.2f} s, {}\n", what, seconds, message);
        }
        const Status later =
            layer.run({.routed = {routed.data()}, .shared = {shared.data()}, .tokens = 1}, {out.data()}, stream);
        if (later.ok()) failed(fmt::format("faults: {}: rank {} may go on", what, boot.rank));
        check(cudaStreamSynchronize(stream), what);
    };
    const auto call = [&](Tail tail, const Layer& layer, std::int64_t tokens) {
        require(
            layer.run(tail, {.routed = {routed.data()}, .shared = {shared.data()}, .tokens = tokens}, {out.data()}, stream),
            "a call");
    };
    story("another number of tokens", "tokens", 3,
          [&](Context&, const Layer& layer) { call(Tail::column_parallel, layer, boot.rank == 0 ? 4 : 8); });
    story("another layer", "layer", 3, [&](Context&, const Layer& layer) { call(Tail::replicated, layer, 4); });
    story("another tail", "tail", 3,
          [&](Context&, const Layer& layer) { call(boot.rank == 0 ? Tail::replicated : Tail::column_parallel, layer, 4); });
    story("a rank that does not come", "did not arrive", 3, [&](Context& context, const Layer& layer) {
        if (boot.rank == 0) {
            call(Tail::overlap, layer, 64);
        } else {
            std::this_thread::sleep_for(std::chrono::milliseconds(1500));
            context.abort("it never came");
        }
    });
    story("a captured step without its peer", "did not arrive", 3, [&](Context& context, const Layer& layer) {
        if (boot.rank != 0) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1500));
            return context.abort("it never came");
        }
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t executable = nullptr;
        check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
        for (int i = 0; i < 92; ++i) call(Tail::column_parallel, layer, 8);
        check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
        check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
        check(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
        check(cudaStreamSynchronize(stream), "graph");
        check(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
        check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    });
    story("abort", "abort", 0.9, [&](Context& context, const Layer& layer) {
        if (boot.rank == 0) {
            call(Tail::column_parallel, layer, 8);
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
        }
        context.abort("abort in a test");
        // What comes next frees memory, which waits for the GPU, and rank 0's kernel may be on the same one.
        if (boot.rank != 0) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    });
}

Shape without_norm(Shape shape) {
    shape.norm = Norm::none;
    return shape;
}
Shape in(Dtype activations, Shape shape) {
    shape.activations = activations;
    return shape;
}

std::vector<Case> all_cases(const std::vector<int>& worlds) {
    const Shape small{.hidden = 512, .latent = 256};
    const Shape plain = without_norm(small), half = in(Dtype::f16, small), single = in(Dtype::f32, small);
    const std::vector<std::int64_t> few = {1, 3, 16, 64, 65, 257};
    std::vector<Case> cases;
    for (const int world : worlds) {
        Case c{.name = fmt::format("tp{} 512x256 bf16", world), .shape = small, .world = world};
        if (world == 3) {
            cases.push_back({.name = "tp3 768x256 bf16", .shape = {.hidden = 768, .latent = 256}, .world = 3});
            c.tokens = few;
        }
        cases.push_back(c);
        cases.push_back({.name = fmt::format("tp{} 512x256 no norm", world), .shape = plain, .world = world, .tokens = few});
        cases.push_back(
            {.name = fmt::format("tp{} strided", world), .shape = small, .world = world, .tokens = few, .strided = true});
        cases.push_back({.name = fmt::format("tp{} larger than slots", world),
                         .shape = {.hidden = 15360, .latent = 64},
                         .world = world,
                         .tokens = {600}});
        cases.push_back({.name = fmt::format("tp{} sequence-parallel", world),
                         .shape = small,
                         .world = world,
                         .tokens = few,
                         .sequence_parallel = true});
        if (world > 3) continue;
        cases.push_back(
            {.name = fmt::format("tp{} f16", world), .shape = half, .world = world, .tokens = few, .weights = Dtype::f16});
        cases.push_back(
            {.name = fmt::format("tp{} f32", world), .shape = single, .world = world, .tokens = few, .weights = Dtype::f32});
        cases.push_back({.name = fmt::format("tp{} e4m3 row scales", world),
                         .shape = small,
                         .world = world,
                         .tokens = few,
                         .weights = Dtype::e4m3,
                         .row_scales = true});
        cases.push_back({.name = fmt::format("tp{} f32 weights", world),
                         .shape = small,
                         .world = world,
                         .tokens = few,
                         .weights = Dtype::f32});
        cases.push_back({.name = fmt::format("tp{} shared reduced", world),
                         .shape = small,
                         .world = world,
                         .tokens = few,
                         .shared = SharedState::reduced});
        cases.push_back({.name = fmt::format("tp{} no shared", world),
                         .shape = small,
                         .world = world,
                         .tokens = few,
                         .shared = SharedState::absent});
        if (world == 2) {
            cases.push_back({.name = "tp2 shards given",
                             .shape = small,
                             .world = world,
                             .tokens = few,
                             .row_scales = true,
                             .shard_only = true,
                             .suspend = true});
            cases.push_back({.name = "tp2 blocks", .shape = small, .world = world, .tokens = {4096, 4097, 9001}});
            cases.push_back({.name = "tp2 max 64", .shape = small, .world = world, .tokens = {1, 8, 33, 64}});
            cases.push_back({.name = "tp2 kimi-k3",
                             .shape = *shape_preset("kimi-k3"),
                             .world = world,
                             .tokens = {1, 8, 16, 64, 65, 257}});
        }
        if (world == 1) cases.back().world = 1;
    }
    if (std::ranges::find(worlds, 8) != worlds.end()) {
        cases.push_back({.name = "tp8 kimi-k3", .shape = *shape_preset("kimi-k3"), .world = 8, .tokens = {1, 16, 65, 257}});
    }
    return cases;
}

std::vector<Case> batch_cases(const std::vector<int>& worlds) {
    std::vector<Case> cases;
    for (const int world : worlds) {
        const auto add = [&](const char* what, const Shape& shape, Dtype weights, bool row_scales) {
            if (shape.hidden % world != 0) return;
            cases.push_back({.name = fmt::format("tp{} {} in batches", world, what),
                             .shape = shape,
                             .world = world,
                             .weights = weights,
                             .row_scales = row_scales});
        };
        const Shape small{.hidden = 1536, .latent = 512};
        add("1536x512", small, Dtype::bf16, false);
        if (world <= 2) add("kimi-k3", *shape_preset("kimi-k3"), Dtype::bf16, false);
        if (world > 3) continue;
        add("no norm", without_norm(small), Dtype::bf16, false);
        add("f16", in(Dtype::f16, small), Dtype::f16, false);
        add("f32", in(Dtype::f32, small), Dtype::f32, false);
        add("f32 weights", small, Dtype::f32, false);
        add("e4m3 row scales", small, Dtype::e4m3, true);
    }
    return cases;
}

using Runner = std::function<void(int world, const std::function<void(const Bootstrap&)>&)>;

int run_all(int argc, char** argv, const std::vector<int>& default_worlds, bool prints, bool has_fresh_ranks,
            const Runner& runner) {
    std::vector<int> worlds = default_worlds;
    std::string only;
    bool checks = false;
    bool batches = false;
    bool times = false;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        if (argument.starts_with("ranks=")) {
            worlds.clear();
            for (const char* at = argv[i] + 6; *at != '\0'; at += *at == ',')
                worlds.push_back(static_cast<int>(std::strtol(at, const_cast<char**>(&at), 10)));
        } else if (argument.starts_with("only=")) {
            only = argument.substr(5);
        } else if (argument == "check") {
            checks = true;
        } else if (argument == "batches") {
            batches = true;
        } else if (argument == "time") {
            times = true;
        }
    }
    if (!checks && !batches && !times) checks = times = true;
    for (const Case& c : checks ? all_cases(worlds) : std::vector<Case>{}) {
        if (c.name.find(only) == std::string::npos) continue;
        Shared shared;
        const auto begin = std::chrono::steady_clock::now();
        try {
            for (std::uint64_t layer = 0; layer < 2; ++layer) shared.weights.emplace_back(c, layer);
            runner(c.world, [&](const Bootstrap& boot) { check_rank(c, boot, shared); });
        } catch (const std::exception& error) {
            failed(fmt::format("{}: {}", c.name, error.what()));
        }
        for (const auto& [tail, outcome] : shared.outcomes) {
            if (outcome.cases == 0) continue;
            table.push_back(fmt::format("{:<24} {:<16} {:>3} checked  error {:.2e}  of the chain's {:.3f}", c.name, tail,
                                        outcome.cases, outcome.worst_error, outcome.worst_ratio));
        }
        table.push_back(fmt::format("{:<24} {:.1f} s", c.name,
                                    std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()));
    }
    if (checks && (only.empty() || only == "faults") && std::ranges::find(worlds, 2) != worlds.end()) {
        // An abort ends the ranks' bootstrap too, so every story has ranks of its own.
        for (int story = 0; story < 6 && has_fresh_ranks; ++story) {
            try {
                runner(2, [&](const Bootstrap& boot) { check_faults(boot, story); });
            } catch (const std::exception& error) {
                failed(fmt::format("faults, story {}: {}", story, error.what()));
            }
        }
    }
    for (const Case& c : batches ? batch_cases(worlds) : std::vector<Case>{}) {
        if (c.name.find(only) == std::string::npos) continue;
        try {
            const Weights weights(c, 1);
            runner(c.world, [&](const Bootstrap& boot) { check_batches(c, boot, weights); });
        } catch (const std::exception& error) {
            failed(fmt::format("{}: {}", c.name, error.what()));
        }
    }
    for (const int world : times ? worlds : std::vector<int>{}) {
        if (world > devices()) continue;
        try {
            for (const bool batch_invariant : {false, true}) {
                const Case c{.name = fmt::format("tp{} kimi-k3{}", world, batch_invariant ? " batch-invariant" : ""),
                             .shape = *shape_preset("kimi-k3"),
                             .world = world,
                             .tokens = {1, 4, 8, 16, 64, 128, 256, 1024, 4096},
                             .batch_invariant = batch_invariant};
                runner(world, [&](const Bootstrap& boot) { time_rank(boot, c, 12); });
            }
        } catch (const std::exception& error) {
            failed(fmt::format("timing: {}", error.what()));
        }
    }
    if (prints) {
        for (const std::string& line : table) fmt::print("{}\n", line);
        fmt::print("{}\n", failures == 0 ? "all passed" : fmt::format("{} failed", failures));
    }
    return failures == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);       // a kernel that is first needed in a call waits for ranks that wait
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);  // streams of ranks that share a GPU must not queue behind each other
    setenv("NCCL_NVLS_ENABLE", "0", 1);
    int count = 0;
    if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
        fmt::print(stderr, "backend_check: no GPU here: {}\n", cudaGetErrorString(error));
        return 3;
    }
#ifdef LATENT_MOE_CHECK_MPI
    int provided = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
    int status = 1;
    {
        const Bootstrap boot = mpi_ranks(MPI_COMM_WORLD, 20'000);
        status = run_all(argc, argv, {boot.world}, boot.rank == 0, false, [&](int, const auto& body) { body(boot); });
    }
    MPI_Finalize();
    return status;
#else
    return run_all(argc, argv, {2, 3, 4, 8}, true, true,
                   [](int world, const auto& body) { run_thread_ranks(world, body, 20'000); });
#endif
}

// Whole tails on emulated GPUs: the schedules, the GPU backend's lanes and every kernel that they launch, each kernel's own
// source, with threads as ranks × CTAs × lanes of waves of 32 or 64. All sums here are exact, so the bits must be those of
// the CPU backend's tails, whatever the order of the sums.
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gpu/protocol/emulated_backend.h"
#include "support/harness.h"
#include "support/problem.h"

namespace latent_moe::gpu {
namespace {

using test::Tensor;

constexpr std::int64_t latent = 136;      // three blocks of 64, the last not whole
constexpr std::int64_t own_columns = 24;  // two tiles of 16, the last not whole
constexpr std::int64_t block_tokens = 40;

struct Call {
    Tail tail;
    std::int64_t tokens;
    std::vector<Tensor> routed, shared, out;  // by rank
    Tensor prefix;
};

struct Layer {
    Shape shape;
    Tensor weights, gamma;
};

class Draw {
public:
    explicit Draw(unsigned seed) : random_(seed) {}
    bool one_in(unsigned n) { return random_() % n == 0; }
    float integer(int most) {
        return static_cast<float>(static_cast<int>(random_() % (2U * static_cast<unsigned>(most) + 1)) - most);
    }

private:
    std::mt19937 random_;
};

template <class Value>
void fill(Tensor& tensor, std::int64_t rows, std::int64_t columns, Value value) {
    for (std::int64_t m = 0; m < rows; ++m) {
        for (std::int64_t n = 0; n < columns; ++n) tensor.set(m, n, value());
    }
}

Layer make_layer(int world, Norm norm, Dtype dtype, Draw& draw) {
    Layer layer{
        .shape = {.hidden = own_columns * world, .latent = latent, .norm = norm, .epsilon = 1e-30F, .activations = dtype},
        .weights = {own_columns * world, latent, dtype},
        .gamma = {1, latent, dtype}};
    fill(layer.weights, own_columns * world, latent, [&] { return draw.one_in(16) ? draw.integer(1) : 0.0F; });
    fill(layer.gamma, 1, latent, [&] { return draw.one_in(2) ? 0.5F : 2.0F; });
    return layer;
}

/// Σ routed is ± one power of two all along a row, so its factor is one too; all else is small whole numbers and halves.
Call make_call(Tail tail, std::int64_t tokens, int world, const Layer& layer, Draw& draw) {
    const std::int64_t hidden = layer.shape.hidden;
    const Dtype dtype = layer.shape.activations;
    Call call{.tail = tail, .tokens = tokens, .routed = {}, .shared = {}, .out = {}, .prefix = {}};
    for (int r = 0; r < world; ++r) {
        call.routed.emplace_back(tokens, latent, dtype, 8);
        fill(call.shared.emplace_back(tokens, hidden, dtype), tokens, hidden, [&] { return draw.integer(7); });
        call.out.emplace_back(tokens, hidden, dtype, 16).poison();
    }
    for (std::int64_t m = 0; m < tokens; ++m) {
        const auto size = static_cast<float>(1 << m % 3);
        for (std::int64_t k = 0; k < latent; ++k) {
            float rest = draw.one_in(2) ? size : -size;
            for (int r = 0; r < world; ++r) {
                const float part = r + 1 == world ? rest : draw.integer(3);
                call.routed[static_cast<std::size_t>(r)].set(m, k, part);
                rest -= part;
            }
        }
    }
    if (draw.one_in(2)) {
        call.prefix = {tokens, hidden, dtype};
        fill(call.prefix, tokens, hidden, [&] { return draw.integer(20); });
    }
    return call;
}

ConstMatrix matrix_of(const Tensor& tensor) {
    return tensor.present() ? tensor.matrix() : ConstMatrix{};
}

void run_on_emulated_gpus(int world, const emulated::Wires& wires, emulated::Grid grid, bool overlaps, const Layer& layer,
                          std::vector<Call>& calls) {
    const WeightView weights{.data = layer.weights.data(), .rows = layer.shape.hidden, .dtype = layer.shape.activations};
    emulated::Gpus gpus(world, layer.shape, wires, grid, block_tokens, weights,
                        layer.shape.norm == Norm::rms ? layer.gamma.data() : nullptr);
    emulated::run(world, grid, [&](int rank, emulated::Stream& stream) {
        const auto r = static_cast<std::size_t>(rank);
        emulated::EmulatedBackend backend(gpus, rank, stream, overlaps);
        for (Call& call : calls) {
            backend.run(call.tail, call.tokens, matrix_of(call.routed[r]), matrix_of(call.shared[r]), matrix_of(call.prefix),
                        call.out[r].matrix());
        }
    });
    for (int r = 0; r < world; ++r) {
        for (const bool side : {false, true})
            EXPECT_EQ(gpus.fault(r, side).code, 0U) << "rank " << r << ": expected no fault";
    }
}

void expect_the_bits_of_the_cpu_tails(int world, const Layer& layer, const std::vector<Call>& calls) {
    test::on_ranks(
        world,
        [&](const Bootstrap& bootstrap) {
            const auto r = static_cast<std::size_t>(bootstrap.rank);
            Context context = Context::create(layer.shape, bootstrap, {.backend = "cpu", .keep_whole_weights = true});
            const auto at = context.add_layer(
                7, {.data = layer.weights.data(), .rows = layer.shape.hidden, .dtype = layer.shape.activations},
                layer.shape.norm == Norm::rms ? layer.gamma.data() : nullptr);
            context.seal();
            for (const Call& call : calls) {
                Tensor expected(call.tokens, layer.shape.hidden, layer.shape.activations);
                const Tail tail = call.tail == Tail::fused ? Tail::column_parallel : call.tail;
                const Status status = at.run(tail,
                                             {.routed = call.routed[r].rows(),
                                              .shared = call.shared[r].rows(),
                                              .prefix = call.prefix.present() ? call.prefix.rows() : ConstRows{},
                                              .tokens = call.tokens},
                                             expected.writable_rows());
                ASSERT_TRUE(status.ok()) << status.message();
                EXPECT_TRUE(call.out[r].content() == expected.content())
                    << name(call.tail) << ", " << call.tokens << " tokens, rank " << bootstrap.rank;
                EXPECT_TRUE(call.out[r].padding_intact()) << name(call.tail) << ", " << call.tokens << " tokens";
            }
        },
        60'000);
}

struct Config {
    int world;
    const char* wires;
    Norm norm = Norm::rms;
    Dtype dtype = Dtype::bf16;
};

std::string name_of(const testing::TestParamInfo<Config>& info) {
    const Config& c = info.param;
    return "tp" + std::to_string(c.world) + "_" + c.wires + (c.norm == Norm::rms ? "" : "_without_norm") +
           (c.dtype == Dtype::bf16 ? "" : std::string("_in_") + latent_moe::name(c.dtype));
}

std::vector<Tail> tails_of(const Config& c) {
    if (c.world == 1) return {Tail::replicated};
    std::vector<Tail> tails = {Tail::replicated, Tail::overlap, Tail::column_parallel, Tail::token_parallel};
    if (c.norm == Norm::none) tails = {Tail::late_reduce, Tail::column_parallel};
    if (c.dtype == Dtype::bf16) tails.push_back(Tail::fused);
    return tails;
}

class TailsOnEmulatedGpus : public testing::TestWithParam<Config> {};

TEST_P(TailsOnEmulatedGpus, GiveTheBitsOfTheCpuTailsWhereAllSumsAreExact) {
    const Config c = GetParam();
    const std::string way = c.wires;
    emulated::Wires wires;
    // A lane's CTAs that wait for peers, the one for the headers among them. Two rows of float32 share a CTA of four waves.
    emulated::Grid grid{c.world <= 4 ? 3U : 2U, (c.dtype == Dtype::f32 ? 4 : 2) * wave_size};
    if (way == "in_two_stages") wires.one_stage_bytes = 0;
    if (way == "in_bulk") wires.bulk_from_bytes = wires.one_stage_bytes = 0, grid = {2, 5 * wave_size};

    Draw draw(static_cast<unsigned>(c.world));
    const Layer layer = make_layer(c.world, c.norm, c.dtype, draw);
    std::vector<Call> calls;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    const std::vector<int> sizes = {5, 0, 17};  // a call costs ten times as much
#else
    const bool all_sizes = way == "in_one_stage" && c.norm == Norm::rms;
    const std::vector<int> sizes = all_sizes ? std::vector{1, 5, 0, 16, 3, 7, 17, 33, 41} : std::vector{5, 0, 1, 17};
#endif
    for (const std::int64_t tokens : sizes) {
        for (const Tail tail : tails_of(c)) calls.push_back(make_call(tail, tokens, c.world, layer, draw));
    }
    // Fused calls have a window of `block_tokens` rows.
    std::erase_if(calls, [](const Call& call) { return call.tail == Tail::fused && call.tokens > block_tokens; });
    run_on_emulated_gpus(c.world, wires, grid, true, layer, calls);
    expect_the_bits_of_the_cpu_tails(c.world, layer, calls);
}

std::vector<Config> configs() {
    std::vector<Config> all;
    for (int world = 1; world <= 8; ++world) all.push_back({world, "in_one_stage"});
    for (const int world : {2, 3, 5, 8}) all.push_back({world, "in_two_stages"});
    for (const int world : {2, 3, 4, 6, 8}) all.push_back({world, "in_bulk"});
    for (const int world : {2, 5, 8}) all.push_back({world, "in_one_stage", Norm::none});
    all.push_back({3, "in_one_stage", Norm::rms, Dtype::f16});
    all.push_back({2, "in_one_stage", Norm::rms, Dtype::f32});
    return all;
}

INSTANTIATE_TEST_SUITE_P(, TailsOnEmulatedGpus, testing::ValuesIn(configs()), name_of);

}  // namespace
}  // namespace latent_moe::gpu

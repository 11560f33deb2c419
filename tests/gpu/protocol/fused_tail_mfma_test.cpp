// The fused tail of AMD GPUs, its own source, with threads as ranks × CTAs × lanes of waves of 32 or 64 and MFMA
// played by its definition. Bits are compared with the CPU backend's tails where every sum is exact, and with the sums in
// the documented order where none is.
#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/numeric.h"
#include "gpu/kernels/fused_tail_mfma.cuh"
#include "gpu/protocol/emulated_gpu.h"
#include "support/harness.h"
#include "support/problem.h"

namespace latent_moe::gpu {
namespace {

using test::Tensor;

constexpr int waves = 1, tokens_of_kernel = 16;
constexpr unsigned threads = waves * wave_size;
constexpr int latent = 584;      // ten blocks of 64, the last not whole: a wave asks for eight at once
constexpr int own_columns = 24;  // two tiles of 16, the last not whole
constexpr std::uint64_t minutes = 60'000'000'000;
constexpr float epsilon = 1e-30F;  // a mean square of 1 stays 1

template <int batch>
using Kernel = fused_mfma::Cta<tokens_of_kernel, waves, batch>;

/// One call's tensors, all ranks'.
struct Call {
    std::int64_t tokens;
    std::vector<Tensor> routed, shared, out;
    Tensor prefix;
};

struct Layer {
    Tensor weights, gamma;                   // [hidden, latent], [1, latent]
    std::vector<std::vector<uint4>> packed;  // by rank
    float scale = 1;
};

void pack(const Layer& layer, int rank, std::vector<uint4>& packed) {
    const PackedLayout layout{own_columns, latent};
    packed.assign(static_cast<std::size_t>(layout.bytes() / 16), uint4{});
    auto* bytes = reinterpret_cast<std::byte*>(packed.data());
    for (int n = 0; n < own_columns; ++n) {
        for (int k = 0; k < latent; ++k) {
            const std::uint16_t bits = bf16_from_float(layer.weights.at(rank * own_columns + n, k));
            std::memcpy(bytes + layout.element(n, k), &bits, 2);
        }
    }
}

UnitRows rows_of(Tensor& tensor) {
    if (!tensor.present()) return {};
    const Matrix matrix = tensor.matrix();
    return {static_cast<char*>(static_cast<void*>(matrix.data)), matrix.stride * 2};
}

/// Runs all calls on `world` emulated GPUs of `ctas` CTAs, one stream each.
void run_on_emulated_gpus(int world, unsigned ctas, Layer& layer, std::vector<Call>& calls) {
    constexpr std::int64_t latent_box = tokens_of_kernel * latent / 8, column_box = tokens_of_kernel * own_columns / 8;
    const std::int64_t slot_bytes = (world - 1) * (latent_box + 2 * column_box) * 16;
    const std::int64_t bytes = control_bytes + fused_mfma::head_bytes + slots * slot_bytes;
    emulated::Windows windows(world, 0, bytes, 0x80008000);
    std::vector<std::vector<uint4>> latents(static_cast<std::size_t>(world), std::vector<uint4>(latent_box));
    std::vector<std::vector<float>> squares(static_cast<std::size_t>(world), std::vector<float>(tokens_of_kernel * 10));
    for (int r = 0; r < world; ++r) {
        std::memset(static_cast<std::byte*>(windows.base(r)) + control_bytes, 0, fused_mfma::head_bytes);
        pack(layer, r, layer.packed.emplace_back());
    }
    const auto work = [&]<int batch>() {
        using Shared = typename Kernel<batch>::Shared;
        std::vector<std::unique_ptr<Shared>> shared;
        for (unsigned i = 0; i < static_cast<unsigned>(world) * ctas; ++i) shared.push_back(std::make_unique<Shared>());
        emulated::run(world, {ctas, threads}, [&](int rank, emulated::Stream& stream) {
            const auto r = static_cast<std::size_t>(rank);
            for (Call& call : calls) {
                const fused_mfma::Params p{.exchange = windows.exchange(rank, 10 * minutes),
                                           .region = control_bytes,
                                           .slot_bytes = slot_bytes,
                                           .latent_box = latent_box,
                                           .column_box = column_box,
                                           .routed = rows_of(call.routed[r]),
                                           .shared = rows_of(call.shared[r]),
                                           .prefix = rows_of(call.prefix),
                                           .out = rows_of(call.out[r]),
                                           .weights = reinterpret_cast<const char*>(layer.packed[r].data()),
                                           .gamma = static_cast<const char*>(layer.gamma.data()),
                                           .column_scales = nullptr,
                                           .latents = latents[r].data(),
                                           .squares = squares[r].data(),
                                           .layout = {own_columns, latent},
                                           .scale = layer.scale,
                                           .epsilon = epsilon,
                                           .inverse_latent = 1.0F / latent,
                                           .tokens = static_cast<int>(call.tokens),
                                           .latent_units = latent / 8,
                                           .column_units = own_columns / 8,
                                           .rms_norm = true,
                                           .exchange_shared = world > 1};
                stream.launch({ctas, threads},
                              [&] { fused_mfma::tail<tokens_of_kernel, waves, batch>(p, *shared[r * ctas + blockIdx.x]); });
            }
        });
    };
    if (world <= 2) {
        work.template operator()<2>();
    } else if (world <= 4) {
        work.template operator()<4>();
    } else {
        work.template operator()<8>();
    }
    for (int r = 0; r < world; ++r) EXPECT_EQ(windows.record(r).code, 0U) << "rank " << r << ": expected no fault";
}

/// Calls of these many tokens, poisoned outputs; the caller fills in the rest.
std::vector<Call> make_calls(int world, const std::vector<std::int64_t>& tokens) {
    std::vector<Call> calls;
    const std::int64_t hidden = std::int64_t{own_columns} * world;
    for (const std::int64_t m : tokens) {
        Call call{.tokens = m, .routed = {}, .shared = {}, .out = {}, .prefix = {m, hidden, Dtype::bf16}};
        for (int r = 0; r < world; ++r) {
            call.routed.emplace_back(m, latent, Dtype::bf16, 8);
            call.shared.emplace_back(m, hidden, Dtype::bf16);
            call.out.emplace_back(m, hidden, Dtype::bf16, 16);
            call.out.back().poison();
        }
        calls.push_back(std::move(call));
    }
    return calls;
}

void fill(Tensor& tensor, std::int64_t rows, std::int64_t columns,
          const std::function<float(std::int64_t, std::int64_t)>& value) {
    for (std::int64_t m = 0; m < rows; ++m) {
        for (std::int64_t n = 0; n < columns; ++n) tensor.set(m, n, value(m, n));
    }
}

std::string name_of(const testing::TestParamInfo<int>& info) {
    return "tp" + std::to_string(info.param);
}

class FusedMfmaTailOnHostThreads : public testing::TestWithParam<int> {};

/// Σ routed is ±1 everywhere, so a row's factor is 1; γ, W, shared and prefix are small multiples of a half.
TEST_P(FusedMfmaTailOnHostThreads, GivesTheBitsOfTheCpuTailsWhereAllSumsAreExact) {
    const int world = GetParam();
    const std::int64_t hidden = std::int64_t{own_columns} * world;
    std::mt19937 random(static_cast<unsigned>(world));
    const auto integer = [&](int most) {
        return static_cast<float>(static_cast<int>(random() % (2U * static_cast<unsigned>(most) + 1)) - most);
    };

    Layer layer{.weights = {hidden, latent, Dtype::bf16}, .gamma = {1, latent, Dtype::bf16}, .packed = {}};
    fill(layer.weights, hidden, latent, [&](auto, auto) { return random() % 100 == 0 ? integer(1) : 0.0F; });
    fill(layer.gamma, 1, latent, [&](auto, auto) { return random() % 2 == 0 ? 0.5F : 2.0F; });
    std::vector<Call> calls = make_calls(world, {1, 0, 5, 16, 3, 7, 0, 13, 16, 1, 9});
    for (Call& call : calls) {
        for (std::int64_t m = 0; m < call.tokens; ++m) {
            for (std::int64_t k = 0; k < latent; ++k) {
                float rest = random() % 2 == 0 ? 1.0F : -1.0F;
                for (int r = 0; r < world; ++r) {
                    const float part = r + 1 == world ? rest : integer(3);
                    call.routed[static_cast<std::size_t>(r)].set(m, k, part);
                    rest -= part;
                }
            }
        }
        for (Tensor& shared : call.shared) fill(shared, call.tokens, hidden, [&](auto, auto) { return integer(7); });
        fill(call.prefix, call.tokens, hidden, [&](auto, auto) { return integer(20); });
    }
    run_on_emulated_gpus(world, world <= 4 ? 3 : 2, layer, calls);

    Shape shape{.hidden = hidden, .latent = latent, .norm = Norm::rms, .epsilon = epsilon};
    Options options{.backend = "cpu"};
    test::on_ranks(
        world,
        [&](const Bootstrap& bootstrap) {
            const auto rank = static_cast<std::size_t>(bootstrap.rank);
            Context context = Context::create(shape, bootstrap, options);
            const Layer& of_all = layer;
            const auto at = context.add_layer(0, {.data = of_all.weights.data(), .rows = hidden, .dtype = Dtype::bf16},
                                              of_all.gamma.data());
            context.seal();
            for (const Call& call : calls) {
                Tensor expected(call.tokens, hidden, Dtype::bf16);
                const Status status = at.run(world == 1 ? Tail::replicated : Tail::column_parallel,
                                             {.routed = call.routed[rank].rows(),
                                              .shared = call.shared[rank].rows(),
                                              .prefix = call.prefix.rows(),
                                              .tokens = call.tokens},
                                             expected.writable_rows());
                ASSERT_TRUE(status.ok()) << status.message();
                EXPECT_TRUE(call.out[rank].content() == expected.content()) << call.tokens << " tokens, rank " << rank;
                EXPECT_TRUE(call.out[rank].padding_intact());
            }
        },
        60'000);
}

/// What the header of fused_tail_mfma.cuh says of the order of its sums, written down once more.
float expected_element(const Layer& layer, const Call& call, int world, std::int64_t m, std::int64_t n) {
    std::vector<float> x(latent), weighted(latent);
    float shared = 0;
    for (int k = 0; k < latent; ++k) {
        float sum = 0;
        for (int r = 0; r < world; ++r) sum += call.routed[static_cast<std::size_t>(r)].at(m, k) + 0.0F;
        x[static_cast<std::size_t>(k)] = round_to(Dtype::bf16, sum);
        weighted[static_cast<std::size_t>(k)] = round_to(Dtype::bf16, x[static_cast<std::size_t>(k)] * layer.gamma.at(0, k));
    }
    for (int r = 0; r < world; ++r) shared += call.shared[static_cast<std::size_t>(r)].at(m, n) + 0.0F;

    const auto tree = [](std::vector<float> v) {  // as lanes that exchange with lane XOR 1, 2, 4, … add
        for (std::size_t mask = 1; mask < v.size(); mask *= 2) {
            const std::vector<float> before = v;
            for (std::size_t i = 0; i < v.size(); ++i) v[i] = before[i] + before[i ^ mask];
        }
        return v[0];
    };
    const auto tree_down = [](std::vector<float> v) {  // … 32, 16, …
        for (std::size_t mask = v.size() / 2; mask > 0; mask /= 2) {
            const std::vector<float> before = v;
            for (std::size_t i = 0; i < v.size(); ++i) v[i] = before[i] + before[i ^ mask];
        }
        return v[0];
    };
    constexpr int blocks = 10;
    std::vector<float> of_lane(wave_size, 0.0F);
    float product = 0;
    for (int block = 0; block < blocks; ++block) {
        std::vector<float> of_unit(8, 0.0F);
        for (int unit = 0; unit < 8; ++unit) {
            for (int e = 0; e < 8; ++e) {
                const int k = block * 64 + unit * 8 + e;
                if (k < latent)
                    of_unit[static_cast<std::size_t>(unit)] =
                        std::fma(x[static_cast<std::size_t>(k)], x[static_cast<std::size_t>(k)],
                                 of_unit[static_cast<std::size_t>(unit)]);
            }
        }
        of_lane[static_cast<std::size_t>(block)] += tree(of_unit);
        constexpr int at_once = static_cast<int>(wave_size) / 16;  // units that the lanes of a row have between them
        for (int first_unit = 0; first_unit < 8; first_unit += at_once) {
            for (int half_of_unit = 0; half_of_unit < 2; ++half_of_unit) {
                for (int unit = first_unit; unit < first_unit + at_once; ++unit) {
                    for (int e = 0; e < 4; ++e) {
                        const int k = block * 64 + unit * 8 + half_of_unit * 4 + e;
                        if (k < latent) product += layer.weights.at(n, k) * weighted[static_cast<std::size_t>(k)];
                    }
                }
            }
        }
    }
    const float factor = layer.scale * (1.0F / std::sqrt(std::fma(tree_down(of_lane), 1.0F / latent, epsilon)));
    const float value = round_to(Dtype::bf16, shared + factor * product);
    return round_to(Dtype::bf16, value + call.prefix.at(m, n)) + 0.0F;
}

TEST_P(FusedMfmaTailOnHostThreads, AddsInTheOrderThatItSays) {
    const int world = GetParam();
    const std::int64_t hidden = std::int64_t{own_columns} * world;
    std::mt19937 random(99U + static_cast<unsigned>(world));
    std::normal_distribution<float> normal;
    const auto draw = [&](auto, auto) { return random() % 50 == 0 ? -0.0F : normal(random); };

    Layer layer{.weights = {hidden, latent, Dtype::bf16}, .gamma = {1, latent, Dtype::bf16}, .packed = {}, .scale = 0.75F};
    fill(layer.weights, hidden, latent, draw);
    fill(layer.gamma, 1, latent, draw);
    std::vector<Call> calls = make_calls(world, {2, 16, 0, 3, 11});
    for (Call& call : calls) {
        for (Tensor& routed : call.routed) fill(routed, call.tokens, latent, draw);
        for (Tensor& shared : call.shared) fill(shared, call.tokens, hidden, draw);
        fill(call.prefix, call.tokens, hidden, draw);
    }
    run_on_emulated_gpus(world, 3, layer, calls);
    for (const Call& call : calls) {
        int wrong = 0;
        for (std::int64_t m = 0; m < call.tokens; ++m) {
            for (std::int64_t n = 0; n < hidden; ++n) {
                const float expected = expected_element(layer, call, world, m, n);
                for (const Tensor& out : call.out) {
                    if (std::bit_cast<std::uint32_t>(out.at(m, n)) != std::bit_cast<std::uint32_t>(expected)) ++wrong;
                }
            }
        }
        EXPECT_EQ(wrong, 0) << call.tokens << " tokens";
    }
}

INSTANTIATE_TEST_SUITE_P(, FusedMfmaTailOnHostThreads, testing::Values(1, 2, 3, 4, 5, 6, 7, 8), name_of);

}  // namespace
}  // namespace latent_moe::gpu

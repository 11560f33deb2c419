// A stand-in for task accuracy: a small random stack of latent-MoE layers decoded greedily. How often does it choose the
// token that it chooses with the exact chain in float32? With each tail in bf16 as often as with the unfused chain in bf16.
//
// Everything but the tail is the same float32 arithmetic in all of them: the router, the experts and the shared expert (each
// rank has its slice of both), the head. The partials are rounded to the tail's dtype, as an engine's are.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "core/numeric.h"
#include "core/reference.h"
#include "core/synthetic.h"
#include "latent_moe/latent_moe.h"

namespace latent_moe {
namespace {

constexpr int world = 2;
constexpr int steps = 256;
constexpr std::int64_t sequences = 16;  // decoded side by side: rows of one call
constexpr std::int64_t vocabulary = 512;
constexpr std::int64_t hidden = 384;
constexpr std::int64_t latent = 96;
constexpr int layers = 3;
constexpr std::int64_t experts = 8;
constexpr std::int64_t chosen = 2;         // experts of a token
constexpr std::int64_t expert_width = 64;  // of all ranks together
constexpr std::int64_t shared_width = 128;

using Floats = std::vector<float>;

/// [rows, columns], every value one of bf16.
struct Matrix32 {
    std::int64_t rows = 0;
    std::int64_t columns = 0;
    Floats values;

    Matrix32(std::int64_t rows_, std::int64_t columns_, std::uint64_t instance, float deviation)
        : rows(rows_), columns(columns_), values(static_cast<std::size_t>(rows_ * columns_)) {
        const std::uint64_t key = draw_key(31, Draw::weights, instance);
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = round_to(Dtype::bf16, deviation * standard_draw(key, i));
    }
    const float* row(std::int64_t index) const { return values.data() + index * columns; }
};

float dot(const float* a, const float* b, std::int64_t count) {
    float sum = 0;
    for (std::int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
    return sum;
}

float silu(float x) {
    return x / (1 + std::exp(-x));
}

Floats normed(const float* x, std::int64_t count) {
    const float factor = 1 / std::sqrt(dot(x, x, count) / static_cast<float>(count) + 1e-5F);
    Floats y(x, x + count);
    for (float& each : y) each *= factor;
    return y;
}

/// A matrix for inputs of so many elements.
Matrix32 weights(std::int64_t rows, std::int64_t columns, std::uint64_t instance, float gain = 1) {
    return {rows, columns, instance, gain / std::sqrt(static_cast<float>(columns))};
}

struct MoeLayer {
    explicit MoeLayer(std::uint64_t at)
        : router(weights(experts, hidden, at)),
          down(weights(latent, hidden, at + 1)),
          shared_in(weights(shared_width, hidden, at + 2)),
          shared_out(weights(hidden, shared_width, at + 3, 2)),
          up(weights(hidden, latent, at + 4)) {
        for (std::uint64_t expert = 0; expert < experts; ++expert) {
            expert_in.push_back(weights(expert_width, latent, at + 10 + 2 * expert, 2));
            expert_out.push_back(weights(latent, expert_width, at + 11 + 2 * expert, 2));
        }
    }
    Matrix32 router, down, shared_in, shared_out, up;
    std::vector<Matrix32> expert_in, expert_out;
};

struct Model {
    Model() {
        for (std::uint64_t layer = 0; layer < layers; ++layer) moe.emplace_back(1000 * (layer + 1));
    }
    Matrix32 embedding{vocabulary, hidden, 1, 1};
    Matrix32 head{vocabulary, hidden, 2, 1};
    std::vector<MoeLayer> moe;
};

/// A rank's part of a layer's experts: adds to its summands of the latent and of the hidden row.
void add_partials(const MoeLayer& layer, int rank, const Floats& x, float* routed, float* shared) {
    Floats scores(experts);
    for (std::int64_t expert = 0; expert < experts; ++expert)
        scores[static_cast<std::size_t>(expert)] = dot(layer.router.row(expert), x.data(), hidden);
    std::vector<std::int64_t> order(experts);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + chosen, order.end(), [&](std::int64_t a, std::int64_t b) {
        return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
    });
    Floats z(latent);
    for (std::int64_t i = 0; i < latent; ++i) z[static_cast<std::size_t>(i)] = dot(layer.down.row(i), x.data(), hidden);
    for (std::int64_t slot = 0; slot < chosen; ++slot) {
        const auto expert = static_cast<std::size_t>(order[static_cast<std::size_t>(slot)]);
        const float weight = 1 / (1 + std::exp(-scores[expert]));
        for (std::int64_t unit = expert_width / world * rank; unit < expert_width / world * (rank + 1); ++unit) {
            const float inner = weight * silu(dot(layer.expert_in[expert].row(unit), z.data(), latent));
            for (std::int64_t i = 0; i < latent; ++i) routed[i] += inner * layer.expert_out[expert].row(i)[unit];
        }
    }
    for (std::int64_t unit = shared_width / world * rank; unit < shared_width / world * (rank + 1); ++unit) {
        const float inner = silu(dot(layer.shared_in.row(unit), x.data(), hidden));
        for (std::int64_t i = 0; i < hidden; ++i) shared[i] += inner * layer.shared_out.row(i)[unit];
    }
}

/// One layer's tail: this rank's partials and the residual rows, all values of the dtype, to the new residual rows.
using TailFunction = std::function<Floats(int layer, const Floats& routed, const Floats& shared, const Floats& residual)>;
using Tokens = std::vector<std::vector<std::int64_t>>;  // a sequence each

/// Where `forced` is given its tokens go in, whatever was chosen.
Tokens decode(const Model& model, int rank, Dtype dtype, const TailFunction& tail, const Tokens* forced) {
    Tokens out(static_cast<std::size_t>(sequences));
    Floats memory(static_cast<std::size_t>(sequences * hidden));  // what a sequence has seen, fading
    std::vector<std::int64_t> token(static_cast<std::size_t>(sequences));
    std::iota(token.begin(), token.end(), 7);
    for (int step = 0; step < steps; ++step) {
        Floats x(memory.size());
        for (std::int64_t row = 0; row < sequences; ++row) {
            for (std::int64_t i = 0; i < hidden; ++i) {
                const auto at = static_cast<std::size_t>(row * hidden + i);
                x[at] = round_to(dtype, model.embedding.row(token[static_cast<std::size_t>(row)])[i] + memory[at]);
            }
        }
        for (int layer = 0; layer < layers; ++layer) {
            Floats routed(static_cast<std::size_t>(sequences * latent));
            Floats shared(x.size());
            for (std::int64_t row = 0; row < sequences; ++row) {
                add_partials(model.moe[static_cast<std::size_t>(layer)], rank, normed(x.data() + row * hidden, hidden),
                             routed.data() + row * latent, shared.data() + row * hidden);
            }
            for (Floats* each : {&routed, &shared})
                for (float& value : *each) value = round_to(dtype, value);
            x = tail(layer, routed, shared, x);
        }
        for (std::int64_t row = 0; row < sequences; ++row) {
            const auto at = static_cast<std::size_t>(row);
            const Floats y = normed(x.data() + row * hidden, hidden);
            std::int64_t best = 0;
            float most = -INFINITY;
            for (std::int64_t each = 0; each < vocabulary; ++each) {
                const float logit = dot(model.head.row(each), y.data(), hidden);
                if (logit > most) most = logit, best = each;
            }
            out[at].push_back(best);
            token[at] = forced != nullptr ? (*forced)[at][static_cast<std::size_t>(step)] : best;
            for (std::int64_t i = 0; i < hidden; ++i) {
                float& seen = memory[static_cast<std::size_t>(row * hidden + i)];
                seen = 0.5F * seen + 0.3F * y[static_cast<std::size_t>(i)];
            }
        }
    }
    return out;
}

/// Values of a dtype as its bits.
std::vector<std::byte> packed(const Floats& values, Dtype dtype) {
    std::vector<std::byte> bytes(values.size() * bytes_of(dtype));
    narrow(values.data(), dtype, bytes.data(), static_cast<std::int64_t>(values.size()));
    return bytes;
}

Floats gamma_values() {
    Floats gamma(static_cast<std::size_t>(latent));
    const std::uint64_t key = draw_key(31, Draw::gamma, 0);
    for (std::size_t i = 0; i < gamma.size(); ++i) gamma[i] = round_to(Dtype::bf16, 0.5F + 0.1F * standard_draw(key, i));
    return gamma;
}

/// Both ranks' partials, gathered.
std::vector<std::vector<std::byte>> all_of(const Bootstrap& boot, const std::vector<std::byte>& mine) {
    std::vector<std::byte> all(mine.size() * world);
    boot.all_gather_bytes(mine.data(), all.data(), mine.size());
    std::vector<std::vector<std::byte>> parts;
    for (std::size_t rank = 0; rank < world; ++rank)
        parts.emplace_back(all.begin() + static_cast<std::ptrdiff_t>(rank * mine.size()),
                           all.begin() + static_cast<std::ptrdiff_t>((rank + 1) * mine.size()));
    return parts;
}

Tokens decode_with_chain(const Model& model, Dtype dtype, const Tokens* forced) {
    const std::vector<std::byte> gamma = packed(gamma_values(), dtype);
    Tokens tokens;
    run_thread_ranks(world, [&](const Bootstrap& boot) {
        const auto tail = [&](int layer, const Floats& routed, const Floats& shared, const Floats& residual) {
            const auto all_routed = all_of(boot, packed(routed, dtype));
            const auto all_shared = all_of(boot, packed(shared, dtype));
            const std::vector<std::byte> prefix = packed(residual, dtype);
            const std::vector<std::byte> up = packed(model.moe[static_cast<std::size_t>(layer)].up.values, Dtype::bf16);
            ReferenceInput input{.shape = {.hidden = hidden, .latent = latent, .activations = dtype},
                                 .routed = {},
                                 .shared = {},
                                 .prefix = {prefix.data(), sequences, hidden, hidden, dtype},
                                 .weights = {up.data(), hidden, latent, latent, Dtype::bf16},
                                 .gamma = gamma.data()};
            for (const auto& each : all_routed) input.routed.push_back({each.data(), sequences, latent, latent, dtype});
            for (const auto& each : all_shared) input.shared.push_back({each.data(), sequences, hidden, hidden, dtype});
            return chain_tail(input);
        };
        const Tokens mine = decode(model, boot.rank, dtype, tail, forced);
        if (boot.rank == 0) tokens = mine;
    });
    return tokens;
}

Tokens decode_with(Tail which, const Model& model, const Tokens* forced) {
    const std::vector<std::byte> gamma = packed(gamma_values(), Dtype::bf16);
    Tokens tokens;
    run_thread_ranks(world, [&](const Bootstrap& boot) {
        Context context = Context::create({.hidden = hidden, .latent = latent}, boot,
                                          {.backend = "cpu", .max_tokens = sequences, .keep_whole_weights = true});
        std::vector<Layer> tails;
        for (const MoeLayer& each : model.moe) {
            const std::vector<std::byte> up = packed(each.up.values, Dtype::bf16);
            tails.push_back(context.add_layer(static_cast<std::int64_t>(tails.size()), {.data = up.data(), .rows = hidden},
                                              gamma.data()));
        }
        context.seal();
        const auto tail = [&](int layer, const Floats& routed, const Floats& shared, const Floats& residual) {
            const std::vector<std::byte> r = packed(routed, Dtype::bf16);
            const std::vector<std::byte> s = packed(shared, Dtype::bf16);
            std::vector<std::byte> out = packed(residual, Dtype::bf16);  // in place of the prefix
            const Status status = tails[static_cast<std::size_t>(layer)].run(
                which, {.routed = {r.data()}, .shared = {s.data()}, .prefix = {out.data()}, .tokens = sequences},
                {out.data()});
            if (!status.ok()) throw Error(status.code(), status.message());
            Floats values(residual.size());
            widen(out.data(), Dtype::bf16, values.data(), static_cast<std::int64_t>(values.size()));
            return values;
        };
        const Tokens mine = decode(model, boot.rank, Dtype::bf16, tail, forced);
        if (boot.rank == 0) tokens = mine;
    });
    return tokens;
}

struct Agreement {
    std::int64_t equal = 0;  ///< of all tokens
    std::int64_t until = 0;  ///< steps before the first other token, all sequences together
};

Agreement compare(const Tokens& tokens, const Tokens& exact) {
    Agreement found;
    for (std::size_t row = 0; row < tokens.size(); ++row) {
        bool same = true;
        for (std::size_t step = 0; step < tokens[row].size(); ++step) {
            const bool equal = tokens[row][step] == exact[row][step];
            same = same && equal;
            found.equal += equal ? 1 : 0;
            found.until += same ? 1 : 0;
        }
    }
    return found;
}

constexpr std::int64_t all_tokens = sequences * steps;

double percent(std::int64_t count) {
    return 100.0 * static_cast<double>(count) / static_cast<double>(all_tokens);
}

TEST(ADecodedStack, ChoosesTheExactChainsTokensAsOftenAsTheBf16ChainDoes) {
    const Model model;
    const Tokens exact = decode_with_chain(model, Dtype::f32, nullptr);
    std::vector<std::int64_t> different = exact.front();
    std::ranges::sort(different);
    const auto [end, last] = std::ranges::unique(different);
    ASSERT_GT(std::distance(different.begin(), end), steps / 4) << "the stack repeats itself: its tokens say little";

    const auto report = [&](const std::string& what, const Tokens& forced, const Tokens& free) {
        const Agreement each = compare(forced, exact);
        const Agreement run = compare(free, exact);
        std::printf(
            "%-16s equal tokens %.2f %% (each step from the exact tokens); on its own %.1f of %d steps before the first "
            "other one\n",
            what.c_str(), percent(each.equal), static_cast<double>(run.until) / static_cast<double>(sequences), steps);
        return each.equal;
    };
    const std::int64_t chain = report("chain in bf16", decode_with_chain(model, Dtype::bf16, &exact),
                                      decode_with_chain(model, Dtype::bf16, nullptr));
    ASSERT_LT(chain, all_tokens) << "rounding changes nothing: the comparison says nothing";
    // Two rates of so many trials differ by chance by so much once in a thousand times.
    const double rate = static_cast<double>(chain) / static_cast<double>(all_tokens);
    const double spread = 3.1 * std::sqrt(2 * rate * (1 - rate) * static_cast<double>(all_tokens));
    for (const Tail tail : {Tail::replicated, Tail::overlap, Tail::column_parallel, Tail::token_parallel}) {
        const std::int64_t ours = report(name(tail), decode_with(tail, model, &exact), decode_with(tail, model, nullptr));
        EXPECT_GE(static_cast<double>(ours), static_cast<double>(chain) - spread) << name(tail);
    }
}

}  // namespace
}  // namespace latent_moe

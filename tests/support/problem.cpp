#include "support/problem.h"

#include <cmath>
#include <cstring>
#include <mutex>

#include "core/digest.h"
#include "core/numeric.h"
#include "core/synthetic.h"

namespace latent_moe::test {
namespace {

constexpr std::byte padding_pattern{0xA5};

std::mutex computing;  // ranks that are threads share a problem

}  // namespace

Tensor::Tensor(std::int64_t rows, std::int64_t columns, Dtype dtype, std::int64_t padding)
    : rows_(rows),
      columns_(columns),
      padding_(padding),
      dtype_(dtype),
      bytes_(static_cast<std::size_t>(rows * (columns + padding)) * bytes_of(dtype) + 64, padding_pattern) {}

void Tensor::poison() {
    for (std::int64_t row = 0; row < rows_; ++row)
        std::memset(matrix().row(row), 0xFF, static_cast<std::size_t>(matrix().row_bytes()));
}

bool Tensor::padding_intact() const {
    for (std::int64_t row = 0; row < rows_; ++row) {
        const std::byte* begin = matrix().row(row) + matrix().row_bytes();
        for (std::int64_t at = 0; at < padding_ * static_cast<std::int64_t>(bytes_of(dtype_)); ++at) {
            if (begin[at] != padding_pattern) return false;
        }
    }
    for (std::size_t at = bytes_.size() - 64; at < bytes_.size(); ++at) {
        if (bytes_[at] != padding_pattern) return false;
    }
    return true;
}

float Tensor::at(std::int64_t row, std::int64_t column) const {
    return load_element(matrix().row(row), dtype_, column);
}

void Tensor::set(std::int64_t row, std::int64_t column, float value) {
    narrow(&value, dtype_, matrix().row(row) + column * static_cast<std::int64_t>(bytes_of(dtype_)), 1);
}

std::vector<std::byte> Tensor::content() const {
    std::vector<std::byte> rows;
    for (std::int64_t row = 0; row < rows_; ++row)
        rows.insert(rows.end(), matrix().row(row), matrix().row(row) + matrix().row_bytes());
    return rows;
}

Problem::Problem(int world_, std::int64_t tokens_, const ProblemOptions& options)
    : shape{.hidden = options.hidden,
            .latent = options.latent,
            .norm = options.norm,
            .routed_scale = options.routed_scale,
            .activations = options.dtype},
      world(world_),
      tokens(tokens_),
      shared_state(options.shared),
      weights(options.hidden, options.latent, options.weight_dtype) {
    const auto key = [&](Draw draw) { return draw_key(options.seed, draw, 0); };
    for (int rank = 0; rank < world; ++rank) {
        routed.emplace_back(tokens, shape.latent, options.dtype, options.padding);
        fill_partial(routed.back().matrix(), key(Draw::routed), rank, world);
        if (options.shared == SharedState::absent) continue;
        shared.emplace_back(tokens, shape.hidden, options.dtype, options.padding);
        if (options.shared == SharedState::partial) {
            fill_partial(shared.back().matrix(), key(Draw::shared), rank, world);
        } else {
            fill_normal(shared.back().matrix(), key(Draw::shared), 1);
        }
    }
    if (options.prefix) {
        prefix = Tensor(tokens, shape.hidden, options.dtype, options.padding);
        fill_normal(prefix.matrix(), key(Draw::prefix), 1);
    }
    const float deviation = 1 / std::sqrt(static_cast<float>(shape.latent));
    if (options.weight_dtype == Dtype::e4m3) {
        for (std::int64_t row = 0; row < shape.hidden; ++row) {
            for (std::int64_t column = 0; column < shape.latent; ++column) {
                const auto bits = static_cast<unsigned>(
                    std::abs(standard_draw(key(Draw::weights), static_cast<std::uint64_t>(row * shape.latent + column))) *
                    40);
                weights.matrix().row(row)[column] = static_cast<std::byte>((bits % 0x60U) | (column % 2 == 0 ? 0x80U : 0U));
            }
        }
    } else {
        fill_normal(weights.matrix(), key(Draw::weights), deviation);
    }
    if (shape.norm == Norm::rms) {
        gamma = Tensor(1, shape.latent, options.dtype);
        fill_normal(gamma.matrix(), key(Draw::gamma), 0.2F, 1);
    }
}

Options Problem::context_options() const {
    return {.backend = "cpu", .max_tokens = 4096, .timeout_ms = 20'000, .keep_whole_weights = true, .shared = shared_state};
}

WeightView Problem::weight_view() const {
    return {.data = weights.data(), .rows = shape.hidden, .dtype = weights.matrix().dtype};
}

WeightView Problem::weight_shard(int rank) const {
    const std::int64_t rows = shape.hidden / world;
    return {.data = weights.matrix().row(rank * rows), .rows = rows, .dtype = weights.matrix().dtype};
}

TailInput Problem::input(int rank) const {
    TailInput input{.routed = routed[static_cast<std::size_t>(rank)].rows(), .tokens = tokens};
    if (shared_state != SharedState::absent) input.shared = shared[static_cast<std::size_t>(rank)].rows();
    if (prefix.present()) input.prefix = prefix.rows();
    return input;
}

ReferenceInput Problem::reference_input() const {
    ReferenceInput input{.shape = shape, .weights = weights.matrix(), .gamma = gamma_data()};
    for (const Tensor& each : routed) input.routed.push_back(each.matrix());
    for (const Tensor& each : shared) input.shared.push_back(each.matrix());
    if (shared_state == SharedState::reduced) input.shared.resize(1);
    if (prefix.present()) input.prefix = prefix.matrix();
    return input;
}

const std::vector<double>& Problem::reference() const {
    const std::lock_guard lock(computing);
    if (!reference_) reference_ = reference_tail(reference_input());
    return *reference_;
}

const std::vector<float>& Problem::chain() const {
    const std::lock_guard lock(computing);
    if (!chain_) chain_ = chain_tail(reference_input());
    return *chain_;
}

Uncombined::Uncombined(const Problem& problem, std::int64_t slots, Dtype weight_dtype)
    : tokens_(problem.tokens),
      latent_(problem.shape.latent),
      slots_(slots),
      dtype_(problem.shape.activations),
      weight_dtype_(weight_dtype) {
    const std::int64_t count = tokens_ * slots;
    for (int rank = 0; rank < problem.world; ++rank) {
        OfRank& made = ranks_.emplace_back();
        const auto key = static_cast<std::uint64_t>(100 + rank);
        made.rows = Tensor(count, latent_, dtype_, 16);
        fill_normal(made.rows.matrix(), key, 1);
        made.weights = Tensor(tokens_, slots, weight_dtype);
        fill_normal(made.weights.matrix(), key + 50, 0.3F, 0.5F);
        for (std::int64_t at = 0; at < count; ++at) {
            // A permutation, since 7 divides no number of rows here but those of 7's own multiples.
            const std::int64_t row = count % 7 == 0 ? count - 1 - at : at * 7 % count;
            made.map.push_back(at % 5 == 3 ? -1 : static_cast<std::int32_t>(row));
        }
    }
}

DeferredRows Uncombined::deferred(int rank) const {
    const OfRank& from = ranks_[static_cast<std::size_t>(rank)];
    return {.rows = from.rows.rows(),
            .count = tokens_ * slots_,
            .slots = slots_,
            .weights = from.weights.data(),
            .weight_dtype = weight_dtype_,
            .map = from.map.data()};
}

Tensor Uncombined::combined(int rank) const {
    const OfRank& from = ranks_[static_cast<std::size_t>(rank)];
    Tensor out(tokens_, latent_, dtype_);
    for (std::int64_t token = 0; token < tokens_; ++token) {
        for (std::int64_t column = 0; column < latent_; ++column) {
            volatile float sum = 0;  // each step rounds to float32
            for (std::int64_t slot = 0; slot < slots_; ++slot) {
                const std::int32_t row = from.map[static_cast<std::size_t>(token * slots_ + slot)];
                if (row < 0) continue;
                const volatile float product = from.weights.at(token, slot) * from.rows.at(row, column);
                sum = sum + product;
            }
            out.set(token, column, sum);
        }
    }
    return out;
}

double error_of(const Context& context, const Problem& problem, const Bootstrap& bootstrap) {
    Tensor out = problem.output();
    const Status status = context.layer(0).run(problem.input(bootstrap.rank), out.writable_rows());
    if (!status.ok()) throw Error(status.code(), status.message());
    return relative_l2(out.matrix(), problem.reference());
}

Context make_context(const Problem& problem, const Bootstrap& bootstrap, const Options& options) {
    Context context = Context::create(problem.shape, bootstrap, options);
    context.add_layer(7, problem.weight_view(), problem.gamma_data());
    context.seal();
    return context;
}

double allowed_ratio(Tail tail) {
    return tail == Tail::late_reduce ? 1.25 : 1.05;
}

bool same_on_all_ranks(const Bootstrap& bootstrap, const std::vector<std::byte>& bytes) {
    const auto size = static_cast<std::int64_t>(bytes.size());
    const std::uint64_t mine = digest_of({bytes.data(), 1, size / 2, size / 2, Dtype::bf16});
    std::vector<std::uint64_t> digests(static_cast<std::size_t>(bootstrap.world));
    bootstrap.all_gather_bytes(&mine, digests.data(), sizeof mine);
    for (const std::uint64_t digest : digests) {
        if (digest != mine) return false;
    }
    return true;
}

}  // namespace latent_moe::test

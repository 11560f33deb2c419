#include "core/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>

#include "core/numeric.h"
#include "core/partition.h"

namespace latent_moe {
namespace {

constexpr std::int64_t rows_at_once = 4;

/// out[m][n] = Σ_k x[m][k] · w[n][k], accumulated in `Real`, for the columns n of one part.
/// Compiled twice, since no one would wait for it without vectors.
template <typename Real>
[[gnu::always_inline]] inline void product_of(const Real* x, std::int64_t tokens, std::int64_t depth, const Real* weight_row,
                                              Real* out, std::int64_t out_stride) {
    std::int64_t m = 0;
    for (; m + rows_at_once <= tokens; m += rows_at_once) {
        Real s0 = 0;
        Real s1 = 0;
        Real s2 = 0;
        Real s3 = 0;
        const Real* x0 = x + m * depth;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
        for (std::int64_t k = 0; k < depth; ++k) {
            s0 += x0[k] * weight_row[k];
            s1 += x0[k + depth] * weight_row[k];
            s2 += x0[k + 2 * depth] * weight_row[k];
            s3 += x0[k + 3 * depth] * weight_row[k];
        }
        out[m * out_stride] = s0;
        out[(m + 1) * out_stride] = s1;
        out[(m + 2) * out_stride] = s2;
        out[(m + 3) * out_stride] = s3;
    }
    for (; m < tokens; ++m) {
        Real sum = 0;
        const Real* row = x + m * depth;
#pragma omp simd reduction(+ : sum)
        for (std::int64_t k = 0; k < depth; ++k) sum += row[k] * weight_row[k];
        out[m * out_stride] = sum;
    }
}

#if defined(__x86_64__)
template <typename Real>
[[gnu::target("avx2,fma")]] void product_avx2(const Real* x, std::int64_t tokens, std::int64_t depth, const Real* weight_row,
                                              Real* out, std::int64_t out_stride) {
    product_of(x, tokens, depth, weight_row, out, out_stride);
}
#endif

template <typename Real>
void product_plain(const Real* x, std::int64_t tokens, std::int64_t depth, const Real* weight_row, Real* out,
                   std::int64_t out_stride) {
    product_of(x, tokens, depth, weight_row, out, out_stride);
}

template <typename Real>
auto best_product() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0) return &product_avx2<Real>;
#endif
    return &product_plain<Real>;
}

/// x · Wᵀ with W widened exactly; scales are applied by the caller.
template <typename Real>
std::vector<Real> project(const std::vector<Real>& x, std::int64_t tokens, const ConstMatrix& weights) {
    std::vector<Real> out(static_cast<std::size_t>(tokens * weights.rows));
    const auto product = best_product<Real>();
    const int workers = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
    const auto work = [&](int worker) {
        const TokenRange columns = even_part(weights.rows, workers, worker);
        std::vector<float> narrow_row(static_cast<std::size_t>(weights.columns));
        std::vector<Real> row(narrow_row.size());
        for (std::int64_t n = columns.first; n < columns.first + columns.count; ++n) {
            widen(weights.row(n), weights.dtype, narrow_row.data(), weights.columns);
            std::copy(narrow_row.begin(), narrow_row.end(), row.begin());
            product(x.data(), tokens, weights.columns, row.data(), out.data() + n, weights.rows);
        }
    };
    std::vector<std::thread> threads;
    for (int worker = 1; worker < workers; ++worker) threads.emplace_back(work, worker);
    work(0);
    for (std::thread& thread : threads) thread.join();
    return out;
}

std::vector<float> widened_row(const ConstMatrix& matrix, std::int64_t row) {
    std::vector<float> values(static_cast<std::size_t>(matrix.columns));
    widen(matrix.row(row), matrix.dtype, values.data(), matrix.columns);
    return values;
}

/// Σ over ranks of one row, in rank order, in `Real`.
template <typename Real>
std::vector<Real> summed_row(const std::vector<ConstMatrix>& partials, std::int64_t row) {
    std::vector<Real> sum;
    for (const ConstMatrix& partial : partials) {
        const std::vector<float> values = widened_row(partial, row);
        if (sum.empty()) {
            sum.assign(values.begin(), values.end());
            continue;
        }
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += static_cast<Real>(values[i]);
    }
    return sum;
}

std::vector<float> gamma_of(const ReferenceInput& input) {
    std::vector<float> gamma(static_cast<std::size_t>(input.shape.latent), 1.0F);
    if (input.gamma != nullptr) widen(input.gamma, input.shape.activations, gamma.data(), input.shape.latent);
    return gamma;
}

double column_scale(const ReferenceInput& input, std::int64_t column) {
    return static_cast<double>(input.shape.routed_scale) * static_cast<double>(input.weight_scale) *
           (input.row_scales == nullptr ? 1.0 : static_cast<double>(input.row_scales[column]));
}

template <typename Value>
double relative_error(Value value_at, const std::vector<double>& reference) {
    double error = 0;
    double norm = 0;
    for (std::size_t i = 0; i < reference.size(); ++i) {
        if (!std::isfinite(reference[i])) continue;
        const double value = value_at(i);
        if (!std::isfinite(value)) return std::numeric_limits<double>::infinity();
        error += (value - reference[i]) * (value - reference[i]);
        norm += reference[i] * reference[i];
    }
    if (error == 0) return 0;
    return norm == 0 ? std::numeric_limits<double>::infinity() : std::sqrt(error / norm);
}

std::vector<float> widened(const ConstMatrix& matrix) {
    std::vector<float> values(static_cast<std::size_t>(matrix.rows * matrix.columns));
    for (std::int64_t row = 0; row < matrix.rows; ++row) {
        widen(matrix.row(row), matrix.dtype, values.data() + row * matrix.columns, matrix.columns);
    }
    return values;
}

}  // namespace

std::vector<double> reference_tail(const ReferenceInput& input) {
    const Shape& shape = input.shape;
    const std::int64_t tokens = input.routed.front().rows;
    const std::vector<float> gamma = gamma_of(input);
    std::vector<double> x;
    x.reserve(static_cast<std::size_t>(tokens * shape.latent));
    for (std::int64_t row = 0; row < tokens; ++row) {
        std::vector<double> sum = summed_row<double>(input.routed, row);
        if (shape.norm == Norm::rms) {
            double squares = 0;
            for (const double value : sum) squares += value * value;
            const double scale =
                1 / std::sqrt(squares / static_cast<double>(shape.latent) + static_cast<double>(shape.epsilon));
            for (std::size_t i = 0; i < sum.size(); ++i) sum[i] *= scale * static_cast<double>(gamma[i]);
        }
        x.insert(x.end(), sum.begin(), sum.end());
    }
    std::vector<double> out = project(x, tokens, input.weights);
    for (std::int64_t row = 0; row < tokens; ++row) {
        double* values = out.data() + row * shape.hidden;
        for (std::int64_t n = 0; n < shape.hidden; ++n) values[n] *= column_scale(input, n);
        const auto add = [&](const std::vector<double>& addend) {
            for (std::size_t i = 0; i < addend.size(); ++i) values[i] += addend[i];
        };
        add(summed_row<double>(input.shared, row));
        if (input.prefix.present()) add(summed_row<double>({input.prefix}, row));
    }
    return out;
}

std::vector<float> chain_tail(const ReferenceInput& input) {
    const Shape& shape = input.shape;
    const Dtype dtype = shape.activations;
    const std::int64_t tokens = input.routed.front().rows;
    const std::vector<float> gamma = gamma_of(input);
    std::vector<float> y;
    y.reserve(static_cast<std::size_t>(tokens * shape.latent));
    for (std::int64_t row = 0; row < tokens; ++row) {
        std::vector<float> sum = summed_row<float>(input.routed, row);
        for (float& value : sum) value = round_to(dtype, value);
        if (shape.norm == Norm::rms) {
            float squares = 0;
            for (const float value : sum) squares += value * value;
            const float scale = 1 / std::sqrt(squares / static_cast<float>(shape.latent) + shape.epsilon);
            for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = round_to(dtype, sum[i] * scale * gamma[i]);
        }
        y.insert(y.end(), sum.begin(), sum.end());
    }
    std::vector<float> out = project(y, tokens, input.weights);
    for (std::int64_t row = 0; row < tokens; ++row) {
        float* values = out.data() + row * shape.hidden;
        for (std::int64_t n = 0; n < shape.hidden; ++n) {
            values[n] = round_to(dtype, values[n] * static_cast<float>(column_scale(input, n)));
        }
        const std::vector<float> shared = summed_row<float>(input.shared, row);
        for (std::size_t i = 0; i < shared.size(); ++i) values[i] = round_to(dtype, round_to(dtype, shared[i]) + values[i]);
        if (!input.prefix.present()) continue;
        const std::vector<float> prefix = widened_row(input.prefix, row);
        for (std::size_t i = 0; i < prefix.size(); ++i) values[i] = round_to(dtype, values[i] + prefix[i]);
    }
    return out;
}

double relative_l2(const ConstMatrix& value, const std::vector<double>& reference) {
    return relative_l2(widened(value), reference);
}

double relative_l2(const std::vector<float>& value, const std::vector<double>& reference) {
    return relative_error([&](std::size_t i) { return static_cast<double>(value[i]); }, reference);
}

double max_abs_error(const ConstMatrix& value, const std::vector<double>& reference) {
    const std::vector<float> values = widened(value);
    double worst = 0;
    for (std::size_t i = 0; i < reference.size(); ++i) {
        if (std::isfinite(reference[i])) worst = std::max(worst, std::abs(static_cast<double>(values[i]) - reference[i]));
    }
    return worst;
}

}  // namespace latent_moe

#include "cli/rank_work.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "core/digest.h"

namespace latent_moe::cli {

Context make_context(Problem& problem, const Bootstrap& bootstrap, const std::vector<std::int64_t>& layers) {
    Context context = Context::create(problem.shape, bootstrap, problem.options);
    agreed(bootstrap, "adding layers", [&] {
        for (const std::int64_t layer : layers) {
            const LayerWeights loaded = problem.weights.load(layer, problem.rows_of_rank(bootstrap.rank));
            context.add_layer(layer, loaded.view(), loaded.gamma_data());
        }
    });
    context.seal();
    return context;
}

std::optional<std::string> refusal_of(const Plan& plan, Tail tail) {
    for (const Refusal& refusal : plan.refused) {
        if (refusal.tail == tail) return refusal.reason;
    }
    return std::nullopt;
}

void throw_none_can_run(const TailChoice& choice, const Refusal* first_refusal) {
    const std::string reason = first_refusal == nullptr ? "the plan allows none" : first_refusal->reason;
    if (choice.one_named()) {
        throw Error(StatusCode::unsupported,
                    fmt::format("tail {} can run for none of the --tokens: {}", name(choice.named.front()), reason));
    }
    const std::string which = first_refusal == nullptr ? std::string() : fmt::format("{}: ", name(first_refusal->tail));
    throw Error(StatusCode::unsupported, fmt::format("no tail can run for any of the --tokens; {}{}", which, reason));
}

std::optional<TokenRange> own_rows(const Context& context, std::int64_t tokens) {
    if (!context.options().sequence_parallel) return std::nullopt;
    return context.own_tokens(tokens, context.rank());
}

OutputRows::OutputRows(const Context& context, std::int64_t most_tokens)
    : context_(&context), rows_(most_tokens, context.shape().hidden, context.shape().activations) {}

ConstMatrix OutputRows::written(std::int64_t tokens) const noexcept {
    const std::optional<TokenRange> own = own_rows(*context_, tokens);
    return rows_.view().row_range(0, own ? own->count : tokens);
}

ConstMatrix OutputRows::whole(const Bootstrap& bootstrap, std::int64_t tokens) {
    if (!own_rows(*context_, tokens)) return written(tokens);
    const std::int64_t most = tokens / bootstrap.world + 1;  // own rows differ by at most one
    const auto chunk = static_cast<std::size_t>(most * rows_.view().row_bytes());
    Tensor padded(most, context_->shape().hidden, context_->shape().activations);
    const ConstMatrix own = written(tokens);
    padded.fill_bytes(0);
    std::memcpy(padded.view().data, own.data, static_cast<std::size_t>(own.rows * own.row_bytes()));
    std::vector<std::byte> received(chunk * static_cast<std::size_t>(bootstrap.world));
    bootstrap.all_gather_bytes(padded.view().data, received.data(), chunk);
    whole_ = Tensor(tokens, context_->shape().hidden, context_->shape().activations);
    for (int rank = 0; rank < bootstrap.world; ++rank) {
        const TokenRange range = context_->own_tokens(tokens, rank);
        std::memcpy(whole_.view().row(range.first), received.data() + static_cast<std::size_t>(rank) * chunk,
                    static_cast<std::size_t>(range.count * own.row_bytes()));
    }
    return std::as_const(whole_).view();
}

bool same_on_all_ranks(const Bootstrap& bootstrap, const ConstMatrix& matrix) {
    const std::vector<std::uint64_t> digests = gathered(bootstrap, digest_of(matrix));
    return std::all_of(digests.begin(), digests.end(), [&](std::uint64_t digest) { return digest == digests.front(); });
}

Timing time_calls(const Bootstrap& bootstrap, std::optional<int> repeats, FunctionRef<void(int repetition)> call) {
    using Clock = std::chrono::steady_clock;
    const auto timed = [&](int repetition) {
        gathered(bootstrap, 0);  // all start together
        const auto begin = Clock::now();
        call(repetition);
        return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
    };
    constexpr double enough_us = 1e6;
    timed(0);
    const double first = timed(1);  // rank 0's figure decides for all
    const int count = repeats.value_or(
        std::clamp(static_cast<int>(enough_us / std::max(gathered(bootstrap, first).front(), 1.0)), 3, 200));
    std::vector<double> slowest;
    for (int repetition = 0; repetition < count; ++repetition) {
        const std::vector<double> all = gathered(bootstrap, timed(repetition));
        slowest.push_back(*std::max_element(all.begin(), all.end()));
    }
    std::sort(slowest.begin(), slowest.end());
    const auto quantile = [&](double part) {
        return slowest[static_cast<std::size_t>(part * static_cast<double>(slowest.size() - 1) + 0.5)];
    };
    return {quantile(0.5), quantile(0.1), quantile(0.9), count};
}

std::string shape_text(const Shape& shape) {
    const std::string norm = shape.norm == Norm::none ? "none" : fmt::format("rms (eps {:g})", shape.epsilon);
    const std::string scale =
        shape.routed_scale == 1 ? std::string() : fmt::format(", routed scale {:g}", shape.routed_scale);
    return fmt::format("hidden {}, latent {}, norm {}{}, {}", shape.hidden, shape.latent, norm, scale,
                       name(shape.activations));
}

}  // namespace latent_moe::cli

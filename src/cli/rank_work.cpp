#include "cli/rank_work.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "context/backends.h"
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

DeviceTensor::DeviceTensor(Memory& memory, std::int64_t rows, std::int64_t columns, Dtype dtype)
    : memory_(nullptr, DeviceRelease{&memory}), rows_(rows), columns_(columns), dtype_(dtype) {
    // Never empty: a tensor of no rows is still a tensor, with an address.
    memory_.reset(static_cast<std::byte*>(memory.allocate(std::max<std::size_t>(bytes(), 64))));
}

DeviceTensor::DeviceTensor(Memory& memory, const ConstMatrix& source) {
    if (!source.present()) return;
    *this = DeviceTensor(memory, source.rows, source.columns, source.dtype);
    memory.upload(view().data, source.data, bytes());
}

std::unique_ptr<Device> make_device(const Options& options, const Bootstrap& bootstrap) {
    std::unique_ptr<Device> device;
    agreed(bootstrap, "opening the device", [&] {
        const BackendEntry& backend = find_backend(options.backend);
        if (backend.make_device == nullptr) {
            throw Error(StatusCode::unavailable,
                        fmt::format("backend {} gives the command line no device memory", backend.name));
        }
        device = backend.make_device(bootstrap, options);
    });
    return device;
}

RankInputs::RankInputs(Memory& memory, const CallInputs& inputs, int rank) {
    const auto at = static_cast<std::size_t>(rank);
    if (inputs.uncombined.empty()) {
        routed = DeviceTensor(memory, inputs.routed[at].view());
    } else {
        const UncombinedRows& from = inputs.uncombined[at];
        const auto entries = static_cast<std::int64_t>(from.map.size());
        routed = DeviceTensor(memory, from.rows.view());
        slot_weights = DeviceTensor(memory, from.weights.view());
        // To a copy one 32-bit type is like another.
        row_map =
            DeviceTensor(memory, {reinterpret_cast<const std::byte*>(from.map.data()), 1, entries, entries, Dtype::f32});
        slots = from.slots;
    }
    if (!inputs.shared.empty()) shared = DeviceTensor(memory, inputs.shared[at].view());
    prefix = DeviceTensor(memory, inputs.prefix.view());
    refer_to_uncombined();
}

RankInputs::RankInputs(Memory& memory, const RankInputs& others)
    : routed(memory, ConstMatrix(others.routed.view())),
      slot_weights(memory, ConstMatrix(others.slot_weights.view())),
      row_map(memory, ConstMatrix(others.row_map.view())),
      shared(memory, ConstMatrix(others.shared.view())),
      prefix(memory, ConstMatrix(others.prefix.view())),
      slots(others.slots) {
    refer_to_uncombined();
}

void RankInputs::refer_to_uncombined() {
    if (slots == 0) return;
    const Matrix rows = routed.view();
    uncombined = DeferredRows{.rows = {rows.data, rows.stride},
                              .count = rows.rows,
                              .slots = slots,
                              .weights = slot_weights.view().data,
                              .weight_dtype = slot_weights.view().dtype,
                              .map = reinterpret_cast<const std::int32_t*>(row_map.view().data)};
}

TailInput RankInputs::of(const Context& context, std::int64_t tokens) const noexcept {
    TailInput input{.shared = shared.view().data, .tokens = tokens};
    if (uncombined) {
        input.deferred = &*uncombined;
    } else {
        input.routed = routed.view().data;
    }
    if (!prefix.view().present()) return input;
    const bool own_only = context.options().sequence_parallel;
    input.prefix = prefix.view().row(own_only ? context.own_tokens(tokens, context.rank()).first : 0);
    return input;
}

RankOutput::RankOutput(Device& device, const Context& context, std::int64_t most_tokens)
    : device_(&device),
      context_(&context),
      rows_(device, most_tokens, context.shape().hidden, context.shape().activations) {}

void RankOutput::fill_bytes(int value) {
    host_ = Tensor(rows_.view().rows, rows_.view().columns, rows_.view().dtype);
    host_.fill_bytes(value);
    device_->upload(rows_.view().data, host_.view().data, rows_.bytes());
}

ConstMatrix RankOutput::written(std::int64_t tokens) {
    const bool own_only = context_->options().sequence_parallel;
    const std::int64_t count = own_only ? context_->own_tokens(tokens, context_->rank()).count : tokens;
    host_ = Tensor(count, rows_.view().columns, rows_.view().dtype);
    device_->synchronize();
    device_->download(host_.view().data, rows_.view().data, host_.bytes());
    return std::as_const(host_).view();
}

ConstMatrix RankOutput::whole(const Bootstrap& bootstrap, std::int64_t tokens) {
    const ConstMatrix own = written(tokens);
    if (!context_->options().sequence_parallel) return own;
    whole_ = gather_own_rows(bootstrap, *context_, own, tokens);
    return std::as_const(whole_).view();
}

Tensor gather_own_rows(const Bootstrap& bootstrap, const Context& context, const ConstMatrix& own, std::int64_t tokens) {
    const std::int64_t most = tokens / bootstrap.world + 1;  // own rows differ by at most one
    Tensor padded(most, own.columns, own.dtype);
    padded.fill_bytes(0);
    std::memcpy(padded.view().data, own.data, static_cast<std::size_t>(own.rows * own.row_bytes()));
    std::vector<std::byte> received(padded.bytes() * static_cast<std::size_t>(bootstrap.world));
    bootstrap.all_gather_bytes(padded.view().data, received.data(), padded.bytes());
    Tensor whole(tokens, own.columns, own.dtype);
    for (int rank = 0; rank < bootstrap.world; ++rank) {
        const TokenRange range = context.own_tokens(tokens, rank);
        std::memcpy(whole.view().row(range.first), received.data() + static_cast<std::size_t>(rank) * padded.bytes(),
                    static_cast<std::size_t>(range.count * own.row_bytes()));
    }
    return whole;
}

bool same_on_all_ranks(const Bootstrap& bootstrap, const ConstMatrix& matrix) {
    const std::vector<std::uint64_t> digests = gathered(bootstrap, digest_of(matrix));
    return std::all_of(digests.begin(), digests.end(), [&](std::uint64_t digest) { return digest == digests.front(); });
}

Timing summary_of(std::vector<double> us) {
    std::sort(us.begin(), us.end());
    const auto quantile = [&](double part) {
        return us[static_cast<std::size_t>(part * static_cast<double>(us.size() - 1) + 0.5)];
    };
    return {quantile(0.5), quantile(0.1), quantile(0.9), static_cast<int>(us.size())};
}

namespace {

/// A contestant's turns, recorded: all in one where they are short, else one each.
struct Recorded {
    std::vector<std::unique_ptr<Recording>> recordings;
    int turns_in_each = 1;
};

/// Collective: runs `time` on every rank; the slowest counts. A rank that fails makes all fail, each in its own words.
double slowest_us(const Bootstrap& bootstrap, const std::function<double()>& time) {
    gathered(bootstrap, 0);  // all start together
    double us = -1;
    std::exception_ptr failure;
    try {
        us = time();
    } catch (const Error&) {
        failure = std::current_exception();
    }
    const std::vector<double> all = gathered(bootstrap, us);
    if (failure) std::rethrow_exception(failure);
    const auto least = std::min_element(all.begin(), all.end());
    if (*least < 0) {
        throw Error(StatusCode::aborted,
                    fmt::format("rank {} failed while it was timed", static_cast<int>(least - all.begin())));
    }
    return *std::max_element(all.begin(), all.end());
}

}  // namespace

std::vector<std::vector<double>> time_side_by_side(const Bootstrap& bootstrap, Device& device, const HowToTime& how,
                                                   const std::vector<Turns>& contestants) {
    constexpr double long_enough_us = 300;  // for the launch of a recording not to show
    constexpr int most_copies = 16;
    constexpr double enough_us = 250e3;
    const auto check = [&] {
        if (how.check) how.check();
    };

    std::vector<Recorded> recorded(contestants.size());
    double longest = 1;
    for (std::size_t which = 0; which < contestants.size(); ++which) {
        const Turns& turns = contestants[which];
        if (how.begin) how.begin(static_cast<int>(which));
        Recorded& made = recorded[which];
        double turn_us = slowest_us(bootstrap, [&] {
            for (const std::function<void()>& turn : turns) turn();  // not recorded: what is set up once is set up now
            device.synchronize();
            check();
            made.recordings.push_back(device.record(turns.front()));
            return device.time_us(*made.recordings.front());
        });
        const int count = static_cast<int>(turns.size());
        if (how.turns_in_one && turn_us * count < long_enough_us * 4) {
            const int copies = std::clamp(static_cast<int>(long_enough_us / (turn_us * count)), 1, most_copies);
            made.turns_in_each = count * copies;
            made.recordings.clear();
            made.recordings.push_back(device.record([turns, copies] {
                for (int copy = 0; copy < copies; ++copy) {
                    for (const std::function<void()>& turn : turns) turn();
                }
            }));
        } else {
            for (std::size_t turn = 1; turn < turns.size(); ++turn) made.recordings.push_back(device.record(turns[turn]));
        }
        longest = std::max(longest, turn_us * made.turns_in_each);
    }

    const int repeats = how.repeats.value_or(static_cast<int>(std::clamp(enough_us / longest, 5.0, 100.0)));
    std::vector<std::vector<double>> us(contestants.size());
    for (int repetition = 0; repetition < repeats; ++repetition) {
        for (std::size_t which = 0; which < contestants.size(); ++which) {
            Recorded& made = recorded[which];
            Recording& recording = *made.recordings[static_cast<std::size_t>(repetition) % made.recordings.size()];
            us[which].push_back(slowest_us(bootstrap,
                                           [&] {
                                               const double measured = device.time_us(recording);
                                               check();
                                               return measured;
                                           }) /
                                made.turns_in_each);
        }
    }
    return us;
}

std::string shape_text(const Shape& shape) {
    const std::string norm = shape.norm == Norm::none ? "none" : fmt::format("rms (eps {:g})", shape.epsilon);
    const std::string scale =
        shape.routed_scale == 1 ? std::string() : fmt::format(", routed scale {:g}", shape.routed_scale);
    return fmt::format("hidden {}, latent {}, norm {}{}, {}", shape.hidden, shape.latent, norm, scale,
                       name(shape.activations));
}

}  // namespace latent_moe::cli

#include "cli/rank_bench.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "cli/memory.h"
#include "cli/onednn_product.h"
#include "context/backends.h"
#include "context/context_access.h"
#include "core/numeric.h"
#include "core/tune_table.h"
#include "cpu/cpu_backend.h"
#include "latent_moe/status.h"

namespace latent_moe::cli {
namespace {

constexpr int least_input_sets = 3;
constexpr int most_input_sets = 12;
/// Inputs of a call beyond this leave no room in a cache for those of the next: they come from memory, here too.
constexpr double cached_bytes = 16e6;
constexpr double beyond_caches_bytes = 160e6;

/// Drawn layers are windows of one drawing, so many rows after one another: every layer has weights of its own, and a
/// hundred of them take no longer to draw than one.
constexpr std::int64_t rows_between_layers = 8;

Producer producer_of(InputState state) {
    switch (state) {
        case InputState::fresh_early: return Producer::early;
        case InputState::cooperating: return Producer::cooperating;
        default: return Producer::late;
    }
}

/// Dependent launch is the fused tail's; the producers that let it start early mean nothing to others.
bool starts_early(Tail tail) {
    return tail == Tail::fused;
}

/// Which tails run for so many tokens; the others are noted once.
std::vector<Tail> tails_to_time(const Arguments& arguments, const Plan& plan, BenchResult& result) {
    if (arguments.tail.kind == TailChoice::Kind::automatic)
        return plan.candidates.empty() ? std::vector<Tail>{} : std::vector{plan.tail};
    std::vector<Tail> tails;
    for (int index = 0; index < tail_count; ++index) {
        const Tail tail = static_cast<Tail>(index);
        const std::vector<Tail>& named = arguments.tail.named;
        if (!named.empty() && std::find(named.begin(), named.end(), tail) == named.end()) continue;
        if (const auto reason = refusal_of(plan, tail)) {
            result.refuse(name(tail), fmt::format("{} (at {} tokens)", *reason, plan.tokens));
        } else {
            tails.push_back(tail);
        }
    }
    return tails;
}

Tensor downloaded(Device& device, const DeviceTensor& tensor, std::int64_t rows) {
    Tensor host(rows, tensor.view().columns, tensor.view().dtype);
    device.download(host.view().data, tensor.view().data, host.bytes());
    return host;
}

/// ‖a − b‖ / ‖b‖; NaN if either holds one.
double relative_l2(const ConstMatrix& a, const ConstMatrix& b) {
    std::vector<float> x(static_cast<std::size_t>(a.columns));
    std::vector<float> y(static_cast<std::size_t>(a.columns));
    double difference = 0;
    double norm = 0;
    for (std::int64_t row = 0; row < a.rows; ++row) {
        widen(a.row(row), a.dtype, x.data(), a.columns);
        widen(b.row(row), b.dtype, y.data(), b.columns);
        for (std::size_t at = 0; at < x.size(); ++at) {
            const double apart = static_cast<double>(x[at]) - static_cast<double>(y[at]);
            difference += apart * apart;
            norm += static_cast<double>(y[at]) * static_cast<double>(y[at]);
        }
    }
    return std::sqrt(difference / norm);
}

}  // namespace

std::vector<std::int64_t> layers_that_fit(Problem& problem, int wanted) {
    const double copies = problem.options.keep_whole_weights ? problem.world : 1;
    const double layer_bytes = static_cast<double>(problem.shape.hidden * problem.shape.latent) * 2 * copies;
    const int fitting = static_cast<int>(std::clamp(available_memory() * 0.6 / layer_bytes, 1.0, 1024.0));
    return problem.weights.layers(problem.layer, std::min(wanted, fitting));
}

RankBench::RankBench(const Arguments& arguments, Problem& problem, const Bootstrap& bootstrap,
                     const std::vector<std::int64_t>& layers, Progress& progress)
    : arguments_(arguments),
      problem_(problem),
      bootstrap_(bootstrap),
      progress_(progress),
      device_([&] {
          progress.say("opening the device");
          return make_device(problem.options, bootstrap);
      }()),
      context_([&] {
          progress.say("creating the context (products are measured, kernels loaded)");
          return Context::create(problem.shape, bootstrap, problem.options);
      }()),
      capabilities_(ContextAccess::capabilities(context_)) {
    const auto make_external = find_backend(problem.options.backend).make_external_tails;
    if (make_external != nullptr && !arguments.no_external) {
        progress_.say("setting up other libraries");
        external_ = make_external(problem.shape, bootstrap, problem.options, *device_);
    }
    progress_.say("adding {} layers", layers.size());
    add_layers(layers);
    progress_.say("sealing the context");
    context_.seal();
    progress_.say("drawing inputs");
    own_ = make_buffers(*device_);
    if (external_) {
        for (ExternalTail* tail : external_->tails()) {
            if (!others_.contains(&tail->memory())) others_.emplace(&tail->memory(), make_buffers(tail->memory()));
        }
    }
}

RankBench::~RankBench() = default;

void RankBench::add_layers(const std::vector<std::int64_t>& layers) {
    const bool whole = problem_.options.keep_whole_weights || external_ != nullptr;
    TokenRange rows = whole ? TokenRange{0, problem_.shape.hidden} : problem_.rows_of_rank(bootstrap_.rank);
    const std::int64_t count = rows.count;
    const bool drawn = problem_.weights.is_drawn();
    LayerWeights loaded;
    if (drawn) {
        rows.count += rows_between_layers * (std::ssize(layers) - 1);
        agreed(bootstrap_, "drawing weights", [&] { loaded = problem_.weights.load(layers.front(), rows); });
    }
    for (std::size_t at = 0; at < layers.size(); ++at) {
        WeightView view;
        agreed(bootstrap_, "adding layers", [&] {
            if (!drawn) loaded = problem_.weights.load(layers[at], rows);
            view = loaded.view();
            view.rows = count;
            if (drawn) {
                view.data = static_cast<const std::byte*>(view.data) +
                            static_cast<std::int64_t>(at) * rows_between_layers * loaded.rows.row_bytes();
            }
            context_.add_layer(layers[at], view, loaded.gamma_data());
        });
        if (external_) external_->add_layer(view, loaded.gamma_data());
    }
}

int RankBench::sets_for(std::int64_t tokens) const {
    if (problem_.inputs) return 1;
    const auto widths = static_cast<double>(problem_.shape.latent + 2 * problem_.shape.hidden);
    const double bytes = static_cast<double>(tokens) * widths * static_cast<double>(bytes_of(problem_.shape.activations));
    if (!device_->has_producers() || bytes < cached_bytes) return least_input_sets;
    return std::clamp(static_cast<int>(beyond_caches_bytes / bytes) + 1, least_input_sets, most_input_sets);
}

/// The host draws one set; what other sets hold does not matter, only where.
RankBench::Buffers RankBench::make_buffers(Memory& memory) {
    Buffers buffers;
    if (own_.sets.empty()) {
        std::vector<bool> needed(static_cast<std::size_t>(problem_.world));
        needed[static_cast<std::size_t>(bootstrap_.rank)] = true;
        buffers.sets.emplace_back(memory, make_inputs(arguments_, problem_, needed), bootstrap_.rank);
    } else {
        buffers.sets.emplace_back(memory, own_.sets.front());
    }
    std::vector<std::int64_t> timed = problem_.tokens;
    for (const std::int64_t tokens : untried_tokens(problem_.tokens, arguments_.verify)) timed.push_back(tokens);
    int sets = 1;
    for (const std::int64_t tokens : timed) sets = std::max(sets, sets_for(tokens));
    while (std::ssize(buffers.sets) < sets) {
        RankInputs copy(memory, buffers.sets.front());
        buffers.sets.push_back(std::move(copy));
    }
    if (device_->has_producers()) buffers.live = std::make_unique<RankInputs>(memory, buffers.sets.front());
    buffers.out = DeviceTensor(memory, problem_.most_tokens(), problem_.shape.hidden, problem_.shape.activations);
    return buffers;
}

std::vector<InputState> RankBench::states() const {
    if (arguments_.input_states) return *arguments_.input_states;
    if (!device_->has_producers()) return {InputState::raw};
    return {InputState::raw, InputState::fresh_late, InputState::fresh_early, InputState::cooperating};
}

void RankBench::enqueue_producer(InputState state, Buffers& buffers, int set, std::int64_t tokens) {
    const RankInputs& from = buffers.sets[static_cast<std::size_t>(set)];
    std::array<FreshInput, 2> pieces;
    std::size_t count = 0;
    const auto add = [&](const DeviceTensor& to, const DeviceTensor& source) {
        if (!source.view().present() || tokens == 0) return;
        pieces[count++] = {to.view().data, source.view().data, static_cast<std::size_t>(tokens * source.view().row_bytes())};
    };
    add(buffers.live->routed, from.routed);
    add(buffers.live->shared, from.shared);
    device_->produce(producer_of(state), std::span(pieces.data(), count));
}

template <typename Run>
Turns RankBench::passes(InputState state, Buffers& buffers, std::int64_t tokens, Run run) {
    const int sets = std::min(sets_for(tokens), static_cast<int>(std::ssize(buffers.sets)));
    Turns turns;
    for (int turn = 0; turn < std::min(sets, least_input_sets); ++turn) {
        turns.emplace_back([this, &buffers, state, tokens, sets, turn, run] {
            for (std::size_t layer = 0; layer < context_.layer_count(); ++layer) {
                const int set = (turn + static_cast<int>(layer)) % sets;
                if (state != InputState::raw) enqueue_producer(state, buffers, set, tokens);
                TailInput input = buffers.sets[static_cast<std::size_t>(set)].of(context_, tokens);
                if (state != InputState::raw) {  // the prefix was there before the experts ran
                    const TailInput fresh = buffers.live->of(context_, tokens);
                    input.routed = fresh.routed;
                    input.shared = fresh.shared;
                }
                run(layer, input);
            }
        });
    }
    return turns;
}

Turns RankBench::passes_of(Tail tail, InputState state, bool dependent_launch, std::int64_t tokens) {
    return passes(state, own_, tokens, [this, tail, dependent_launch](std::size_t layer, TailInput input) {
        input.starts_early = input.releases_early = dependent_launch;
        require(context_.layer(layer).run(tail, input, own_.out.view().data, device_->stream()));
    });
}

Turns RankBench::passes_of(ExternalTail& tail, InputState state, std::int64_t tokens) {
    Buffers& buffers = others_.at(&tail.memory());
    return passes(state, buffers, tokens, [this, &tail, &buffers](std::size_t layer, const TailInput& input) {
        tail.run(layer, input, buffers.out.view().data, device_->stream());
    });
}

Turns RankBench::producer_alone(InputState state, std::int64_t tokens) {
    return passes(state, own_, tokens, [](std::size_t, const TailInput&) {});
}

CostedCall RankBench::costed(std::int64_t tokens) const {
    return {.shape = problem_.shape,
            .world = problem_.world,
            .tokens = tokens,
            .shared = problem_.options.shared,
            .weight_element_bytes = capabilities_.weight_element_bytes};
}

BenchRow RankBench::row(std::string tail, std::string backend, InputState state, std::int64_t tokens,
                        const Work& work) const {
    BenchRow row{.tail = std::move(tail), .backend = std::move(backend), .inputs = state, .tokens = tokens};
    row.layers = static_cast<int>(context_.layer_count());
    row.work = work;
    row.floor_us = floor_us(problem_.world, work, capabilities_.machine);
    return row;
}

std::vector<RankBench::Contestant> RankBench::contestants(std::int64_t tokens, BenchResult& result) {
    std::vector<Contestant> all;
    for (const Tail tail : tails_to_time(arguments_, context_.plan(tokens), result)) {
        const Work work = work_of(tail, costed(tokens));
        for (const InputState state : states()) {
            for (const bool dependent_launch : arguments_.dependent_launch) {
                const bool can_start_early = starts_early(tail) && capabilities_.dependent_launch;
                if (dependent_launch && !can_start_early) continue;
                const bool lets_start_early = state == InputState::fresh_early || state == InputState::cooperating;
                if (lets_start_early && !dependent_launch) continue;
                Contestant& added = all.emplace_back();
                added.row = row(name(tail), context_.backend(), state, tokens, work);
                added.row.dependent_launch = dependent_launch;
                added.turns = passes_of(tail, state, dependent_launch, tokens);
            }
        }
    }
    return all;
}

/// A peer that computes something else is no peer. Collective; throws on every rank alike.
void RankBench::require_same_answer(ExternalTail& tail, std::int64_t tokens) {
    constexpr double enough = 2e-2;  // bf16 in another order of roundings
    const Plan plan = context_.plan(tokens);
    double error = 0;
    agreed(bootstrap_, tail.name().c_str(), [&] {
        Buffers& theirs = others_.at(&tail.memory());
        const RankInputs& inputs = own_.sets.front();
        require(context_.layer(0).run(plan.candidates.front().tail, inputs.of(context_, tokens), own_.out.view().data,
                                      device_->stream()));
        device_->synchronize();
        require_no_fault();
        const auto copy = [&](const DeviceTensor& from, const DeviceTensor& to) {
            if (from.view().present()) tail.memory().upload(to.view().data, from.view().data, from.bytes());
        };
        copy(inputs.routed, theirs.live->routed);
        copy(inputs.shared, theirs.live->shared);  // which `tail` may overwrite
        tail.run(0, theirs.live->of(context_, tokens), theirs.out.view().data, device_->stream());
        device_->synchronize();
        error = relative_l2(downloaded(*device_, theirs.out, tokens).view(), downloaded(*device_, own_.out, tokens).view());
    });
    const std::vector<double> errors = gathered(bootstrap_, error);
    for (const double each : errors) {
        if (each <= enough) continue;  // false for NaN
        throw Error(StatusCode::internal,
                    fmt::format("its output differs from {}'s by {:.1e} (relative L2), expected at most {:.0e}",
                                name(plan.candidates.front().tail), each, enough));
    }
}

/// One that cannot run or computes something else is refused, and the others go on.
void RankBench::add_external(std::int64_t tokens, std::vector<Contestant>& all, BenchResult& result) {
    if (!external_ || tokens == 0) return;  // without tokens nobody else would do anything
    for (const ExternalTails::Refused& refused : external_->refused()) result.refuse(refused.name, refused.reason);
    progress_.say("{} tokens: choosing other libraries' algorithms", tokens);
    external_->prepare(tokens);
    for (ExternalTail* tail : external_->tails()) {
        const Work work = work_of(tail->like(), costed(tokens));
        try {
            require_same_answer(*tail, tokens);
        } catch (const Error& error) {
            result.refuse(tail->name(), fmt::format("{} (at {} tokens)", error.what(), tokens));
            continue;
        }
        for (const InputState state : states()) {
            if (state != InputState::raw && state != InputState::fresh_late) continue;
            Contestant& added = all.emplace_back();
            added.row = row(tail->name(), tail->libraries(), state, tokens, work);
            added.row.external = true;
            added.turns = passes_of(*tail, state, tokens);
        }
    }
}

void RankBench::warm_up(BenchResult& result) {
    for (const std::int64_t tokens : problem_.tokens) {
        progress_.say("{} tokens: every tail once", tokens);
        for (const Tail tail : tails_to_time(arguments_, context_.plan(tokens), result))
            passes_of(tail, InputState::raw, false, tokens).front()();
        device_->synchronize();
        require_no_fault();
    }
    std::size_t own = own_.out.bytes();
    for (const RankInputs& set : own_.sets) own += set.bytes();
    const std::vector<std::size_t> activations = gathered(bootstrap_, own);
    const std::vector<std::size_t> weights = gathered(bootstrap_, context_.weight_bytes());
    for (int rank = 0; rank < (arguments_.processes ? 1 : problem_.world); ++rank) {  // those of this process
        result.memory.weights += weights[static_cast<std::size_t>(rank)];
        result.memory.activations += activations[static_cast<std::size_t>(rank)];
    }
    result.memory.peak = peak_resident_bytes();
    gathered(bootstrap_, 0);  // before anyone goes on
    result.backend = context_.backend();
    result.machine = capabilities_.machine;
}

void RankBench::time(std::int64_t tokens, BenchResult& result) {
    std::vector<Contestant> all = contestants(tokens, result);
    if (all.empty()) return;
    add_external(tokens, all, result);
    const std::size_t rows = all.size();

    // Producers alone, one of each kind that is needed.
    std::array<int, input_state_count> alone;
    alone.fill(-1);
    for (std::size_t at = 0; at < rows; ++at) {
        const InputState state = all[at].row.inputs;
        if (state == InputState::raw) continue;
        int& index = alone[static_cast<std::size_t>(state)];
        if (index < 0) {
            index = static_cast<int>(all.size());
            all.push_back({.row = {}, .turns = producer_alone(state, tokens)});
        }
        all[at].producer = index;
    }

    std::unique_ptr<OnednnProduct> product = make_product(tokens);
    if (product) {
        Work work = work_of(Tail::column_parallel, {.shape = problem_.shape, .world = problem_.world, .tokens = tokens});
        work.wire_bytes = 0;
        BenchRow told = row(product_row, "onednn", InputState::raw, tokens, work);
        told.layers = product->layers();
        told.floor_us = floor_us(1, work, capabilities_.machine);
        all.push_back({.row = std::move(told), .turns = {[&product] {
                                                   for (int layer = 0; layer < product->layers(); ++layer)
                                                       product->run(layer);
                                               }}});
        result.product_dtype = product->dtype();
    }

    std::vector<Turns> turns;
    for (const Contestant& each : all) turns.push_back(each.turns);
    const std::vector<std::vector<double>> us =
        time_side_by_side(bootstrap_, *device_,
                          {.repeats = arguments_.repeats,
                           .turns_in_one = !arguments_.step,
                           .check = [this] { require_no_fault(); },
                           .begin = [&](int which) { progress_.say("{} tokens: {} of {}", tokens, which + 1, all.size()); }},
                          turns);
    for (std::size_t at = 0; at < all.size(); ++at) {
        Contestant& each = all[at];
        if (each.row.tail.empty()) continue;  // a producer
        std::vector<double> figures = us[at];
        const double layers = each.row.layers;
        if (each.producer >= 0) {
            const std::vector<double>& producer = us[static_cast<std::size_t>(each.producer)];
            for (std::size_t i = 0; i < figures.size(); ++i) figures[i] -= producer[i];
            each.row.with_producer_us = summary_of(us[at]).median_us / layers;
            each.row.producer_us = summary_of(producer).median_us / layers;
        }
        for (double& figure : figures) figure /= layers;
        each.row.timing = summary_of(std::move(figures));
        result.rows.push_back(std::move(each.row));
    }
}

/// oneDNN's product of one rank's shard alone, over as many layers as fit.
std::unique_ptr<OnednnProduct> RankBench::make_product(std::int64_t tokens) const {
    if (context_.backend() != "cpu" || arguments_.no_external || tokens == 0 || problem_.shape.hidden % problem_.world != 0)
        return nullptr;
    const std::int64_t columns = problem_.shape.hidden / problem_.world;
    const double layer_bytes = static_cast<double>(columns * problem_.shape.latent) * sizeof(float) * bootstrap_.local_world;
    const int fitting = static_cast<int>(std::clamp(available_memory() * 0.6 / layer_bytes, 1.0, 1024.0));
    const int layers = gathered(bootstrap_, std::min(fitting, static_cast<int>(context_.layer_count()))).front();
    return std::make_unique<OnednnProduct>(tokens, problem_.shape.latent, columns, layers,
                                           cpu_threads_of_rank(problem_.options, bootstrap_.local_world));
}

void RankBench::require_no_fault() const {
    if (const auto fault = context_.poll_fault()) throw Error(StatusCode::aborted, fault->message);
}

namespace {

/// A kernel as it crosses between processes.
struct SentKernel {
    std::array<char, 200> name;
    std::uint64_t stream;
    double begin_us;
    double end_us;
    int rank;
    bool is_all_reduce;
};

/// Collective: every process's kernels, on every rank. Devices are numbered by the rank whose process told of them where
/// ranks are processes.
std::vector<KernelRun> gathered_kernels(const Bootstrap& bootstrap, const std::vector<KernelRun>& own) {
    const std::vector<std::size_t> counts = gathered(bootstrap, own.size());
    const std::size_t most = *std::max_element(counts.begin(), counts.end());
    std::vector<SentKernel> sent(most);
    for (std::size_t at = 0; at < own.size(); ++at) {
        SentKernel& to = sent[at];
        std::strncpy(to.name.data(), own[at].name.c_str(), to.name.size() - 1);
        to.stream = own[at].stream;
        to.begin_us = own[at].begin_us;
        to.end_us = own[at].end_us;
        to.rank = own[at].device;
        to.is_all_reduce = own[at].is_all_reduce;
    }
    std::vector<SentKernel> received(most * static_cast<std::size_t>(bootstrap.world));
    bootstrap.all_gather_bytes(sent.data(), received.data(), most * sizeof(SentKernel));
    std::vector<KernelRun> all;
    for (std::size_t rank = 0; rank < counts.size(); ++rank) {
        for (std::size_t at = 0; at < counts[rank]; ++at) {
            const SentKernel& from = received[rank * most + at];
            all.push_back({.name = from.name.data(),
                           .device = from.rank,
                           .stream = from.stream,
                           .is_all_reduce = from.is_all_reduce,
                           .begin_us = from.begin_us,
                           .end_us = from.end_us});
        }
    }
    return all;
}

}  // namespace

namespace {

/// Under a tracer the branches of a graph start some microseconds apart, which says nothing of the tail that is first.
std::vector<KernelRun> without_first_tail(const std::vector<KernelRun>& all, std::size_t tails) {
    std::map<int, std::vector<KernelRun>> devices;
    for (const KernelRun& run : all) devices[run.device].push_back(run);
    std::vector<KernelRun> rest;
    for (auto& [device, runs] : devices) {
        std::sort(runs.begin(), runs.end(), [](const KernelRun& a, const KernelRun& b) { return a.begin_us < b.begin_us; });
        rest.insert(rest.end(), runs.begin() + static_cast<std::ptrdiff_t>(runs.size() / tails), runs.end());
    }
    return rest;
}

}  // namespace

void RankBench::trace(BenchResult& result, std::vector<KernelRun>& kernels) {
    const bool traces = arguments_.processes || bootstrap_.rank == 0;  // one of each process
    std::unique_ptr<KernelTrace> trace;
    agreed(bootstrap_, "tracing", [&] {
        if (traces) trace = find_backend(problem_.options.backend).trace_kernels();
    });
    const bool early = capabilities_.dependent_launch && arguments_.dependent_launch.back();
    for (const std::int64_t tokens : problem_.tokens) {
        for (const Tail tail : tails_to_time(arguments_, context_.plan(tokens), result)) {
            progress_.say("{} tokens: tracing {}", tokens, name(tail));
            const Turns turns = passes_of(tail, InputState::raw, early && starts_early(tail), tokens);
            const std::unique_ptr<Recording> recording = device_->record(turns.front());
            const auto replay = [&] {
                recording->replay();
                device_->synchronize();
                gathered(bootstrap_, 0);
            };
            replay();
            if (traces) static_cast<void>(trace->take());
            gathered(bootstrap_, 0);
            replay();
            std::vector<KernelRun> own = traces ? trace->take() : std::vector<KernelRun>{};
            if (arguments_.processes) {
                for (KernelRun& run : own) run.device = bootstrap_.rank;
            }
            const std::vector<KernelRun> all = gathered_kernels(bootstrap_, own);
            TracedTail traced{.tail = name(tail), .tokens = tokens};
            traced.launches = static_cast<double>(all.size()) / problem_.world / static_cast<double>(context_.layer_count());
            if (tail == Tail::overlap) traced.hidden_share = hidden_share(without_first_tail(all, context_.layer_count()));
            result.traced.push_back(traced);
            kernels.insert(kernels.end(), all.begin(), all.end());
        }
    }
}

}  // namespace latent_moe::cli

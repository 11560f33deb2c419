#include "latent_moe/context.h"

#include <fmt/format.h>

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "comm/bootstrap_transport.h"
#include "comm/transport.h"
#include "context/backends.h"
#include "context/call_checks.h"
#include "context/call_counters.h"
#include "context/context_access.h"
#include "context/self_check.h"
#include "context/tune_tables.h"
#include "core/agreement.h"
#include "core/deferred.h"
#include "core/log.h"
#include "core/one_line.h"
#include "core/partition.h"
#include "core/planner.h"
#include "core/tune_table.h"
#include "io/tune_file.h"
#include "latent_moe/version.h"
#include "tails/backend.h"
#include "tails/schedule.h"

namespace latent_moe {

class ContextState {
public:
    struct LayerEntry {
        std::int64_t id;
        std::unique_ptr<PackedLayer> packed;
    };

    ContextState(const Shape& shape_, const Bootstrap& bootstrap_, const Options& options_, const BackendEntry& entry)
        : shape(shape_),
          bootstrap(bootstrap_),
          options(options_),
          backend(entry.make(shape, bootstrap, options)),
          row_alignment(backend->capabilities().row_alignment),
          host_memory(backend->capabilities().host_memory),
          planner(shape, bootstrap.world, options, backend->capabilities()),
          self_check(*backend, shape, options.self_check_period, options.self_check_folder) {}
    ContextState(const ContextState&) = delete;
    ContextState& operator=(const ContextState&) = delete;
    ~ContextState() { log(LogLevel::info, "{}: destroyed after {} calls", title(), next_call); }

    const Shape shape;
    const Bootstrap bootstrap;
    const Options options;
    const std::unique_ptr<Backend> backend;
    const std::int64_t row_alignment;
    const bool host_memory;
    Planner planner;
    SelfCheck self_check;
    CallCounters counters;
    std::vector<LayerEntry> layers;
    bool sealed = false;
    bool suspended = false;
    int number = 0;  ///< among the contexts that share these ranks
    std::uint64_t next_call = 0;

    /// A call whose second half is still to come.
    struct Half {
        std::size_t layer;
        Tail tail;
        std::int64_t tokens;
        Rows out;
    };
    std::optional<Half> half;

    /// The tail of the call before, which is that of the next one if as much is asked for: the layers of a step follow one
    /// another with the same tokens.
    struct Choice {
        std::int64_t tokens = -1;
        std::optional<Tail> asked;
        bool in_halves = false;
        Tail tail = Tail::replicated;
    };
    Choice choice;

    /// For log lines.
    std::string title() const noexcept {
        try {
            return fmt::format("rank {} of {}, context {}", bootstrap.rank, bootstrap.world, number);
        } catch (const std::exception&) {
            return {};
        }
    }

    TokenRange own_tokens(std::int64_t tokens, int rank) const noexcept {
        if (tokens < 0 || tokens > max_tokens_limit || rank < 0 || rank >= bootstrap.world) return {};
        return even_part(tokens, bootstrap.world, rank);
    }

    /// Runs `body` as the next call of the context's order: its exceptions become statuses, its faults stick.
    template <typename Body>
    Status call(CallIdentity& identity, Stream stream, Body body, bool finishes = false) noexcept {
        bool begun = false;
        // A call that is refused counts too: if a peer makes it, the next exchange tells both that they are out of step.
        identity.context = number;
        identity.call = next_call++;
        try {
            require_callable();
            if (half && !finishes) {
                throw Error(
                    StatusCode::unsupported,
                    fmt::format("layer {} has begun and not finished: call finish() on it first", layers[half->layer].id));
            }
            const auto begin = [&] {
                backend->begin_call(identity, stream);
                begun = true;
            };
            if (logs(LogLevel::debug)) log_call(identity);
            body(begin);
            if (!identity.is_tail) {
                counters.made_part();
            } else if (!half) {  // else its finish is still to come
                counters.made(identity.tail);
            }
            return {};
        } catch (const ExchangeError& error) {
            return failed(
                begun, {.rank = error.rank(), .phase = name(error.step()), .layer = identity.layer, .call = identity.call},
                error.status());
        } catch (const Error& error) {
            return failed(begun, {.layer = identity.layer, .call = identity.call}, error.status());
        } catch (const std::bad_alloc&) {
            return failed(begun, {.layer = identity.layer, .call = identity.call},
                          {StatusCode::out_of_memory, "out of memory in a call"});
        } catch (const std::exception& error) {
            return failed(begun, {.layer = identity.layer, .call = identity.call}, {StatusCode::internal, error.what()});
        } catch (...) {  // of a bootstrap that is the caller's
            return failed(begun, {.layer = identity.layer, .call = identity.call},
                          {StatusCode::internal, "an exception that is not a std::exception"});
        }
    }

    std::optional<Fault> fault() const {
        if (!failed_.load(std::memory_order_acquire) && backend->poll_fault().ok()) return std::nullopt;
        const std::lock_guard lock(fault_mutex_);
        if (fault_) return fault_;
        const Status device = backend->poll_fault();
        if (device.ok()) return std::nullopt;
        if (!saved_) saved_ = self_check.save_device_mismatch(device.message(), bootstrap.rank, number);
        return Fault{.message = device.message() + *saved_};
    }

    void abort(const std::string& given) {
        const std::string reason = one_line(given);
        record({.message = reason});
        backend->abort(reason);
    }

private:
    void require_callable() const {
        if (const std::optional<Fault> earlier = fault()) {
            throw Error(StatusCode::aborted, fmt::format("the context failed earlier: {}", earlier->message));
        }
        if (!sealed) {
            throw Error(StatusCode::unsupported,
                        "the context is not sealed: call seal() on every rank after the last layer");
        }
        if (suspended) throw Error(StatusCode::unsupported, "the context is suspended: call resume() on every rank first");
    }

    /// An error before `begin_call` concerns this call alone; after it ranks may be out of step, so it is the context's last
    /// word.
    Status failed(bool begun, Fault fault, Status status) noexcept {
        if (!begun) return refused(std::move(status));
        Status side = backend->end_after_failure();
        if (status.code() == StatusCode::aborted && !side.ok()) status = std::move(side);
        counters.failed(status.code());
        try {
            fault.message = status.message();
            record(std::move(fault));
            backend->abort(status.message());
        } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): the status itself still says what happened
        }
        return status;
    }

    Status refused(Status status) noexcept {
        if (status.code() == StatusCode::aborted) {  // an echo of the fault that was told before
            counters.failed(status.code());
        } else if (const std::uint64_t count = counters.refused(status.code()); is_power_of_ten(count)) {
            log(LogLevel::warn, "{}: call {} refused ({} number {}): {}", title(), next_call - 1, name(status.code()), count,
                status.message());
        }
        return status;
    }

    void record(Fault fault) {
        const std::lock_guard lock(fault_mutex_);
        if (fault_) return;
        log(LogLevel::error, "{}: failed in call {}{}{}: {}", title(), fault.call, fault.phase.empty() ? "" : " at the ",
            fault.phase, fault.message);
        fault_ = std::move(fault);
        failed_.store(true, std::memory_order_release);
    }

    void log_call(const CallIdentity& identity) const noexcept {
        log(LogLevel::debug, "{}: call {}: layer {}, {} tokens", title(), identity.call, identity.layer, identity.tokens);
    }

    mutable std::mutex fault_mutex_;
    std::optional<Fault> fault_;
    std::atomic<bool> failed_ = false;  ///< there is a `fault_`: so that calls need no lock to know that there is none
    mutable std::optional<std::string> saved_;  ///< what `fault` says of a device's mismatch beside the backend's words
};

namespace {

void describe(Agreement& agreement, const Shape& shape, const Options& options, const std::string& backend) {
    agreement.field("version", library_version());
    agreement.field("backend", backend);
    agreement.field("hidden", fmt::format("{}", shape.hidden));
    agreement.field("latent", fmt::format("{}", shape.latent));
    agreement.field("norm", name(shape.norm));
    agreement.field("epsilon", fmt::format("{}", shape.epsilon));
    agreement.field("routed_scale", fmt::format("{}", shape.routed_scale));
    agreement.field("activations", name(shape.activations));
    agreement.field("capacity_tokens", fmt::format("{}", options.capacity_tokens));
    agreement.field("max_tokens", fmt::format("{}", options.max_tokens));
    agreement.field("timeout_ms", fmt::format("{}", options.timeout_ms));
    agreement.field("keep_whole_weights", fmt::format("{}", options.keep_whole_weights));
    agreement.field("tail", options.tail ? name(*options.tail) : "any");
    agreement.field("tail_token_limit", fmt::format("{}", fmt::join(options.tail_token_limit, ",")));
    agreement.field("shared", name(options.shared));
    agreement.field("sequence_parallel", fmt::format("{}", options.sequence_parallel));
    agreement.field("expert_parallel", fmt::format("{}", options.expert_parallel));
    agreement.field("deferred_finalize", fmt::format("{}", options.deferred_finalize));
    agreement.field("batch_invariant", fmt::format("{}", options.batch_invariant));
    agreement.field("float8_weights", fmt::format("{}", options.float8_weights));
    agreement.field("custom_all_reduce", fmt::format("{}", options.custom_all_reduce));
    agreement.field("other_reducer_from_bytes", fmt::format("{}", options.other_reducer_from_bytes));
    agreement.field("captured", fmt::format("{}", options.captured));
    agreement.field("cpu_threads", fmt::format("{}", options.cpu_threads));
    agreement.field("reserved_sms", fmt::format("{}", options.reserved_sms));
    agreement.field("self_check_period", fmt::format("{}", options.self_check_period));
}

/// Refuses options that this backend does not serve.
void require_served(const Options& options, const Capabilities& capabilities) {
    if (options.batch_invariant && !capabilities.no_batch_invariance.empty())
        throw Error(StatusCode::unsupported, "batch_invariant: " + capabilities.no_batch_invariance);
}

/// What a step of set-up threw, as the text that the other ranks are told.
std::string text_of(const std::exception_ptr& failure) {
    if (!failure) return {};
    try {
        std::rethrow_exception(failure);
    } catch (const std::bad_alloc&) {
        return "out of memory";
    } catch (const std::exception& error) {
        return error.what();
    }
}

/// Runs a local step on every rank and lets all ranks know how it went: either all continue or all throw.
template <typename LocalStep>
void agreed_step(const Bootstrap& bootstrap, const Agreement& agreement, LocalStep step) {
    std::exception_ptr failure;
    try {
        step();
    } catch (const std::exception&) {
        failure = std::current_exception();
    }
    try {
        agreement.confirm(bootstrap, text_of(failure));
    } catch (const Error&) {
        if (failure) std::rethrow_exception(failure);  // in its own words, with its own code
        throw;
    }
}

/// Collective: rank 0 finds the table of measured times, and every rank plans by it.
PlanSource agreed_plan_source(const Bootstrap& bootstrap, const Options& options, const TuneKey& here) {
    PlanSource own;
    agreed_step(bootstrap, Agreement("context creation"), [&] {
        if (bootstrap.rank == 0) own = find_tune_table(options.tune_table, here);
    });
    const std::string text = text_of_rank_0(bootstrap, own.table ? io::tune_text({*own.table}) : std::string());
    PlanSource agreed{.note = text_of_rank_0(bootstrap, own.note)};
    if (!text.empty()) agreed.table = io::parse_tune_tables(text, agreed.note).front();
    return agreed;
}

/// What a context or a layer that was moved from says.
Status moved_from(const char* what) {
    return {StatusCode::invalid_argument, fmt::format("the {} was moved from, expected one that is in use", what)};
}

ContextState& state_of(const std::shared_ptr<ContextState>& state) {
    if (!state) throw Error(moved_from("context").code(), moved_from("context").message());
    return *state;
}

}  // namespace

Context Context::create(const Shape& shape, const Bootstrap& given, const Options& options) {
    Bootstrap bootstrap = given;
    if (!bootstrap.all_gather_bytes) throw Error(StatusCode::invalid_argument, "the bootstrap has no all_gather_bytes");
    if (bootstrap.world < 1 || bootstrap.world > max_world || bootstrap.rank < 0 || bootstrap.rank >= bootstrap.world) {
        throw Error(StatusCode::invalid_argument,
                    fmt::format("the bootstrap is rank {} of {}, expected a rank below a world of 1 to {}", bootstrap.rank,
                                bootstrap.world, max_world));
    }
    if (!bootstrap.transport) bootstrap.transport = make_bootstrap_transport(bootstrap);

    // First what the ranks were asked for, before anything is built on it; then whether all of them could build it.
    const BackendEntry* entry = nullptr;
    std::exception_ptr failure;
    Agreement agreement("context creation");
    try {
        validate(shape);
        validate(options, shape, bootstrap.world);
        entry = &find_backend(options.backend);
        describe(agreement, shape, options, entry->name);
    } catch (const Error&) {
        failure = std::current_exception();
    }
    agreed_step(bootstrap, agreement, [&] {
        if (failure) std::rethrow_exception(failure);
    });
    bootstrap.transport->set_timeout_ms(options.timeout_ms);
    const int number = bootstrap.transport->add_context();
    std::shared_ptr<ContextState> state;
    agreed_step(bootstrap, Agreement("context creation"), [&] {
        state = std::make_shared<ContextState>(shape, bootstrap, options, *entry);
        state->number = number;
        require_served(options, state->backend->capabilities());
    });
    const Capabilities capabilities = state->backend->capabilities();
    state->planner =
        Planner(shape, bootstrap.world, options, capabilities,
                agreed_plan_source(bootstrap, options,
                                   tune_key(shape, bootstrap.world, options, capabilities.device, capabilities.links)));
    agreed_step(bootstrap, Agreement("context creation"), [&] {
        if (options.tail && !state->planner.allowed(*options.tail, 0)) {
            throw Error(StatusCode::unsupported, fmt::format("tail {} cannot run: {}", name(*options.tail),
                                                             state->planner.refusal(*options.tail, 0)));
        }
    });
    if (!state->planner.choose(1)) {  // the same on every rank
        const Tail closest = options.sequence_parallel ? Tail::token_parallel : Tail::replicated;
        throw Error(StatusCode::unsupported,
                    fmt::format("no tail can run; {}, for one: {}", name(closest), state->planner.refusal(closest, 1)));
    }
    log(LogLevel::info, "{}: created on the {} backend, hidden {}, latent {}, {}", state->title(), entry->name, shape.hidden,
        shape.latent, name(shape.activations));
    return Context(std::move(state));
}

Layer Context::add_layer(std::int64_t id, const WeightView& up_projection, const void* gamma) {
    static_cast<void>(state_of(state_));
    if (state_->sealed) throw Error(StatusCode::unsupported, fmt::format("layer {}: the context is sealed already", id));
    for (const ContextState::LayerEntry& layer : state_->layers) {
        if (layer.id == id) throw Error(StatusCode::invalid_argument, fmt::format("layer {} was added already", id));
    }
    try {
        validate(up_projection, state_->shape, state_->bootstrap.world, gamma);
        state_->layers.push_back({id, state_->backend->pack(up_projection, gamma)});
    } catch (const Error& error) {
        throw Error(error.code(), fmt::format("layer {}: {}", id, error.what()));
    }
    return {state_, state_->layers.size() - 1};
}

void Context::seal() {
    static_cast<void>(state_of(state_));
    if (state_->sealed) throw Error(StatusCode::unsupported, "the context is sealed already");
    Agreement agreement("seal");
    agreement.field("number of layers", fmt::format("{}", state_->layers.size()));
    for (std::size_t index = 0; index < state_->layers.size(); ++index) {
        agreement.field(fmt::format("id of layer {} in order", index), fmt::format("{}", state_->layers[index].id));
    }
    agreement.confirm(state_->bootstrap);
    for (ContextState::LayerEntry& layer : state_->layers) {
        state_->backend->gather_whole(*layer.packed);
        state_->self_check.seal_layer(*layer.packed);
    }
    state_->sealed = true;
    log(LogLevel::info, "{}: sealed with {} layers, {:.1f} MB of weights, {:.1f} MB of workspace", state_->title(),
        state_->layers.size(), static_cast<double>(weight_bytes()) / 1e6, static_cast<double>(workspace_bytes()) / 1e6);
}

const Shape& Context::shape() const noexcept {
    return state_->shape;
}
const Options& Context::options() const noexcept {
    return state_->options;
}
const std::string& Context::backend() const noexcept {
    return state_->backend->name();
}
int Context::rank() const noexcept {
    return state_->bootstrap.rank;
}
int Context::world() const noexcept {
    return state_->bootstrap.world;
}
std::size_t Context::layer_count() const noexcept {
    return state_->layers.size();
}

Layer Context::layer(std::size_t index) const {
    if (index >= state_of(state_).layers.size()) {
        throw Error(StatusCode::invalid_argument,
                    fmt::format("layer index is {}, expected below {}", index, state_->layers.size()));
    }
    return {state_, index};
}

Capabilities ContextAccess::capabilities(const Context& context) {
    return context.state_->backend->capabilities();
}

Backend& ContextAccess::backend(const Context& context) {
    return *context.state_->backend;
}

PackedLayer& ContextAccess::packed_layer(const Context& context, std::size_t index) {
    return *context.state_->layers[index].packed;
}

Plan Context::plan(std::int64_t tokens) const {
    if (tokens < 0) throw Error(StatusCode::invalid_argument, fmt::format("tokens is {}, expected at least 0", tokens));
    return state_of(state_).planner.plan(tokens);
}
TokenRange Context::own_tokens(std::int64_t tokens, int rank) const noexcept {
    return state_->own_tokens(tokens, rank);
}

std::size_t Context::weight_bytes() const noexcept {
    std::size_t bytes = 0;
    for (const ContextState::LayerEntry& layer : state_->layers) bytes += layer.packed->bytes();
    return bytes;
}

std::size_t Context::workspace_bytes() const noexcept {
    return state_->backend->workspace_bytes();
}
std::optional<Fault> Context::poll_fault() const {
    return state_of(state_).fault();
}
Counters Context::counters() const noexcept {
    Counters counters = state_->counters.read();
    const Waits waits = state_->backend->waits();
    if (const DeviceCheck* device = state_->backend->device_check()) counters.self_checks += device->checks();
    counters.waits = waits.count;
    counters.wait_us = waits.us;
    counters.longest_wait_us = waits.longest_us;
    return counters;
}
void Context::abort(const std::string& reason) {
    state_of(state_).abort(reason);
}

void Context::suspend() {
    agreed_step(state_of(state_).bootstrap, Agreement("suspend"), [&] {
        if (state_->suspended) throw Error(StatusCode::unsupported, "the context is suspended already");
    });
    state_->backend->release_workspace();
    state_->suspended = true;
    log(LogLevel::info, "{}: suspended", state_->title());
}

void Context::resume() {
    agreed_step(state_of(state_).bootstrap, Agreement("resume"), [&] {
        if (!state_->suspended) throw Error(StatusCode::unsupported, "the context is not suspended");
        state_->backend->acquire_workspace();
        for (std::size_t index = 0; state_->sealed && index < state_->layers.size(); ++index)
            state_->self_check.verify_weights(index, state_->layers[index].id, *state_->layers[index].packed);
    });
    state_->suspended = false;
    log(LogLevel::info, "{}: resumed", state_->title());
}

std::int64_t Layer::id() const noexcept {
    return state_ ? state_->layers[index_].id : -1;
}

namespace {

void require_tokens(const ContextState& state, std::int64_t tokens) {
    if (tokens >= 0 && tokens <= state.options.max_tokens) return;
    throw Error(StatusCode::invalid_argument,
                fmt::format("tokens is {}, expected 0 to max_tokens {}", tokens, state.options.max_tokens));
}

/// A call of so many tokens into `out`, its inputs still to be filled in.
TailCall call_into(const ContextState& state, const PackedLayer& layer, std::int64_t tokens, const Rows& out) {
    require_tokens(state, tokens);
    const bool own_rows_only = state.options.sequence_parallel;
    const std::int64_t out_rows = own_rows_only ? state.own_tokens(tokens, state.bootstrap.rank).count : tokens;
    TailCall call{.shape = state.shape,
                  .rank = state.bootstrap.rank,
                  .world = state.bootstrap.world,
                  .tokens = tokens,
                  .routed = {},
                  .shared = {},
                  .prefix = {},
                  .out = matrix("out", out, out_rows, state.shape.hidden, state.shape.activations),
                  .shared_state = state.options.shared,
                  .stop_before_gather = own_rows_only && state.bootstrap.world > 1,
                  .layer = layer};
    require_alignment("out", call.out, state.row_alignment);
    return call;
}

/// `may_be_out`: whether these rows may be exactly `out`.
ConstMatrix input_of(const ContextState& state, const TailCall& call, const char* what, const ConstRows& rows,
                     std::int64_t count, std::int64_t columns, bool may_be_out) {
    const ConstMatrix input = const_matrix(what, rows, count, columns, state.shape.activations);
    require_alignment(what, input, state.row_alignment);
    require_no_overlap(what, input, call.out, may_be_out);
    return input;
}

/// What a call hands over un-combined, if it does.
std::optional<DeferredMatrix> checked_deferred(const ContextState& state, const TailCall& call, const TailInput& input) {
    if (input.deferred == nullptr) return std::nullopt;
    if (!state.options.deferred_finalize)
        throw Error(StatusCode::unsupported, "deferred rows are given, but the context's option deferred_finalize is off");
    if (input.routed.data != nullptr)
        throw Error(StatusCode::invalid_argument, "routed and deferred rows are given, expected one of them");
    const DeferredMatrix deferred = deferred_matrix(*input.deferred, input.tokens, state.shape);
    require_alignment("deferred rows", deferred.rows, state.row_alignment);
    require_no_overlap("the deferred rows", deferred.rows, call.out, false);
    if (state.host_memory) require_map(deferred, input.tokens);
    return deferred;
}

TailCall checked_call(const ContextState& state, const PackedLayer& layer, const TailInput& input, const Rows& out) {
    const Shape& shape = state.shape;
    TailCall call = call_into(state, layer, input.tokens, out);
    call.starts_early = input.starts_early;
    call.releases_early = input.releases_early;
    if (input.deferred == nullptr)
        call.routed = input_of(state, call, "routed", input.routed, call.tokens, shape.latent, false);
    if (state.options.shared != SharedState::absent) {
        call.shared = input_of(state, call, "shared", input.shared, call.tokens, shape.hidden, !call.stop_before_gather);
    } else if (input.shared.data != nullptr) {
        throw Error(StatusCode::invalid_argument, "shared is given, but the options say it is absent");
    }
    if (input.prefix.data != nullptr)
        call.prefix = input_of(state, call, "prefix", input.prefix, call.out.rows, shape.hidden, true);
    return call;
}

/// The tail that was asked for, if it may run, or the plan's choice.
Tail tail_to_run(ContextState& state, std::optional<Tail> asked, std::int64_t tokens, bool in_halves) {
    const ContextState::Choice& last = state.choice;
    if (last.tokens == tokens && last.asked == asked && last.in_halves == in_halves) return last.tail;
    const std::optional<Tail> tail = asked ? asked : state.planner.choose(tokens, in_halves);
    if (!tail) {
        throw Error(StatusCode::unsupported,
                    fmt::format("no tail can run {} tokens{}", tokens, in_halves ? " in halves" : ""));
    }
    if (static_cast<int>(*tail) >= tail_count) {
        throw Error(StatusCode::invalid_argument,
                    fmt::format("tail is number {}, expected 0 to {}", static_cast<int>(*tail), tail_count - 1));
    }
    if (!state.planner.allowed(*tail, tokens)) {
        throw Error(StatusCode::unsupported, fmt::format("tail {} cannot run {} tokens: {}", name(*tail), tokens,
                                                         state.planner.refusal(*tail, tokens)));
    }
    if (in_halves && !has_halves(*tail)) {
        throw Error(
            StatusCode::unsupported,
            fmt::format("tail {} has no halves, expected replicated, column_parallel or token_parallel", name(*tail)));
    }
    state.choice = {.tokens = tokens, .asked = asked, .in_halves = in_halves, .tail = *tail};
    return *tail;
}

Status run_tail(ContextState& state, std::size_t index, std::optional<Tail> asked, const TailInput& input, const Rows& out,
                Stream stream) noexcept {
    const ContextState::LayerEntry& layer = state.layers[index];
    CallIdentity identity{.tokens = input.tokens,
                          .layer = layer.id,
                          .prefix = input.prefix.data != nullptr,
                          .starts_early = input.starts_early,
                          .releases_early = input.releases_early};
    return state.call(identity, stream, [&](auto begin) {
        TailCall call = checked_call(state, *layer.packed, input, out);
        const std::optional<DeferredMatrix> deferred = checked_deferred(state, call, input);
        identity.tail = tail_to_run(state, asked, input.tokens, false);
        begin();
        if (deferred) call.routed = state.backend->combine(*deferred, input.tokens);
        const bool checked = state.self_check.due(index);
        if (checked) state.self_check.keep(call, identity, index);
        const Schedule schedule = portable_schedule(identity.tail);
        if (schedule != nullptr) {
            schedule(*state.backend, call);
        } else {
            state.backend->fused_tail(call);
        }
        if (checked && state.self_check.verify(call, identity, index)) state.counters.checked();
        state.backend->end_call(call.stop_before_gather ? ConstMatrix{} : ConstMatrix(call.out));
    });
}

Status begin_tail(ContextState& state, std::size_t index, std::optional<Tail> asked, const ConstRows& shared,
                  const Rows& out, std::int64_t tokens, Stream stream) noexcept {
    const ContextState::LayerEntry& layer = state.layers[index];
    CallIdentity identity{.tokens = tokens, .layer = layer.id};
    return state.call(identity, stream, [&](auto begin) {
        if (state.options.shared != SharedState::partial) {
            throw Error(StatusCode::unsupported,
                        fmt::format("shared is {}, so there is nothing to begin with", name(state.options.shared)));
        }
        TailCall call = call_into(state, *layer.packed, tokens, out);
        call.shared = input_of(state, call, "shared", shared, tokens, state.shape.hidden, !call.stop_before_gather);
        identity.tail = tail_to_run(state, asked, tokens, true);
        begin();
        reduce_shared_ahead(*state.backend, identity.tail, call);
        state.backend->order_next_call();
        state.backend->end_call({});
        state.half = {.layer = index, .tail = identity.tail, .tokens = tokens, .out = out};
    });
}

Status finish_tail(ContextState& state, std::size_t index, const ConstRows& routed, const ConstRows& prefix,
                   Stream stream) noexcept {
    const ContextState::LayerEntry& layer = state.layers[index];
    CallIdentity identity{.layer = layer.id, .prefix = prefix.data != nullptr};
    return state.call(
        identity, stream,
        [&](auto begin) {
            if (!state.half || state.half->layer != index) {
                throw Error(StatusCode::unsupported,
                            state.half ? fmt::format("layer {} has not begun, layer {} has", layer.id,
                                                     state.layers[state.half->layer].id)
                                       : fmt::format("layer {} has not begun: call begin() first", layer.id));
            }
            const ContextState::Half& half = *state.half;
            TailCall call = call_into(state, *layer.packed, half.tokens, half.out);
            call.routed = input_of(state, call, "routed", routed, half.tokens, state.shape.latent, false);
            if (prefix.data != nullptr)
                call.prefix = input_of(state, call, "prefix", prefix, call.out.rows, state.shape.hidden, false);
            call.shared = call.out;
            call.shared_in_out = true;
            identity.tokens = half.tokens;
            identity.tail = half.tail;
            begin();
            state.half.reset();
            portable_schedule(identity.tail)(*state.backend, call);
            state.backend->end_call(call.stop_before_gather ? ConstMatrix{} : ConstMatrix(call.out));
        },
        true);
}

}  // namespace

Status Layer::begin(ConstRows shared, Rows out, std::int64_t tokens, Stream stream) const noexcept {
    if (!state_) return moved_from("layer");
    return begin_tail(*state_, index_, std::nullopt, shared, out, tokens, stream);
}

Status Layer::begin(Tail tail, ConstRows shared, Rows out, std::int64_t tokens, Stream stream) const noexcept {
    if (!state_) return moved_from("layer");
    return begin_tail(*state_, index_, tail, shared, out, tokens, stream);
}

Status Layer::finish(ConstRows routed, ConstRows prefix, Stream stream) const noexcept {
    if (!state_) return moved_from("layer");
    return finish_tail(*state_, index_, routed, prefix, stream);
}

Status Layer::run(const TailInput& input, Rows out, Stream stream) const noexcept {
    if (!state_) return moved_from("layer");
    return run_tail(*state_, index_, std::nullopt, input, out, stream);
}

Status Layer::run(Tail tail, const TailInput& input, Rows out, Stream stream) const noexcept {
    if (!state_) return moved_from("layer");
    return run_tail(*state_, index_, tail, input, out, stream);
}

Status Context::all_reduce_rms_norm(ConstRows x, const void* gamma, Rows y, std::int64_t tokens,
                                    Stream stream) const noexcept {
    if (!state_) return moved_from("context");
    ContextState& state = *state_;
    CallIdentity identity{.tokens = tokens, .is_tail = false};
    return state.call(identity, stream, [&](auto begin) {
        require_tokens(state, tokens);
        const ConstMatrix in = const_matrix("x", x, tokens, state.shape.latent, state.shape.activations);
        const Matrix out = matrix("y", y, tokens, state.shape.latent, state.shape.activations);
        if ((state.shape.norm == Norm::rms) != (gamma != nullptr)) {
            throw Error(StatusCode::invalid_argument, gamma == nullptr ? "gamma is null, expected the norm's weights"
                                                                       : "gamma is given, but the shape has no norm");
        }
        require_no_overlap("x", in, out, true);
        begin();
        std::int64_t block = 0;
        for (std::int64_t first = 0; first < tokens || block == 0; first += state.backend->block_tokens()) {
            const std::int64_t count = std::min(state.backend->block_tokens(), tokens - first);
            state.backend->begin_block(block++);
            state.backend->main().all_reduce_norm(Step::reduce_latent, in.row_range(first, count), gamma,
                                                  out.row_range(first, count));
        }
        state.backend->end_call(out);
    });
}

Status Context::accumulate_projection(ConstRows a, const Layer& layer, Rows c_slice, std::int64_t tokens,
                                      Stream stream) const noexcept {
    if (!state_) return moved_from("context");
    if (!layer.state_) return moved_from("layer");
    ContextState& state = *state_;
    CallIdentity identity{.tokens = tokens, .layer = layer.id(), .is_tail = false};
    return state.call(identity, stream, [&](auto begin) {
        if (layer.state_.get() != state_.get())
            throw Error(StatusCode::invalid_argument, "the layer belongs to another context");
        if (state.shape.hidden % state.bootstrap.world != 0) {
            throw Error(StatusCode::unsupported,
                        fmt::format("hidden {} is not divisible by {} ranks, so no rank owns a column slice",
                                    state.shape.hidden, state.bootstrap.world));
        }
        require_tokens(state, tokens);
        const std::int64_t columns = state.shape.hidden / state.bootstrap.world;
        const ConstMatrix in = const_matrix("a", a, tokens, state.shape.latent, state.shape.activations);
        const Matrix out = matrix("c_slice", c_slice, tokens, columns, state.shape.activations);
        require_no_overlap("a", in, out, false);
        begin();
        for (std::int64_t first = 0; first < tokens; first += state.backend->block_tokens()) {
            const std::int64_t count = std::min(state.backend->block_tokens(), tokens - first);
            const Matrix part = out.row_range(first, count);
            state.backend->main().project(in.row_range(first, count), *state.layers[layer.index_].packed, WeightPart::shard,
                                          {part, {}}, part);
        }
        state.backend->end_call({});
    });
}

}  // namespace latent_moe

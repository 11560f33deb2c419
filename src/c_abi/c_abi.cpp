// The C ABI over the C++ API: handles, structs and statuses; nothing of its own.
#include <fmt/format.h>

#include <deque>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "c_abi/structs.h"
#include "latent_moe/latent_moe.h"
#include "latent_moe/latent_moe_c.h"
#include "latent_moe/nccl.h"

// The handles that the header names.
// NOLINTBEGIN(readability-identifier-naming)
struct latent_moe_bootstrap {
    latent_moe::Bootstrap bootstrap;
};

struct latent_moe_layer {
    latent_moe::Layer layer;
};

struct latent_moe_context {
    latent_moe::Context context;
    std::deque<latent_moe_layer> layers;  // whose addresses stay
};

struct latent_moe_plan {
    latent_moe::Plan plan;
};
// NOLINTEND(readability-identifier-naming)

namespace latent_moe::c_abi {
namespace {

static_assert(LATENT_MOE_INTERNAL == static_cast<int>(StatusCode::internal));
static_assert(LATENT_MOE_E4M3 == static_cast<int>(Dtype::e4m3));
static_assert(LATENT_MOE_NORM_RMS == static_cast<int>(Norm::rms));
static_assert(LATENT_MOE_TAIL_FUSED == static_cast<int>(Tail::fused) && LATENT_MOE_TAIL_COUNT == tail_count);
static_assert(LATENT_MOE_SHARED_ABSENT == static_cast<int>(SharedState::absent));

/// The message of this thread's last failure.
std::string& last_error() {
    thread_local std::string message;
    return message;
}

latent_moe_status failed(StatusCode code, const char* message) noexcept {
    try {
        last_error() = message;
    } catch (const std::bad_alloc&) {
        last_error().clear();
    }
    return static_cast<latent_moe_status>(code);
}

latent_moe_status returned(const Status& status) noexcept {
    return status.ok() ? LATENT_MOE_OK : failed(status.code(), status.message().c_str());
}

/// Runs `body`; whatever it throws becomes a status.
template <typename Body>
latent_moe_status guarded(Body body) noexcept {
    try {
        body();
        return LATENT_MOE_OK;
    } catch (const Error& error) {
        return failed(error.code(), error.what());
    } catch (const std::bad_alloc&) {
        return failed(StatusCode::out_of_memory, "out of memory");
    } catch (const std::exception& error) {
        return failed(StatusCode::internal, error.what());
    } catch (...) {
        return failed(StatusCode::internal, "an exception that is no std::exception");
    }
}

[[noreturn]] void refuse(const std::string& message) {
    throw Error(StatusCode::invalid_argument, message);
}

template <typename Pointer>
Pointer& present(const char* what, Pointer* pointer) {
    if (pointer == nullptr) refuse(fmt::format("{} is null", what));
    return *pointer;
}

/// A number of the caller's as an enumerator; `count` says how many there are.
template <typename Enum>
Enum enumerator(const char* what, std::int32_t value, int count) {
    if (value < 0 || value >= count) refuse(fmt::format("{} is number {}, expected 0 to {}", what, value, count - 1));
    return static_cast<Enum>(value);
}

Dtype dtype_of(const char* what, std::int32_t value) {
    return enumerator<Dtype>(what, value, LATENT_MOE_E4M3 + 1);
}

std::optional<Tail> tail_of(std::int32_t value) {
    if (value == LATENT_MOE_TAIL_AUTO) return std::nullopt;
    return enumerator<Tail>("tail", value, tail_count);
}

latent_moe_shape shape_struct(const Shape& shape) noexcept {
    return {.struct_size = sizeof(latent_moe_shape),
            .hidden = shape.hidden,
            .latent = shape.latent,
            .norm = static_cast<std::int32_t>(shape.norm),
            .epsilon = shape.epsilon,
            .routed_scale = shape.routed_scale,
            .activations = static_cast<std::int32_t>(shape.activations)};
}

Shape shape_of(const latent_moe_shape* given) {
    const latent_moe_shape shape = read_struct("shape", given, shape_struct({}));
    return {.hidden = shape.hidden,
            .latent = shape.latent,
            .norm = enumerator<Norm>("norm", shape.norm, LATENT_MOE_NORM_RMS + 1),
            .epsilon = shape.epsilon,
            .routed_scale = shape.routed_scale,
            .activations = dtype_of("activations", shape.activations)};
}

latent_moe_options default_options() noexcept {
    const Options options;
    latent_moe_options defaults{.struct_size = sizeof(latent_moe_options),
                                .backend = nullptr,
                                .capacity_tokens = options.capacity_tokens,
                                .max_tokens = options.max_tokens,
                                .timeout_ms = options.timeout_ms,
                                .keep_whole_weights = options.keep_whole_weights ? 1 : 0,
                                .tail = LATENT_MOE_TAIL_AUTO,
                                .shared = static_cast<std::int32_t>(options.shared),
                                .tail_token_limit = {},
                                .sequence_parallel = options.sequence_parallel ? 1 : 0,
                                .expert_parallel = options.expert_parallel ? 1 : 0,
                                .cpu_threads = options.cpu_threads,
                                .device = options.device,
                                .reserved_sms = options.reserved_sms,
                                .deferred_finalize = options.deferred_finalize ? 1 : 0,
                                .batch_invariant = options.batch_invariant ? 1 : 0,
                                .float8_weights = options.float8_weights ? 1 : 0,
                                .self_check_period = options.self_check_period,
                                .self_check_folder = nullptr,
                                .tune_table = nullptr};
    for (std::size_t tail = 0; tail < options.tail_token_limit.size(); ++tail)
        defaults.tail_token_limit[tail] = options.tail_token_limit[tail];
    return defaults;
}

Options options_of(const latent_moe_options* given) {
    if (given == nullptr) return {};
    const latent_moe_options from = read_struct("options", given, default_options());
    Options options{.backend = from.backend == nullptr ? "auto" : from.backend,
                    .capacity_tokens = from.capacity_tokens,
                    .max_tokens = from.max_tokens,
                    .timeout_ms = from.timeout_ms,
                    .keep_whole_weights = from.keep_whole_weights != 0,
                    .tail = tail_of(from.tail),
                    .tune_table = from.tune_table == nullptr ? "auto" : from.tune_table,
                    .shared = enumerator<SharedState>("shared", from.shared, LATENT_MOE_SHARED_ABSENT + 1),
                    .sequence_parallel = from.sequence_parallel != 0,
                    .expert_parallel = from.expert_parallel != 0,
                    .deferred_finalize = from.deferred_finalize != 0,
                    .batch_invariant = from.batch_invariant != 0,
                    .float8_weights = from.float8_weights != 0,
                    .cpu_threads = from.cpu_threads,
                    .device = from.device,
                    .reserved_sms = from.reserved_sms,
                    .self_check_period = from.self_check_period,
                    .self_check_folder = from.self_check_folder == nullptr ? "" : from.self_check_folder};
    for (std::size_t tail = 0; tail < options.tail_token_limit.size(); ++tail)
        options.tail_token_limit[tail] = from.tail_token_limit[tail];
    return options;
}

constexpr latent_moe_weights default_weights{.struct_size = sizeof(latent_moe_weights), .scale = 1.0F};

WeightView weights_of(const latent_moe_weights* given) {
    const latent_moe_weights from = read_struct("weights", given, default_weights);
    return {.data = from.data,
            .rows = from.rows,
            .stride = from.stride,
            .dtype = dtype_of("dtype of the weights", from.dtype),
            .scale = from.scale,
            .row_scales = from.row_scales};
}

ConstRows rows_of(const latent_moe_rows& rows) noexcept {
    return {rows.data, rows.stride};
}

constexpr latent_moe_input default_input{.struct_size = sizeof(latent_moe_input)};

/// `deferred` holds what the input refers to.
TailInput input_of(const latent_moe_input* given, DeferredRows& deferred) {
    const latent_moe_input from = read_struct("input", given, default_input);
    if (from.deferred.slots != 0) {
        deferred = {.rows = rows_of(from.deferred.rows),
                    .count = from.deferred.count,
                    .slots = from.deferred.slots,
                    .weights = from.deferred.weights,
                    .weight_dtype = dtype_of("dtype of the deferred weights", from.deferred.weight_dtype),
                    .map = from.deferred.map};
    }
    return {.routed = rows_of(from.routed),
            .deferred = from.deferred.slots != 0 ? &deferred : nullptr,
            .shared = rows_of(from.shared),
            .prefix = rows_of(from.prefix),
            .tokens = from.tokens,
            .consume_shared = from.consume_shared != 0,
            .starts_early = from.starts_early != 0,
            .releases_early = from.releases_early != 0};
}

/// The strings of this thread's last polled fault.
Fault& polled_fault() {
    thread_local Fault fault;
    return fault;
}

}  // namespace
}  // namespace latent_moe::c_abi

using namespace latent_moe::c_abi;

extern "C" {

int32_t latent_moe_abi_version() {
    return LATENT_MOE_ABI_VERSION;
}

const char* latent_moe_version() {
    return latent_moe::library_version();
}

const char* latent_moe_last_error() {
    return last_error().c_str();
}

const char* latent_moe_status_name(int32_t status) {
    return latent_moe::name(static_cast<latent_moe::StatusCode>(status));
}

const char* latent_moe_tail_name(int32_t tail) {
    return tail == LATENT_MOE_TAIL_AUTO ? "auto" : latent_moe::name(static_cast<latent_moe::Tail>(tail));
}

latent_moe_status latent_moe_shape_init(latent_moe_shape* shape, size_t struct_size) {
    return guarded([&] { write_struct("shape", shape, struct_size, shape_struct({})); });
}

latent_moe_status latent_moe_shape_preset(const char* model, latent_moe_shape* shape, size_t struct_size) {
    return guarded([&] {
        const auto preset = latent_moe::shape_preset(&present("model", model));
        if (!preset) {
            refuse(fmt::format("model is '{}', expected {}", model, fmt::join(latent_moe::shape_preset_names(), ", ")));
        }
        write_struct("shape", shape, struct_size, shape_struct(*preset));
    });
}

latent_moe_status latent_moe_bootstrap_create(int32_t rank, int32_t world, int32_t local_world,
                                              latent_moe_all_gather all_gather, void* user,
                                              latent_moe_bootstrap** bootstrap) {
    return guarded([&] {
        latent_moe_bootstrap*& out = present("bootstrap", bootstrap);
        if (all_gather == nullptr) refuse("all_gather is null");
        const auto gather = [=](const void* send, void* received, std::size_t bytes) {
            const int failure = all_gather(user, send, received, bytes);
            if (failure != 0) {
                throw latent_moe::Error(latent_moe::StatusCode::unavailable,
                                        fmt::format("the caller's all_gather returned {} on rank {}", failure, rank));
            }
        };
        out = new latent_moe_bootstrap{
            {.rank = rank, .world = world, .all_gather_bytes = gather, .transport = nullptr, .local_world = local_world}};
    });
}

latent_moe_status latent_moe_bootstrap_threads(int32_t world, int32_t timeout_ms, latent_moe_bootstrap** bootstraps) {
    return guarded([&] {
        latent_moe_bootstrap** out = &present("bootstraps", bootstraps);
        std::deque<latent_moe_bootstrap> made;
        for (latent_moe::Bootstrap& each : latent_moe::thread_ranks(world, timeout_ms)) made.push_back({std::move(each)});
        for (latent_moe_bootstrap& each : made) *out++ = new latent_moe_bootstrap(std::move(each));
    });
}

latent_moe_status latent_moe_bootstrap_nccl([[maybe_unused]] void* communicator, [[maybe_unused]] int32_t timeout_ms,
                                            latent_moe_bootstrap** bootstrap) {
    return guarded([&] {
        latent_moe_bootstrap*& out = present("bootstrap", bootstrap);
        if (communicator == nullptr) refuse("communicator is null");
#ifdef LATENT_MOE_HAS_GPU
        out = new latent_moe_bootstrap{latent_moe::nccl_ranks(communicator, timeout_ms)};
#else
        out = nullptr;
        throw latent_moe::Error(latent_moe::StatusCode::unavailable, "this build has no GPU backend and so no NCCL");
#endif
    });
}

void latent_moe_bootstrap_destroy(latent_moe_bootstrap* bootstrap) {
    delete bootstrap;
}

latent_moe_status latent_moe_options_init(latent_moe_options* options, size_t struct_size) {
    return guarded([&] { write_struct("options", options, struct_size, default_options()); });
}

latent_moe_status latent_moe_weights_init(latent_moe_weights* weights, size_t struct_size) {
    return guarded([&] { write_struct("weights", weights, struct_size, default_weights); });
}

latent_moe_status latent_moe_context_create(const latent_moe_shape* shape, const latent_moe_bootstrap* bootstrap,
                                            const latent_moe_options* options, latent_moe_context** context) {
    return guarded([&] {
        latent_moe_context*& out = present("context", context);
        const latent_moe_bootstrap& ranks = present("bootstrap", bootstrap);
        out = new latent_moe_context{latent_moe::Context::create(shape_of(shape), ranks.bootstrap, options_of(options)), {}};
    });
}

void latent_moe_context_destroy(latent_moe_context* context) {
    delete context;
}

latent_moe_status latent_moe_context_add_layer(latent_moe_context* context, int64_t id, const latent_moe_weights* weights,
                                               const void* gamma, const latent_moe_layer** layer) {
    return guarded([&] {
        latent_moe_context& to = present("context", context);
        to.layers.push_back({to.context.add_layer(id, weights_of(weights), gamma)});
        if (layer != nullptr) *layer = &to.layers.back();
    });
}

latent_moe_status latent_moe_context_seal(latent_moe_context* context) {
    return guarded([&] { present("context", context).context.seal(); });
}

int32_t latent_moe_context_rank(const latent_moe_context* context) {
    return context == nullptr ? -1 : context->context.rank();
}

int32_t latent_moe_context_world(const latent_moe_context* context) {
    return context == nullptr ? 0 : context->context.world();
}

const char* latent_moe_context_backend(const latent_moe_context* context) {
    return context == nullptr ? "" : context->context.backend().c_str();
}

size_t latent_moe_context_weight_bytes(const latent_moe_context* context) {
    return context == nullptr ? 0 : context->context.weight_bytes();
}

size_t latent_moe_context_workspace_bytes(const latent_moe_context* context) {
    return context == nullptr ? 0 : context->context.workspace_bytes();
}

latent_moe_status latent_moe_context_own_tokens(const latent_moe_context* context, int64_t tokens, int32_t rank,
                                                int64_t* first, int64_t* count) {
    return guarded([&] {
        const latent_moe::Context& of = present("context", context).context;
        if (rank < 0 || rank >= of.world()) refuse(fmt::format("rank is {}, expected 0 to {}", rank, of.world() - 1));
        if (tokens < 0) refuse(fmt::format("tokens is {}, expected at least 0", tokens));
        const latent_moe::TokenRange range = of.own_tokens(tokens, rank);
        present("first", first) = range.first;
        present("count", count) = range.count;
    });
}

latent_moe_status latent_moe_context_poll_fault(const latent_moe_context* context, latent_moe_fault* fault) {
    return guarded([&] {
        const latent_moe::Context& of = present("context", context).context;
        const std::size_t size = present("fault", fault).struct_size;
        const std::optional<latent_moe::Fault> found = of.poll_fault();
        latent_moe_fault out{.phase = "", .message = ""};
        if (found) {
            polled_fault() = *found;
            out.present = 1;
            out.rank = found->rank;
            out.layer = found->layer;
            out.call = found->call;
            out.phase = polled_fault().phase.c_str();
            out.message = polled_fault().message.c_str();
        }
        write_struct("fault", fault, size, out);
    });
}

latent_moe_status latent_moe_context_counters(const latent_moe_context* context, latent_moe_counters* counters) {
    return guarded([&] {
        const latent_moe::Counters found = present("context", context).context.counters();
        const std::size_t size = present("counters", counters).struct_size;
        latent_moe_counters out{.parts = found.parts,
                                .waits = found.waits,
                                .wait_us = found.wait_us,
                                .longest_wait_us = found.longest_wait_us,
                                .self_checks = found.self_checks};
        static_assert(LATENT_MOE_TAIL_COUNT == latent_moe::tail_count &&
                      LATENT_MOE_STATUS_COUNT == latent_moe::status_count);
        std::copy(found.calls.begin(), found.calls.end(), out.calls);
        std::copy(found.refused.begin(), found.refused.end(), out.refused);
        std::copy(found.failed.begin(), found.failed.end(), out.failed);
        write_struct("counters", counters, size, out);
    });
}

latent_moe_status latent_moe_context_abort(latent_moe_context* context, const char* reason) {
    return guarded([&] { present("context", context).context.abort(reason == nullptr ? "abort was called" : reason); });
}

latent_moe_status latent_moe_context_suspend(latent_moe_context* context) {
    return guarded([&] { present("context", context).context.suspend(); });
}

latent_moe_status latent_moe_context_resume(latent_moe_context* context) {
    return guarded([&] { present("context", context).context.resume(); });
}

latent_moe_status latent_moe_context_plan(const latent_moe_context* context, int64_t tokens, latent_moe_plan** plan) {
    return guarded([&] {
        const latent_moe::Context& of = present("context", context).context;
        latent_moe_plan*& out = present("plan", plan);
        out = new latent_moe_plan{of.plan(tokens)};
    });
}

void latent_moe_plan_destroy(latent_moe_plan* plan) {
    delete plan;
}

latent_moe_tail latent_moe_plan_tail(const latent_moe_plan* plan) {
    if (plan == nullptr || plan->plan.candidates.empty()) return LATENT_MOE_TAIL_AUTO;
    return static_cast<latent_moe_tail>(plan->plan.tail);
}

const char* latent_moe_plan_source(const latent_moe_plan* plan) {
    return plan == nullptr ? "" : plan->plan.source.c_str();
}

size_t latent_moe_plan_candidates(const latent_moe_plan* plan) {
    return plan == nullptr ? 0 : plan->plan.candidates.size();
}

latent_moe_status latent_moe_plan_candidate(const latent_moe_plan* plan, size_t index, latent_moe_tail* tail,
                                            double* expected_us) {
    return guarded([&] {
        const auto& all = present("plan", plan).plan.candidates;
        if (index >= all.size()) refuse(fmt::format("candidate is number {}, expected below {}", index, all.size()));
        present("tail", tail) = static_cast<latent_moe_tail>(all[index].tail);
        if (expected_us != nullptr) *expected_us = all[index].expected_us;
    });
}

size_t latent_moe_plan_refusals(const latent_moe_plan* plan) {
    return plan == nullptr ? 0 : plan->plan.refused.size();
}

latent_moe_status latent_moe_plan_refusal(const latent_moe_plan* plan, size_t index, latent_moe_tail* tail,
                                          const char** reason) {
    return guarded([&] {
        const auto& all = present("plan", plan).plan.refused;
        if (index >= all.size()) refuse(fmt::format("refusal is number {}, expected below {}", index, all.size()));
        present("tail", tail) = static_cast<latent_moe_tail>(all[index].tail);
        if (reason != nullptr) *reason = all[index].reason.c_str();
    });
}

latent_moe_status latent_moe_input_init(latent_moe_input* input, size_t struct_size) {
    return guarded([&] { write_struct("input", input, struct_size, default_input); });
}

latent_moe_status latent_moe_layer_run(const latent_moe_layer* layer, int32_t tail, const latent_moe_input* input, void* out,
                                       int64_t out_stride, void* stream) {
    latent_moe::Status status;
    const latent_moe_status refused = guarded([&] {
        const latent_moe::Layer& of = present("layer", layer).layer;
        latent_moe::DeferredRows deferred;
        const latent_moe::TailInput given = input_of(input, deferred);
        const std::optional<latent_moe::Tail> asked = tail_of(tail);
        const latent_moe::Rows to{out, out_stride};
        status = asked ? of.run(*asked, given, to, stream) : of.run(given, to, stream);
    });
    return refused != LATENT_MOE_OK ? refused : returned(status);
}

latent_moe_status latent_moe_layer_begin(const latent_moe_layer* layer, int32_t tail, latent_moe_rows shared, int64_t tokens,
                                         void* out, int64_t out_stride, void* stream) {
    latent_moe::Status status;
    const latent_moe_status refused = guarded([&] {
        const latent_moe::Layer& of = present("layer", layer).layer;
        const std::optional<latent_moe::Tail> asked = tail_of(tail);
        const latent_moe::Rows to{out, out_stride};
        status =
            asked ? of.begin(*asked, rows_of(shared), to, tokens, stream) : of.begin(rows_of(shared), to, tokens, stream);
    });
    return refused != LATENT_MOE_OK ? refused : returned(status);
}

latent_moe_status latent_moe_layer_finish(const latent_moe_layer* layer, latent_moe_rows routed, latent_moe_rows prefix,
                                          void* stream) {
    if (layer == nullptr) return failed(latent_moe::StatusCode::invalid_argument, "layer is null");
    return returned(layer->layer.finish(rows_of(routed), rows_of(prefix), stream));
}

int64_t latent_moe_layer_id(const latent_moe_layer* layer) {
    return layer == nullptr ? -1 : layer->layer.id();
}

latent_moe_status latent_moe_all_reduce_rms_norm(latent_moe_context* context, latent_moe_rows x, const void* gamma, void* y,
                                                 int64_t y_stride, int64_t tokens, void* stream) {
    if (context == nullptr) return failed(latent_moe::StatusCode::invalid_argument, "context is null");
    return returned(context->context.all_reduce_rms_norm(rows_of(x), gamma, {y, y_stride}, tokens, stream));
}

latent_moe_status latent_moe_accumulate_projection(latent_moe_context* context, latent_moe_rows a,
                                                   const latent_moe_layer* layer, void* c_slice, int64_t c_stride,
                                                   int64_t tokens, void* stream) {
    if (context == nullptr) return failed(latent_moe::StatusCode::invalid_argument, "context is null");
    if (layer == nullptr) return failed(latent_moe::StatusCode::invalid_argument, "layer is null");
    return returned(context->context.accumulate_projection(rows_of(a), layer->layer, {c_slice, c_stride}, tokens, stream));
}

}  // extern "C"

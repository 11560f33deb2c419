// The C++ API as Python objects. Pure Python in `latent_moe/` makes it pleasant: arrays to `View`s, dataclasses to shapes.
//
// The GIL is released wherever a call may wait for another rank; a Python all-gather takes it again.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "latent_moe/latent_moe.h"
#include "latent_moe/nccl.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace latent_moe::python {
namespace {

[[noreturn]] void refuse(const std::string& message) {
    throw Error(StatusCode::invalid_argument, message);
}

void require(const Status& status) {
    if (!status.ok()) throw Error(status.code(), status.message());
}

/// An enumerator by the name that the library prints for it.
template <typename Enum>
Enum from_name(const char* what, const std::string& text, std::initializer_list<Enum> all) {
    std::string names;
    for (const Enum each : all) {
        if (text == name(each)) return each;
        names += (names.empty() ? "" : ", ") + std::string(name(each));
    }
    refuse(std::string(what) + " is '" + text + "', expected one of " + names);
}

Dtype dtype_from(const char* what, const std::string& text) {
    return from_name(what, text, {Dtype::bf16, Dtype::f16, Dtype::f32, Dtype::e4m3});
}

Tail tail_from(const std::string& text) {
    return from_name(
        "tail", text,
        {Tail::replicated, Tail::overlap, Tail::column_parallel, Tail::token_parallel, Tail::late_reduce, Tail::fused});
}

std::optional<Tail> tail_from(const std::optional<std::string>& text) {
    return text ? std::optional(tail_from(*text)) : std::nullopt;
}

/// Rows of somebody's tensor. Elements of 16 bits without a floating type of their own are taken for whatever the place
/// expects; so are bytes where e4m3 is.
struct View {
    void* data = nullptr;
    std::int64_t rows = 0;
    std::int64_t columns = 0;
    std::int64_t stride = 0;
    std::string dtype;   ///< bf16, f16, f32, e4m3, i32, or u16 and u8: raw bits
    std::string device;  ///< cpu or gpu
    bool writable = true;
    nb::object owner;
};

std::string dtype_name(const nb::dlpack::dtype& dtype) {
    using Code = nb::dlpack::dtype_code;
    const auto is = [&](Code code, int bits) {
        return dtype.code == static_cast<std::uint8_t>(code) && dtype.bits == bits && dtype.lanes == 1;
    };
    if (is(Code::Bfloat, 16)) return "bf16";
    if (is(Code::Float, 16)) return "f16";
    if (is(Code::Float, 32)) return "f32";
    if (is(Code::Float8_E4M3FN, 8)) return "e4m3";
    if (is(Code::UInt, 16) || is(Code::Int, 16)) return "u16";
    if (is(Code::UInt, 8)) return "u8";
    if (is(Code::Int, 32)) return "i32";
    refuse("an array has DLPack type (" + std::to_string(dtype.code) + ", " + std::to_string(dtype.bits) +
           " bits), expected bf16, f16, f32, e4m3, int32 or raw bits of 8 or 16");
}

/// Anything that speaks DLPack or the buffer protocol, one- or two-dimensional, its rows contiguous.
View view_of(nb::object array) {
    nb::ndarray<> writable;
    nb::ndarray<nb::ro> tensor;
    const bool may_write = nb::try_cast(array, writable);
    if (may_write) {
        tensor = nb::ndarray<nb::ro>(writable);
    } else if (!nb::try_cast(array, tensor)) {
        refuse("expected an array with DLPack or the buffer protocol, found another object");
    }
    if (tensor.ndim() != 1 && tensor.ndim() != 2)
        refuse("an array has " + std::to_string(tensor.ndim()) + " dimensions, expected [rows, columns]");
    const bool flat = tensor.ndim() == 1;
    View view{.data = const_cast<void*>(tensor.data()),
              .rows = flat ? 1 : static_cast<std::int64_t>(tensor.shape(0)),
              .columns = static_cast<std::int64_t>(tensor.shape(flat ? 0 : 1)),
              .stride = 0,
              .dtype = dtype_name(tensor.dtype()),
              .device = tensor.device_type() == nb::device::cpu::value ? "cpu" : "gpu",
              .writable = may_write,
              .owner = std::move(array)};
    view.stride = flat ? view.columns : tensor.stride(0);
    // Without elements strides say nothing, and NumPy has zeros there.
    if (view.rows > 0 && view.columns > 1 && tensor.stride(flat ? 0 : 1) != 1)
        refuse("the elements of a row are " + std::to_string(tensor.stride(flat ? 0 : 1)) +
               " apart, expected them side by side");
    if (view.rows <= 1 && view.stride < view.columns) view.stride = view.columns;
    return view;
}

/// Memory that the caller vouches for: a tensor of a framework whose pointers are quicker had directly.
View view_at(std::uintptr_t data, std::int64_t rows, std::int64_t columns, std::int64_t stride, std::string dtype,
             std::string device, nb::object owner) {
    if (rows <= 1 && stride < columns) stride = columns;
    return {
        reinterpret_cast<void*>(data), rows, columns, stride, std::move(dtype), std::move(device), true, std::move(owner)};
}

std::string shape_text(std::int64_t rows, std::int64_t columns) {
    return "[" + std::to_string(rows) + ", " + std::to_string(columns) + "]";
}

/// What every array of a call must be.
struct Expectation {
    std::string device;
    Dtype dtype;

    void check(const char* what, const View& view, std::int64_t rows, std::int64_t columns) const {
        if (view.rows != rows || view.columns != columns) {
            refuse(std::string(what) + " is " + shape_text(view.rows, view.columns) + ", expected " +
                   shape_text(rows, columns));
        }
        const bool raw = view.dtype == "u16" && bytes_of(dtype) == 2;
        if (view.dtype != name(dtype) && !raw) refuse(std::string(what) + " is " + view.dtype + ", expected " + name(dtype));
        if (view.device != device)
            refuse(std::string(what) + " is in memory of the " + view.device + ", expected the " + device);
    }
    ConstRows rows(const char* what, const std::optional<View>& view, std::int64_t count, std::int64_t columns) const {
        if (!view) return {};
        check(what, *view, count, columns);
        return {view->data, view->stride};
    }
    Rows writable(const char* what, const View& view, std::int64_t count, std::int64_t columns) const {
        check(what, view, count, columns);
        if (!view.writable) refuse(std::string(what) + " is read-only");
        return {view.data, view.stride};
    }
};

Expectation expectation_of(const Context& context) {
    return {context.backend() == "cpu" ? "cpu" : "gpu", context.shape().activations};
}

/// Ranks that a Python callable `all_gather(bytes) -> sequence of bytes, in rank order` brings together.
Bootstrap callable_ranks(int rank, int world, nb::callable all_gather, int local_world) {
    // Freed by whichever thread lets go of the bootstrap last, which may not hold the GIL.
    const std::shared_ptr<nb::callable> gather(new nb::callable(std::move(all_gather)), [](nb::callable* callable) {
        const nb::gil_scoped_acquire gil;
        delete callable;
    });
    const auto gather_bytes = [gather, world](const void* send, void* received, std::size_t bytes) {
        const nb::gil_scoped_acquire gil;
        try {
            const nb::object parts = (*gather)(nb::bytes(send, bytes));
            if (static_cast<int>(nb::len(parts)) != world) {
                throw Error(StatusCode::unavailable, "the all-gather callable returned " + std::to_string(nb::len(parts)) +
                                                         " parts, expected " + std::to_string(world));
            }
            auto* to = static_cast<std::byte*>(received);
            for (const nb::handle part : parts) {
                nb::bytes whole;
                if (!nb::try_cast(part, whole) || whole.size() != bytes)
                    throw Error(StatusCode::unavailable, "the all-gather callable returned a part that is not the " +
                                                             std::to_string(bytes) + " bytes that a rank sent");
                std::memcpy(to, whole.data(), bytes);
                to += bytes;
            }
        } catch (const nb::python_error& error) {
            throw Error(StatusCode::unavailable,
                        std::string("the all-gather callable failed: ") + nb::str(error.value()).c_str());
        }
    };
    return {
        .rank = rank, .world = world, .all_gather_bytes = gather_bytes, .transport = nullptr, .local_world = local_world};
}

Shape shape_from(const nb::handle& from) {
    return {.hidden = nb::cast<std::int64_t>(from.attr("hidden")),
            .latent = nb::cast<std::int64_t>(from.attr("latent")),
            .norm = from_name("norm", nb::cast<std::string>(from.attr("norm")), {Norm::none, Norm::rms}),
            .epsilon = nb::cast<float>(from.attr("epsilon")),
            .routed_scale = nb::cast<float>(from.attr("routed_scale")),
            .activations = dtype_from("activations", nb::cast<std::string>(from.attr("activations")))};
}

Options options_from(const nb::handle& from) {
    Options options{
        .backend = nb::cast<std::string>(from.attr("backend")),
        .capacity_tokens = nb::cast<std::int64_t>(from.attr("capacity_tokens")),
        .max_tokens = nb::cast<std::int64_t>(from.attr("max_tokens")),
        .timeout_ms = nb::cast<int>(from.attr("timeout_ms")),
        .keep_whole_weights = nb::cast<bool>(from.attr("keep_whole_weights")),
        .tail = tail_from(nb::cast<std::optional<std::string>>(from.attr("tail"))),
        .tune_table = nb::cast<std::string>(from.attr("tune_table")),
        .shared = from_name("shared", nb::cast<std::string>(from.attr("shared")),
                            {SharedState::partial, SharedState::reduced, SharedState::absent}),
        .sequence_parallel = nb::cast<bool>(from.attr("sequence_parallel")),
        .expert_parallel = nb::cast<bool>(from.attr("expert_parallel")),
        .deferred_finalize = nb::cast<bool>(from.attr("deferred_finalize")),
        .batch_invariant = nb::cast<bool>(from.attr("batch_invariant")),
        .float8_weights = nb::cast<bool>(from.attr("float8_weights")),
        .cpu_threads = nb::cast<int>(from.attr("cpu_threads")),
        .device = nb::cast<int>(from.attr("device")),
        .reserved_sms = nb::cast<int>(from.attr("reserved_sms")),
        .self_check_period = nb::cast<std::int64_t>(from.attr("self_check_period")),
        .self_check_folder = nb::cast<std::string>(from.attr("self_check_folder")),
    };
    for (const auto& [tail, limit] : nb::cast<nb::dict>(from.attr("tail_token_limit"))) {
        options.tail_token_limit[static_cast<std::size_t>(tail_from(nb::cast<std::string>(tail)))] =
            nb::cast<std::int64_t>(limit);
    }
    return options;
}

/// Pointers of the caller's arrays hold no reference; what a call needs lives until it returns, as all views do.
Stream stream_from(std::uintptr_t stream) {
    return reinterpret_cast<Stream>(stream);
}

Context create(const nb::object& shape, const Bootstrap& bootstrap, const nb::object& options) {
    const Shape made = shape_from(shape);
    const Options chosen = options_from(options);
    const nb::gil_scoped_release free;
    return Context::create(made, bootstrap, chosen);
}

Layer add_layer(Context& context, std::int64_t id, const View& weights, const std::optional<View>& gamma,
                const std::string& dtype, float scale, const std::optional<View>& row_scales) {
    const Dtype type = dtype_from("dtype of the weights", dtype);
    const bool raw = (weights.dtype == "u16" && bytes_of(type) == 2) || (weights.dtype == "u8" && bytes_of(type) == 1);
    if (weights.dtype != dtype && !raw) refuse("the weights are " + weights.dtype + ", expected " + dtype);
    if (weights.columns != context.shape().latent) {
        refuse("the weights are " + shape_text(weights.rows, weights.columns) + ", expected " +
               std::to_string(context.shape().latent) + " columns");
    }
    const Expectation expected = expectation_of(context);
    if (expected.device == "cpu" && weights.device != "cpu")
        refuse("the weights are in memory of the gpu, expected the cpu");
    if (row_scales) {
        if (row_scales->dtype != "f32" || row_scales->rows * row_scales->columns != weights.rows ||
            row_scales->device != "cpu" || (row_scales->rows > 1 && row_scales->stride != row_scales->columns))
            refuse("row_scales is " + shape_text(row_scales->rows, row_scales->columns) + " of " + row_scales->dtype +
                   " on the " + row_scales->device + ", expected " + std::to_string(weights.rows) + " f32 on the cpu");
    }
    if (gamma) {
        Expectation of_gamma = expected;
        if (expected.device == "gpu") of_gamma.device = gamma->device;  // either will do
        of_gamma.check("gamma", *gamma, 1, context.shape().latent);
    }
    const WeightView view{.data = weights.data,
                          .rows = weights.rows,
                          .stride = weights.stride,
                          .dtype = type,
                          .scale = scale,
                          .row_scales = row_scales ? static_cast<const float*>(row_scales->data) : nullptr};
    const nb::gil_scoped_release free;
    return context.add_layer(id, view, gamma ? gamma->data : nullptr);
}

/// Un-combined rows: (rows, weights [tokens, slots], row map [tokens, slots]).
using Uncombined = std::tuple<View, View, View>;

DeferredRows deferred_from(const Uncombined& from, const Expectation& expected, std::int64_t latent) {
    const auto& [rows, weights, map] = from;
    if (rows.columns < latent) {
        refuse("the deferred rows are " + shape_text(rows.rows, rows.columns) + ", expected at least " +
               std::to_string(latent) + " columns");
    }
    expected.check("the deferred rows", rows, rows.rows, rows.columns);
    if (weights.dtype != "bf16" && weights.dtype != "f32")
        refuse("the deferred weights are " + weights.dtype + ", expected bf16 or f32");
    if (map.dtype != "i32" || map.rows != weights.rows || map.columns != weights.columns) {
        refuse("the deferred row map is " + shape_text(map.rows, map.columns) + " of " + map.dtype + ", expected " +
               shape_text(weights.rows, weights.columns) + " of i32");
    }
    for (const View& view : {weights, map}) {
        if (view.device != expected.device) refuse("the deferred weights and map must be on the " + expected.device);
        if (view.rows > 1 && view.stride != view.columns) refuse("the deferred weights and map must be contiguous");
    }
    return {.rows = {rows.data, rows.stride},
            .count = rows.rows,
            .slots = weights.columns,
            .weights = weights.data,
            .weight_dtype = weights.dtype == "bf16" ? Dtype::bf16 : Dtype::f32,
            .map = static_cast<const std::int32_t*>(map.data)};
}

/// One tail. `routed` or `uncombined` is given. `context` is that of the layer, for the checks.
void run(const Layer& layer, const Context& context, const std::optional<View>& routed,
         const std::optional<Uncombined>& uncombined, const std::optional<View>& shared, const std::optional<View>& prefix,
         View& out, std::uintptr_t stream, const std::optional<std::string>& tail, bool consume_shared) {
    if (routed.has_value() == uncombined.has_value()) refuse("expected routed rows or un-combined ones, and not both");
    const Shape& shape = context.shape();
    const Expectation expected = expectation_of(context);
    const std::int64_t tokens = routed ? routed->rows : std::get<1>(*uncombined).rows;
    const std::int64_t own = context.options().sequence_parallel ? context.own_tokens(tokens, context.rank()).count : tokens;
    DeferredRows deferred;
    if (uncombined) deferred = deferred_from(*uncombined, expected, shape.latent);
    const TailInput input{.routed = expected.rows("routed", routed, tokens, shape.latent),
                          .deferred = uncombined ? &deferred : nullptr,
                          .shared = expected.rows("shared", shared, tokens, shape.hidden),
                          .prefix = expected.rows("prefix", prefix, own, shape.hidden),
                          .tokens = tokens,
                          .consume_shared = consume_shared};
    const Rows to = expected.writable("out", out, own, shape.hidden);
    const std::optional<Tail> asked = tail_from(tail);
    Status status;
    {
        const nb::gil_scoped_release free;
        status = asked ? layer.run(*asked, input, to, stream_from(stream)) : layer.run(input, to, stream_from(stream));
    }
    require(status);
}

/// The first half of a tail of `shared.rows` tokens.
void begin(const Layer& layer, const Context& context, const View& shared, View& out, std::uintptr_t stream,
           const std::optional<std::string>& tail) {
    const Expectation expected = expectation_of(context);
    const std::int64_t tokens = shared.rows;
    const std::int64_t own = context.options().sequence_parallel ? context.own_tokens(tokens, context.rank()).count : tokens;
    const ConstRows from = expected.rows("shared", shared, tokens, context.shape().hidden);
    const Rows to = expected.writable("out", out, own, context.shape().hidden);
    const std::optional<Tail> asked = tail_from(tail);
    Status status;
    {
        const nb::gil_scoped_release free;
        status = asked ? layer.begin(*asked, from, to, tokens, stream_from(stream))
                       : layer.begin(from, to, tokens, stream_from(stream));
    }
    require(status);
}

/// The second. `tokens` and `own` are the call's rows and those of its output, for the checks.
void finish(const Layer& layer, const Context& context, std::int64_t tokens, std::int64_t own, const View& routed,
            const std::optional<View>& prefix, std::uintptr_t stream) {
    const Expectation expected = expectation_of(context);
    const ConstRows from = expected.rows("routed", routed, tokens, context.shape().latent);
    const ConstRows added = expected.rows("prefix", prefix, own, context.shape().hidden);
    Status status;
    {
        const nb::gil_scoped_release free;
        status = layer.finish(from, added, stream_from(stream));
    }
    require(status);
}

void all_reduce_rms_norm(const Context& context, const View& x, const std::optional<View>& gamma, View& y,
                         std::uintptr_t stream) {
    const Expectation expected = expectation_of(context);
    const std::int64_t latent = context.shape().latent;
    const ConstRows from = expected.rows("x", x, x.rows, latent);
    const Rows to = expected.writable("y", y, x.rows, latent);
    if (gamma) expected.check("gamma", *gamma, 1, latent);
    Status status;
    {
        const nb::gil_scoped_release free;
        status = context.all_reduce_rms_norm(from, gamma ? gamma->data : nullptr, to, x.rows, stream_from(stream));
    }
    require(status);
}

void accumulate_projection(const Context& context, const View& a, const Layer& layer, View& c_slice, std::uintptr_t stream) {
    const Expectation expected = expectation_of(context);
    const ConstRows from = expected.rows("a", a, a.rows, context.shape().latent);
    const Rows to = expected.writable("c_slice", c_slice, a.rows, context.shape().hidden / context.world());
    Status status;
    {
        const nb::gil_scoped_release free;
        status = context.accumulate_projection(from, layer, to, a.rows, stream_from(stream));
    }
    require(status);
}

using NamedTime = std::pair<std::string, double>;
using NamedReason = std::pair<std::string, std::string>;

/// (tail or none, expected microseconds, candidates, refused, source)
std::tuple<std::optional<std::string>, double, std::vector<NamedTime>, std::vector<NamedReason>, std::string> plan(
    const Context& context, std::int64_t tokens) {
    if (tokens < 0) refuse("tokens is " + std::to_string(tokens) + ", expected at least 0");
    const Plan found = context.plan(tokens);
    std::vector<NamedTime> candidates;
    for (const Candidate& each : found.candidates) candidates.emplace_back(name(each.tail), each.expected_us);
    std::vector<NamedReason> refused;
    for (const Refusal& each : found.refused) refused.emplace_back(name(each.tail), each.reason);
    std::optional<std::string> tail;
    if (!candidates.empty()) tail = candidates.front().first;
    return {tail, found.expected_us, candidates, refused, found.source};
}

/// (rank, phase, layer, call, message)
std::optional<std::tuple<int, std::string, std::int64_t, std::uint64_t, std::string>> poll_fault(const Context& context) {
    const std::optional<Fault> fault = context.poll_fault();
    if (!fault) return std::nullopt;
    return std::tuple(fault->rank, fault->phase, fault->layer, fault->call, fault->message);
}

using NamedCounts = std::vector<std::pair<std::string, std::uint64_t>>;

/// Names and counts; those of calls, refusals and failures only where they are not 0.
std::tuple<NamedCounts, NamedCounts, NamedCounts, NamedCounts> counters(const Context& context) {
    const Counters found = context.counters();
    NamedCounts calls;
    NamedCounts refused;
    NamedCounts failed;
    for (std::size_t tail = 0; tail < found.calls.size(); ++tail)
        if (found.calls[tail] != 0) calls.emplace_back(name(static_cast<Tail>(tail)), found.calls[tail]);
    for (std::size_t code = 0; code < found.refused.size(); ++code) {
        const char* const reason = name(static_cast<StatusCode>(code));
        if (found.refused[code] != 0) refused.emplace_back(reason, found.refused[code]);
        if (found.failed[code] != 0) failed.emplace_back(reason, found.failed[code]);
    }
    return {calls,
            refused,
            failed,
            {{"parts", found.parts},
             {"waits", found.waits},
             {"wait_us", found.wait_us},
             {"longest_wait_us", found.longest_wait_us},
             {"self_checks", found.self_checks}}};
}

}  // namespace
}  // namespace latent_moe::python

NB_MODULE(_core, module) {
    using namespace latent_moe;
    using namespace latent_moe::python;
    using Free = nb::call_guard<nb::gil_scoped_release>;

    module.doc() = "The C++ API of latent-moe. Use `latent_moe`, which is pleasanter.";
    module.attr("version") = library_version();

    // The exception is a class of `latent_moe.errors`, which hands it over; it lives as long as the process.
    static nb::handle error_type;
    module.def(
        "set_error_type", [](const nb::type_object& type) { error_type = nb::object(type).release(); }, "type"_a);
    nb::register_exception_translator(
        [](const std::exception_ptr& failure, void*) {
            try {
                std::rethrow_exception(failure);
            } catch (const Error& error) {
                PyErr_SetObject(error_type.ptr(), error_type(error.what(), name(error.code())).ptr());
            }
        },
        nullptr);

    nb::class_<View>(module, "View", "Rows of somebody's array: where they are, not a copy.")
        .def_ro("rows", &View::rows)
        .def_ro("columns", &View::columns)
        .def_ro("stride", &View::stride)
        .def_ro("dtype", &View::dtype)
        .def_ro("device", &View::device)
        .def(
            "named",
            [](View view, std::string dtype) {
                view.dtype = std::move(dtype);
                return view;
            },
            "dtype"_a, "The same rows, their raw bits being of this dtype.");
    module.def("view", &view_of, "array"_a);
    module.def("view_at", &view_at, "data"_a, "rows"_a, "columns"_a, "stride"_a, "dtype"_a, "device"_a, "owner"_a);

    nb::class_<Bootstrap>(module, "Bootstrap", "How this rank finds the others of its group.")
        .def_ro("rank", &Bootstrap::rank)
        .def_ro("world", &Bootstrap::world)
        .def_ro("local_world", &Bootstrap::local_world)
        .def(
            "all_gather",
            [](const Bootstrap& bootstrap, const nb::bytes& part) {
                const std::size_t bytes = part.size();
                std::string received(bytes * static_cast<std::size_t>(bootstrap.world), '\0');
                {
                    const nb::gil_scoped_release free;
                    bootstrap.all_gather_bytes(part.data(), received.data(), bytes);
                }
                std::vector<nb::bytes> parts;
                for (int rank = 0; rank < bootstrap.world; ++rank)
                    parts.emplace_back(received.data() + static_cast<std::size_t>(rank) * bytes, bytes);
                return parts;
            },
            "part"_a, "Collective: the parts of all ranks, all as long as this one's, in rank order.");
    module.def("single_rank", &single_rank, "One rank alone.");
    module.def("thread_ranks", &thread_ranks, "world"_a, "timeout_ms"_a = 30'000);
    module.def("callable_ranks", &callable_ranks, "rank"_a, "world"_a, "all_gather"_a, "local_world"_a);
    module.def(
        "nccl_ranks",
        []([[maybe_unused]] std::uintptr_t communicator, [[maybe_unused]] int timeout_ms) -> Bootstrap {
#ifdef LATENT_MOE_HAS_GPU
            const nb::gil_scoped_release free;
            return nccl_ranks(reinterpret_cast<void*>(communicator), timeout_ms);
#else
            throw Error(StatusCode::unavailable, "this build has no GPU backend and so no NCCL");
#endif
        },
        "communicator"_a, "timeout_ms"_a);

    nb::class_<Layer>(module, "Layer")
        .def_prop_ro("id", &Layer::id)
        .def("run", &run, "context"_a, "routed"_a.none(), "uncombined"_a.none(), "shared"_a.none(), "prefix"_a.none(),
             "out"_a, "stream"_a, "tail"_a.none(), "consume_shared"_a)
        .def("begin", &begin, "context"_a, "shared"_a, "out"_a, "stream"_a, "tail"_a.none())
        .def("finish", &finish, "context"_a, "tokens"_a, "own"_a, "routed"_a, "prefix"_a.none(), "stream"_a);

    nb::class_<Context>(module, "Context")
        .def_static("create", &create, "shape"_a, "bootstrap"_a, "options"_a)
        .def("add_layer", &add_layer, "id"_a, "weights"_a, "gamma"_a.none(), "dtype"_a, "scale"_a, "row_scales"_a.none())
        .def("seal", &Context::seal, Free())
        .def_prop_ro("backend", [](const Context& context) { return context.backend(); })
        .def_prop_ro("rank", &Context::rank)
        .def_prop_ro("world", &Context::world)
        .def_prop_ro("weight_bytes", &Context::weight_bytes)
        .def_prop_ro("workspace_bytes", &Context::workspace_bytes)
        .def(
            "own_tokens",
            [](const Context& context, std::int64_t tokens, int rank) {
                const TokenRange range = context.own_tokens(tokens, rank);
                return std::pair(range.first, range.count);
            },
            "tokens"_a, "rank"_a)
        .def("plan", &plan, "tokens"_a)
        .def("poll_fault", &poll_fault)
        .def("counters", &counters)
        .def("abort", &Context::abort, "reason"_a, Free())
        .def("suspend", &Context::suspend, Free())
        .def("resume", &Context::resume, Free())
        .def("all_reduce_rms_norm", &all_reduce_rms_norm, "x"_a, "gamma"_a.none(), "y"_a, "stream"_a)
        .def("accumulate_projection", &accumulate_projection, "a"_a, "layer"_a, "c_slice"_a, "stream"_a);

    module.def("shape_preset", [](const std::string& model) {
        const std::optional<Shape> shape = shape_preset(model);
        if (!shape) {
            std::string names;
            for (const std::string& each : shape_preset_names()) names += (names.empty() ? "" : ", ") + each;
            refuse("model is '" + model + "', expected one of " + names);
        }
        return std::tuple(shape->hidden, shape->latent, std::string(name(shape->norm)), shape->epsilon, shape->routed_scale,
                          std::string(name(shape->activations)));
    });
    module.def("shape_preset_names", &shape_preset_names);
}

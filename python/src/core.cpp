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
#include "tensors.h"

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
    const ExchangeTable* table = nullptr;  ///< where it was read through one; knows the library's current stream
    std::int32_t device_type = 0;          ///< with `table`
    std::int32_t device_id = 0;
};

/// Null for a type that no place expects.
const char* known_dtype_name(const nb::dlpack::dtype& dtype) {
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
    return nullptr;
}

std::string dtype_name(const nb::dlpack::dtype& dtype) {
    if (const char* const name = known_dtype_name(dtype)) return name;
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
        refuse(std::string("expected an array with DLPack or the buffer protocol, found ") +
               nb::str(array.type().attr("__name__")).c_str());
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

/// What `latent_moe.arrays` hands over. It lives as long as the process.
struct Arrays {
    TensorClasses tensors;
    nb::handle view;       ///< (array) → View; raises for what is none
    nb::handle stream_of;  ///< (array, stream or none) → raw pointer
};

Arrays& arrays() {
    static Arrays instance;
    return instance;
}

/// The rows of a tensor of a known class. Nothing if there is anything unusual about it: Python then looks at it, and has
/// the words for what is wrong.
bool read_tensor(const ExchangeTable& table, nb::handle tensor, View& view) {
    DlTensor seen{};
    if (table.describe(tensor.ptr(), &seen) != 0) {
        PyErr_Clear();
        return false;
    }
    const char* const dtype = known_dtype_name({.code = seen.code, .bits = seen.bits, .lanes = seen.lanes});
    const bool flat = seen.dimensions == 1;
    if (dtype == nullptr || (!flat && seen.dimensions != 2)) return false;
    view.rows = flat ? 1 : seen.shape[0];
    view.columns = seen.shape[flat ? 0 : 1];
    view.stride = view.columns;
    if (seen.strides != nullptr) {
        if (view.columns > 1 && seen.strides[flat ? 0 : 1] != 1) return false;
        if (view.rows > 1) view.stride = seen.strides[0];
    }
    view.data = static_cast<std::byte*>(seen.data) + seen.byte_offset;
    view.dtype = dtype;
    view.device = seen.device_type == dl_cpu ? "cpu" : "gpu";
    view.table = &table;
    view.device_type = seen.device_type;
    view.device_id = seen.device_id;
    return true;
}

/// The rows of any array.
View read(nb::handle array) {
    View view;
    const ExchangeTable* const table = arrays().tensors.table_of(array);
    if (table != nullptr && read_tensor(*table, array, view)) return view;
    return nb::cast<View>(arrays().view(array));
}

std::optional<View> read_optional(nb::handle array) {
    if (array.is_none()) return std::nullopt;
    return read(array);
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
    ConstRows rows(const char* what, const View& view, std::int64_t count, std::int64_t columns) const {
        check(what, view, count, columns);
        return {view.data, view.stride};
    }
    ConstRows rows(const char* what, const std::optional<View>& view, std::int64_t count, std::int64_t columns) const {
        return view ? rows(what, *view, count, columns) : ConstRows{};
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
            // An interrupt does not pass through the library as one: Python raises it again when the call is over.
            if (error.matches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
            throw Error(StatusCode::unavailable, std::string("the all-gather callable failed: ") +
                                                     nb::str(error.type().attr("__name__")).c_str() + ": " +
                                                     nb::str(error.value()).c_str());
        }
    };
    return {
        .rank = rank, .world = world, .all_gather_bytes = gather_bytes, .transport = nullptr, .local_world = local_world};
}

/// What a field of a Python object holds.
template <typename Value>
Value field(const nb::handle& from, const char* name, const char* expected) {
    const nb::object given = from.attr(name);
    Value value{};
    if (!nb::try_cast(given, value)) {
        PyErr_Clear();
        refuse(std::string(name) + " is " + nb::repr(given).c_str() + ", expected " + expected);
    }
    return value;
}
std::string text_field(const nb::handle& from, const char* name) {
    return field<std::string>(from, name, "text");
}
bool flag_field(const nb::handle& from, const char* name) {
    return field<bool>(from, name, "True or False");
}
std::int64_t long_field(const nb::handle& from, const char* name) {
    return field<std::int64_t>(from, name, "a whole number of 64 bits");
}
int int_field(const nb::handle& from, const char* name) {
    return field<int>(from, name, "a whole number of 32 bits");
}

Shape shape_from(const nb::handle& from) {
    return {.hidden = long_field(from, "hidden"),
            .latent = long_field(from, "latent"),
            .norm = from_name("norm", text_field(from, "norm"), {Norm::none, Norm::rms}),
            .epsilon = field<float>(from, "epsilon", "a number"),
            .routed_scale = field<float>(from, "routed_scale", "a number"),
            .activations = dtype_from("activations", text_field(from, "activations"))};
}

Options options_from(const nb::handle& from) {
    Options options{
        .backend = text_field(from, "backend"),
        .capacity_tokens = long_field(from, "capacity_tokens"),
        .max_tokens = long_field(from, "max_tokens"),
        .timeout_ms = int_field(from, "timeout_ms"),
        .keep_whole_weights = flag_field(from, "keep_whole_weights"),
        .tail = tail_from(field<std::optional<std::string>>(from, "tail", "the name of a tail or None")),
        .tune_table = text_field(from, "tune_table"),
        .shared = from_name("shared", text_field(from, "shared"),
                            {SharedState::partial, SharedState::reduced, SharedState::absent}),
        .sequence_parallel = flag_field(from, "sequence_parallel"),
        .expert_parallel = flag_field(from, "expert_parallel"),
        .deferred_finalize = flag_field(from, "deferred_finalize"),
        .batch_invariant = flag_field(from, "batch_invariant"),
        .float8_weights = flag_field(from, "float8_weights"),
        .cpu_threads = int_field(from, "cpu_threads"),
        .device = int_field(from, "device"),
        .reserved_sms = int_field(from, "reserved_sms"),
        .self_check_period = long_field(from, "self_check_period"),
        .self_check_folder = text_field(from, "self_check_folder"),
    };
    for (const auto& [tail, limit] : field<nb::dict>(from, "tail_token_limit", "a dict of tails and tokens")) {
        std::string named;
        std::int64_t most = 0;
        if (!nb::try_cast(tail, named) || !nb::try_cast(limit, most)) {
            PyErr_Clear();
            refuse(std::string("tail_token_limit has ") + nb::repr(tail).c_str() + ": " + nb::repr(limit).c_str() +
                   ", expected the name of a tail and a whole number");
        }
        options.tail_token_limit[static_cast<std::size_t>(tail_from(named))] = most;
    }
    return options;
}

/// The stream that was given, or the current one of `array`'s library.
///
/// Pointers of the caller's arrays hold no reference; what a call needs lives until it returns, as all views do.
Stream stream_for(nb::handle given, nb::handle array, const View& view) {
    const auto from = [](nb::handle number) { return reinterpret_cast<Stream>(nb::cast<std::uintptr_t>(number)); };
    if (!given.is_none()) return from(given);
    if (view.device == "cpu") return nullptr;
    // For other devices a table may say null for whatever stream it is: that is not seen on CUDA's.
    if (view.table != nullptr && view.device_type == dl_cuda) {
        void* current = nullptr;
        if (view.table->current_stream(view.device_type, view.device_id, &current) == 0) return current;
        PyErr_Clear();
    }
    return from(nb::object(arrays().stream_of(array, given)));
}

/// A layer with its context, whose shape and options the checks need.
struct BoundLayer {
    Layer layer;
    Context context;
};

Context create(const nb::object& shape, const Bootstrap& bootstrap, const nb::object& options) {
    const Shape made = shape_from(shape);
    const Options chosen = options_from(options);
    const nb::gil_scoped_release free;
    return Context::create(made, bootstrap, chosen);
}

BoundLayer add_layer(Context& context, std::int64_t id, const View& weights, const std::optional<View>& gamma,
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
    return {context.add_layer(id, view, gamma ? gamma->data : nullptr), context};
}

/// Un-combined rows, with weights and a row map that are [tokens, slots].
DeferredRows deferred_from(const View& rows, const View& weights, const View& map, const Expectation& expected,
                           std::int64_t latent) {
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
    for (const View* view : {&weights, &map}) {
        if (view->device != expected.device) refuse("the deferred weights and map must be on the " + expected.device);
        if (view->rows > 1 && view->stride != view->columns) refuse("the deferred weights and map must be contiguous");
    }
    return {.rows = {rows.data, rows.stride},
            .count = rows.rows,
            .slots = weights.columns,
            .weights = weights.data,
            .weight_dtype = weights.dtype == "bf16" ? Dtype::bf16 : Dtype::f32,
            .map = static_cast<const std::int32_t*>(map.data)};
}

std::int64_t own_rows(const Context& context, std::int64_t tokens) {
    return context.options().sequence_parallel ? context.own_tokens(tokens, context.rank()).count : tokens;
}

/// One tail. Arrays are whatever `read` takes. `routed` are rows, or the un-combined ones, whose weights and map are
/// `uncombined` then.
void run(const BoundLayer& bound, nb::handle routed, const std::optional<std::pair<nb::object, nb::object>>& uncombined,
         nb::handle shared, nb::handle prefix, nb::handle out, nb::handle stream, const std::optional<std::string>& tail,
         bool consume_shared) {
    const Context& context = bound.context;
    const View routed_rows = read(routed);
    std::optional<View> weights;
    std::optional<View> map;
    if (uncombined) {
        weights = read(uncombined->first);
        map = read(uncombined->second);
    }
    const std::optional<View> shared_rows = read_optional(shared);
    const std::optional<View> prefix_rows = read_optional(prefix);
    const View out_rows = read(out);
    const Stream on = stream_for(stream, routed, routed_rows);
    const Shape& shape = context.shape();
    const Expectation expected = expectation_of(context);
    const std::int64_t tokens = uncombined ? weights->rows : routed_rows.rows;
    const std::int64_t own = own_rows(context, tokens);
    DeferredRows deferred;
    if (uncombined) deferred = deferred_from(routed_rows, *weights, *map, expected, shape.latent);
    const TailInput input{.routed = uncombined ? ConstRows{} : expected.rows("routed", routed_rows, tokens, shape.latent),
                          .deferred = uncombined ? &deferred : nullptr,
                          .shared = expected.rows("shared", shared_rows, tokens, shape.hidden),
                          .prefix = expected.rows("prefix", prefix_rows, own, shape.hidden),
                          .tokens = tokens,
                          .consume_shared = consume_shared};
    const Rows to = expected.writable("out", out_rows, own, shape.hidden);
    const std::optional<Tail> asked = tail_from(tail);
    Status status;
    {
        const nb::gil_scoped_release free;
        status = asked ? bound.layer.run(*asked, input, to, on) : bound.layer.run(input, to, on);
    }
    require(status);
}

/// The first half of a tail of as many tokens as `shared` has rows.
void begin(const BoundLayer& bound, nb::handle shared, nb::handle out, nb::handle stream,
           const std::optional<std::string>& tail) {
    const Context& context = bound.context;
    const View shared_rows = read(shared);
    const View out_rows = read(out);
    const Stream on = stream_for(stream, shared, shared_rows);
    const Expectation expected = expectation_of(context);
    const std::int64_t tokens = shared_rows.rows;
    const ConstRows from = expected.rows("shared", shared_rows, tokens, context.shape().hidden);
    const Rows to = expected.writable("out", out_rows, own_rows(context, tokens), context.shape().hidden);
    const std::optional<Tail> asked = tail_from(tail);
    Status status;
    {
        const nb::gil_scoped_release free;
        status = asked ? bound.layer.begin(*asked, from, to, tokens, on) : bound.layer.begin(from, to, tokens, on);
    }
    require(status);
}

/// The second. `tokens` and `own` are the call's rows and those of its output, for the checks.
void finish(const BoundLayer& bound, std::int64_t tokens, std::int64_t own, nb::handle routed, nb::handle prefix,
            nb::handle stream) {
    const Context& context = bound.context;
    const View routed_rows = read(routed);
    const std::optional<View> prefix_rows = read_optional(prefix);
    const Stream on = stream_for(stream, routed, routed_rows);
    const Expectation expected = expectation_of(context);
    const ConstRows from = expected.rows("routed", routed_rows, tokens, context.shape().latent);
    const ConstRows added = expected.rows("prefix", prefix_rows, own, context.shape().hidden);
    Status status;
    {
        const nb::gil_scoped_release free;
        status = bound.layer.finish(from, added, on);
    }
    require(status);
}

void all_reduce_rms_norm(const Context& context, nb::handle x, nb::handle gamma, nb::handle y, nb::handle stream) {
    const View x_rows = read(x);
    const std::optional<View> gamma_row = read_optional(gamma);
    const View y_rows = read(y);
    const Stream on = stream_for(stream, x, x_rows);
    const Expectation expected = expectation_of(context);
    const std::int64_t latent = context.shape().latent;
    const ConstRows from = expected.rows("x", x_rows, x_rows.rows, latent);
    const Rows to = expected.writable("y", y_rows, x_rows.rows, latent);
    if (gamma_row) expected.check("gamma", *gamma_row, 1, latent);
    Status status;
    {
        const nb::gil_scoped_release free;
        status = context.all_reduce_rms_norm(from, gamma_row ? gamma_row->data : nullptr, to, x_rows.rows, on);
    }
    require(status);
}

void accumulate_projection(const Context& context, nb::handle a, const BoundLayer& bound, nb::handle c_slice,
                           nb::handle stream) {
    const View a_rows = read(a);
    const View c_rows = read(c_slice);
    const Stream on = stream_for(stream, a, a_rows);
    const Expectation expected = expectation_of(context);
    const ConstRows from = expected.rows("a", a_rows, a_rows.rows, context.shape().latent);
    const Rows to = expected.writable("c_slice", c_rows, a_rows.rows, context.shape().hidden / context.world());
    Status status;
    {
        const nb::gil_scoped_release free;
        status = context.accumulate_projection(from, bound.layer, to, a_rows.rows, on);
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
                try {
                    PyErr_SetObject(error_type.ptr(), error_type(error.what(), name(error.code())).ptr());
                } catch (nb::python_error& raised) {  // an interrupt that came while this waited, say
                    raised.restore();
                }
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
    module.def(
        "set_array_functions",
        [](const nb::callable& view, const nb::callable& stream_of) {
            arrays().view = nb::object(view).release();
            arrays().stream_of = nb::object(stream_of).release();
        },
        "view"_a, "stream_of"_a, "How arrays of no known class are read: `latent_moe.arrays`.");
    module.def(
        "add_tensor_class",
        [](const nb::type_object& type, nb::handle table) {
            const void* const found = PyCapsule_GetPointer(table.ptr(), "dlpack_exchange_api");
            if (found == nullptr) PyErr_Clear();
            return arrays().tensors.add(type, static_cast<const ExchangeTable*>(found));
        },
        "type"_a, "table"_a,
        "Objects of this very class are read through its `__dlpack_c_exchange_api__`, if that is known.");
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

    nb::class_<BoundLayer>(module, "Layer")
        .def_prop_ro("id", [](const BoundLayer& bound) { return bound.layer.id(); })
        .def("run", &run, "routed"_a, "uncombined"_a.none(), "shared"_a.none(), "prefix"_a.none(), "out"_a,
             "stream"_a.none(), "tail"_a.none(), "consume_shared"_a)
        .def("begin", &begin, "shared"_a, "out"_a, "stream"_a.none(), "tail"_a.none())
        .def("finish", &finish, "tokens"_a, "own"_a, "routed"_a, "prefix"_a.none(), "stream"_a.none());

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
        .def("all_reduce_rms_norm", &all_reduce_rms_norm, "x"_a, "gamma"_a.none(), "y"_a, "stream"_a.none())
        .def("accumulate_projection", &accumulate_projection, "a"_a, "layer"_a, "c_slice"_a, "stream"_a.none());

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

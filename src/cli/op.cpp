// `op`: one public part of the tail alone, verified and timed.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "cli/command.h"
#include "cli/judge.h"
#include "cli/output.h"
#include "cli/problem.h"
#include "cli/rank_work.h"
#include "context/backends.h"
#include "core/numeric.h"
#include "core/partition.h"
#include "core/synthetic.h"
#include "latent_moe/status.h"

namespace latent_moe::cli {
namespace {

constexpr const char* norm_operation = "all-reduce-rms-norm";
constexpr const char* projection_operation = "accumulate-projection";

void add_options(CLI::App& app, Arguments& arguments) {
    app.add_option("operation", arguments.operation, fmt::format("{} or {}", norm_operation, projection_operation))
        ->required()
        ->type_name("NAME");
    add_shape_options(app, arguments);
    add_rank_options(app, arguments);
    add_tokens_option(app, arguments, "1,16,64");
    add_tensor_options(app, arguments, false);
    add_repeats_option(app, arguments);
    add_output_options(app, arguments);
}

struct Row {
    std::int64_t tokens = 0;
    double rel_l2 = 0;
    double chain_rel_l2 = 0;
    bool ranks_identical = true;
    double allowed = 0;
    bool repeat_identical = true;
    Timing timing;

    bool pass() const noexcept { return rel_l2 <= allowed && ranks_identical && repeat_identical; }
};

std::vector<float> values_of(const ConstMatrix& matrix) {
    std::vector<float> values(static_cast<std::size_t>(matrix.rows * matrix.columns));
    for (std::int64_t row = 0; row < matrix.rows; ++row) {
        widen(matrix.row(row), matrix.dtype, values.data() + row * matrix.columns, matrix.columns);
    }
    return values;
}

Tensor host_copy(Device& device, const DeviceTensor& tensor) {
    Tensor copy(tensor.view().rows, tensor.view().columns, tensor.view().dtype);
    device.synchronize();
    device.download(copy.view().data, tensor.view().data, tensor.bytes());
    return copy;
}

void fill_bytes(Device& device, const DeviceTensor& tensor, int value) {
    const std::vector<std::byte> bytes(tensor.bytes(), static_cast<std::byte>(value));
    device.upload(tensor.view().data, bytes.data(), bytes.size());
}

bool same_bytes(const Tensor& left, const Tensor& right) {
    return left.bytes() == right.bytes() && std::memcmp(left.view().data, right.view().data, left.bytes()) == 0;
}

bool on_all_ranks(const Bootstrap& bootstrap, bool here) {
    const std::vector<char> all = gathered(bootstrap, static_cast<char>(here));
    return std::all_of(all.begin(), all.end(), [](char each) { return each != 0; });
}

double worst_of(const Bootstrap& bootstrap, double here) {
    const std::vector<double> all = gathered(bootstrap, here);
    return *std::max_element(all.begin(), all.end());
}

/// norm(Σ_ranks x) in float64, and in the steps of the chain: the sum rounded, then the normed row rounded.
std::pair<std::vector<double>, std::vector<float>> normed_sums(const Shape& shape, const CallInputs& inputs,
                                                               std::int64_t tokens, const LayerWeights& layer) {
    std::vector<double> exact(static_cast<std::size_t>(tokens * shape.latent));
    std::vector<float> chain(exact.size());
    for (const Tensor& routed : inputs.routed) {
        const std::vector<float> values = values_of(routed.view().row_range(0, tokens));
        for (std::size_t i = 0; i < values.size(); ++i) {
            exact[i] += static_cast<double>(values[i]);
            chain[i] += values[i];
        }
    }
    for (float& value : chain) value = round_to(shape.activations, value);
    if (shape.norm == Norm::none) return {exact, chain};
    const std::vector<float> gamma = values_of(layer.gamma.view());
    const auto norm_row = [&](auto* row, auto round) {
        using Real = std::remove_reference_t<decltype(*row)>;
        Real squares = 0;
        for (std::int64_t i = 0; i < shape.latent; ++i) squares += row[i] * row[i];
        const Real factor = 1 / std::sqrt(squares / static_cast<Real>(shape.latent) + static_cast<Real>(shape.epsilon));
        for (std::int64_t i = 0; i < shape.latent; ++i)
            row[i] = round(row[i] * factor * static_cast<Real>(gamma[static_cast<std::size_t>(i)]));
    };
    for (std::int64_t row = 0; row < tokens; ++row) {
        norm_row(exact.data() + row * shape.latent, [](double value) { return value; });
        norm_row(chain.data() + row * shape.latent, [&](float value) { return round_to(shape.activations, value); });
    }
    return {exact, chain};
}

Row check_norm(const Arguments& arguments, const Problem& problem, const Bootstrap& bootstrap, Device& device,
               const Context& context, const LayerWeights& layer, const CallInputs& inputs, std::int64_t tokens) {
    const RankInputs rank_inputs(device, inputs, bootstrap.rank);
    const DeviceTensor gamma(device, layer.gamma.view());
    const DeviceTensor y(device, tokens, problem.shape.latent, problem.shape.activations);
    const auto call = [&] {
        require(context.all_reduce_rms_norm(rank_inputs.routed.view().data, gamma.view().data, y.view().data, tokens,
                                            device.stream()));
    };
    fill_bytes(device, y, 0xFE);
    call();
    const Tensor first = host_copy(device, y);
    fill_bytes(device, y, 0xFF);
    call();
    const Tensor out = host_copy(device, y);
    Row row{.tokens = tokens};
    row.repeat_identical = on_all_ranks(bootstrap, same_bytes(first, out));
    row.ranks_identical = same_on_all_ranks(bootstrap, out.view());
    if (bootstrap.rank == 0) {
        const auto [exact, chain] = normed_sums(problem.shape, inputs, tokens, layer);
        row.rel_l2 = relative_l2(out.view(), exact);
        row.chain_rel_l2 = relative_l2(chain, exact);
        row.allowed = allowed_error(problem.shape, row.chain_rel_l2, Tail::replicated, tokens * problem.shape.latent);
    }
    row.timing = time_call(bootstrap, device, arguments.repeats, call);
    return row;
}

/// Every rank checks its own columns; the worst one counts. Ranks hold different columns, so they are not compared.
Row check_projection(const Arguments& arguments, const Problem& problem, const Bootstrap& bootstrap, Device& device,
                     const Context& context, const LayerWeights& layer, const CallInputs& inputs, std::int64_t tokens) {
    // A is what the norm would hand on: the same rows on every rank. C is this rank's shared partial, whole, of which it
    // owns a slice.
    Tensor a(tokens, problem.shape.latent, problem.shape.activations);
    fill_normal(a.view(), draw_key(arguments.seed, Draw::routed, 0), 1);
    const TokenRange columns = even_part(problem.shape.hidden, problem.world, bootstrap.rank);
    const ConstMatrix before = inputs.shared[static_cast<std::size_t>(bootstrap.rank)].view().row_range(0, tokens);
    const DeviceTensor a_there(device, std::as_const(a).view());
    const DeviceTensor c(device, before);
    const Matrix slice = c.view().column_range(columns.first, columns.count);
    const auto call = [&] {
        require(context.accumulate_projection(a_there.view().data, context.layer(0), Rows(slice.data, slice.stride), tokens,
                                              device.stream()));
    };
    call();
    const Tensor first = host_copy(device, c);
    device.upload(c.view().data, before.data, c.bytes());
    call();
    const Tensor out = host_copy(device, c);
    const ConstMatrix out_slice = out.view().column_range(columns.first, columns.count);
    Row row{.tokens = tokens};
    row.repeat_identical = on_all_ranks(bootstrap, same_bytes(first, out));

    ReferenceInput reference{.shape = problem.shape,
                             .routed = {std::as_const(a).view()},
                             .shared = {before.column_range(columns.first, columns.count)},
                             .prefix = {},
                             .weights = layer.rows,
                             .weight_scale = layer.scale,
                             .row_scales = layer.row_scales.empty() ? nullptr : layer.row_scales.data()};
    reference.shape.norm = Norm::none;
    reference.shape.hidden = columns.count;
    const std::vector<double> exact = reference_tail(reference);
    row.rel_l2 = worst_of(bootstrap, relative_l2(out_slice, exact));
    row.chain_rel_l2 = worst_of(bootstrap, relative_l2(chain_tail(reference), exact));
    row.allowed = allowed_error(problem.shape, row.chain_rel_l2, Tail::replicated, tokens * problem.shape.hidden);
    row.timing = time_call(bootstrap, device, arguments.repeats, call);
    return row;
}

int execute(const Arguments& arguments, Ranks& ranks) {
    const bool is_norm = arguments.operation == norm_operation;
    if (!is_norm && arguments.operation != projection_operation) {
        throw Error(StatusCode::invalid_argument,
                    fmt::format("op is '{}', expected {} or {}", arguments.operation, norm_operation, projection_operation));
    }
    Problem problem = make_problem(arguments, ranks, {1, 16, 64});
    find_backend(problem.options.backend);  // what is missing is said before inputs are made
    if (!is_norm && problem.shape.hidden % problem.world != 0) {
        throw Error(StatusCode::unsupported,
                    fmt::format("hidden {} is not divisible by {} ranks, so no rank owns a column slice",
                                problem.shape.hidden, problem.world));
    }
    require_run_memory(problem, true, 1);
    Output output(arguments, ranks.speaks());
    const CallInputs inputs = make_inputs(arguments, problem, ranks, true);

    std::string backend;
    std::vector<Row> rows;
    ranks.run([&](const Bootstrap& bootstrap) {
        LayerWeights layer;
        agreed(bootstrap, "reading weights",
               [&] { layer = problem.weights.load(problem.layer, problem.rows_of_rank(bootstrap.rank)); });
        const std::unique_ptr<Device> device = make_device(problem.options, bootstrap);
        const Context context = make_context(problem, bootstrap, {problem.layer});
        Progress progress(arguments, bootstrap.rank == 0);
        for (const std::int64_t tokens : problem.tokens) {
            progress.say("{}, {} tokens", arguments.operation, tokens);
            const Row row = is_norm
                                ? check_norm(arguments, problem, bootstrap, *device, context, layer, inputs, tokens)
                                : check_projection(arguments, problem, bootstrap, *device, context, layer, inputs, tokens);
            if (bootstrap.rank == 0) rows.push_back(row);
        }
        if (bootstrap.rank == 0) backend = context.backend();
    });
    if (!ranks.speaks()) return done;

    output.line("{}: {}; {} {}, backend {}", arguments.operation, shape_text(problem.shape), problem.world,
                arguments.processes ? "processes" : "threads", backend);
    Table table({"tokens", "rel L2", "chain's", "<ranks", "<repeat", "median us", "p10 us", "p90 us", "<result"});
    Json json = {{"schema", "latent-moe/op/1"}, {"op", arguments.operation}, {"rows", Json::array()}};
    bool all_pass = true;
    for (const Row& row : rows) {
        table.row({fmt::format("{}", row.tokens), error_text(row.rel_l2), error_text(row.chain_rel_l2),
                   !is_norm              ? "own columns"
                   : row.ranks_identical ? "identical"
                                         : "DIFFER",
                   row.repeat_identical ? "identical" : "DIFFERS", us_text(row.timing.median_us), us_text(row.timing.p10_us),
                   us_text(row.timing.p90_us), row.pass() ? "pass" : "FAIL"});
        json["rows"].push_back({{"backend", backend},
                                {"tp", problem.world},
                                {"tokens", row.tokens},
                                {"dtype", name(problem.shape.activations)},
                                {"rel_l2", row.rel_l2},
                                {"chain_rel_l2", row.chain_rel_l2},
                                {"ranks_identical", row.ranks_identical},
                                {"repeat_identical", row.repeat_identical},
                                {"median_us", row.timing.median_us},
                                {"p10_us", row.timing.p10_us},
                                {"p90_us", row.timing.p90_us},
                                {"repeats", row.timing.repeats},
                                {"pass", row.pass()}});
        all_pass = all_pass && row.pass();
    }
    output.table(table);
    output.json(json);
    return all_pass ? done : check_failed;
}

}  // namespace

Command op_command() {
    return {.name = "op",
            .summary = "Verifies and times one public part of the tail alone",
            .examples =
                "  latent-moe op all-reduce-rms-norm --model kimi-k3 --tp 4 --tokens 1,16\n"
                "  latent-moe op accumulate-projection --model nemotron-3-super --tp 2",
            .add_options = &add_options,
            .execute = &execute};
}

}  // namespace latent_moe::cli

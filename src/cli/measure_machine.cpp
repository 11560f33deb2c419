#include "cli/measure_machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "cli/rank_work.h"
#include "context/backends.h"
#include "context/context_access.h"
#include "core/partition.h"
#include "core/synthetic.h"
#include "latent_moe/status.h"

namespace latent_moe::cli {
namespace {

constexpr int layers_on_gpu = 12;  // more bytes than any cache of today's GPUs
constexpr int layers_on_cpu = 4;
constexpr std::int64_t rows_between_layers = 8;  // windows of one drawing: every layer has weights of its own

double rank_rows(const MachineProbes& probes, std::int64_t hidden) {
    return static_cast<double>(hidden) / probes.world;
}

/// What a product reads and writes.
double product_bytes(const MachineProbes& probes, std::int64_t hidden, std::int64_t tokens) {
    const auto latent = static_cast<double>(probes.shape.latent);
    const auto element = static_cast<double>(bytes_of(probes.shape.activations));
    const double rows = rank_rows(probes, hidden);
    return rows * latent * probes.weight_element_bytes + static_cast<double>(tokens) * (latent + 2 * rows) * element;
}

/// A context with layers of its own, and what its products read and write.
class ProductBench {
public:
    ProductBench(const Problem& problem, const Shape& shape, const Bootstrap& bootstrap, Device& device,
                 const LayerWeights& drawn, int layers, std::int64_t most_tokens, std::uint64_t seed)
        : device_(device), context_(make(problem, shape, bootstrap, most_tokens)) {
        const std::int64_t rows = shape.hidden / bootstrap.world;
        agreed(bootstrap, "adding layers", [&] {
            for (int layer = 0; layer < layers; ++layer) {
                WeightView view = drawn.view();
                view.rows = rows;
                view.data = static_cast<const std::byte*>(view.data) + layer * rows_between_layers * drawn.rows.row_bytes();
                context_.add_layer(layer, view, drawn.gamma_data());
            }
        });
        context_.seal();
        Tensor latents(most_tokens, shape.latent, shape.activations);  // drawn: zeros are multiplied faster
        fill_normal(latents.view(), draw_key(seed, Draw::routed, static_cast<std::uint64_t>(bootstrap.rank)), 1);
        a_ = DeviceTensor(device, std::as_const(latents).view());
        y_ = DeviceTensor(device, most_tokens, shape.latent, shape.activations);
        c_ = DeviceTensor(device, most_tokens, rows, shape.activations);
        if (shape.norm == Norm::rms) gamma_ = DeviceTensor(device, drawn.gamma.view());
        const std::vector<std::byte> zeros(c_.bytes());
        device.upload(c_.view().data, zeros.data(), c_.bytes());
    }

    /// A pass over the layers: their products.
    Turns products(std::int64_t tokens) {
        return {[this, tokens] {
            const Matrix c = c_.view();
            for (std::size_t layer = 0; layer < context_.layer_count(); ++layer) {
                require(context_.accumulate_projection(a_.view().data, context_.layer(layer), Rows(c.data, c.stride), tokens,
                                                       device_.stream()));
            }
        }};
    }

    /// As many all-reduces with norm as there are layers.
    Turns reductions(std::int64_t tokens) {
        return {[this, tokens] {
            for (std::size_t layer = 0; layer < context_.layer_count(); ++layer) {
                require(context_.all_reduce_rms_norm(a_.view().data, gamma_.view().data, y_.view().data, tokens,
                                                     device_.stream()));
            }
        }};
    }

    const Context& context() const noexcept { return context_; }
    int layers() const noexcept { return static_cast<int>(context_.layer_count()); }

private:
    static Context make(const Problem& problem, const Shape& shape, const Bootstrap& bootstrap, std::int64_t most_tokens) {
        Options options = problem.options;
        options.max_tokens = most_tokens;
        options.capacity_tokens = std::min<std::int64_t>(options.capacity_tokens, most_tokens);
        options.keep_whole_weights = false;
        return Context::create(shape, bootstrap, options);
    }

    Device& device_;
    Context context_;
    DeviceTensor a_;
    DeviceTensor y_;
    DeviceTensor c_;
    DeviceTensor gamma_;
};

std::vector<double> medians(const Arguments& arguments, const Bootstrap& bootstrap, Device& device,
                            const ProductBench& bench, const std::vector<Turns>& turns) {
    const auto check = [&bench] {
        if (const auto fault = bench.context().poll_fault()) throw Error(StatusCode::aborted, fault->message);
    };
    std::vector<double> us;
    for (std::vector<double>& each :
         time_side_by_side(bootstrap, device, {.repeats = arguments.repeats, .check = check}, turns)) {
        us.push_back(summary_of(std::move(each)).median_us / bench.layers());
    }
    return us;
}

/// A quarter of the columns, still divisible.
std::int64_t narrow_hidden_of(const Shape& shape, int world) {
    const std::int64_t step = std::int64_t{8} * world;
    return std::max(step, shape.hidden / 4 / step * step);
}

}  // namespace

MachineKind machine_from(const MachineTimes& times, const MachineProbes& probes, const MachineKind& assumed) {
    MachineKind kind = assumed;
    Machine& machine = kind.machine;
    kind.unmeasured.clear();
    const auto keep = [&](const char* name) { kind.unmeasured.emplace_back(name); };

    const double wide_bytes = product_bytes(probes, probes.shape.hidden, 1);
    const double narrow_bytes = product_bytes(probes, probes.narrow_hidden, 1);
    const double memory = (wide_bytes - narrow_bytes) / (times.wide_us - times.narrow_us);
    if (times.wide_us > times.narrow_us && narrow_bytes / memory < times.narrow_us) {
        machine.memory_bytes_per_us = memory;
        machine.launch_us = times.narrow_us - narrow_bytes / memory;
    } else if (times.wide_us > machine.launch_us) {  // a launch is lost in it
        machine.memory_bytes_per_us = wide_bytes / (times.wide_us - machine.launch_us);
        keep("launch_us");
    } else {
        keep("memory_bytes_per_us");
        keep("launch_us");
    }

    // Of the two that go on side by side in a large product the bytes are the shorter.
    const double bytes_us = product_bytes(probes, probes.shape.hidden, probes.large_tokens) / machine.memory_bytes_per_us;
    const double busy_us = times.large_us - machine.launch_us - machine.reached.contention * bytes_us;
    const double flops = 2 * static_cast<double>(probes.large_tokens) * rank_rows(probes, probes.shape.hidden) *
                         static_cast<double>(probes.shape.latent);
    if (busy_us > bytes_us) {
        machine.flops_per_us = flops / busy_us;
    } else {
        keep("flops_per_us");
    }

    // A collective and its two hops are not told apart: their proportion stays.
    const double there_and_back = times.few_us - machine.launch_us;
    const double before = machine.collective_us + 2 * machine.hop_us;
    if (times.few_us > 0 && there_and_back > 0 && before > 0) {
        machine.collective_us *= there_and_back / before;
        machine.hop_us *= there_and_back / before;
    } else {
        keep("hop_us");
        keep("collective_us");
    }
    if (times.few_us > 0 && times.many_us > times.few_us) {
        const double ranks = probes.world;
        const double bytes = 2 * (ranks - 1) / ranks * static_cast<double>(probes.many_tokens - 1) *
                             static_cast<double>(probes.shape.latent) *
                             static_cast<double>(bytes_of(probes.shape.activations));
        machine.wire_bytes_per_us = bytes / (times.many_us - times.few_us);
    } else {
        keep("wire_bytes_per_us");
    }
    return kind;
}

MeasuredMachine measure_machine(const Arguments& arguments, const Problem& problem, const Bootstrap& bootstrap,
                                Progress& progress) {
    const bool on_cpu = find_backend(problem.options.backend).name == "cpu";
    const int layers = on_cpu ? layers_on_cpu : layers_on_gpu;
    MeasuredMachine measured{.kind = {},
                             .times = {},
                             .probes = {.shape = problem.shape,
                                        .world = problem.world,
                                        .narrow_hidden = narrow_hidden_of(problem.shape, problem.world),
                                        .large_tokens = on_cpu ? 256 : 4096,
                                        .many_tokens = on_cpu ? 256 : 1024}};
    const MachineProbes& probes = measured.probes;
    const int narrow_layers = static_cast<int>(layers * problem.shape.hidden / probes.narrow_hidden);  // as many bytes
    if (problem.shape.hidden % problem.world != 0) {
        throw Error(StatusCode::unsupported,
                    fmt::format("hidden {} is not divisible by {} ranks, so no rank owns a column slice",
                                problem.shape.hidden, problem.world));
    }
    const std::unique_ptr<Device> device = make_device(problem.options, bootstrap);
    progress.say("drawing weights");
    LayerWeights drawn;
    agreed(bootstrap, "drawing weights", [&] {
        WeightSource source(problem.shape, problem.shape.activations, arguments.seed);
        drawn =
            source.load(0, {0, std::max(problem.shape.hidden + rows_between_layers * problem.world * (layers - 1),
                                        probes.narrow_hidden + rows_between_layers * problem.world * (narrow_layers - 1)) /
                                   problem.world});
    });

    Capabilities capabilities;
    {
        progress.say("products of {} columns, all-reduces", problem.shape.hidden / problem.world);
        ProductBench bench(problem, problem.shape, bootstrap, *device, drawn, layers, probes.large_tokens, arguments.seed);
        capabilities = ContextAccess::capabilities(bench.context());
        std::vector<Turns> turns = {bench.products(1), bench.products(probes.large_tokens)};
        const bool has_links = problem.world > 1 && !capabilities.shares_device;
        if (has_links) {
            turns.push_back(bench.reductions(1));
            turns.push_back(bench.reductions(probes.many_tokens));
        }
        const std::vector<double> us = medians(arguments, bootstrap, *device, bench, turns);
        measured.times.wide_us = us[0];
        measured.times.large_us = us[1];
        if (has_links) {
            measured.times.few_us = us[2];
            measured.times.many_us = us[3];
        }
    }
    {
        progress.say("products of {} columns", probes.narrow_hidden / problem.world);
        Shape narrow = problem.shape;
        narrow.hidden = probes.narrow_hidden;
        ProductBench bench(problem, narrow, bootstrap, *device, drawn, narrow_layers, 1, arguments.seed);
        measured.times.narrow_us = medians(arguments, bootstrap, *device, bench, {bench.products(1)}).front();
    }

    measured.probes.weight_element_bytes = capabilities.weight_element_bytes;
    const MachineKind assumed{
        .name = "measured",
        .origin = fmt::format("measured by info --measure, {} ranks, hidden {}, latent {}, {}", problem.world,
                              problem.shape.hidden, problem.shape.latent, name(problem.shape.activations)),
        .machine = capabilities.machine,
        .linked_ranks = problem.world,
        .fused = capabilities.fused || (problem.world == 1 && !on_cpu)};
    measured.kind = machine_from(measured.times, measured.probes, assumed);
    return measured;
}

}  // namespace latent_moe::cli

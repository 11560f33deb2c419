// `inspect`: the latent-MoE layers of a weights file or a checkpoint.
#include <fmt/format.h>

#include "cli/command.h"
#include "cli/output.h"
#include "core/one_line.h"
#include "io/checkpoint.h"
#include "latent_moe/status.h"

namespace latent_moe::cli {
namespace {

void add_options(CLI::App& app, Arguments& arguments) {
    app.add_option("path", arguments.path, "safetensors file, model.safetensors.index.json, or the folder of either")
        ->required()
        ->type_name("PATH");
    add_output_options(app, arguments);
}

/// The preset with these widths and this norm; empty if there is none.
std::string preset_of(const io::CheckpointLayer& layer) {
    for (const std::string& model : shape_preset_names()) {
        const std::optional<Shape> shape = shape_preset(model);
        const bool has_norm = shape && shape->norm == Norm::rms;
        if (shape && shape->hidden == layer.hidden() && shape->latent == layer.latent() &&
            has_norm == layer.gamma.has_value())
            return model;
    }
    return {};
}

int execute(const Arguments& arguments, Ranks& ranks) {
    ranks.set_world(std::nullopt, 1);
    io::Checkpoint checkpoint = io::Checkpoint::open(arguments.path);
    if (checkpoint.layers().empty())
        throw Error(StatusCode::invalid_argument, fmt::format("{}: holds no latent-MoE layer", arguments.path));
    Output output(arguments, ranks.speaks());
    Table table({"layer", "<family", "<W_up", "<dtype", "<scale", "<norm", "<preset", "<file"});
    Json json = {{"schema", "latent-moe/inspect/1"}, {"path", arguments.path}, {"layers", Json::array()}};
    double bytes = 0;
    for (const io::LatentLayerNames& names : checkpoint.layers()) {
        const io::CheckpointLayer layer = checkpoint.layer(names.number);
        const std::string preset = preset_of(layer);
        const std::string scale = !layer.row_scales.empty() ? "one a row"
                                  : layer.scale != 1        ? fmt::format("{:g}", layer.scale)
                                                            : "-";
        const std::string norm = layer.gamma ? fmt::format("rms, {}", name(layer.gamma->dtype)) : "none";
        table.row({fmt::format("{}", layer.number), io::name(layer.family),
                   fmt::format("[{}, {}]", layer.hidden(), layer.latent()), name(layer.up_projection.dtype), scale, norm,
                   preset.empty() ? "-" : preset, one_line(layer.file.filename().string())});
        json["layers"].push_back({{"layer", layer.number},
                                  {"family", io::name(layer.family)},
                                  {"hidden", layer.hidden()},
                                  {"latent", layer.latent()},
                                  {"dtype", name(layer.up_projection.dtype)},
                                  {"tensor", layer.up_projection.name},
                                  {"norm", layer.gamma ? "rms" : "none"},
                                  {"norm_dtype", layer.gamma ? Json(name(layer.gamma->dtype)) : Json()},
                                  {"scale", layer.scale},
                                  {"row_scales", layer.row_scales.size()},
                                  {"bytes", layer.up_projection.bytes.size()},
                                  {"preset", preset.empty() ? Json() : Json(preset)},
                                  {"file", layer.file.string()}});
        bytes += static_cast<double>(layer.up_projection.bytes.size());
    }
    output.table(table);
    output.line("{} latent-MoE layer{}, {} of up-projections", checkpoint.layers().size(),
                checkpoint.layers().size() == 1 ? "" : "s", bytes_text(bytes));
    output.json(json);
    return done;
}

}  // namespace

Command inspect_command() {
    return {.name = "inspect",
            .summary = "Lists the latent-MoE layers of a weights file or a sharded checkpoint",
            .examples =
                "  latent-moe inspect checkpoint/\n"
                "  latent-moe inspect model-00001-of-00094.safetensors --json -",
            .add_options = &add_options,
            .execute = &execute};
}

}  // namespace latent_moe::cli

// `synthesize`: writes a checkpoint in a model's real layout, and inputs to go with it, for demonstrations and tests.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <span>
#include <vector>

#include "cli/command.h"
#include "cli/output.h"
#include "cli/problem.h"
#include "cli/tensors.h"
#include "core/partition.h"
#include "io/safetensors_writer.h"
#include "latent_moe/status.h"

namespace latent_moe::cli {
namespace {

constexpr std::int64_t rows_at_once = 64;

void add_options(CLI::App& app, Arguments& arguments) {
    add_shape_options(app, arguments);
    app.add_option("--out", arguments.out, "folder for the checkpoint; made if it is not there")->type_name("DIR");
    app.add_option("--layers", arguments.layers, "how many layers (3)")->check(CLI::Range(1, 10'000))->type_name("N");
    app.add_option("--first-layer", arguments.first_layer, "number of the first (1)")
        ->check(CLI::Range(0, 1'000'000))
        ->type_name("N");
    app.add_option("--shards", arguments.shards, "over how many files (1)")->check(CLI::Range(1, 10'000))->type_name("N");
    app.add_option("--inputs-out", arguments.inputs_out, "file for one call's inputs")->type_name("FILE");
    add_rank_options(app, arguments);
    add_tokens_option(app, arguments, "16; of the inputs");
    add_seed_option(app, arguments, "of all tensors (1)");
    app.add_option_function<std::string>(
           "--weight-dtype",
           [&arguments](const std::string& text) {
               for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32, Dtype::e4m3}) {
                   if (text == name(dtype)) arguments.weight_dtype = dtype;
               }
               if (!arguments.weight_dtype) {
                   throw Error(StatusCode::invalid_argument,
                               fmt::format("--weight-dtype is '{}', expected bf16, f16, f32 or e4m3", text));
               }
           },
           "of the weights: bf16, f16, f32 or e4m3 with a weight_scale (bf16)")
        ->type_name("NAME");
    app.add_flag("--no-prefix", arguments.no_prefix, "no prefix in the inputs");
    add_output_options(app, arguments);
}

/// The names of one layer's tensors in the model's own checkpoints.
struct LayerNames {
    std::string up_projection;
    std::string norm;
    std::string scale;
};

LayerNames names_of(const Shape& shape, std::int64_t layer) {
    if (shape.norm == Norm::rms) {
        const std::string stem = fmt::format("language_model.model.layers.{}.block_sparse_moe.routed_expert_", layer);
        return {stem + "up_proj.weight", stem + "norm.weight", stem + "up_proj.weight_scale"};
    }
    const std::string stem = fmt::format("backbone.layers.{}.mixer.fc2_latent_proj.weight", layer);
    return {stem, {}, stem + "_scale"};
}

struct Written {
    std::vector<std::string> tensors;
    std::int64_t bytes = 0;
};

/// Some layers in one file, a few rows at a time.
Written write_shard(const std::filesystem::path& path, const Shape& shape, Dtype dtype, std::uint64_t seed,
                    TokenRange layers) {
    std::vector<io::TensorDeclaration> declarations;
    for (std::int64_t layer = layers.first; layer < layers.first + layers.count; ++layer) {
        const LayerNames names = names_of(shape, layer);
        if (!names.norm.empty()) declarations.push_back({names.norm, Dtype::bf16, {shape.latent}});
        if (dtype == Dtype::e4m3) declarations.push_back({names.scale, Dtype::f32, {}});
        declarations.push_back({names.up_projection, dtype, {shape.hidden, shape.latent}});
    }
    Written written;
    for (const io::TensorDeclaration& tensor : declarations) {
        std::int64_t elements = 1;
        for (const std::int64_t size : tensor.shape) elements *= size;
        written.bytes += elements * static_cast<std::int64_t>(bytes_of(tensor.dtype));
        written.tensors.push_back(tensor.name);
    }

    io::SafetensorsWriter writer(path, declarations, {{"format", "pt"}});
    Tensor rows(std::min(rows_at_once, shape.hidden), shape.latent, dtype);
    for (std::int64_t layer = layers.first; layer < layers.first + layers.count; ++layer) {
        const LayerNames names = names_of(shape, layer);
        if (!names.norm.empty()) {
            Tensor gamma(1, shape.latent, Dtype::bf16);
            draw_gamma(gamma.view(), seed, layer);
            writer.append_rows(names.norm, gamma.view().data, 1);
        }
        if (dtype == Dtype::e4m3) {
            const float scale = draw_weights(rows.view().row_range(0, 0), seed, layer, 0);
            writer.append_rows(names.scale, &scale, 1);
        }
        for (std::int64_t first = 0; first < shape.hidden; first += rows_at_once) {
            const Matrix part = rows.view().row_range(0, std::min(rows_at_once, shape.hidden - first));
            draw_weights(part, seed, layer, first);
            writer.append_rows(names.up_projection, part.data, part.rows);
        }
    }
    writer.finish();
    return written;
}

/// The files of a checkpoint under way: without `keep` none of them stays, nor the folder if it was made for them.
class CheckpointFiles {
public:
    explicit CheckpointFiles(const std::filesystem::path& folder) : folder_(folder) {
        if (folder.empty()) throw Error(StatusCode::invalid_argument, "--out is '', expected a folder");
        std::error_code problem;
        made_folder_ = std::filesystem::create_directories(folder, problem);
        if (!std::filesystem::is_directory(folder, problem)) {
            throw Error(StatusCode::io, fmt::format("{}: cannot make the folder: {}", folder.string(),
                                                    problem ? problem.message() : "it is a file"));
        }
        const io::OutputFile writable(index_path());
    }
    ~CheckpointFiles() {
        std::error_code ignored;
        for (const std::filesystem::path& file : files_) std::filesystem::remove(file, ignored);
        if (made_folder_) std::filesystem::remove(folder_, ignored);
    }
    CheckpointFiles(const CheckpointFiles&) = delete;
    CheckpointFiles& operator=(const CheckpointFiles&) = delete;

    std::filesystem::path index_path() const { return folder_ / "model.safetensors.index.json"; }
    std::filesystem::path path_of(const std::string& file) const { return folder_ / file; }
    void add(const std::filesystem::path& file) { files_.push_back(file); }
    void keep() noexcept {
        files_.clear();
        made_folder_ = false;
    }

private:
    std::filesystem::path folder_;
    bool made_folder_ = false;
    std::vector<std::filesystem::path> files_;
};

void write_checkpoint(const Arguments& arguments, const Shape& shape, CheckpointFiles& checkpoint, Output& output,
                      Progress& progress) {
    const int layers = arguments.layers.value_or(3);
    const int shards = std::min(arguments.shards, layers);
    const Dtype dtype = arguments.weight_dtype.value_or(Dtype::bf16);
    Json index = {{"metadata", {{"total_size", 0}}}, {"weight_map", Json::object()}};
    std::int64_t bytes = 0;
    for (int shard = 0; shard < shards; ++shard) {
        const std::string file = fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, shards);
        progress.say("writing {}", file);
        TokenRange range = even_part(layers, shards, shard);
        range.first += arguments.first_layer;
        const Written written = write_shard(checkpoint.path_of(file), shape, dtype, arguments.seed, range);
        checkpoint.add(checkpoint.path_of(file));
        bytes += written.bytes;
        for (const std::string& tensor : written.tensors) index["weight_map"][tensor] = file;
        output.line("{}: layers {} to {}, {}", checkpoint.path_of(file).string(), range.first, range.first + range.count - 1,
                    bytes_text(static_cast<double>(written.bytes)));
    }
    index["metadata"]["total_size"] = bytes;
    const std::filesystem::path index_path = checkpoint.index_path();
    const std::string text = index.dump(2) + '\n';
    io::OutputFile index_file(index_path);
    index_file.write(std::as_bytes(std::span(text)));
    index_file.commit();
    checkpoint.keep();
    output.line("{}: {} tensors in {} files", index_path.string(), index["weight_map"].size(), shards);
}

int ranks_of_inputs(const Arguments& arguments) {
    return arguments.tp.value_or(2);
}

std::int64_t tokens_of_inputs(const Arguments& arguments) {
    const std::vector<std::int64_t> counts = arguments.tokens.value_or(std::vector<std::int64_t>{16});
    if (counts.size() != 1)
        throw Error(StatusCode::invalid_argument, "synthesize takes one number of --tokens for its inputs");
    return counts.front();
}

/// Refuses what `write_inputs` would, before anything is written.
void require_inputs(const Arguments& arguments, const Shape& shape) {
    const std::int64_t tokens = tokens_of_inputs(arguments);
    require_memory(static_cast<double>(tokens * (shape.latent + 2 * shape.hidden)) * ranks_of_inputs(arguments) * 4,
                   "drawing the inputs");
    require_file_of_its_own(arguments, "--inputs-out", *arguments.inputs_out);
    const io::OutputFile writable(*arguments.inputs_out);
}

void write_inputs(const Arguments& arguments, const Shape& shape, Output& output) {
    const int world = ranks_of_inputs(arguments);
    const std::int64_t tokens = tokens_of_inputs(arguments);
    const CallInputs inputs = draw_inputs(
        {.shape = shape, .world = world, .tokens = tokens, .prefix = !arguments.no_prefix, .seed = arguments.seed},
        std::vector<bool>(static_cast<std::size_t>(world), true));
    std::vector<io::TensorToWrite> tensors;
    const auto add = [&](const std::string& tensor, const ConstMatrix& matrix) {
        tensors.push_back(
            {.name = tensor, .dtype = matrix.dtype, .shape = {matrix.rows, matrix.columns}, .data = matrix.data});
    };
    for (int rank = 0; rank < world; ++rank) {
        add(fmt::format("routed.{}", rank), inputs.routed[static_cast<std::size_t>(rank)].view());
        add(fmt::format("shared.{}", rank), inputs.shared[static_cast<std::size_t>(rank)].view());
    }
    if (!arguments.no_prefix) add("prefix", inputs.prefix.view());
    io::write_safetensors(*arguments.inputs_out, tensors);
    output.line("{}: the inputs of {} ranks, {} tokens, {}", *arguments.inputs_out, world, tokens, name(shape.activations));
}

int execute(const Arguments& arguments, Ranks& ranks) {
    if (!arguments.out && !arguments.inputs_out) {
        throw Error(StatusCode::invalid_argument, "nothing to write: give --out DIR, --inputs-out FILE or both");
    }
    const Shape shape = make_problem(arguments, ranks, {16}).shape;
    if (!ranks.speaks()) return done;
    Output output(arguments, true);
    Progress progress(arguments, true);
    std::optional<CheckpointFiles> checkpoint;
    if (arguments.out) checkpoint.emplace(*arguments.out);
    if (arguments.inputs_out) require_inputs(arguments, shape);
    if (checkpoint) write_checkpoint(arguments, shape, *checkpoint, output, progress);
    if (arguments.inputs_out) write_inputs(arguments, shape, output);
    return done;
}

}  // namespace

Command synthesize_command() {
    return {.name = "synthesize",
            .summary = "Writes a checkpoint of drawn weights in a model's real layout, and inputs to go with it",
            .examples =
                "  latent-moe synthesize --model kimi-k3 --layers 3 --first-layer 1 --shards 2 --out checkpoint/\n"
                "  latent-moe synthesize --model nemotron-3-super --weight-dtype e4m3 --out checkpoint/\n"
                "  latent-moe synthesize --model kimi-k3 --inputs-out inputs.safetensors --tp 4 --tokens 16",
            .add_options = &add_options,
            .execute = &execute};
}

}  // namespace latent_moe::cli

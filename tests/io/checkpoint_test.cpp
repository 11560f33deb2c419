#include "io/checkpoint.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "files.h"
#include "io/checkpoint_index.h"
#include "io/safetensors_writer.h"

namespace latent_moe::io {
namespace {

constexpr std::int64_t hidden = 6;
constexpr std::int64_t latent = 4;
const std::vector<std::byte> zeros(1024);

std::string kimi(int layer, const std::string& last) {
    return "language_model.model.layers." + std::to_string(layer) + ".block_sparse_moe.routed_expert_" + last + ".weight";
}

std::string nemotron(int layer, const std::string& last = "weight") {
    return "backbone.layers." + std::to_string(layer) + ".mixer.fc2_latent_proj." + last;
}

TensorToWrite matrix(const std::string& name, Dtype dtype = Dtype::bf16,
                     std::vector<std::int64_t> shape = {hidden, latent}) {
    return {name, dtype, std::move(shape), zeros.data()};
}

TensorToWrite vector(const std::string& name, std::int64_t size = latent) {
    return matrix(name, Dtype::bf16, {size});
}

std::vector<std::int64_t> numbers(const Checkpoint& checkpoint) {
    std::vector<std::int64_t> numbers;
    for (const LatentLayerNames& layer : checkpoint.layers()) numbers.push_back(layer.number);
    return numbers;
}

class CheckpointTest : public testing::Test {
protected:
    TemporaryFolder folder;
    std::filesystem::path file = folder / "model.safetensors";
    std::filesystem::path index = folder / "model.safetensors.index.json";

    void write(const std::vector<TensorToWrite>& tensors) const { write_safetensors(file, tensors); }
    void write(const std::string& shard, const std::vector<TensorToWrite>& tensors) const {
        write_safetensors(folder / shard, tensors);
    }
    void refuses_layer(std::int64_t number, const std::vector<std::string>& parts) const {
        auto checkpoint = Checkpoint::open(folder.path());
        expect_refusal([&] { checkpoint.layer(number); }, StatusCode::io, parts);
    }
    void refuses_to_open(const std::vector<std::string>& parts) const {
        expect_refusal([&] { Checkpoint::open(folder.path()); }, StatusCode::io, parts);
    }
};

TEST_F(CheckpointTest, ReadsAKimiLayer) {
    write({matrix(kimi(3, "up_proj")), vector(kimi(3, "norm")),
           vector("language_model.model.layers.3.input_layernorm.weight")});
    auto checkpoint = Checkpoint::open(file);
    EXPECT_EQ(numbers(checkpoint), std::vector<std::int64_t>{3});
    const CheckpointLayer layer = checkpoint.layer(3);
    EXPECT_EQ(layer.number, 3);
    EXPECT_EQ(layer.family, ModelFamily::kimi_k3);
    EXPECT_EQ(layer.file, file);
    EXPECT_EQ(layer.hidden(), hidden);
    EXPECT_EQ(layer.latent(), latent);
    EXPECT_EQ(layer.up_projection.name, kimi(3, "up_proj"));
    EXPECT_EQ(layer.up_projection.dtype, Dtype::bf16);
    EXPECT_EQ(layer.up_projection.bytes.size(), 48U);
    ASSERT_TRUE(layer.gamma);
    EXPECT_EQ(layer.gamma->columns, latent);
    EXPECT_EQ(layer.scale, 1.0F);
    EXPECT_TRUE(layer.row_scales.empty());
}

TEST_F(CheckpointTest, ReadsANemotronLayerWithoutScale) {
    write({matrix(nemotron(1), Dtype::e4m3)});
    const CheckpointLayer layer = Checkpoint::open(file).layer(1);
    EXPECT_EQ(layer.family, ModelFamily::nemotron_3);
    EXPECT_FALSE(layer.gamma);
    EXPECT_EQ(layer.scale, 1.0F);
}

TEST_F(CheckpointTest, ReadsScalarScales) {
    const float float_scale = 0.25F;
    const std::uint16_t bf16_scale = 0x3F00;  // 0.5
    const std::uint16_t f16_scale = 0xC200;   // -3
    write({matrix(nemotron(1), Dtype::e4m3),
           {nemotron(1, "weight_scale"), Dtype::f32, {}, &float_scale},
           matrix(nemotron(2), Dtype::e4m3),
           {nemotron(2, "weight_scale"), Dtype::bf16, {1}, &bf16_scale},
           matrix(nemotron(3), Dtype::e4m3),
           {nemotron(3, "weight_scale"), Dtype::f16, {1}, &f16_scale}});
    auto checkpoint = Checkpoint::open(file);
    EXPECT_EQ(checkpoint.layer(1).scale, 0.25F);
    EXPECT_EQ(checkpoint.layer(2).scale, 0.5F);
    EXPECT_EQ(checkpoint.layer(3).scale, -3.0F);
}

TEST_F(CheckpointTest, ReadsRowScalesInBothShapes) {
    const std::vector<float> scales = {1, 2, 3, 4, 5, 6};
    write({matrix(nemotron(1), Dtype::e4m3),
           {nemotron(1, "weight_scale"), Dtype::f32, {hidden}, scales.data()},
           matrix(nemotron(2), Dtype::e4m3),
           {nemotron(2, "weight_scale"), Dtype::f32, {hidden, 1}, scales.data()}});
    auto checkpoint = Checkpoint::open(file);
    EXPECT_EQ(checkpoint.layer(1).row_scales, scales);
    EXPECT_EQ(checkpoint.layer(2).row_scales, scales);
    EXPECT_EQ(checkpoint.layer(2).scale, 1.0F);
}

TEST_F(CheckpointTest, RefusesScalesThatDoNotFit) {
    write({matrix(nemotron(1), Dtype::e4m3), vector(nemotron(1, "weight_scale"), 5)});
    refuses_layer(1, {file.string(), nemotron(1, "weight_scale"), "[5]", "[6]"});
    write({matrix(nemotron(1)), vector(nemotron(1, "weight_scale"), 1)});
    refuses_layer(1, {nemotron(1, "weight_scale"), "not F8_E4M3"});
    write({matrix(nemotron(1), Dtype::e4m3), matrix(nemotron(1, "weight_scale"), Dtype::e4m3, {})});
    refuses_layer(1, {nemotron(1, "weight_scale"), "F8_E4M3"});
    const float infinite = std::numeric_limits<float>::infinity();
    write({matrix(nemotron(1), Dtype::e4m3), {nemotron(1, "weight_scale"), Dtype::f32, {}, &infinite}});
    refuses_layer(1, {nemotron(1, "weight_scale"), "not finite"});
}

TEST_F(CheckpointTest, AcceptsNamesOfTextOnlyAndMultimodalExports) {
    write({matrix("model.layers.1.block_sparse_moe.routed_expert_up_proj.weight"),
           vector("model.layers.1.block_sparse_moe.routed_expert_norm.weight"), matrix("language_model." + nemotron(2))});
    auto checkpoint = Checkpoint::open(file);
    EXPECT_EQ(checkpoint.layer(1).family, ModelFamily::kimi_k3);
    EXPECT_EQ(checkpoint.layer(2).family, ModelFamily::nemotron_3);
}

TEST_F(CheckpointTest, SortsLayersByNumberNotByName) {
    std::vector<TensorToWrite> tensors;
    for (const int layer : {10, 9, 100, 2}) tensors.push_back(matrix(nemotron(layer)));
    write(tensors);
    EXPECT_EQ(numbers(Checkpoint::open(file)), (std::vector<std::int64_t>{2, 9, 10, 100}));
}

TEST_F(CheckpointTest, LeavesOtherTensorsAlone) {
    for (const char* other :
         {"mtp.layers.0.mixer.fc2_latent_proj.weight", "backbone.layers.01.mixer.fc2_latent_proj.weight",
          "backbone.layers..mixer.fc2_latent_proj.weight", "backbone.layers.-1.mixer.fc2_latent_proj.weight",
          "backbone.layers.99999999999999999999.mixer.fc2_latent_proj.weight",
          "backbone.layers.1.mixer.fc2_latent_proj.weight.x", "backbone.layers.1.mixer.fc1_latent_proj.weight",
          "backbone.layers.1.mixer.", "backbone.layers.1", "x.backbone.layers.1.mixer.fc2_latent_proj.weight",
          "language_model.model.layers.1.block_sparse_moe.routed_expert_down_proj.weight", ""}) {
        EXPECT_FALSE(recognise_latent_tensor(other)) << other;
    }
}

TEST_F(CheckpointTest, OpensACheckpointWithoutLatentLayers) {
    write({vector("x")});
    auto checkpoint = Checkpoint::open(file);
    EXPECT_TRUE(checkpoint.layers().empty());
    expect_refusal([&] { checkpoint.layer(0); }, StatusCode::invalid_argument, {"layer 0", "no latent-MoE layers"});
}

TEST_F(CheckpointTest, NamesTheLayersPresentWhenAskedForAnother) {
    std::vector<TensorToWrite> tensors;
    for (const int layer : {1, 2, 3, 5, 8, 9}) tensors.push_back(matrix(nemotron(layer)));
    write(tensors);
    auto checkpoint = Checkpoint::open(file);
    expect_refusal([&] { checkpoint.layer(4); }, StatusCode::invalid_argument, {file.string(), "layer 4", "1-3, 5, 8-9"});
    expect_refusal([&] { checkpoint.layer(-1); }, StatusCode::invalid_argument, {"layer -1"});
}

TEST_F(CheckpointTest, RefusesAKimiLayerWithoutItsNorm) {
    write({matrix(kimi(1, "up_proj"))});
    refuses_layer(1, {file.parent_path().string(), "layer 1", "lacks", kimi(1, "norm")});
}

TEST_F(CheckpointTest, RefusesALayerWithoutItsUpProjection) {
    write({vector(kimi(1, "norm")), vector(nemotron(2, "weight_scale"), 1)});
    refuses_layer(1, {"layer 1", "lacks", kimi(1, "up_proj")});
    refuses_layer(2, {"layer 2", "lacks", nemotron(2)});
}

TEST_F(CheckpointTest, RefusesShapesThatDoNotFit) {
    write({matrix(nemotron(1), Dtype::bf16, {24}), matrix(nemotron(2), Dtype::bf16, {2, 3, 4}),
           matrix(nemotron(3), Dtype::bf16, {0, 4}), matrix(kimi(4, "up_proj")), vector(kimi(4, "norm"), 3),
           matrix(kimi(5, "up_proj")), matrix(kimi(5, "norm"), Dtype::bf16, {1, latent})});
    refuses_layer(1, {file.string(), nemotron(1), "[24]", "[hidden, latent]"});
    refuses_layer(2, {nemotron(2), "[2, 3, 4]"});
    refuses_layer(3, {nemotron(3), "[0, 4]"});
    refuses_layer(4, {kimi(4, "norm"), "[3]", "expected [4]"});
    refuses_layer(5, {kimi(5, "norm"), "[1, 4]", "expected [4]"});
}

TEST_F(CheckpointTest, RefusesElementTypesThatDoNotFit) {
    write({matrix(kimi(1, "up_proj")), matrix(kimi(1, "norm"), Dtype::e4m3, {latent})});
    refuses_layer(1, {kimi(1, "norm"), "F8_E4M3"});
    write_text(file, safetensors_text("{\"" + nemotron(2) + R"(":{"dtype":"U8","shape":[1,1],"data_offsets":[0,1]}})", "x"));
    expect_refusal([&] { Checkpoint::open(file).layer(2); }, StatusCode::invalid_argument, {nemotron(2), "U8"});
}

TEST_F(CheckpointTest, RefusesTwoTensorsForOneLayer) {
    write({matrix(kimi(1, "up_proj")), vector(kimi(1, "norm")), matrix(nemotron(1))});
    refuses_to_open({"second layer 1", kimi(1, "norm"), nemotron(1)});
    write({matrix(nemotron(1)), matrix("language_model." + nemotron(1))});
    refuses_to_open({"second layer 1", nemotron(1)});
}

TEST_F(CheckpointTest, ReadsAFolderOfFilesWithoutIndex) {
    write("a.safetensors", {matrix(kimi(1, "up_proj"))});
    write("b.safetensors", {vector(kimi(1, "norm")), matrix(kimi(2, "up_proj")), vector(kimi(2, "norm"))});
    write_text(folder / "config.json", "{}");
    auto checkpoint = Checkpoint::open(folder.path());
    EXPECT_EQ(numbers(checkpoint), (std::vector<std::int64_t>{1, 2}));
    EXPECT_EQ(checkpoint.layer(1).file, folder / "a.safetensors");
    EXPECT_TRUE(checkpoint.layer(1).gamma);
}

TEST_F(CheckpointTest, RefusesATensorInTwoFiles) {
    write("a.safetensors", {matrix(nemotron(1))});
    write("b.safetensors", {matrix(nemotron(1))});
    refuses_to_open({"b.safetensors", nemotron(1), "also in", "a.safetensors"});
}

TEST_F(CheckpointTest, PrefersTheIndexThenTheSingleFile) {
    write("other.safetensors", {matrix(nemotron(7))});
    write({matrix(nemotron(1))});
    EXPECT_EQ(numbers(Checkpoint::open(folder.path())), std::vector<std::int64_t>{1});
    write_text(index, R"({"weight_map":{")" + nemotron(7) + R"(":"other.safetensors"}})");
    EXPECT_EQ(numbers(Checkpoint::open(folder.path())), std::vector<std::int64_t>{7});
}

TEST_F(CheckpointTest, RefusesAFolderWithoutWeights) {
    refuses_to_open({folder.path().string(), "safetensors"});
}

TEST_F(CheckpointTest, RefusesAMissingPath) {
    expect_refusal([&] { Checkpoint::open(folder / "none"); }, StatusCode::io, {"none", "cannot open"});
    expect_refusal([&] { Checkpoint::open(folder / "none.json"); }, StatusCode::io, {"none.json", "cannot open"});
}

TEST_F(CheckpointTest, OpensOnlyTheShardsThatALayerNeeds) {
    write("one.safetensors", {matrix(nemotron(1))});
    write_text(folder / "two.safetensors", "broken");
    write_text(index, R"({"metadata":{"total_size":1},"weight_map":{")" + nemotron(1) + R"(":"one.safetensors",")" +
                          nemotron(2) + R"(":"two.safetensors",")" + nemotron(3) + R"(":"three.safetensors"}})");
    auto checkpoint = Checkpoint::open(index);
    EXPECT_EQ(numbers(checkpoint), (std::vector<std::int64_t>{1, 2, 3}));
    EXPECT_EQ(checkpoint.layer(1).latent(), latent);
    expect_refusal([&] { checkpoint.layer(2); }, StatusCode::io, {"two.safetensors", "6 bytes"});
    expect_refusal([&] { checkpoint.layer(3); }, StatusCode::io, {"three.safetensors", "missing", nemotron(3)});
}

TEST_F(CheckpointTest, RefusesATensorThatTheShardLacks) {
    write("one.safetensors", {vector("x")});
    write_text(index, R"({"weight_map":{")" + nemotron(1) + R"(":"one.safetensors"}})");
    refuses_layer(1, {"one.safetensors", nemotron(1), "index says"});
}

TEST_F(CheckpointTest, FollowsLinksAndSubfoldersOfTheCheckpoint) {
    const TemporaryFolder elsewhere;
    write_safetensors(elsewhere / "blob", std::vector<TensorToWrite>{matrix(nemotron(1))});
    std::filesystem::create_directory(folder / "part");
    std::filesystem::create_symlink(elsewhere / "blob", folder / "part" / "one.safetensors");
    write_text(index, R"({"weight_map":{")" + nemotron(1) + R"(":"part/one.safetensors"}})");
    EXPECT_EQ(Checkpoint::open(index).layer(1).hidden(), hidden);
}

TEST_F(CheckpointTest, KeepsItsLayersWhenMoved) {
    const std::vector<std::uint16_t> values(24, 0x3F80);
    write({{nemotron(1), Dtype::bf16, {hidden, latent}, values.data()}});
    auto checkpoint = Checkpoint::open(file);
    const CheckpointLayer layer = checkpoint.layer(1);
    const Checkpoint moved = std::move(checkpoint);
    EXPECT_EQ(std::memcmp(layer.up_projection.bytes.data(), values.data(), 48), 0);
}

void refuses_index(const std::string& text, std::vector<std::string> parts) {
    parts.emplace_back("index.json: ");
    expect_refusal([&] { parse_checkpoint_index(text, "index.json"); }, StatusCode::io, parts);
}

TEST(CheckpointIndex, MapsTensorsToFiles) {
    const auto files = parse_checkpoint_index(R"({"metadata":{"a":[1]},"weight_map":{"b":"2.safetensors","a":"d/1"}})", "i");
    EXPECT_EQ(files, (std::map<std::string, std::string>{{"a", "d/1"}, {"b", "2.safetensors"}}));
}

TEST(CheckpointIndex, RefusesAnythingButAnIndex) {
    refuses_index("", {"not valid JSON"});
    refuses_index("[]", {"array", "expected an object"});
    refuses_index("{", {"not valid JSON"});
    refuses_index("{}", {"no weight_map"});
    refuses_index(R"({"weight_map":[]})", {"weight_map", "array"});
    refuses_index(R"({"weight_map":{"a":1}})", {"\"a\"", "number", "expected a string"});
    refuses_index(R"({"weight_map":{"a":"x","a":"y"}})", {"\"a\"", "twice"});
    refuses_index(R"({"weight_map":{"a":"x"},"weight_map":{}})", {"\"weight_map\"", "twice"});
    refuses_index("{\"x\":" + std::string(100'000, '['), {"deeper than 32"});
    refuses_index(R"({"weight_map":{"a\u0000":"x"}})", {"NUL"});
}

TEST(CheckpointIndex, RefusesFilesOutsideItsFolder) {
    for (const char* file : {"/etc/passwd", "../x", "a/../../x", "a/..", "..", "", "a/", "x\\u0000y"}) {
        refuses_index(std::string(R"({"weight_map":{"t":")") + file + "\"}}", {"\"t\"", "not inside"});
    }
}

}  // namespace
}  // namespace latent_moe::io

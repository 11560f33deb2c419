#include "io/tensor_file.h"

#include <gtest/gtest.h>

#include "files.h"
#include "io/safetensors_writer.h"

namespace latent_moe::io {
namespace {

const std::vector<std::byte> zeros(1024);

TensorToWrite tensor(const std::string& name, std::int64_t tokens, std::int64_t columns, Dtype dtype = Dtype::bf16) {
    return {name, dtype, {tokens, columns}, zeros.data()};
}

class TensorFileTest : public testing::Test {
protected:
    TemporaryFolder folder;
    std::filesystem::path path = folder / "inputs.safetensors";

    TensorFile open(const std::vector<TensorToWrite>& tensors) const {
        write_safetensors(path, tensors);
        return TensorFile::open(path);
    }
    void refuses(const std::vector<TensorToWrite>& tensors, std::vector<std::string> parts) const {
        parts.push_back(path.string());
        expect_refusal([&] { open(tensors); }, StatusCode::io, parts);
    }
};

TEST_F(TensorFileTest, TellsWorldTokensWidthsAndDtype) {
    const TensorFile inputs = open({tensor("routed.0", 3, 4), tensor("routed.1", 3, 4), tensor("shared.0", 3, 8),
                                    tensor("shared.1", 3, 8), tensor("prefix", 3, 8)});
    EXPECT_EQ(inputs.world(), 2);
    EXPECT_EQ(inputs.tokens(), 3);
    EXPECT_EQ(inputs.latent(), 4);
    EXPECT_EQ(inputs.hidden(), 8);
    EXPECT_EQ(inputs.dtype(), Dtype::bf16);
    EXPECT_EQ(inputs.routed()[1].name, "routed.1");
    EXPECT_EQ(inputs.shared()[1].bytes.size(), 48U);
    EXPECT_TRUE(inputs.prefix());
}

TEST_F(TensorFileTest, OrdersRanksByNumber) {
    std::vector<TensorToWrite> tensors;
    for (int rank = 0; rank < 16; ++rank) tensors.push_back(tensor("routed." + std::to_string(rank), 1, 8, Dtype::f16));
    const TensorFile inputs = open(tensors);
    EXPECT_EQ(inputs.world(), 16);
    EXPECT_EQ(inputs.routed()[10].name, "routed.10");
}

TEST_F(TensorFileTest, AllowsNoSharedExpert) {
    const TensorFile inputs = open({tensor("routed.0", 3, 4, Dtype::f32)});
    EXPECT_TRUE(inputs.shared().empty());
    EXPECT_FALSE(inputs.prefix());
    EXPECT_EQ(inputs.hidden(), std::nullopt);
    EXPECT_EQ(open({tensor("routed.0", 3, 4), tensor("prefix", 3, 8)}).hidden(), 8);
}

TEST_F(TensorFileTest, AllowsNoTokens) {
    const TensorFile inputs = open({tensor("routed.0", 0, 4), tensor("shared.0", 0, 8)});
    EXPECT_EQ(inputs.tokens(), 0);
    EXPECT_EQ(inputs.latent(), 4);
    EXPECT_EQ(inputs.hidden(), 8);
}

TEST_F(TensorFileTest, RefusesGaps) {
    refuses({tensor("routed.0", 3, 4), tensor("routed.2", 3, 4)}, {"\"routed.2\"", "expected routed.1"});
    refuses({tensor("routed.1", 3, 4)}, {"\"routed.1\"", "expected routed.0"});
    refuses({tensor("routed.0", 3, 4), tensor("shared.1", 3, 4)}, {"\"shared.1\"", "expected shared.0"});
}

TEST_F(TensorFileTest, RefusesAFileWithoutRoutedPartials) {
    refuses({}, {"routed.0"});
    refuses({tensor("shared.0", 3, 8)}, {"routed.0"});
}

TEST_F(TensorFileTest, RefusesSharedPartialsOfSomeRanksOnly) {
    refuses({tensor("routed.0", 3, 4), tensor("routed.1", 3, 4), tensor("shared.0", 3, 8)},
            {"shared.R for 1", "expected 2"});
    refuses({tensor("routed.0", 3, 4), tensor("shared.0", 3, 8), tensor("shared.1", 3, 8)},
            {"shared.R for 2", "expected 1"});
}

TEST_F(TensorFileTest, RefusesTensorsThatDisagree) {
    const auto routed = tensor("routed.0", 3, 4);
    const auto shared = tensor("shared.0", 3, 8);
    refuses({routed, tensor("routed.1", 2, 4)}, {"\"routed.1\"", "2 tokens", "expected 3"});
    refuses({routed, tensor("routed.1", 3, 5)}, {"\"routed.1\"", "5 columns", "expected 4"});
    refuses({routed, tensor("routed.1", 3, 4, Dtype::f16)}, {"\"routed.1\"", "F16", "expected BF16"});
    refuses({routed, tensor("shared.0", 2, 8)}, {"\"shared.0\"", "2 tokens"});
    refuses({routed, tensor("shared.0", 3, 8, Dtype::f32)}, {"\"shared.0\"", "F32"});
    refuses({routed, tensor("routed.1", 3, 4), shared, tensor("shared.1", 3, 9)},
            {"\"shared.1\"", "9 columns", "expected 8"});
    refuses({routed, shared, tensor("prefix", 4, 8)}, {"\"prefix\"", "4 tokens"});
    refuses({routed, shared, tensor("prefix", 3, 9)}, {"\"prefix\"", "9 columns"});
    refuses({routed, tensor("prefix", 3, 9, Dtype::f32)}, {"\"prefix\"", "F32"});
}

TEST_F(TensorFileTest, RefusesOtherShapes) {
    refuses({{"routed.0", Dtype::bf16, {12}, zeros.data()}}, {"\"routed.0\"", "[12]", "[tokens, columns]"});
    refuses({{"routed.0", Dtype::bf16, {}, zeros.data()}}, {"\"routed.0\"", "[]"});
    refuses({{"routed.0", Dtype::bf16, {3, 0}, nullptr}}, {"\"routed.0\"", "[3, 0]"});
    refuses({{"routed.0", Dtype::bf16, {1, 2, 3}, zeros.data()}}, {"\"routed.0\"", "[1, 2, 3]"});
}

TEST_F(TensorFileTest, RefusesOtherElementTypes) {
    refuses({tensor("routed.0", 3, 4, Dtype::e4m3)}, {"\"routed.0\"", "F8_E4M3", "expected BF16"});
    write_text(path, safetensors_text(R"({"routed.0":{"dtype":"I8","shape":[1,1],"data_offsets":[0,1]}})", "x"));
    expect_refusal([&] { TensorFile::open(path); }, StatusCode::io, {"\"routed.0\"", "I8"});
}

TEST_F(TensorFileTest, RefusesNamesThatMeanNothing) {
    for (const char* name : {"out", "routed", "routed.", "routed.x", "routed.-1", "Prefix", "prefix.0", "shared"}) {
        refuses({tensor("routed.0", 3, 4), tensor(name, 3, 4)}, {std::string("\"") + name + "\"", "unexpected"});
    }
    refuses({tensor("routed.0", 3, 4), tensor("routed.00", 3, 4)}, {"\"routed.00\""});
}

TEST_F(TensorFileTest, RefusesAMissingFile) {
    expect_refusal([&] { TensorFile::open(folder / "none"); }, StatusCode::io, {"none", "cannot open"});
}

}  // namespace
}  // namespace latent_moe::io

#include "io/safetensors_writer.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <numeric>

#include "files.h"

namespace latent_moe::io {
namespace {

std::vector<float> counted(std::size_t size) {
    std::vector<float> values(size);
    std::iota(values.begin(), values.end(), 1.0F);
    return values;
}

std::vector<float> floats_of(const TensorView& tensor) {
    std::vector<float> values(tensor.bytes.size() / sizeof(float));
    if (!values.empty()) std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
    return values;
}

class SafetensorsWriting : public testing::Test {
protected:
    TemporaryFolder folder;
    std::filesystem::path path = folder / "out.safetensors";

    void write(const std::vector<TensorToWrite>& tensors) const { write_safetensors(path, tensors); }

    void refuses(const TensorToWrite& tensor, const std::vector<std::string>& parts) const {
        expect_refusal([&] { write({tensor}); }, StatusCode::invalid_argument, parts);
        EXPECT_TRUE(folder.names().empty());
    }
};

TEST_F(SafetensorsWriting, ComesBackAsItWasWritten) {
    const auto values = counted(6);
    write_safetensors(path, std::vector<TensorToWrite>{{"a", Dtype::f32, {2, 3}, values.data()}}, {{"format", "pt"}});
    const auto file = SafetensorsFile::open(path);
    EXPECT_EQ(file.tensor("a").shape, (std::vector<std::int64_t>{2, 3}));
    EXPECT_EQ(file.tensor("a").dtype, Dtype::f32);
    EXPECT_EQ(floats_of(file.tensor("a")), values);
    EXPECT_EQ(file.metadata(), (Metadata{{"format", "pt"}}));
    EXPECT_EQ(folder.names(), std::vector<std::string>{"out.safetensors"});
}

TEST_F(SafetensorsWriting, FollowsRowStrides) {
    const auto values = counted(12);
    write({{"a", Dtype::f32, {3, 2}, values.data(), 4}});
    EXPECT_EQ(floats_of(SafetensorsFile::open(path).tensor("a")), (std::vector<float>{1, 2, 5, 6, 9, 10}));
}

TEST_F(SafetensorsWriting, WritesEveryElementTypeAligned) {
    const auto values = counted(4);
    write({{"byte", Dtype::e4m3, {3}, values.data()},
           {"half", Dtype::f16, {3}, values.data()},
           {"brain", Dtype::bf16, {1, 1}, values.data()},
           {"float", Dtype::f32, {1}, values.data()}});
    const auto file = SafetensorsFile::open(path);
    for (const TensorView& tensor : file.tensors()) {
        const auto address = reinterpret_cast<std::uintptr_t>(tensor.bytes.data());
        EXPECT_EQ(address % bytes_of(*tensor.dtype), 0U) << tensor.name;
    }
    EXPECT_EQ(file.tensor("byte").dtype, Dtype::e4m3);
    EXPECT_EQ(file.tensor("half").dtype, Dtype::f16);
    EXPECT_EQ(file.tensor("brain").dtype, Dtype::bf16);
}

TEST_F(SafetensorsWriting, BeginsItsDataAtAMultipleOfEightBytes) {
    const float one = 1.0F;
    for (std::size_t length = 1; length < 12; ++length) {
        write({{std::string(length, 'n'), Dtype::f32, {}, &one}});
        EXPECT_EQ((std::filesystem::file_size(path) - sizeof(one)) % 8, 0U);
    }
}

TEST_F(SafetensorsWriting, WritesScalarsAndTensorsWithoutElements) {
    const float one = 1.0F;
    write({{"scalar", Dtype::f32, {}, &one},
           {"none", Dtype::f32, {0, 64}, nullptr},
           {"thin", Dtype::f32, {5, 0}, nullptr},
           {"nil", Dtype::bf16, {0}, nullptr}});
    const auto file = SafetensorsFile::open(path);
    EXPECT_EQ(floats_of(file.tensor("scalar")), std::vector<float>{1.0F});
    EXPECT_EQ(file.tensor("none").shape, (std::vector<std::int64_t>{0, 64}));
    EXPECT_TRUE(file.tensor("thin").bytes.empty());
}

TEST_F(SafetensorsWriting, WritesAFileWithoutTensors) {
    write({});
    EXPECT_TRUE(SafetensorsFile::open(path).tensors().empty());
}

TEST_F(SafetensorsWriting, KeepsNamesWithQuotesAndUmlauts) {
    const float one = 1.0F;
    const std::string name = "a\"\\\n\xC3\xA4";
    write({{name, Dtype::f32, {}, &one}});
    EXPECT_NE(SafetensorsFile::open(path).find(name), nullptr);
}

TEST_F(SafetensorsWriting, ReplacesAnEarlierFile) {
    write_text(path, "old");
    const float one = 1.0F;
    write({{"a", Dtype::f32, {}, &one}});
    EXPECT_NE(SafetensorsFile::open(path).find("a"), nullptr);
}

TEST_F(SafetensorsWriting, WritesThroughASymbolicLink) {
    write_text(folder / "real", "old");
    std::filesystem::create_symlink(folder / "real", path);
    write({});
    EXPECT_TRUE(std::filesystem::is_symlink(path));
    EXPECT_TRUE(SafetensorsFile::open(folder / "real").tensors().empty());
}

TEST_F(SafetensorsWriting, WritesALargeTensorWithAStride) {
    const auto values = counted(3 * 700'000);
    write({{"a", Dtype::f32, {3, 600'000}, values.data(), 700'000}, {"b", Dtype::f32, {2, 3}, values.data()}});
    const auto file = SafetensorsFile::open(path);
    const auto a = floats_of(file.tensor("a"));
    EXPECT_EQ(a[599'999], 600'000.0F);
    EXPECT_EQ(a[600'000], 700'001.0F);
    EXPECT_EQ(floats_of(file.tensor("b")), counted(6));
}

TEST_F(SafetensorsWriting, RefusesWrongDeclarations) {
    const float one = 1.0F;
    refuses({"a", Dtype::f32, {-1}, &one}, {"\"a\"", "-1"});
    refuses({"a", Dtype::f32, {std::int64_t{1} << 40, std::int64_t{1} << 40}, &one}, {"\"a\"", "overflows"});
    refuses({"a", Dtype::f32, {2}, nullptr}, {"\"a\"", "null"});
    refuses({"a", Dtype::f32, {2, 3}, &one, 2}, {"\"a\"", "stride of 2", "3"});
    refuses({"__metadata__", Dtype::f32, {}, &one}, {"__metadata__"});
    refuses({"\xFF", Dtype::f32, {}, &one}, {"UTF-8"});
    refuses({std::string("a\0b", 3), Dtype::f32, {}, &one}, {"NUL"});
}

TEST_F(SafetensorsWriting, RefusesMetadataThatIsNotUtf8) {
    expect_refusal(
        [&] {
            write_safetensors(path, {}, {{"k", "\xFF"}});
        },
        StatusCode::invalid_argument, {"metadata", "UTF-8"});
    EXPECT_TRUE(folder.names().empty());
}

TEST_F(SafetensorsWriting, RefusesANameTwice) {
    const float one = 1.0F;
    expect_refusal(
        [&] {
            write({{"a", Dtype::f32, {}, &one}, {"a", Dtype::f32, {}, &one}});
        },
        StatusCode::invalid_argument, {"\"a\"", "twice"});
}

TEST_F(SafetensorsWriting, RefusesMoreBytesThan64BitsCount) {
    const std::int64_t half = std::int64_t{1} << 62;
    const std::vector<TensorDeclaration> both = {{"a", Dtype::bf16, {half}}, {"b", Dtype::bf16, {half}}};
    expect_refusal([&] { SafetensorsWriter(path, both); }, StatusCode::invalid_argument, {"\"b\"", "64 bits"});
}

TEST_F(SafetensorsWriting, RefusesAMissingFolder) {
    expect_refusal([&] { write_safetensors(folder / "no" / "file", {}); }, StatusCode::io, {"no/file", "cannot create"});
}

TEST_F(SafetensorsWriting, RefusesAFolderAsTarget) {
    expect_refusal([&] { write_safetensors(folder.path(), {}); }, StatusCode::io,
                   {folder.path().string(), "is a directory"});
    EXPECT_TRUE(folder.names().empty());
}

TEST_F(SafetensorsWriting, ReportsAFullDisk) {
    if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
    const float one = 1.0F;
    const std::vector<TensorToWrite> tensors = {{"a", Dtype::f32, {}, &one}};
    expect_refusal([&] { write_safetensors("/dev/full", tensors); }, StatusCode::io,
                   {"/dev/full", "cannot write", "No space"});
    EXPECT_TRUE(std::filesystem::is_character_file("/dev/full"));
}

TEST_F(SafetensorsWriting, AppendsRowsOfOneTensorAfterTheOther) {
    const auto values = counted(12);
    SafetensorsWriter writer(path, {{"a", Dtype::f32, {3, 2}}, {"nothing", Dtype::f32, {0, 2}}, {"b", Dtype::f32, {4}}});
    writer.append_rows("a", values.data(), 1);
    writer.append_rows("a", values.data() + 2, 2, 3);
    writer.append_rows("b", values.data(), 1);
    EXPECT_FALSE(std::filesystem::exists(path));
    writer.finish();
    const auto file = SafetensorsFile::open(path);
    EXPECT_EQ(floats_of(file.tensor("a")), (std::vector<float>{1, 2, 3, 4, 6, 7}));
    EXPECT_EQ(floats_of(file.tensor("b")), (std::vector<float>{1, 2, 3, 4}));
}

TEST_F(SafetensorsWriting, RefusesRowsInTheWrongOrderOrNumber) {
    const auto values = counted(12);
    SafetensorsWriter writer(path, {{"a", Dtype::f32, {3, 2}}, {"b", Dtype::f32, {4}}});
    const auto refuses_rows = [&](const std::string& name, std::int64_t rows, const std::vector<std::string>& parts) {
        expect_refusal([&] { writer.append_rows(name, values.data(), rows); }, StatusCode::invalid_argument, parts);
    };
    refuses_rows("b", 1, {"\"b\"", "\"a\""});
    refuses_rows("a", 4, {"\"a\"", "4 rows", "at most 3"});
    refuses_rows("a", -1, {"\"a\"", "-1 rows"});
    expect_refusal([&] { writer.finish(); }, StatusCode::invalid_argument, {"\"a\"", "0 rows", "expected 3"});
    writer.append_rows("a", values.data(), 3);
    writer.append_rows("b", values.data(), 1);
    refuses_rows("b", 1, {"\"b\"", "complete"});
}

TEST_F(SafetensorsWriting, LeavesNothingBehindUnlessFinished) {
    write_text(path, "old");
    const float one = 1.0F;
    {
        SafetensorsWriter writer(path, {{"a", Dtype::f32, {}}});
        writer.append_rows("a", &one, 1);
    }
    EXPECT_EQ(folder.names(), std::vector<std::string>{"out.safetensors"});
    EXPECT_EQ(read_text(path), "old");
}

}  // namespace
}  // namespace latent_moe::io

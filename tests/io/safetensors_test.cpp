#include "io/safetensors.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>
#include <utility>
#include <vector>

#include "files.h"

namespace latent_moe::io {
namespace {

using Shape = std::vector<std::int64_t>;

SafetensorsContents parse(const std::string& file) {
    return parse_safetensors(bytes_of_text(file), "file");
}

/// For tests that look at everything but the bytes, which are gone by then.
SafetensorsContents parse(const std::string& header, const std::string& data) {
    return parse(safetensors_text(header, data));
}

void refuses_file(const std::string& file, std::vector<std::string> parts) {
    parts.emplace_back("file: ");
    expect_refusal([&] { parse(file); }, StatusCode::io, parts);
}

void refuses(const std::string& header, const std::string& data, const std::vector<std::string>& parts) {
    refuses_file(safetensors_text(header, data), parts);
}

/// A header with one tensor "t" of which the test chooses every field as JSON text.
std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"t":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
}

TEST(Safetensors, ReadsTensorsAndMetadata) {
    const std::string file =
        safetensors_text(R"({"b":{"dtype":"F32","shape":[1,2],"data_offsets":[6,14]},"__metadata__":{"format":"pt"},)"
                         R"("a":{"dtype":"BF16","shape":[3],"data_offsets":[0,6]}}   )",
                         "aabbccddddeeee");
    const auto contents = parse(file);
    ASSERT_EQ(contents.tensors.size(), 2U);
    EXPECT_EQ(contents.tensors[0].name, "a");
    EXPECT_EQ(contents.tensors[0].dtype, Dtype::bf16);
    EXPECT_EQ(contents.tensors[0].shape, Shape{3});
    EXPECT_EQ(contents.tensors[0].bytes.size(), 6U);
    EXPECT_EQ(contents.tensors[1].dtype_name, "F32");
    EXPECT_EQ(static_cast<char>(contents.tensors[1].bytes[0]), 'd');
    EXPECT_EQ(contents.metadata, (Metadata{{"format", "pt"}}));
}

TEST(Safetensors, ReadsTheFourElementTypesThatTheLibraryComputesWith) {
    EXPECT_EQ(parse(entry("\"BF16\"", "[1]", "[0,2]"), "ab").tensors[0].dtype, Dtype::bf16);
    EXPECT_EQ(parse(entry("\"F16\"", "[1]", "[0,2]"), "ab").tensors[0].dtype, Dtype::f16);
    EXPECT_EQ(parse(entry("\"F32\"", "[1]", "[0,4]"), "abcd").tensors[0].dtype, Dtype::f32);
    EXPECT_EQ(parse(entry("\"F8_E4M3\"", "[1]", "[0,1]"), "a").tensors[0].dtype, Dtype::e4m3);
}

TEST(Safetensors, ListsOtherElementTypesButRefusesThemAsAMatrix) {
    const std::vector<std::pair<std::string, int>> others = {
        {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E8M0", 1}, {"U16", 2}, {"I16", 2},
        {"U32", 4},  {"I32", 4}, {"U64", 8}, {"I64", 8},     {"F64", 8},     {"C64", 8},
    };
    for (const auto& [dtype, size] : others) {
        const std::string data(static_cast<std::size_t>(size), 'x');
        const std::string file = safetensors_text(entry('"' + dtype + '"', "[1]", "[0," + std::to_string(size) + "]"), data);
        const auto contents = parse(file);
        EXPECT_EQ(contents.tensors[0].dtype, std::nullopt) << dtype;
        EXPECT_EQ(contents.tensors[0].dtype_name, dtype);
        expect_refusal([&] { as_matrix(contents.tensors[0], "file"); }, StatusCode::invalid_argument,
                       {"file", "\"t\"", dtype});
    }
}

TEST(Safetensors, CountsElementsSmallerThanAByte) {
    EXPECT_EQ(parse(entry("\"F4\"", "[2,3]", "[0,3]"), "abc").tensors.size(), 1U);
    EXPECT_EQ(parse(entry("\"F6_E2M3\"", "[4]", "[0,3]"), "abc").tensors.size(), 1U);
    refuses(entry("\"F4\"", "[3]", "[0,2]"), "ab", {"\"t\"", "whole bytes"});
}

TEST(Safetensors, ReadsScalarsAndEmptyTensors) {
    const auto scalar = parse(entry("\"F32\"", "[]", "[0,4]"), "abcd");
    EXPECT_TRUE(scalar.tensors[0].shape.empty());
    const Matrix matrix = as_matrix(scalar.tensors[0], "file");
    EXPECT_EQ(matrix.rows, 1);
    EXPECT_EQ(matrix.columns, 1);

    const auto none = parse(entry("\"BF16\"", "[0,64]", "[0,0]"), "");
    EXPECT_TRUE(none.tensors[0].bytes.empty());
    EXPECT_EQ(as_matrix(none.tensors[0], "file").columns, 64);
}

TEST(Safetensors, ReadsAFileWithoutTensors) {
    EXPECT_TRUE(parse("{}", "").tensors.empty());
}

TEST(Safetensors, AcceptsAnEmptyTensorBetweenTwoOthers) {
    const auto contents =
        parse(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]},)"
              R"("c":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
              "aac");
    EXPECT_EQ(contents.tensors.size(), 3U);
}

TEST(Safetensors, HandsOutDataAtAnyAddress) {
    const auto contents = parse(
        R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})",
        "abbbb");
    EXPECT_EQ(contents.tensors[1].bytes.size(), 4U);
    EXPECT_EQ(contents.tensors[1].bytes.data(), contents.tensors[0].bytes.data() + 1);
}

TEST(Safetensors, RefusesMoreThanTwoDimensionsAsAMatrix) {
    const std::string file = safetensors_text(entry("\"F16\"", "[1,1,1]", "[0,2]"), "ab");
    const auto contents = parse(file);
    expect_refusal([&] { as_matrix(contents.tensors[0], "file"); }, StatusCode::invalid_argument,
                   {"\"t\"", "3", "[1, 1, 1]"});
}

TEST(Safetensors, RefusesAFileShorterThanTheHeaderLength) {
    refuses_file("", {"0 bytes", "8"});
    refuses_file("1234567", {"7 bytes", "8"});
}

TEST(Safetensors, RefusesAHeaderLengthOfZero) {
    refuses_file(safetensors_text(0, "{}", ""), {"header length is 0"});
}

TEST(Safetensors, RefusesAHeaderLengthBeyondTheFile) {
    refuses_file(safetensors_text(3, "{}", ""), {"header length is 3", "only 2 bytes"});
    refuses_file(safetensors_text(1, "", ""), {"header length is 1", "only 0 bytes"});
}

TEST(Safetensors, RefusesAnAbsurdHeaderLength) {
    for (const std::uint64_t length : {std::uint64_t{100'000'001}, std::uint64_t{1} << 60U, ~std::uint64_t{0}}) {
        refuses_file(safetensors_text(length, "{}", ""), {std::to_string(length), "at most 100000000"});
    }
}

TEST(Safetensors, RefusesAHeaderThatIsNotJson) {
    refuses("{", "", {"header", "not valid JSON"});
    refuses("{\"t\":}", "", {"not valid JSON"});
    refuses("{} x", "", {"not valid JSON"});
    refuses("{}{}", "", {"not valid JSON"});
    refuses("{/**/}", "", {"not valid JSON"});
    refuses("{\"t\":1e999}", "", {"not valid JSON"});
}

TEST(Safetensors, RefusesAHeaderThatIsNotAnObject) {
    for (const char* header : {"[]", "1", "null", " {}", "\xEF\xBB\xBF{}"}) refuses(header, "", {"expected a JSON object"});
}

TEST(Safetensors, RefusesNulBytesInTheHeader) {
    refuses(std::string("{}\0", 3), "", {"NUL byte"});
}

TEST(Safetensors, RefusesDuplicateTensors) {
    const std::string t = R"("t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
    refuses("{" + t + "," + t + "}", "a", {"\"t\"", "twice"});
}

TEST(Safetensors, RefusesDuplicateKeysInsideAnEntry) {
    refuses(R"({"t":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "a", {"\"dtype\"", "twice"});
    refuses(R"({"__metadata__":{"k":"v","k":"w"}})", "", {"\"k\"", "twice"});
}

TEST(Safetensors, RefusesDeepNesting) {
    const std::string brackets(1'000'000, '[');
    refuses("{\"t\":" + brackets, "", {"nests deeper than 32"});
}

TEST(Safetensors, RefusesAnEntryThatIsNotAnObject) {
    refuses(R"({"t":[]})", "", {"\"t\"", "array", "expected an object"});
}

TEST(Safetensors, RefusesMissingFields) {
    refuses(R"({"t":{"shape":[1],"data_offsets":[0,1]}})", "a", {"\"t\"", "no dtype"});
    refuses(R"({"t":{"dtype":"U8","data_offsets":[0,1]}})", "a", {"\"t\"", "no shape"});
    refuses(R"({"t":{"dtype":"U8","shape":[1]}})", "a", {"\"t\"", "no data_offsets"});
}

TEST(Safetensors, RefusesAnUnknownDtype) {
    refuses(entry("\"F12\"", "[1]", "[0,1]"), "a", {"\"t\"", "\"F12\"", "unknown"});
    refuses(entry("8", "[1]", "[0,1]"), "a", {"\"t\"", "dtype is a JSON number"});
}

TEST(Safetensors, RefusesAShapeThatIsNotMadeOfSizes) {
    refuses(entry("\"U8\"", "[-1]", "[0,1]"), "a", {"\"t\"", "shape has -1"});
    refuses(entry("\"U8\"", "[1.0]", "[0,1]"), "a", {"\"t\"", "shape has 1.0"});
    refuses(entry("\"U8\"", "[\"1\"]", "[0,1]"), "a", {"\"t\"", "shape has a JSON string"});
    refuses(entry("\"U8\"", "1", "[0,1]"), "a", {"\"t\"", "shape is a JSON number"});
    refuses(entry("\"U8\"", "[9223372036854775808]", "[0,1]"), "a", {"\"t\"", "9223372036854775808"});
}

TEST(Safetensors, RefusesAShapeThatOverflows) {
    refuses(entry("\"U8\"", "[4294967296,4294967296]", "[0,0]"), "", {"\"t\"", "overflows 64 bits"});
    refuses(entry("\"F64\"", "[4611686018427387904]", "[0,0]"), "", {"\"t\"", "overflows 64 bits"});
    refuses(entry("\"U8\"", "[4294967296,4294967296,0]", "[0,0]"), "", {"\"t\"", "overflows 64 bits"});
    refuses(entry("\"U8\"", "[0,4294967296,4294967296]", "[0,0]"), "", {"\"t\"", "overflows 64 bits"});
}

TEST(Safetensors, RefusesAShapeThatDoesNotFitItsBytes) {
    refuses(entry("\"BF16\"", "[2,2]", "[0,6]"), "aabbcc", {"\"t\"", "has 6 bytes", "expected 8", "[2, 2]"});
    refuses(entry("\"BF16\"", "[]", "[0,0]"), "", {"\"t\"", "has 0 bytes", "expected 2"});
}

TEST(Safetensors, RefusesBrokenOffsets) {
    refuses(entry("\"U8\"", "[1]", "[1,0]"), "a", {"\"t\"", "begin at 1"});
    refuses(entry("\"U8\"", "[2]", "[0,2]"), "a", {"\"t\"", "end at 2", "1 bytes", "truncated"});
    refuses(entry("\"U8\"", "[1]", "[0,18446744073709551615]"), "a", {"\"t\"", "end at 18446744073709551615"});
    refuses(entry("\"U8\"", "[1]", "[-1,0]"), "a", {"\"t\"", "data_offsets has -1"});
    refuses(entry("\"U8\"", "[1]", "[0]"), "a", {"\"t\"", "two integers"});
    refuses(entry("\"U8\"", "[1]", "[0,1,1]"), "a", {"\"t\"", "two integers"});
    refuses(entry("\"U8\"", "[1]", "{\"a\":0,\"b\":1}"), "a", {"\"t\"", "two integers"});
}

std::string two_tensors(const std::string& first, const std::string& second) {
    return R"({"a":{"dtype":"U8","shape":[2],"data_offsets":)" + first +
           R"(},"b":{"dtype":"U8","shape":[2],"data_offsets":)" + second + "}}";
}

TEST(Safetensors, RefusesOverlappingTensors) {
    refuses(two_tensors("[0,2]", "[1,3]"), "abc", {"\"b\"", "overlap"});
    refuses(two_tensors("[0,2]", "[0,2]"), "ab", {"overlap"});
}

TEST(Safetensors, RefusesHoles) {
    refuses(two_tensors("[0,2]", "[3,5]"), "abcde", {"\"b\"", "byte 3", "expected 2", "hole"});
    refuses(entry("\"U8\"", "[1]", "[1,2]"), "ab", {"\"t\"", "hole"});
}

TEST(Safetensors, RefusesTrailingBytes) {
    refuses(entry("\"U8\"", "[1]", "[0,1]"), "abc", {"2 bytes follow"});
    refuses("{}", "a", {"1 bytes follow"});
}

TEST(Safetensors, RefusesNulAndInvalidUtf8InNames) {
    refuses(R"({"a\u0000b":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", "", {"a\\x00b", "NUL character"});
    refuses("{\"\xFF\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", "", {"not valid JSON"});
    refuses(R"({"\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", "", {"not valid JSON"});
}

TEST(Safetensors, RefusesMetadataThatIsNotText) {
    refuses(R"({"__metadata__":[]})", "", {"__metadata__", "array"});
    refuses(R"({"__metadata__":{"k":1}})", "", {"__metadata__", "\"k\"", "number"});
}

TEST(Safetensors, KeepsAMessageOnOneLineWhateverTheNames) {
    refuses(R"({"a\nb\u007f":1})", "", {"a\\nb\\x7f"});
    refuses("{\"" + std::string(100'000, 'n') + "\":1}", "", {"nnn...\""});
    std::string umlauts;
    for (int i = 0; i < 1000; ++i) umlauts += "\xC3\xA4";
    refuses("{\"x" + umlauts + "\":1}", "", {"\xC3\xA4...\""});
}

class SafetensorsOnDisk : public testing::Test {
protected:
    TemporaryFolder folder;
    void refuses_to_open(const std::filesystem::path& path, std::vector<std::string> parts) {
        parts.push_back(path.string());
        expect_refusal([&] { SafetensorsFile::open(path); }, StatusCode::io, parts);
    }
};

TEST_F(SafetensorsOnDisk, FindsTensorsByName) {
    write_text(folder / "f", safetensors_text(entry("\"BF16\"", "[2,3]", "[0,12]"), "aabbccddeeff"));
    const auto file = SafetensorsFile::open(folder / "f");
    EXPECT_EQ(file.path(), folder / "f");
    ASSERT_NE(file.find("t"), nullptr);
    EXPECT_EQ(file.find("s"), nullptr);
    EXPECT_EQ(file.find("u"), nullptr);
    EXPECT_EQ(file.tensor("t").shape, (Shape{2, 3}));
    EXPECT_EQ(file.matrix("t").rows, 2);
    EXPECT_EQ(file.matrix("t").columns, 3);
    expect_refusal([&] { file.tensor("u"); }, StatusCode::invalid_argument, {"f", "\"u\""});
}

TEST_F(SafetensorsOnDisk, KeepsItsViewsWhenMoved) {
    write_text(folder / "f", safetensors_text(entry("\"U8\"", "[3]", "[0,3]"), "xyz"));
    auto file = SafetensorsFile::open(folder / "f");
    const auto bytes = file.tensor("t").bytes;
    const SafetensorsFile moved = std::move(file);
    EXPECT_EQ(static_cast<char>(bytes[2]), 'z');
    EXPECT_EQ(moved.tensor("t").bytes.data(), bytes.data());
    static_assert(!std::is_copy_constructible_v<SafetensorsFile>);
}

TEST_F(SafetensorsOnDisk, LetsGoOfTheOldFileWhenAssigned) {
    write_text(folder / "f", safetensors_text(entry("\"U8\"", "[1]", "[0,1]"), "f"));
    write_text(folder / "g", safetensors_text(entry("\"U8\"", "[1]", "[0,1]"), "g"));
    auto file = SafetensorsFile::open(folder / "f");
    file = SafetensorsFile::open(folder / "g");
    EXPECT_EQ(static_cast<char>(file.tensor("t").bytes[0]), 'g');
}

TEST_F(SafetensorsOnDisk, RefusesAMissingFile) {
    refuses_to_open(folder / "none", {"cannot open"});
}

TEST_F(SafetensorsOnDisk, RefusesADirectory) {
    refuses_to_open(folder.path(), {"is a directory"});
}

TEST_F(SafetensorsOnDisk, RefusesAnEmptyFile) {
    write_text(folder / "empty", "");
    refuses_to_open(folder / "empty", {"0 bytes"});
}

TEST_F(SafetensorsOnDisk, RefusesATruncatedFile) {
    const std::string whole = safetensors_text(entry("\"U8\"", "[3]", "[0,3]"), "xyz");
    for (std::size_t size = 0; size < whole.size(); ++size) {
        write_text(folder / "cut", whole.substr(0, size));
        refuses_to_open(folder / "cut", {});
    }
}

TEST_F(SafetensorsOnDisk, RefusesANamedPipeWithoutWaitingForAWriter) {
    ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
    refuses_to_open(folder / "pipe", {"expected a regular file"});
}

}  // namespace
}  // namespace latent_moe::io

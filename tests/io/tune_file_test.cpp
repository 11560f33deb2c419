// Tables of measured times as files: what is written is read back, and what is broken is refused by name.
#include "io/tune_file.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "io/files.h"

namespace latent_moe::io {
namespace {

TuneTable table() {
    TuneTable made{
        .key = {.version = "0.1.0", .device = "a \"GPU\"", .links = "wires", .world = 4, .hidden = 7168, .latent = 3584},
        .origin = "made up"};
    made.points[static_cast<std::size_t>(Tail::fused)] = {{1, 8.1}, {128, 44.699999999999996}};
    made.points[static_cast<std::size_t>(Tail::overlap)] = {{0, 0.1}, {1, 1.0 / 3}, {65536, 1e6}};
    return made;
}

TEST(TuneFile, ReadsBackWhatItWroteBitForBit) {
    TuneTable other = table();
    other.key.shared = SharedState::reduced;
    other.key.norm = Norm::none;
    other.key.sequence_parallel = true;
    const TemporaryFolder folder;
    write_tune_tables(folder / "t.json", {table(), other});
    EXPECT_EQ(read_tune_tables(folder / "t.json"), (std::vector{table(), other}));
    EXPECT_EQ(folder.names(), std::vector<std::string>{"t.json"});
}

TEST(TuneFile, IgnoresFieldsOfLaterVersions) {
    auto json = nlohmann::json::parse(tune_text({table()}));
    json["comment"] = "hello";
    json["tables"][0]["weather"] = 3;
    EXPECT_EQ(parse_tune_tables(json.dump(), "t.json"), std::vector{table()});
}

TEST(TuneFile, RefusesWhatIsBrokenAndNamesThePlace) {
    struct Broken {
        const char* pointer;
        nlohmann::json value;
        const char* says;
    };
    const std::vector<Broken> all = {
        {"/schema", "latent-moe/tune/2", "expected schema latent-moe/tune/1"},
        {"/schema", "two\nlines", "two\\nlines"},
        {"/tables", 3, "has no list of tables"},
        {"/tables/0", 3, "table 0: is a JSON number, expected an object"},
        {"/tables/0/device", 3, "table 0: device is a JSON number, expected a string"},
        {"/tables/0/device", "a\nb", "no control characters"},
        {"/tables/0/device", std::string(500, 'x'), "device has 500 bytes, expected at most 400"},
        {"/tables/0/tp", 17, "table 0: tp is \"17\", expected a whole number from 1 to 16"},
        {"/tables/0/tp", 2.5, "expected a whole number"},
        {"/tables/0/hidden", 18446744073709551615U, "hidden is"},
        {"/tables/0/norm", "layer", "norm is \"layer\", expected one of none, rms"},
        {"/tables/0/dtype", "e4m3", "dtype is \"e4m3\""},
        {"/tables/0/shared", nullptr, "shared is a JSON null"},
        {"/tables/0/sequence_parallel", 0, "sequence_parallel is \"0\", expected true or false"},
        {"/tables/0/points", nlohmann::json::array(), "points are not a list of at least one"},
        {"/tables/0/points/1/tokens", 0, "point 1: tokens is 0, expected more than the 0 before it"},
        {"/tables/0/points/0/tokens", -1, "point 0: tokens is \"-1\""},
        {"/tables/0/points/3/tokens", 65537, "point 3: tokens is \"65537\""},
        {"/tables/0/points/0/us", 3, "point 0: us is a JSON number, expected an object"},
        {"/tables/0/points/0/us/overlap", 0, "us of overlap is \"0\", expected a number of microseconds above 0"},
        {"/tables/0/points/0/us/overlap", "fast", "us of overlap is"},
        {"/tables/0/points/0/us/overlap", 1e300, "us of overlap is"},
        {"/tables/0/points/0/us/warp", 3, "us names \"warp\", which is no tail"},
    };
    for (const Broken& broken : all) {
        auto json = nlohmann::json::parse(tune_text({table()}));
        json[nlohmann::json::json_pointer(broken.pointer)] = broken.value;
        expect_refusal([&] { parse_tune_tables(json.dump(), "t.json"); }, StatusCode::io, {"t.json: ", broken.says});
    }
    for (const char* field : {"version", "links", "origin", "points", "latent"}) {
        auto json = nlohmann::json::parse(tune_text({table()}));
        json["tables"][0].erase(field);
        expect_refusal([&] { parse_tune_tables(json.dump(), "t.json"); }, StatusCode::io, {std::string("has no ") + field});
    }
    expect_refusal([] { parse_tune_tables("{\"schema\": \"latent-moe/tune/1\"", "t.json"); }, StatusCode::io,
                   {"not valid JSON"});
    expect_refusal([] { read_tune_tables("/nowhere/t.json"); }, StatusCode::io, {"/nowhere/t.json"});
}

}  // namespace
}  // namespace latent_moe::io

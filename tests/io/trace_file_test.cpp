#include "io/trace_file.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "latent_moe/status.h"

namespace latent_moe::io {
namespace {

TEST(TraceFile, HoldsEverySpanOnItsTrackFromTheFirstOn) {
    const std::vector<TraceSpan> spans = {{"second", 1, 7, 1002.5, 3}, {"first", 0, 13, 1000, 2}};
    const auto trace = nlohmann::json::parse(chrome_trace(spans, {{0, "device 0"}, {1, "device 1"}}));
    const auto& events = trace.at("traceEvents");
    ASSERT_EQ(events.size(), 4U);
    EXPECT_EQ(events[0].at("ph"), "M");
    EXPECT_EQ(events[1].at("args").at("name"), "device 1");
    EXPECT_EQ(events[2].at("name"), "second");
    EXPECT_EQ(events[2].at("ph"), "X");
    EXPECT_EQ(events[2].at("pid"), 1);
    EXPECT_EQ(events[2].at("tid"), 7);
    EXPECT_EQ(events[2].at("ts"), 2.5);
    EXPECT_EQ(events[2].at("dur"), 3);
    EXPECT_EQ(events[3].at("ts"), 0);
}

TEST(TraceFile, SurvivesNamesThatAreNoText) {
    const std::string text = chrome_trace({{"\xff\"kernel\"", 0, 0, 0, 1}}, {});
    EXPECT_EQ(nlohmann::json::parse(text).at("traceEvents").size(), 1U);
}

TEST(TraceFile, OfNothingIsATraceOfNothing) {
    EXPECT_TRUE(nlohmann::json::parse(chrome_trace({}, {})).at("traceEvents").empty());
}

TEST(TraceFile, NamesAPathThatCannotBeWritten) {
    EXPECT_THROW(write_trace("/nowhere/trace.json", {}, {}), Error);
}

}  // namespace
}  // namespace latent_moe::io

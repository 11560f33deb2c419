// What a call reports is one line of UTF-8, whatever the thing it names holds.
#include "latent_moe/status.h"

#include <gtest/gtest.h>

#include <string>

#include "core/one_line.h"

namespace latent_moe {
namespace {

TEST(Message, OfOneLineIsKeptAsItIs) {
    for (const std::string text : {"", "a \"path\" \\n with 'marks'", "µs Σ → 漢 𝄞"}) {
        EXPECT_EQ(Status(StatusCode::io, text).message(), text);
        EXPECT_STREQ(Error(StatusCode::io, text).what(), text.c_str());
    }
}

TEST(Message, ShowsControlCharactersInsteadOfHoldingThem) {
    const std::string text(
        "a\nb\rc\td\x1b[31m\x7f"
        "e\0f",
        16);
    const std::string line = "a\\nb\\rc\\td\\x1b[31m\\x7fe\\x00f";
    EXPECT_EQ(Status(StatusCode::mismatch, text).message(), line);
    EXPECT_EQ(Error(StatusCode::mismatch, text).what(), line);
    EXPECT_EQ(Error(StatusCode::mismatch, text).status().message(), line);
}

TEST(Message, ShowsBytesThatAreNotUtf8) {
    EXPECT_EQ(one_line("\xff"), "\\xff");
    EXPECT_EQ(one_line("\xc3"), "\\xc3") << "a character cut off";
    EXPECT_EQ(one_line("\xe2\x82"), "\\xe2\\x82") << "a character cut off";
    EXPECT_EQ(one_line("\xc0\xaf"), "\\xc0\\xaf") << "longer than it must be";
    EXPECT_EQ(one_line("\xe0\x80\xaf"), "\\xe0\\x80\\xaf") << "longer than it must be";
    EXPECT_EQ(one_line("\xed\xa0\x80"), "\\xed\\xa0\\x80") << "half of a surrogate pair";
    EXPECT_EQ(one_line("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80") << "past the last character";
    EXPECT_EQ(one_line("\xe2\x82\xac\x80"), "€\\x80");
}

}  // namespace
}  // namespace latent_moe

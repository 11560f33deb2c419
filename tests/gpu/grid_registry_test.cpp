#include "gpu/grid_registry.h"

#include <gtest/gtest.h>

namespace latent_moe::gpu {
namespace {

constexpr int room = 116;

TEST(GridRegistry, GivesRoomOnceAndTakesItBack) {
    GridRegistry books;
    EXPECT_TRUE(books.add(0, 100, room));
    EXPECT_FALSE(books.add(0, 17, room));
    EXPECT_TRUE(books.add(0, 16, room));
    EXPECT_TRUE(books.add(1, room, room)) << "another device has room of its own";
    books.remove(0, 100, false);
    EXPECT_TRUE(books.add(0, 100, room));
}

TEST(GridRegistry, LetsAContextThatIsAloneStartKernelsEarlyWhateverItsSize) {
    GridRegistry books;
    ASSERT_TRUE(books.add(0, 112, room));
    EXPECT_TRUE(books.start_early(0, 112, room));
    books.remove(0, 112, true);
    EXPECT_EQ(books.taken(0), 0);
}

TEST(GridRegistry, CountsAContextTwiceThatStartsKernelsEarlyBesideAnother) {
    GridRegistry books;
    ASSERT_TRUE(books.add(0, 58, room));
    ASSERT_TRUE(books.add(0, 58, room));
    EXPECT_FALSE(books.start_early(0, 58, room)) << "its next call could keep out what the other waits for";
    books.remove(0, 58, false);
    EXPECT_TRUE(books.start_early(0, 58, room));
}

TEST(GridRegistry, RefusesAContextBesideOneWhoseGraphsStartKernelsEarly) {
    GridRegistry books;
    ASSERT_TRUE(books.add(0, 58, room));
    ASSERT_TRUE(books.start_early(0, 58, room));
    EXPECT_FALSE(books.add(0, 58, room));
    EXPECT_EQ(books.taken(0), 116);
    books.remove(0, 58, true);
    EXPECT_TRUE(books.add(0, 58, room));
}

TEST(GridRegistry, LetsTwoContextsStartKernelsEarlyWhereBothFitTwice) {
    GridRegistry books;
    ASSERT_TRUE(books.add(0, 28, room));
    ASSERT_TRUE(books.add(0, 28, room));
    EXPECT_TRUE(books.start_early(0, 28, room));
    EXPECT_TRUE(books.start_early(0, 28, room));
    EXPECT_FALSE(books.add(0, 28, room));
}

}  // namespace
}  // namespace latent_moe::gpu

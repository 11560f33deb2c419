#include "gpu/grid_registry.h"

#include "gpu/lane_grids.h"

#include <gtest/gtest.h>

namespace latent_moe::gpu {
namespace {

constexpr Room room = room_of(132, 16, 57);  // an H200's

TEST(GridRegistry, GivesRoomOnceAndTakesItBack) {
    GridRegistry books;
    EXPECT_TRUE(books.add(0, 70, room));
    EXPECT_FALSE(books.add(0, 47, room));
    EXPECT_TRUE(books.add(0, 46, room));
    EXPECT_TRUE(books.add(1, room.all, room)) << "another device has room of its own";
    books.remove(0, 70, false);
    EXPECT_TRUE(books.add(0, 70, room));
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

TEST(GridRegistry, KeepsPlacesForAClusterWhicheverContextItIsOf) {
    GridRegistry books;
    for (const int ctas : {38, 37}) ASSERT_TRUE(books.add(0, ctas, room));
    EXPECT_FALSE(books.add(0, 38, room)) << "two of 38 leave the third 56 multiprocessors, and maybe nowhere eight together";
    EXPECT_TRUE(books.add(0, 37, room));
    EXPECT_EQ(books.taken(0), 112);
}

TEST(LaneGrids, LeaveEveryContextPlacesForAClusterHoweverManyRanksShareADevice) {
    for (int sharing = 1; sharing <= 8; ++sharing) {
        for (const int fused_ctas : {0, 1000}) {
            const int contexts = fused_ctas > 0 ? sharing : 2 * sharing;
            const LaneGrids grids = lane_grids(room, sharing, fused_ctas);
            EXPECT_EQ(grids.main + grids.side, grids.alone);
            EXPECT_LE(contexts * grids.alone, room.all) << sharing;
            EXPECT_LE((contexts - 1) * grids.alone, room.beside) << sharing;
        }
    }
    EXPECT_EQ(lane_grids(room, 1, 0).alone, 58);
    EXPECT_EQ(lane_grids(room, 1, 112).alone, 116);
    EXPECT_EQ(lane_grids(room, 3, 1000).alone, 37);
}

}  // namespace
}  // namespace latent_moe::gpu

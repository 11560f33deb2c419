// The promises of `Transport`, on every kind of rank.
#include "comm/transport.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "comm/bootstrap_transport.h"
#include "latent_moe/shape.h"
#include "latent_moe/status.h"
#include "support/harness.h"

namespace latent_moe {
namespace {

using test::on_ranks;

Region region(const std::vector<int>& values) {
    const auto bytes = static_cast<std::int64_t>(values.size() * sizeof(int));
    return {reinterpret_cast<const std::byte*>(values.data()), 1, bytes, bytes};
}

int int_at(const Region& region, std::int64_t row, std::int64_t index) {
    int value = 0;
    std::memcpy(&value, region.row(row) + index * static_cast<std::int64_t>(sizeof value), sizeof value);
    return value;
}

/// Every rank sends [rank, peer, round] to every peer; checks what arrives.
void exchange_and_check(Transport& transport, Channel channel, int rounds) {
    const auto ranks = static_cast<std::size_t>(transport.world());
    std::vector<std::vector<int>> values(ranks, std::vector<int>(3));
    std::vector<Region> outgoing(ranks);
    for (int round = 0; round < rounds; ++round) {
        for (std::size_t peer = 0; peer < ranks; ++peer) {
            values[peer] = {transport.rank(), static_cast<int>(peer), round};
            outgoing[peer] = region(values[peer]);
        }
        transport.exchange(channel, {.call = static_cast<std::uint64_t>(round)}, outgoing,
                           [&](std::span<const Region> incoming) {
                               ASSERT_EQ(incoming.size(), ranks);
                               for (std::size_t peer = 0; peer < ranks; ++peer) {
                                   ASSERT_EQ(int_at(incoming[peer], 0, 0), static_cast<int>(peer));
                                   ASSERT_EQ(int_at(incoming[peer], 0, 1), transport.rank());
                                   ASSERT_EQ(int_at(incoming[peer], 0, 2), round);
                               }
                           });
    }
}

StatusCode code_of_exchange(Transport& transport, const ExchangeHeader& header, std::string* message = nullptr) {
    const std::vector<int> values(1);
    const std::vector<Region> outgoing(static_cast<std::size_t>(transport.world()), region(values));
    try {
        transport.exchange(Channel::main, header, outgoing, [](std::span<const Region>) {});
    } catch (const Error& error) {
        if (message != nullptr) *message = error.what();
        return error.code();
    }
    return StatusCode::ok;
}

TEST(Transport, DeliversToEveryRankWhatWasMeantForItRoundAfterRound) {
    for (const int world : {1, 2, 3, 4, 8}) {
        on_ranks(world, [](const Bootstrap& bootstrap) { exchange_and_check(*bootstrap.transport, Channel::main, 200); });
    }
}

TEST(Transport, RunsBothChannelsAtOnce) {
    on_ranks(2, [](const Bootstrap& bootstrap) {
        ASSERT_TRUE(bootstrap.transport->concurrent_channels());
        std::thread side([&] { exchange_and_check(*bootstrap.transport, Channel::side, 200); });
        exchange_and_check(*bootstrap.transport, Channel::main, 150);
        side.join();
    });
}

TEST(Transport, CarriesStridedRowsAndVolumesPastAnyBuffer) {
    on_ranks(2, [](const Bootstrap& bootstrap) {
        constexpr std::int64_t rows = 700;
        constexpr std::int64_t row_ints = 3000;  // 8.4 MB a region
        std::vector<int> values(static_cast<std::size_t>(rows * (row_ints + 5)));
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int>(i) * (bootstrap.rank + 1);
        const Region part{reinterpret_cast<const std::byte*>(values.data()), rows, row_ints * 4, (row_ints + 5) * 4};
        const std::vector<Region> outgoing(2, part);
        bootstrap.transport->exchange(Channel::main, {}, outgoing, [&](std::span<const Region> incoming) {
            for (int peer = 0; peer < 2; ++peer) {
                const Region& from = incoming[static_cast<std::size_t>(peer)];
                ASSERT_EQ(from.rows, rows);
                ASSERT_EQ(from.row_bytes, row_ints * 4);
                for (std::int64_t row = 0; row < rows; row += 13) {
                    for (std::int64_t i = 0; i < row_ints; i += 7)
                        ASSERT_EQ(int_at(from, row, i), static_cast<int>(row * (row_ints + 5) + i) * (peer + 1));
                }
            }
        });
    });
}

TEST(Transport, LetsABufferBeReusedAtOnceThoughAPeerIsSlow) {
    on_ranks(3, [](const Bootstrap& bootstrap) {
        std::vector<int> values(1000);
        const std::vector<Region> outgoing(3, region(values));
        for (int round = 0; round < 30; ++round) {
            std::fill(values.begin(), values.end(), round * 10 + bootstrap.rank);
            bootstrap.transport->exchange(Channel::main, {}, outgoing, [&](std::span<const Region> incoming) {
                if (bootstrap.rank == round % 3) std::this_thread::sleep_for(std::chrono::milliseconds(2));
                for (int peer = 0; peer < 3; ++peer) {
                    ASSERT_EQ(int_at(incoming[static_cast<std::size_t>(peer)], 0, 999), round * 10 + peer);
                }
            });
        }
    });
}

TEST(Transport, RefusesDifferentCallsOnEveryRankAndNamesBoth) {
    on_ranks(2, [](const Bootstrap& bootstrap) {
        const bool first = bootstrap.rank == 0;
        std::string message;
        const ExchangeHeader header{.call = 4,
                                    .tokens = first ? 8 : 9,
                                    .layer = 3,
                                    .tail = Tail::overlap,
                                    .is_tail = true,
                                    .step = Step::reduce_latent};
        EXPECT_EQ(code_of_exchange(*bootstrap.transport, header, &message), StatusCode::mismatch);
        EXPECT_EQ(message,
                  "ranks make different calls: rank 0 is in tail overlap of layer 3 with 8 tokens, rank 1 in tail overlap "
                  "of layer 3 with "
                  "9 tokens");
    });
}

TEST(Transport, NoticesOutputsThatDiverged) {
    on_ranks(2, [](const Bootstrap& bootstrap) {
        std::string message;
        const ExchangeHeader header{.call = 5, .digest = bootstrap.rank == 0 ? 0xAAU : 0xBBU};
        EXPECT_EQ(code_of_exchange(*bootstrap.transport, header, &message), StatusCode::mismatch);
        EXPECT_EQ(message, "outputs diverged before call 5: rank 0 had digest 00000000000000aa, rank 1 00000000000000bb");
    });
}

TEST(Transport, NamesTheRankThatNeverCameAndStaysBroken) {
    on_ranks(
        3,
        [](const Bootstrap& bootstrap) {
            if (bootstrap.rank == 1) {
                std::this_thread::sleep_for(std::chrono::milliseconds(900));
                return;
            }
            std::string message;
            const auto begin = std::chrono::steady_clock::now();
            EXPECT_EQ(code_of_exchange(*bootstrap.transport, {.step = Step::reduce_shared}, &message), StatusCode::timeout);
            EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
            EXPECT_EQ(message, "rank 1 did not arrive within 300 ms at the reduction of the shared partial");
            EXPECT_NE(code_of_exchange(*bootstrap.transport, {}), StatusCode::ok);
        },
        300);
}

TEST(Transport, EndsEveryWaitWhenARankAborts) {
    if (!test::ranks_are_threads()) GTEST_SKIP() << "processes learn of an abort by their deadline";
    const auto begin = std::chrono::steady_clock::now();
    on_ranks(3, [](const Bootstrap& bootstrap) {
        if (bootstrap.rank == 2) {
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
            bootstrap.transport->abort("enough");
            return;
        }
        std::string message;
        EXPECT_EQ(code_of_exchange(*bootstrap.transport, {}, &message), StatusCode::aborted);
        EXPECT_EQ(message, "rank 2 gave up: enough");
    });
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

TEST(BootstrapTransport, WorksOverNothingButAnAllGather) {
    for (const int world : {1, 2, 4}) {
        on_ranks(world, [](const Bootstrap& bootstrap) {
            const std::shared_ptr<Transport> transport = make_bootstrap_transport(bootstrap);
            exchange_and_check(*transport, Channel::main, 50);
            EXPECT_FALSE(transport->concurrent_channels());
        });
    }
}

TEST(BootstrapTransport, RefusesDifferentCallsOnEveryRank) {
    on_ranks(2, [](const Bootstrap& bootstrap) {
        const std::shared_ptr<Transport> transport = make_bootstrap_transport(bootstrap);
        EXPECT_EQ(code_of_exchange(*transport, {.tokens = bootstrap.rank}), StatusCode::mismatch);
        EXPECT_EQ(code_of_exchange(*transport, {}), StatusCode::aborted);
    });
}

TEST(Bootstrap, GathersBytesInRankOrder) {
    for (const int world : {1, 3, 4}) {
        on_ranks(world, [](const Bootstrap& bootstrap) {
            const int mine = bootstrap.rank * 7;
            std::vector<int> all(static_cast<std::size_t>(bootstrap.world), -1);
            bootstrap.all_gather_bytes(&mine, all.data(), sizeof mine);
            for (int rank = 0; rank < bootstrap.world; ++rank) EXPECT_EQ(all[static_cast<std::size_t>(rank)], rank * 7);
        });
    }
}

TEST(ThreadRanks, ReportTheErrorOfTheRankThatFailed) {
    try {
        run_thread_ranks(3, [](const Bootstrap& bootstrap) {
            if (bootstrap.rank == 2) throw std::runtime_error("rank 2 has had enough");
            int all[3];
            bootstrap.all_gather_bytes(&bootstrap.rank, all, sizeof(int));
        });
        FAIL() << "expected an exception";
    } catch (const std::exception& error) {
        EXPECT_STREQ(error.what(), "rank 2 has had enough");
    }
}

TEST(ThreadRanks, RefuseAWorldThatTheLibraryCannotServe) {
    EXPECT_THROW(thread_ranks(0), Error);
    EXPECT_THROW(thread_ranks(max_world + 1), Error);
}

}  // namespace
}  // namespace latent_moe

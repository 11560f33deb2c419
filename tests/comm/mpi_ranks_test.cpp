// What ranks that are MPI processes promise beside what all ranks do.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "latent_moe/mpi.h"
#include "latent_moe/status.h"

namespace latent_moe {
namespace {

TEST(MpiRanks, DoNotWaitForEverForARankThatDoesNotCome) {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    constexpr int timeout_ms = 300;
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(5 * timeout_ms));
    const auto begin = std::chrono::steady_clock::now();
    try {
        mpi_ranks(MPI_COMM_WORLD, timeout_ms);
        ADD_FAILURE() << "expected a timeout";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), StatusCode::timeout) << error.what();
        // The rank that was late finds the others gone.
        EXPECT_NE(std::string(error.what()).find("did not"), std::string::npos) << error.what();
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(4 * timeout_ms));
    MPI_Barrier(MPI_COMM_WORLD);
}

}  // namespace
}  // namespace latent_moe

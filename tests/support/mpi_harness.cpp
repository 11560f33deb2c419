// Main program of the tests over MPI processes: every process runs every test; one that fails makes the whole run fail.
#include <gtest/gtest.h>
#include <mpi.h>

#include "latent_moe/mpi.h"
#include "support/harness.h"

namespace latent_moe::test {

void on_ranks(int world, const std::function<void(const Bootstrap&)>& body, int timeout_ms) {
    if (!has_ranks(world)) return;
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm part = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, rank < world ? 0 : MPI_UNDEFINED, rank, &part);
    if (part != MPI_COMM_NULL) {
        {
            const Bootstrap bootstrap = mpi_ranks(part, timeout_ms);
            try {
                body(bootstrap);
            } catch (const std::exception& error) {
                ADD_FAILURE() << error.what();
            }
        }
        MPI_Comm_free(&part);
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

bool has_ranks(int world) {
    int size = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    return world <= size;
}

bool ranks_are_threads() {
    return false;
}

}  // namespace latent_moe::test

int main(int argc, char** argv) {
    int level = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    testing::InitGoogleTest(&argc, argv);
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (rank != 0)
        delete testing::UnitTest::GetInstance()->listeners().Release(
            testing::UnitTest::GetInstance()->listeners().default_result_printer());
    int failed = RUN_ALL_TESTS();
    int failed_anywhere = 0;
    MPI_Allreduce(&failed, &failed_anywhere, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    MPI_Finalize();
    return failed_anywhere;
}

// Which table of measured times a context plans by: rank 0's, on every rank.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "context/context_access.h"
#include "context/shipped_tables.h"
#include "context/tune_tables.h"
#include "io/tune_file.h"
#include "support/harness.h"
#include "support/problem.h"

namespace latent_moe {
namespace {

using test::on_ranks;
using test::Problem;

/// A file of rank 0's, which nobody else has.
class RankFile {
public:
    explicit RankFile(const Bootstrap& bootstrap)
        : path_(std::filesystem::temp_directory_path() /
                ("latent-moe-tune-" + std::to_string(::getpid()) + "-" + std::to_string(bootstrap.rank) + ".json")) {}
    RankFile(const RankFile&) = delete;
    RankFile& operator=(const RankFile&) = delete;
    ~RankFile() { std::filesystem::remove(path_); }

    std::string path() const { return path_.string(); }

private:
    std::filesystem::path path_;
};

Options options_of(const Problem& problem, const std::string& table) {
    Options options = problem.context_options();
    options.keep_whole_weights = true;
    options.tune_table = table;
    return options;
}

/// As this machine would measure it if `tail` were the fastest up to 10 tokens and `replicated` beyond.
TuneTable table_for(const Problem& problem, const Bootstrap& bootstrap, Tail tail) {
    const Options options = options_of(problem, "none");
    const Context context = Context::create(problem.shape, bootstrap, options);
    const Capabilities capabilities = ContextAccess::capabilities(context);
    TuneTable table{.key = tune_key(problem.shape, bootstrap.world, options, capabilities.device, capabilities.links),
                    .origin = "made up"};
    table.points[static_cast<std::size_t>(tail)] = {{1, 10}, {10, 20}, {11, 2000}};
    table.points[static_cast<std::size_t>(Tail::replicated)] = {{1, 100}, {11, 200}};
    return table;
}

TEST(ContextWithATable, PlansByRank0sOnEveryRank) {
    const Problem problem(2, 4);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        const RankFile file(bootstrap);
        for (const Tail tail : {Tail::token_parallel, Tail::column_parallel}) {
            const TuneTable table = table_for(problem, bootstrap, tail);
            if (bootstrap.rank == 0) io::write_tune_tables(file.path(), {table});
            const Context context = Context::create(problem.shape, bootstrap,
                                                    options_of(problem, bootstrap.rank == 0 ? file.path() : "/nowhere"));
            EXPECT_EQ(context.plan(10).tail, tail);
            EXPECT_EQ(context.plan(11).tail, Tail::replicated);
            EXPECT_TRUE(context.plan(10).from_table);
            EXPECT_NE(context.plan(10).source.find("made up"), std::string::npos);
            EXPECT_EQ(context.plan(10).expected_us, 20);
        }
    });
}

TEST(ContextWithATable, IgnoresOneOfAnotherMachineAndSaysWhy) {
    const Problem problem(2, 4);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        const RankFile file(bootstrap);
        TuneTable table = table_for(problem, bootstrap, Tail::token_parallel);
        const std::string here = table.key.device;
        table.key.device = "abacus";
        if (bootstrap.rank == 0) io::write_tune_tables(file.path(), {table});
        const Context context = Context::create(problem.shape, bootstrap, options_of(problem, file.path()));
        EXPECT_FALSE(context.plan(10).from_table);
        EXPECT_NE(context.plan(10).source.find("is not used: its device is abacus, here it is " + here), std::string::npos)
            << context.plan(10).source;
    });
}

TEST(ContextWithATable, IgnoresOneOfAnotherVersion) {
    const Problem problem(1, 4);
    on_ranks(1, [&](const Bootstrap& bootstrap) {
        const RankFile file(bootstrap);
        TuneTable table = table_for(problem, bootstrap, Tail::replicated);
        table.key.version = "0.0.9";
        io::write_tune_tables(file.path(), {table});
        const Context context = Context::create(problem.shape, bootstrap, options_of(problem, file.path()));
        EXPECT_NE(context.plan(1).source.find("its version is 0.0.9"), std::string::npos);
    });
}

TEST(ContextWithATable, FailsOnEveryRankWhereRank0sIsBroken) {
    const Problem problem(2, 4);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        const RankFile file(bootstrap);
        if (bootstrap.rank == 0) std::ofstream(file.path()) << "{\"schema\": 1}";
        try {
            Context::create(problem.shape, bootstrap, options_of(problem, file.path()));
            ADD_FAILURE() << "expected an error";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), bootstrap.rank == 0 ? StatusCode::io : StatusCode::aborted);
            EXPECT_NE(std::string(error.what()).find("expected schema latent-moe/tune/1"), std::string::npos)
                << error.what();
        }
    });
}

TEST(ShippedTables, AreSoundAndFoundByTheirKeys) {
    ASSERT_FALSE(shipped_tables().empty());
    for (const ShippedTable& shipped : shipped_tables()) {
        for (const TuneTable& table : io::parse_tune_tables(shipped.text, shipped.name)) {
            const PlanSource found = find_tune_table("auto", table.key);
            ASSERT_TRUE(found.table.has_value()) << shipped.name;
            EXPECT_EQ(*found.table, table);
            EXPECT_EQ(found.note, shipped.name + " (" + table.origin + ")");
        }
    }
    EXPECT_FALSE(find_tune_table("auto", {}).table.has_value());
}

}  // namespace
}  // namespace latent_moe

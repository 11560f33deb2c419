#include "context/tune_tables.h"

#include <fmt/format.h>

#include <vector>

#include "context/shipped_tables.h"
#include "io/tune_file.h"

namespace latent_moe {
namespace {

PlanSource use(const TuneTable& table, const std::string& where) {
    return {.table = table, .note = fmt::format("{} ({})", where, table.origin)};
}

}  // namespace

PlanSource find_tune_table(const std::string& asked, const TuneKey& here) {
    if (asked == "none") return {};
    if (asked == "auto") {
        for (const ShippedTable& shipped : shipped_tables()) {
            for (const TuneTable& table : io::parse_tune_tables(shipped.text, shipped.name)) {
                if (table.key == here) return use(table, shipped.name);
            }
        }
        return {};
    }
    const std::vector<TuneTable> tables = io::read_tune_tables(asked);
    std::string closest;
    for (const TuneTable& table : tables) {
        if (table.key == here) return use(table, asked);
        closest = difference(table.key, here);
    }
    if (tables.empty()) return {.note = fmt::format("{} holds no table", asked)};
    return {.note = tables.size() == 1 ? fmt::format("table {} is not used: {}", asked, closest)
                                       : fmt::format("none of the {} tables of {} is used: of the last, {}", tables.size(),
                                                     asked, closest)};
}

}  // namespace latent_moe
